"""What takes long: kills, flips and threads, in any number.

    python -m tests.store.torture --kills 200 --flips 10000 --seconds 60

The suite runs the same with small numbers. Each part fails with an `AssertionError`, else ends with a line of counts.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

from kvquant.errors import KVQuantWarning, StoreFullError
from kvquant.store.disk import DiskStore
from kvquant.testing import payload_of, version_of
from tests.store.faulty import key_of

KEYS = 60
BUDGET = 300_000


def deletes(version: int) -> bool:
    return version % 7 == 0


class Shared:
    """Versions a child leaves behind when it is killed: by key, the last that was begun, done, and flushed."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 24 * KEYS)

    def get(self, what: int, key: int) -> int:
        return struct.unpack_from("<q", self._map, 24 * key + 8 * what)[0]

    def set(self, what: int, key: int, value: int) -> None:
        struct.pack_into("<q", self._map, 24 * key + 8 * what, value)


BEGUN, DONE, FLUSHED = range(3)


def writer(folder: Path, shared: Shared, seed: int) -> None:
    """Put, overwrite, delete and flush until killed."""
    rng = random.Random(seed)
    store = DiskStore(folder, BUDGET)
    while True:
        for _ in range(rng.randint(1, 40)):
            many = rng.sample(range(KEYS), rng.choice([1, 1, 4]))
            nbytes = rng.choice([8, 100, 4096, 9000])
            versions = {number: shared.get(BEGUN, number) + 1 for number in many}
            for number, version in versions.items():
                shared.set(BEGUN, number, version)
            gone = [number for number, version in versions.items() if deletes(version)]
            there = [number for number in many if number not in gone]
            store.delete([key_of(number) for number in gone])
            if there:
                payloads = torch.stack([payload_of(key_of(n), versions[n], nbytes) for n in there])
                store.write([key_of(n) for n in there], payloads, tag=7)
            for number, version in versions.items():
                shared.set(DONE, number, version)
        store.flush()
        for number in range(KEYS):
            shared.set(FLUSHED, number, shared.get(DONE, number))


def kills(count: int, seed: int = 0) -> Counter[str]:
    """Kill a writer ``count`` times, each time in the middle of something, and look at what it left."""
    rng = random.Random(seed)
    shared, seen = Shared(), Counter[str]()
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / "store"
        for turn in range(count):
            child = os.fork()
            if not child:
                with contextlib.suppress(BaseException):
                    writer(folder, shared, seed * 1000 + turn)
                os._exit(1)
            time.sleep(rng.uniform(0.005, 0.12))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), "the writer failed"
            with DiskStore(folder, BUDGET) as store:
                for number in range(KEYS):
                    key = key_of(number)
                    payload, version = store.get(key), 0
                    if payload is not None:
                        assert isinstance(key, bytes), "a block outlived its process"
                        version = version_of(key, payload)
                        assert shared.get(FLUSHED, number) <= version <= shared.get(BEGUN, number)
                        assert not deletes(version)
                        assert store.tag(key) == 7
                    for what in (DONE, FLUSHED):  # that is what the next writer finds
                        shared.set(what, number, version)
                    seen["miss" if payload is None else "hit"] += 1
                seen.update({f"fault: {kind}": n for kind, n in store.stats().faults.items()})
                assert store.check() == []
                assert store.stats().used <= BUDGET
    return seen


def small_store(folder: Path) -> dict[bytes, torch.Tensor]:
    """A folder with payloads of many sizes, as one that was killed leaves it; what is in it."""
    payloads = {b"key %d" % n: payload_of(b"key %d" % n, n, 300 + 450 * n) for n in range(10)}
    live = folder.with_name("live")
    with DiskStore(live, 65536) as store:
        for key, payload in payloads.items():
            store.put(key, payload, tag=len(key))
        store.flush()
        shutil.copytree(live, folder)
    return payloads


class Snapshot:
    """The files of a folder, to be laid again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}

    def lay(self, **changed: bytes) -> None:
        for path in self.folder.iterdir():
            if path.name not in self.files:
                path.unlink()
        for name, content in {**self.files, **changed}.items():
            path = self.folder / name
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)


def survives(folder: Path, payloads: dict[bytes, torch.Tensor], budget: int = 65536) -> tuple[int, bool]:
    """Open a folder somebody tampered with: right bytes or misses. How many hits, and whether it was warned of."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with DiskStore(folder, budget) as store:
            got = {key: store.get(key) for key in {*payloads, *store.keys()}}
            tags = {key: store.tag(key) for key in payloads}
            assert store.check() == []
            assert store.stats().used <= budget
            assert (folder / "blocks-0000.slab").stat().st_size <= budget
    assert {warning.category for warning in warned} <= {KVQuantWarning}
    hits = 0
    for key, payload in got.items():
        if payload is not None:
            assert key in payloads
            assert torch.equal(payload, payloads[key])
            assert tags[key] == len(key)
            hits += 1
    return hits, bool(warned)


def flips(count: int, seed: int = 0) -> Counter[str]:
    """Change one bit of a file at a time, ``count`` times."""
    rng, seen = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as where:
        killed = Path(where) / "killed"
        payloads = small_store(killed)
        closed = Path(where) / "closed"
        shutil.copytree(killed, closed)
        assert survives(closed, payloads) == (len(payloads), False)  # and is closed in good order by that
        snapshots = [Snapshot(killed), Snapshot(closed)]
        places = [(s, name) for s in snapshots for name in s.files if s.files[name] and name != "lock"]
        for _ in range(count):
            snapshot, name = rng.choice(places)
            content = bytearray(snapshot.files[name])
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            snapshot.lay(**{name: bytes(content)})
            hits, warned = survives(snapshot.folder, payloads)
            seen["all there" if hits == len(payloads) else "misses" if hits else "empty"] += 1
            seen["index moved aside"] += warned
    return seen


def threads(seconds: float, seed: int = 0) -> Counter[str]:
    """Eight threads get, put, delete and pin at once."""
    seen, failures = Counter[str](), []
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as where, DiskStore(Path(where) / "store", BUDGET) as store:
        work = [threading.Thread(target=_mix, args=(store, n + seed, end, seen, failures)) for n in range(8)]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join(seconds + 60)
            assert not thread.is_alive(), "a thread hangs"
        assert not failures, failures[0]
        stats = store.stats()
        assert stats.pinned == 0
        assert not stats.faults
        assert store.check() == []
    return seen


def _mix(store: DiskStore, seed: int, end: float, seen: Counter[str], failures: list[BaseException]) -> None:
    rng = random.Random(seed)
    version = seed << 40
    try:
        while time.monotonic() < end and not failures:
            action = rng.choice(["get", "get", "read", "put", "write", "delete", "pin", "abort"])
            keys = [key_of(number) for number in rng.sample(range(KEYS), 6)]
            nbytes = rng.choice([100, 4096, 9000])
            version += 1
            try:
                _step(store, action, keys, nbytes, version)
            except StoreFullError:  # others have pinned, or are about to put
                action = "full"
            seen[action] += 1
            assert store.stats().used <= BUDGET
    except BaseException as error:
        failures.append(error)


def _step(store: DiskStore, action: str, keys: list, nbytes: int, version: int) -> None:
    if action == "get":
        payload = store.get(keys[0])
        assert payload is None or version_of(keys[0], payload) >= 0
    elif action == "read":
        out = torch.empty(len(keys), nbytes, dtype=torch.uint8)
        for key, row, came in zip(keys, out, store.read(keys, out), strict=True):
            assert not came or version_of(key, row) >= 0
    elif action == "put":
        store.put(keys[0], payload_of(keys[0], version, nbytes))
    elif action == "write":
        store.write(keys, torch.stack([payload_of(key, version, nbytes) for key in keys]))
    elif action == "delete":
        store.delete(keys[:2])
    elif action == "abort":
        with store.reserve(keys[:2], nbytes) as reservation:
            reservation.payloads.zero_()
    else:
        with store.pin(keys) as pinned:
            for key in pinned:
                payload = store.get(key)
                assert payload is None or version_of(key, payload) >= 0  # another thread may delete it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--flips", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for part, count in ((kills, given.kills), (flips, given.flips), (threads, given.seconds)):
        if count:
            began = time.monotonic()
            counts = ", ".join(f"{what} {n}" for what, n in sorted(part(count, given.seed).items()))
            print(f"{part.__name__} {count:g}: {counts} ({time.monotonic() - began:.1f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
