"""A reservation whose payloads are written to memory first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Self, TypeVar

from torch import Tensor

from ..errors import StoreError

Room = TypeVar("Room")


class Staged(Generic[Room]):
    """A `Reservation` of ``room`` in a store, which ``commit`` writes to and ``give_back`` frees."""

    def __init__(
        self, room: Room, payloads: Tensor, commit: Callable[[Room, Tensor], None], give_back: Callable[[Room], None]
    ) -> None:
        self._room: Room | None = room
        self._payloads, self._commit, self._give_back = payloads, commit, give_back

    @property
    def payloads(self) -> Tensor:
        """Where to write them: uint8 ``[keys, nbytes]``."""
        return self._payloads

    def commit(self) -> None:
        """Write them and let them be found. Raises `StoreError` if that fails, and once it is over."""
        if self._room is None:
            raise StoreError("a reservation that is over; allowed: one commit, before the room is given back")
        room, self._room = self._room, None
        self._commit(room, self._payloads)

    def abort(self) -> None:
        """Give the room back; does nothing once committed."""
        if self._room is not None:
            room, self._room = self._room, None
            self._give_back(room)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()
