"""What a layer needs of the place where its sealed blocks are: to put blocks there, and to read them in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

from torch import Tensor

from ..codecs import Codec, Fields
from .rows import Call


@dataclass(frozen=True, eq=False)
class Side:
    """The keys, or the values, of a span: fields that ``codec`` made, and the sequence's first tokens, kept raw."""

    codec: Codec
    fields: Fields
    raw: Tensor | None  # [heads, count, dim]


@dataclass(frozen=True, eq=False)
class Span:
    """Tokens ``first ≤ p < stop`` of a row in blocks that lie one after another, the first ``offset`` tokens in.

    ``memo`` is for what whoever reads it finds out; it is good for as long as the span is.
    """

    first: int
    stop: int
    offset: int
    sides: tuple[Side, Side]
    memo: dict[str, Any] = field(default_factory=dict)


class Portions(NamedTuple):
    """The history of each row of a call, in at least one portion, ``each`` good until the next is taken."""

    several: bool  # whether there may be more than one
    each: Iterable[Sequence[Sequence[Span]]]


@dataclass(frozen=True)
class Cut:
    """What a row seals: blocks of keys and of values as they were, ``[n, heads, block_tokens, dim]``, for ``slots``.

    ``positions`` are those of their tokens, int64 ``[n · block_tokens]``; ``sinks`` of the first block are kept raw.
    """

    slots: tuple[int, ...]
    blocks: tuple[Tensor, Tensor]
    positions: Tensor
    sinks: tuple[int, int]


class Blocks(Protocol):
    """Where a layer's sealed blocks are."""

    def seal(self, call: Call, cuts: Sequence[Cut]) -> None:
        """Take what the rows of a call seal, for its slots."""

    def read(self, call: Call) -> Portions:
        """The history of each row before a call."""

    def nbytes(self) -> int:
        """Bytes allocated on the layer's device; what is stored as it was counts 2 bytes a value."""

    def slot_nbytes(self, slots: Sequence[int]) -> dict[int, int]:
        """Those of each of ``slots``; 0 for a block that is not there."""

    def tensors(self) -> Iterator[Tensor]:
        """What is allocated on the layer's device."""

    def select(self, indices: Sequence[int]) -> None:
        """Row i is what row ``indices[i]`` was; keep nothing of rows that are gone."""

    def clear(self) -> None:
        """Let go of what no cache uses."""

    def fork(self, layer: Any) -> Self:
        """The same blocks for a copy of the layer."""
