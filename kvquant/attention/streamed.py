"""Attention of a batch whose rows are sequences of their own, over what each holds of its history, where it lies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

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
    attention = InPortions(query, False, kv_heads, dim, scale=scale, softcap=softcap, sinks=sinks, memo=memo)
    return attention.over([segments])


class InPortions:
    """`streamed_attention` over segments that come in portions, ``several`` or one.

    Each is done with when the next is taken. A row has its newest tokens in the first, and may have nothing in others.
    """

    def __init__(
        self,
        query: Tensor,
        several: bool,
        kv_heads: int,
        dim: int | None = None,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        memo: Memo | None = None,
    ) -> None:
        rows, heads, new, key_dim = query.shape
        dim = key_dim if dim is None else dim
        scale = key_dim**-0.5 if scale is None else scale
        folded = query.reshape(rows, kv_heads, heads // kv_heads * new, key_dim)
        if sinks is not None:
            sinks = sinks.float().view(kv_heads, -1, 1).expand(-1, -1, new).reshape(kv_heads, -1)
        asked = folded.float() if several else folded  # what is to be merged is rounded once
        self._attend = partial(attend_rows, asked, dim=dim, scale=scale, softcap=softcap, news=new)
        self._once: tuple[Tensor | None, Memo | None] = sinks, memo
        self._shape, self._dtype = (rows, heads, new, dim), query.dtype
        self._found: tuple[Tensor, Tensor] | None = None

    def over(self, portions: Iterable[Sequence[Sequence[Segment]]]) -> Tensor:
        """Attention over all ``portions``; see `result`."""
        for segments in portions:
            self.add(segments)
        return self.result()

    def add(self, segments: Sequence[Sequence[Segment]]) -> None:
        """Attend to a portion: what each row has in it."""
        if self._found is not None and not any(segments):
            return
        sinks, memo = self._once
        self._once = None, None  # the first portion sees to them
        part = self._attend(segments, sinks=sinks, memo=memo)
        self._found = part if self._found is None else merge([self._found, part])

    def result(self) -> Tensor:
        """``[rows, query heads, new, dim]`` in the query's dtype."""
        assert self._found is not None
        return self._found[0].to(self._dtype).view(self._shape)
