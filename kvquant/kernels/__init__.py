"""Codes made, read and attended to by the fastest means at hand; the only place that knows compiled code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import gpu, gpu_attention, native
from .choice import chosen, means, serving
from .coding import decode, encode
from .eager import merge
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
    "merge",
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
) -> tuple[Tensor, Tensor]:
    """`attend` for a batch, each of whose rows has segments of its own, its newest tokens last.

    ``query`` is ``[rows, heads, queries, key dim]``; ``sinks`` ``[heads, queries]`` are logits of nothing in the
    softmax's denominator. What is found out about segments is looked up in ``memo`` by whoever asks about the same
    ones again. Returns ``[rows, heads, queries, dim]`` in the query's dtype, and the log of the sum of exponentials
    ``[rows, heads, queries]``, sinks among them.
    """
    if gpu.serves(query):
        return gpu_attention.attend_rows(
            query, rows, dim, scale=scale, softcap=softcap, news=news, sinks=sinks, memo=memo
        )
    if chosen(query[0], [segment for row in rows for segment in row], dim, softcap) is native.attend:
        output, logs = native.attend_rows(query, rows, dim, scale=scale, softcap=softcap, news=news)
    else:
        found = [
            attend(asked, row, dim, scale=scale, softcap=softcap, news=news) if row else _nothing(asked, dim)
            for asked, row in zip(query, rows, strict=True)
        ]
        output, logs = (torch.stack(tensors) for tensors in zip(*found, strict=True))
    if sinks is not None:
        output, logs = output * torch.sigmoid(logs - sinks)[..., None], torch.logaddexp(logs, sinks)
    return output.to(query.dtype), logs


def _nothing(query: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """What attending to no token gives."""
    shape = query.shape[:2]
    return query.new_zeros((*shape, dim)), query.new_full(shape, -torch.inf)
