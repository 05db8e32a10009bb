"""Codes made, read and attended to by the fastest means at hand; the only place that knows compiled code."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import eager, gpu, native, wide
from .coding import decode, encode
from .segments import Dense, Sealed, Segment

__all__ = ["Dense", "Sealed", "Segment", "attend", "decode", "encode"]


def attend(
    query: Tensor, segments: Sequence[Segment], dim: int, *, scale: float, softcap: float = 0.0, news: int = 1
) -> tuple[Tensor, Tensor]:
    """See `eager.attend`, to which the compiled kernels are held."""
    if query.is_cuda:
        chosen = gpu.attend if gpu.serves(query, segments) else eager.attend
    elif wide.serves(query, segments, dim, softcap):
        chosen = wide.attend
    else:
        chosen = native.attend if native.serves(query, segments) else eager.attend
    return chosen(query, segments, dim, scale=scale, softcap=softcap, news=news)
