"""How payloads get from below to where attention reads them: through a ring of staging buffers, ahead of time.

A buffer is filled by one load: a few large copies, or reads from disk, none of which holds the interpreter's lock
while bytes move. On a GPU each buffer has a pinned twin on the host, which is filled instead and sent on a stream of
its own; events keep either side from touching a buffer too early.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .base import ALIGNMENT

_PAGE = 4096
_NICE = 10  # what a worker's thread adds: to be woken up must not stop those that compute


def copy_bytes(to: Tensor, source: Tensor) -> None:
    """Copy contiguous bytes between tensors of the CPU, by this thread alone; other threads go on meanwhile."""
    if source.nbytes:
        ctypes.memmove(to.data_ptr(), source.data_ptr(), source.nbytes)


@dataclass(eq=False)
class Buffer:
    """Staging for one load: bytes on the device and, where that is a GPU, their pinned twin on the host."""

    device: Tensor
    host: Tensor
    filled: torch.cuda.Event | None = None  # its bytes are on the device
    read: torch.cuda.Event | None = None  # whoever read them is done


class Job(Protocol):
    """What a `Worker` runs, if it is the one to do so."""

    def claim(self) -> bool:
        """Whether whoever asks is to run it."""

    def run(self) -> None:
        """Do it; nothing is raised."""


class Task:
    """What is run by nobody else; the call must not raise."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.run = call

    def claim(self) -> bool:
        """See `Job`."""
        return True


class Load:
    """Fills a buffer, whose bytes on the host both calls are given: ``fill`` in exactly one thread, ahead if it may.

    ``finish`` is called by whoever waits, for what that one does better: on a CPU copies within its memory, by all
    threads, and everywhere to verify what was read. On a GPU it is called before the buffer is sent.
    """

    def __init__(
        self, fill: Callable[[Tensor], None], finish: Callable[[Tensor], None], buffer: Buffer, lane: Lane
    ) -> None:
        self.buffer = buffer
        self._fill, self._finish = fill, finish
        self._lane = lane
        self._claimed = threading.Lock()
        self._done: Future[None] = Future()

    @property
    def done(self) -> bool:
        """Whether it is filled, or failed."""
        return self._done.done()

    def claim(self) -> bool:
        """Whether the caller is the one to `run` it."""
        return self._claimed.acquire(blocking=False)

    def run(self) -> None:
        """Fill the buffer; what goes wrong is told by `wait`."""
        try:
            self._lane.reuse(self.buffer)
            self._fill(self.buffer.host)
            if self._lane.overlaps:
                self._finish(self.buffer.host)
                self._lane.send(self.buffer)
            self._done.set_result(None)
        except BaseException as error:
            self._done.set_exception(error)

    def wait(self) -> float:
        """Return once it is filled, in this thread if no other has begun; the seconds that took."""
        began = time.perf_counter()
        if not self.done and self.claim():
            self.run()
        self._done.result()
        if not self._lane.overlaps:
            self._finish(self.buffer.host)
        self._lane.receive(self.buffer)
        return time.perf_counter() - began


class Lane:
    """What moves bytes between a device and the host. On a CPU both are the same memory, and nothing is sent."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.overlaps = device.type == "cuda"  # whether copies take nothing from whoever computes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def buffer(self, nbytes: int) -> Buffer:
        """A staging buffer."""
        with torch.inference_mode(False):  # what is made in it can't be written outside of it
            if self._stream is None:
                host = _aligned(nbytes)
                return Buffer(host, host)
            device = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            return Buffer(device, _aligned(nbytes, pin_memory=True))

    def send(self, buffer: Buffer) -> None:
        """Start what brings a filled buffer to the device, once its last reader is done."""
        if self._stream is None:
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if buffer.read is not None:
                self._stream.wait_event(buffer.read)
            buffer.device.copy_(buffer.host, non_blocking=True)
            buffer.filled = self._stream.record_event()

    def receive(self, buffer: Buffer) -> None:
        """Have what the device is asked from now on wait for a buffer."""
        if buffer.filled is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.filled)

    def release(self, buffer: Buffer) -> None:
        """Note that what the device was asked so far reads a buffer, and nothing later does."""
        if self._stream is not None:
            buffer.read = torch.cuda.current_stream(self.device).record_event()

    def reuse(self, buffer: Buffer) -> None:
        """Wait until a buffer's twin on the host may be written again."""
        if buffer.filled is not None:
            buffer.filled.synchronize()


def _aligned(nbytes: int, **how: bool) -> Tensor:
    """Memory of the host that begins with a page, as reading past the system's cache demands."""
    room = torch.empty(nbytes + _PAGE, dtype=torch.uint8, **how)  # type: ignore[call-overload]
    first = -room.data_ptr() % _PAGE
    found: Tensor = room[first : first + nbytes]
    return found


@dataclass
class Ring:
    """A fixed number of staging buffers, which take turns; taken and given back under the store's lock."""

    lane: Lane
    nbytes: int  # of one buffer
    count: int
    free: list[Buffer] = field(default_factory=list)
    made: int = 0

    def take(self, leave: int = 0) -> Buffer | None:
        """A buffer nobody has, of which ``leave`` are to remain, or None. They are made when they are first needed."""
        if len(self.free) + self.count - self.made <= leave:
            return None
        if not self.free and self.made < self.count:
            self.made += 1
            self.free.append(self.lane.buffer(self.nbytes))
        return self.free.pop() if self.free else None

    def give_back(self, buffer: Buffer) -> None:
        """See `take`."""
        if buffer.device.nbytes == self.nbytes:  # another thread had it when they grew
            self.free.append(buffer)

    def grow(self, nbytes: int) -> None:
        """Have buffers of at least so many bytes, in place of those there are."""
        if nbytes > self.nbytes:
            self.nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
            self.free.clear()
            self.made = 0

    @property
    def held(self) -> int:
        """Bytes on the device."""
        return self.made * self.nbytes


class Worker:
    """One thread that runs loads in order, while there are any. It ends with the process, or `close`."""

    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, loads: Sequence[Job]) -> None:
        """Have loads run, after those that wait already."""
        with self._wake:
            if self._closed:
                return
            self._waiting.extend(loads)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvquant-store", daemon=True)
                self._thread.start()
            self._wake.notify()

    def close(self) -> None:
        """Let the thread end once it is done with what it does."""
        with self._wake:
            self._closed = True
            self._waiting.clear()
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # not every system has it for a thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
        while True:
            with self._wake:
                while not self._waiting and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                load = self._waiting.popleft()
            if load.claim():
                load.run()
