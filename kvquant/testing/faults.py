"""Stores and files that go wrong when they are told to, for whoever has to live with that.

    store = FaultyStore(DiskStore(path, budget), at_calls(("put", 2, "full"), ("get", 0, "flip")))
    store = FaultyStore(DiskStore(path, budget), at_random(7, 0.1, get=("lost", "delay"), put=("full",)))
    store = DiskStore(path, budget, files=FaultyFiles(at_calls(("pwritev", 3, "full"), ("preadv", 0, "flip"))))

A plan is asked at every call, by name and by how many of that name came before, for the kind of fault that it shows:

    full     no space: `StoreFullError` of a store, ENOSPC of files
    error    `StoreError` of a store, EIO of files
    lost     a get gives None; of files, a read finds the file's end
    short    the first half of what was asked for
    flip     one bit is another
    delay    it takes ``seconds`` longer
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from torch import Tensor

from ..errors import StoreError, StoreFullError
from ..store.base import BlockStore, Key, Reservation, StoreStats
from ..store.files import Buffers, Files

Plan = Callable[[str, int], str | None]
"""``(name of the call, its number among those of the name)`` to a kind of fault, or None."""

KINDS = ("full", "error", "lost", "short", "flip", "delay")


def at_calls(*faults: tuple[str, int, str]) -> Plan:
    """Faults at chosen calls, each ``(name, number, kind)``; a negative number: from its absolute, less one, on.

    ``("get", 0, "lost")`` is the first get, ``("put", -3, "full")`` every put from the third on.
    """
    for _, _, kind in faults:
        _check(kind)

    def plan(name: str, number: int) -> str | None:
        for call, place, kind in faults:
            if call == name and (number == place if place >= 0 else number >= -place - 1):
                return kind
        return None

    return plan


def at_random(seed: int, rate: float, **kinds: Sequence[str]) -> Plan:
    """A fault at each call named in ``kinds`` with a probability of ``rate``, of a kind drawn from those given."""
    for kind in (kind for some in kinds.values() for kind in some):
        _check(kind)

    def plan(name: str, number: int) -> str | None:
        draw = random.Random(f"{seed} {name} {number}")  # the same whatever other calls come between
        return draw.choice(list(kinds[name])) if name in kinds and draw.random() < rate else None

    return plan


class WrappedStore:
    """A `BlockStore` that hands every call on to ``store``; subclass it to do more."""

    def __init__(self, store: BlockStore) -> None:
        self.store = store

    def reserve(self, keys: Sequence[Key], nbytes: int, tag: int = 0) -> Reservation:
        """See `BlockStore.reserve`."""
        return self.store.reserve(keys, nbytes, tag)

    def put(self, key: Key, payload: Tensor, tag: int = 0) -> None:
        """See `BlockStore.put`."""
        self.store.put(key, payload, tag)

    def get(self, key: Key) -> Tensor | None:
        """See `BlockStore.get`."""
        return self.store.get(key)

    def tag(self, key: Key) -> int | None:
        """See `BlockStore.tag`."""
        return self.store.tag(key)

    def prefetch(self, keys: Sequence[Key]) -> None:
        """See `BlockStore.prefetch`."""
        self.store.prefetch(keys)

    def pin(self, keys: Iterable[Key]) -> AbstractContextManager[list[Key]]:
        """See `BlockStore.pin`."""
        return self.store.pin(keys)

    def delete(self, keys: Iterable[Key]) -> int:
        """See `BlockStore.delete`."""
        return self.store.delete(keys)

    def delete_sequence(self, sequence: int) -> int:
        """See `BlockStore.delete_sequence`."""
        return self.store.delete_sequence(sequence)

    def keys(self) -> list[Key]:
        """See `BlockStore.keys`."""
        return self.store.keys()

    def __contains__(self, key: Key) -> bool:
        return key in self.store

    def __len__(self) -> int:
        return len(self.store)

    def stats(self) -> StoreStats:
        """See `BlockStore.stats`."""
        return self.store.stats()

    def check(self) -> list[str]:
        """See `BlockStore.check`."""
        return self.store.check()

    def flush(self) -> None:
        """See `BlockStore.flush`."""
        self.store.flush()

    def close(self) -> None:
        """See `BlockStore.close`."""
        self.store.close()


class LatencyStore(WrappedStore):
    """Takes ``get`` and ``put`` seconds longer for each: what a slower medium would do to whoever uses it.

    slow = LatencyStore(store, get=0.01)
    """

    def __init__(self, store: BlockStore, get: float = 0.0, put: float = 0.0) -> None:
        super().__init__(store)
        self._get, self._put = get, put

    def put(self, key: Key, payload: Tensor, tag: int = 0) -> None:
        """See `BlockStore.put`."""
        time.sleep(self._put)
        super().put(key, payload, tag)

    def get(self, key: Key) -> Tensor | None:
        """See `BlockStore.get`."""
        time.sleep(self._get)
        return super().get(key)


class _Planned:
    """Counts calls, and asks the plan."""

    def __init__(self, plan: Plan, seconds: float) -> None:
        self._plan, self._seconds = plan, seconds
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.shown: Counter[tuple[str, str]] = Counter()  # by call and kind

    def __call__(self, name: str) -> str | None:
        with self._lock:
            number = self.calls[name]
            self.calls[name] += 1
            kind = self._plan(name, number)
            if kind is not None:
                self.shown[name, kind] += 1
        if kind == "delay":
            time.sleep(self._seconds)
        return kind


class FaultyStore(WrappedStore):
    """A store of whose calls ``plan`` says which go wrong: reserve, commit, put, get, delete and flush.

    A commit that fails gives the room back. ``calls`` and ``shown`` count what was asked and which faults there were.
    What the wrapped store must never do, such as returning damaged bytes, is what the layer above is tried with.

        store = FaultyStore(TieredStore(host_budget="1MiB"), at_calls(("put", 1, "full")))
        with pytest.raises(StoreFullError): ...
    """

    def __init__(self, store: BlockStore, plan: Plan, seconds: float = 0.001) -> None:
        super().__init__(store)
        self._fault = _Planned(plan, seconds)
        self.calls, self.shown = self._fault.calls, self._fault.shown

    def reserve(self, keys: Sequence[Key], nbytes: int, tag: int = 0) -> Reservation:
        """See `BlockStore.reserve`."""
        self._may_refuse("reserve")
        return _FaultyReservation(super().reserve(keys, nbytes, tag), self._may_refuse)

    def put(self, key: Key, payload: Tensor, tag: int = 0) -> None:
        """See `BlockStore.put`."""
        self._may_refuse("put")
        super().put(key, payload, tag)

    def get(self, key: Key) -> Tensor | None:
        """See `BlockStore.get`."""
        kind = self._may_refuse("get")
        payload = super().get(key)
        if payload is None or kind == "lost":
            return None
        if kind == "short":
            return payload[: len(payload) // 2]
        if kind == "flip":
            payload[len(payload) // 2] ^= 1
        return payload

    def delete(self, keys: Iterable[Key]) -> int:
        """See `BlockStore.delete`."""
        self._may_refuse("delete")
        return super().delete(keys)

    def flush(self) -> None:
        """See `BlockStore.flush`."""
        self._may_refuse("flush")
        super().flush()

    def _may_refuse(self, name: str) -> str | None:
        kind = self._fault(name)
        if kind == "full":
            raise StoreFullError(f"{name}: no room (planned)") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if kind == "error":
            raise StoreError(f"{name}: failed (planned)") from OSError(errno.EIO, os.strerror(errno.EIO))
        return kind


class _FaultyReservation:
    def __init__(self, inner: Reservation, may_refuse: Callable[[str], object]) -> None:
        self._inner, self._may_refuse = inner, may_refuse

    @property
    def payloads(self) -> Tensor:
        return self._inner.payloads

    def commit(self) -> None:
        try:
            self._may_refuse("commit")
        except StoreError:
            self._inner.abort()
            raise
        self._inner.commit()

    def abort(self) -> None:
        self._inner.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class FaultyFiles(Files):
    """The system calls of a `DiskStore` of which ``plan`` says which go wrong, by the names of `Files`' methods.

    Reads and writes know all kinds, the other calls ``full``, ``error`` and ``delay``. ``longest`` bounds the bytes
    that any transfer moves. ``calls`` and ``shown`` count, as those of `FaultyStore`.

        store = DiskStore(path, budget, files=FaultyFiles(at_random(3, 0.2, preadv=("flip", "short"))))
    """

    def __init__(self, plan: Plan, seconds: float = 0.001, longest: int | None = None) -> None:
        self._fault = _Planned(plan, seconds)
        self._longest = longest
        self.calls, self.shown = self._fault.calls, self._fault.shown

    def open(self, name: str, flags: int, folder: int | None = None) -> int:
        """See `Files.open`."""
        self._may_fail("open")
        return super().open(name, flags, folder)

    def size(self, file: int) -> int:
        """See `Files.size`."""
        self._may_fail("size")
        return super().size(file)

    def preadv(self, file: int, buffers: Buffers, at: int) -> int:
        """See `Files.preadv`."""
        kind = self._may_fail("preadv")
        if kind == "lost":
            return 0
        read = super().preadv(file, self._some(buffers, kind), at)
        if kind == "flip" and read:
            buffers[0][0] ^= 1
        return read

    def pwritev(self, file: int, buffers: Buffers, at: int) -> int:
        """See `Files.pwritev`; what is flipped is flipped in the file."""
        kind = self._may_fail("pwritev")
        if kind == "lost":  # the system says that it is written
            return sum(map(len, buffers))
        if kind == "flip":
            first = bytearray(buffers[0])
            first[0] ^= 1
            buffers = [memoryview(first), *buffers[1:]]
        return super().pwritev(file, self._some(buffers, kind), at)

    def allocate(self, file: int, at: int, nbytes: int) -> None:
        """See `Files.allocate`."""
        self._may_fail("allocate")
        super().allocate(file, at, nbytes)

    def truncate(self, file: int, nbytes: int) -> None:
        """See `Files.truncate`."""
        self._may_fail("truncate")
        super().truncate(file, nbytes)

    def lock(self, file: int) -> bool:
        """See `Files.lock`."""
        self._may_fail("lock")
        return super().lock(file)

    def _may_fail(self, name: str) -> str | None:
        kind = self._fault(name)
        if kind in ("full", "error"):
            code = errno.ENOSPC if kind == "full" else errno.EIO
            raise OSError(code, os.strerror(code))
        return kind

    def _some(self, buffers: Buffers, kind: str | None) -> Buffers:
        """As much of buffers as one call moves, at least a byte."""
        total = sum(map(len, buffers))
        left = min(total if kind != "short" else max(1, total // 2), self._longest or total)
        some = []
        for buffer in buffers:
            some.append(buffer[:left])
            left -= len(some[-1])
            if not left:
                break
        return some


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"fault {kind!r}; allowed: {', '.join(KINDS)}")
