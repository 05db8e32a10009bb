"""How the blocks of a layer lie in memory: each is a record of bytes, the fields of its key, then those of its value.

So a block is one stretch of memory, which is copied, written to a file and checked as a whole, and blocks that lie
side by side are read in one go through strides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .codecs import Codec, Fields, Layout

ALIGNMENT = 16  # bytes at multiples of which fields begin, within a record
RECORD_ALIGNMENT = 64  # and records themselves: what a CPU reads at once


@dataclass(frozen=True)
class Place:
    """Where a field lies in a record: ``nbytes`` from byte ``start`` on, as a tensor of ``shape`` and ``dtype``."""

    name: str
    start: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Record:
    """The places of a key's fields and of a value's, in ``nbytes``."""

    sides: tuple[tuple[Place, ...], tuple[Place, ...]]
    nbytes: int

    @classmethod
    def of(cls, key: Layout, value: Layout) -> Record:
        """A record for what two codecs lay out."""
        start = 0
        sides = []
        for layout in (key, value):
            places = []
            for name, (shape, dtype) in layout.items():
                nbytes = math.prod(shape) * dtype.itemsize
                places.append(Place(name, start, nbytes, tuple(shape), dtype))
                start += -(-nbytes // ALIGNMENT) * ALIGNMENT
            sides.append(tuple(places))
        return cls((sides[0], sides[1]), -(-start // RECORD_ALIGNMENT) * RECORD_ALIGNMENT)

    def views(self, records: Tensor) -> tuple[Fields, Fields]:
        """The fields of ``records`` uint8 ``[n, nbytes]``, which they share their memory with."""
        key, value = (
            {
                place.name: torch.unflatten(
                    records[:, place.start : place.start + place.nbytes].view(place.dtype), 1, place.shape
                )
                for place in side
            }
            for side in self.sides
        )
        return key, value

    def widened(self, side: int, fields: Fields) -> Record:
        """One whose fields of a side hold the dtypes of ``fields`` too; itself if they do already."""
        layouts = [self._layout(places) for places in self.sides]
        layouts[side] = {
            name: (shape, torch.promote_types(dtype, fields[name].dtype))
            for name, (shape, dtype) in layouts[side].items()
        }
        wider = Record.of(*layouts)
        return self if wider == self else wider

    def counted(self, codecs: tuple[Codec, Codec]) -> int:
        """Bytes of a block; what is stored as it was counts 2 bytes a value."""
        return sum(
            sum(2 * math.prod(place.shape) if codec.lossless else place.nbytes for place in places)
            for codec, places in zip(codecs, self.sides, strict=True)
        )

    def __iter__(self) -> Iterator[Place]:
        for places in self.sides:
            yield from places

    @staticmethod
    def _layout(places: tuple[Place, ...]) -> Layout:
        return {place.name: (place.shape, place.dtype) for place in places}


def copy_fields(source: Fields, to: Fields) -> None:
    """Copy fields into others of the same shapes."""
    for name, field in source.items():
        to[name].copy_(field)
