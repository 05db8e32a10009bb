"""Reading a sequence layer after layer, each while what comes after it is fetched.

    visit order   0 1 2 … N−1 0 1 …          (wraps to the next token)
    layer k       what lies on the device, where it lies; the rest in parts of at most a staging buffer each
    ahead         parts of the layers that follow are loaded into buffers as these become free

So what is read takes the device's budget and the ring of staging buffers, however long the history is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ..blocks import BlockKey
from ..errors import StoreError
from .base import ALIGNMENT
from .placement import Chill, Shrink
from .plan import LOST, Part, Plan, Run, Sources
from .residency import DEVICE, HOST, Turn
from .transfer import Buffer, Load, copy_bytes

if TYPE_CHECKING:
    from .reserved import Reserved
    from .tiered import TieredStore


class _Ahead(NamedTuple):
    """A load that was scheduled: of which visit, and which part of it."""

    visit: int
    number: int
    plan: Plan
    load: Load

    def serves(self, visit: int, number: int, plan: Plan) -> bool:
        """Whether it holds a part of a plan; what lies elsewhere by now holds the same bytes."""
        own, part = self.plan.parts[self.number], plan.parts[number]
        return self.visit == visit and (own is part or own.entries == part.entries)


class Stream:
    """A sequence whose ``layers`` are read in turn; the store drops nothing of it until `close`."""

    def __init__(
        self,
        store: TieredStore,
        sequence: int,
        layers: Sequence[int],
        shrink: Shrink | None = None,
        chill: Chill | None = None,
    ) -> None:
        """``shrink`` makes payloads tagged `SHRINKABLE` smaller once the device is full, ``chill`` all for disk."""
        self.store = store
        self.sequence = sequence
        self.layers = tuple(layers)
        self._table: tuple[int, ...] = ()  # of the pass
        self._plans: dict[int, Plan] = {}
        self._first = 0  # the visit that began the pass
        self._ahead: deque[_Ahead] = deque()  # in the order of visits
        self._closed = False
        self._next = (0, 0)  # the visit, and the part of it, that is scheduled next
        turn = Turn({layer: place for place, layer in enumerate(layers)})
        self.turn = store.placement.clock.turns.setdefault(sequence, turn)
        if shrink is not None:
            store.placement.shrinkers[sequence] = shrink
        if chill is not None:
            store.placement.chillers[sequence] = chill
        store.streams.append(self)

    def begin(self, blocks: tuple[int, ...]) -> None:
        """A pass begins that reads ``blocks`` of every layer, in this order; fetching starts."""
        with self.store.lock:
            self._check_open()
            self.store.placement.clock.begin(self.sequence)
            self._first += len(self.layers)
            self._table = blocks
            self._fetch_ahead(self._first)

    def reserve(
        self,
        layer: int,
        blocks: Sequence[int],
        nbytes: int,
        tag: int,
        spare: bool = False,
        first: int = DEVICE,
    ) -> Reserved | None:
        """See `TieredStore.try_reserve`; ``nbytes`` is a multiple of `ALIGNMENT`."""
        if nbytes % ALIGNMENT:
            raise StoreError(f"payloads of {nbytes} bytes; allowed: multiples of {ALIGNMENT}")
        with self.store.lock:
            self._check_open()
            self.turn.position = self.turn.places[layer]
            if nbytes > self.store.ring.nbytes:
                self._make_room_in_buffers(nbytes)
            keys = [BlockKey(self.sequence, layer, block) for block in blocks]
            return self.store.try_reserve(keys, nbytes, tag, spare, first)

    def read(self, layer: int, blocks: tuple[int, ...]) -> Reading:
        """``blocks`` of a layer, which are those of the pass. Raises `StoreError` where one is lost."""
        with self.store.lock:
            self._check_open()
            place = self.layers.index(layer)
            return Reading(self, place, self._first + place, self.plan(place, blocks))

    def close(self) -> None:
        """Read no more. What the sequence has is forgotten with its last stream."""
        with self.store.lock:
            if self._closed:
                return
            self._closed = True
            while self._ahead:
                self.drop_last()
            self.store.changed.notify_all()
            self.store.streams.remove(self)
            if not any(stream.sequence == self.sequence for stream in self.store.streams):
                self.store.placement.end(self.sequence)

    def _check_open(self) -> None:
        self.store.check_open()
        if self._closed:
            raise StoreError(f"the stream of sequence {self.sequence} is closed")

    def drop_last(self) -> bool:
        """Give up the load that is needed last, if there is any; it will be scheduled again."""
        if not self._ahead:
            return False
        last = self._ahead.pop()
        self._next = last.visit, last.number
        self._discard(last)
        return True

    def obtain(self, visit: int, number: int, plan: Plan) -> Load:
        """The load of a part, done."""
        with self.store.lock:
            while self._ahead and self._ahead[0].visit <= visit and not self._ahead[0].serves(visit, number, plan):
                self._discard(self._ahead.popleft())
            if self._ahead and self._ahead[0].visit == visit:
                load = self._ahead.popleft().load
                self.store.counts["prefetch_hits" if load.done else "prefetch_late"] += 1
            else:
                self._next = max(self._next, (visit, number + 1))
                load = self._load(plan, number, self.store.take_buffer(self))
                self.store.counts["prefetch_late"] += self._pays(plan, number)
        try:
            self.store.stall_seconds += load.wait()
            with self.store.lock:
                self._count(plan.parts[number])
        except BaseException:
            self.release(visit, plan, number, load)
            raise
        return load

    def release(self, visit: int, plan: Plan, number: int, load: Load) -> None:
        """A part has been read: its buffer is free, and what comes next is fetched."""
        with self.store.lock:
            self.store.lane.release(load.buffer)
            plan.shelf.readers[HOST] -= 1
            self.store.ring.give_back(load.buffer)
            self.store.placement.sweep()
            self._fetch_ahead(visit)
            self.store.changed.notify_all()

    def plan(self, place: int, table: tuple[int, ...]) -> Plan:
        """How the layer at a place is read now."""
        shelf = self.store.placement.shelf(BlockKey(self.sequence, self.layers[place], 0))
        plan = self._plans.get(place)
        if plan is None or plan.shelf is not shelf or plan.table is not table or plan.version != shelf.version:
            level = self.store.placement.levels[DEVICE]
            plan = self._plans[place] = Plan.of(shelf, table, level, self.store.ring.nbytes)
        return plan

    def _fetch_ahead(self, visit: int) -> None:
        """Have what comes from ``visit`` on fetched, for a whole round at most, into buffers that are free."""
        loads = []
        place, number = max(self._next, (visit, 0))
        while not self._closed and place < visit + len(self.layers):
            try:
                plan = self.plan(place % len(self.layers), self._table)
            except StoreError:  # a block is lost, which `read` will say
                break
            if number >= len(plan.parts):
                place, number = place + 1, 0
                continue
            if not self._pays(plan, number):
                number += 1
                continue
            buffer = self.store.ring.take(leave=1)  # for what is not fetched ahead
            if buffer is None:
                break
            loads.append(self._load(plan, number, buffer))
            self._ahead.append(_Ahead(place, number, plan, loads[-1]))
            number += 1
        self._next = place, number
        if loads:
            self.store.worker.add(loads)

    def _pays(self, plan: Plan, number: int) -> bool:
        """Whether a part is worth being fetched ahead: copies within a CPU's memory take from it what they hide."""
        return self.store.lane.overlaps or bool(self._sources(plan, number).reads)

    def _sources(self, plan: Plan, number: int) -> Sources:
        """Where a part lies now."""
        part, version = plan.parts[number], plan.shelf.version
        if part.sources is None or part.sources.version != version:
            part.sources = Sources.of(part, version, self.store.placement.disk)
        return part.sources

    def _count(self, part: Part) -> None:
        """Count what is read, by where it lay."""
        placement, sources = self.store.placement, part.sources
        level, nbytes = placement.levels[HOST], part.nbytes
        if sources is None:
            return
        if level is not None:
            level.hits += sources.on_host
        on_disk = len(part.entries) - sources.on_host
        placement.disk_hits += on_disk
        placement.moved["host→device"] += sources.on_host * nbytes
        placement.moved["disk→device"] += on_disk * nbytes

    def _load(self, plan: Plan, number: int, buffer: Buffer) -> Load:
        """What copies a part to a buffer from where it lies now, and will until `release`."""
        part, placement, sources = plan.parts[number], self.store.placement, self._sources(plan, number)
        plan.shelf.readers[HOST] += 1
        level = placement.levels[HOST]
        nbytes, overlaps = part.nbytes, self.store.lane.overlaps

        def rows(of: Tensor, first: int, last: int) -> Tensor:
            return of[first * nbytes : last * nbytes]

        def copy(to: Tensor) -> None:
            assert level is not None
            how = copy_bytes if overlaps else Tensor.copy_  # by the worker alone, or by all threads
            for place, first, last in sources.copies:
                how(rows(to, first, last), level.pool.buffer[place : place + (last - first) * nbytes])

        def fill(to: Tensor) -> None:
            if overlaps and sources.copies:
                copy(to)
            for first, last, batch in sources.reads:
                batch.fetch(rows(to, first, last).view(-1, nbytes))

        def finish(to: Tensor) -> None:
            if sources.copies and not overlaps:
                copy(to)
            if not all(batch.good(rows(to, first, last).view(-1, nbytes)) for first, last, batch in sources.reads):
                raise StoreError(LOST)

        return Load(fill, finish, buffer, self.store.lane)

    def _discard(self, ahead: _Ahead) -> None:
        """Give up a load that nobody needs."""
        self.store.counts["prefetch_unused"] += 1
        if not ahead.load.claim():
            with suppress(StoreError):
                ahead.load.wait()
        ahead.plan.shelf.readers[HOST] -= 1
        self.store.ring.give_back(ahead.load.buffer)
        self.store.placement.sweep()

    def _make_room_in_buffers(self, nbytes: int) -> None:
        """Have staging buffers that hold a payload of ``nbytes``."""
        for stream in self.store.streams:
            while stream.drop_last():
                pass
            stream._plans.clear()
        self.store.ring.grow(nbytes)


class Reading:
    """A layer's blocks: in how many ``parts`` they come, and which ``tags`` they have."""

    def __init__(self, stream: Stream, place: int, visit: int, plan: Plan) -> None:
        self._stream, self._place, self._visit, self._plan = stream, place, visit, plan
        self.parts = max(1, len(plan.parts))
        self.tags = {run.tag for run in plan.resident} | {part.entries[0].tag for part in plan.parts}

    def runs(self) -> Iterator[Sequence[Run]]:
        """Part by part, each good until the next is taken; what lies on the device is in the first."""
        stream, plan = self._stream, self._plan
        placement, lock = stream.store.placement, stream.store.lock
        with lock:
            if plan.version != plan.shelf.version:  # another thread has moved something since
                plan = self._plan = stream.plan(self._place, plan.table)
            plan.shelf.readers[DEVICE] += 1
            placement.use(plan.shelf)
            level = placement.levels[DEVICE]
            if level is not None:
                level.hits += sum(len(run.payloads) for run in plan.resident)
        try:
            if not plan.parts:
                yield plan.resident
            for number, part in enumerate(plan.parts):
                load = stream.obtain(self._visit, number, plan)
                try:
                    runs = part.of(load.buffer)
                    yield runs if number else [*plan.resident, *runs]
                    with lock:
                        placement.admit(plan.shelf, part.entries, load.buffer.device, DEVICE)
                finally:
                    stream.release(self._visit, plan, number, load)
        finally:
            with lock:
                plan.shelf.readers[DEVICE] -= 1
                stream.turn.position = self._place + 1
                placement.sweep()
