"""Payloads that tell whose they are, and a `Files` that goes wrong when it is told to."""

from __future__ import annotations

import errno
import os

import numpy as np
import torch
import xxhash
from torch import Tensor

from kvquant.blocks import BlockKey
from kvquant.store.base import Key, key_bytes
from kvquant.store.files import Buffers, Files


def fill(key: Key, version: int, nbytes: int) -> Tensor:
    """Bytes that only this version of this key has; its first eight, if there are as many, are the version."""
    seed = xxhash.xxh3_64_intdigest(key_bytes(key), seed=version)
    words = np.arange(1, nbytes // 8 + 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    words[0] = version
    return torch.from_numpy(words.view(np.uint8)[:nbytes].copy())


def version_of(key: Key, payload: Tensor) -> int:
    """Which version a payload is; fails unless every byte of it is that version's."""
    version = int.from_bytes(payload[:8].numpy().tobytes(), "little")
    assert torch.equal(payload, fill(key, version, len(payload))), f"wrong bytes under {key!r}"
    return version


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
