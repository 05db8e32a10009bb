"""One forward call, seen from all layers: announced once, opened by its first layer, taken by each layer once."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..errors import CacheStateError
from .rows import Call, Row, Rows


@dataclass
class Calls:
    """Hands each layer the `Call` of the forward pass it is in.

    Nothing changes until the first layer takes the call, so an announced call that never runs leaves no trace.
    A pass that stopped between layers leaves them at different lengths; that is found at the next call.
    """

    rows: Rows
    _announced: tuple[list[int] | None, Tensor | None] = (None, None)
    _current: Call | None = None
    _taken: set[int] = field(default_factory=set)
    _members: set[int] = field(default_factory=set)

    def announce(self, new: int, ids: Tensor | None, mask: Tensor | None, positions: Tensor | None) -> None:
        """Tell what the next call of ``new`` columns brings; any of the three may be unknown.

        Shapes: ``ids`` ``[rows, new]``, ``mask`` ``[rows, columns held + new]`` with 0 for padding, ``positions``
        ``[rows or 1, new]``. Raises `CacheStateError` where they do not continue the rows.
        """
        starts = None if mask is None else self._starts(new, mask)
        # Reading values off another device waits for it: worth it once per prompt, not once per token.
        if positions is not None and positions.dim() == 2 and (new > 1 or positions.device.type == "cpu"):
            self._check_positions(starts, positions)
        self._announced = (starts, ids)

    def take(self, layer: int, held: int, batch: int, new: int) -> Call:
        """The call that ``layer``, holding ``held`` columns, is in; the first layer to ask opens it."""
        if self._current is None or layer in self._taken:
            self._open(batch, new)
        call = self._current
        assert call is not None
        if (held, new) != (call.past, call.new):
            raise CacheStateError(
                f"layer {layer} holds {held} columns and is given {new} more, but this forward pass adds {call.new} "
                f"to {call.past}; a pass that stopped half-way cannot be continued: reset() the cache"
            )
        self._taken.add(layer)
        return call

    def settle(self) -> None:
        """Make sure that no pass stopped between layers; `CacheStateError` otherwise."""
        if self._current is not None and self._members and self._taken != self._members:
            raise CacheStateError(
                f"the last forward pass stopped after {len(self._taken)} of {len(self._members)} layers, "
                f"what the cache holds is incomplete: reset() it"
            )

    def fork(self, rows: Rows) -> Calls:
        """The same state over a copy of the rows."""
        return Calls(rows, (None, None), self._current, set(self._taken), set(self._members))

    def forget(self) -> None:
        """Start anew."""
        self._announced, self._current = (None, None), None
        self._taken, self._members = set(), set()

    def _open(self, batch: int, new: int) -> None:
        self.settle()
        self._members = self._taken
        starts, ids = self._announced
        rows = self.rows.rows
        if starts is None:
            starts = [row.start for row in rows] if rows else [self.rows.width] * batch
        if len(starts) != batch:
            raise CacheStateError(f"a batch of {batch} rows, but the cache holds {len(starts)} rows")
        if ids is not None and ids.shape != (batch, new):
            ids = None  # embeddings were expanded on the way (multimodal): ids do not describe these columns
        self._current = self.rows.advance(starts, new, ids)
        self._announced, self._taken = (None, None), set()

    def _starts(self, new: int, mask: Tensor) -> list[int]:
        width = self.rows.width + new
        if mask.dim() != 2 or mask.shape[1] != width:
            raise CacheStateError(
                f"attention_mask of shape {tuple(mask.shape)}: the cache holds {self.rows.width} columns and the "
                f"call adds {new}, so the mask must be [rows, {width}]"
            )
        padding = (mask == 0).long().cumprod(dim=1).sum(dim=1).tolist()
        for index, (row, start) in enumerate(zip(self.rows.rows, padding, strict=False)):
            if start != row.start if row.length else start < self.rows.width:
                raise CacheStateError(
                    f"attention_mask row {index} begins with {start} padding columns, "
                    f"but the cache began that row after {row.start}"
                )
        return [int(start) for start in padding]

    def _check_positions(self, starts: list[int] | None, positions: Tensor) -> None:
        new = positions.shape[1]
        rows = self.rows.rows or [Row(start=start) for start in starts or [0]]
        for index, row in enumerate(rows):
            start = starts[index] if starts and not row.length else row.start
            fresh = self.rows.width + new - start - row.length
            if fresh <= 0:
                continue
            position = int(positions[index % positions.shape[0], new - fresh])
            # Positions count real tokens, or columns where the caller ignores padding.
            if position not in (row.length, start + row.length):
                raise CacheStateError(
                    f"position_ids of row {index} go on at {position}, but the cache holds {row.length} tokens of it; "
                    f"pass only tokens the cache has not seen (at least one)"
                )
