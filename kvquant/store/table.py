"""Which payload has which room of the slab, and who leaves to make some. No input or output, and no locks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from ..blocks import BlockKey
from ..errors import StoreError, StoreFullError, shown
from .allocator import Allocator
from .base import ALIGNMENT, Key, key_bytes
from .slab import Entry, seed_of

EXTENT = 1 << 20  # bytes that a layer's blocks have to themselves, as long as there is room


class Table:
    """Entries by key, least recently used first.

    Room is an entry's, or ``aside``: reserved and not published yet, or of what is gone and still pinned. ``changed``
    are the keys whose rows the index must learn of, with None for those that left.
    """

    def __init__(self, capacity: int) -> None:
        self.entries: OrderedDict[Key, Entry] = OrderedDict()
        self.allocator = Allocator(capacity, ALIGNMENT)
        self.aside: dict[int, Entry] = {}
        self.changed: dict[bytes, Entry | None] = {}
        self.evicted = self._turn = 0
        self.let_go: list[Key] | None = None  # what left to make room, where somebody asks
        self._sequences: dict[int, dict[BlockKey, None]] = {}

    def reserve(
        self, keys: Sequence[Key], nbytes: int, tag: int, kept: bool, grow: Callable[[int], None]
    ) -> list[Entry]:
        """Room for every key, in as few ranges as can be, seen by nobody; `StoreError`, and nothing changed, if not.

        Where there is none beside them, what has these keys leaves first, then the least recently used. ``grow`` is
        told how far the slab must reach.
        """
        seeds = [seed_of(key, tag) for key in keys]
        if len(set(keys)) < len(keys):
            raise StoreError(f"keys {shown(list(keys))}: one is given twice; allowed: each once")
        leaving = self._free(keys, nbytes)
        places: list[int] = []
        try:
            self._place(keys, nbytes, places)
            grow(max(places, default=0) + self.allocator.size(nbytes))
        except BaseException:
            for at in places:
                self.allocator.free(at, nbytes)
            for entry in leaving:
                self.allocator.claim(entry.at, entry.nbytes)
            raise
        replaced = set(keys)
        for entry in leaving:
            self._forget(entry)
            self.evicted += entry.key not in replaced
            if self.let_go is not None:
                self.let_go.append(entry.key)
        reserved = [
            Entry(key, at, nbytes, tag, seed, kept=kept) for key, at, seed in zip(keys, places, seeds, strict=True)
        ]
        self.aside.update((entry.at, entry) for entry in reserved)
        return reserved

    def fits(self, count: int, nbytes: int) -> bool:
        """Whether there is room without anybody leaving."""
        return self.allocator.slots(nbytes) >= count

    def publish(self, entries: Iterable[Entry]) -> None:
        """Let reserved entries be found, instead of what had their keys."""
        for entry in entries:
            self.remove(entry.key)
            entry.turn = self._turn
            del self.aside[entry.at]
            self.add(entry)
            if isinstance(entry.key, bytes):
                self.changed[entry.key] = entry

    def add(self, entry: Entry) -> None:
        """Let an entry be found whose room is taken."""
        self.entries[entry.key] = entry
        self._turn = max(self._turn, entry.turn + 1)
        if isinstance(entry.key, BlockKey):
            self._sequences.setdefault(entry.key.sequence, {})[entry.key] = None

    def give_back(self, entries: Iterable[Entry]) -> None:
        """Free the room of reserved entries; those published stay."""
        for entry in entries:
            if self.aside.get(entry.at) is entry:
                self._free_aside(entry)

    def remove(self, key: Key) -> bool:
        """Forget a key; whether it was there. Its room is free at once, or with its last pin."""
        entry = self.entries.get(key)
        if entry is None:
            return False
        self._forget(entry)
        if entry.pins:
            entry.gone = True
            self.aside[entry.at] = entry
        else:
            self.allocator.free(entry.at, entry.nbytes)
        return True

    def drop(self, entry: Entry | None) -> None:
        """Forget an entry, unless its key has another by now."""
        if entry and self.entries.get(entry.key) is entry:
            self.remove(entry.key)

    def find(self, key: Key) -> Entry | None:
        """What is there under a key. Raises `StoreError` for what is no key."""
        try:
            entry = self.entries.get(key)
        except TypeError:  # it cannot be hashed
            entry = None
        if entry is None:
            key_bytes(key)
        return entry

    def pin(self, keys: Iterable[Key]) -> list[Entry | None]:
        """Have what is there keep its room, most recently used from now on."""
        found = [self.find(key) for key in keys]  # all, before the first has a pin
        for entry in found:
            if entry is not None:
                entry.pins += 1
                self.entries.move_to_end(entry.key)
        return found

    def unpin(self, entries: Iterable[Entry | None]) -> None:
        """Take back one pin of each."""
        for entry in entries:
            if entry is not None:
                entry.pins -= 1
                if entry.gone and not entry.pins:
                    self._free_aside(entry)

    def pinned(self) -> int:
        """How many payloads have pins."""
        return sum(entry.pins > 0 for entry in chain(self.entries.values(), self.aside.values()))

    def sequence(self, sequence: int) -> list[BlockKey]:
        """The keys of a sequence."""
        return list(self._sequences.get(sequence, ()))

    def end(self) -> int:
        """Where the last room that is taken ends."""
        taken = chain(self.entries.values(), self.aside.values())
        return max((entry.at + self.allocator.size(entry.nbytes) for entry in taken), default=0)

    def check(self) -> list[str]:
        """What does not add up, a line each."""
        taken = sorted(chain(self.entries.values(), self.aside.values()), key=lambda entry: entry.at)
        ends = [entry.at + self.allocator.size(entry.nbytes) for entry in taken]
        lines = [
            f"{shown(after.key)} at {after.at} begins within {shown(before.key)}, which ends at {end}"
            for before, end, after in zip(taken, ends, taken[1:], strict=False)
            if end > after.at
        ]
        total = sum(end - entry.at for end, entry in zip(ends, taken, strict=True))
        if total != self.allocator.used:
            lines.append(f"payloads take {total} bytes, the allocator counts {self.allocator.used}")
        if ends and ends[-1] > self.allocator.capacity:
            lines.append(f"payloads reach to byte {ends[-1]}, the budget to {self.allocator.capacity}")
        grouped = sum(len(keys) for keys in self._sequences.values())
        if grouped != sum(isinstance(key, BlockKey) for key in self.entries):
            lines.append(f"{grouped} blocks are filed by sequence, not as many as there are")
        return lines

    def _free(self, keys: Sequence[Key], nbytes: int) -> list[Entry]:
        """Free the room of as few entries as it takes, which are still found; none and `StoreFullError` if in vain."""
        need, size, slots = len(keys), self.allocator.size(nbytes), self.allocator.slots(nbytes)
        if slots >= need:
            return []
        replaced = set(keys)
        own = (self.entries[key] for key in keys if key in self.entries)
        others = (entry for key, entry in self.entries.items() if not entry.kept and key not in replaced)
        leaving: list[Entry] = []
        for entry in chain(own, others) if need * size <= self.allocator.capacity else ():
            if entry.pins:
                continue
            start, end = self.allocator.free(entry.at, entry.nbytes)
            stop = entry.at + self.allocator.size(entry.nbytes)
            slots += (end - start) // size - (entry.at - start) // size - (end - stop) // size
            leaving.append(entry)
            if slots >= need:
                return self._spare(leaving, need, nbytes)
        for entry in leaving:
            self.allocator.claim(entry.at, entry.nbytes)
        raise StoreFullError(
            f"no room for {need} payloads of {nbytes} bytes: {self.allocator.capacity} bytes in all, "
            f"{self.pinned()} payloads pinned; allowed: what fits beside those"
        )

    def _spare(self, leaving: list[Entry], need: int, nbytes: int) -> list[Entry]:
        """Those of ``leaving`` whose room is needed; of other sizes, some may have made none."""
        size = self.allocator.size(nbytes)
        if all(self.allocator.size(entry.nbytes) == size for entry in leaving):
            return leaving
        needed = []
        for entry in reversed(leaving):
            self.allocator.claim(entry.at, entry.nbytes)
            if self.allocator.slots(nbytes) < need:
                self.allocator.free(entry.at, entry.nbytes)
                needed.append(entry)
        return needed

    def _place(self, keys: Sequence[Key], nbytes: int, places: list[int]) -> None:
        """Take room for as many as there are keys, which is there, and add where to ``places``."""
        size = self.allocator.size(nbytes)
        at = self._behind(keys[0]) if keys else None
        while left := len(keys) - len(places):
            count = min(left, self.allocator.largest // size)
            start = self.allocator.allocate(count * size, at, EXTENT if isinstance(keys[0], BlockKey) else 0)
            if start is None:
                raise StoreFullError(f"no room for {nbytes} bytes in one piece")
            places += range(start, start + count * size, size)

    def _behind(self, key: Key) -> int | None:
        """Where the layer's block before this one ends: a layer is read in one go if it lies in one piece."""
        if not isinstance(key, BlockKey):
            return None
        before = self.entries.get(BlockKey(key.sequence, key.layer, key.block - 1))
        return before.at + self.allocator.size(before.nbytes) if before else None

    def _forget(self, entry: Entry) -> None:
        key = entry.key
        del self.entries[key]
        if isinstance(key, bytes):
            self.changed[key] = None
            return
        keys = self._sequences[key.sequence]
        del keys[key]
        if not keys:
            del self._sequences[key.sequence]

    def _free_aside(self, entry: Entry) -> None:
        del self.aside[entry.at]
        self.allocator.free(entry.at, entry.nbytes)
