"""Which payload lies where, and what moves when room is short. Whoever calls holds the store's lock.

    device ──(evicted)──> host ──(evicted)──> disk ──(full)──> dropped, unless its sequence is being decoded

What lies in a tier below as well leaves at once; what does not is written there first. Either all of what has to
leave can, or nothing does. Payloads that can be shrunk are, before anything leaves the device.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..blocks import BlockKey
from ..errors import StoreError, StoreFullError
from .base import Key
from .disk import DiskStore
from .memory import Pool
from .residency import DEVICE, HOST, Clock, Entry, Leaving, Shelf

Shrink = Callable[[int, Sequence[int], Tensor], tuple[Tensor, int]]
"""Of a layer's blocks, whose payloads are uint8 ``[n, nbytes]``: smaller ones in their place, and their tag."""

SHRINKABLE = 0  # the tag of payloads that can be shrunk
NAMES = ("device", "host")


@dataclass
class Level:
    """The memory of the device or the host; how many payloads each shelf has there, least recently used first."""

    name: str
    pool: Pool
    shelves: dict[Shelf, int] = field(default_factory=dict)
    hits: int = 0


class Placement:
    """The books of a store."""

    def __init__(self, levels: Sequence[Level | None], disk: DiskStore | None, leaving: Leaving, group: int) -> None:
        """``group``: bytes that are shrunk at once."""
        self.levels = list(levels)
        self.disk = disk
        self.clock = Clock()
        self.evictions: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.disk_hits = 0
        self.shrinkers: dict[int, Shrink] = {}  # by sequence
        self._leaving = leaving
        self._group = group
        self._shelves: dict[tuple[int, int] | bytes, Shelf] = {}
        self._unread: list[tuple[Shelf, Entry]] = []  # deleted while somebody read them
        for key in [] if disk is None else disk.keys():
            if disk is not None and (found := disk.locate(key)):
                shelf, entry = self.shelf(key), Entry(key, *found)
                entry.disk = True
                shelf.entries[_number(key)] = entry

    # -- who is there ----------------------------------------------------------------------------------------------

    def shelf(self, key: Key) -> Shelf:
        """Where a payload belongs, whether there is one or not."""
        name = _name(key)
        if name not in self._shelves:
            sequence, layer = (key.sequence, key.layer) if isinstance(key, BlockKey) else (None, 0)
            self._shelves[name] = Shelf(sequence, layer)
        return self._shelves[name]

    def find(self, key: Key) -> Entry | None:
        """The payload under a key."""
        shelf = self._shelves.get(_name(key))
        return None if shelf is None else shelf.entries.get(_number(key))

    def shelves(self) -> list[Shelf]:
        """All shelves."""
        return list(self._shelves.values())

    def entries(self) -> Iterator[tuple[Shelf, Entry]]:
        """All payloads, and their shelves."""
        for shelf in list(self._shelves.values()):
            for entry in list(shelf.entries.values()):
                yield shelf, entry

    def use(self, shelf: Shelf) -> None:
        """A shelf is the most recently used now."""
        for level in self.levels:
            if level is not None and shelf in level.shelves:
                level.shelves[shelf] = level.shelves.pop(shelf)

    def live(self, shelf: Shelf) -> bool:
        """Whether what is on it may not be dropped."""
        return shelf.sequence in self.clock.turns

    # -- what comes and goes ---------------------------------------------------------------------------------------

    def room(self, which: int, keys: Sequence[Key], nbytes: int, spare: bool) -> list[int] | None:
        """Places for payloads under ``keys`` on device or host: what is free, and unless only that is to ``spare``,
        that of others, which leave; what is under ``keys`` does first.
        """
        level = self.levels[which]
        if level is None:
            return None
        size = level.pool.ranges.size(nbytes)
        if len(keys) * size > level.pool.ranges.capacity:
            return None
        if spare:
            return level.pool.allocate(len(keys), nbytes)
        if len(keys) * size > level.pool.ranges.capacity - level.pool.ranges.used:
            for key in keys:
                if (found := self.find(key)) is not None and not found.pins:
                    self.remove(key)
        return self._places(which, keys, nbytes, shrink=True)

    def admit(self, shelf: Shelf, entries: Sequence[Entry], data: Tensor, which: int) -> None:
        """Keep a copy of what was fetched on device or host, if there is room or others leave for it.

        ``data``: payloads of equal size, one after another. Where not all can be kept, the first are.
        """
        level, nbytes = self.levels[which], entries[0].nbytes
        if level is None or any(entry.places[which] is not None for entry in entries):
            return
        keys = [entry.key for entry in entries]
        places = self._places(which, keys, nbytes, shrink=False)
        if places is None:
            free = (level.pool.ranges.capacity - level.pool.ranges.used) // level.pool.ranges.size(nbytes)
            places = level.pool.allocate(min(free, len(keys)), nbytes) if free else None
        if places is None:
            return
        level.pool.write(places, data[: len(places) * nbytes].view(-1, nbytes))
        shelf.version += 1
        for entry, place in zip(entries, places, strict=False):
            self.settle(shelf, entry, which, place)
            if which == DEVICE and entry.places[HOST] is not None:
                self.vacate(shelf, entry, HOST)

    def check(self) -> list[str]:
        """What of the books does not add up."""
        found = []
        for which, level in enumerate(self.levels):
            if level is None:
                continue
            counted: Counter[Shelf] = Counter()
            taken = []
            unread = [pair for pair in self._unread if pair[1].places[which] is not None]
            for shelf, entry in [*self.entries(), *unread]:
                if (place := entry.places[which]) is not None:
                    counted[shelf] += 1
                    taken.append((place, place + level.pool.ranges.size(entry.nbytes)))
            taken.sort()
            if any(one[1] > other[0] for one, other in itertools.pairwise(taken)):
                found.append(f"{level.name}: payloads overlap")
            held = sum(stop - start for start, stop in taken)
            if held > level.pool.ranges.used or dict(counted) != level.shelves:
                found.append(f"{level.name}: {held} bytes in payloads, {level.pool.ranges.used} accounted for")
        for _, entry in self.entries():
            if not entry.disk and all(place is None for place in entry.places):
                found.append(f"{entry.key!r} is nowhere")
        return found

    def _places(self, which: int, keys: Sequence[Key], nbytes: int, shrink: bool = False) -> list[int] | None:
        level, shelf = self.levels[which], self.shelf(keys[0])
        assert level is not None
        before = shelf.entries.get(_number(keys[0]) - 1)
        near = None if before is None else before.places[which]
        near = None if near is None else near + level.pool.ranges.size(nbytes)

        def allocated() -> list[int] | None:
            return level.pool.allocate(len(keys), nbytes, near)

        places = allocated()
        size = len(keys) * level.pool.ranges.size(nbytes)
        if places is None and shrink and which == DEVICE and self._shrink(len(keys), nbytes):
            places = allocated()
        if places is None and self._evict(which, size, shelf):
            places = allocated()
        return places

    def insert(self, key: Key, nbytes: int, tag: int, which: int, place: int | None) -> None:
        """Enter what was written to a place of device or host, or under its key to the disk."""
        self.remove(key, keep_disk=place is None)
        shelf, entry = self.shelf(key), Entry(key, nbytes, tag)
        shelf.entries[_number(key)] = entry
        if place is None:
            entry.disk = True
        else:
            self.settle(shelf, entry, which, place)

    def settle(self, shelf: Shelf, entry: Entry, which: int, place: int) -> None:
        """Note a copy on device or host."""
        level = self.levels[which]
        assert level is not None
        entry.places[which] = place
        level.shelves[shelf] = level.shelves.pop(shelf, 0) + 1

    def vacate(self, shelf: Shelf, entry: Entry, which: int) -> None:
        """Give up the copy on device or host."""
        level, place = self.levels[which], entry.places[which]
        assert level is not None
        assert place is not None
        level.pool.free([place], entry.nbytes)
        entry.places[which] = None
        shelf.version += 1
        level.shelves[shelf] -= 1
        if not level.shelves[shelf]:
            del level.shelves[shelf]

    def remove(self, key: Key, keep_disk: bool = False) -> bool:
        """Forget what is under a key, once nobody reads it; whether there was anything."""
        entry = self.find(key)
        if entry is None:
            return False
        shelf = self.shelf(key)
        del shelf.entries[_number(key)]
        shelf.version += 1
        if entry.disk and self.disk is not None and not keep_disk:
            self.disk.delete([key])
        entry.disk = False
        self._unread.append((shelf, entry))
        self.sweep()
        return True

    def end(self, sequence: int) -> None:
        """A sequence is decoded no more: forget what it has."""
        self.clock.turns.pop(sequence, None)
        self.shrinkers.pop(sequence, None)
        for shelf, entry in self.entries():
            if shelf.sequence == sequence:
                self.remove(entry.key)

    def sweep(self) -> None:
        """Let go of what was deleted and is no longer read, and of shelves with nothing on them."""
        kept = []
        for shelf, entry in self._unread:
            if entry.pins or any(shelf.readers):
                kept.append((shelf, entry))
                continue
            for which, place in enumerate(entry.places):
                if place is not None:
                    self.vacate(shelf, entry, which)
            name = _name(entry.key)
            if not shelf.entries and self._shelves.get(name) is shelf and not self.live(shelf):
                del self._shelves[name]
        self._unread = kept

    def keep(self, keys: Sequence[Key], payloads: Tensor, tag: int) -> None:
        """Write payloads that are never dropped to the disk."""
        if self.disk is None:
            raise StoreError("the store has no disk; give it disk_budget and disk_path")
        self.disk.write(keys, payloads, tag, kept=True)
        for key in keys:
            self.insert(key, payloads.shape[1], tag, HOST, None)

    def to_disk(self, moving: Sequence[tuple[Shelf, Entry]]) -> bool:
        """Write payloads to the disk as well; False if they do not fit."""
        if self.disk is None:
            return False
        moving = [(shelf, entry) for shelf, entry in moving if not entry.disk]
        for group in _alike(moving):
            payloads = self.gather([entry for _, entry in group])
            try:
                self.disk.write(
                    [entry.key for _, entry in group], payloads, group[0][1].tag, kept=self.live(group[0][0])
                )
            except StoreFullError:
                return False
            for _, entry in group:
                entry.disk = True
            self.moved["host→disk"] += payloads.nbytes
        return True

    def gather(self, entries: Sequence[Entry]) -> Tensor:
        """Payloads of equal size as uint8 ``[n, nbytes]`` on the CPU, where they lie if that is in one stretch."""
        which = DEVICE if entries[0].places[DEVICE] is not None else HOST
        level = self.levels[which]
        assert level is not None
        nbytes = entries[0].nbytes
        runs = level.pool.runs([place for entry in entries if (place := entry.places[which]) is not None], nbytes)
        parts = [level.pool.view(place, count, nbytes) for place, count in runs]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).cpu()

    # -- who leaves ------------------------------------------------------------------------------------------------

    def _evict(self, which: int, nbytes: int, entering: Shelf) -> bool:
        """Have so many bytes free on device or host, together; False, and nothing leaves, if they can't be."""
        level = self.levels[which]
        assert level is not None
        needed = nbytes - (level.pool.ranges.capacity - level.pool.ranges.used)
        victims = []
        for shelf in self._leaving(level.shelves, self.clock, entering):
            if needed <= 0:
                break
            for entry in reversed([] if shelf.readers[which] else [*shelf.entries.values()]):
                if needed > 0 and entry.places[which] is not None and not entry.pins:
                    victims.append((shelf, entry))
                    needed -= level.pool.ranges.size(entry.nbytes)
        return needed <= 0 and self._demote(which, victims)

    def _demote(self, which: int, victims: Sequence[tuple[Shelf, Entry]]) -> bool:
        """Take victims off device or host, once each lies below or may be dropped; all of them, or none."""
        only = [(shelf, entry) for shelf, entry in victims if not entry.disk and entry.places[1 - which] is None]
        lower: list[tuple[Shelf, Entry]] = []
        dropped = set()
        for group in _alike(only):
            if which == DEVICE and self._copy_to_host(group):
                lower += group
            elif not self.to_disk(group):
                if self.live(group[0][0]):
                    for shelf, entry in lower:
                        self.vacate(shelf, entry, HOST)
                    return False
                dropped |= {entry.key for _, entry in group}
        for shelf, entry in victims:
            if entry.key in dropped:
                self.remove(entry.key)
                to = ""
            else:
                self.vacate(shelf, entry, which)
                to = "host" if entry.places[HOST] is not None else "disk" if entry.disk else "device"
            self.evictions[f"{NAMES[which]}→{to}"] += 1
        return True

    def _copy_to_host(self, group: Sequence[tuple[Shelf, Entry]]) -> bool:
        """Copy what leaves the device; False if there is no room."""
        level, entries = self.levels[HOST], [entry for _, entry in group]
        nbytes = entries[0].nbytes
        places = None if level is None else self._places(HOST, [entry.key for entry in entries], nbytes)
        if level is None or places is None:
            return False
        level.pool.write(places, self.gather(entries))
        for (shelf, entry), place in zip(group, places, strict=True):
            self.settle(shelf, entry, HOST, place)
        self.moved["device→host"] += len(group) * nbytes
        return True

    def _shrink(self, count: int, nbytes: int) -> bool:
        """Shrink payloads on the device, those needed last first, until others have room; whether any was."""
        level = self.levels[DEVICE]
        assert level is not None
        shrunk = False
        shelves = [each for each in level.shelves if each.sequence in self.shrinkers and not each.readers[DEVICE]]
        for shelf in sorted(shelves, key=self._distance, reverse=True):
            dense = [
                entry
                for entry in reversed(shelf.entries.values())
                if entry.tag == SHRINKABLE and entry.places[DEVICE] is not None and not entry.pins
            ]
            while dense and not level.pool.holds(count, nbytes):
                some = max(1, self._group // dense[0].nbytes)
                self._shrink_some(shelf, dense[:some])
                shrunk, dense = True, dense[some:]
        return shrunk

    def _shrink_some(self, shelf: Shelf, dense: Sequence[Entry]) -> None:
        level = self.levels[DEVICE]
        assert level is not None
        assert shelf.sequence is not None
        ordered = sorted(dense, key=lambda entry: _number(entry.key))
        places = [entry.places[DEVICE] for entry in ordered]
        payloads = torch.cat([level.pool.view(place, 1, ordered[0].nbytes) for place in places if place is not None])
        smaller, tag = self.shrinkers[shelf.sequence](shelf.layer, [_number(e.key) for e in ordered], payloads)
        for entry in ordered:
            self.vacate(shelf, entry, DEVICE)
            if entry.places[HOST] is not None:
                self.vacate(shelf, entry, HOST)
            entry.nbytes, entry.tag = smaller.shape[1], tag
        found = level.pool.allocate(len(ordered), smaller.shape[1])
        assert found is not None, "what was freed holds less than it did"
        level.pool.write(found, smaller)
        for entry, place in zip(ordered, found, strict=True):
            self.settle(shelf, entry, DEVICE, place)
        self.evictions["dense→compressed"] += len(ordered)

    def _distance(self, shelf: Shelf) -> float:
        found = self.clock.distance(shelf)
        return float("inf") if found is None else found


def _name(key: Key) -> tuple[int, int] | bytes:
    return (key.sequence, key.layer) if isinstance(key, BlockKey) else key


def _number(key: Key) -> int:
    return key.block if isinstance(key, BlockKey) else 0


def _alike(moving: Iterable[tuple[Shelf, Entry]]) -> list[list[tuple[Shelf, Entry]]]:
    """Payloads in groups of one shelf, size and tag, in the order of their blocks."""
    groups: dict[tuple[int, int, int], list[tuple[Shelf, Entry]]] = {}
    for shelf, entry in moving:
        groups.setdefault((id(shelf), entry.nbytes, entry.tag), []).append((shelf, entry))
    return [sorted(group, key=lambda pair: _number(pair[1].key)) for group in groups.values()]
