"""Wrappers that go wrong: what they show, and that tiers and streams live with it."""

from __future__ import annotations

import random
import time

import pytest
import torch

from kvquant.errors import StoreError, StoreFullError
from kvquant.store.base import BlockStore
from kvquant.store.disk import DiskStore
from kvquant.store.tiered import BUFFERS, TieredStore
from kvquant.testing import FaultyFiles, FaultyStore, LatencyStore, at_calls, at_random, payload_of, version_of
from tests.store.streams import NBYTES, read, write


@pytest.fixture
def memory():
    with TieredStore(host_budget=64 * NBYTES) as store:
        yield store
        assert store.check() == []
        assert store.stats().pinned == 0


def put(store, key, version=1, nbytes=NBYTES):
    store.put(key, payload_of(key, version, nbytes))


def test_each_kind_shows_where_it_is_planned(memory):
    plan = at_calls(
        ("put", 1, "full"), ("put", 2, "error"), ("get", 0, "lost"), ("get", 1, "short"), ("get", 2, "flip"),
        ("commit", 0, "full"), ("reserve", -2, "error"), ("flush", 0, "error"),
    )  # fmt: skip
    store = FaultyStore(memory, plan)
    assert isinstance(store, BlockStore)
    put(store, b"a")
    with pytest.raises(StoreFullError) as full:
        put(store, b"b")
    assert isinstance(full.value.__cause__, OSError)
    with pytest.raises(StoreError):
        put(store, b"b")
    assert store.keys() == [b"a"]
    expected = payload_of(b"a", 1, NBYTES)
    assert store.get(b"a") is None
    assert torch.equal(store.get(b"a"), expected[: NBYTES // 2])
    assert (store.get(b"a") != expected).sum() == 1
    assert version_of(b"a", store.get(b"a")) == 1
    with pytest.raises(StoreFullError), store.reserve([b"c"], NBYTES) as room:
        room.commit()
    for _ in range(3):
        with pytest.raises(StoreError):
            store.reserve([b"c"], NBYTES)
    with pytest.raises(StoreError):
        store.flush()
    assert store.shown.total() == 10
    assert store.stats().used == NBYTES


def test_random_faults_are_the_same_each_time(memory):
    def run():
        store, seen = FaultyStore(memory, at_random(5, 0.3, put=("full", "error"), get=("lost",))), []
        for n in range(50):
            try:
                put(store, b"%d" % n)
                seen.append("put")
            except StoreError as error:
                seen.append(type(error).__name__)
            seen.append(store.get(b"%d" % n) is None)
        memory.delete(memory.keys())
        return seen

    first = run()
    assert first == run()
    assert {"put", "StoreError", "StoreFullError", True, False} == set(first)


def test_unknown_kinds_are_refused():
    for plan in (lambda: at_calls(("put", 0, "fire")), lambda: at_random(1, 0.5, put=["fire"])):
        with pytest.raises(ValueError, match="fire"):
            plan()


def test_latency(memory):
    store = LatencyStore(memory, get=0.01, put=0.02)
    began = time.perf_counter()
    put(store, b"a")
    assert version_of(b"a", store.get(b"a")) == 1
    assert time.perf_counter() - began >= 0.03


@pytest.fixture
def faulty(monkeypatch, fast_path):
    """Builds stores whose disk goes wrong by plan."""
    made = []

    def build(plan, device=None, host=None, disk=64 * NBYTES, **settings):
        files = FaultyFiles(plan, **settings)
        monkeypatch.setattr("kvquant.store.tiered.DiskStore", lambda *given: DiskStore(*given, files=files))
        made.append(TieredStore(device, host, disk, fast_path / "store", staging=BUFFERS * NBYTES))
        return made[-1], files

    yield build
    for store in made:
        store.close()


def test_files_that_move_a_few_bytes_at_a_time(faulty):
    store, files = faulty(at_random(1, 0.2, preadv=("short",), pwritev=("short",)), longest=100)
    stream = store.stream(0, range(2))
    write(stream, range(2), range(8))
    read(stream, tuple(range(8)), 3)
    assert store.stats().faults == {}
    assert files.shown["preadv", "short"] > 0
    assert store.check() == []


def test_a_disk_without_space_loses_nothing_that_is_decoded(faulty):
    store, _ = faulty(at_calls(("pwritev", -3, "full"), ("allocate", -3, "full")), host=6 * NBYTES)
    stream = store.stream(0, range(1))
    held = 0
    while True:
        try:
            write(stream, [0], [held])
        except (AssertionError, StoreError):  # no room any more
            break
        held += 1
    assert 6 <= held < 64
    read(stream, tuple(range(held)), 2)
    assert store.stats().faults["no space"] >= 1


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_disk_does_gets_are_right_or_misses(faulty, seed):
    kinds = ("flip", "short", "lost", "error")
    plan = at_random(seed, 0.15, preadv=kinds, pwritev=("flip", "short", "lost", "error", "full"), allocate=("full",))
    store, files = faulty(lambda name, number: plan(name, number) if number > 2 else None, 4 * NBYTES, 4 * NBYTES)
    draw = random.Random(seed)
    latest, misses = {}, 0
    for step in range(400):
        key = b"%d" % draw.randrange(40)
        if draw.random() < 0.5:
            try:
                put(store, key, step + 1, draw.choice((64, NBYTES)))
                latest[key] = step + 1
            except StoreError:
                latest.pop(key, None)  # the one before, or none
        elif (got := store.get(key)) is None:
            misses += key in latest
        else:
            assert version_of(key, got) == latest.get(key, version_of(key, got))
    assert misses
    assert files.shown.total() > 10
    assert sum(store.stats().faults.values()) > 3
