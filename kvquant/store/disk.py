"""The SSD tier: payloads in one preallocated file, verified at every read, and an index of those that outlive us.

    folder/lock              who writes here: the lock is the system's, the number in it the process
    folder/index.db          what is where (SQLite, see index.py, which also says what is not synced and why)
    folder/blocks-0000.slab  the payloads (see slab.py)

A payload is found once it is written. Rows follow in batches within about half a second, and with `flush` and
`close`, so that a killed process leaves rows as they were a moment before: a row whose room has other bytes by now
fails its checksum.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..errors import KVQuantWarning, StoreError, shown
from .base import ALIGNMENT, Key, StoreStats, as_payload, key_bytes
from .batch import Batch
from .counts import Counts
from .files import Files, Folder
from .index import FAILURES, Index
from .ledger import Ledger
from .slab import Entry, Slab, as_rows
from .staged import Staged
from .table import Table
from .upkeep import restore, watch_forks


class DiskStore(contextlib.AbstractContextManager["DiskStore"]):
    """A `BlockStore` in a folder, of at most ``budget`` bytes, one writer at a time; see the module docstring.

    ``read_only`` opens it beside a writer: it finds what that one has committed to the index. Raises `StoreError` for
    a folder that cannot be used, also if a writer, of any process, has it.
    """

    def __init__(
        self, path: str | os.PathLike[str], budget: int, *, read_only: bool = False, files: Files | None = None
    ) -> None:
        if isinstance(budget, bool) or not isinstance(budget, int) or not ALIGNMENT <= budget < 1 << 62:
            raise StoreError(f"{path}: budget {shown(budget)}; allowed: {ALIGNMENT} bytes or more")
        self.path, self.budget, self.read_only = Path(path), budget, read_only
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._table = Table(budget)
        self._counts = Counts()
        self._busy = 0  # transfers under way
        self._version = -1
        self._closed, self._pid = False, os.getpid()
        with contextlib.ExitStack() as stack:
            self._folder = Folder(files or Files(), self.path, read_only=read_only)
            stack.callback(self._folder.close)
            self._slab = Slab(self._folder, self._table.allocator.capacity)
            stack.callback(self._slab.close)
            self._index = Index(self.path, read_only=read_only, holds=self._slab.size > 0)
            stack.callback(self._index.close)
            self._ledger = Ledger(self._index, self._table, self._lock, self._counts.faults)
            self._restore()
            stack.pop_all()
        watch_forks(self)
        self._index.warn()

    def reserve(self, keys: Sequence[Key], nbytes: int, tag: int = 0, *, kept: bool = False) -> Staged[list[Entry]]:
        """Room for payloads, see `BlockStore` and `write`, which the commit does; it may raise `StoreError` too."""
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
            raise StoreError(f"payloads of {shown(nbytes)} bytes; allowed: one byte or more")
        entries = self._reserve(keys, nbytes, tag, kept)
        try:
            payloads = torch.empty(len(entries), nbytes, dtype=torch.uint8)
        except BaseException:
            self._give_back(entries)
            raise
        return Staged(entries, payloads, self._commit, self._give_back)

    def put(self, key: Key, payload: Tensor, tag: int = 0) -> None:
        """Store a payload, uint8 ``[nbytes]`` on any device; see `write`."""
        self.write([key], as_payload(payload).detach().cpu().unsqueeze(0), tag)

    def write(self, keys: Sequence[Key], payloads: Tensor, tag: int = 0, *, kept: bool = False) -> None:
        """Store payloads, uint8 ``[keys, nbytes]`` on the CPU, side by side where there is room, in a call a range.

        Those that are ``kept`` leave for no others, only when they are deleted or replaced. Raises `StoreFullError`
        where the budget or the device has no room, `StoreError` for other failures; nothing is stored then.
        """
        payloads = as_rows("payloads", payloads, len(keys))
        if not len(keys):
            return
        entries = self._reserve(keys, payloads.shape[1], tag, kept)
        self._commit(entries, payloads if payloads.stride(1) == 1 else payloads.contiguous())

    def fits(self, count: int, nbytes: int) -> bool:
        """Whether there is room for so many payloads without anybody leaving."""
        with self._lock:
            return self._begin().fits(count, nbytes)

    def let_go(self) -> list[Key]:
        """The keys of what left for others since this was asked last; nothing the first time."""
        with self._lock:
            found, self._table.let_go = self._table.let_go or [], []
            return found

    def _reserve(self, keys: Sequence[Key], nbytes: int, tag: int, kept: bool) -> list[Entry]:
        if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag <= 255:
            raise StoreError(f"tag {shown(tag)}; allowed: 0 to 255")
        with self._writing():
            return self._table.reserve(keys, nbytes, tag, kept, self._grow)

    def _commit(self, entries: list[Entry], payloads: Tensor) -> None:
        """Write what was reserved and let it be found; gives the room back and raises `StoreError` if that fails."""
        try:
            with self._transfer():
                self._slab.write(entries, payloads)
                with self._writing():
                    self._table.publish(entries)
                    self._counts.puts += len(entries)
                    self._counts.written += payloads.numel()
        except BaseException as error:
            with self._lock:
                self._table.give_back(entries)
                self._counts.refused(error)
            raise
        self._index.warn()

    def _grow(self, end: int) -> None:
        try:
            self._slab.grow(end)
        except StoreError as error:
            self._counts.refused(error)
            raise

    def _give_back(self, entries: list[Entry]) -> None:
        with self._lock:
            self._table.give_back(entries)

    def get(self, key: Key) -> Tensor | None:
        """A copy of the payload, verified, or None."""
        with self._lock:
            entry = self._begin().find(key)
            if entry is None:
                self._counts.misses += 1
                return None
            nbytes = entry.nbytes
        out = torch.empty(1, nbytes, dtype=torch.uint8)
        return out[0] if self.read([key], out)[0] else None

    def batch(self, keys: Sequence[Key], nbytes: int) -> Batch | None:
        """What is under ``keys``, to be read again and again; None if one is not there in this size."""
        with self._lock:
            table = self._begin()
            found = [entry for key in keys if (entry := table.find(key)) and entry.nbytes == nbytes]
        keys = list(keys)
        return Batch(self._slab, found, lambda out: all(self.read(keys, out))) if len(found) == len(keys) else None

    def read(self, keys: Sequence[Key], out: Tensor) -> list[bool]:
        """Read payloads into the rows of ``out``, contiguous uint8 ``[keys, nbytes]`` on the CPU; whether each came.

        Neighbours in the file are read in one call. What is not there, is of another size or cannot be read as it was
        written is a miss; its row is arbitrary then. Damage is counted, and forgotten.
        """
        as_rows("out", out, len(keys))
        if not out.is_contiguous():
            raise StoreError(f"out of strides {out.stride()}; allowed: a contiguous tensor")
        nbytes = out.shape[1]
        if not len(keys):
            return []
        with self._lock:
            table = self._begin()
            found = table.pin(keys)
            self._busy += 1
        wrong: dict[int, str] = {}
        try:
            wanted = [entry if entry and entry.nbytes == nbytes else None for entry in found]
            wrong = self._slab.read(wanted, out)
        finally:
            with self._lock:
                table.unpin(found)
                self._rest()
                self._counts.got(wanted, wrong)
                for row in wrong:
                    table.drop(wanted[row])
        if not wrong:
            return [entry is not None for entry in wanted]
        return [entry is not None and row not in wrong for row, entry in enumerate(wanted)]

    def locate(self, key: Key) -> tuple[int, int] | None:
        """A payload's size in bytes and its tag, or None."""
        with self._lock:
            entry = self._begin().find(key)
            return (entry.nbytes, entry.tag) if entry else None

    def tag(self, key: Key) -> int | None:
        """The tag it was put with, or None."""
        return located[1] if (located := self.locate(key)) else None

    def prefetch(self, keys: Sequence[Key]) -> None:
        """Have the system read what will be asked for soon."""
        with self._transfer():
            with self._lock:
                found = [entry for key in keys if (entry := self._begin().find(key))]
            self._slab.expect(found)

    @contextlib.contextmanager
    def pin(self, keys: Iterable[Key]) -> Iterator[list[Key]]:
        """Keep those of ``keys`` that are there, which it gives; others of another process may still replace them."""
        with self._lock:
            table = self._begin()  # read-only stores get another one when rows have changed
            held = table.pin(keys)
        try:
            yield [entry.key for entry in held if entry]
        finally:
            with self._lock:
                table.unpin(held)

    def delete(self, keys: Iterable[Key]) -> int:
        """Forget ``keys``; how many were there. Pinned ones are not found any more, and their room follows."""
        with self._writing():
            return sum(self._table.remove(key) for key in keys if key_bytes(key))

    def delete_sequence(self, sequence: int) -> int:
        """Forget every `BlockKey` of a sequence; how many there were."""
        with self._writing():
            return sum(self._table.remove(key) for key in self._table.sequence(sequence))

    def keys(self) -> list[Key]:
        """All keys that can be got, least recently used first."""
        with self._lock:
            return list(self._begin().entries)

    def __contains__(self, key: Key) -> bool:
        return self.locate(key) is not None

    def __len__(self) -> int:
        return len(self.keys())

    def stats(self) -> StoreStats:
        """What it holds and has done; ``used`` are bytes of the slab that are taken."""
        with self._lock:
            return self._counts.stats(self._begin(), self.budget)

    def check(self, progress: Callable[[int, int], None] | None = None) -> list[str]:
        """What is wrong within, a line each; reads every payload, ``progress`` hears how many of how many are read."""
        wrong = [f"{shown(entry.key)} at {entry.at}: {fault}" for entry, fault in self._probe(progress) if fault]
        if self.read_only:
            return wrong
        with self._lock:
            wrong += self._table.check()
            if not self._table.end() <= self._slab.size + ALIGNMENT <= self.budget + ALIGNMENT:
                wrong.append(f"the slab has {self._slab.size} bytes: too few, or more than the budget")
        return wrong + self._ledger.check()

    def gc(self) -> int:
        """Forget what cannot be read, cut off the free end of the slab, remove damaged indexes; bytes that freed."""
        with self._writing():
            before = self._folder.footprint()
        for entry, fault in self._probe():
            if fault:
                with self._lock:
                    self._counts.faults[fault] += 1
                    self._table.drop(entry)
        self.shrink()
        return max(before - self._folder.footprint(), 0)

    def shrink(self) -> None:
        """What `gc` does beside reading: cut off the free end of the slab, and remove damaged indexes."""
        self.flush()
        try:
            self._ledger.shrink()
            with self._writing():
                self._slab.shrink(self._table.end())
        except (OSError, *FAILURES) as error:
            raise StoreError(f"{self.path}: {error}; allowed: a folder that can be written to") from error

    def flush(self) -> None:
        """Write all rows to the index, so that the payloads of bytes keys outlive the process; syncs nothing."""
        with self._lock:
            self._usable()
        failed = None if self.read_only else self._ledger.commit()
        self._index.warn()
        if failed:
            raise StoreError(f"{self.path}: rows cannot be written to the index ({failed}); allowed: to try again")

    def close(self) -> None:
        """Wait for transfers under way, flush, and let go of the folder; more calls, commits too, are refused."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            while self._busy:
                self._idle.wait()
        try:
            failed = None if self.read_only else self._ledger.stop()
        finally:
            self._index.close()
            self._slab.close()
            self._folder.close()
        self._index.warn()
        if failed:
            warnings.warn(f"{self.path}: what was put last is lost ({failed})", KVQuantWarning, stacklevel=2)

    def forked(self) -> None:
        """In a child process: the folder stays the parent's, and this store is closed."""
        if not self._closed:
            self._lock = threading.RLock()  # another thread may have had them
            self._closed, self._busy = True, 0
            self._slab.close()
            self._folder.close()
            _inherited.append(self._index)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _probe(self, progress: Callable[[int, int], None] | None = None) -> Iterator[tuple[Entry, str | None]]:
        """Read every payload there is and say what is wrong with it."""
        for done, key in enumerate(keys := self.keys(), 1):
            with self.pin([key]), self._transfer():
                with self._lock:
                    entry = self._table.entries.get(key)
                if entry:
                    wrong = self._slab.read([entry], torch.empty(1, entry.nbytes, dtype=torch.uint8))
                    yield entry, wrong.get(0)
            if progress:
                progress(done, len(keys))

    def _restore(self) -> None:
        """Take up what the index has."""
        rows, others = self._index.load()
        self._counts.faults += restore(self._table, self._slab, rows, move=not self.read_only)
        if others:
            self._counts.faults["row"] += others
        if self.read_only:
            return
        self._ledger.commit(anew=bool(others))
        try:
            self._slab.shrink(self._table.allocator.capacity)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be cut down to the budget ({error}); allowed: what can") from error

    def _begin(self) -> Table:
        """The table of a store that is open and, beside a writer, up to date."""
        self._usable()
        if self.read_only:
            self._refresh()
        return self._table

    def _refresh(self) -> None:
        """Take up what the writer has committed since."""
        try:
            if (version := self._index.version()) == self._version:
                return
            self._slab.refresh()
            self._table = Table(max(self._slab.size + ALIGNMENT - 1, ALIGNMENT))
            restore(self._table, self._slab, self._index.load()[0], move=False)
            self._version = version
        except (OSError, *FAILURES):
            self._counts.faults["index"] += 1

    @contextlib.contextmanager
    def _transfer(self) -> Iterator[None]:
        """Keep the files open meanwhile; the lock is not held."""
        with self._lock:
            self._usable()
            self._busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._rest()

    def _rest(self) -> None:
        self._busy -= 1
        if self._closed and not self._busy:
            self._idle.notify_all()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the lock, of a store that may be written to."""
        with self._lock:
            self._usable()
            if self.read_only:
                raise StoreError(f"{self.path}: opened with read_only=True; allowed: to get")
            yield
            if self._table.changed:
                self._ledger.nudge()

    def _usable(self) -> None:
        if self._closed:
            where = "" if self._pid == os.getpid() else f" in this process; process {self._pid} has it"
            raise StoreError(f"{self.path}: the store is closed{where}; allowed: a store that is open")


_inherited: list[Index] = []  # connections of a parent process: closing them is not a child's business
