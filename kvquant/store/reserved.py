"""What a tiered store has reserved: a place of the device or the host, or one of the disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch

from ..errors import StoreError
from .base import Key, Reservation
from .residency import DISK

if TYPE_CHECKING:
    from .tiered import TieredStore


class Reserved:
    """See `Reservation`."""

    def __init__(
        self, store: TieredStore, keys: Sequence[Key], nbytes: int, tag: int, room: list[int] | Reservation, which: int
    ) -> None:
        """``room``: places of the device or the host, or what the disk has reserved."""
        self._store, self._keys, self._nbytes, self._tag = store, list(keys), nbytes, tag
        self._room, self._which = room, which
        self._open = True
        pool = store.pool(which)
        self._direct = pool is not None and pool.buffer.device == store.device and pool.is_run(self._places, nbytes)
        if self._direct and pool is not None:
            self.payloads = pool.view(self._places[0], len(keys), nbytes)
        else:
            self.payloads = torch.empty(len(keys), nbytes, dtype=torch.uint8, device=store.device)

    @property
    def on_disk(self) -> bool:
        """Whether that is where it will lie."""
        return self._which == DISK

    @property
    def _places(self) -> list[int]:
        return self._room if isinstance(self._room, list) else []

    def commit(self) -> None:
        """See `Reservation.commit`."""
        with self._store.lock:
            if not self._open:
                raise StoreError("a reservation is committed, or given back, once")
            self._store.check_open()
            self._open = False
            placement, pool = self._store.placement, self._store.pool(self._which)
            if not isinstance(self._room, list):
                self._room.payloads.copy_(self.payloads)
                self._room.commit()
            elif pool is not None and not self._direct:
                pool.write(self._room, self.payloads)
            for index, key in enumerate(self._keys):
                place = self._places[index] if self._places else None
                placement.insert(key, self._nbytes, self._tag, self._which, place)
            self._store.counts["puts"] += len(self._keys)

    def abort(self) -> None:
        """See `Reservation.abort`."""
        with self._store.lock:
            pool = self._store.pool(self._which)
            if self._open and not isinstance(self._room, list):
                self._room.abort()
            elif self._open and pool is not None:
                pool.free(self._places, self._nbytes)
            self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()
