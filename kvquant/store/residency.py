"""Who stays where room is short.

Decoding visits layers in a cycle. With room for C of N layers, least recently used hits nothing: what leaves is always
what comes next. What should leave is what comes last; and what has just been read, or just been made, comes last of
all, so it does not even enter. That reaches C/N, which is Belady's bound for a store that need not keep what it
fetches (Belady 1966); one that must reaches (C−1)/(N−1) at best, as most recently used does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..errors import StoreError, shown
from .base import Key

DEVICE, HOST, DISK = 0, 1, 2


class Entry:
    """One payload, and where copies of it are: its places in the memory of device and host, and whether on disk."""

    __slots__ = ("disk", "key", "nbytes", "pins", "places", "tag")

    def __init__(self, key: Key, nbytes: int, tag: int) -> None:
        self.key, self.nbytes, self.tag = key, nbytes, tag
        self.places: list[int | None] = [None, None]
        self.disk = False
        self.pins = 0


@dataclass(eq=False)
class Shelf:
    """Payloads that are used together: those of a layer of a sequence, by block; or a single one whose key is bytes.

    ``version`` is another whenever one of them has moved; ``readers`` count who reads what lies on the device, and
    what lies below.
    """

    sequence: int | None
    layer: int
    entries: dict[int, Entry] = field(default_factory=dict)
    version: int = 0
    readers: list[int] = field(default_factory=lambda: [0, 0])


@dataclass
class Turn:
    """A sequence that visits layers in an order (``places`` by layer), the next at ``position``.

    ``began`` is when its pass did, and ``before`` when the one before did.
    """

    places: dict[int, int]
    position: int = 0
    began: int = 0
    before: int = -1


@dataclass
class Clock:
    """Counts passes, and knows whose turn it is."""

    now: int = 0
    turns: dict[int, Turn] = field(default_factory=dict)  # by sequence
    current: int | None = None

    def begin(self, sequence: int) -> None:
        """A sequence begins a pass."""
        turn = self.turns[sequence]
        self.now += 1
        turn.before, turn.began, turn.position = turn.began, self.now, 0
        self.current = sequence

    def distance(self, shelf: Shelf) -> int | None:
        """How many visits of layers until a shelf is used; None if its sequence is idle.

        That is one that was not visited since the sequence whose turn it is began its pass before.
        """
        own = None if self.current is None else self.turns.get(self.current)
        turn = None if shelf.sequence is None else self.turns.get(shelf.sequence)
        if own is None or turn is None or turn.began < own.before:
            return None
        place = turn.places.get(shelf.layer, 0)
        if turn is own:
            return (place - own.position) % len(own.places)
        return len(own.places) - own.position + place


Leaving = Callable[[dict[Shelf, int], Clock, Shelf], Iterator[Shelf]]
"""Of shelves, least recently used first, those that may leave for another, first those that should first."""


def _next_use(shelves: dict[Shelf, int], clock: Clock, entering: Shelf) -> Iterator[Shelf]:
    """Those that are idle. All others are used before what enters, which has been read, or made, just now."""
    return (shelf for shelf in shelves if clock.distance(shelf) is None)


def _lru(shelves: dict[Shelf, int], clock: Clock, entering: Shelf) -> Iterator[Shelf]:
    return iter(shelves)


def _mru(shelves: dict[Shelf, int], clock: Clock, entering: Shelf) -> Iterator[Shelf]:
    return reversed(shelves)


def _pinned_layers(shelves: dict[Shelf, int], clock: Clock, entering: Shelf) -> Iterator[Shelf]:
    """Those that are idle, and then the last layers, down to the one that enters."""
    yield from _next_use(shelves, clock, entering)
    later = [shelf for shelf in shelves if clock.distance(shelf) is not None and shelf.layer > entering.layer]
    yield from sorted(later, key=lambda shelf: -shelf.layer)


_POLICIES: dict[str, Leaving] = {
    "next-use": _next_use,
    "lru": _lru,
    "mru": _mru,
    "pinned-layers": _pinned_layers,
}


def residency_names() -> list[str]:
    """The policies there are."""
    return list(_POLICIES)


def get_residency(name: str) -> Leaving:
    """A policy by name. Raises `StoreError`."""
    if not isinstance(name, str) or name not in _POLICIES:
        raise StoreError(f"residency: {shown(name)}; allowed: {', '.join(_POLICIES)}")
    return _POLICIES[name]
