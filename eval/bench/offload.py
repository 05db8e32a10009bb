"""`kvquant bench offload`: decode steps of a model whose history is compressed and lies mostly off the device.

A step reads all of the history, layer after layer, wherever that lies. What is not on the device is brought there
through a ring of staging buffers, so the device holds its budget, the ring, and the tokens that are not sealed yet,
however long the history is: ``peak_bytes`` is the sum of these as measured, ``value`` its ratio to the bytes of a
`DynamicCache`, ``bytes_moved`` what a step brings to the device from below. Subjects are the policy

    resident       all blocks on the device, no store
    on device      only a share of the blocks, or a budget of bytes, on the device, the rest in the host's memory
    on disk        a share of them on disk, which is read past the system's cache of files where that can be
    when: evict    on a device that has room for all: then blocks stay as they were, and this is what that costs

of which all but the last seal at once. Bytes that are fetched while the model computes cost nothing as long as they
take less time: a step from disk takes at best the longer of a resident step and its bytes over the disk's bandwidth,
which is taken of the store's own file, read from its begin to its end between the same turns. The ratio to that is
told in the detail. Where the CPU is the device, what is copied within its memory takes the time of whoever computes.

Histories are random (`history`) and fed in pieces, as servers feed prompts, so that the first blocks of all layers are
those on the device. Caches are stepped on, never copied, and all grow alike; no step that is timed seals a block.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import DynamicCache

from kvquant import KVQuantCache, TieredStore
from kvquant.codecs import Raw
from kvquant.records import Record
from kvquant.store.placement import SHRINKABLE
from kvquant.store.residency import DEVICE

from ..errors import InputError
from ..memory import in_words
from ..models import load
from ..options import format_context, parse_contexts, parse_size
from ..ppl import Progress, policies_of
from .decode import STOCK, steps_memory
from .disk import forget, payload_files, scratch
from .history import Decoder, Rows, device_bytes, held_bytes, plain_rows
from .load import LoadGuard
from .machine import check_memory
from .rows import Case, Outcome, Result, Tick, compare, take_turns
from .steps import UNTIMED, Stepper, streamed

PIECE = 512  # tokens that caches are fed at once
_READ = 4 << 20  # bytes of the file that are read at once
_SPARE = 64 << 20  # bytes on disk for an index, and for room that is set aside


@dataclass(frozen=True)
class OffloadOptions:
    """The options of ``kvquant bench offload`` as typed; see its ``--help``."""

    model: str
    policy: str
    contexts: str
    device_share: float
    device_budget: str | None
    disk_share: float
    path: str | None
    dtype: str
    steps: int
    repeats: int


def run_offload(options: OffloadOptions, say: Callable[[str], None], progress: Progress) -> Outcome:
    """The rows of every context, subject and baseline. Raises `kvquant.KVQuantError` for bad input."""
    contexts = parse_contexts(options.contexts)
    (policy,) = policies_of([options.policy])
    budget = None if options.device_budget is None else parse_size("--device-budget", options.device_budget)
    if bool(options.disk_share) != (options.path is not None):
        raise InputError("--disk-share and --path go together; allowed: both, or neither")
    if budget is None and options.device_share + options.disk_share > 1:
        raise InputError(
            f"--disk-share: {options.disk_share:g}; allowed: up to {1 - options.device_share:g}, what --device-share "
            "leaves"
        )
    taken = (options.steps + UNTIMED) * (options.repeats + 1)
    if taken >= policy.block_tokens:
        raise InputError(
            f"--steps, --repeats: {options.steps}, {options.repeats}; allowed: (steps + {UNTIMED}) × (repeats + 1) up "
            f"to {policy.block_tokens - 1}, or {policy.name} would seal a block"
        )
    least = policy.recent_tokens + policy.block_tokens
    if contexts[0] < least:
        raise InputError(f"--contexts: of {contexts[0]} {policy.name} compresses none; allowed: from {least}")
    model = load(options.model, options.dtype, say).model
    benches = [OffloadBench(model, policy, context, options, budget) for context in contexts]
    for bench in benches:
        check_memory("--contexts", format_context(bench.context), steps_memory(model, [policy] * 4, bench.context))
    found = Outcome()
    for bench in benches:
        with ExitStack() as stack:
            folder = None
            if options.path is not None:
                needed = 2 * bench.compressed + _SPARE
                folder = stack.enter_context(scratch("--path", options.path, needed))
            title = f"Steps after {format_context(bench.context)} tokens"
            tick = stack.enter_context(progress(title, [(0, 1)] * bench.ticks))
            found.add(bench.run(folder, say, tick))
    return found


@dataclass
class OffloadBench:
    """Steps of ``model`` after ``context`` tokens. ``budget``: the device's in bytes, instead of the share's."""

    model: Any
    policy: Any
    context: int
    options: OffloadOptions
    budget: int | None

    def __post_init__(self) -> None:
        steps = (self.options.steps + UNTIMED) * (self.options.repeats + 1)
        self.decoder = Decoder.of(self.model, steps)
        self.rows = plain_rows(self.policy, Rows((self.context,)), steps)
        blocks = (self.rows.width - self.policy.recent_tokens) // self.policy.block_tokens
        records = list(self._records())
        self.compressed = blocks * sum(record for record, _ in records)
        self._dense = blocks * sum(dense for _, dense in records)
        self._largest = max((record for record, _ in records), default=0)

    @property
    def ticks(self) -> int:
        """How often `run` ticks."""
        disk = 1 if self.options.disk_share else 0
        return 4 + disk + self.options.repeats * (4 + 2 * disk)

    def run(self, folder: Path | None, say: Callable[[str], None], tick: Tick = lambda start, end: None) -> Outcome:
        """The rows; see the module docstring. ``folder`` is where stores may write, if any is to."""
        ways: dict[str, Way] = {}
        with ExitStack() as stack:
            for name, make in self._makers(folder):
                ways[name] = make()
                stack.callback(ways[name].close)
                ways[name].first()
                tick(0, 1)
            turns: dict[str, Callable[[], Sequence[float]]] = {name: way.run for name, way in ways.items()}
            disks = {f"{name}, disk": way for name, way in ways.items() if way.folder is not None}
            turns |= {name: way.read_disk for name, way in disks.items()}
            with LoadGuard(say) as guard:
                seconds = take_turns(turns, self.options.repeats, tick)
            results = {name: way.result(tuple(seconds[name])) for name, way in ways.items()}
            dense = results[STOCK].peak_bytes
            resident = results[self.policy.name].ms
            assert dense is not None
            assert resident is not None
            results = {name: _beside(result, dense) for name, result in results.items()}
            for name, way in disks.items():
                subject = name.removesuffix(", disk")
                results[subject] = results[subject].noted(way.bound(results[subject], resident, seconds[name]))
        rows = compare("offload", self.context, guard.marked(results), [STOCK, self.policy.name])
        return Outcome(list(rows), [Case(self.context, bool(guard.note))])

    def _makers(self, folder: Path | None) -> Iterator[tuple[str, Callable[[], Way]]]:
        """Every subject by name, and what makes it."""
        yield STOCK, self._stock
        name, share = self.policy.name, self.options.disk_share
        device = int(self.options.device_share * self.compressed) if self.budget is None else self.budget
        part = f"{self.options.device_share:.0%}" if self.budget is None else in_words(self.budget)
        yield name, self._way
        yield f"{name}, {part} on device", lambda: self._way(TieredStore(device, self.compressed, device="cpu"))
        if folder is not None:
            host = max(0, self.compressed - device - math.ceil(share * self.compressed))
            host = host if host >= self._largest else 0
            yield f"{name}, {share:.0%} on disk", partial(self._on_disk, device, host, folder / "store")
        yield (
            f"{name}, when: evict",
            lambda: self._way(TieredStore(self._dense, self.compressed, device="cpu"), "evict"),
        )

    def _on_disk(self, device: int, host: int, place: Path) -> Way:
        store = TieredStore(device, host, self.compressed + _SPARE // 4, place, device="cpu")
        return self._way(store, folder=place)

    def _stock(self) -> Way:
        cache = DynamicCache(config=self.model.config)
        self.decoder.fill(cache, self.rows)
        return Way(Stepper(self.decoder, cache, self.rows, self.options.steps, nullcontext))

    def _way(self, store: TieredStore | None = None, when: str = "seal", folder: Path | None = None) -> Way:
        policy = self.policy.model_copy(update={"when": when})
        with ExitStack() as stack:
            if store is not None:
                stack.callback(store.close)
            cache = KVQuantCache.for_model(self.model, policy, store=store)
            self.decoder.fill(cache, self.rows, [PIECE] * -(-self.rows.width // PIECE))
            stack.pop_all()
        stepper = Stepper(self.decoder, cache, self.rows, self.options.steps, partial(streamed, self.model))
        return Way(stepper, store, folder)

    def _records(self) -> Iterator[tuple[int, int]]:
        """Of each layer that is compressed, the bytes of a block: as it is stored, and as it was."""
        for layer in self.policy.resolve(self.model).layers:
            if layer.policy is None or layer.index not in self.decoder.states:
                continue
            shapes = [
                (side.shape[1], self.policy.block_tokens, side.shape[3], side.dtype)
                for side in self.decoder.states[layer.index]
            ]
            key, value = (
                codec.layout(*shape)
                for codec, shape in zip((layer.policy.key, layer.policy.value), shapes, strict=True)
            )
            yield Record.of(key, value).nbytes, Record.of(*(Raw().layout(*shape) for shape in shapes)).nbytes


@dataclass
class Way:
    """Steps with one cache, which it grows by, and what its ``store`` did in those that count.

    ``folder`` is where the store's disk tier is, if it has one.
    """

    stepper: Stepper
    store: TieredStore | None = None
    folder: Path | None = None
    _did: Counter[str] = field(default_factory=Counter, init=False)
    _steps: int = field(default=0, init=False)
    _dropped: bool = field(default=True, init=False)  # whether the system dropped what it was to

    def __post_init__(self) -> None:
        self.stepper.rewind = self._grow

    def first(self) -> None:
        """A turn that does not count."""
        self.stepper.first()

    def run(self) -> list[float]:
        """The seconds of each step."""
        before = self._done()
        seconds = self.stepper.run()
        self._did += self._done() - before
        self._steps += len(seconds) + UNTIMED
        return seconds

    def result(self, seconds: tuple[float, ...]) -> Result:
        """What was found, without the ratio of bytes."""
        cache = self.stepper.cache
        if not isinstance(cache, KVQuantCache):
            return Result(seconds, peak_bytes=held_bytes(cache), detail=self.stepper.detail)
        own = device_bytes(cache)
        if self.store is None:
            return Result(seconds, peak_bytes=own, detail=self.stepper.detail)
        each = {name: count / max(1, self._steps) for name, count in self._did.items()}
        device = sum(tier.used for tier in self.store.stats().tiers if tier.name == "device")
        held = f"{in_words(device)} of blocks, {in_words(self.store.ring.held)} of staging, {in_words(own)} not sealed"
        moved = int(each.get("host", 0)), int(each.get("disk", 0))
        notes = [
            held,
            f"a step brings {in_words(moved[0])} from the host, {in_words(moved[1])} from disk, and waits "
            f"{each.get('stall', 0) / 1e6:.2f} ms",
            f"prefetches in a step: {each.get('hits', 0):.1f} in time, {each.get('late', 0):.1f} late, "
            f"{each.get('unused', 0):.1f} unused",
        ]
        layers = [index for index, layer in enumerate(cache.layers) if hasattr(layer, "held")]
        sequence = next(stream.sequence for stream in self.store.streams)
        tags = [tag for layer in layers for tag in self.store.placed(sequence, layer, DEVICE).values()]
        dense = tags.count(SHRINKABLE)
        if dense:
            notes.append(f"{dense} of {cache.stats().blocks * len(layers)} blocks are as they were")
        if self.folder is not None and not self._dropped:
            notes.append("the disk's bandwidth is the memory's: the system kept the file there")
        return Result(
            seconds,
            bytes_moved=sum(moved),
            peak_bytes=own + device + self.store.ring.held,
            detail=self.stepper.detail,
        ).noted(*notes)

    def bound(self, result: Result, resident: float, seconds: Sequence[float]) -> str:
        """The step's time beside the least that a disk allows which was read in so many seconds."""
        assert self.store is not None
        assert result.ms is not None
        used = self._used()
        bandwidth = used / sorted(seconds)[len(seconds) // 2]
        reading = 1e3 * self._did["disk"] / max(1, self._steps) / bandwidth
        least = max(resident, reading)
        return (
            f"{result.ms / least:.3f} of the longer of a resident step, {resident:.4g} ms, and reading, "
            f"{reading:.4g} ms at {bandwidth / 1e9:.2f} GB/s"
        )

    def read_disk(self) -> list[float]:
        """The seconds in which what the disk tier holds is read as one file."""
        assert self.folder is not None
        (file,) = payload_files(self.folder)
        self._dropped &= forget(file, self._used())
        buffer, left = bytearray(_READ), self._used()
        handle = os.open(file, os.O_RDONLY)
        try:
            began = time.perf_counter()
            while left > 0 and (count := os.readv(handle, [memoryview(buffer)[: min(left, _READ)]])):
                left -= count
            return [time.perf_counter() - began]
        finally:
            os.close(handle)

    def close(self) -> None:
        """Let go of the store, and of what it wrote."""
        if self.store is not None:
            self.store.close()

    def _used(self) -> int:
        assert self.store is not None
        return sum(tier.used for tier in self.store.stats().tiers if tier.name == "disk")

    def _grow(self, cache: Any, steps: int) -> None:
        rows = self.stepper.rows
        self.stepper.rows = Rows(tuple(length + steps for length in rows.lengths))

    def _done(self) -> Counter[str]:
        if self.store is None:
            return Counter()
        stats = self.store.stats()
        return Counter(
            host=stats.moved.get("host→device", 0),
            disk=stats.moved.get("disk→device", 0),
            hits=stats.prefetch_hits,
            late=stats.prefetch_late,
            unused=stats.prefetch_unused,
            stall=round(1e9 * stats.stall_seconds),
        )


def _beside(result: Result, dense: int) -> Result:
    """With the ratio of its bytes to an uncompressed cache's."""
    assert result.peak_bytes is not None
    share = result.peak_bytes / dense
    told = f"{in_words(result.peak_bytes)} on the device, {share:.3f} of {STOCK}'s"
    return replace(result, value=share, detail=told).noted(result.detail)
