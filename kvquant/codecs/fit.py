"""Whether what a block holds is what its codec makes: kernels read as much memory as they are told there is."""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import CompressedTensor
from ..errors import shown
from .base import Codec

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Of keys and values."""


def described(x: object) -> str:
    """A tensor as an error names it, or whatever it is."""
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else shown(x)


def misfit(part: CompressedTensor, codec: Codec) -> str:
    """Why a part of a block is not what ``codec`` makes, and what is; or nothing."""
    heads, tokens, dim = part.shape
    if part.codec != codec.name:
        return f"codes of {shown(part.codec)}; allowed: {codec.name}"
    if min(part.shape) < 1 or part.dtype not in DTYPES:
        return f"{part.dtype} {part.shape}; allowed: floats of at least one head and channel"
    layout = codec.layout(heads, tokens, dim, part.dtype)
    for name in sorted({*layout, *part.fields}):
        if name not in layout or name not in part.fields:
            return f"field {shown(name)}; allowed: {', '.join(layout)}, each once"
        (shape, dtype), field = layout[name], part.fields[name]
        widened = dtype == torch.float16 and field.dtype == torch.float32  # see `Codec.encode`
        if tuple(field.shape) != tuple(shape) or (field.dtype != dtype and not widened):
            return f"field {name}: {described(field)}; allowed: {dtype} {tuple(shape)}"
    if (sinks := part.sinks) is not None:
        fits = sinks.dim() == 3 and (sinks.shape[0], sinks.shape[2], sinks.dtype) == (heads, dim, part.dtype)
        if codec.lossless or not fits or not 1 <= sinks.shape[1] <= tokens:
            return f"sinks {described(sinks)}; allowed: {part.dtype} ({heads}, 1 to {tokens}, {dim}) of a lossy codec"
    return ""
