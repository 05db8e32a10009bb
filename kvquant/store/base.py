"""`BlockStore`: what every store promises, and the words all of them share.

A store holds payloads, which are bytes, under keys. It promises:

* a get returns exactly the bytes that were put under that key, or nothing;
* a put has two phases: what is reserved is seen by nobody until it is committed;
* what is pinned stays; what is not may leave at any time, and is then a miss;
* no more bytes than the budget are held, at any time and after it was opened again;
* a fault of the machine below (no space, a damaged file) is a miss that is counted, never an error of a get.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from ..blocks import BlockKey
from ..errors import StoreError, shown
from ..exposition import Labels, Metric, by, exposition

Key = BlockKey | bytes
"""A `BlockKey` names what lives as long as the process, bytes what outlives it (where there is a disk)."""

MAX_KEY = 512  # bytes
ALIGNMENT = 64  # bytes at multiples of which payloads lie in memory


def key_bytes(key: Key) -> bytes:
    """A key as bytes, the two kinds apart. Raises `StoreError` for what is no key."""
    if isinstance(key, BlockKey):
        with contextlib.suppress(struct.error):
            return b"b" + key.to_bytes()
    if isinstance(key, bytes) and 0 < len(key) <= MAX_KEY:
        return b"c" + key
    raise StoreError(f"key {shown(key)}; allowed: a BlockKey, or 1 to {MAX_KEY} bytes")


class Reservation(Protocol):
    """Room for payloads that nobody sees yet. As a context manager it is given back unless it was committed."""

    @property
    def payloads(self) -> Tensor:
        """Where to write them: uint8 ``[keys, nbytes]``, what it holds before is arbitrary."""

    def commit(self) -> None:
        """Make them visible, all at once."""

    def abort(self) -> None:
        """Give the room back; does nothing once committed."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class BlockStore(Protocol):
    """Holds bytes by key; see the module docstring. All methods may be called from any thread."""

    def reserve(self, keys: Sequence[Key], nbytes: int, tag: int = 0) -> Reservation:
        """Room for a payload of ``nbytes`` under each of ``keys``; what was there stays until the commit, if it can.

        ``tag`` (0 to 255) is kept beside the payloads. Others leave to make room, least needed first: as many as it
        takes or, where all that may leave would not do, none. Raises `StoreFullError` then, without waiting.
        """

    def put(self, key: Key, payload: Tensor, tag: int = 0) -> None:
        """Store a copy of a payload, uint8 ``[nbytes]``: `reserve`, write and commit."""

    def get(self, key: Key) -> Tensor | None:
        """A copy of the payload, uint8 ``[nbytes]`` on the CPU, or None."""

    def tag(self, key: Key) -> int | None:
        """The tag it was put with, or None."""

    def prefetch(self, keys: Sequence[Key]) -> None:
        """Say that these will be read soon, in this order; a store may do nothing about it."""

    def pin(self, keys: Iterable[Key]) -> AbstractContextManager[list[Key]]:
        """Within it those of ``keys`` that are there, which it gives, stay; pins are counted."""

    def delete(self, keys: Iterable[Key]) -> int:
        """Forget ``keys``, pinned ones once they no longer are; how many were there."""

    def delete_sequence(self, sequence: int) -> int:
        """Forget every `BlockKey` of a sequence; how many there were."""

    def keys(self) -> list[Key]:
        """All keys that can be got."""

    def __contains__(self, key: Key) -> bool: ...

    def __len__(self) -> int: ...

    def stats(self) -> StoreStats:
        """What it holds and has done."""

    def check(self) -> list[str]:
        """What is wrong within: one line each, none if all is well. Reads every payload."""

    def flush(self) -> None:
        """Hand what is held to the operating system, so that it outlives the process."""

    def close(self) -> None:
        """Flush and let go of all resources; further calls raise `StoreError`. Closing twice is harmless."""


@dataclass(frozen=True)
class TierStats:
    """One tier: bytes that may be held and that are, payloads there, and gets that were served from it."""

    name: str
    budget: int
    used: int
    payloads: int
    hits: int


@dataclass(frozen=True)
class StoreStats:
    """A snapshot of a store.

    ``evictions`` are payloads that left a tier, by edge: ``"device→host"``, or ``"host→"`` where nothing is left of
    it. ``moved`` are bytes by edge, down and up. ``prefetch_hits`` were there when they were needed,
    ``prefetch_late`` still on their way, ``prefetch_unused`` fetched for nothing. ``stall_seconds`` were spent
    waiting. ``faults`` count what went wrong below and was answered by a miss, by kind.
    """

    tiers: tuple[TierStats, ...]
    misses: int = 0
    puts: int = 0
    pinned: int = 0
    evictions: Mapping[str, int] = field(default_factory=dict)
    moved: Mapping[str, int] = field(default_factory=dict)
    prefetch_hits: int = 0
    prefetch_late: int = 0
    prefetch_unused: int = 0
    stall_seconds: float = 0.0
    faults: Mapping[str, int] = field(default_factory=dict)

    @property
    def hits(self) -> int:
        """Gets that were served."""
        return sum(tier.hits for tier in self.tiers)

    @property
    def used(self) -> int:
        """Bytes held in all tiers; what lies in two counts twice."""
        return sum(tier.used for tier in self.tiers)

    def __str__(self) -> str:
        tiers = ", ".join(
            f"{tier.name} {tier.used / 2**20:.1f} of {tier.budget / 2**20:.1f} MiB in {tier.payloads} payloads, "
            f"{tier.hits} hits"
            for tier in self.tiers
        )
        left = ", ".join(f"{edge} {count}" for edge, count in self.evictions.items()) or "none"
        faults = ", ".join(f"{kind} {count}" for kind, count in self.faults.items()) or "none"
        return (
            f"{tiers}; {self.misses} misses; evictions: {left}; fetched ahead: {self.prefetch_hits} in time, "
            f"{self.prefetch_late} late, {self.prefetch_unused} unused; {self.stall_seconds:.3f} s waited; "
            f"faults: {faults}"
        )

    def prometheus(self, prefix: str = "kvquant_store") -> str:
        """The snapshot in Prometheus' text format; ``examples/metrics.md`` tells the names."""

        def by_tier(what: str) -> Mapping[Labels, float]:
            return by("tier", {tier.name: getattr(tier, what) for tier in self.tiers})

        return exposition(
            prefix,
            [
                Metric("budget_bytes", "gauge", "Bytes that a tier may hold.", by_tier("budget")),
                Metric("used_bytes", "gauge", "Bytes that a tier holds.", by_tier("used")),
                Metric("payloads", "gauge", "Payloads in a tier.", by_tier("payloads")),
                Metric("pinned", "gauge", "Payloads that may not leave now.", self.pinned),
                Metric("hits_total", "counter", "Gets served from a tier.", by_tier("hits")),
                Metric("misses_total", "counter", "Gets of what was not there.", self.misses),
                Metric("puts_total", "counter", "Payloads put.", self.puts),
                Metric("evictions_total", "counter", "Payloads that left a tier.", by("edge", self.evictions)),
                Metric("moved_bytes_total", "counter", "Bytes moved between tiers.", by("edge", self.moved)),
                Metric("prefetch_hits_total", "counter", "Fetched ahead in time.", self.prefetch_hits),
                Metric("prefetch_late_total", "counter", "Fetched ahead, but not in time.", self.prefetch_late),
                Metric("prefetch_unused_total", "counter", "Fetched ahead for nothing.", self.prefetch_unused),
                Metric("stall_seconds_total", "counter", "Time spent waiting for payloads.", self.stall_seconds),
                Metric("faults_total", "counter", "What failed and was made a miss.", by("kind", self.faults)),
            ],
        )


def as_payload(payload: Tensor) -> Tensor:
    """What was given to be put, checked. Raises `StoreError`."""
    if not isinstance(payload, Tensor) or payload.dtype != torch.uint8 or payload.dim() != 1 or not len(payload):
        given = f"{payload.dtype} {tuple(payload.shape)}" if isinstance(payload, Tensor) else shown(payload)
        raise StoreError(f"payload {given}; allowed: a uint8 tensor of one dimension and at least one byte")
    return payload
