"""How a layer is read: what of it lies on the device, and the parts that have to be fetched, from where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from ..errors import StoreError
from .base import Key
from .batch import Batch
from .books import Level
from .disk import DiskStore
from .residency import DEVICE, HOST, Entry, Shelf
from .transfer import Buffer

LOST = "blocks can't be read back: reset() the cache and feed it again"


@dataclass(frozen=True, eq=False)
class Run:
    """Blocks of the table from number ``first`` on, whose ``payloads`` uint8 ``[n, nbytes]`` lie side by side.

    ``memo`` is for whoever reads it; the next pass may bring the same run again.
    """

    first: int
    payloads: Tensor
    tag: int
    memo: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Part:
    """Payloads of one size that are fetched together, and their numbers in the table."""

    numbers: tuple[int, ...]
    entries: tuple[Entry, ...]
    sources: Sources | None = None
    runs: dict[Buffer, list[Run]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of a payload."""
        return self.entries[0].nbytes

    @cached_property
    def keys(self) -> list[Key]:
        """Of its payloads."""
        return [entry.key for entry in self.entries]

    def of(self, buffer: Buffer) -> list[Run]:
        """What a buffer that was loaded holds."""
        if buffer not in self.runs:
            rows = buffer.device[: len(self.entries) * self.nbytes].view(-1, self.nbytes)
            found = []
            for first, last in _stretches(self.numbers, 1):
                found.append(Run(self.numbers[first], rows[first:last], self.entries[0].tag))
            self.runs[buffer] = found
        return self.runs[buffer]


@dataclass(frozen=True)
class Sources:
    """Where a part lies: ``copies`` of ``first ≤ i < last`` from a place on the host, ``reads`` of such from disk."""

    version: int
    copies: list[tuple[int, int, int]]
    reads: list[tuple[int, int, Batch]]

    @classmethod
    def of(cls, part: Part, version: int, disk: DiskStore | None) -> Sources:
        """``version``: the shelf's. Raises `StoreError` where something is nowhere."""
        found = cls(version, [], [])
        reads: list[tuple[int, int]] = []
        places = [entry.places[HOST] for entry in part.entries]
        for first, last in _stretches(places, part.nbytes):
            if (place := places[first]) is not None:
                found.copies.append((place, first, last))
            elif reads and reads[-1][1] == first:
                reads[-1] = reads[-1][0], last
            else:
                reads.append((first, last))
        for first, last in reads:
            batch = None if disk is None else disk.batch(part.keys[first:last], part.nbytes)
            if batch is None:
                raise StoreError(LOST)
            found.reads.append((first, last, batch))
        return found

    @property
    def on_host(self) -> int:
        """How many payloads are copied."""
        return sum(last - first for _, first, last in self.copies)


@dataclass(frozen=True, eq=False)
class Plan:
    """How a layer is read, as long as nothing there moves: what lies on the device, and what has to be fetched."""

    table: tuple[int, ...]
    shelf: Shelf
    version: int
    resident: list[Run]
    parts: list[Part]

    @classmethod
    def of(cls, shelf: Shelf, table: tuple[int, ...], level: Level | None, room: int) -> Plan:
        """``level``: the device's; ``room``: bytes of a staging buffer."""
        lost = sum(block not in shelf.entries for block in table)
        if lost:
            raise StoreError(
                f"{lost} of {len(table)} blocks of layer {shelf.layer} are lost: reset() the cache and feed it again"
            )
        entries = [shelf.entries[block] for block in table]
        resident: list[Run] = []
        numbers = [number for number, entry in enumerate(entries) if entry.places[DEVICE] is not None]
        for group in _alike(numbers, entries):
            assert level is not None
            nbytes, tag = entries[group[0]].nbytes, entries[group[0]].tag
            places = [place for number in group if (place := entries[number].places[DEVICE]) is not None]
            size = level.pool.ranges.size(nbytes)
            for first, last in _stretches(list(zip(group, places, strict=True)), (1, size)):
                resident.append(Run(group[first], level.pool.view(places[first], last - first, nbytes), tag))
        parts = []
        numbers = [number for number, entry in enumerate(entries) if entry.places[DEVICE] is None]
        for group in _alike(numbers, entries):
            step = max(1, room // entries[group[0]].nbytes)
            for first in range(0, len(group), step):
                some = tuple(group[first : first + step])
                parts.append(Part(some, tuple(entries[number] for number in some)))
        return cls(table, shelf, shelf.version, resident, parts)


def _alike(numbers: Sequence[int], entries: Sequence[Entry]) -> Iterator[list[int]]:
    """Numbers of entries of one size and tag, as long as these follow one another."""
    group: list[int] = []
    for number in numbers:
        if group and (entries[number].nbytes, entries[number].tag) != (
            entries[group[0]].nbytes,
            entries[group[0]].tag,
        ):
            yield group
            group = []
        group.append(number)
    if group:
        yield group


def _stretches(values: Sequence[Any], step: Any) -> Iterator[tuple[int, int]]:
    """Where ``values`` go on by ``step`` each, as ``first ≤ i < last``; pairs go on by a pair of steps."""
    first = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or not _follows(values[index - 1], values[index], step):
            yield first, index
            first = index


def _follows(one: Any, other: Any, step: Any) -> bool:
    if isinstance(one, tuple):
        return all(map(_follows, one, other, step))
    return one is not None and other is not None and bool(other == one + step)
