"""`kvquant bench attention`: one layer's attention of new tokens over a compressed history, by itself.

Per token and head of keys, attention multiplies ``head_dim`` keys and as many values by the numbers of each of
``q_heads / kv_heads`` query heads. In bfloat16 it has to read ``4 · head_dim`` bytes for that, as int4 codes and
their scales ``1.125 · head_dim``. Processors multiply faster than memory delivers, so the best time is that of
reading. Every call reads another copy of the data, of which there are enough to fill the caches twice over, since a
model's other layers would have pushed this one's out.

Baselines are SDPA as transformers calls it for a `DynamicCache`, and the fastest of torch's ways to attend to
contiguous keys and values (`dense`); ``--policies fp16`` shows what kvquant's own kernel makes of uncompressed ones.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvquant.attention.streamed import streamed_attention
from kvquant.kernels import Dense, Segment, serving
from kvquant.testing import relative_rms

from ..errors import InputError
from ..options import parse_contexts, split_list
from ..ppl import Progress, policies_of
from .dense import FOLDED
from .layer import Shape, compressed, copied, copies_of, exact_attention, memory, sealed_tokens, stored_bytes
from .load import LoadGuard
from .machine import Reader, check_memory
from .peak import extra_peak, least
from .rows import DENSE, READ, SDPA, Outcome, Result, Tick, best_of, compare, take_turns

_CALL_SECONDS = 2e-3  # of calls in a run: shorter ones are timed several at once


@dataclass(frozen=True)
class AttentionOptions:
    """The options of ``kvquant bench attention`` as typed; see its ``--help``."""

    kv_heads: int
    q_heads: int
    head_dim: int
    tokens: str
    policies: str
    queries: int
    repeats: int
    dtype: str


def run_attention(options: AttentionOptions, say: Callable[[str], None], progress: Progress) -> Outcome:
    """The rows of every length, way and baseline. Raises `kvquant.KVQuantError` for bad input."""
    if options.q_heads % options.kv_heads:
        raise InputError(f"--q-heads: {options.q_heads}; allowed: a multiple of --kv-heads {options.kv_heads}")
    lengths = parse_contexts(options.tokens, "--tokens")
    policies = policies_of(split_list("--policies", options.policies))
    dtype: torch.dtype = getattr(torch, options.dtype)
    shapes = [
        Shape(options.kv_heads, options.q_heads, options.head_dim, tokens, options.queries, dtype)
        for tokens in lengths
    ]
    for shape in shapes:
        for policy in policies:
            sealed_tokens(policy, shape)
        check_memory("--tokens", str(shape.tokens), memory(policies, shape))
    found = Outcome()
    for shape in shapes:
        bench = AttentionBench(shape, policies, options.repeats)
        with progress(f"Attention over {shape.tokens} tokens", [(0, 1)] * bench.ticks) as tick:
            found.add(bench.run(say, tick))
    return found


@dataclass
class Way:
    """One way to attend, over ``copies`` of the same data, taken in turn. ``detail`` and ``error`` go into its row."""

    attend: Callable[[Any], Tensor]
    copies: Sequence[Any]
    nbytes: int
    error: float
    detail: str = ""
    _calls: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        self._next = itertools.cycle(self.copies)
        self._timed(1)
        self._calls = max(1, math.ceil(_CALL_SECONDS / self._timed(1)))

    def run(self) -> list[float]:
        """The seconds of a call: one, or the mean of as many as take long enough to be timed."""
        return [self._timed(self._calls)]

    def peak(self) -> int | None:
        """See `extra_peak`."""
        return least(lambda: extra_peak(lambda: self.attend(next(self._next))))

    def _timed(self, calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            self.attend(next(self._next))
        return (time.perf_counter() - began) / calls


@dataclass
class AttentionBench:
    """Attention of one shape by each policy, against the baselines of the same run."""

    shape: Shape
    policies: Sequence[Any]
    repeats: int

    @property
    def ticks(self) -> int:
        """How often `run` ticks."""
        ways = len(self.policies) + 1 + len(FOLDED)
        return ways + self.repeats * (ways + 1)

    @torch.inference_mode()
    def run(self, say: Callable[[str], None], tick: Tick = lambda start, end: None) -> Outcome:
        """The rows. ``value``: relative RMS error of the output against float64 attention over the same data.

        kvquant's is taken before the output is rounded to the query's dtype; torch's ways give it rounded only.
        """
        shape = self.shape
        ways = self._ways(tick)
        reader = Reader.fastest()
        with LoadGuard(say) as guard:
            turns = {name: way.run for name, way in ways.items()} | {READ: reader.run}
            seconds = take_turns(turns, self.repeats, tick)
        read = seconds.pop(READ)
        bandwidth = reader.bandwidth(read)
        results = {}
        for name, way in ways.items():
            result = Result(tuple(seconds[name]), way.nbytes, None, way.peak(), way.error, way.detail)
            assert result.ms is not None
            results[name] = replace(result, bandwidth_fraction=way.nbytes / (result.ms / 1e3) / bandwidth)
        results[DENSE] = best_of({name: results.pop(name) for name in FOLDED})
        heads = f"{shape.kv_heads} of {shape.q_heads} heads × {shape.head_dim}"
        results = {name: result.noted(f"{heads}, {shape.queries} new") for name, result in results.items()}
        rows = compare("attention", shape.tokens, guard.marked(results), [SDPA, DENSE])
        return Outcome(list(rows), [reader.case(shape.tokens, read, bool(guard.note))])

    def _ways(self, tick: Tick) -> dict[str, Way]:
        shape = self.shape
        keys, values = (shape.states(shape.kv_heads, shape.tokens) for _ in range(2))
        query = shape.states(shape.q_heads, shape.queries)[None]
        ways: dict[str, Way] = {}
        for policy in self.policies:
            segments = compressed(policy, keys, values, shape)
            size = stored_bytes(segments)
            copies = [segments, *([copied(segment) for segment in segments] for _ in range(1, copies_of(size)))]
            error = self._error(_streamed(query.float())(segments), query, segments)
            detail = serving(shape.folded(query), segments, shape.head_dim)
            ways[policy.name] = Way(_streamed(query), copies, size, error, detail)
            tick(0, 1)
        pair = keys[None], values[None]  # [1, kv_heads, tokens, head_dim]
        pairs = [pair, *((pair[0].clone(), pair[1].clone()) for _ in range(1, copies_of(shape.dense_bytes)))]
        expected = self._expected(query, [Dense(keys, values, causal=True)])
        for name, attend in _dense_ways(query, shape).items():
            error = relative_rms(shape.folded(attend(pair)), expected)
            ways[name] = Way(attend, pairs, shape.dense_bytes, error)
            tick(0, 1)
        return ways

    def _error(self, output: Tensor, query: Tensor, segments: Sequence[Segment]) -> float:
        return relative_rms(self.shape.folded(output), self._expected(query, segments))

    def _expected(self, query: Tensor, segments: Sequence[Segment]) -> Tensor:
        return exact_attention(self.shape.folded(query), segments, self.shape)


def _streamed(query: Tensor) -> Callable[[Sequence[Segment]], Tensor]:
    return lambda segments: streamed_attention(query, [segments])


def _dense_ways(query: Tensor, shape: Shape) -> dict[str, Callable[[Any], Tensor]]:
    """SDPA as transformers calls it, and torch's ways with folded heads, each of one pair of keys and values."""
    group = shape.q_heads // shape.kv_heads
    module = SimpleNamespace(num_key_value_groups=group, is_causal=True)
    mask = shape.mask()
    folded_mask = None if mask is None else mask.repeat(group, 1)
    folded = shape.folded(query)[None]

    def stock(pair: tuple[Tensor, Tensor]) -> Tensor:
        found = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, *pair, None if mask is None else mask[None, None], scaling=shape.scale
        )
        output: Tensor = found[0].transpose(1, 2)
        return output

    def way(name: str) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
        return lambda pair: FOLDED[name](folded, *pair, folded_mask, shape.scale).view(query.shape)

    return {SDPA: stock} | {name: way(name) for name in FOLDED}
