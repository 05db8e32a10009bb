"""Codes made, read and attended to by the fastest means at hand; the only place that knows compiled code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import gpu, gpu_attention
from .choice import chosen, means, serving
from .coding import decode, encode
from .segments import Dense, Memo, Sealed, Segment

__all__ = ["Dense", "Memo", "Sealed", "Segment", "attend", "attend_rows", "decode", "encode", "means", "serving"]


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
    outputs = []
    for asked, row in zip(query, rows, strict=True):
        output, logs = attend(asked, row, dim, scale=scale, softcap=softcap, news=news)
        if sinks is not None:
            output = output * torch.sigmoid(logs - sinks)[..., None]
        outputs.append(output[None].to(query.dtype))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
