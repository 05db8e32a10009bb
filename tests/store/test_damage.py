"""Files that somebody, or something, has changed: right bytes or misses, and at most a warning."""

from __future__ import annotations

import shutil
import sqlite3

import pytest
import torch

from kvquant.errors import KVQuantWarning, StoreError
from kvquant.store.disk import DiskStore
from kvquant.store.index import Row
from kvquant.testing import payload_of
from tests.store import torture
from tests.store.torture import Snapshot, small_store, survives

INDEX, SLAB = "index.db", "blocks-0000.slab"


@pytest.fixture
def folder(fast_path):
    return fast_path / "store"


@pytest.fixture
def payloads(folder):
    """What is in the folder, which is closed in good order."""
    payloads = small_store(folder)
    assert survives(folder, payloads) == (10, False)
    return payloads


def test_single_bits_anywhere():
    counts = torture.flips(300)
    assert counts["misses"]
    assert counts["all there"]


@pytest.mark.parametrize("name", [SLAB, INDEX])
def test_cut_short_anywhere(folder, payloads, name):
    snapshot = Snapshot(folder)
    whole = snapshot.files[name]
    for size in range(0, len(whole), 4096):
        snapshot.lay(**{name: whole[:size]})
        survives(folder, payloads)


def test_a_missing_slab_costs_all_and_a_missing_index_too(folder, payloads):
    snapshot = Snapshot(folder)
    for name in (SLAB, INDEX):
        (folder / name).unlink()
        assert survives(folder, payloads) == (0, False)
        snapshot.lay()


def older(path):
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version=0")
    database.close()


def other_table(path):
    with sqlite3.connect(path) as database:
        database.execute("ALTER TABLE payloads ADD COLUMN more")
    database.close()


@pytest.mark.parametrize(
    "damage",
    [
        older,
        other_table,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"garbage" * 999),
        lambda path: path.write_bytes(path.read_bytes()[:100] + bytes(4000)),
    ],
)
def test_an_index_that_is_none_is_moved_aside(folder, payloads, damage):
    for _ in range(5):
        with DiskStore(folder, 65536) as store:
            store.put(b"key 1", payloads[b"key 1"], tag=5)
        damage(folder / INDEX)
        with pytest.warns(KVQuantWarning, match="moved aside"):
            store = DiskStore(folder, 65536)
        assert len(store) == 0
        store.put(b"key 2", payloads[b"key 2"], tag=5)
        assert store.check() == []
        store.close()
    assert len(list(folder.glob("index.db.damaged-*"))) == 3
    with DiskStore(folder, 65536) as store:
        assert torch.equal(store.get(b"key 2"), payloads[b"key 2"])
        assert store.gc() > 0
        assert not list(folder.glob("index.db.damaged-*"))
        assert store.check() == []


def test_an_index_damaged_while_it_is_in_use_is_written_anew(folder, payloads):
    with DiskStore(folder, 65536) as store:
        with open(folder / INDEX, "r+b") as file:
            file.seek(0)
            file.write(b"\xff" * (folder / INDEX).stat().st_size)
        # Another connection: what this one has read already it need not read again.
        store._index.close()
        store._index._db = sqlite3.connect(folder / INDEX, isolation_level=None, check_same_thread=False)
        store.put(b"new", payload_of(b"new", 1, 100), tag=3)
        with pytest.warns(KVQuantWarning, match="moved aside"):
            store.flush()
        assert len(store) == 11
        assert store.check() == []
    assert survives(folder, {**payloads, b"new": payload_of(b"new", 1, 100)}) == (11, False)


def test_an_index_that_cannot_be_written_now_is_written_later(folder, payloads):
    with DiskStore(folder, 65536) as store:
        other = sqlite3.connect(folder / INDEX, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        store._index._db.execute("PRAGMA busy_timeout=10")
        store.put(b"new", payload_of(b"new", 1, 100), tag=3)
        with pytest.raises(StoreError, match="locked"):
            store.flush()
        other.execute("ROLLBACK")
        other.close()
        store.flush()
        assert store.stats().faults["index"] >= 1
    assert survives(folder, {**payloads, b"new": payload_of(b"new", 1, 100)})[0] == 11


HUGE = (10**18, -64, 10**12, (1 << 63) - 1, -1, 0, 32, "text", None, 1.5, b"blob")


def hostile():
    """Rows that are wrong in one column each, sealed as ours would be where they can be."""
    good = Row(b"row", 0, 300, 3, 99, bytes(16))
    for column in ("at", "nbytes", "tagged", "turn", "checksum", "key"):
        for value in (*HUGE, bytes(600)):
            row = good._replace(**{column: value})
            try:
                seal = row.seal()
            except Exception:  # not even that
                seal = bytes(8)
            yield (*row, seal)


def test_hostile_rows_are_dropped_and_counted(folder, payloads):
    snapshot = Snapshot(folder)
    for row in hostile():
        snapshot.lay()
        database = sqlite3.connect(folder / INDEX, isolation_level=None)
        try:
            database.execute("INSERT OR REPLACE INTO payloads VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        except sqlite3.IntegrityError:  # a key of NULL
            continue
        finally:
            database.close()
        with DiskStore(folder, 65536) as store:
            assert store.get(b"row") is None
            assert sum(store.stats().faults.values()) >= 1
        assert survives(folder, payloads)[0] >= 9  # a row may claim another's room, and is then the later one


def test_of_rows_that_overlap_the_later_one_stays(folder, payloads):
    database = sqlite3.connect(folder / INDEX, isolation_level=None)
    for n, at in enumerate((0, 64, 128)):
        row = Row(b"over %d" % n, at, 100, 0, 1000 + n, bytes(16))
        database.execute("INSERT INTO payloads VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, row.seal()))
    database.close()
    store = DiskStore(folder, 65536)
    assert store.stats().faults["row"] >= 2
    assert b"over 2" in store
    assert b"over 1" not in store
    assert b"over 0" in store
    assert [line.split(" at ")[0] for line in store.check()] == ["b'over 0'", "b'over 2'"]  # neither has a payload
    assert store.gc() >= 0
    assert store.check() == []
    store.close()


def test_a_row_under_another_key_or_tag_is_a_miss(folder, payloads):
    database = sqlite3.connect(folder / INDEX, isolation_level=None)
    rows = [Row(*columns[:6]) for columns in database.execute("SELECT * FROM payloads")]
    for change in ({"key": b"stolen"}, {"tagged": 77}):
        row = rows[3]._replace(**change)
        database.execute("DELETE FROM payloads WHERE at = ?", (row.at,))
        database.execute("INSERT INTO payloads VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, row.seal()))
        with DiskStore(folder, 65536) as store:
            assert store.get(row.key) is None
            assert store.stats().faults == {"checksum": 1}
    database.close()


def test_new_payloads_under_an_old_index_are_misses(folder, payloads):
    old = {name: (folder / name).read_bytes() for name in (INDEX,)}
    with DiskStore(folder, 65536) as store:
        store.delete(payloads)
        for n in range(10):
            store.put(b"other %d" % n, payload_of(b"other %d" % n, 1, 2000))
    (folder / INDEX).write_bytes(old[INDEX])
    hits, _ = survives(folder, payloads)
    assert hits < 10


def test_links_lead_nowhere(tmp_path, folder, payloads):
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(StoreError, match="no folder for a store"):
        DiskStore(tmp_path / "link", 65536)
    for name in (SLAB, INDEX, "lock", f"{INDEX}-wal"):
        shutil.copytree(folder, tmp_path / name)
        (tmp_path / name / name).unlink(missing_ok=True)
        (tmp_path / "elsewhere").write_bytes(b"precious")
        (tmp_path / name / name).symlink_to(tmp_path / "elsewhere")
        for read_only in (False, True):
            if read_only and name == "lock":
                continue  # it is not opened
            with pytest.raises(StoreError, match="link"):
                DiskStore(tmp_path / name, 65536, read_only=read_only)
        assert (tmp_path / "elsewhere").read_bytes() == b"precious"
    (tmp_path / SLAB / SLAB).unlink()
    (tmp_path / SLAB / SLAB).mkdir()
    with pytest.raises(StoreError, match=SLAB):
        DiskStore(tmp_path / SLAB, 65536)
