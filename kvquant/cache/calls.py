"""One forward call, seen from all layers: announced once, opened by its first layer, taken by each layer once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import CacheStateError
from .rows import Call, Rows


@dataclass(frozen=True)
class _Announced:
    """What is known of the next call: where rows start, its ids and its positions."""

    starts: list[int] | None = None
    ids: Tensor | None = None
    positions: Tensor | None = None
    streamed: bool | None = None


@dataclass
class Calls:
    """Hands each layer the `Call` of the forward pass it is in.

    Nothing changes until the first layer takes the call, so an announced call that never runs leaves no trace. A layer
    that has all columns already begins the next pass. A pass that stopped between layers leaves some behind; that
    is found by whatever comes next. ``held`` counts the columns of every compressed layer.
    """

    rows: Rows
    held: dict[int, int] = field(default_factory=dict)
    streamed: bool | None = None  # whether the pass ends in attention that takes `HeldStates`, None: nobody said
    _announced: _Announced = _Announced()
    _current: Call | None = None

    def announce(
        self,
        new: int,
        ids: Tensor | None,
        mask: Tensor | None,
        positions: Tensor | None,
        opaque: bool = False,
        streamed: bool | None = None,
    ) -> None:
        """Tell what the next call of ``new`` columns brings; any of the three may be unknown.

        Shapes: ``ids`` ``[rows, new]``, ``mask`` ``[rows, columns held + new]`` with 0 for padding, ``positions``
        ``[rows or 1, new]``. A mask that hides anything but left padding makes keys and values depend on more than
        the ids, which are then forgotten. Raises `CacheStateError` where they do not continue the rows.
        ``opaque`` is for masks of other kinds, which tell nothing; ``streamed``: see `Calls`.
        """
        starts, plain = (None, not opaque) if mask is None else self._read_mask(new, mask)
        positions = _readable(positions)
        # Reading values off another device waits for it: worth it once per prompt, not once per token. Under masks
        # with holes there are many ways to count.
        if plain and positions is not None and (new > 1 or positions.device.type == "cpu"):
            self._check_positions(starts, positions)
        self._announced = _Announced(starts, ids if plain else None, positions, streamed)

    def take(self, layer: int, batch: int, new: int, positions: Any = None) -> Call:
        """The call of ``new`` columns that ``layer`` is in; the first layer to ask opens it.

        ``positions``, what the model calls so, count if none were announced.
        """
        held = self.held.setdefault(layer, 0)
        if held == self.rows.width:
            self.settle()
            self._open(batch, new, positions)
        call = self._current
        if call is None or (held, new) != (call.past, call.new):
            raise CacheStateError(
                f"layer {layer} holds {held} columns and is given {new} more, but this forward pass adds "
                f"{call.new if call else 0} to {call.past if call else self.rows.width}; a pass that stopped "
                f"half-way cannot be continued: reset() the cache"
            )
        self.held[layer] = held + new
        return call

    def view(self, layer: int) -> Call | None:
        """What ``layer`` holds, as a call that adds nothing; None if nothing. It may be behind others in a pass."""
        held = self.held[layer]
        if not held or held == self.rows.width:
            return self.rows.view() if held else None
        assert self._current is not None
        return self._current

    def settle(self) -> None:
        """`CacheStateError` where a pass stopped between layers.

        Layers that hold nothing may be skipped by the model; if the first pass just did not reach them, they find out
        in the next.
        """
        if behind := sum(0 < held != self.rows.width for held in self.held.values()):
            raise CacheStateError(
                f"the last forward pass stopped after {len(self.held) - behind} of {len(self.held)} layers, "
                f"what the cache holds is incomplete: reset() it"
            )

    def crop(self, columns: int) -> None:
        """Forget the last ``columns`` columns of all layers."""
        self.settle()
        self.rows.crop(columns)
        self.held = {layer: min(held, self.rows.width) for layer, held in self.held.items()}

    def fork(self, rows: Rows) -> Calls:
        """The same state over a copy of the rows."""
        return Calls(rows, dict(self.held), self.streamed, _Announced(), self._current)

    def reset(self) -> None:
        """Forget all rows."""
        self.rows.clear()
        self.rows.width = 0
        self.held = dict.fromkeys(self.held, 0)
        self._announced, self._current = _Announced(), None

    def _open(self, batch: int, new: int, positions: Any) -> None:
        told, rows = self._announced, self.rows.rows
        starts, ids = told.starts, told.ids
        if starts is None:
            starts = [row.start for row in rows] if rows else [self.rows.width] * batch
        if len(starts) != batch:
            raise CacheStateError(f"a batch of {batch} rows, but the cache holds {len(starts)} rows")
        if ids is not None and ids.shape != (batch, new):
            ids = None  # embeddings were expanded on the way (multimodal): ids do not describe these columns
        positions = _readable(positions if told.positions is None else told.positions)
        self._current = self.rows.advance(starts, new, ids, positions)
        self.streamed = told.streamed
        self._announced = _Announced()

    def _read_mask(self, new: int, mask: Tensor) -> tuple[list[int] | None, bool]:
        """Where rows start (None: where they did), and whether nothing but left padding is hidden.

        Once all rows have begun, of a mask for one more token only the last column is read.
        """
        rows, width = self.rows.rows, self.rows.width + new
        if mask.dim() != 2 or mask.shape[1] != width:
            raise CacheStateError(
                f"attention_mask of shape {tuple(mask.shape)}: the cache holds {self.rows.width} columns and the "
                f"call adds {new}, so the mask must be [rows, {width}]"
            )
        if mask.is_meta:
            return None, False
        if new == 1 and len(mask) == len(rows) and all(row.length for row in rows):
            return None, bool((mask[:, -1] != 0).all())
        hidden = mask == 0
        starts, counts = torch.stack((hidden.long().cumprod(dim=1).sum(dim=1), hidden.sum(dim=1))).tolist()
        for index, (row, start) in enumerate(zip(rows, starts, strict=False)):
            if start != row.start if row.length else start < self.rows.width:
                raise CacheStateError(
                    f"attention_mask row {index} begins with {start} padding columns, "
                    f"but the cache began that row after {row.start}"
                )
        return starts, starts == counts

    def _check_positions(self, starts: list[int] | None, positions: Tensor) -> None:
        """`CacheStateError` where a row that has begun does not go on where it was."""
        new = positions.shape[1]
        for index, row in enumerate(self.rows.rows):
            fresh = self.rows.width + new - row.start - row.length
            if not row.length or fresh <= 0:
                continue
            position = int(positions[index % positions.shape[0], new - fresh])
            # Positions count real tokens, or columns where the caller ignores padding.
            if position not in (int(row.positions[-1][-1]) + 1, row.length, row.start + row.length):
                raise CacheStateError(
                    f"position_ids of row {index} go on at {position}, but the cache holds {row.length} tokens of it; "
                    f"pass only tokens the cache has not seen (at least one)"
                )


def _readable(positions: Any) -> Tensor | None:
    """Positions ``[rows or 1, new]`` with values, None for anything else (multimodal models have three of each)."""
    usable = isinstance(positions, Tensor) and positions.dim() == 2 and not positions.is_meta
    return positions if usable else None
