"""Storage in the model's own dtype, named ``fp16`` in policies whatever that dtype is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import CodecError
from .base import Fields, Layout


@dataclass(frozen=True)
class Raw:
    """Keeps blocks as they are: lossless for float32, bfloat16 and float16 models alike."""

    name: str = "fp16"
    lossless: bool = True

    def layout(self, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Layout:
        """One field ``data``, ``[heads, tokens, dim]`` in the model's dtype."""
        return {"data": ((heads, tokens, dim), dtype)}

    def encode(self, blocks: Tensor) -> Fields:
        """Return the blocks themselves."""
        return {"data": blocks}

    def decode(self, fields: Fields, dim: int, dtype: torch.dtype) -> Tensor:
        """Return ``[n, heads, tokens, dim]``."""
        return fields["data"].to(dtype)


def make_raw(options: Mapping[str, Any], role: str, block_tokens: int) -> Raw:
    """Build from a policy; takes no options."""
    if options:
        raise CodecError(f"{next(iter(options))}: fp16 stores values as they are and takes no options")
    return Raw()
