"""Attention of packed rows in sliding windows: transformers' own, of rows together where they are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .packing import Plain
from .rows import Call

STEP = 1024  # queries at a time: a mask is as large as that by this and a window


class WindowStates(Tensor):
    """What each row of a packed call has of keys, or of values, in reach, as a tensor that is not there."""

    parts: Sequence[Tensor]
    call: Call
    window: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parts: Sequence[Tensor], call: Call, window: int) -> WindowStates:  # noqa: D102
        (_, heads, _, dim), like = parts[0].shape, parts[0]
        shape = 1, heads, sum(part.shape[2] for part in parts), dim
        states: WindowStates = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        states.parts, states.call, states.window = parts, call, window
        return states

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise UnsupportedError(f"packed rows: {func} was called on a sliding window; give a batch with left padding")


def attend_windows(
    plain: Plain, module: Any, query: Tensor, keys: WindowStates, values: WindowStates, given: dict[str, Any]
) -> Tensor:
    """The attention of a packed call in a sliding window, ``[1, tokens, query heads, dim]``."""
    if given.get("output_attentions") or given.get("position_bias") is not None:
        raise UnsupportedError(
            "packed rows: a sliding window gives no attention weights and takes no biases by position"
        )
    groups: dict[tuple[int, int], list[int]] = {}
    for number, (row, part) in enumerate(zip(keys.call.rows, keys.parts, strict=True)):
        groups.setdefault((row.fresh, part.shape[2]), []).append(number)
    output = query.new_empty(1, query.shape[2], query.shape[1], values.shape[3])
    for (new, length), members in groups.items():
        asked = torch.stack([keys.call.rows[number].of(query) for number in members])
        states = [torch.cat([side.parts[number] for number in members]) for side in (keys, values)]
        for first in range(0, new, STEP):
            stop = min(first + STEP, new)
            last = length - new + stop
            begin = max(0, last - (stop - first) + 1 - keys.window)
            mask = plain.mask(last - begin - (stop - first), stop - first, query, keys.window)
            near = (x[:, :, begin:last] for x in states)
            found, _ = plain.attend(module, asked[:, :, first:stop], *near, mask, **given)
            for number, one in zip(members, found, strict=True):
                at = keys.call.rows[number].at
                output[0, at + first : at + stop] = one
    return output
