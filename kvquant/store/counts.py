"""What a disk tier has done, as numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import StoreFullError
from .base import StoreStats, TierStats
from .slab import Entry
from .table import Table


@dataclass
class Counts:
    """Gets, puts and faults; the store's lock is held by whoever counts. ``read`` and ``written`` are bytes."""

    hits: int = 0
    misses: int = 0
    puts: int = 0
    read: int = 0
    written: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    def got(self, entries: Sequence[Entry | None], wrong: Mapping[int, str]) -> None:
        """Count a read of entries, of which those in ``wrong``, by place, were damaged."""
        served = [entry.nbytes for entry in entries if entry is not None]
        hits, nbytes = len(served), sum(served)
        for row, fault in wrong.items():
            entry = entries[row]
            hits, nbytes = hits - 1, nbytes - (entry.nbytes if entry else 0)
            self.faults[fault] += 1
        self.hits += hits
        self.misses += len(entries) - hits
        self.read += nbytes

    def refused(self, error: BaseException) -> None:
        """Count what the device did not do; what the budget does not allow is no fault."""
        if isinstance(error.__cause__, OSError):
            self.faults["no space" if isinstance(error, StoreFullError) else "io"] += 1

    def stats(self, table: Table, budget: int) -> StoreStats:
        """A snapshot of it all."""
        return StoreStats(
            (TierStats("disk", budget, table.allocator.used, len(table.entries), self.hits),),
            misses=self.misses,
            puts=self.puts,
            pinned=table.pinned(),
            evictions={"disk→": table.evicted} if table.evicted else {},
            moved={"→disk": self.written, "disk→": self.read},
            faults=dict(self.faults),
        )
