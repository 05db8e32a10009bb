"""What a layer held in one call, for as long as attention reads it, and how it is decoded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .blocks import Span
from .rows import Call

if TYPE_CHECKING:
    from .layer import History, Layer


@dataclass(frozen=True, eq=False)
class Held:
    """What a layer held of keys, or values, in a call: new columns ``fresh``, blocks from before, each row's tail.

    Of the rows that take part in the call, in its order. Good until the next call.
    """

    layer: Layer
    which: int
    fresh: Tensor
    call: Call
    tails: tuple[Tensor, ...]

    @property
    def side(self) -> History:
        """Whose columns these are."""
        return self.layer.sides[self.which]

    def decode(self, number: int, spans: Sequence[Span], out: Tensor) -> None:
        """Decode spans of the call's row ``number`` into ``out[heads, token, dim]``, by their number in the row."""
        with no_autocast(out.device), torch.no_grad():
            for span in spans:
                self.side.decode(span, self.which, self.call.rows[number], out)

    def room(self, number: int) -> Tensor:
        """Room for all tokens ``[heads, tokens, dim]`` of the call's row ``number``, where those not in blocks are."""
        row, tail = self.call.rows[number], self.tails[number]
        room = tail.new_empty(tail.shape[0], row.before + row.fresh, tail.shape[2])
        room[:, row.sealed :] = tail
        return room

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of all columns, decoded."""
        lines, heads, new, dim = self.fresh.shape
        call = self.call
        return lines, heads, sum(row.before + row.fresh for row in call.rows) if call.packed else call.past + new, dim


def decoded(*held: Held) -> list[Tensor]:
    """All columns of what was held in one call, new ones as given; padding columns of earlier calls are zeros.

    ``[lines, heads, columns, dim]``; of a packed call, one row after the other.
    """
    fresh, call, layer = held[0].fresh, held[0].call, held[0].layer
    if not (any(row.before for row in call.rows) if call.packed else call.past):
        return [one.fresh.contiguous() for one in held]
    started = time.perf_counter()
    with no_autocast(fresh.device):
        dense = [one.fresh.new_empty(one.shape) for one in held]
        with torch.no_grad():
            for portion in layer.blocks.read(call).each:
                for number, (spans, row, place) in enumerate(zip(portion, call.rows, call.places, strict=True)):
                    for one, out in zip(held, dense, strict=True):
                        one.decode(number, spans, out[row.line, :, place:])
            for one, out in zip(held, dense, strict=True):
                for tail, row, place in zip(one.tails, call.rows, call.places, strict=True):
                    if not call.packed:
                        out[row.line, :, :place] = 0
                    out[row.line, :, place + row.sealed : place + row.before] = tail[:, : row.tail]
        for one, out in zip(held, dense, strict=True):
            if not call.packed:
                out[:, :, call.past :] = one.fresh
                continue
            for row, place in zip(call.rows, call.places, strict=True):
                out[0, :, place + row.before : place + row.before + row.fresh] = row.of(one.fresh)
    layer.key.decode_seconds += time.perf_counter() - started
    return dense


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Codecs choose their dtypes themselves."""
    wanted = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if wanted else nullcontext()
