"""`kvquant bench prefill`: what compression adds to reading a prompt, or saves of it.

A prefill is bound by arithmetic (two operations per weight and token, attention beside), while sealing reads each
new key and value a handful of times, so its share should be small and fall with model size. Read in chunks, the
history is attended to by each: there kvquant decodes it piece by piece, while transformers copies it as it grows and
repeats its heads. `DynamicCache` reads the same chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvquant import KVQuantCache

from ..errors import InputError
from ..models import load
from ..options import format_context, parse_contexts, split_list
from ..ppl import Progress, policies_of, tokens_of
from ..rope import context_limit
from ..texts import default_text
from ..walk import chunk_bounds, forward
from .decode import STOCK
from .load import LoadGuard
from .rows import Case, Outcome, Result, Tick, compare, take_turns
from .steps import streamed


@dataclass(frozen=True)
class PrefillOptions:
    """The options of ``kvquant bench prefill`` as typed; see its ``--help``."""

    model: str
    policies: str
    contexts: str
    chunk: int
    repeats: int
    dtype: str


def run_prefill(options: PrefillOptions, say: Callable[[str], None], progress: Progress) -> Outcome:
    """The rows of every context and policy. Raises `kvquant.KVQuantError` for bad input."""
    contexts = parse_contexts(options.contexts)
    policies = policies_of(split_list("--policies", options.policies))
    loaded = load(options.model, options.dtype, say)
    limit = context_limit(loaded.model.config)
    if limit is not None and contexts[-1] > limit:
        raise InputError(f"--contexts: {contexts[-1]}; allowed: up to the model's limit of {limit} tokens")
    ids = tokens_of(loaded, default_text(), contexts).ids
    found = Outcome()
    for context in contexts:
        runs = options.repeats * (1 + len(policies))
        forwards = chunk_bounds([context], options.chunk) * runs
        with progress(f"{runs} runs of {format_context(context)} tokens", forwards) as tick:
            bench = PrefillBench(loaded.model, ids, policies, options.chunk, options.repeats, tick)
            found.add(bench.run(context, say))
    return found


@dataclass
class PrefillBench:
    """Prefill of ``ids`` (int64 ``[n]``) in chunks, under each policy, against the uncompressed cache."""

    model: Any
    ids: Tensor
    policies: Sequence[Any]
    chunk: int
    repeats: int
    tick: Tick = lambda start, end: None
    _stats: dict[str, list[tuple[float, int]]] = field(default_factory=dict, init=False)

    def run(self, context: int, say: Callable[[str], None] = lambda line: None) -> Outcome:
        """A row per policy for the first ``context`` tokens; ``value`` is the share of the time spent encoding."""
        self._stats = {policy.name: [] for policy in self.policies}
        turns = {policy.name: partial(self._compressed, policy, context) for policy in self.policies}
        with LoadGuard(say) as guard:
            seconds = take_turns({STOCK: partial(self._stock, context)} | turns, self.repeats)
        results = {STOCK: Result(tuple(seconds.pop(STOCK)))}
        for name, spent in seconds.items():
            shares = sorted(encoding / run for run, (encoding, _) in zip(spent, self._stats[name], strict=True))
            results[name] = Result(
                tuple(spent),
                peak_bytes=max(peak for _, peak in self._stats[name]),
                value=shares[len(shares) // 2],
                detail=f"chunks of {self.chunk}",
            )
        rows = compare("prefill", context, guard.marked(results), [STOCK])
        return Outcome(list(rows), [Case(context, bool(guard.note))])

    def _stock(self, context: int) -> list[float]:
        return [self._seconds(DynamicCache(config=self.model.config), context)]

    def _compressed(self, policy: Any, context: int) -> list[float]:
        cache = KVQuantCache.for_model(self.model, policy)
        with streamed(self.model):
            seconds = self._seconds(cache, context)
        stats = cache.stats()
        self._stats[policy.name].append((stats.encode_seconds, stats.peak_kv_bytes))
        return [seconds]

    def _seconds(self, cache: Any, context: int) -> float:
        seconds = 0.0
        last = torch.zeros(1, dtype=torch.long)
        with torch.inference_mode():
            for start, end in chunk_bounds([context], self.chunk):
                last[0] = end - start - 1
                seconds += forward(self.model, self.ids[None, start:end], cache, last)[1]
                self.tick(start, end)
        return seconds
