"""Attention of a batch whose rows are sequences of their own, over what each holds of its history, where it lies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ..kernels import Memo, Segment, attend_rows, merge


def streamed_attention(
    query: Tensor,
    segments: Sequence[Sequence[Segment]],
    dim: int | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    memo: Memo | None = None,
) -> Tensor:
    """Softmax attention over ``segments`` of each row, merged by the log of their sums of exponentials.

    ``query`` is ``[rows, query heads, new, key dim]``; the heads of a segment divide those of the query, each serving
    consecutive ones (grouped, multi-query and multi-head attention alike). New tokens see all of history, and of a
    `Dense` segment that is ``causal`` what is not after them. ``dim`` is that of the values if another than the
    keys', ``scale`` that of q·k (default ``key dim ** -0.5``); of the scaled product ``softcap · tanh(x / softcap)``
    is taken unless ``softcap`` is 0 (Gemma-2), and ``sinks`` ``[query heads]`` are logits of nothing in the softmax's
    denominator (gpt-oss). Whoever asks about the same segments again keeps a ``memo``. Returns
    ``[rows, query heads, new, dim]`` in the query's dtype.
    """
    kv_heads = segments[0][0].heads
    return attend_in_portions(
        query, [segments], False, kv_heads, dim, scale=scale, softcap=softcap, sinks=sinks, memo=memo
    )


def attend_in_portions(
    query: Tensor,
    portions: Iterable[Sequence[Sequence[Segment]]],
    several: bool,
    kv_heads: int,
    dim: int | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    memo: Memo | None = None,
) -> Tensor:
    """`streamed_attention` over segments that come in portions, each done with when the next is taken.

    A row has its newest tokens in the first portion, and may have nothing in others.
    """
    rows, heads, new, key_dim = query.shape
    dim = key_dim if dim is None else dim
    scale = key_dim**-0.5 if scale is None else scale
    folded = query.reshape(rows, kv_heads, heads // kv_heads * new, key_dim)
    if sinks is not None:
        sinks = sinks.float().view(kv_heads, -1, 1).expand(-1, -1, new).reshape(kv_heads, -1)
    asked = folded.float() if several else folded  # what is to be merged is rounded once
    found = None
    for segments in portions:
        part = attend_rows(asked, segments, dim, scale=scale, softcap=softcap, news=new, sinks=sinks, memo=memo)
        found = part if found is None else merge([found, part])
        sinks = memo = None  # the first portion has seen to them
    assert found is not None
    return found[0].to(query.dtype).view(rows, heads, new, dim)
