"""bitsandbytes' formats through the library itself: NF4, FP4 and dynamic 8-bit codes, scaled by a group's maximum.

A group is ``group`` consecutive values along tokens of a channel (``axis="channel"``) or along channels of a token,
where a head size that is no multiple of ``group`` lets a group run on into the next token. The codes are symmetric
about zero: a channel far off zero loses its detail, so keys with large biases need another codec. Methods: NF4 and
FP4, QLoRA (Dettmers et al., 2023); dynamic 8-bit, Dettmers et al., 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import CodecError, shown
from .base import Fields, Layout, to_dtype
from .options import read_axis_and_rotation
from .rotation import hadamard, unrotate

GROUPS = {"nf4": (32, 64, 128, 256), "fp4": (32, 64, 128, 256), "dynamic8": (64, 128, 256)}
DEFAULT_GROUP = 64


@dataclass(frozen=True)
class BitsAndBytes:
    """``format`` is ``nf4``, ``fp4`` or ``dynamic8``."""

    format: str
    axis: str
    group: int = DEFAULT_GROUP
    rotate: str = "none"
    lossless: bool = False

    @property
    def name(self) -> str:
        """E.g. ``nf4/token/g64/none``."""
        return f"{self.format}/{self.axis}/g{self.group}/{self.rotate}"

    def layout(self, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Layout:
        """``codes`` uint8 ``[heads, tokens (/ 2 at 4 bits), dim]`` and ``absmax`` float32 ``[heads, groups]``.

        Both lie in the order of the groups, so with 4-bit codes a byte is two neighbours of a group.
        """
        return {
            "codes": ((heads, tokens // self._per_byte, dim), torch.uint8),
            "absmax": ((heads, tokens * dim // self.group), torch.float32),
        }

    def encode(self, blocks: Tensor) -> Fields:
        """See `Codec.encode`."""
        from bitsandbytes import functional

        n, heads, tokens, dim = blocks.shape
        if tokens % self.group:
            raise CodecError(f"group: {self.group} does not divide a block of {tokens} tokens")
        x = blocks.float()
        if self.rotate == "hadamard":
            x = hadamard(x)
        if self.axis == "channel":
            x = x.transpose(2, 3)
        shapes = {name: (n, *shape) for name, (shape, _) in self.layout(heads, tokens, dim, blocks.dtype).items()}
        if not n:  # the library does not take empty tensors
            return {"codes": x.new_empty(shapes["codes"]).byte(), "absmax": x.new_empty(shapes["absmax"])}
        if self.format == "dynamic8":
            codes, state = functional.quantize_blockwise(x.contiguous(), blocksize=self.group)
        else:
            codes, state = functional.quantize_4bit(x.contiguous(), blocksize=self.group, quant_type=self.format)
        return {"codes": codes.reshape(shapes["codes"]), "absmax": state.absmax.reshape(shapes["absmax"])}

    def decode(self, fields: Fields, dim: int, dtype: torch.dtype) -> Tensor:
        """See `Codec.decode`."""
        from bitsandbytes import functional

        n, heads, rows, _ = fields["codes"].shape
        tokens = rows * self._per_byte
        shape = (n, heads, dim, tokens) if self.axis == "channel" else (n, heads, tokens, dim)
        codes, absmax = fields["codes"].contiguous(), fields["absmax"].contiguous().flatten()
        if not n:
            x = absmax.new_empty(shape)
        elif self.format == "dynamic8":
            x = functional.dequantize_blockwise(
                codes, absmax=absmax, code=_dynamic_map(codes.device), blocksize=self.group
            )
        else:
            state = functional.QuantState(
                absmax,
                # On the CPU the library takes a last dimension that is no multiple of the group for rows of it.
                shape=torch.Size((len(absmax), self.group)),
                blocksize=self.group,
                code=functional.get_4bit_type(self.format, device=codes.device),
                quant_type=self.format,
                dtype=torch.float32,
            )
            x = functional.dequantize_4bit(codes.reshape(-1, 1), state)
        x = x.reshape(shape)
        if self.axis == "channel":
            x = x.transpose(2, 3)
        if self.rotate == "hadamard":
            x = unrotate(x)
        return to_dtype(x, dtype)

    @property
    def _per_byte(self) -> int:
        return 1 if self.format == "dynamic8" else 2


@lru_cache(maxsize=16)
def _dynamic_map(device: torch.device) -> Tensor:
    from bitsandbytes import functional

    made: Tensor = functional.create_dynamic_map().to(device)
    return made


def make_bnb(format: str, options: Mapping[str, Any], role: str, block_tokens: int) -> BitsAndBytes:
    """Build from a policy's options ``axis``, ``group`` and ``rotate``."""
    axis, rotate = read_axis_and_rotation(format, options, role)
    sizes = GROUPS[format]
    allowed = [size for size in sizes if block_tokens % size == 0]
    if not allowed:
        raise CodecError(f"codec: {format!r} needs block_tokens that are a multiple of {sizes[0]}, not {block_tokens}")
    group = options.get("group", max([size for size in allowed if size <= DEFAULT_GROUP], default=allowed[0]))
    if type(group) is not int or group not in allowed:
        raise CodecError(f"group: {shown(group)}; allowed: {', '.join(map(str, allowed))}")
    return BitsAndBytes(format, axis, group, rotate)
