"""Taking a folder's rows up again when it is opened, and being told of forks: what a `DiskStore` does once."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch

from .allocator import Allocator
from .base import ALIGNMENT
from .index import Row
from .slab import Entry, Slab, seed_of
from .table import Table


def restore(table: Table, slab: Slab, rows: Sequence[Row], *, move: bool) -> Counter[str]:
    """Put rows, least recently put first, into an empty table; what was wrong with others, by kind.

    Rows that reach out of the file or into a later one's room are dropped. Where the budget has become smaller the
    least recently put leave, those that are kept last, and what then lies behind its end is moved to free room, if
    there is some.
    """
    faults: Counter[str] = Counter()
    capacity = table.allocator.capacity
    file = Allocator(max(slab.size + ALIGNMENT - 1, capacity), ALIGNMENT)
    room, kept = capacity, []
    for row in sorted(rows, key=lambda row: (not row.kept, -row.turn)):
        if row.at + row.nbytes > slab.size or not file.claim(row.at, row.nbytes):
            faults["row"] += 1
        elif (size := file.size(row.nbytes)) > room:
            room = 0  # older ones leave too
            table.evicted += 1
        else:
            room -= size
            seed = seed_of(row.key, row.tag)
            kept.append(Entry(row.key, row.at, row.nbytes, row.tag, seed, row.checksum, row.turn, row.kept))
            continue
        table.changed[row.key] = None
    inside = [table.allocator.claim(entry.at, entry.nbytes) for entry in kept]
    for entry, stays in reversed(list(zip(kept, inside, strict=True))):
        if stays or (move and _move(entry, table, slab, faults)):
            table.add(entry)
    return faults


def _move(entry: Entry, table: Table, slab: Slab, faults: Counter[str]) -> bool:
    """Give an entry other room; whether that went well. Until the index knows, its row reads as a miss at worst."""
    assert isinstance(entry.key, bytes)
    table.changed[entry.key] = None
    at = table.allocator.allocate(entry.nbytes)
    if at is None:
        table.evicted += 1
        return False
    payload = torch.empty(1, entry.nbytes, dtype=torch.uint8)
    if wrong := slab.read([entry], payload):
        faults[wrong[0]] += 1
        table.allocator.free(at, entry.nbytes)
        return False
    entry.at = at
    slab.write([entry], payload)
    table.changed[entry.key] = entry
    return True


class Forkable(Protocol):
    """Something a child process must not go on using."""

    def forked(self) -> None:
        """Called in the child."""


_watched: weakref.WeakSet[Forkable] = weakref.WeakSet()
_asked: list[bool] = []


def watch_forks(store: Forkable) -> None:
    """Have `forked` called in every child of this process, as long as ``store`` lives."""
    if not _asked:
        os.register_at_fork(after_in_child=_tell)
        _asked.append(True)
    _watched.add(store)


def _tell() -> None:
    for store in list(_watched):
        store.forked()
