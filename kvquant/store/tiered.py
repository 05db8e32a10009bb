"""`TieredStore`: payloads on the device while there is room, else in the host's memory, else on disk.

A payload goes down when others need its place and comes up through staging buffers when it is read (`stream`). It
never changes, so it may lie in two tiers at once, and what lies below as well leaves at no cost. Sequences that are
being decoded (`TieredStore.stream`) lose nothing: theirs only move down. All else is a cache: what is least needed
is dropped where the last tier is full.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ..blocks import BlockKey
from ..errors import StoreError, StoreFullError, shown
from .audit import audit
from .base import ALIGNMENT, Key, StoreStats, TierStats, as_payload, key_bytes
from .books import Level
from .disk import DiskStore
from .memory import Pool, device_of
from .placement import NAMES, Chill, Placement, Shrink
from .reserved import Reserved
from .residency import DEVICE, HOST, Entry, Shelf, get_residency
from .sizes import parse_bytes
from .stream import Stream
from .transfer import Buffer, Lane, Ring, Task, Worker

BUFFERS = 8  # for staging
_PATIENCE = 60.0  # seconds to wait for a staging buffer that another thread reads


class TieredStore:
    """A `BlockStore` of up to three tiers, which caches share.

    ``device_budget``, ``host_budget`` and ``disk_budget`` bound the bytes in each, as whole numbers or as text
    (``"2GiB"``); a tier without one is left out. The disk's lies in the folder ``disk_path``. On a machine without a
    GPU the device's is memory of its own, to which everything is copied that is read there. ``residency`` says who
    leaves first (see `residency`), ``staging`` how many bytes beside the budget what is read is fetched through.

    Raises `StoreError` where these make no store.
    """

    def __init__(
        self,
        device_budget: int | str | None = None,
        host_budget: int | str | None = None,
        disk_budget: int | str | None = None,
        disk_path: str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        residency: str = "next-use",
        staging: int | str = "16MiB",
    ) -> None:
        self.device = device_of(device)
        given = {"device_budget": device_budget, "host_budget": host_budget, "disk_budget": disk_budget}
        budgets = {name: parse_bytes(name, value) for name, value in given.items()}
        for name, budget in budgets.items():
            if 0 < budget < ALIGNMENT:
                raise StoreError(f"{name}: {budget} bytes hold nothing; the smallest that can is {ALIGNMENT}")
        if not any(budgets.values()):
            raise StoreError(f"no tier: give at least one of {', '.join(budgets)}")
        if (disk_path is None) != (not budgets["disk_budget"]):
            raise StoreError("disk_path and disk_budget go together: give both, or neither")
        staged = parse_bytes("staging", staging)
        if staged < ALIGNMENT * BUFFERS:
            raise StoreError(f"staging: {shown(staging)}; allowed: {ALIGNMENT * BUFFERS} bytes or more")
        leaving = get_residency(residency)
        disk = None if disk_path is None else DiskStore(disk_path, budgets["disk_budget"])
        levels = [
            Level(name, Pool(budget, where)) if budget else None
            for name, budget, where in zip(NAMES, budgets.values(), (self.device, torch.device("cpu")), strict=False)
        ]
        self._capacities = {level.name: level.pool.ranges.capacity for level in levels if level is not None}
        if disk is not None:
            self._capacities["disk"] = disk.budget
        self.residency = residency
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # a staging buffer is free
        self.lane = Lane(self.device)
        self.ring = Ring(self.lane, staged // BUFFERS // ALIGNMENT * ALIGNMENT, BUFFERS)
        self.placement = Placement(levels, disk, leaving, self.ring.nbytes)
        self.worker = Worker()
        self.streams: list[Stream] = []
        self._retired: deque[Stream] = deque()
        self.counts: Counter[str] = Counter()
        self.stall_seconds = 0.0
        self.closed = False

    def stream(
        self, sequence: int, layers: Sequence[int], shrink: Shrink | None = None, chill: Chill | None = None
    ) -> Stream:
        """Begin to decode a sequence whose ``layers`` are visited in this order; see `Stream`."""
        with self.lock:
            self.check_open()
            return Stream(self, sequence, layers, shrink, chill)

    def retire(self, stream: Stream) -> None:
        """Close a stream at the next opportunity: for finalizers, which may run in the midst of anything."""
        self._retired.append(stream)

    def must_hold(self, nbytes: int) -> None:
        """Raises `StoreError` where a tier can't hold one payload of so many bytes."""
        for name, budget in self._capacities.items():
            if budget < nbytes:
                raise StoreError(
                    f"{name}_budget: {budget} bytes can't hold one block; the smallest that can is {nbytes}"
                )

    def placed(self, sequence: int, layer: int, which: int) -> dict[int, int]:
        """The payloads of a layer that lie on device or host: their tags, by block."""
        with self.lock:
            shelf = self.placement.shelf(BlockKey(sequence, layer, 0))
            return {block: entry.tag for block, entry in shelf.entries.items() if entry.places[which] is not None}

    def reserve(self, keys: Sequence[Key], nbytes: int, tag: int = 0) -> Reserved:
        """See `BlockStore.reserve`. What is reserved lies on the device, wherever it goes once committed."""
        return self._reserve(keys, nbytes, tag, DEVICE)

    def _reserve(self, keys: Sequence[Key], nbytes: int, tag: int, first: int) -> Reserved:
        reserved = self.try_reserve(keys, nbytes, tag, first=first)
        if reserved is None:
            raise StoreFullError(f"no room for {len(keys)} × {nbytes} bytes: {self.in_words()}")
        return reserved

    def try_reserve(
        self, keys: Sequence[Key], nbytes: int, tag: int = 0, spare: bool = False, first: int = DEVICE
    ) -> Reserved | None:
        """As `reserve`, but None where there is no room, in tiers from the ``first`` on.

        ``spare``: on the device, and without anybody leaving.
        """
        if not keys or len(set(map(key_bytes, keys))) < len(keys):
            raise StoreError(f"keys {shown(list(keys))}; allowed: one or more, each once")
        if type(nbytes) is not int or nbytes < 1 or type(tag) is not int or not 0 <= tag < 256:
            raise StoreError(f"nbytes {shown(nbytes)}, tag {shown(tag)}; allowed: from 1 on, and 0 to 255")
        with self.lock:
            self.check_open()
            self.placement.sweep()
            for which in (DEVICE,) if spare else (DEVICE, HOST)[first:]:
                places = self.placement.room(which, keys, nbytes, spare)
                if places is not None:
                    return Reserved(self, keys, nbytes, tag, places, which)
            kept = self.placement.live(self.placement.shelf(keys[0]))
            room = None if spare else self.placement.on_disk(lambda disk: disk.reserve(keys, nbytes, tag, kept=kept))
            return None if room is None else Reserved(self, keys, nbytes, tag, room, HOST + 1)

    def pool(self, which: int) -> Pool | None:
        """The memory of device or host."""
        level = self.placement.levels[which] if which <= HOST else None
        return None if level is None else level.pool

    def put(self, key: Key, payload: Tensor, tag: int = 0) -> None:
        """See `BlockStore.put`."""
        payload = as_payload(payload)
        with self.reserve([key], len(payload), tag) as room:
            room.payloads[0].copy_(payload)
            room.commit()

    def put_below(self, key: Key, payload: Tensor, tag: int = 0) -> None:
        """As `put`, but not on the device: for what is not needed there soon."""
        payload = as_payload(payload)
        with self._reserve([key], len(payload), tag, HOST) as room:
            room.payloads[0].copy_(payload)
            room.commit()

    @property
    def has_below(self) -> bool:
        """Whether there is a tier beside the device."""
        return self.keeps or self.placement.levels[HOST] is not None

    @property
    def keeps(self) -> bool:
        """Whether there is a disk, so that what has a key of bytes may outlive the process."""
        return self.placement.disk is not None

    def keep(self, keys: Sequence[bytes], payloads: Tensor, tag: int = 0) -> None:
        """Write ``payloads`` uint8 ``[n, nbytes]`` to the disk, where they stay until they are deleted.

        Raises `StoreError` where there is no disk, `StoreFullError` where it has no room.
        """
        with self.lock:
            self.check_open()
            self.placement.keep(keys, payloads, tag)

    def get(self, key: Key) -> Tensor | None:
        """See `BlockStore.get`."""
        key_bytes(key)
        with self.pin([key]) as found:
            with self.lock:
                shelf, entry = self.placement.shelf(key), self.placement.find(key)
                if not found or entry is None:
                    self.counts["misses"] += 1
                    return None
                self.placement.use(shelf)
                for which, level in enumerate(self.placement.levels):
                    place = entry.places[which]
                    if level is not None and place is not None:
                        level.hits += 1
                        return level.pool.view(place, 1, entry.nbytes)[0].to("cpu", copy=True)
            return self._from_disk(shelf, entry)

    def get_tagged(self, key: Key) -> tuple[Tensor, int] | None:
        """A copy of the payload and the tag it has, or None; pinned meanwhile, so that neither becomes another."""
        with self.pin([key]):
            payload, tag = self.get(key), self.tag(key)
        return None if payload is None or tag is None else (payload, tag)

    def tag(self, key: Key) -> int | None:
        """See `BlockStore.tag`."""
        with self.lock:
            entry = self._find(key)
            return None if entry is None else entry.tag

    def prefetch(self, keys: Sequence[Key]) -> None:
        """See `BlockStore.prefetch`: what is on disk only is read into the host's memory meanwhile."""
        with self.lock:
            self.worker.add([Task(partial(self._fetch, key)) for key in keys if self._find(key) is not None])

    @contextmanager
    def pin(self, keys: Iterable[Key]) -> Iterator[list[Key]]:
        """See `BlockStore.pin`."""
        with self.lock:
            self.check_open()
            pinned = [entry for key in keys if (entry := self._find(key)) is not None]
            for entry in pinned:
                entry.pins += 1
            below = ExitStack()
            if self.placement.disk is not None:
                below.enter_context(self.placement.disk.pin([entry.key for entry in pinned if entry.disk]))
        try:
            with below:
                yield [entry.key for entry in pinned]
        finally:
            with self.lock:
                for entry in pinned:
                    entry.pins -= 1
                self.placement.sweep()

    def delete(self, keys: Iterable[Key]) -> int:
        """See `BlockStore.delete`."""
        with self.lock:
            self.check_open()
            return sum([self.placement.remove(key) for key in keys if key_bytes(key)])

    def delete_sequence(self, sequence: int) -> int:
        """See `BlockStore.delete_sequence`."""
        with self.lock:
            return self.delete([entry.key for shelf, entry in self.placement.entries() if shelf.sequence == sequence])

    def drop_blocks(self, sequence: int, layers: Iterable[int], blocks: Sequence[int]) -> None:
        """Forget blocks of several layers, whether they are there or not."""
        with self.lock:
            if not self.closed:
                for stream in self.streams:
                    while stream.sequence == sequence and stream.drop_last():
                        pass  # what it fetches ahead would keep their room
                for layer in layers:
                    for block in blocks:
                        self.placement.remove(BlockKey(sequence, layer, block))

    def keys(self) -> list[Key]:
        """See `BlockStore.keys`."""
        with self.lock:
            self.check_open()
            return [entry.key for _, entry in self.placement.entries()]

    def __contains__(self, key: Key) -> bool:
        with self.lock:
            return self._find(key) is not None

    def __len__(self) -> int:
        return len(self.keys())

    def stats(self) -> StoreStats:
        """See `BlockStore.stats`."""
        with self.lock:
            self.check_open()
            disk = self.placement.disk
            return StoreStats(
                tiers=tuple(self._tiers()),
                misses=self.counts["misses"],
                puts=self.counts["puts"],
                pinned=sum(entry.pins > 0 or shelf.readers[DEVICE] > 0 for shelf, entry in self.placement.entries()),
                evictions=dict(self.placement.evictions),
                moved=dict(self.placement.moved),
                prefetch_hits=self.counts["prefetch_hits"],
                prefetch_late=self.counts["prefetch_late"],
                prefetch_unused=self.counts["prefetch_unused"],
                stall_seconds=self.stall_seconds,
                faults={} if disk is None else disk.stats().faults,
            )

    def check(self) -> list[str]:
        """See `BlockStore.check`."""
        with self.lock:
            self.check_open()
            disk = self.placement.disk
            return audit(self.placement) + ([] if disk is None else disk.check())

    def flush(self) -> None:
        """See `BlockStore.flush`: what has a key of bytes goes to the disk as well, as far as there is room."""
        with self.lock:
            self.check_open()
            if self.placement.disk is None:
                return
            for shelf, entry in self.placement.entries():
                if shelf.sequence is None and not entry.disk:
                    self.placement.to_disk([(shelf, entry)], spare=True)
            self.placement.disk.flush()

    def close(self) -> None:
        """See `BlockStore.close`."""
        with self.lock:
            if self.closed:
                return
            self.flush()
            for stream in list(self.streams):
                stream.close()
            self.closed = True
        self.worker.close()
        if self.placement.disk is not None:
            self.placement.disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def take_buffer(self, stream: Stream) -> Buffer:
        """A staging buffer, for which what was fetched ahead is given up; with the lock held. Raises `StoreError`."""
        while True:
            buffer = self.ring.take()
            if buffer is not None:
                return buffer
            if not any(each.drop_last() for each in (stream, *self.streams)) and not self.changed.wait(_PATIENCE):
                raise StoreError(f"all {BUFFERS} staging buffers have been read for {_PATIENCE:.0f} s")

    def _fetch(self, key: Key) -> None:
        """Read a payload if it is on disk only."""
        with self.lock:
            entry = self.placement.find(key)
            wanted = entry is not None and all(place is None for place in entry.places) and not self.closed
        if wanted:
            with suppress(StoreError):  # it was closed meanwhile
                self.get(key)

    def _from_disk(self, shelf: Shelf, entry: Entry) -> Tensor | None:
        """Read what is pinned, and keep it in the host's memory too if others leave for it."""
        disk = self.placement.disk
        assert disk is not None
        out = torch.empty(1, entry.nbytes, dtype=torch.uint8)
        found = disk.read([entry.key], out)[0]
        with self.lock:
            if not found:
                self.counts["misses"] += 1
                if self.placement.find(entry.key) is entry:
                    self.placement.remove(entry.key)
                return None
            self.placement.disk_hits += 1
            if self.placement.find(entry.key) is entry:
                self.placement.admit(shelf, [entry], out[0], HOST)
        return out[0]

    def in_words(self) -> str:
        """How full it is."""
        return ", ".join(f"{tier.name} {tier.used} of {tier.budget} bytes" for tier in self.stats().tiers)

    def _tiers(self) -> Iterator[TierStats]:
        for which, level in enumerate(self.placement.levels):
            if level is not None:
                held = sum(entry.places[which] is not None for _, entry in self.placement.entries())
                yield TierStats(level.name, level.pool.ranges.capacity, level.pool.ranges.used, held, level.hits)
        if self.placement.disk is not None:
            (tier,) = self.placement.disk.stats().tiers
            yield TierStats("disk", tier.budget, tier.used, tier.payloads, self.placement.disk_hits)

    def _find(self, key: Key) -> Entry | None:
        self.check_open()
        key_bytes(key)  # raises for what is no key
        return self.placement.find(key)

    def check_open(self) -> None:
        """Raises `StoreError` once it is closed; lets go of what was retired."""
        if self.closed:
            raise StoreError("the store is closed")
        while self._retired:
            self._retired.popleft().close()
