"""Attention of many queries: history is decoded piece by piece into torch's own fused attention.

With hundreds of queries the products cost more than decoding does. Pieces are merged by the log of the sums of
exponentials that the fused kernel returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .coding import decode
from .eager import merge, parts_of
from .segments import Dense, Segment

MIN_QUERIES = 48  # of a head, from where this is the faster way


def serves(query: Tensor, segments: Sequence[Segment], dim: int, softcap: float) -> bool:
    """Whether torch's fused kernel can do this attention."""
    return (
        query.device.type == "cpu"
        and query.shape[1] >= MIN_QUERIES
        and query.shape[2] == dim
        and not softcap
        and all(isinstance(segment, Dense) or segment.extra is None for segment in segments)
    )


def attend(
    query: Tensor, segments: Sequence[Segment], dim: int, *, scale: float, softcap: float = 0.0, news: int = 1
) -> tuple[Tensor, Tensor]:
    """See `eager.attend`."""
    found = [(query.new_zeros(*query.shape[:2], dim).float(), query.new_full(query.shape[:2], -math.inf).float())]
    for part in parts_of(segments):
        if isinstance(part, Dense):
            keys, values, hidden = part.keys, part.values, None
            if part.causal and news > 1:
                own = torch.arange(query.shape[1]) % news + part.tokens - news
                hidden = torch.arange(part.tokens) > own[:, None]
        else:
            keys, values = (
                decode(codec, fields, dim, query.dtype).transpose(0, 1).flatten(1, 2)[:, part.first : part.stop]
                for codec, fields in ((part.key, part.keys), (part.value, part.values))
            )
            hidden = None
        mask = blind = None
        if hidden is not None:
            blind = hidden.all(dim=1)  # what a query sees that sees nothing here does not count, but must be something
            mask = torch.zeros(hidden.shape, dtype=query.dtype)
            mask.masked_fill_(hidden & ~blind[:, None], -math.inf)
        output, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[None], keys[None].to(query.dtype), values[None].to(query.dtype), attn_mask=mask, scale=scale
        )
        logs = logs[0].float()
        if blind is not None:
            logs = logs.masked_fill(blind, -math.inf)
        found = [merge([*found, (output[0].float(), logs)])]
    return found[0]
