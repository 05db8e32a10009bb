"""One forward call, seen from all layers: announced once, opened by its first layer, taken by each layer once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import CacheStateError
from .packing import Packing
from .rows import Call, Rows


@dataclass(frozen=True)
class _Announced:
    """What is known of the next call: where rows start, its ids and its positions."""

    starts: list[int] | None = None
    ids: Tensor | None = None
    positions: Tensor | None = None
    streamed: bool | None = None
    packing: Packing | None = None
    complete: bool = True  # whether the model knows what is special about a packed call


@dataclass
class Calls:
    """Hands each layer the `Call` of the forward pass it is in.

    Nothing changes until the first layer takes the call, so an announced call that never runs leaves no trace. A layer
    that has taken the last call already begins the next one. A pass that stopped between layers leaves some behind;
    that is found by whatever comes next. ``taken`` is, for every compressed layer, the ``number`` of the last call it
    took, 0 if it holds nothing.
    """

    rows: Rows
    taken: dict[int, int] = field(default_factory=dict)
    number: int = 0
    streamed: bool | None = None  # whether the pass ends in attention that takes `HeldStates`, None: nobody said
    weights: bool = False  # whether the pass is to give attention weights, which codes have none of
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
        if mask is None and not opaque and self.rows.packed and any(row.start for row in self.rows.rows):
            raise CacheStateError(
                f"the cache holds packed rows of different lengths: tell which columns are padding by an "
                f"attention_mask of [rows, {self.rows.width + new}], 0 on the left"
            )
        starts, plain = (None, not opaque) if mask is None else self._read_mask(new, mask)
        positions = _readable(positions)
        # Reading values off another device waits for it: worth it once per prompt, not once per token. Under masks
        # with holes there are many ways to count.
        if plain and positions is not None and (new > 1 or positions.device.type == "cpu"):
            self._check_positions(starts, positions)
        self._announced = _Announced(starts, ids if plain else None, positions, streamed)

    def announce_packed(self, cu_seqlens: Any, rows: Any) -> None:
        """Tell which rows the next call goes on; `complete` tells the rest. Raises `CacheStateError`."""
        packing = Packing.of(cu_seqlens, rows, len(self.rows.rows))
        self._announced = _Announced(packing=packing, complete=False)

    @property
    def packing(self) -> Packing | None:
        """What was announced of the next call, if that is packed and waits for `complete`."""
        return None if self._announced.complete else self._announced.packing

    def complete(self, ids: Tensor | None, positions: Tensor | None, streamed: bool) -> Tensor:
        """Tell the ids and positions of the packed call that was announced, ``[1, tokens]``; returns the positions.

        Raises `CacheStateError` where they do not continue the rows.
        """
        packing = self.packing
        assert packing is not None
        if positions is None:
            parts = [self._next_positions(row, stop - first) for row, first, stop in packing.segments]
            positions = torch.cat(parts)[None]
        elif positions.shape != (1, packing.total):
            raise CacheStateError(
                f"position_ids of shape {list(positions.shape)}; allowed for a packed call: [1, {packing.total}], or "
                "none, and each row goes on where it was"
            )
        else:
            for row, first, _ in packing.segments:
                if row < len(self.rows.rows):
                    self._check_position(row, positions[0, first], packed=True)
        self._announced = _Announced(None, ids, positions, streamed, packing)
        return positions

    def forget_packing(self) -> None:
        """Rows are to change: what was announced of a packed call does not count any more."""
        if self._announced.packing is not None:
            self._announced = _Announced()

    def take(self, layer: int, batch: int, new: int, positions: Any = None) -> Call:
        """The call of ``new`` columns that ``layer`` is in; the first layer to ask opens it.

        ``positions``, what the model calls so, count if none were announced.
        """
        taken = self.taken.setdefault(layer, 0)
        if taken == self.number:
            self.settle()
            self._open(batch, new, positions)
        call = self._current
        if call is None or taken != self.number - 1 or (batch, new) != (call.lines, call.new):
            raise CacheStateError(
                f"layer {layer} holds {self.columns(layer)} columns and is given {new} more, but this forward pass "
                f"adds {call.new if call else 0} to {call.past if call else self.rows.width}; a pass that stopped "
                f"half-way cannot be continued: reset() the cache"
            )
        self.taken[layer] = self.number
        return call

    def hold(self, layer: int) -> None:
        """A layer holds all columns of the rows now, which came by no call."""
        self.number = max(1, self.number)
        self.taken[layer] = self.number

    def columns(self, layer: int) -> int:
        """Columns that ``layer`` holds; it may be behind others in a pass."""
        taken = self.taken.get(layer, 0)
        if taken == self.number or not taken:
            return self.rows.width if taken else 0
        assert self._current is not None
        return self._current.past

    def view(self, layer: int) -> Call | None:
        """What ``layer`` holds, as a call that adds nothing; None if nothing. It may be behind others in a pass."""
        if not self.columns(layer):
            return None
        if self.taken[layer] == self.number:
            return self.rows.view()
        assert self._current is not None
        if self._current.packed:
            raise CacheStateError(f"layer {layer} is looked at in the midst of a packed call: wait for its end")
        return self._current

    def settle(self) -> None:
        """`CacheStateError` where a pass stopped between layers.

        Layers that hold nothing may be skipped by the model; if the first pass just did not reach them, they find out
        in the next.
        """
        if behind := sum(0 < taken != self.number for taken in self.taken.values()):
            raise CacheStateError(
                f"the last forward pass stopped after {len(self.taken) - behind} of {len(self.taken)} layers, "
                f"what the cache holds is incomplete: reset() it"
            )

    def crop(self, columns: int) -> None:
        """Forget the last ``columns`` columns of all layers."""
        self.settle()
        self.forget_packing()
        self.rows.crop(columns)

    def fork(self, rows: Rows) -> Calls:
        """The same state over a copy of the rows."""
        return Calls(rows, dict(self.taken), self.number, self.streamed, self.weights, _Announced(), self._current)

    def reset(self) -> None:
        """Forget all rows."""
        self.rows.clear()
        self.taken, self.number = dict.fromkeys(self.taken, 0), 0
        self._announced, self._current = _Announced(), None

    def _open(self, batch: int, new: int, positions: Any) -> None:
        told, rows = self._announced, self.rows.rows
        if told.packing is not None:
            self._open_packed(told, told.packing, batch, new)
            return
        starts, ids = told.starts, told.ids
        if starts is None:
            starts = [row.start for row in rows] if rows else [self.rows.width] * batch
        if len(starts) != batch:
            raise CacheStateError(f"a batch of {batch} rows, but the cache holds {len(starts)} rows")
        if ids is not None and ids.shape != (batch, new):
            ids = None  # embeddings were expanded on the way (multimodal): ids do not describe these columns
        positions = _readable(positions if told.positions is None else told.positions)
        self._begin(self.rows.advance(starts, new, ids, positions), told)

    def _open_packed(self, told: _Announced, packing: Packing, batch: int, new: int) -> None:
        self._announced = _Announced()
        packing.check((batch, new))
        if not told.complete:
            raise CacheStateError(
                "a packed call needs kvquant.enable(model), which has the model know where rows begin and end"
            )
        ids, positions = (None if x is None else x[0] for x in (told.ids, told.positions))
        self._begin(self.rows.advance_packed(packing.segments, ids, positions), told)

    def _begin(self, call: Call, told: _Announced) -> None:
        self._current = call
        self.number += 1
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
            self._check_position(index, positions[index % positions.shape[0], new - fresh], self.rows.packed)

    def _check_position(self, index: int, told: Tensor, packed: bool) -> None:
        """`CacheStateError` where ``told`` is not the position at which a row goes on."""
        row, position = self.rows.rows[index], int(told)
        # Positions count real tokens, or columns where the caller ignores padding; rows that were packed have none.
        allowed = {row.next_position, row.length, row.length if packed else row.start + row.length}
        if row.length and position not in allowed:
            raise CacheStateError(
                f"position_ids of row {index} go on at {position}, but the cache holds {row.length} tokens of it; "
                f"pass only tokens the cache has not seen (at least one)"
            )

    def _next_positions(self, index: int, count: int) -> Tensor:
        rows = self.rows.rows
        first = rows[index].next_position if index < len(rows) else 0
        return torch.arange(first, first + count)

    def next_columns(self, new: int) -> Tensor:
        """The positions ``[rows, new]`` at which rows go on in a call of ``new`` columns."""
        return torch.stack([self._next_positions(index, new) for index in range(len(self.rows.rows))])


def _readable(positions: Any) -> Tensor | None:
    """Positions ``[rows or 1, new]`` with values, None for anything else (multimodal models have three of each)."""
    usable = isinstance(positions, Tensor) and positions.dim() == 2 and not positions.is_meta
    return positions if usable else None
