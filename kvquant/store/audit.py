"""Whether the books of a store add up."""

from __future__ import annotations

import itertools
from collections import Counter

from .placement import Placement
from .residency import Shelf


def audit(placement: Placement) -> list[str]:
    """What of them does not, a line each."""
    found = []
    for which, level in enumerate(placement.levels):
        if level is None:
            continue
        counted: Counter[Shelf] = Counter()
        taken = []
        for shelf, entry in [*placement.entries(), *placement.unread]:
            if (place := entry.places[which]) is not None:
                counted[shelf] += 1
                taken.append((place, place + level.pool.ranges.size(entry.nbytes)))
        taken.sort()
        if any(one[1] > other[0] for one, other in itertools.pairwise(taken)):
            found.append(f"{level.name}: payloads overlap")
        held = sum(stop - start for start, stop in taken)
        if held > level.pool.ranges.used or dict(counted) != level.shelves:
            found.append(f"{level.name}: {held} bytes in payloads, {level.pool.ranges.used} accounted for")
    for shelf, entry in placement.entries():
        if not entry.disk and all(place is None for place in entry.places):
            found.append(f"{entry.key!r} is nowhere")
        if all(place is not None for place in entry.places) and not any(shelf.readers):
            found.append(f"{entry.key!r} is in memory twice")
        located = (entry.nbytes, entry.tag) if placement.disk is None else placement.disk.locate(entry.key)
        if entry.disk and located != (entry.nbytes, entry.tag):
            found.append(f"{entry.key!r} should be on disk")
    return found
