"""Attention of many queries: history is decoded piece by piece into torch's own fused attention.

With hundreds of queries the products cost more than decoding does. No mask is needed: history is seen by all, and the
new tokens attend to one another in a causal call of their own. Parts are merged by the log of the sums of exponentials
that the fused kernel returns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .coding import decode
from .eager import parts_of
from .segments import Dense, Segment

MIN_QUERIES = 48  # of a head, from where this is the faster way
PIECE_BYTES = 8 << 20  # of decoded keys and values at a time

Partial = tuple[Tensor, Tensor]  # output [heads, queries, dim] and log of the sum of exponentials [heads, queries]


def pays(queries: int) -> bool:
    """Whether so many queries of a head are worth decoding history for."""
    return queries >= MIN_QUERIES


def serves(query: Tensor, segments: Sequence[Segment], dim: int, softcap: float) -> bool:
    """Whether torch's fused kernel can do this attention."""
    return (
        query.device.type == "cpu"
        and pays(query.shape[1])
        and query.shape[2] == dim
        and not softcap
        and all(isinstance(segment, Dense) or segment.extra is None for segment in segments)
    )


def attend(
    query: Tensor, segments: Sequence[Segment], dim: int, *, scale: float, softcap: float = 0.0, news: int = 1
) -> Partial:
    """See `eager.attend`."""
    heads, queries, _ = query.shape
    output = torch.zeros(heads, queries, dim)
    logs = torch.full((heads, queries), -math.inf)
    seen, newest = _apart(segments, news)
    for keys, values in _pieces(seen, query, dim):
        output, logs = _merged((output, logs), _fused(query, keys, values, scale))
    if newest is not None:
        own = newest.tokens
        asking, *found = (torch.unflatten(x, 1, (-1, news))[:, :, news - own :] for x in (query, output, logs))
        keys, values = (
            x.to(query.dtype)[:, None].expand(-1, queries // news, -1, -1) for x in (newest.keys, newest.values)
        )
        part = _fused(asking.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), scale, causal=True)
        merged = _merged((found[0], found[1]), (part[0].view_as(found[0]), part[1].view_as(found[1])))
        for to, x in zip(found, merged, strict=True):
            to.copy_(x)
    return output, logs


def _apart(segments: Sequence[Segment], news: int) -> tuple[list[Segment], Dense | None]:
    """What every query sees, and the new tokens themselves, of which a query sees those up to its own."""
    *seen, last = segments
    if not (isinstance(last, Dense) and last.causal) or news == 1:
        return list(segments), None
    before = last.tokens - min(news, last.tokens)
    old, new = (Dense(last.keys[:, part], last.values[:, part]) for part in (slice(before), slice(before, None)))
    return [*seen, old], new if new.tokens else None


def _pieces(segments: Sequence[Segment], like: Tensor, dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values ``[heads, tokens, dim]`` of all tokens in the dtype of ``like``, as many at once as may be."""
    heads, itemsize = like.shape[0], like.dtype.itemsize
    room = max(1, PIECE_BYTES // (2 * heads * dim * itemsize))
    parts: list[Segment] = []
    for part in parts_of(segments, max(1, room // 4)):
        if parts and sum(each.tokens for each in parts) + part.tokens > room:
            yield _decoded(parts, like, dim)
            parts = []
        parts.append(part)
    if parts:
        yield _decoded(parts, like, dim)


def _decoded(parts: Sequence[Segment], like: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    tokens = sum(part.tokens for part in parts)
    keys, values = like.new_empty(2, like.shape[0], tokens, dim)
    done = 0
    for part in parts:
        for side, to in enumerate((keys[:, done : done + part.tokens], values[:, done : done + part.tokens])):
            if isinstance(part, Dense):
                to.copy_((part.keys, part.values)[side])
                continue
            codec, fields = ((part.key, part.keys), (part.value, part.values))[side]
            blocks = len(next(iter(fields.values())))
            if part.tokens == blocks * part.block_tokens:
                decode(codec, fields, dim, to.dtype, torch.unflatten(to, 1, (blocks, -1)).transpose(0, 1))
            else:
                to.copy_(decode(codec, fields, dim, to.dtype).transpose(0, 1).flatten(1, 2)[:, part.first : part.stop])
        done += part.tokens
    return keys, values


def _fused(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool = False) -> Partial:
    output, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[None], keys[None], values[None], is_causal=causal, scale=scale
    )
    return output[0].float(), logs[0].float()


def _merged(one: Partial, other: Partial) -> Partial:
    """As `eager.merge`, of two."""
    share = torch.sigmoid(other[1] - one[1]).nan_to_num_(0.0)  # neither saw anything
    return torch.lerp(one[0], other[0], share[..., None]), torch.logaddexp(one[1], other[1])
