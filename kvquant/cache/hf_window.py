"""Sliding-window layers, which are transformers' own, while calls are packed: one of them for each row."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DummyLayer, DynamicSlidingWindowLayer

from ..errors import CacheStateError, UnsupportedError
from ..policy import ResolvedLayer
from .calls import Calls
from .windows import WindowStates


def check_packable(told: Sequence[ResolvedLayer], layers: Sequence[Any]) -> None:
    """`UnsupportedError` where a cache has layers, not compressed, that cannot take packed calls."""
    others = [
        one.kind
        for one, layer in zip(told, layers, strict=True)
        if one.policy is None
        and type(layer) is not DummyLayer
        and not (one.kind == "sliding_attention" and type(layer) in (DynamicSlidingWindowLayer, WindowLayer))
    ]
    if others:
        raise UnsupportedError(
            f"packed rows: the model has {len(others)} layers of kind {others[0]}, which hold rows of one length; "
            "give a batch with left padding"
        )


def set_apart(layers: list[Any], calls: Calls) -> None:
    """Have the sliding-window layers of a cache take packed calls; other calls find them as they were."""
    for index, layer in enumerate(layers):
        if type(layer) is DynamicSlidingWindowLayer:
            if layer.get_seq_length() != calls.rows.width:
                raise CacheStateError(f"layer {index}: the last pass stopped half-way: reset() the cache")
            layers[index] = WindowLayer(index, calls, layer)


class WindowLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """A sliding-window layer of transformers, either for the batch or, after a packed call, one for each row.

    Rows hold their own tokens only; in the batch's layer the others have padding before them, which is hidden anyway.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = True

    def __init__(self, index: int, calls: Calls, layer: Any, rows: list[Any] | None = None) -> None:
        self.index, self.calls = index, calls
        self.sliding_window = layer.sliding_window
        self._layer, self._rows = layer, rows
        calls.taken.setdefault(index, calls.number)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the first `update` does."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``[lines, heads, new, dim]`` and return what is in reach of the new columns."""
        positions = (kwargs.get("kwargs") or {}).get("position_ids")
        call = self.calls.take(self.index, key_states.shape[0], key_states.shape[2], positions)
        if not call.packed:
            keys, values = self._joined(call.past).update(key_states, value_states)
            return keys, values
        lengths = [row.length for row in self.calls.rows.rows]
        for row in call.rows:
            lengths[row.index] = row.before
        rows = self._apart(lengths)
        found = [rows[row.index].update(row.of(key_states)[None], row.of(value_states)[None]) for row in call.rows]
        keys, values = (WindowStates(list(parts), call, self.sliding_window) for parts in zip(*found, strict=True))
        return keys, values

    def whole(self) -> Any:
        """The layer of the batch, as transformers has it."""
        return self._joined(self.calls.rows.width)

    def parts(self) -> list[Any]:
        """The layers that hold what this does."""
        return [self._layer] if self._rows is None else self._rows

    @property
    def is_initialized(self) -> bool:
        """Whether the layer holds anything."""
        return self.get_seq_length() > 0

    @property
    def record_past(self) -> bool:
        """Whether what leaves the window is kept until the next crop."""
        return bool(self._layer.record_past)

    def activate_past_recording(self) -> None:
        """Keep what leaves the window until the next crop."""
        self.whole().activate_past_recording()

    @property
    def keys(self) -> Any:
        """Those of the window, ``[rows, heads, columns, dim]``."""
        return self.whole().keys

    @property
    def values(self) -> Any:
        """Like `keys`."""
        return self.whole().values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns attended by a call of ``query_length``, the first of them)."""
        length, offset = self.whole().get_mask_sizes(query_length)
        return length, offset

    def get_seq_length(self) -> int:
        """Columns seen, padding included."""
        return self.calls.columns(self.index)

    def get_max_length(self) -> int:
        """The window."""
        return int(self.sliding_window)

    def crop(self, tokens_to_remove: int) -> None:
        """As the batch's layer does, which refuses once its window has moved on."""
        self.whole().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes row ``beam_idx[i]``."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: Any) -> None:
        """Each row ``repeats`` times in a row."""
        rows = torch.arange(len(self.calls.rows.rows) if self._rows is None else len(self._rows))
        self.batch_select_indices(rows.repeat_interleave(repeats.cpu() if isinstance(repeats, Tensor) else repeats))

    def batch_select_indices(self, indices: Any) -> None:
        """Keep rows only."""
        if self._rows is None:
            self._layer.batch_select_indices(indices)
            return
        indices = indices.cpu() if isinstance(indices, Tensor) else indices
        self._rows = [copy.copy(self._rows[row]) for row in torch.arange(len(self._rows))[indices].tolist()]

    def reset(self) -> None:
        """Forget everything."""
        self._rows, self._layer = None, type(self._layer)(self.sliding_window)

    def fork(self, calls: Calls, *_: Any) -> WindowLayer:
        """A copy that belongs to ``calls``; what layers hold is never written to."""
        rows = None if self._rows is None else [copy.copy(row) for row in self._rows]
        return WindowLayer(self.index, calls, copy.copy(self._layer), rows)

    def _joined(self, width: int) -> Any:
        """The layer of a batch of ``width`` columns, from now on."""
        if self._rows is None:
            return self._layer
        rows, self._rows = self._rows, None
        self._layer = layer = type(self._layer)(self.sliding_window)
        if not rows:
            return layer
        layer.lazy_initialization(rows[0].keys, rows[0].values)
        columns = min(width, self.sliding_window - 1)
        layer.cumulative_length = width
        layer.keys, layer.values = (
            torch.cat([torch.nn.functional.pad(x, (0, 0, columns - x.shape[2], 0)) for x in states])
            for states in ([row.keys for row in rows], [row.values for row in rows])
        )
        return layer

    def _apart(self, lengths: list[int]) -> list[Any]:
        """A layer for each row, from now on; they are of so many tokens."""
        if self._rows is None:
            whole, self._rows = self._layer, []
            for index in range(len(whole.keys) if whole.get_seq_length() else 0):
                row = copy.copy(whole)
                first = max(0, whole.keys.shape[2] - lengths[index])
                row.keys, row.values = (x[index : index + 1, :, first:].clone() for x in (whole.keys, whole.values))
                row.cumulative_length = lengths[index]
                self._rows.append(row)
            self._layer = type(whole)(self.sliding_window)
        while len(self._rows) < len(lengths):
            self._rows.append(type(self._layer)(self.sliding_window))
        return self._rows
