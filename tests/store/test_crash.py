"""What a process leaves behind, whether it ends or is ended. `tests.store.torture` runs the same for longer."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvquant.blocks import BlockKey
from kvquant.errors import StoreError, StoreFullError
from kvquant.store.disk import DiskStore
from kvquant.testing import payload_of, version_of
from tests.store import torture
from tests.store.faulty import Faulty, key_of

ROOT = Path(__file__).parent.parent.parent


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run in a new process; its output."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)


def test_killed_writers_leave_right_bytes_or_misses():
    # In a process of its own: it forks, which is for processes of one thread.
    command = [sys.executable, "-m", "tests.store.torture", "--kills", "6"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "hit" in ended.stdout


def test_eight_threads_never_see_wrong_bytes():
    counts = torture.threads(1.5)
    assert min(counts[action] for action in ("get", "read", "put", "write", "delete", "pin", "abort")) > 0


def test_a_new_process_finds_what_was_put_and_a_second_writer_is_refused(disk, tmp_path):
    store = disk()
    payloads = torch.stack([payload_of(b"key %d" % n, n, 5000) for n in range(10)])
    store.write([b"key %d" % n for n in range(10)], payloads, tag=9)
    store.put(BlockKey(1, 2, 3), payloads[0])
    code = (
        "import sys; from kvquant.store.disk import DiskStore; from kvquant.errors import StoreError\n"
        "try: DiskStore(sys.argv[1], 1 << 20)\n"
        "except StoreError as error: print(error)"
    )
    assert f"process {os.getpid()} writes to it" in python(code, tmp_path / "store").stdout
    store.close()
    code = (
        "import sys; from kvquant.store.disk import DiskStore; from kvquant.testing import version_of\n"
        "with DiskStore(sys.argv[1], 1 << 20) as store:\n"
        "    print([version_of(k, store.get(k)) for k in store.keys()], store.locate(b'key 3'), store.check())"
    )
    assert python(code, tmp_path / "store").stdout.strip() == f"{list(range(10))} (5000, 9) []"


def test_rows_follow_within_a_moment_without_another_put(disk, tmp_path):
    code = (
        "import os, sys, time, torch; from kvquant.store.disk import DiskStore\n"
        "store = DiskStore(sys.argv[1], 1 << 20); store.put(b'a', torch.ones(99, dtype=torch.uint8))\n"
        "time.sleep(1.2); os._exit(0)"
    )
    python(code, tmp_path / "store")
    assert torch.equal(disk().get(b"a"), torch.ones(99, dtype=torch.uint8))


def test_a_forked_child_does_not_use_the_parents_store(disk):
    store = disk()
    store.put(b"a", payload_of(b"a", 1, 100))
    child = os.fork()
    if not child:
        status = 1
        try:
            store.get(b"a")
        except StoreError as error:
            status = 0 if f"process {os.getppid()} has it" in str(error) else 2
        store.close()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert version_of(b"a", store.get(b"a")) == 1


def work(store: DiskStore) -> list[StoreError]:
    """Puts of all kinds; those that were refused."""
    refused = []
    for turn in range(1, 9):
        for number in range(turn, turn + 4):
            key = key_of(number)
            try:
                store.put(key, payload_of(key, turn, 900 * turn), tag=turn)
            except StoreError as error:
                refused.append(error)
        keys = [key_of(number) for number in range(turn, turn + 6, 2)]
        try:
            store.write(keys, torch.stack([payload_of(key, turn, 1000) for key in keys]), tag=turn)
        except StoreError as error:
            refused.append(error)
    return refused


def sound(store: DiskStore) -> None:
    for key in list(store.keys()):
        payload = store.get(key)
        assert payload is None or version_of(key, payload) == store.tag(key)


@pytest.mark.parametrize("stuck", [False, True])
@pytest.mark.parametrize(
    ("call", "code", "kind"),
    [
        ("pwritev", errno.ENOSPC, StoreFullError),
        ("pwritev", errno.EIO, StoreError),
        ("allocate", errno.ENOSPC, StoreFullError),
        ("allocate", errno.EDQUOT, StoreFullError),
    ],
)
def test_whichever_write_fails_the_store_stays_sound(fast_path, call, code, kind, stuck):
    for at in range(1000):
        files = Faulty(call, at=at + (call == "pwritev"), code=code, stuck=stuck)  # the first is the process's number
        with DiskStore(fast_path / f"{at}", 40_000, files=files) as store:
            refused = work(store)
            assert all(type(error) is kind and "\n" not in str(error) for error in refused)
            # A file that can't grow by a step may still grow by what is needed.
            assert bool(refused) == (files.failed and (call == "pwritev" or stuck))
            assert sum(store.stats().faults.values()) >= bool(refused)
            sound(store)
            files.calls = ()
            assert not work(store)
            assert store.check() == []
        with DiskStore(fast_path / f"{at}", 40_000) as store:
            sound(store)
            assert store.check() == []
        if not files.failed or (stuck and at > 4):
            break
    assert at


def test_systems_without_preallocation_get_a_longer_file(disk):
    store = disk(files=Faulty("allocate", code=errno.EOPNOTSUPP, stuck=True))
    assert not work(store)
    sound(store)


def test_short_transfers_are_continued(disk):
    files = Faulty()
    files.short = 700
    store = disk(files=files)
    assert not work(store)
    keys = [b"key %d" % n for n in range(3)]
    payloads = torch.stack([payload_of(key, 1, 1001) for key in keys])  # with gaps between
    store.write(keys, payloads)
    assert files.count["pwritev"] > 5
    out = torch.zeros_like(payloads)
    assert store.read(keys, out) == [True] * 3
    assert torch.equal(out, payloads)


def test_faults_of_reads_are_misses_that_are_counted(disk):
    files = Faulty(code=errno.EIO)
    store = disk(files=files)
    keys = [b"a", b"b", b"c", b"d"]
    for fault, settings in {
        "io": {"calls": ("preadv",), "stuck": True, "at": 0},
        "short read": {"cut": True},
        "checksum": {"flip": True},
    }.items():
        store.write(keys, torch.stack([payload_of(key, 1, 640) for key in keys]))
        vars(files).update(settings, seen=0)
        assert store.get(b"a") is None
        assert store.stats().faults[fault] == 1
        vars(files).update(calls=(), cut=False, flip=False)
        assert b"a" not in store
        assert version_of(b"b", store.get(b"b")) == 1
        store.delete(keys)
    # One bad block costs its neighbours nothing.
    store.write(keys, torch.stack([payload_of(key, 2, 640) for key in keys]))
    vars(files).update(calls=("preadv",), stuck=False, at=0, seen=0)
    out = torch.zeros(4, 640, dtype=torch.uint8)
    assert store.read(keys, out) == [True] * 4


def test_no_room_is_said_at_once_and_pins_come_back(disk):
    store = disk(6400)
    keys = [b"key %d" % n for n in range(10)]
    store.write(keys, torch.stack([payload_of(key, 1, 640) for key in keys]))
    with store.pin(keys) as pinned:
        assert pinned == keys
        for _ in range(3):
            with pytest.raises(StoreFullError, match="10 payloads pinned"):
                store.put(b"new", payload_of(b"new", 1, 640))
        with pytest.raises(StoreFullError):
            store.put(keys[0], payload_of(keys[0], 2, 640))  # a pinned one is not overwritten in place
        assert store.stats().pinned == 10
        assert store.delete(keys[:1]) == 1
        assert store.get(keys[0]) is None
        with pytest.raises(StoreFullError):  # its room is given back with the pin
            store.put(b"new", payload_of(b"new", 1, 640))
    store.put(b"new", payload_of(b"new", 1, 640))
    with pytest.raises(StoreFullError):
        store.put(b"large", payload_of(b"large", 1, 6401))
    assert len(store) == 10
    for n in range(10_000):
        assert b"%d" % n not in store
