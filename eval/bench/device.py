"""What calls take of a GPU, by its own clock, and how fast it reads memory at best.

Before each call its caches are filled with something else, and it is kept busy until the host has queued all
launches: what is timed is what a GPU does, not how long it waits for the host. On a CPU all of this runs too, to no
use but to see that it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..errors import one_line
from .rows import READ, Case, Result, take_turns

_FLUSHED = 256 << 20  # bytes, more than any GPU's caches hold
_READ_BYTES = 4 << 30  # of which bandwidth is measured, at most
_READ_BYTES_OF_CPU = 1 << 20
_HEAD_START = 4_000_000  # cycles, about two milliseconds, in which the host queues launches
_LAUNCHES = 5  # of which the host's time is taken
_READERS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "largest": (lambda half, other: torch.amax(half), 1),
    "sum": (lambda half, other: torch.sum(half), 1),
    "copy": (lambda half, other: other.copy_(half), 2),
}
"""What reads one half of a buffer, or copies it to the other, and how often its bytes pass through memory."""


class Stopwatch:
    """Times calls on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gpu = device.type == "cuda"
        self._filler = torch.ones(_FLUSHED // 4 if self.gpu else 1, device=device)

    def __call__(self, call: Callable[[], object]) -> list[float]:
        """The seconds of one call, from its first launch to the end of its last."""
        if not self.gpu:
            return [self.host(call)]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.sum(self._filler)  # read, not written: nothing of it is left to be written back
        torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        return [begin.elapsed_time(end) / 1e3]

    def host(self, call: Callable[[], object]) -> float:
        """The seconds until a call returns, whatever it leaves the GPU to do."""
        self.wait()
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    def peak(self, call: Callable[[], object]) -> int | None:
        """Bytes that a call takes beside what is there; None on a CPU."""
        if not self.gpu:
            return None
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        return int(torch.cuda.max_memory_allocated(self.device)) - before

    def wait(self) -> None:
        """Until the GPU has done all it was asked to."""
        if self.gpu:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Reader:
    """Reads memory that no cache holds, as fast as anything at hand does."""

    name: str
    buffer: Tensor
    watch: Stopwatch

    @classmethod
    def fastest(cls, watch: Stopwatch) -> Reader:
        """The best of torch's reductions and of its copying."""
        most = min(_READ_BYTES, torch.cuda.mem_get_info(watch.device)[0] // 4) if watch.gpu else _READ_BYTES_OF_CPU
        buffer = torch.ones(2, most // 8, device=watch.device)
        readers = [cls(name, buffer, watch) for name in _READERS]
        for reader in readers:
            reader.run()
        return max(readers, key=lambda reader: reader.bandwidth([reader.run()[0] for _ in range(3)]))

    def run(self) -> list[float]:
        """The seconds of one reading."""
        return self.watch(lambda: _READERS[self.name][0](*self.buffer))

    def bandwidth(self, seconds: Sequence[float]) -> float:
        """Bytes a second, by the median of ``seconds`` of several readings."""
        return _READERS[self.name][1] * self.buffer[0].nbytes / median(seconds)


@dataclass
class Trial:
    """Calls that take turns on a device. One that fails is told by its error, and the others go on."""

    watch: Stopwatch
    results: dict[str, Result] = field(default_factory=dict)
    _calls: dict[str, Callable[[], Any]] = field(default_factory=dict)

    def add(self, name: str, call: Callable[[], Any], nbytes: int) -> Any:
        """Enter a call that has to move ``nbytes``. Returns what it returned the first time, None if it failed."""
        try:
            found = call()
            host = median(self.watch.host(call) for _ in range(_LAUNCHES if self.watch.gpu else 1))
            peak = self.watch.peak(call)
        except Exception as error:  # of a compiler, a driver, for want of memory …
            self.fail(name, error)
            return None
        note = f"launched in {1e3 * host:.3g} ms"
        self.results[name], self._calls[name] = Result(bytes_moved=nbytes, peak_bytes=peak, detail=note), call
        return found

    def fail(self, name: str, error: Exception) -> None:
        """Enter a call that cannot be made."""
        self.results[name] = Result(detail=one_line(error))

    def run(self, repeats: int, case: int) -> Case:
        """Time all calls, ``repeats`` times each, between readings of memory."""
        reader = Reader.fastest(self.watch)
        turns: dict[str, Callable[[], Sequence[float]]] = {READ: reader.run}
        for name, call in self._calls.items():
            turns[name] = partial(self.watch, call)
        seconds = take_turns(turns, repeats)
        bandwidth = reader.bandwidth(seconds.pop(READ))
        for name, spent in seconds.items():
            result = self.results[name]
            assert result.bytes_moved is not None
            fraction = result.bytes_moved / median(spent) / bandwidth
            self.results[name] = replace(result, seconds=tuple(spent), bandwidth_fraction=fraction)
        return Case(case, False, float(f"{bandwidth / 1e9:.4g}"), reader.name)
