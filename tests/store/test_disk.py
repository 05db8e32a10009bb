"""The disk tier by itself: the protocol of stores, its bulk calls, its folder, and eviction."""

from __future__ import annotations

import os
import stat
import threading

import pytest
import torch

from kvquant.blocks import BlockKey
from kvquant.errors import StoreError, StoreFullError
from kvquant.store.base import BlockStore
from kvquant.store.disk import DiskStore
from kvquant.testing import payload_of, version_of
from tests.store.faulty import Faulty


def put(store, key, version=1, nbytes=640):
    store.put(key, payload_of(key, version, nbytes), tag=version)


def rows(keys, version=1, nbytes=640):
    return torch.stack([payload_of(key, version, nbytes) for key in keys])


def names(count, start=0):
    return [b"key %d" % n for n in range(start, start + count)]


def test_it_keeps_the_protocol(disk):
    store = disk()
    assert isinstance(store, BlockStore)
    keys = [b"a", BlockKey(1, 2, 3)]
    with store.reserve(keys, 100, tag=3) as reservation:
        reservation.payloads.copy_(rows(keys, nbytes=100))
        assert store.keys() == []
        assert store.get(b"a") is None
        reservation.commit()
        with pytest.raises(StoreError, match="over"):
            reservation.commit()
    assert store.keys() == keys
    assert len(store) == 2
    assert b"a" in store
    assert b"b" not in store
    assert version_of(keys[1], store.get(keys[1])) == 1
    assert store.locate(b"a") == (100, 3)
    assert store.tag(BlockKey(1, 2, 3)) == 3
    assert store.locate(b"b") is None
    assert store.tag(b"b") is None
    store.prefetch([*keys, b"b"])
    with store.pin([*keys, b"b"]) as pinned, store.pin(keys[:1]):
        assert pinned == keys
        assert store.stats().pinned == 2
    assert store.delete([b"a", b"b"]) == 1
    assert store.delete_sequence(2) == 0
    assert store.delete_sequence(1) == 1
    assert store.keys() == []
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.puts, stats.used) == (1, 1, 2, 0)
    assert stats.moved == {"→disk": 200, "disk→": 100}


def test_what_was_put_is_a_copy(disk):
    store = disk()
    payload = payload_of(b"a", 1, 1000)
    store.put(b"a", payload)
    payload.zero_()
    got = store.get(b"a")
    assert version_of(b"a", got) == 1
    got.zero_()
    assert version_of(b"a", store.get(b"a")) == 1


@pytest.mark.parametrize("nbytes", [1, 63, 64, 1000, 4096])
def test_rows_written_together_are_read_together(disk, nbytes):
    files = Faulty()
    store = disk(files=files)
    before = files.count["pwritev"]
    keys = names(12)
    payloads = torch.randint(0, 256, (12, nbytes), dtype=torch.uint8)
    store.write(keys, payloads, tag=1)
    assert files.count["pwritev"] == before + 1
    out = torch.zeros_like(payloads)
    assert store.read(keys, out) == [True] * 12
    assert torch.equal(out, payloads)
    assert files.count["preadv"] == 1
    order = [7, 3, 4, 11, 0]
    out = torch.zeros(6, nbytes, dtype=torch.uint8)
    assert store.read([*(keys[n] for n in order), b"none"], out) == [True] * 5 + [False]
    assert torch.equal(out[:5], payloads[order])
    assert files.count["preadv"] == 5
    assert store.read(keys, torch.zeros(12, nbytes + 1, dtype=torch.uint8)) == [False] * 12
    assert store.read([keys[2]] * 2, out[:2]) == [True] * 2
    assert torch.equal(out[:2], payloads[[2, 2]])


def test_a_layers_blocks_follow_each_other(disk):
    store = disk()
    for first in (0, 4):
        keys = [BlockKey(1, 0, first + n) for n in range(4)]
        store.write(keys, rows(keys))
    places = [store._table.entries[BlockKey(1, 0, n)].at for n in range(8)]
    assert places == list(range(0, 8 * 640, 640))


def test_rows_of_any_stride_are_written(disk):
    store = disk()
    wide = torch.randint(0, 256, (4, 1000), dtype=torch.uint8)
    for payloads in (wide[:, 100:740], wide[::2, :64], wide.t()[:8], wide[:1].expand(3, -1)):
        keys = names(len(payloads))
        store.write(keys, payloads)
        out = torch.empty(payloads.shape, dtype=torch.uint8)
        assert store.read(keys, out) == [True] * len(keys)
        assert torch.equal(out, payloads)
    store.write([], torch.empty(0, 10, dtype=torch.uint8))
    assert store.read([], torch.empty(0, 10, dtype=torch.uint8)) == []


def test_more_rows_than_one_call_takes(disk):
    store = disk()
    keys = names(1100)
    store.write(keys, rows(keys, nbytes=65))
    out = torch.zeros(1100, 65, dtype=torch.uint8)
    assert all(store.read(keys, out))
    assert torch.equal(out, rows(keys, nbytes=65))


def test_the_least_recently_used_leave_and_overwriting_evicts_nothing(disk):
    store = disk(1280)
    put(store, b"a")
    put(store, b"b")
    store.get(b"a")
    put(store, b"c")
    assert store.keys() == [b"a", b"c"]
    put(store, b"c", 2)
    assert store.keys() == [b"a", b"c"]
    assert version_of(b"c", store.get(b"c")) == 2
    stats = store.stats()
    assert stats.evictions == {"disk→": 1}
    assert stats.used == 1280


def test_the_old_value_is_there_until_the_commit_if_there_is_room(disk):
    store = disk(1280)
    put(store, b"a", 1)
    with store.reserve([b"a"], 640, tag=2) as reservation:
        assert version_of(b"a", store.get(b"a")) == 1
        assert store.tag(b"a") == 1
        reservation.payloads[0] = payload_of(b"a", 2, 640)
        reservation.commit()
    assert version_of(b"a", store.get(b"a")) == 2
    assert store.stats().used == 640
    put(store, b"b")
    with store.reserve([b"a"], 640):
        assert b"a" not in store  # no room beside it
        assert b"b" in store
    assert store.keys() == [b"b"]


def test_exactly_as_many_leave_as_it_takes_or_none(disk):
    store = disk(6400)
    keys = names(10)
    store.write(keys, rows(keys))
    with store.pin([keys[1], keys[3]]):
        store.write(names(3, 20), rows(names(3, 20)))
        assert store.keys() == [*keys[5:], keys[1], keys[3], *names(3, 20)]
        with pytest.raises(StoreFullError):
            store.write(names(9, 30), rows(names(9, 30)))
        assert len(store) == 10
        assert store.stats().evictions == {"disk→": 3}
    assert [version_of(key, store.get(key)) for key in store.keys()] == [1] * 10  # noqa: SIM118


def test_what_would_make_no_room_stays(disk):
    store = disk(64 * 20)
    for key, size in ((b"small", 1), (b"wall", 9), (b"large", 10)):
        put(store, key, nbytes=64 * size)
    with store.pin([b"wall"]):
        put(store, b"new", nbytes=64 * 10)
    assert set(store.keys()) == {b"small", b"wall", b"new"}


def test_room_in_pieces_is_used(disk):
    store = disk(6400)
    keys = names(10)
    store.write(keys, rows(keys))
    store.delete(keys[::2])
    new = names(5, 50)
    store.write(new, rows(new))
    out = torch.zeros(5, 640, dtype=torch.uint8)
    assert store.read(new, out) == [True] * 5
    assert torch.equal(out, rows(new))
    assert store.stats().evictions == {}


def test_a_pinned_payload_keeps_its_bytes_when_it_is_overwritten_or_deleted(disk):
    store = disk(1920)
    put(store, b"a", 1)
    with store.pin([b"a"]):
        at = store._table.entries[b"a"].at
        put(store, b"a", 2)
        assert store._table.entries[b"a"].at != at
        assert store.stats().used == 1280
        assert store.delete([b"a"]) == 1
        assert b"a" not in store
    assert store.stats().used == 0


def test_a_smaller_budget_keeps_what_was_put_last(disk, tmp_path):
    keys = names(10)
    with disk(6400) as store:
        store.write(keys, rows(keys))
        store.get(keys[0])
        put(store, keys[2], 2)
    store = disk(1920)
    assert store.keys() == [*keys[8:], keys[2]]
    assert [version_of(key, store.get(key)) for key in store.keys()] == [1, 1, 2]  # noqa: SIM118
    assert (tmp_path / "store" / "blocks-0000.slab").stat().st_size <= 1920
    assert store.check() == []
    store.close()
    store = disk(640)
    assert store.keys() == [keys[2]]
    assert version_of(keys[2], store.get(keys[2])) == 2


def test_blocks_end_with_the_process_and_their_room_is_free(disk):
    with disk(6400) as store:
        store.write([BlockKey(1, 2, n) for n in range(9)], torch.zeros(9, 640, dtype=torch.uint8))
        put(store, b"a")
    store = disk(6400)
    assert store.keys() == [b"a"]
    assert store.stats().used == 640


def test_the_slab_grows_with_what_is_put_and_gc_cuts_it_off(disk, tmp_path):
    store = disk(100 << 20)
    slab = tmp_path / "store" / "blocks-0000.slab"
    assert slab.stat().st_size == 0
    put(store, b"a")
    assert 1 << 20 <= slab.stat().st_size < 50 << 20
    put(store, b"b", nbytes=30 << 20)
    assert slab.stat().st_size >= 30 << 20
    store.delete([b"b"])
    assert store.gc() > 29 << 20
    assert slab.stat().st_size == 640
    assert version_of(b"a", store.get(b"a")) == 1


def test_gc_forgets_what_cannot_be_read(disk, tmp_path):
    store = disk()
    store.write(names(3), rows(names(3)))
    with open(tmp_path / "store" / "blocks-0000.slab", "r+b") as slab:
        slab.seek(700)
        slab.write(b"!")
    heard = []
    assert store.check(lambda done, total: heard.append((done, total))) == ["b'key 1' at 640: checksum"]
    assert heard == [(1, 3), (2, 3), (3, 3)]
    store.gc()
    assert store.keys() == [b"key 0", b"key 2"]
    assert store.stats().faults == {"checksum": 1}


def test_only_the_owner_may_look(tmp_path):
    old = os.umask(0)
    try:
        for umask in (0, 0o777):
            os.umask(umask)
            store = DiskStore(tmp_path / f"{umask}", 1 << 20)
            put(store, b"a")
            store.flush()
            folder = tmp_path / f"{umask}"
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert {path.name for path in folder.iterdir()} >= {"lock", "index.db", "blocks-0000.slab"}
            assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
            store.close()
    finally:
        os.umask(old)


def test_other_peoples_folders_are_left_alone(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "file").write_text("")
    for path, message in ((tmp_path, "other files"), (tmp_path / "file", "no folder"), ("a\0b", "no folder")):
        with pytest.raises(StoreError, match=message):
            DiskStore(path, 1 << 20)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    with pytest.raises(StoreError, match="no folder"):
        DiskStore(tmp_path / "none", 1 << 20, read_only=True)
    assert not (tmp_path / "none").exists()


def test_one_writer_also_within_a_process(disk):
    store = disk()
    with pytest.raises(StoreError, match=f"process {os.getpid()} writes to it"):
        disk()
    store.close()
    disk()


def test_a_reader_beside_the_writer(disk):
    store = disk(6400)
    store.write(names(5), rows(names(5)), tag=4)
    store.flush()
    reader = disk(6400, read_only=True)
    assert reader.keys() == names(5)
    assert version_of(b"key 3", reader.get(b"key 3")) == 1
    assert reader.tag(b"key 3") == 4
    assert reader.check() == []
    for call in (
        lambda: reader.put(b"a", torch.zeros(1, dtype=torch.uint8)),
        lambda: reader.delete([b"key 1"]),
        lambda: reader.delete_sequence(1),
        lambda: reader.reserve([b"a"], 1),
        lambda: reader.gc(),
    ):
        with pytest.raises(StoreError, match="read_only"):
            call()
    put(store, b"key 5")
    assert b"key 5" not in reader
    store.flush()
    with reader.pin([b"key 5"]) as pinned:
        assert pinned == [b"key 5"]
    store.delete(names(5))
    store.write(names(9, 10), rows(names(9, 10)))  # in their room, of which the reader does not know
    assert all(reader.get(key) is None for key in names(5))
    store.flush()
    out = torch.zeros(9, 640, dtype=torch.uint8)
    assert reader.read(names(9, 10), out) == [True] * 9
    reader.flush()
    assert reader.stats().used == store.stats().used


def test_a_closed_store_refuses(disk):
    store = disk()
    put(store, b"a")
    reservation = store.reserve([b"b"], 10)
    pin = store.pin([b"a"])
    pin.__enter__()
    store.close()
    store.close()
    for call in (
        lambda: store.get(b"a"),
        lambda: put(store, b"a"),
        lambda: store.keys(),
        lambda: store.check(),
        lambda: store.gc(),
        lambda: store.flush(),
        lambda: store.stats(),
        lambda: store.prefetch([b"a"]),
        lambda: b"a" in store,
        lambda: store.read([b"a"], torch.empty(1, 640, dtype=torch.uint8)),
        reservation.commit,
    ):
        with pytest.raises(StoreError, match="closed"):
            call()
    reservation.abort()
    pin.__exit__(None, None, None)


def test_closing_waits_for_reads_under_way(disk):
    reading, go = threading.Event(), threading.Event()

    class Slow(Faulty):
        def preadv(self, file, buffers, at):
            reading.set()
            assert go.wait(10)
            return super().preadv(file, buffers, at)

    store = disk(files=Slow())
    put(store, b"a")
    got = []
    reader = threading.Thread(target=lambda: got.append(store.get(b"a")))
    reader.start()
    assert reading.wait(10)
    put(store, b"b")  # no one waits for a read
    assert store.delete([b"a"]) == 1
    closer = threading.Thread(target=store.close)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    go.set()
    reader.join(10)
    closer.join(10)
    assert version_of(b"a", got[0]) == 1


@pytest.mark.parametrize("budget", [0, 63, -1, 1.5, "1", None, True, 1 << 62])
def test_a_budget_that_holds_nothing_is_refused(tmp_path, budget):
    with pytest.raises(StoreError, match="budget"):
        DiskStore(tmp_path / "store", budget)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("key", ["a", 1, None, b"", bytes(513), (1, 2, 3), []])
def test_what_is_no_key_is_refused(disk, key):
    store = disk()
    out = torch.zeros(1, 10, dtype=torch.uint8)
    store.put(b"before", out[0])
    for call in (
        lambda: store.put(key, out[0]),
        lambda: store.get(key),
        lambda: store.read([key], out),
        lambda: store.locate(key),
        lambda: store.delete([key]),
        lambda: store.pin([b"before", key]).__enter__(),
    ):
        with pytest.raises(StoreError, match="key"):
            call()
    assert store.stats().pinned == 0


def test_what_is_no_payload_is_refused(disk):
    store = disk()
    one = torch.zeros(2, 10, dtype=torch.uint8)
    for call in (
        lambda: store.put(b"a", one),
        lambda: store.put(b"a", one[0].float()),
        lambda: store.put(b"a", one[0, :0]),
        lambda: store.put(b"a", one[0], tag=256),
        lambda: store.put(b"a", one[0], tag="x"),
        lambda: store.write([b"a"], one),
        lambda: store.write([b"a", b"a"], one),
        lambda: store.write([b"a", b"b"], one.float()),
        lambda: store.write([b"a", b"b"], [1, 2]),
        lambda: store.write([b"a", b"b"], one[:, :0]),
        lambda: store.read([b"a", b"b"], one[0]),
        lambda: store.read([b"a", b"b"], one[:, ::2]),
        lambda: store.reserve([b"a"], 0),
        lambda: store.reserve([b"a"], "x"),
        lambda: store.reserve([b"a"], 10**12),
    ):
        with pytest.raises(StoreError) as refused:
            call()
        assert "\n" not in str(refused.value)
    assert store.stats().used == 0
