"""The best that torch does without compression: the baseline that says whether reading codes pays.

Query heads that share a head of keys and values are folded into rows of one matrix, so that keys are read once and
copied never; transformers' usual path repeats them, or reads them once per query head. Which way of multiplying is
fastest depends on shape, dtype and machine, so a bench runs all and takes the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvquant.geometry import decoder_module
from kvquant.kernels.eager import merge

Folded = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
"""Attention of ``(query, keys, values, mask, scale)``; the query is folded.

Shapes: ``[rows, kv heads, query heads per kv head · new, dim]`` of the query and the output, ``[rows, kv heads,
tokens, dim]`` of keys and values; ``mask`` bool, or to be added, broadcasts to ``[rows, kv heads, queries, tokens]``.
"""

_NAME = "kvquant_bench_folded"
_UNUSUAL = ("softcap", "s_aux", "position_bias", "dropout", "output_attentions")


def fused(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Torch's fused kernel, which has a thread per head of keys at most while queries are few."""
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)


def multiplied(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Two matrix products about a softmax; the scores go through memory."""
    scores = (query * scale) @ keys.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(dim=-1) @ values


def split(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Torch's fused kernel over parts of the tokens, merged, so that few heads keep many threads busy."""
    rows, heads, tokens, _ = keys.shape
    parts = max(2, 2 * torch.get_num_threads() // (rows * heads))
    step = tokens // parts
    if mask is not None or not step:
        return fused(query, keys, values, mask, scale)
    flat = [states.flatten(0, 1) for states in (query, keys, values)]  # [rows · heads, …], a view
    found = []
    whole = parts * step
    for start, stop, count in ((0, whole, parts), (whole, tokens, 1)):
        if start == stop:
            continue
        own = flat[0][:, None].expand(-1, count, -1, -1)
        pieces = (torch.unflatten(states[:, start:stop], 1, (count, -1)) for states in flat[1:])
        outputs, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(own, *pieces, scale=scale)
        found += list(zip(outputs.float().unbind(1), logs.unbind(1), strict=True))
    merged, _ = merge(found)
    return torch.unflatten(merged, 0, (rows, heads)).to(values.dtype)


FOLDED: dict[str, Folded] = {"fused": fused, "two products": multiplied, "fused in parts": split}


@contextmanager
def folded_attention(model: Any, way: Folded) -> Iterator[None]:
    """Have a transformers model decode by ``way``; left as it is where its attention cannot be replaced.

    More than one new token, and whatever a model adds to plain attention, is done as the model did it before.
    """
    decoder: Any = decoder_module(model)
    before = str(decoder.config._attn_implementation)
    if before not in ALL_ATTENTION_FUNCTIONS or not decoder._can_set_attn_implementation():
        yield
        return
    ALL_ATTENTION_FUNCTIONS[_NAME] = partial(_attend, way, ALL_ATTENTION_FUNCTIONS[before])
    ALL_MASK_ATTENTION_FUNCTIONS[_NAME] = ALL_MASK_ATTENTION_FUNCTIONS[before]
    try:
        decoder.set_attn_implementation(_NAME)
        yield
    finally:
        decoder.set_attn_implementation(before)
        del ALL_ATTENTION_FUNCTIONS[_NAME], ALL_MASK_ATTENTION_FUNCTIONS[_NAME]


def _attend(
    way: Folded, plain: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
) -> Any:
    """What transformers calls as a layer's attention."""
    rows, heads, new, dim = query.shape
    if new > 1 or any(given.get(name) for name in _UNUSUAL if name != "s_aux") or given.get("s_aux") is not None:
        return plain(module, query, key, value, mask, **given)
    folded = query.reshape(rows, key.shape[1], -1, dim)
    output = way(folded, key, value, mask, given.get("scaling") or dim**-0.5)
    return output.reshape(rows, heads, 1, -1).transpose(1, 2).contiguous(), None
