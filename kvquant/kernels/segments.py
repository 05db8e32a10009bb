"""What attention reads: tokens as they are, and runs of blocks as codecs left them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..codecs import Codec, Fields
from ..codecs.affine import Affine


@dataclass(frozen=True, eq=False)
class Dense:
    """``keys`` and ``values`` ``[heads, tokens, dim]`` of any float dtype, each with a dim of its own.

    Where ``causal``, the last tokens are those of the queries, each of which sees them up to its own.
    """

    keys: Tensor
    values: Tensor
    causal: bool = False

    @property
    def heads(self) -> int:
        """How many there are of keys and values."""
        return self.keys.shape[0]

    @property
    def tokens(self) -> int:
        """How many count."""
        return self.keys.shape[1]


@dataclass(frozen=True, eq=False)
class Sealed:
    """n blocks of ``block_tokens`` tokens: fields as `Codec.encode` gives them, of the tokens ``first ≤ t < stop``.

    ``dims`` are those of keys and values. ``start`` is the number, within its row, of the first block's first token.
    ``extra``, if any, is added to q·k before scaling: float32 ``[n, heads, queries, block_tokens]``.
    """

    key: Codec
    value: Codec
    keys: Fields
    values: Fields
    dims: tuple[int, int]
    block_tokens: int
    first: int
    stop: int
    start: int = 0
    extra: Tensor | None = None

    @property
    def heads(self) -> int:
        """How many there are of keys and values."""
        return next(iter(self.keys.values())).shape[1]

    @property
    def tokens(self) -> int:
        """How many count."""
        return self.stop - self.first


Segment = Dense | Sealed


def rotates(codec: Codec | None) -> bool:
    """Whether a codec's codes are of rotated values."""
    return isinstance(codec, Affine) and codec.rotate == "hadamard"


def together(field: Tensor) -> bool:
    """Whether each block's part of a field ``[n, …]`` lies together, wherever the next block's is."""
    return not len(field) or field[0].is_contiguous()


def whole_blocks(field: Tensor) -> Tensor:
    """A field ``[n, …]`` each block's part of which lies `together`: itself, or a copy."""
    return field if together(field) else field.contiguous()


@dataclass
class Memo:
    """What was found out about segments, kept by whoever will ask about the same again."""

    plan: Any = None
