"""Packed calls: what is told of one beforehand, and the mask it has where attention is not streamed.

input_ids    [ a a a a a b c c ]      cu_seqlens [0, 5, 6, 8], rows [3, 0, 1]
                                      tokens 0 … 4 go on row 3, token 5 row 0, tokens 6 and 7 row 1
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import CacheStateError, shown

_BOUNDS = "a list or an integer tensor that begins with 0 and rises to the number of tokens: [0, 5, 6, 8]"


@dataclass(frozen=True)
class Packing:
    """Which tokens of a line go to which rows: ``(row, first, stop)`` for tokens ``first ≤ t < stop``, in order."""

    segments: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, cu_seqlens: Any, rows: Any, held: int) -> Packing:
        """What a user told, for a cache of ``held`` rows. Raises `CacheStateError`."""
        bounds = _integers(cu_seqlens, "cu_seqlens", _BOUNDS)
        if len(bounds) < 2 or bounds[0] != 0 or any(first >= stop for first, stop in pairwise(bounds)):
            raise CacheStateError(f"cu_seqlens: {shown(cu_seqlens)}; allowed: {_BOUNDS}")
        count = len(bounds) - 1
        if rows is None:
            if held not in (0, count):
                raise CacheStateError(
                    f"cu_seqlens of {count} segments, but the cache holds {held} rows: tell with rows= which of them "
                    "go on, None for each that begins"
                )
            rows = range(count)
        return cls(tuple(zip(_numbers(rows, count, held), bounds, bounds[1:], strict=False)))

    @property
    def total(self) -> int:
        """Tokens of the call."""
        return self.segments[-1][2]

    def check(self, shape: Sequence[int]) -> None:
        """`CacheStateError` unless ``[lines, columns]`` of a call are what was told."""
        if tuple(shape) != (1, self.total):
            raise CacheStateError(
                f"a call of shape {list(shape)}, but begin(cu_seqlens=…) told of a packed one of [1, {self.total}]"
            )


def _numbers(rows: Any, count: int, held: int) -> list[int]:
    """The number of the row of each segment; those that begin follow those that are there."""
    allowed = f"one for each of {count} segments, each below {held}, or None for a row that begins"
    given = _integers(rows, "rows", allowed, nothing=True)
    if len(given) != count:
        raise CacheStateError(f"rows: {shown(rows)}; allowed: {allowed}")
    found: list[int] = []
    for row in given:
        number = held if row is None else row
        if number == held:
            held += 1
        elif not 0 <= number < held:
            raise CacheStateError(f"rows: {shown(rows)}; allowed: {allowed}")
        if number in found:
            raise CacheStateError(f"rows: {shown(rows)}, where {number} is named twice; allowed: {allowed}")
        found.append(number)
    return found


def _integers(given: Any, name: str, allowed: str, nothing: bool = False) -> list[Any]:
    """``given`` as Python integers, and None where ``nothing`` may be."""
    elements = given
    if isinstance(given, Tensor | np.ndarray):
        elements = None if isinstance(given, Tensor) and given.is_meta else given.tolist()
    if not isinstance(elements, Sequence) or isinstance(elements, str | bytes):
        raise CacheStateError(f"{name}: {shown(given)}; allowed: {allowed}")
    for one in elements:
        whole = isinstance(one, numbers.Integral) and not isinstance(one, bool)
        if not whole and not (nothing and one is None):
            raise CacheStateError(f"{name}: {shown(given)}; allowed: {allowed}")
    return [None if one is None else int(one) for one in elements]


class PackedMask(Tensor):
    """The mask of a packed call, ``[1, 1, tokens, columns attended to]``, as a tensor that is not there.

    Streamed attention needs none. Whatever else is done with it makes it: of bools, true where a token sees a column,
    or of floats to be added to scores.
    """

    sizes: tuple[tuple[int, int], ...]
    made: list[Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(  # a tensor has no __init__
        cls, sizes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device
    ) -> PackedMask:
        """For rows, each of so many tokens from before the call and so many new ones, in the order of the call."""
        shape = 1, 1, sum(new for _, new in sizes), sum(before + new for before, new in sizes)
        mask: PackedMask = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        mask.sizes, mask.made = tuple(sizes), []
        return mask

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if args and isinstance(args[0], PackedMask) and _keeps(func, args, kwargs):
            return PackedMask(args[0].sizes, args[0].dtype, kwargs.get("device") or args[0].device)
        return func(*tree_map(solid_mask, args), **tree_map(solid_mask, kwargs))

    def solid(self) -> Tensor:
        """The mask itself, made once."""
        if not self.made:
            rows, columns = self.shape[2:]
            shown = torch.zeros(rows, columns, dtype=torch.bool, device=self.device)
            row = column = 0
            for before, new in self.sizes:
                part = shown[row : row + new, column : column + before + new]
                part.copy_(torch.ones_like(part).tril(before))
                row, column = row + new, column + before + new
            self.made.append(as_mask(shown[None, None], self.dtype))
        return self.made[0]


def as_mask(shown: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of bools, or if ``dtype`` is that of floats the same to be added to scores."""
    if dtype == torch.bool:
        return shown
    nothing = torch.zeros((), dtype=dtype, device=shown.device)
    return torch.where(shown, nothing, torch.finfo(dtype).min)


def solid_mask(x: Any) -> Any:
    """A `PackedMask` as a tensor that is there; anything else as it is."""
    return x.solid() if isinstance(x, PackedMask) else x


def _keeps(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation leaves a mask as it is, but for where it lies."""
    if func is torch.ops.aten.slice.Tensor:
        axis, start, stop, step = (args + (0, None, None, 1)[len(args) - 1 :])[1:]
        return not start and step == 1 and (stop is None or stop >= args[0].shape[axis])
    if func is torch.ops.aten._to_copy.default:
        return kwargs.get("dtype") in (None, args[0].dtype)
    return func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class Plain(NamedTuple):
    """Attention as transformers has it; ``adds`` if it adds masks to scores, and without one sees all."""

    attend: Callable[..., tuple[Tensor, Tensor | None]]
    adds: bool = False

    def mask(self, before: int, new: int, like: Tensor, window: int | None = None) -> Tensor | None:
        """The mask of ``new`` tokens that see ``before`` others and what is not after them; None where it is known.

        Of a ``window`` of tokens, that of a token ends with it.
        """
        far = window is not None and before + new > window
        if not (far or (new > 1 and (before or self.adds))):
            return None
        shown = torch.ones(1, 1, new, before + new, dtype=torch.bool, device=like.device).tril(before)
        if window is not None and far:
            shown = shown.triu(before + 1 - window)
        return as_mask(shown, like.dtype) if self.adds else shown
