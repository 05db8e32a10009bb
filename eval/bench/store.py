"""`kvquant bench store`: what the disk tier makes of a disk, beside one plain file on the same.

A store's payloads have places that are given out and looked up, and checksums that are made at every write and
verified at every read. That is work for the processor, while a transfer through the system's cache of files is one
copy (some GB/s), and from the device itself whatever that delivers. So the tier can only be slower than `pwrite` and
`pread` of the same bytes: by the time of a checksum (tens of GB/s) and a little a payload. Meant is 0.7 of their
speed.

Both move the same. `LAYER` payloads make a layer, which goes in runs of as many consecutive ones as a staging buffer
holds, layer after layer. The plain file is preallocated, and knows where everything is.

    write        to room that there is, none of which is in the system's cache
    read, warm   all of it is in the cache: a copy, and the checksum
    read, cold   nothing is: files were synced, and dropped from the cache, before the turn

``value`` is GB/s, ``bytes_moved`` those of a turn. As a store syncs nothing that it writes, nor does the other: bytes
reach the system's cache, and the disk while nobody waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvquant import BlockKey
from kvquant.store.base import ALIGNMENT
from kvquant.store.disk import DiskStore

from ..errors import InputError
from ..memory import in_words
from ..options import parse_size
from ..ppl import Progress
from .disk import forget, payload_files, scratch
from .load import LoadGuard
from .rows import BenchRow, Case, Outcome, Result, Tick, compare, take_turns

LAYER = 64  # payloads: 8K tokens in blocks of 128
RUN = 4 << 20  # bytes that a staging buffer holds
WRITE, WARM, COLD = "write", "read, warm", "read, cold"
_SPARE = 64 << 20  # bytes for an index, and for room that is set aside


@dataclass(frozen=True)
class StoreOptions:
    """The options of ``kvquant bench store`` as typed; see its ``--help``."""

    path: str
    block: str
    total: str
    repeats: int


def run_store(options: StoreOptions, say: Callable[[str], None], progress: Progress) -> Outcome:
    """The rows of writing and reading. Raises `kvquant.KVQuantError` for bad input."""
    block, total = parse_size("--block", options.block), parse_size("--total", options.total)
    if not ALIGNMENT <= block <= total:
        raise InputError(f"--block: {options.block}; allowed: from {ALIGNMENT} bytes to --total, {options.total}")
    payloads = total // block
    with scratch("--path", options.path, 2 * payloads * (block + ALIGNMENT) + _SPARE) as folder:
        title = f"{in_words(payloads * block)} on disk"
        try:
            with (
                StoreBench(folder, block, payloads) as bench,
                progress(title, [(0, 1)] * (6 * options.repeats)) as tick,
            ):
                return bench.run(options.repeats, say, tick)
        except OSError as error:
            why = error.strerror or error
            raise InputError(f"--path: {options.path}: {why}; allowed: a folder on a disk that works") from error


class StoreBench:
    """A store and a plain file of so many ``payloads`` in a folder, written once."""

    def __init__(self, folder: Path, block: int, payloads: int) -> None:
        self._block, self._bytes = block, block * payloads
        self._runs = list(_runs(payloads, max(1, RUN // block)))
        longest = max(len(run) for run in self._runs)
        self._source = torch.randint(256, (longest, block), dtype=torch.uint8)
        self._target = torch.empty_like(self._source)
        self._cold = True  # whether files could be dropped from the cache whenever that was asked for
        self._folder, self._plain = folder / "store", folder / "plain"
        self._store = DiskStore(self._folder, payloads * -(-block // ALIGNMENT) * ALIGNMENT)
        try:
            self._file = os.open(self._plain, os.O_RDWR | os.O_CREAT, 0o600)
            os.posix_fallocate(self._file, 0, self._bytes)
            self._put()
            self._pwrite()
        except BaseException:
            self._store.close()
            raise

    def __enter__(self) -> StoreBench:
        return self

    def __exit__(self, *raised: object) -> None:
        self._store.close()
        os.close(self._file)

    def run(self, repeats: int, say: Callable[[str], None], tick: Tick = lambda start, end: None) -> Outcome:
        """The rows; see the module docstring."""
        ways = {WRITE: (self._put, self._pwrite), WARM: (self._get, self._pread), COLD: (self._get, self._pread)}
        turns = {}
        for name, (store, plain) in ways.items():
            turns[name] = partial(self._turn, name, store)
            turns[_plain(name)] = partial(self._turn, name, plain)
        with LoadGuard(say) as guard:
            seconds = take_turns(turns, repeats, tick)
        results = guard.marked({name: self._result(tuple(spent)) for name, spent in seconds.items()})
        rows: list[BenchRow] = []
        for name in ways:
            own, other = results[name], results[_plain(name)]
            assert own.value is not None
            assert other.value is not None
            notes = [f"{own.value / other.value:.2f} of the plain file's {other.value:.2f} GB/s"]
            if not self._cold and name != WARM:
                notes.append("the system kept files in memory that it was to drop")
            pair = {name: replace(own, detail="").noted(*notes, own.detail), _plain(name): other}
            rows += compare("store", self._block, pair, [_plain(name)])
        return Outcome(rows, [Case(self._block, bool(guard.note))])

    def _result(self, seconds: tuple[float, ...]) -> Result:
        found = Result(seconds, bytes_moved=self._bytes)
        assert found.ms is not None
        return replace(found, value=self._bytes / found.ms / 1e6)

    def _turn(self, name: str, move: Callable[[], None]) -> list[float]:
        """The seconds that moving all takes."""
        if name == WARM:
            move()
        else:
            for file in (self._plain, *payload_files(self._folder)):
                self._cold &= forget(file, self._bytes)
        if move == self._put:
            self._store.delete([key for run in self._runs for key in run])
        began = time.perf_counter()
        move()
        return [time.perf_counter() - began]

    def _put(self) -> None:
        for run in self._runs:
            self._store.write(run, self._source[: len(run)])

    def _get(self) -> None:
        for run in self._runs:
            assert all(self._store.read(run, self._target[: len(run)])), "what was written is there, unharmed"

    def _pwrite(self) -> None:
        at = 0
        for run in self._runs:
            at += os.pwrite(self._file, _bytes(self._source[: len(run)]), at)
        assert at == self._bytes

    def _pread(self) -> None:
        at = 0
        for run in self._runs:
            at += os.preadv(self._file, [_bytes(self._target[: len(run)])], at)
        assert at == self._bytes


def _runs(payloads: int, most: int) -> Sequence[Sequence[BlockKey]]:
    """The keys of so many payloads, layer by layer, at most ``most`` at a time."""
    runs = []
    for layer in range(-(-payloads // LAYER)):
        blocks = min(LAYER, payloads - layer * LAYER)
        for first in range(0, blocks, most):
            runs.append([BlockKey(0, layer, block) for block in range(first, min(first + most, blocks))])
    return runs


def _bytes(payloads: Tensor) -> memoryview:
    return payloads.numpy().data.cast("B")


def _plain(name: str) -> str:
    return f"plain {name}"
