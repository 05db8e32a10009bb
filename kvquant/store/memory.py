"""A stretch of one device's memory, taken once, in which payloads lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .allocator import Allocator
from .base import ALIGNMENT


class Pool:
    """``budget`` bytes on ``device``. A CPU's pages are taken by the system only once they are written."""

    def __init__(self, budget: int, device: torch.device) -> None:
        self.ranges = Allocator(budget, ALIGNMENT)
        self._apart = self.ranges.capacity // 2 // ALIGNMENT * ALIGNMENT
        self.buffer = torch.empty(self.ranges.capacity, dtype=torch.uint8, device=device)

    def allocate(self, count: int, nbytes: int, at: int | None = None) -> list[int] | None:
        """Places of ``count`` payloads, side by side as far as may be, from ``at`` on if that is free; or None."""
        size = self.ranges.size(nbytes)
        if count * size > self.ranges.capacity - self.ranges.used:
            return None
        places: list[int] = []
        while len(places) < count:
            many = count - len(places)
            start = self.ranges.allocate(many * size, at, self._apart)
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
