"""`kvquant bench residency`: of a store too small for all layers, how many reads each policy serves from the device.

A decode step reads the history of layer 0, 1, … N−1, and the next step begins again: a cycle, in which what was read
just now is what is needed last. With room for C of N layers

    Belady's bound       C/N: keep C layers for good; a store need not keep what it fetches
    forced admission     (C−1)/(N−1) at best, where what is fetched has to take somebody's place
    least recently used  0: what leaves is always what comes next

A real `TieredStore` is driven through such passes, by streams as caches have them. The device's budget is C payloads,
one a layer, and the host has room for the rest. ``value`` is the hit rate: of the reads in all passes but the first
few, the share that was served on the device. ``bytes_moved`` is what a pass copies to it, ``peak_bytes`` what is held
there. Times are of passes that do nothing else, compared with those of a store that has room for all: what the books
cost, and a miss on top. The CPU's memory stands for the device's on any machine, since hit rates are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvquant import TieredStore
from kvquant.store.base import StoreStats
from kvquant.store.residency import residency_names
from kvquant.store.stream import Stream

from ..errors import InputError
from ..options import split_list
from ..ppl import Progress
from .load import LoadGuard
from .rows import Case, Outcome, Result, Tick, compare, take_turns

BOUND = "Belady bound"
ALL = "room for all"
PAYLOAD = 16 << 10  # bytes of a layer
WARM_UP = 2  # passes
_TABLE = (0,)  # the blocks of each layer


@dataclass(frozen=True)
class ResidencyOptions:
    """The options of ``kvquant bench residency`` as typed; see its ``--help``."""

    layers: int
    room: str
    policies: str


def run_residency(options: ResidencyOptions, say: Callable[[str], None], progress: Progress) -> Outcome:
    """The rows of every room and policy. Raises `kvquant.KVQuantError` for bad input."""
    rooms = [_room(item, options.layers) for item in split_list("--room", options.room)]
    policies = split_list("--policies", options.policies)
    for name in policies:
        if name not in residency_names():
            raise InputError(f"--policies: {name!r}; allowed: {', '.join(residency_names())}")
    passes = options.layers - 1  # what most recently used keeps comes round after so many
    found = Outcome()
    for room in sorted(set(rooms)):
        with progress(f"Room for {room} of {options.layers}", [(0, 1)] * (passes * (len(policies) + 1))) as tick:
            found.add(_run(options.layers, room, policies, passes, say, tick))
    return found


def _run(
    layers: int, room: int, policies: Sequence[str], passes: int, say: Callable[[str], None], tick: Tick
) -> Outcome:
    with LoadGuard(say) as guard:
        cycles = {name: Cycle(layers, room, name) for name in policies} | {ALL: Cycle(layers, layers, "next-use")}
        seconds = take_turns({name: cycle.run for name, cycle in cycles.items()}, passes, tick)
    results = {name: cycle.result(tuple(seconds[name])) for name, cycle in cycles.items()}
    for cycle in cycles.values():
        cycle.close()
    forced = (room - 1) / (layers - 1)
    bound = Result(
        value=room / layers, detail=f"C/N; where what is fetched has to be kept, (C-1)/(N-1) = {forced:.4f}"
    )
    rows = compare("residency", room, guard.marked(results) | {BOUND: bound}, [ALL])
    return Outcome(list(rows), [Case(room, bool(guard.note))])


class Cycle:
    """A store with room for ``room`` payloads on the device, and a sequence in it of one payload a layer.

    It has been read `WARM_UP` times.
    """

    def __init__(self, layers: int, room: int, policy: str) -> None:
        self._store = TieredStore(room * PAYLOAD, layers * PAYLOAD, device="cpu", residency=policy)
        self._stream: Stream = self._store.stream(0, range(layers))
        self._passes = 0
        self._stream.begin(())
        for layer in self._stream.layers:
            reserved = self._stream.reserve(layer, _TABLE, PAYLOAD, tag=1)
            assert reserved is not None, "the host has room for all"
            with reserved:
                reserved.payloads.fill_(layer % 256)
                reserved.commit()
        for _ in range(WARM_UP):
            self.run()
        self._before, self._passes = self._store.stats(), 0

    def run(self) -> list[float]:
        """The seconds of a pass, which is checked to bring what was put."""
        began = time.perf_counter()
        self._stream.begin(_TABLE)
        for layer in self._stream.layers:
            for runs in self._stream.read(layer, _TABLE).runs():
                assert all(int(run.payloads[0, 0]) == layer % 256 for run in runs)
        seconds = time.perf_counter() - began
        self._passes += 1
        return [seconds]

    def result(self, seconds: tuple[float, ...]) -> Result:
        """What the passes that count came to."""
        now = self._store.stats()
        hits, others = (_hits(now, which) - _hits(self._before, which) for which in ("device", "host"))
        assert hits + others == self._passes * len(self._stream.layers)
        moved = now.moved["host→device"] - self._before.moved["host→device"] if others else 0
        return Result(
            seconds,
            bytes_moved=moved // self._passes,
            peak_bytes=next(tier.used for tier in now.tiers if tier.name == "device"),
            value=hits / (hits + others),
            detail=f"{hits} of {hits + others} reads",
        )

    def close(self) -> None:
        """Let go of the memory."""
        self._store.close()


def _hits(stats: StoreStats, name: str) -> int:
    return next(tier.hits for tier in stats.tiers if tier.name == name)


def _room(item: str, layers: int) -> int:
    if not (item.isascii() and item.isdigit() and len(item) < 10 and 1 <= int(item) <= layers):
        raise InputError(
            f"--room: {item!r}; allowed: whole numbers from 1 to {layers} (--layers), separated by commas"
        )
    return int(item)
