"""A stretch of one device's memory, taken once, in which payloads lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..errors import StoreError, shown
from .allocator import Allocator
from .base import ALIGNMENT


class Pool:
    """``budget`` bytes on ``device``. A CPU's pages are taken by the system only once they are written."""

    def __init__(self, budget: int, device: torch.device) -> None:
        self.ranges = Allocator(budget, ALIGNMENT)
        with torch.inference_mode(False):  # what is made in it can't be written outside of it
            self.buffer = torch.empty(self.ranges.capacity, dtype=torch.uint8, device=device)

    def allocate(self, count: int, nbytes: int, at: int | None = None) -> list[int] | None:
        """Places of ``count`` payloads, side by side as far as may be, from ``at`` on if that is free; or None."""
        size = self.ranges.size(nbytes)
        if count * size > self.ranges.capacity - self.ranges.used:
            return None
        places: list[int] = []
        while len(places) < count:
            many = count - len(places)
            start = self.ranges.allocate(many * size, at, self.ranges.capacity // 2)
            if start is None:
                many = min(many, self.ranges.largest // size)
                start = self.ranges.allocate(many * size) if many else None
            if start is None:  # what is free is in pieces too small
                self.free(places, nbytes)
                return None
            places += range(start, start + many * size, size)
            at = places[-1] + size
        return places

    def holds(self, count: int, nbytes: int) -> bool:
        """Whether `allocate` would find places."""
        return self.ranges.slots(nbytes) >= count

    def clearing(self, count: int, nbytes: int, candidates: Iterable[tuple[int, int]]) -> list[int] | None:
        """Which of ``candidates``, each a place and its bytes, must go for `allocate` to find places; None if in vain.

        By number, as few of the first as it takes.
        """
        ranges, size = self.ranges, self.ranges.size(nbytes)
        if count * size > ranges.capacity:
            return None
        slots = ranges.slots(nbytes)
        gone = []
        for number, (place, held) in enumerate(candidates if slots < count else ()):
            start, end = ranges.free(place, held)
            stop = place + ranges.size(held)
            slots += (end - start) // size - (place - start) // size - (end - stop) // size
            gone.append((number, place, held))
            if slots >= count:
                break
        for _, place, held in gone:
            ranges.claim(place, held)
        if slots < count:
            return None
        return self._needed(count, nbytes, gone)

    def _needed(self, count: int, nbytes: int, gone: Sequence[tuple[int, int, int]]) -> list[int]:
        """The numbers of those whose room is needed; of other sizes, some may have made none."""
        ranges, size = self.ranges, self.ranges.size(nbytes)
        if all(ranges.size(held) == size for _, _, held in gone):
            return [number for number, _, _ in gone]
        for _, place, held in gone:
            ranges.free(place, held)
        needed = []
        for each in reversed(gone):
            ranges.claim(*each[1:])
            if ranges.slots(nbytes) < count:
                ranges.free(*each[1:])
                needed.append(each)
        for _, place, held in needed:
            ranges.claim(place, held)
        return [number for number, _, _ in reversed(needed)]

    def free(self, places: Sequence[int], nbytes: int) -> None:
        """Give places of payloads of ``nbytes`` back."""
        for place in places:
            self.ranges.free(place, nbytes)

    def runs(self, places: Sequence[int], nbytes: int) -> Iterator[tuple[int, int]]:
        """The places in their order as the fewest stretches: where each begins, and how many payloads it has."""
        size = self.ranges.size(nbytes)
        start, count = places[0], 0
        for place in places:
            if place != start + count * size:
                yield start, count
                start, count = place, 0
            count += 1
        yield start, count

    def is_run(self, places: Sequence[int], nbytes: int) -> bool:
        """Whether they lie side by side in their order."""
        return len(list(self.runs(places, nbytes))) == 1

    def write(self, places: Sequence[int], payloads: Tensor) -> None:
        """Copy ``payloads`` uint8 ``[n, nbytes]`` to their places."""
        done = 0
        for start, count in self.runs(places, payloads.shape[1]):
            self.view(start, count, payloads.shape[1]).copy_(payloads[done : done + count])
            done += count

    def view(self, place: int, count: int, nbytes: int) -> Tensor:
        """``count`` payloads that lie side by side from ``place`` on, uint8 ``[count, nbytes]``."""
        size = self.ranges.size(nbytes)
        return self.buffer[place : place + count * size].view(count, size)[:, :nbytes]


def device_of(given: str | torch.device | None) -> torch.device:
    """The device of a store. Raises `StoreError` for what this machine does not have."""
    there = torch.cuda.is_available()
    try:
        device = torch.device(given if given is not None else "cuda" if there else "cpu")
    except (RuntimeError, TypeError) as error:
        raise StoreError(f"device: {shown(given)}; allowed: cpu or cuda") from error
    if device.type != "cpu" and not (device.type == "cuda" and there):
        raise StoreError(f"device: {device}; allowed here: cpu{', cuda' if there else ''}")
    return device
