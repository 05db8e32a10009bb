"""Attention of many queries: history is decoded piece by piece into torch's own fused attention.

With hundreds of queries the products cost more than decoding does. Pieces are merged by the log of the sums of
exponentials that the fused kernel returns.
"""

from __future__ import annotations

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
    found = []
    for part in parts_of(segments):
        if isinstance(part, Dense):
            keys, values, mask = part.keys, part.values, None
            if part.causal and news > 1:
                own = torch.arange(query.shape[1]) % news + part.tokens - news
                mask = torch.arange(part.tokens) <= own[:, None]
        else:
            keys, values = (
                decode(codec, fields, dim, query.dtype).transpose(0, 1).flatten(1, 2)[:, part.first : part.stop]
                for codec, fields in ((part.key, part.keys), (part.value, part.values))
            )
            mask = None
        if mask is not None:
            mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
        output, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[None], keys[None].to(query.dtype), values[None].to(query.dtype), attn_mask=mask, scale=scale
        )
        found.append((output[0].float(), logs[0].float()))
        if len(found) == 2:
            found = [merge(found)]
    return found[0]
