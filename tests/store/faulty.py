"""Keys of both kinds, and a `Files` that fails at one call, with any of the system's errors."""

from __future__ import annotations

import errno
import os

from kvquant.blocks import BlockKey
from kvquant.store.base import Key
from kvquant.store.files import Buffers, Files


def key_of(number: int) -> Key:
    """Every third key is a block's."""
    return BlockKey(number % 5, 1, number) if number % 3 == 0 else b"key %d" % number


class Faulty(Files):
    """Fails at the ``at``-th of the calls named, counted from 0, and from then on if ``stuck``."""

    def __init__(self, *calls: str, at: int = 0, code: int = errno.ENOSPC, stuck: bool = False) -> None:
        self.calls, self.at, self.code, self.stuck = calls, at, code, stuck
        self.seen = 0
        self.short: int | None = None  # bytes that a transfer moves at most
        self.cut = False  # reads end early
        self.flip = False
        self.count: dict[str, int] = {}

    def _may_fail(self, call: str) -> None:
        self.count[call] = self.count.get(call, 0) + 1
        if call in self.calls:
            self.seen += 1
            if self.seen - 1 == self.at or (self.stuck and self.seen > self.at):
                raise OSError(self.code, os.strerror(self.code))

    @property
    def failed(self) -> bool:
        return self.seen > self.at

    def _some(self, buffers: Buffers) -> Buffers:
        left, some = self.short or sum(map(len, buffers)), []
        for buffer in buffers:
            some.append(buffer[:left])
            left -= len(some[-1])
            if not left:
                break
        return some

    def preadv(self, file: int, buffers: Buffers, at: int) -> int:
        self._may_fail("preadv")
        if self.cut:
            return 0
        read = super().preadv(file, self._some(buffers), at)
        if self.flip:
            buffers[0][0] ^= 1
        return read

    def pwritev(self, file: int, buffers: Buffers, at: int) -> int:
        self._may_fail("pwritev")
        return super().pwritev(file, self._some(buffers), at)

    def allocate(self, file: int, at: int, nbytes: int) -> None:
        self._may_fail("allocate")
        super().allocate(file, at, nbytes)

    def truncate(self, file: int, nbytes: int) -> None:
        self._may_fail("truncate")
        super().truncate(file, nbytes)
