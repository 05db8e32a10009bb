"""Sequences to be read from a store: every block's bytes tell which one it is."""

from __future__ import annotations

from kvquant.blocks import BlockKey
from kvquant.store.stream import Stream
from kvquant.store.tiered import TieredStore
from kvquant.testing import payload_of

NBYTES = 256


class Inline:
    """A worker that does at once what it is given."""

    def add(self, jobs) -> None:
        for job in jobs:
            if job.claim():
                job.run()


def write(stream: Stream, layers, blocks, nbytes: int = NBYTES, tag: int = 1) -> None:
    """Seal blocks of some layers, layer by layer."""
    for layer in layers:
        room = stream.reserve(layer, list(blocks), nbytes, tag)
        assert room is not None
        with room:
            for row, block in zip(room.payloads, blocks, strict=True):
                row.copy_(payload_of(BlockKey(stream.sequence, layer, block), 1, nbytes))
            room.commit()


def verify(stream: Stream, layer: int, first: int, rows, table) -> None:
    for number, row in enumerate(rows, first):
        expected = payload_of(BlockKey(stream.sequence, layer, table[number]), 1, len(row))
        assert row.equal(expected), (layer, number)


def read_layer(stream: Stream, layer: int, table) -> int:
    """Read and verify one layer; in how many parts it came."""
    seen, parts = set(), 0
    for runs in stream.read(layer, table).runs():
        parts += 1
        for run in runs:
            verify(stream, layer, run.first, run.payloads, table)
            seen |= set(range(run.first, run.first + len(run.payloads)))
    assert seen == set(range(len(table)))
    return parts


def read(stream: Stream, table, passes: int = 1) -> None:
    for _ in range(passes):
        stream.begin(table)
        for layer in stream.layers:
            read_layer(stream, layer, table)


def at_rest(store: TieredStore) -> None:
    """Nobody reads, and every staging buffer that nothing was fetched into ahead is free."""
    ahead = sum(each.load is not None for stream in store.streams for each in stream._ahead)
    assert store.ring.made - len(store.ring.free) == ahead
    assert sum(sum(shelf.readers) for shelf in store.placement.shelves()) == ahead
    assert store.stats().pinned == 0
    assert store.check() == []
    assert all(tier.used <= tier.budget for tier in store.stats().tiers)
