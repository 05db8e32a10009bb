"""Where sealed blocks live: slabs of slots, one slot a block.

A `SlotPool` hands out slot numbers and counts their references; every layer of a cache uses the same number for
the same span of tokens, so one block table per sequence serves all layers. An `Arena` holds the records of one layer
at those slots. Slabs are added and dropped, never reallocated, and consecutive slots lie in contiguous
memory, so a run of blocks is read in one call.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .codecs import Fields
from .records import Record, copy_fields

Encoder = Callable[[Fields | None], Fields]
"""Given the place where fields are to be, if that is one, it returns that, written, or fields to be copied."""

MIN_SLAB = 4  # slots; a slab is at least this, and at least a sixteenth of what its owner has already


def most_slots(blocks: int) -> int:
    """The most slots that a pool may have come to once ``blocks`` are held, in whatever portions they came."""
    if blocks <= MIN_SLAB:
        return MIN_SLAB if blocks else 0
    return blocks - 1 + _slab(1, blocks - 1)  # all but one in slabs that are full, and then the last one


def _slab(missing: int, size: int) -> int:
    """Slots that an owner of ``size`` is given where ``missing`` are needed."""
    return max(missing, MIN_SLAB, size // 16)


@dataclass(frozen=True)
class Run:
    """Consecutive slots of one slab: positions ``first ≤ i < stop`` within slab number ``slab``."""

    slab: int
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


@dataclass
class _Slab:
    """Slots that follow one another, ``used`` of which somebody refers to."""

    slots: range
    owner: int
    used: int = 0


@dataclass
class _Owner:
    """Slots of all its slabs, and those of them that are free, ascending."""

    size: int = 0
    free: list[int] = field(default_factory=list)


class Watcher(Protocol):
    """Keeps something by slot."""

    def drop(self, slots: Sequence[int]) -> None:
        """Forget what belonged to slots that nobody refers to any more."""


class SlotPool:
    """Allocates slots for all layers of a cache and counts who refers to them.

    Each slab has an owner, a number that callers choose, and gives slots to that owner only: what ends together shares
    slabs, and what ends alone leaves none behind, since a slab that nobody refers to is gone, number and all. Copies
    of a cache share the pool and may be used in different threads; ``lock`` guards what they share.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._slabs: dict[int, _Slab] = {}  # by number
        self._starts: list[int] = []  # first slot of each slab, ascending
        self._numbers: list[int] = []  # of these slabs
        self._numbered = itertools.count()
        self._size = 0  # slots there have ever been
        self._owners: dict[int, _Owner] = {}
        self._references: dict[int, int] = {}
        self._watchers: list[weakref.ref[Watcher]] = []
        self._returned: deque[list[int]] = deque()

    def allocate(self, count: int, owner: int = 0) -> list[int]:
        """``count`` slots with one reference each, ascending; adds a slab of just the right size if need be."""
        with self.lock:
            self._settle()
            if not count:
                return []
            own = self._owners.setdefault(owner, _Owner())
            missing = count - len(own.free)
            if missing > 0:
                self._add(own, owner, _slab(missing, own.size))
            slots, own.free = own.free[:count], own.free[count:]
            for slot in slots:
                self._slabs[self._slab_of(slot)].used += 1
            self._references.update(dict.fromkeys(slots, 1))
            return slots

    def retain(self, slots: Sequence[int]) -> None:
        """Count one more reference to each of ``slots``."""
        with self.lock:
            for slot in slots:
                self._references[slot] += 1

    def release(self, slots: Sequence[int]) -> None:
        """Count one reference less; slots nobody refers to may be handed out again, slabs of such slots only go."""
        freed: list[int] = []
        with self.lock:
            for slot in slots:
                self._references[slot] -= 1
                if not self._references[slot]:
                    del self._references[slot]
                    self._free(slot)
                    freed.append(slot)
            for watcher in [ref() for ref in self._watchers] if freed else ():
                if watcher is not None:
                    watcher.drop(freed)

    def watch(self, watcher: Watcher) -> None:
        """Tell ``watcher``, as long as it lives, of slots that nobody refers to any more."""
        with self.lock:
            self._watchers = [*(ref for ref in self._watchers if ref() is not None), weakref.ref(watcher)]

    def give_back(self, slots: list[int]) -> None:
        """Release ``slots`` at the next opportunity: for finalizers, which may run in the midst of anything."""
        self._returned.append(slots)

    def references(self, slot: int) -> int:
        """How many block tables refer to ``slot``."""
        with self.lock:
            self._settle()
            return self._references.get(slot, 0)

    @property
    def live(self) -> int:
        """Slots somebody refers to."""
        with self.lock:
            self._settle()
            return len(self._references)

    def has(self, slab: int) -> bool:
        """Whether somebody refers to a slot of slab number ``slab``."""
        return slab in self._slabs

    def slab_size(self, slab: int) -> int:
        """Slots in slab number ``slab``."""
        return len(self._slabs[slab].slots)

    def slot(self, run: Run) -> int:
        """The first slot of a run."""
        return self._slabs[run.slab].slots[run.first]

    def runs(self, slots: Sequence[int]) -> list[Run]:
        """``slots`` in their order, as the fewest contiguous runs."""
        runs: list[Run] = []
        with self.lock:
            for slot in slots:
                slab = self._slab_of(slot)
                position = slot - self._slabs[slab].slots.start
                if runs and runs[-1].slab == slab and runs[-1].stop == position:
                    runs[-1] = Run(slab, runs[-1].first, position + 1)
                else:
                    runs.append(Run(slab, position, position + 1))
        return runs

    def _settle(self) -> None:
        while self._returned:
            self.release(self._returned.popleft())

    def _slab_of(self, slot: int) -> int:
        return self._numbers[bisect.bisect_right(self._starts, slot) - 1]

    def _add(self, own: _Owner, owner: int, size: int) -> None:
        slots = range(self._size, self._size + size)
        number = next(self._numbered)
        self._slabs[number] = _Slab(slots, owner)
        self._starts.append(slots.start)
        self._numbers.append(number)
        self._size += size
        own.size += size
        own.free.extend(slots)

    def _free(self, slot: int) -> None:
        number = self._slab_of(slot)
        slab = self._slabs[number]
        own = self._owners[slab.owner]
        slab.used -= 1
        bisect.insort(own.free, slot)
        if slab.used:
            return
        place = bisect.bisect_left(own.free, slab.slots.start)
        del own.free[place : place + len(slab.slots)], self._slabs[number]
        own.size -= len(slab.slots)
        if not own.size:
            del self._owners[slab.owner]
        place = bisect.bisect_left(self._starts, slab.slots.start)
        del self._starts[place], self._numbers[place]


class Arena:
    """The records of one layer, by slot, all in the memory of one device."""

    def __init__(self, pool: SlotPool, record: Record, device: torch.device) -> None:
        self._pool = pool
        self._record = record
        self._device = device
        self._slabs: dict[int, tuple[Record, Tensor]] = {}  # records [slots, nbytes]
        self.stamp = 0  # another whenever what `read` gave may be out of date
        pool.watch(self)

    def drop(self, slots: Sequence[int]) -> None:
        """Free slabs that nobody refers to any more."""
        for number in [number for number in list(self._slabs) if not self._pool.has(number)]:
            del self._slabs[number]

    def fill(self, runs: Sequence[Run], encoders: Sequence[Encoder]) -> None:
        """Store what ``encoders``, one for keys and one for values, make of as many blocks as ``runs`` has slots.

        A slab whose field cannot hold the dtype they come in (float16 parameters, float32 needed) is widened first.
        """
        with self._pool.lock:  # or what another thread writes may go to a slab that is being replaced
            for side, encode in enumerate(encoders):
                place = self.read(runs[0])[side] if len(runs) == 1 else None
                fields = encode(place)
                if fields is not place:
                    self._copy(runs, side, fields)

    def read(self, run: Run) -> tuple[Fields, Fields]:
        """Views of the keys' fields of a run, and of the values'."""
        record, slab = self._slab(run.slab)
        return record.views(slab[run.first : run.stop])

    def slabs(self) -> Iterator[tuple[Record, Tensor]]:
        """Everything allocated for slots, in use or not: records of a kind ``[slots, nbytes]``."""
        yield from list(self._slabs.values())

    def records(self) -> Iterator[tuple[int, Record]]:
        """By the number of each slab that is allocated, how its slots lie in memory."""
        yield from ((number, record) for number, (record, _) in self._slabs.items())

    def clear(self) -> None:
        """Free all memory; for a pool without live slots."""
        self._slabs.clear()
        self.stamp += 1

    def _copy(self, runs: Sequence[Run], side: int, fields: Fields) -> None:
        done = 0
        for run in runs:
            record, _ = self._slab(run.slab)
            if (wider := record.widened(side, fields)) is not record:
                self._widen(run.slab, wider)
            copy_fields({name: field[done : done + len(run)] for name, field in fields.items()}, self.read(run)[side])
            done += len(run)

    def _widen(self, number: int, wider: Record) -> None:
        record, slab = self._slabs[number]
        copy = slab.new_empty(len(slab), wider.nbytes)
        for fields, to in zip(record.views(slab), wider.views(copy), strict=True):
            copy_fields(fields, to)
        self._slabs[number] = wider, copy
        self.stamp += 1

    def _slab(self, number: int) -> tuple[Record, Tensor]:
        if number not in self._slabs:
            size = self._pool.slab_size(number), self._record.nbytes
            self._slabs[number] = self._record, torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._slabs[number]
