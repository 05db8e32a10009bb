"""How a compressed cache comes to hold the past that the scored tokens attend to.

``streaming``: every policy's cache reads the whole text, each chunk attending to a past that is compressed already.
What is stored of a token was computed from compressed tokens before it: errors add up, as in a long conversation.

::

    0                                                            c - score_tokens            c
    |  sealed blocks, as the policy stores them  ···  | raw tail | chunk |  ···              |
    |  read, not scored                                                  |  read and scored  |

``prefill``: the uncompressed model reads the text once, whatever the number of policies and contexts. Where the tail
of a context begins, its exact keys and values are compressed by each policy, as a server does that reads a prompt
and evicts it; the tail is scored against that, chunk by chunk, and its own tokens are compressed as they age.

::

    0                          P                     c₁                       P′              c₂
    |  uncompressed, once      |  tail of c₁         |  uncompressed          |  tail of c₂   |
                               ├─ compressed by A ──>┤                        ├─ by A ───────>┤
                               ├─ compressed by B ──>┤                        ├─ by B ───────>┤

Contexts of one sweep score different tokens: the end of each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import DynamicCache

from .exact import branch, exact_cache
from .walk import Lane, chunk_bounds

NewCache = Callable[[Any], Any]  # a policy's empty KVQuantCache
FLOOR_TOKENS = 512


def streaming_lanes(
    policies: Sequence[Any], windows: Mapping[int, Sequence[int]], chunk: int, new: NewCache
) -> dict[tuple[str, int], Lane]:
    """The lane of every (policy, context): one for all contexts of a policy."""
    lanes: dict[tuple[str, int], Lane] = {}
    for policy in policies:
        lane = Lane(policy.name, 0, max(windows), partial(_empty, new, policy))
        lanes |= {(policy.name, context): lane for context in windows}
    return lanes


def prefill_lanes(
    policies: Sequence[Any], windows: Mapping[int, Sequence[int]], chunk: int, new: NewCache
) -> dict[tuple[str, int], Lane]:
    """The lane of every (policy, context), each a cache of its own."""
    lanes = {}
    for context, window in windows.items():
        # The row before the first scored token predicts it.
        first = max(start for start, _ in chunk_bounds(windows, chunk) if start < window[0])
        for policy in policies:
            lanes[policy.name, context] = Lane(policy.name, first, context, partial(_compressed, new, policy))
    return lanes


def floor_lane(
    model: Any, bounds: Sequence[tuple[int, int]], context: int, lanes: Mapping[tuple[str, int], Lane]
) -> Lane:
    """An uncompressed cache that reads with the lanes of a context, in halves of a chunk: what arithmetic changes.

    With a prefix that is there already, it reads no further than `FLOOR_TOKENS` need: enough to tell its size.
    """
    first = min(lane.first for (_, read), lane in lanes.items() if read == context)
    if not first:
        return Lane("", 0, context, lambda _: exact_cache(model, context), parts=2)
    stop = min(end for _, end in bounds if end >= min(first + FLOOR_TOKENS, context))
    return Lane("", first, stop, branch, parts=2)


PROTOCOLS = {"streaming": streaming_lanes, "prefill": prefill_lanes}


def take_over(cache: Any, exact: DynamicCache) -> Any:
    """Fill an empty `KVQuantCache` with what an uncompressed cache of the same model holds; returns it.

    Compressed layers are encoded from the exact keys and values; all others (windows, recurrent states) are copied.
    """
    for index, (layer, resolved) in enumerate(zip(exact.layers, cache.resolved.layers, strict=True)):
        if resolved.policy is not None:
            cache.update(layer.keys, layer.values, index)
        else:
            cache.layers[index] = copy.deepcopy(layer)
    return cache


def _empty(new: NewCache, policy: Any, exact: DynamicCache) -> Any:
    return new(policy)


def _compressed(new: NewCache, policy: Any, exact: DynamicCache) -> Any:
    return take_over(new(policy), exact)
