"""Attention of a batch whose rows are sequences of their own, over what each holds of its history, where it lies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from torch import Tensor

from ..codecs.fit import described
from ..errors import CodecError, shown
from ..kernels import Dense, Memo, Sealed, Segment, attend_rows, merge


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
    ``[rows, query heads, new, dim]`` in the query's dtype. Raises `CodecError` for shapes that do not fit together.
    """
    kv_heads, found = _fitting(query, segments)
    if dim not in (None, found):
        raise CodecError(f"dim: {shown(dim)}; allowed: {found}, that of the segments' values, or None")
    attention = InPortions(query, False, kv_heads, found, scale=scale, softcap=softcap, sinks=sinks, memo=memo)
    return attention.over([segments])


def _fitting(query: Tensor, segments: Sequence[Sequence[Segment]]) -> tuple[int, int]:
    """Heads of keys and values, and the values' dim, which kernels take on trust. Raises `CodecError`."""
    if not isinstance(query, Tensor) or query.dim() != 4 or not query.numel() or not query.is_floating_point():
        raise CodecError(
            f"query: {described(query)}; allowed: floats [rows, query heads, new, key dim], none of them 0"
        )
    rows, heads, _, key_dim = query.shape
    if len(segments) != rows or not all(segments):
        raise CodecError(
            f"segments of {len(segments)} rows; allowed: one or more of each of the {rows} rows asked for"
        )
    shapes = set()
    for segment in (each for row in segments for each in row):
        if not isinstance(segment, Dense | Sealed):
            raise CodecError(f"segments: {shown(segment)}; allowed: Dense, or what BlockCompressor.segments gives")
        shapes.add((segment.heads, *_dims(segment)))
    kv_heads, found, dim = next(iter(shapes))
    if len(shapes) > 1 or heads % kv_heads or found != key_dim:
        told = ", ".join(
            f"{heads} heads of keys {key} and values {value} wide" for heads, key, value in sorted(shapes)
        )
        raise CodecError(
            f"query {tuple(query.shape)}, segments of {told}; allowed: segments that are alike, of the query's "
            f"key dim, with heads that divide the query's"
        )
    return kv_heads, dim


def _dims(segment: Segment) -> tuple[int, int]:
    """The dims of a segment's keys and values. Raises `CodecError` for tokens that are not."""
    if isinstance(segment, Sealed):
        return segment.dims
    keys, values = segment.keys, segment.values
    fits = all(isinstance(x, Tensor) and x.dim() == 3 and x.numel() and x.is_floating_point() for x in (keys, values))
    if not fits or keys.shape[:2] != values.shape[:2]:
        raise CodecError(
            f"Dense of keys {described(keys)}, values {described(values)}; allowed: floats [heads, tokens, dim], "
            f"equal but for dim, none of them 0"
        )
    return keys.shape[2], values.shape[2]


class InPortions:
    """`streamed_attention` over segments that come in portions, ``several`` or one.

    Each is done with when the next is taken. A row has its newest tokens in the first, and may have nothing in others.
    """

    def __init__(
        self,
        query: Tensor,
        several: bool,
        kv_heads: int,
        dim: int,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        memo: Memo | None = None,
    ) -> None:
        rows, heads, new, key_dim = query.shape
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
