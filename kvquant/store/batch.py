"""Payloads on disk that are read again and again, as while decoding: where they lie is looked up once.

What a thread in the background does is system calls alone; whoever uses what it read verifies it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .slab import Entry, Slab, digest


class Batch:
    """Payloads of one size in a slab, as long as none of them is put anew or deleted."""

    def __init__(self, slab: Slab, entries: Sequence[Entry], otherwise: Callable[[Tensor], bool]) -> None:
        """``otherwise`` reads them the usual way, and tells whether all came."""
        self._slab, self._otherwise = slab, otherwise
        self._seals = [(entry.seed, entry.checksum) for entry in entries]
        self._nbytes = entries[0].nbytes
        self._runs: list[tuple[int, int, int]] = []  # place, first byte, bytes
        for row, entry in enumerate(entries):
            at, first, size = self._runs[-1] if self._runs else (-1, 0, 0)
            if entry.at == at + size:
                self._runs[-1] = at, first, size + self._nbytes
            else:
                self._runs.append((entry.at, row * self._nbytes, self._nbytes))

    def fetch(self, out: Tensor) -> None:
        """Read them into ``out``, contiguous uint8 ``[n, nbytes]`` on the CPU; what goes wrong is found by `good`."""
        flat, address = out.numpy().data.cast("B"), out.data_ptr()
        for at, first, size in self._runs:
            self._slab.fetch(at, flat[first : first + size], address + first)

    def good(self, out: Tensor) -> bool:
        """Whether all have come as they were written, at a second try if not at the first."""
        flat, nbytes = out.numpy().data.cast("B"), self._nbytes
        for row, (seed, checksum) in enumerate(self._seals):
            if digest(flat[row * nbytes : (row + 1) * nbytes], seed) != checksum:
                return self._otherwise(out)
        return True
