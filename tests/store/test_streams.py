"""Streams: layers read in turn through staging buffers, filled by the reader or ahead of it by a worker."""

from __future__ import annotations

import threading

import pytest
import torch

from kvquant.blocks import BlockKey
from kvquant.errors import StoreError
from kvquant.store.disk import DiskStore
from kvquant.store.residency import get_residency
from kvquant.store.tiered import BUFFERS, TieredStore
from kvquant.testing import FaultyFiles, at_calls, payload_of
from tests.store.streams import NBYTES, Inline, at_rest, read, read_layer, verify, write

LAYERS, BLOCKS = 4, 6
ALL = LAYERS * BLOCKS * NBYTES
TABLE = tuple(range(BLOCKS))

SHAPES = {
    "device": (ALL, None, None),
    "host": (None, ALL, None),
    "device and host": (ALL // 4, ALL, None),
    "disk": (None, None, ALL),
    "device and disk": (ALL // 4, None, ALL),
    "all three": (ALL // 4, ALL // 4, ALL),
    "all three, no byte to spare": (ALL // 4, ALL // 4, ALL // 2),
}


@pytest.fixture(params=[False, True], ids=["by the reader", "by a worker"])
def overlaps(request):
    return request.param


@pytest.fixture
def make(overlaps, fast_path):
    """Builds stores whose buffers are filled one way or the other, and holds them to be at rest in the end."""
    made = []

    def build(device=None, host=None, disk=None, staging=2 * BUFFERS * NBYTES, **settings):
        path = None if disk is None else fast_path / f"store {len(made)}"
        made.append(TieredStore(device, host, disk, path, staging=staging, **settings))
        made[-1].lane.overlaps = overlaps
        return made[-1]

    yield build
    for store in made:
        if not store.closed:
            at_rest(store)
            store.close()


@pytest.fixture(params=SHAPES)
def store(make, request):
    return make(*SHAPES[request.param])


def test_what_is_read_is_what_was_written(store):
    stream = store.stream(3, range(LAYERS))
    for block in range(BLOCKS):
        stream.begin(TABLE[:block])
        for layer in range(LAYERS):
            read_layer(stream, layer, TABLE[:block])
            write(stream, [layer], [block])
    read(stream, TABLE, 3)
    at_rest(store)
    stream.close()
    stream.close()
    assert store.keys() == []
    assert store.stats().used == 0


@pytest.mark.parametrize("staging", [1, 2, 3, 100])
def test_parts_of_one_block_or_of_many(make, staging):
    store = make(None, ALL, staging=BUFFERS * staging * NBYTES)
    stream = store.stream(0, range(LAYERS))
    write(stream, range(LAYERS), range(BLOCKS))
    table = (5, 1, 2, 0, 4, 3)  # in another order than they lie
    for _ in range(3):
        stream.begin(table)
        for layer in range(LAYERS):
            assert read_layer(stream, layer, table) == -(-BLOCKS // min(staging, BLOCKS))
    assert store.ring.made <= BUFFERS


def test_payloads_that_fill_a_buffer_and_payloads_larger_than_one(make):
    store = make(None, 16 * ALL, staging=BUFFERS * NBYTES)
    stream = store.stream(0, range(2))
    for block, nbytes in enumerate((NBYTES, NBYTES // 2, 3 * NBYTES, NBYTES, 8 * NBYTES, 64)):
        write(stream, range(2), [block], nbytes)
        read(stream, TABLE[: block + 1], 2)
    with pytest.raises(StoreError, match="multiples of 64"):
        stream.reserve(0, [9], 100, 1)


def test_buffers_that_grow_while_another_thread_reads(make):
    store = make(None, 16 * ALL, staging=BUFFERS * NBYTES)
    one, other = (store.stream(sequence, range(2)) for sequence in range(2))
    write(one, range(2), TABLE)
    one.begin(TABLE)
    for number, runs in enumerate(one.read(0, TABLE).runs()):
        for run in runs:
            verify(one, 0, run.first, run.payloads, TABLE)
        if number == 1:
            write(other, range(2), [0, 1], 4 * NBYTES)
            read(other, (0, 1))
    read(one, TABLE, 2)
    read(other, (0, 1), 2)


def test_blocks_that_come_and_go_between_passes(make):
    store = make(ALL // 4, ALL)
    stream = store.stream(0, range(LAYERS))
    write(stream, range(LAYERS), TABLE)
    read(stream, TABLE)
    store.drop_blocks(0, range(LAYERS), [2, 5])
    read(stream, (0, 1, 3, 4), 2)
    write(stream, range(LAYERS), [2])
    read(stream, (0, 1, 3, 4, 2), 2)
    read(stream, (), 2)
    read(stream, (4,), 2)
    stream.begin(TABLE)
    with pytest.raises(StoreError, match="1 of 6 blocks of layer 0 are lost"):
        stream.read(0, TABLE)


def test_what_moves_while_it_is_fetched_ahead(make):
    """Another sequence, or a pin, changes where blocks lie between a load and its use."""
    store = make(ALL // 4, 3 * ALL)
    one, other = (store.stream(sequence, range(LAYERS)) for sequence in range(2))
    write(one, range(LAYERS), TABLE)
    write(other, range(LAYERS), TABLE)
    for _ in range(4):
        one.begin(TABLE)
        other.begin(TABLE)
        for layer in range(LAYERS):
            read_layer(one, layer, TABLE)
            store.put(b"passing %d" % layer, torch.zeros(4 * NBYTES, dtype=torch.uint8))
            read_layer(other, layer, TABLE)
            store.delete([b"passing %d" % layer])


def test_a_reading_made_before_others_moved_its_blocks(make):
    store = make(ALL // 4, 3 * ALL, residency="lru")
    one, other = (store.stream(sequence, range(LAYERS)) for sequence in range(2))
    write(one, range(LAYERS), TABLE)
    one.begin(TABLE)
    readings = [one.read(layer, TABLE) for layer in range(LAYERS)]
    write(other, range(LAYERS), TABLE)
    read(other, TABLE)
    for layer, reading in enumerate(readings):
        for runs in reading.runs():
            for run in runs:
                verify(one, layer, run.first, run.payloads, TABLE)


def test_an_exception_in_the_middle_leaks_nothing(store):
    stream = store.stream(0, range(LAYERS))
    write(stream, range(LAYERS), TABLE)
    stream.begin(TABLE)
    reading = stream.read(0, TABLE).runs()
    next(reading)
    with pytest.raises(KeyError):
        reading.throw(KeyError)
    at_rest(store)
    reading = stream.read(1, TABLE).runs()
    next(reading)
    reading.close()
    at_rest(store)
    read(stream, TABLE)


def test_blocks_that_cannot_be_read_back(make, monkeypatch):
    files = FaultyFiles(at_calls(("preadv", -3, "flip")))
    monkeypatch.setattr("kvquant.store.tiered.DiskStore", lambda *given: DiskStore(*given, files=files))
    store = make(None, None, ALL)
    stream = store.stream(0, range(LAYERS))
    write(stream, range(LAYERS), TABLE)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"reset\(\) the cache"):
            read(stream, TABLE, 2)
        assert store.ring.made - len(store.ring.free) == sum(each.load is not None for each in stream._ahead)
    assert store.stats().faults["checksum"] >= 1
    stream.close()
    assert store.keys() == []


def test_two_threads_read_two_sequences_through_one_ring(store):
    streams = [store.stream(sequence, range(LAYERS)) for sequence in range(2)]
    half = TABLE[: BLOCKS // 2]
    for stream in streams:
        write(stream, range(LAYERS), half)
    wrong = []

    def run(stream):
        try:
            read(stream, half, 12)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(stream,), daemon=True) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert wrong == []


def test_two_threads_read_one_sequence(store):
    """As copies of a cache do; with a policy that keeps moving its layers."""
    store.placement._leaving = get_residency("mru")
    streams = [store.stream(5, range(LAYERS)) for _ in range(2)]
    write(streams[0], range(LAYERS), TABLE)
    wrong = []

    def run(stream, table):
        try:
            read(stream, table, 12)
        except BaseException as error:
            wrong.append(error)

    threads = [
        threading.Thread(target=run, args=given, daemon=True)
        for given in ((streams[0], TABLE), (streams[1], TABLE[::-1]))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert wrong == []
    streams[0].close()
    read(streams[1], TABLE)
    streams[1].close()
    assert store.keys() == []


def test_closing_while_loads_run(store):
    one, other = (store.stream(sequence, range(LAYERS)) for sequence in range(2))
    half = TABLE[: BLOCKS // 2]
    write(one, range(LAYERS), half)
    write(other, range(LAYERS), half)
    one.begin(half)
    other.begin(half)
    reading = one.read(0, half).runs()
    next(reading)
    one.close()  # as finalizers of another thread's cache may
    reading.close()
    for call in (lambda: one.begin(half), lambda: one.read(0, half), lambda: one.reserve(0, [9], 64, 1)):
        with pytest.raises(StoreError, match="closed"):
            call()
    read(other, half, 2)
    assert {key.sequence for key in store.keys()} == {1}  # noqa: SIM118


def test_closing_the_store_while_streams_read(make):
    store = make(None, ALL)
    stream = store.stream(0, range(LAYERS))
    write(stream, range(LAYERS), TABLE)
    stream.begin(TABLE)
    reading = stream.read(0, TABLE).runs()
    next(reading)
    store.close()
    reading.close()
    with pytest.raises(StoreError, match="closed"):
        stream.begin(TABLE)
    stream.close()


def test_a_live_sequence_loses_nothing_and_a_full_store_says_so(store):
    stream = store.stream(0, range(LAYERS))
    write(stream, range(LAYERS), TABLE)
    capacity = sum(tier.budget for tier in store.stats().tiers)
    block = BLOCKS
    while (block + 1) * LAYERS * NBYTES <= capacity:
        write(stream, range(LAYERS), [block])
        block += 1
    table = tuple(range(block))
    read(stream, table, 2)
    assert stream.reserve(0, [block], capacity, 1) is None
    for n in range(4):  # what others put has no claim
        try:
            store.put(b"%d" % n, payload_of(b"%d" % n, 1, NBYTES))
        except StoreError:
            continue
    read(stream, table, 2)
    assert len([key for key in store.keys() if isinstance(key, BlockKey)]) == block * LAYERS  # noqa: SIM118


def test_what_prefetches_count(make, overlaps):
    store = make(None, ALL)
    stream = store.stream(0, range(LAYERS))
    write(stream, range(LAYERS), TABLE)
    read(stream, TABLE, 3)
    stats = store.stats()
    parts = 3 * LAYERS * BLOCKS // 2
    if overlaps:  # a copy within the CPU's memory is not fetched ahead
        assert stats.prefetch_hits + stats.prefetch_late == parts
    else:
        assert stats.prefetch_hits + stats.prefetch_late == 0
    assert stats.moved["host→device"] >= 3 * ALL
    stream.close()
    assert store.stats().prefetch_unused == (BUFFERS - 1 if overlaps else 0)


def test_what_is_asked_for_soon_comes_up_from_disk(make):
    """Without anybody being dropped for it."""
    store = make(None, 4 * NBYTES, ALL)
    names = [b"%d" % n for n in range(8)]
    for name in names:
        store.put(name, payload_of(name, 1, NBYTES))
    assert store.stats().tiers[0].payloads == 4
    store.delete(names[4:6])
    assert [tier.payloads for tier in store.stats().tiers] == [2, 4]
    worker, store.worker = store.worker, Inline()
    store.prefetch([b"absent", *names[:3]])
    store.worker = worker
    assert [tier.payloads for tier in store.stats().tiers] == [4, 5]  # for the third, one went down
    for name in [*names[:4], *names[6:]]:
        assert store.get(name).equal(payload_of(name, 1, NBYTES))
    assert len(store) == 6
