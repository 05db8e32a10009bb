"""Which payload lies where, as long as nothing moves. Whoever calls holds the store's lock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..blocks import BlockKey
from .base import Key
from .disk import DiskStore
from .memory import Pool
from .residency import HOST, Clock, Entry, Shelf


@dataclass
class Level:
    """The memory of the device or the host; how many payloads each shelf has there, least recently used first."""

    name: str
    pool: Pool
    shelves: dict[Shelf, int] = field(default_factory=dict)
    hits: int = 0


class Books:
    """Payloads by shelf, and their copies on device, host and disk."""

    def __init__(self, levels: Sequence[Level | None], disk: DiskStore | None) -> None:
        self.levels = list(levels)
        self.disk = disk
        self.clock = Clock()
        self._shelves: dict[tuple[int, int] | bytes, Shelf] = {}
        self.unread: list[tuple[Shelf, Entry]] = []  # deleted while somebody read them
        self._doubled: list[tuple[Shelf, Entry]] = []  # on the device, and below only as long as that is read
        for key in [] if disk is None else disk.keys():
            if disk is not None and (found := disk.locate(key)):
                shelf, entry = self.shelf(key), Entry(key, *found)
                entry.disk = True
                shelf.entries[number_of(key)] = entry

    def shelf(self, key: Key) -> Shelf:
        """Where a payload belongs, whether there is one or not."""
        name = name_of(key)
        if name not in self._shelves:
            sequence, layer = (key.sequence, key.layer) if isinstance(key, BlockKey) else (None, 0)
            self._shelves[name] = Shelf(sequence, layer)
        return self._shelves[name]

    def find(self, key: Key) -> Entry | None:
        """The payload under a key."""
        shelf = self._shelves.get(name_of(key))
        return None if shelf is None else shelf.entries.get(number_of(key))

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

    def insert(self, key: Key, nbytes: int, tag: int, which: int, place: int | None) -> None:
        """Enter what was written to a place of device or host, or under its key to the disk."""
        self.remove(key, keep_disk=place is None)
        shelf, entry = self.shelf(key), Entry(key, nbytes, tag)
        shelf.entries[number_of(key)] = entry
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
        del shelf.entries[number_of(key)]
        shelf.version += 1
        if entry.disk and self.disk is not None and not keep_disk:
            self.disk.delete([key])
        entry.disk = False
        self.unread.append((shelf, entry))
        self.sweep()
        return True

    def sweep(self) -> None:
        """Let go of what was deleted and is no longer read, and of shelves with nothing on them."""
        kept = []
        for shelf, entry in self.unread:
            if entry.pins or any(shelf.readers):
                kept.append((shelf, entry))
                continue
            for which, place in enumerate(entry.places):
                if place is not None:
                    self.vacate(shelf, entry, which)
            name = name_of(entry.key)
            if not shelf.entries and self._shelves.get(name) is shelf and not self.live(shelf):
                del self._shelves[name]
        self.unread = kept
        self.part(None)

    def part(self, mine: Shelf | None) -> None:
        """Take what came to the device off the host, once nothing of its shelf is read by others than who asks.

        ``mine``: the shelf of which only who asks reads.
        """
        kept = []
        for shelf, entry in self._doubled:
            if shelf is not mine and any(shelf.readers):
                kept.append((shelf, entry))
            elif all(place is not None for place in entry.places):
                self.vacate(shelf, entry, HOST)
        self._doubled = kept


def name_of(key: Key) -> tuple[int, int] | bytes:
    """Of the shelf where a payload belongs."""
    return (key.sequence, key.layer) if isinstance(key, BlockKey) else key


def number_of(key: Key) -> int:
    """Of a payload, on its shelf."""
    return key.block if isinstance(key, BlockKey) else 0
