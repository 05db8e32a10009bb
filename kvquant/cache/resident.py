"""Blocks that all stay on their layer's device, in an arena that grows as they come."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ..arena import Arena, SlotPool
from .blocks import Cut, Portions, Span
from .layer import Layer
from .rows import Call, Piece, RowCall


class Resident:
    """See `Blocks`; copies of a layer share the arena."""

    def __init__(self, pool: SlotPool, layer: Layer) -> None:
        self._pool = pool
        self._owner = weakref.ref(layer)  # a cycle would keep the memory of a cache that is gone
        self._arena: Arena | None = None
        self._read: dict[int, tuple[Any, Any, dict[Piece, Span]]] = {}  # by row

    def seal(self, call: Call, cuts: Sequence[Cut]) -> None:
        """Encode blocks where they are to be."""
        if self._arena is None:
            assert self._layer.record is not None
            self._arena = Arena(self._pool, self._layer.record, cuts[0].blocks[0].device)
        self._arena.fill(call.runs, self._layer.encoders(cuts))

    def read(self, call: Call) -> Portions:
        """All at once; the same spans as before where nothing changed."""
        return Portions(False, [[[*self._spans(row).values()] for row in call.rows]])

    def nbytes(self) -> int:
        """See `Blocks`."""
        if self._arena is None:
            return 0
        codecs = self._layer.key.codec, self._layer.value.codec
        return sum(record.counted(codecs) * len(slab) for record, slab in self._arena.slabs())

    def slot_nbytes(self, slots: Sequence[int]) -> dict[int, int]:
        """See `Blocks`."""
        if self._arena is None:
            return dict.fromkeys(slots, 0)
        codecs = self._layer.key.codec, self._layer.value.codec
        taken = {slab: record.counted(codecs) for slab, record in self._arena.records()}
        found: dict[int, int] = {}
        for run in self._pool.runs(slots):
            first = self._pool.slot(run)
            found |= dict.fromkeys(range(first, first + len(run)), taken.get(run.slab, 0))
        return found

    def tensors(self) -> Iterator[Tensor]:
        """See `Blocks`."""
        if self._arena is not None:
            yield from (slab for _, slab in self._arena.slabs())

    def select(self, indices: Sequence[int]) -> None:
        """Spans that are kept would keep the memory of rows that are gone."""
        self._read = {row: self._read[index] for row, index in enumerate(indices) if index in self._read}

    def clear(self) -> None:
        """Memory is freed where no other cache uses the pool."""
        self._read.clear()
        if not self._pool.live:
            self._arena = None
            self._layer.record = None  # what comes next may have other shapes

    def fork(self, layer: Layer) -> Resident:
        """See `Blocks`."""
        twin = Resident(self._pool, layer)
        twin._arena = self._arena
        return twin

    @property
    def _layer(self) -> Layer:
        layer = self._owner()
        assert layer is not None
        return layer

    def _spans(self, row: RowCall) -> dict[Piece, Span]:
        history, stamp, made = self._read.get(row.index, (None, None, {}))
        now = self._arena, self._arena and self._arena.stamp, *(side.sinks.stamp for side in self._layer.sides)
        if history is not row.history or stamp != now:
            known = made if stamp == now else {}
            made = {piece: known.get(piece) or self._of(piece) for piece in row.history}
            self._read[row.index] = row.history, now, made
        return made

    def _of(self, piece: Piece) -> Span:
        assert self._arena is not None
        slot = self._pool.slot(piece.run)
        fields = self._arena.read(piece.run)
        key, value = (
            side.side(found, slot, piece.first) for side, found in zip(self._layer.sides, fields, strict=True)
        )
        return Span(piece.first, piece.stop, piece.offset, (key, value))
