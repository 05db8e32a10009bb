"""Codes made, read and attended to by the fastest means at hand; the only place that knows compiled code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import gpu, gpu_attention, native
from .choice import chosen, means, serving
from .coding import decode, encode
from .segments import Dense, Memo, Sealed, Segment
from .wide import pays as decoding_pays

__all__ = [
    "Dense",
    "Memo",
    "Sealed",
    "Segment",
    "attend",
    "attend_rows",
    "decode",
    "decoding_pays",
    "encode",
    "means",
    "serving",
]


def attend(
    query: Tensor, segments: Sequence[Segment], dim: int, *, scale: float, softcap: float = 0.0, news: int = 1
) -> tuple[Tensor, Tensor]:
    """See `eager.attend`, to which the compiled kernels are held."""
    way = chosen(query, segments, dim, softcap)
    return way(query, segments, dim, scale=scale, softcap=softcap, news=news)


def attend_rows(
    query: Tensor,
    rows: Sequence[Sequence[Segment]],
    dim: int,
    *,
    scale: float,
    softcap: float = 0.0,
    news: int = 1,
    sinks: Tensor | None = None,
    memo: Memo | None = None,
) -> Tensor:
    """`attend` for a batch, each of whose rows has segments of its own, its newest tokens last.

    ``query`` is ``[rows, heads, queries, key dim]``; ``sinks`` ``[heads, queries]`` are logits of nothing in the
    softmax's denominator. What is found out about segments is looked up in ``memo`` by whoever asks about the same
    ones again. Returns ``[rows, heads, queries, dim]`` in the query's dtype.
    """
    if gpu.serves(query):
        return gpu_attention.attend_rows(
            query, rows, dim, scale=scale, softcap=softcap, news=news, sinks=sinks, memo=memo
        )[0]
    if chosen(query[0], [segment for row in rows for segment in row], dim, softcap) is native.attend:
        output, logs = native.attend_rows(query, rows, dim, scale=scale, softcap=softcap, news=news)
    else:
        found = [
            attend(asked, row, dim, scale=scale, softcap=softcap, news=news)
            for asked, row in zip(query, rows, strict=True)
        ]
        output, logs = (torch.stack(tensors) for tensors in zip(*found, strict=True))
    if sinks is not None:
        output = output * torch.sigmoid(logs - sinks)[..., None]
    return output.to(query.dtype)
