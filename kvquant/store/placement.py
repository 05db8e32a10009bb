"""Which payload lies where, and what moves when room is short. Whoever calls holds the store's lock.

    device ──(evicted)──> host ──(evicted)──> disk ──(full)──> dropped, unless its sequence is being decoded

What lies in a tier below as well leaves at once; what does not is written there first. Either all of what has to
leave can, or nothing does. Payloads that can be shrunk are, before anything leaves the device.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import StoreError
from .base import Key
from .books import Books, Level, number_of
from .disk import DiskStore
from .residency import DEVICE, HOST, Entry, Leaving, Shelf

Shrink = Callable[[int, Sequence[int], Tensor], tuple[Tensor, int]]
"""Of a layer's blocks, whose payloads are uint8 ``[n, nbytes]``: smaller ones in their place, and their tag."""

Chill = Callable[[int, Sequence[int], Tensor, int], tuple[Tensor, int] | None]
"""The same for what goes to disk; given its tag as well, and None if it can't be smaller."""

Made = TypeVar("Made")
SHRINKABLE = 0  # the tag of payloads that can be shrunk
NAMES = ("device", "host")


class Placement(Books):
    """What moves, and what for."""

    def __init__(self, levels: Sequence[Level | None], disk: DiskStore | None, leaving: Leaving, group: int) -> None:
        """``group``: bytes that are shrunk at once."""
        super().__init__(levels, disk)
        self.evictions: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.disk_hits = 0
        self.shrinkers: dict[int, Shrink] = {}  # by sequence
        self.chillers: dict[int, Chill] = {}
        self._leaving = leaving
        self._group = group
        if disk is not None:
            disk.let_go()  # it takes note from now on
        self._in_vain = [-1, -1]  # the pass in which nobody left for what was fetched, for device and host

    # -- what comes and goes ---------------------------------------------------------------------------------------

    def room(self, which: int, keys: Sequence[Key], nbytes: int, spare: bool) -> list[int] | None:
        """Places for payloads under ``keys`` on device or host: what is free, and unless only that is to ``spare``,
        that of others, which leave; what is under ``keys`` does first. None, and nothing leaves, where there is not.
        """
        level = self.levels[which]
        if level is None:
            return None
        size = level.pool.ranges.size(nbytes)
        if len(keys) * size > level.pool.ranges.capacity:
            return None
        if spare:
            return level.pool.allocate(len(keys), nbytes)
        return self._places(which, keys, nbytes, anew=True)

    def admit(self, shelf: Shelf, entries: Sequence[Entry], data: Tensor, which: int) -> None:
        """Keep a copy of what was fetched on device or host, if there is room or others leave for it.

        For a place on the host none is dropped: reading all that a full store holds is to give all of it.

        ``data``: payloads of equal size, one after another. Where not all can be kept, the first are.
        """
        level, nbytes = self.levels[which], entries[0].nbytes
        if level is None or any(entry.places[which] is not None for entry in entries):
            return
        keys = [entry.key for entry in entries]
        places = None
        if self._in_vain[which] != self.clock.now:  # who may leave is looked for once a pass
            places = self._places(which, keys, nbytes, spare=which == HOST)
            if places is None:
                self._in_vain[which] = self.clock.now
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
                self._doubled.append((shelf, entry))
        alone = shelf.readers[HOST] <= 1 and shelf.readers[DEVICE] <= 1  # who brings it reads it
        self.part(shelf if alone else None)

    def _places(
        self, which: int, keys: Sequence[Key], nbytes: int, anew: bool = False, spare: bool = False
    ) -> list[int] | None:
        """``anew``: payloads, in place of what has these keys, for which others shrink; ``spare``: none is dropped."""
        level, shelf = self.levels[which], self.shelf(keys[0])
        assert level is not None
        before = shelf.entries.get(number_of(keys[0]) - 1)
        near = None if before is None else before.places[which]
        near = None if near is None else near + level.pool.ranges.size(nbytes)
        if not level.pool.holds(len(keys), nbytes) and anew and which == DEVICE:
            self._shrink(len(keys), nbytes)
        if not level.pool.holds(len(keys), nbytes) and not self._evict(which, keys, nbytes, anew, spare):
            return None
        return level.pool.allocate(len(keys), nbytes, near)

    def end(self, sequence: int) -> None:
        """A sequence is decoded no more: forget what it has."""
        self.clock.turns.pop(sequence, None)
        self.shrinkers.pop(sequence, None)
        self.chillers.pop(sequence, None)
        for shelf, entry in self.entries():
            if shelf.sequence == sequence:
                self.remove(entry.key)

    def keep(self, keys: Sequence[Key], payloads: Tensor, tag: int) -> None:
        """Write payloads that are never dropped to the disk. Raises `StoreError`."""
        if self.disk is None:
            raise StoreError("the store has no disk; give it disk_budget and disk_path")
        try:
            self.disk.write(keys, payloads, tag, kept=True)
        finally:
            self._note_evicted(self.disk)
        for key in keys:
            self.insert(key, payloads.shape[1], tag, HOST, None)

    def to_disk(self, moving: Sequence[tuple[Shelf, Entry]], spare: bool = False) -> bool:
        """Write payloads to the disk as well; False if they do not fit, ``spare``: without anybody leaving."""
        for group in _alike((shelf, entry) for shelf, entry in moving if not entry.disk):
            payloads, tag = self.gather([entry for _, entry in group]), group[0][1].tag
            keys, kept = [entry.key for _, entry in group], self.live(group[0][0])
            chilled = self._chilled(group[0][0], keys, payloads, tag)
            payloads, tag = chilled or (payloads, tag)
            write = partial(_write, keys=keys, payloads=payloads, tag=tag, kept=kept)
            if spare and self.disk is not None and not self.disk.fits(*payloads.shape):
                return False
            if not self.on_disk(write):
                return False
            for shelf, entry in group:
                if chilled is not None:  # other copies are of what it was
                    for which in [which for which, place in enumerate(entry.places) if place is not None]:
                        self.vacate(shelf, entry, which)
                    entry.nbytes, entry.tag = payloads.shape[1], tag
                entry.disk = True
            self.moved["host→disk"] += payloads.nbytes
        return True

    def _chilled(self, shelf: Shelf, keys: Sequence[Key], payloads: Tensor, tag: int) -> tuple[Tensor, int] | None:
        chill = None if shelf.sequence is None else self.chillers.get(shelf.sequence)
        return None if chill is None else chill(shelf.layer, [number_of(key) for key in keys], payloads, tag)

    def on_disk(self, work: Callable[[DiskStore], Made]) -> Made | None:
        """What ``work`` gives, for which the disk may let others go; None where that fails."""
        disk = self.disk
        if disk is None:
            return None
        try:
            return work(disk)
        except StoreError:  # no room, or a fault, which is counted there
            return None
        finally:
            self._note_evicted(disk)

    def _note_evicted(self, disk: DiskStore) -> None:
        """Take note of what the disk let go since the last time."""
        for key in disk.let_go():
            if (entry := self.find(key)) is not None and entry.disk:
                entry.disk = False
                to = next((name for name, place in zip(NAMES, entry.places, strict=True) if place is not None), "")
                self.evictions[f"disk→{to}"] += 1
                if not to:
                    self.remove(entry.key)

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

    def _evict(self, which: int, keys: Sequence[Key], nbytes: int, anew: bool, spare: bool) -> bool:
        """Have room for payloads on device or host; False, and nothing leaves, if that can't be.

        ``anew``: what has these keys goes first. ``spare``: none is dropped.
        """
        level = self.levels[which]
        assert level is not None
        own = self._unused(keys) if anew else []
        seen = []

        def leaving() -> Iterator[tuple[int, int]]:
            for pair in itertools.chain(own, self._others(level, which, keys[0], own)):
                if (place := pair[1].places[which]) is not None:
                    seen.append(pair)
                    yield place, pair[1].nbytes

        chosen = level.pool.clearing(len(keys), nbytes, leaving())
        if chosen is None:
            return False
        for _, entry in own:
            self.remove(entry.key)
        return self._demote(which, [pair for number in chosen if (pair := seen[number]) not in own], spare)

    def _unused(self, keys: Iterable[Key]) -> list[tuple[Shelf, Entry]]:
        """What has these keys, unless somebody reads it."""
        pairs = [(self.shelf(key), found) for key in keys if (found := self.find(key)) is not None]
        return [(shelf, entry) for shelf, entry in pairs if not entry.pins and not any(shelf.readers)]

    def _others(
        self, level: Level, which: int, entering: Key, own: Sequence[tuple[Shelf, Entry]]
    ) -> Iterator[tuple[Shelf, Entry]]:
        for shelf in self._leaving(level.shelves, self.clock, self.shelf(entering)):
            for entry in reversed([] if shelf.readers[which] else [*shelf.entries.values()]):
                if not entry.pins and not any(entry is other for _, other in own):
                    yield shelf, entry

    def _demote(self, which: int, victims: Sequence[tuple[Shelf, Entry]], spare: bool) -> bool:
        """Take victims off device or host, once each lies below or may be dropped; all of them, or none."""
        for _, entry in victims:
            entry.pins += 1  # copies of them, which may lie below already, are not to make room for the others
        try:
            with ExitStack() as staying:
                dropped = self._copy_down(which, victims, spare, staying)
        finally:
            for _, entry in victims:
                entry.pins -= 1
        if dropped is None:
            return False
        for shelf, entry in victims:
            if entry.key in dropped:
                self.remove(entry.key)
                to = ""
            else:
                if entry.places[which] is not None:
                    self.vacate(shelf, entry, which)
                to = "host" if entry.places[HOST] is not None else "disk" if entry.disk else "device"
            self.evictions[f"{NAMES[which]}→{to}"] += 1
        return True

    def _copy_down(
        self, which: int, victims: Sequence[tuple[Shelf, Entry]], spare: bool, staying: ExitStack
    ) -> set[Key] | None:
        """Have what leaves lie below; those of whom there is no copy then, or None if one must have one.

        Copies on disk do not make room for one another until ``staying`` is left.
        """
        if self.disk is not None:
            staying.enter_context(self.disk.pin([entry.key for _, entry in victims if entry.disk]))
        only = [(shelf, entry) for shelf, entry in victims if not entry.disk and entry.places[1 - which] is None]
        lower: list[tuple[Shelf, Entry]] = []
        dropped = set()
        for group in _alike(only):
            if which == DEVICE and self._copy_to_host(group):
                lower += group
            elif not self.to_disk(group, spare):
                if spare or self.live(group[0][0]):
                    for shelf, entry in lower:
                        self.vacate(shelf, entry, HOST)
                    return None
                dropped |= {entry.key for _, entry in group}
            elif self.disk is not None:
                staying.enter_context(self.disk.pin([entry.key for _, entry in group]))
        return dropped

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

    def _shrink(self, count: int, nbytes: int) -> None:
        """Shrink payloads on the device, those needed last first, until others have room."""
        level = self.levels[DEVICE]
        assert level is not None
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
                dense = dense[some:]

    def _shrink_some(self, shelf: Shelf, dense: Sequence[Entry]) -> None:
        level = self.levels[DEVICE]
        assert level is not None
        assert shelf.sequence is not None
        ordered = sorted(dense, key=lambda entry: number_of(entry.key))
        places = [entry.places[DEVICE] for entry in ordered]
        payloads = torch.cat([level.pool.view(place, 1, ordered[0].nbytes) for place in places if place is not None])
        smaller, tag = self.shrinkers[shelf.sequence](shelf.layer, [number_of(e.key) for e in ordered], payloads)
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


def _write(disk: DiskStore, keys: Sequence[Key], payloads: Tensor, tag: int, kept: bool) -> bool:
    disk.write(keys, payloads, tag, kept=kept)
    return True


def _alike(moving: Iterable[tuple[Shelf, Entry]]) -> list[list[tuple[Shelf, Entry]]]:
    """Payloads in groups of one shelf, size and tag, in the order of their blocks."""
    groups: dict[tuple[int, int, int], list[tuple[Shelf, Entry]]] = {}
    for shelf, entry in moving:
        groups.setdefault((id(shelf), entry.nbytes, entry.tag), []).append((shelf, entry))
    return [sorted(group, key=lambda pair: number_of(pair[1].key)) for group in groups.values()]
