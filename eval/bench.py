"""`kvquant bench prefill`: what compression adds to reading a prompt.

A prefill is bound by arithmetic (two operations per weight and token, attention beside), while sealing reads each
new key and value a handful of times, so its share should be small and fall with model size. Every repeat runs the
uncompressed cache and each policy in turn, and medians are compared, so that a machine whose speed drifts
slows all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import kvquant

from .errors import InputError
from .models import load
from .options import format_context, parse_contexts, split_list
from .ppl import Progress, policies_of, tokens_of
from .rope import context_limit
from .texts import default_text
from .walk import chunk_bounds, forward

BASELINE = "DynamicCache"


@dataclass(frozen=True)
class BenchRow:
    """One subject in one case. Times in milliseconds, bytes in bytes; what a bench does not measure is None."""

    bench: str
    case: int
    subject: str
    ms_median: float
    baseline: str
    baseline_ms_median: float
    ratio: float
    bytes_moved: int | None = None
    bandwidth_fraction: float | None = None
    peak_bytes: int | None = None
    value: float | None = None
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The row with JSON's own types only."""
        return asdict(self)


@dataclass(frozen=True)
class PrefillOptions:
    """The options of ``kvquant bench prefill`` as typed; see its ``--help``."""

    model: str
    policies: str
    contexts: str
    chunk: int
    repeats: int
    dtype: str


def run_prefill(options: PrefillOptions, say: Callable[[str], None], progress: Progress) -> list[BenchRow]:
    """The rows of every context and policy. Raises `kvquant.KVQuantError` for bad input."""
    contexts = parse_contexts(options.contexts)
    policies = policies_of(split_list("--policies", options.policies))
    loaded = load(options.model, options.dtype, say)
    limit = context_limit(loaded.model.config)
    if limit is not None and contexts[-1] > limit:
        raise InputError(f"--contexts: {contexts[-1]}; allowed: up to the model's limit of {limit} tokens")
    ids = tokens_of(loaded, default_text(), contexts).ids
    rows: list[BenchRow] = []
    for context in contexts:
        runs = options.repeats * (1 + len(policies))
        forwards = chunk_bounds([context], options.chunk) * runs
        with progress(f"{runs} runs of {format_context(context)} tokens", forwards) as tick:
            bench = PrefillBench(loaded.model, ids, policies, options.chunk, options.repeats, tick)
            rows += bench.rows(context)
    return rows


@dataclass
class PrefillBench:
    """Prefill of ``ids`` (int64 ``[n]``) in chunks, under each policy, against the uncompressed cache."""

    model: Any
    ids: Tensor
    policies: Sequence[Any]
    chunk: int
    repeats: int
    tick: Callable[[int, int], None] = lambda start, end: None

    def rows(self, context: int) -> Iterator[BenchRow]:
        """A row per policy for the first ``context`` tokens; ``value`` is the share of the time spent encoding."""
        times: dict[str, list[float]] = {}
        shares: dict[str, list[float]] = {}
        peaks: dict[str, int] = {}
        for _ in range(self.repeats):
            times.setdefault(BASELINE, []).append(self._prefill(DynamicCache(config=self.model.config), context))
            for policy in self.policies:
                cache = kvquant.KVQuantCache.for_model(self.model, policy)
                seconds = self._prefill(cache, context)
                stats = cache.stats()
                times.setdefault(policy.name, []).append(seconds)
                shares.setdefault(policy.name, []).append(stats.encode_seconds / seconds)
                peaks[policy.name] = stats.peak_kv_bytes
        baseline = 1e3 * median(times[BASELINE])
        for policy in self.policies:
            spent = 1e3 * median(times[policy.name])
            yield BenchRow(
                bench="prefill",
                case=context,
                subject=policy.name,
                ms_median=round(spent, 3),
                baseline=BASELINE,
                baseline_ms_median=round(baseline, 3),
                ratio=spent / baseline,
                peak_bytes=peaks[policy.name],
                value=median(shares[policy.name]),
                detail=f"value: share of the time spent encoding; chunks of {self.chunk}, "
                f"medians of {self.repeats} interleaved runs",
            )

    def _prefill(self, cache: Any, context: int) -> float:
        seconds = 0.0
        last = torch.zeros(1, dtype=torch.long)
        with torch.inference_mode():
            for start, end in chunk_bounds([context], self.chunk):
                last[0] = end - start - 1
                seconds += forward(self.model, self.ids[None, start:end], cache, last)[1]
                self.tick(start, end)
        return seconds
