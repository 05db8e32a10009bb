"""`kvquant bench decode`: the time of one step of a whole model after a long history.

A step for one new token reads every weight once and every key and value of the history once, so it takes at least
their bytes over the memory's bandwidth. Weights are a floor that no cache can change: it is measured as a subject of
its own, the step without a history. What is above it is the history's cost, grows with context and batch, and is what
compression shrinks: int4 reads 0.28 of what bfloat16 does. ``value`` is that cost, and ``bandwidth_fraction`` the
bytes of the history read in that time, as a share of the bandwidth measured between the same turns; where noise is
more than the cost there is none.

Baselines are the `DynamicCache` that `generate` makes, attended as `generate` does (and copied as it grows), and the
best of torch without compression: memory taken once, query heads folded (`dense`).

A policy's step seldom seals: one of ``block_tokens`` steps encodes a block. Steps that do are a row of their own, of
which the plain row's detail gives its share per token. Histories are random (`history`), begin anew in every turn, and
grow by the few steps of that turn only. In a batch rows have different lengths, as requests have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import DynamicCache

from kvquant import KVQuantCache
from kvquant.cache.hooks import why_decoded

from ..errors import InputError, one_line
from ..exact import exact_cache
from ..memory import states_of
from ..models import load
from ..options import format_context, parse_contexts, split_list
from ..ppl import Progress, policies_of
from .dense import FOLDED, folded_attention
from .history import Decoder, Rows, plain_rows, sealing_rows
from .layer import block_bytes
from .load import LoadGuard
from .machine import Reader, check_memory
from .rows import DENSE, READ, Outcome, Result, Tick, best_of, compare, take_turns
from .steps import UNTIMED, Stepper, rewind, share, streamed

STOCK = "DynamicCache"
FLOOR = "no history"


@dataclass(frozen=True)
class DecodeOptions:
    """The options of ``kvquant bench decode`` and ``peers`` as typed; see their ``--help``."""

    model: str
    policies: str
    contexts: str
    batch: int
    dtype: str
    steps: int
    repeats: int


def run_decode(options: DecodeOptions, say: Callable[[str], None], progress: Progress) -> Outcome:
    """The rows of every context, subject and baseline. Raises `kvquant.KVQuantError` for bad input."""
    return run_steps("decode", options, lambda bench: iter(()), say, progress)


More = Callable[["DecodeBench"], Iterator[tuple[str, Callable[[], Stepper]]]]
"""More subjects by name, and what makes each, or raises."""


def run_steps(
    bench: str, options: DecodeOptions, more: More, say: Callable[[str], None], progress: Progress
) -> Outcome:
    """`run_decode` with more subjects."""
    contexts = parse_contexts(options.contexts)
    policies = policies_of(split_list("--policies", options.policies))
    for policy in policies:
        if options.steps + UNTIMED >= policy.block_tokens:
            raise InputError(
                f"--steps: {options.steps}; allowed: up to {policy.block_tokens - UNTIMED - 1}, or {policy.name} "
                "would seal a block"
            )
    loaded = load(options.model, options.dtype, say)
    for context in contexts:
        check_memory(
            "--contexts",
            f"{options.batch} × {format_context(context)}",
            options.batch * steps_memory(loaded.model, policies, context),
        )
    found = Outcome()
    for context in contexts:
        case = DecodeBench(loaded.model, policies, context, options.batch, options.steps, options.repeats)
        title = f"Steps after {format_context(context)} tokens"
        with progress(title, [(0, 1)] * case.ticks(len(list(more(case))))) as tick:
            found.add(case.run(bench, more, say, tick))
    return found


@dataclass
class DecodeBench:
    """Steps of ``model`` after ``batch`` rows of about ``context`` tokens, under each policy and the baselines."""

    model: Any
    policies: Sequence[Any]
    context: int
    batch: int
    steps: int
    repeats: int

    def __post_init__(self) -> None:
        self.decoder = Decoder.of(self.model, self.steps + UNTIMED)
        self.rows = Rows.around(self.context, self.batch)

    def ticks(self, more: int) -> int:
        """How often `run` ticks with so many more subjects."""
        subjects = len(list(self._makers())) + more
        return subjects + self.repeats * (subjects + 1)

    def run(self, bench: str, more: More, say: Callable[[str], None], tick: Tick = lambda start, end: None) -> Outcome:
        """The rows. ``value``: milliseconds that the history costs, which is what is above the step without one."""
        steppers: dict[str, Stepper] = {}
        failed: dict[str, Result] = {}
        for name, make in self._makers():
            steppers[name] = make()
            steppers[name].first()
            tick(0, 1)
        for name, make in more(self):
            try:
                stepper = make()
                stepper.first()
                steppers[name] = stepper
            except Exception as error:  # other people's code: whatever becomes of it, the others go on
                failed[name] = Result(detail=one_line(error))
            tick(0, 1)
        reader = Reader.fastest()
        with LoadGuard(say) as guard:
            turns = {name: stepper.run for name, stepper in steppers.items()} | {READ: reader.run}
            seconds = take_turns(turns, self.repeats, tick)
        read = seconds.pop(READ)
        results = {name: self._result(stepper, seconds[name]) for name, stepper in steppers.items()}
        floor = results[FLOOR]
        results = {name: _above(result, floor, reader.bandwidth(read)) for name, result in results.items()}
        results[DENSE] = best_of({name: results.pop(name) for name in FOLDED})
        for policy in self.policies:
            if sealing := results.get(_sealing(policy)):
                results[policy.name] = _averaged(results[policy.name], sealing, policy.block_tokens)
        rows = compare(bench, self.context, guard.marked(results) | failed, [STOCK, DENSE])
        return Outcome(list(rows), [reader.case(self.context, read, bool(guard.note))])

    def _result(self, stepper: Stepper, seconds: Sequence[float]) -> Result:
        lengths = stepper.rows.lengths
        rows = f"rows of {', '.join(map(str, lengths))} tokens" if len(lengths) > 1 else ""
        found = Result(tuple(seconds), stepper.nbytes or None, None, stepper.peak(), detail=stepper.detail)
        return found.noted(rows)

    def _makers(self) -> Iterator[tuple[str, Callable[[], Stepper]]]:
        """Every subject by name, and what makes it."""
        for policy in self.policies:
            yield (
                policy.name,
                partial(self.streamed, policy, plain_rows(policy, self.rows, UNTIMED + self.steps), self.steps),
            )
            if sealing := sealing_rows(policy, self.rows, UNTIMED):
                yield _sealing(policy), partial(self.streamed, policy, sealing, 1)
        yield FLOOR, self._floor
        yield STOCK, partial(self._dense, DynamicCache(config=self.model.config), nullcontext)
        cache = exact_cache(self.model, self.rows.width + UNTIMED + self.steps)
        for name, way in FOLDED.items():
            yield name, partial(self._dense, cache, partial(folded_attention, self.model, way))

    def streamed(self, policy: Any, rows: Rows, steps: int) -> Stepper:
        """Steps over codes where they lie, with a copy of the cache that shares them."""
        cache = KVQuantCache.for_model(self.model, policy)
        self.decoder.fill(cache, rows)
        with streamed(self.model):
            why = why_decoded(self.model)
        detail = f"decoded for attention: {why}" if why else ""
        attention = partial(streamed, self.model)
        return Stepper(self.decoder, cache, rows, steps, attention, copy.deepcopy, detail=detail)

    def _floor(self) -> Stepper:
        cache = DynamicCache(config=self.model.config)
        return Stepper(self.decoder, cache, Rows((0,) * self.batch), self.steps, fork=copy.deepcopy)

    def _dense(self, cache: DynamicCache, attention: Callable[[], AbstractContextManager[None]]) -> Stepper:
        if not cache.get_seq_length():
            self.decoder.fill(cache, self.rows)
        return Stepper(self.decoder, cache, self.rows, self.steps, attention, share, rewind)


def steps_memory(model: Any, policies: Sequence[Any], context: int) -> int:
    """Bytes a row takes in all caches: two baselines, one copied as it grows; each policy, plain and sealing."""
    states, _ = states_of(model, context)
    dense = sum(keys.nbytes + values.nbytes for keys, values in states.values())
    total = 3 * dense
    for policy in policies:
        for layer in policy.resolve(model).layers:
            if layer.index not in states:
                continue
            sides = states[layer.index]
            size = sum(side.nbytes for side in sides)
            if layer.policy is not None:
                tokens, block = max(1, context), policy.block_tokens
                tail = size * min(tokens, policy.recent_tokens + block) // tokens
                codecs = layer.policy.key, layer.policy.value
                size = tail + tokens // block * sum(
                    block_bytes(codec, side.shape[1], block, side.shape[3], side.dtype)
                    for codec, side in zip(codecs, sides, strict=True)
                )
            total += 2 * size
    return total


def _sealing(policy: Any) -> str:
    return f"{policy.name} (sealing)"


def _above(result: Result, floor: Result, bandwidth: float) -> Result:
    """What is over the step without a history, and how fast the history was read in that time, if it tells anything.

    It does where it is more than the middle half of either's runs differ by.
    """
    assert result.ms is not None
    assert floor.ms is not None
    if not result.bytes_moved:
        return result
    cost = result.ms - floor.ms
    noise = max(high - low for low, high in (result.quartiles, floor.quartiles))
    fraction = result.bytes_moved / (cost / 1e3) / bandwidth if cost > noise else None
    return replace(result, value=round(cost, 6), bandwidth_fraction=fraction)


def _averaged(plain: Result, sealing: Result, block_tokens: int) -> Result:
    assert plain.ms is not None
    assert sealing.ms is not None
    average = plain.ms + (sealing.ms - plain.ms) / block_tokens
    return plain.noted(f"{average:.4g} ms a step with one in {block_tokens} that seals ({sealing.ms:.4g} ms)")
