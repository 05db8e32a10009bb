"""Blocks as records of bytes: the memory in which fields of n blocks are views a record apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvquant.codecs import Fields, Layout

EDGE = 16  # bytes at multiples of which fields begin


def in_records(
    layouts: Sequence[Layout], count: int, gap: int = 1, device: str = "cpu"
) -> tuple[Tensor, list[Fields]]:
    """Records of 0xFF, uint8 ``[count, bytes]``, and the fields of ``layouts`` in them.

    At least ``gap`` times 16 bytes belong to none before every field, and three times that at the end.
    """
    at, places = 0, []
    for layout in layouts:
        for name, (shape, dtype) in layout.items():
            at = -(-at // EDGE) * EDGE + gap * EDGE
            places.append((name, shape, dtype, at))
            at += math.prod(shape) * dtype.itemsize
    size = -(-at // EDGE) * EDGE + 3 * gap * EDGE
    records = torch.full((count, size), 0xFF, dtype=torch.uint8, device=device)
    fields = iter(
        (name, records[:, at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(count, *shape))
        for name, shape, dtype, at in places
    )
    return records, [dict(next(fields) for _ in layout) for layout in layouts]


def as_records(*sides: Fields, gap: int = 1) -> list[Fields]:
    """Copies of the fields of some sides, in records."""
    layouts = [{name: (tuple(field.shape[1:]), field.dtype) for name, field in side.items()} for side in sides]
    known = next(iter(sides[0].values()))
    _, views = in_records(layouts, len(known), gap, str(known.device))
    for side, view in zip(sides, views, strict=True):
        for name, field in side.items():
            view[name].copy_(field)
    return views


def only_fields_written(records: Tensor, sides: Sequence[Fields]) -> bool:
    """Whether what belongs to no field is still 0xFF; writes to the fields."""
    for side in sides:
        for field in side.values():
            field.view(torch.uint8).fill_(0xFF)
    return bool((records == 0xFF).all())
