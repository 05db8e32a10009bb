"""Attention over segments with everything decoded first: the oracle of all faster ways."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import Dense, Segment


def attend(
    query: Tensor,
    segments: Sequence[Segment],
    dim: int,
    *,
    scale: float,
    softcap: float = 0.0,
    news: int = 1,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """As `kvquant.kernels.attend`, computed in ``dtype``."""
    keys, values, seen, extra = [], [], [], []
    queries = query.shape[1]
    own = torch.arange(queries, device=query.device) % news
    for segment in segments:
        if isinstance(segment, Dense):
            tokens = torch.arange(segment.tokens, device=query.device)
            limit = own + segment.tokens - news if segment.causal else torch.full_like(own, segment.tokens)
            keys.append(segment.keys.to(dtype))
            values.append(segment.values.to(dtype))
            seen.append(tokens <= limit[:, None])
            extra.append(query.new_zeros(query.shape[0], queries, segment.tokens, dtype=dtype))
            continue
        sides = ((segment.key, segment.keys), (segment.value, segment.values))
        both = [
            codec.decode(fields, width, torch.float32).transpose(0, 1).flatten(1, 2).to(dtype)
            for (codec, fields), width in zip(sides, segment.dims, strict=True)
        ]
        tokens = torch.arange(both[0].shape[1], device=query.device)
        keys.append(both[0])
        values.append(both[1])
        seen.append(((tokens >= segment.first) & (tokens < segment.stop)).expand(queries, -1))
        more = both[0].new_zeros(query.shape[0], queries, len(tokens))
        extra.append(more if segment.extra is None else more + segment.extra.permute(1, 2, 0, 3).flatten(2))
    scores = (query.to(dtype) @ torch.cat(keys, dim=1).mT + torch.cat(extra, dim=2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~torch.cat(seen, dim=1), -math.inf)
    return scores.softmax(dim=-1).nan_to_num(0.0) @ torch.cat(values, dim=1), scores.logsumexp(dim=-1)
