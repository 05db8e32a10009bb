"""The file payloads lie in, and moving them in and out of it, verified.

It grows a stretch at a time, set aside by the file system, so that a payload's blocks lie together and a write to
room that is there cannot run out of space. Places are multiples of 64 bytes, as those in memory: nearly every
payload's size is one too, so payloads written together have no gaps between them and go through one call. Larger
places would save the reads that come before writes of a page's part, of which each call has two, and cost a page's
half for every payload.

All methods may be called from several threads, on places that nobody writes to meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from ..errors import StoreError, StoreFullError, shown
from .base import ALIGNMENT, Key, key_bytes
from .files import Buffers, Folder

NAME = "blocks-0000.slab"
STEP = 16 << 20  # bytes it grows by; less only where the budget ends
digest = xxhash.xxh3_128_digest  # lets other threads run while it works through something long
SECTOR = 512  # bytes, of which devices read whole ones
_SPLIT = 512 << 10  # bytes from which on two threads read: whoever asks waits for them, so a core is idle
_MAX_ROWS = 512  # of one call, each with a gap behind it: the system takes 1024 buffers
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(slots=True, eq=False)
class Entry:
    """A payload's place. ``gone``: nobody finds it any more, but while it has pins its room is not given back.

    One that is ``kept`` leaves for no other.
    """

    key: Key
    at: int
    nbytes: int
    tag: int
    seed: int
    checksum: bytes = b""
    turn: int = 0
    kept: bool = False
    pins: int = 0
    gone: bool = False


def seed_of(key: Key, tag: int) -> int:
    """What a payload's checksum starts from, so that it vouches for key and tag as well."""
    return xxhash.xxh3_64_intdigest(key_bytes(key) + bytes((tag,)))


class Slab:
    """The file ``blocks-0000.slab`` of a folder, of at most ``capacity`` bytes."""

    def __init__(self, folder: Folder, capacity: int) -> None:
        self._files, self._path, self.capacity = folder.files, folder.path / NAME, capacity
        self._file = folder.open(NAME)
        self.size = self._files.size(self._file)
        self._direct = folder.open_direct(NAME)
        self._helper = ThreadPoolExecutor(1, "kvquant-slab")  # starts its thread when it is first needed

    def grow(self, end: int) -> None:
        """Have it reach to ``end``. Raises `StoreFullError` where the device has no room for that."""
        if end <= self.size:
            return
        for target in (min(max(end, self.size + STEP), self.capacity), end):
            try:
                self._set_aside(target)
            except OSError as error:
                with contextlib.suppress(OSError):  # what was set aside of it
                    self._files.truncate(self._file, self.size)
                if target == end or error.errno not in _FULL:
                    raise self._refused("grow", error) from error
            else:
                self.size = target
                return

    def _set_aside(self, target: int) -> None:
        try:
            self._files.allocate(self._file, self.size, target - self.size)
        except (OSError, AttributeError) as error:  # not every system has the call, nor every file system
            if isinstance(error, OSError) and error.errno not in _UNSUPPORTED:
                raise
            self._files.truncate(self._file, target)

    def shrink(self, end: int) -> None:
        """Cut it off at ``end``, if it is longer."""
        if end < self.size:
            self._files.truncate(self._file, end)
            self.size = end

    def write(self, entries: Sequence[Entry], payloads: Tensor) -> None:
        """Write a payload, a row of ``payloads``, to each entry's place and note its checksum: one call a range.

        Raises `StoreFullError` or `StoreError`.
        """
        rows = Rows(payloads)
        if len(entries) * rows.nbytes < _SPLIT:
            _seal(entries, rows)
            self._write(entries, rows)
            return
        sealed = self._helper.submit(_seal, entries, rows)
        try:
            self._write(entries, rows)
        finally:
            sealed.result()

    def _write(self, entries: Sequence[Entry], rows: Rows) -> None:
        for run in _runs([(entry.at, row, entry) for row, entry in enumerate(entries)]):
            buffers, total = rows.buffers(run, bytes(ALIGNMENT))
            try:
                if _moved(self._files.pwritev, self._file, buffers, run[0][0], total) < total:
                    raise OSError(errno.EIO, "the file takes no more bytes")
            except OSError as error:
                raise self._refused("write", error) from error

    def read(self, entries: Sequence[Entry | None], out: Tensor) -> dict[int, str]:
        """Read each entry's payload into its row of ``out`` and verify it; what was wrong, by row, if anything.

        That is ``"io"``, ``"short read"`` or ``"checksum"``. Rows of no entry stay as they are.
        """
        rows = Rows(out)
        places = sorted((entry.at, row, entry) for row, entry in enumerate(entries) if entry is not None)
        if len(places) * rows.nbytes < _SPLIT:
            return self._read(places, rows)
        half = len(places) // 2
        other = self._helper.submit(self._read, places[half:], rows)
        return self._read(places[:half], rows) | other.result()

    def _read(self, places: Run, rows: Rows) -> dict[int, str]:
        wrong: dict[int, str] = {}
        runs = list(_runs(places))
        for ahead, run in enumerate(runs, 1):
            if ahead < len(runs):
                self.advise(runs[ahead][0][0], runs[ahead][-1][0] + rows.nbytes)
            self._fill(run, rows, wrong)
            for _, row, entry in run:
                if digest(rows.views[row], entry.seed) != entry.checksum and row not in wrong:
                    wrong[row] = "checksum"
        return wrong

    def fetch(self, at: int, to: memoryview, address: int) -> None:
        """Read from a place on into ``to``, which lies at ``address``; nothing is verified, nor raised.

        Past the system's cache, where all lies as that demands: then the device moves the bytes, and no CPU does.
        """
        total, file = len(to), self._file
        if self._direct is not None and not (at | total | address) % SECTOR:
            file = self._direct
        with contextlib.suppress(OSError):
            _moved(self._files.preadv, file, [to], at, total)

    def expect(self, entries: Sequence[Entry]) -> None:
        """Say that entries will be read soon."""
        for run in _runs(sorted((entry.at, row, entry) for row, entry in enumerate(entries))):
            self.advise(run[0][0], run[-1][0] + run[-1][2].nbytes)

    def advise(self, at: int, end: int) -> None:
        """Say that a range will be read soon."""
        with contextlib.suppress(OSError):
            self._files.advise(self._file, at, end - at)

    def refresh(self) -> None:
        """Take note of what another process made of its size."""
        self.size = self._files.size(self._file)

    def close(self) -> None:
        """Let go of the file."""
        self._helper.shutdown()
        if self._direct is not None:
            self._files.close(self._direct)
        self._files.close(self._file)

    def _fill(self, run: Run, rows: Rows, wrong: dict[int, str]) -> None:
        """Read a run, and note which rows of it did not come whole."""
        buffers, total = rows.buffers(run, bytearray(ALIGNMENT))
        try:
            end = run[0][0] + _moved(self._files.preadv, self._file, buffers, run[0][0], total)
        except OSError:
            if len(run) == 1:
                wrong[run[0][1]] = "io"
            else:  # one bad block must not cost its neighbours
                for place in run:
                    self._fill([place], rows, wrong)
            return
        if end < run[-1][0] + rows.nbytes:
            wrong.update((row, "short read") for at, row, _ in run if at + rows.nbytes > end)

    def _refused(self, what: str, error: OSError) -> StoreError:
        kind = StoreFullError if error.errno in _FULL else StoreError
        return kind(
            f"{self._path}: cannot {what} it: {error.strerror or error}; allowed: what the device has room for"
        )


Run = list[tuple[int, int, Entry]]
"""Entries whose places are one right behind the other: place, row, entry."""


class Rows:
    """The rows of a uint8 tensor ``[rows, nbytes]`` on the CPU, as memory that calls read and write in place."""

    def __init__(self, payloads: Tensor) -> None:
        count, nbytes = payloads.shape
        array = payloads.numpy()
        self.nbytes, self._gap = nbytes, -nbytes % ALIGNMENT
        self._flat: memoryview | None = array.data.cast("B") if payloads.is_contiguous() else None
        if self._flat is None:
            self.views = [row.data for row in array]
        else:
            flat = self._flat
            self.views = [flat[at : at + nbytes] for at in range(0, count * nbytes, nbytes)]

    def buffers(self, run: Run, gap: bytes | bytearray) -> tuple[Buffers, int]:
        """What a run's bytes come from or go to, and how many those are: one buffer where rows lie as places do.

        Else it is one for each row and each gap between places; a gap's bytes belong to nobody.
        """
        first, count = run[0][1], len(run)
        total = count * (self.nbytes + self._gap) - self._gap
        views = [self.views[row] for _, row, _ in run]
        if count == 1:
            return views, total
        if self._gap:
            space = memoryview(gap)[: self._gap]
            return [buffer for view in views for buffer in (view, space)][:-1], total
        if self._flat is not None and [row for _, row, _ in run] == list(range(first, first + count)):
            return [self._flat[first * self.nbytes : (first + count) * self.nbytes]], total
        return views, total


def _seal(entries: Sequence[Entry], rows: Rows) -> None:
    """Note the checksums of payloads."""
    for view, entry in zip(rows.views, entries, strict=True):
        entry.checksum = digest(view, entry.seed)


def _runs(places: Run) -> Iterator[Run]:
    """Entries of one size, cut where one's place does not begin where the last one's ended."""
    size = -(-places[0][2].nbytes // ALIGNMENT) * ALIGNMENT if places else 0
    start = 0
    for index in range(1, len(places)):
        if places[index][0] != places[index - 1][0] + size or index - start == _MAX_ROWS:
            yield places[start:index]
            start = index
    if places:
        yield places[start:]


def _moved(call: Callable[[int, Buffers, int], int], file: int, buffers: Buffers, at: int, left: int) -> int:
    """Call until all ``left`` bytes of the buffers have moved or nothing more does; how many did."""
    moved = 0
    while left:
        step = call(file, buffers, at + moved)
        if step <= 0:
            break
        moved, left = moved + step, left - step
        if left:
            buffers = _behind(buffers, step)
    return moved


def _behind(buffers: Buffers, nbytes: int) -> Buffers:
    """What is left of buffers after their first ``nbytes``."""
    for index, buffer in enumerate(buffers):
        if nbytes < len(buffer):
            return [buffer[nbytes:], *buffers[index + 1 :]]
        nbytes -= len(buffer)
    return []


def as_rows(name: str, given: Tensor, rows: int) -> Tensor:
    """What a user gave as rows of payloads, checked. Raises `StoreError`."""
    shape = tuple(given.shape) if isinstance(given, Tensor) else None
    if (
        shape is None
        or given.dtype != torch.uint8
        or given.device.type != "cpu"
        or len(shape) != 2
        or shape[0] != rows
    ):
        what = f"{given.dtype} {shape} on {given.device}" if isinstance(given, Tensor) else shown(given)
        raise StoreError(f"{name} {what}; allowed: uint8 [{rows}, nbytes] on the CPU, a row for every key")
    if not shape[1]:
        raise StoreError(f"{name} of 0 bytes a row; allowed: one or more")
    return given
