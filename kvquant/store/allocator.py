"""Hands out ranges of one stretch of bytes: of a buffer, or of a file."""

from __future__ import annotations

from bisect import bisect_left, insort


class Allocator:
    """Ranges of ``capacity`` bytes, each a multiple of ``alignment`` long and at one.

    Free ranges are kept in order and joined with their neighbours, so that any that becomes free serves any other
    size.
    """

    def __init__(self, capacity: int, alignment: int) -> None:
        self.alignment = alignment
        self.capacity = capacity // alignment * alignment
        self.used = 0
        self._starts: list[int] = [0] if self.capacity else []  # of free ranges, ascending
        self._ends: dict[int, int] = {0: self.capacity} if self.capacity else {}  # by start

    def size(self, nbytes: int) -> int:
        """What a range of ``nbytes`` takes."""
        return -(-nbytes // self.alignment) * self.alignment

    def allocate(self, nbytes: int, at: int | None = None, apart: int = 0) -> int | None:
        """Where a range of ``nbytes`` begins; None where there is no room in one piece.

        That is at ``at`` if it is free there; else at a multiple of ``apart`` that has as many free bytes before it
        comes to another, or of a half of that, a quarter and so on, so that what grows lies apart from what others
        have; else where there is room first.
        """
        size = self.size(nbytes)
        start = None if at is None else self._around(at, size)
        apart = min(apart, self.capacity) // size * size  # so that between ranges of one size nothing is lost
        while start is None and apart >= 2 * size:
            at, start = self._apart(apart)
            apart = apart // 2 // size * size
        if start is None:
            at = start = next((start for start in self._starts if self._ends[start] - start >= size), None)
        if start is None or at is None:
            return None
        self._take(start, at, at + size)
        return at

    def claim(self, at: int, nbytes: int) -> bool:
        """Take just this range; False, and nothing is taken, if it is not free."""
        size = self.size(nbytes)
        start = self._around(at, size) if at % self.alignment == 0 else None
        if start is None:
            return False
        self._take(start, at, at + size)
        return True

    def free(self, at: int, nbytes: int) -> tuple[int, int]:
        """Give a range back, or a part of one; where the free range it is now in begins and ends."""
        end = at + self.size(nbytes)
        self.used -= end - at
        index = bisect_left(self._starts, at)
        if index < len(self._starts) and self._starts[index] == end:
            end = self._ends.pop(self._starts.pop(index))
        if index and self._ends[self._starts[index - 1]] == at:
            at = self._starts.pop(index - 1)
        insort(self._starts, at)
        self._ends[at] = end
        return at, end

    def slots(self, nbytes: int) -> int:
        """How many ranges of ``nbytes`` there is room for."""
        size = self.size(nbytes)
        return sum((end - start) // size for start, end in self._ends.items())

    @property
    def largest(self) -> int:
        """Bytes of the largest free range."""
        return max((end - start for start, end in self._ends.items()), default=0)

    def _apart(self, apart: int) -> tuple[int | None, int | None]:
        """The first multiple of ``apart`` with as many bytes free, and where the free range begins."""
        for start in self._starts:
            at = -(-start // apart) * apart
            if at + apart <= self._ends[start]:
                return at, start
        return None, None

    def _around(self, at: int, size: int) -> int | None:
        """The start of the free range that holds ``size`` bytes from ``at`` on."""
        index = bisect_left(self._starts, at + 1) - 1
        if index < 0 or self._ends[self._starts[index]] < at + size:
            return None
        return self._starts[index]

    def _take(self, start: int, at: int, stop: int) -> None:
        end = self._ends.pop(start)
        index = bisect_left(self._starts, start)
        pieces = [(first, last) for first, last in ((start, at), (stop, end)) if first < last]
        self._starts[index : index + 1] = [first for first, _ in pieces]
        self._ends.update(pieces)
        self.used += stop - at
