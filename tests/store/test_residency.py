"""Who stays: hits on a cycle of layers, as many as the papers say, through a real store."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from kvquant.errors import StoreError
from kvquant.store.residency import residency_names
from kvquant.store.tiered import BUFFERS, TieredStore
from tests.store.streams import NBYTES, at_rest, read, write

BLOCKS = 3
TABLE = tuple(range(BLOCKS))
N = 8
LAYER = BLOCKS * NBYTES


def device_hits(store):
    return store.stats().tiers[0].hits


def rate(store, streams, passes):
    """The share of payloads that are read from the device, of streams that take turns."""
    before = device_hits(store)
    for _ in range(passes):
        for stream in streams:
            read(stream, TABLE)
    return Fraction(device_hits(store) - before, passes * len(streams) * N * BLOCKS)


def build(residency, room, sequences=1, settle=2):
    """Sequences of N layers, of which the device has room for ``room``."""
    store = TieredStore(room * LAYER, 64 * LAYER, residency=residency, staging=BUFFERS * LAYER)
    streams = [store.stream(number, range(N)) for number in range(sequences)]
    for stream in streams:
        stream.begin(())
        write(stream, range(N), TABLE)
    rate(store, streams, settle)
    return store, streams


@pytest.mark.parametrize("room", [1, 3, 7, 8])
def test_hits_on_a_cycle(room):
    whole = room == N
    expected = {
        "next-use": Fraction(room, N),  # Belady's bound where nothing need be kept that is fetched
        "pinned-layers": Fraction(room, N),
        "lru": Fraction(int(whole)),
        "mru": Fraction(1) if whole else Fraction(room - 1, N - 1),
    }
    assert set(expected) == set(residency_names())
    for name, hits in expected.items():
        store, streams = build(name, room)
        assert rate(store, streams, 2 * (N - 1)) == hits, name
        at_rest(store)
        store.close()


@pytest.mark.parametrize("room", [3, 8, 12])
def test_two_sequences_that_take_turns(room):
    """For the device's next use, two sequences are one cycle of twice as many layers."""
    store, streams = build("next-use", room, sequences=2)
    assert rate(store, streams, 6) == Fraction(room, 2 * N)
    lru, others = build("lru", room, sequences=2)
    assert rate(lru, others, 6) == 0
    for each in (store, lru):
        at_rest(each)
        each.close()


def test_a_sequence_that_is_idle_leaves_first():
    store, (one, other) = build("next-use", N, sequences=2)
    assert rate(store, [one], 1) >= 0
    rate(store, [other], 3)  # the other's turn comes no more
    assert rate(store, [other], 2) == 1
    assert sum(len(store.placed(0, layer, 0)) for layer in range(N)) == 0
    assert rate(store, [one], 4) < 1  # and the other way round
    assert rate(store, [one], 2) == 1
    at_rest(store)
    store.close()


def test_what_nobody_decodes_leaves_before_what_is_decoded():
    store = TieredStore(4 * LAYER, 64 * LAYER, staging=BUFFERS * LAYER)
    for n in range(20):
        store.put(b"%d" % n, torch.zeros(NBYTES, dtype=torch.uint8))
    stream = store.stream(0, range(N))
    stream.begin(())
    write(stream, range(N), TABLE)
    assert rate(store, [stream], 3) >= Fraction(3, N)
    assert rate(store, [stream], 3) == Fraction(4, N)
    assert len(store) == 20 + N * BLOCKS
    store.close()


@pytest.mark.parametrize("name", ["fifo", "", None, 3, ["lru"]])
def test_unknown_policies(name):
    with pytest.raises(StoreError, match="residency: .*; allowed: next-use, lru, mru, pinned-layers"):
        TieredStore(device_budget="1MiB", residency=name)
