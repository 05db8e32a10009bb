"""`PageLayout`: where an attention backend keeps which value of a page of its cache, learned from what it writes.

Backends lay out pages as suits their kernels: keys transposed, in tiles, beside the values or after them. None tells
how, and it changes with the machine. So one page is written with known values by the backend's own means; where each
is found then is the layout. A backend that does not write each value in one place, as it is, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UnsupportedError

_BASE, _UNTOUCHED = 256, 512  # whole numbers up to 256 are exact in every float of 16 bits and more, and so is 512


@dataclass(frozen=True)
class Side:
    """Where in a page keys lie, or values: ``[heads, tokens, dim]``, by ``strides`` or each where ``places`` tells."""

    shape: tuple[int, int, int]
    start: int
    strides: tuple[int, int, int] | None
    places: Tensor  # int64 [heads * tokens * dim]

    def read(self, pages: Tensor, ids: Tensor) -> Tensor:
        """A copy, ``[ids, heads, tokens, dim]``, from ``pages`` ``[pages, values]``."""
        if self.strides is not None:
            return self._strided(pages).index_select(0, ids)
        return pages.index_select(0, ids).index_select(1, self.places).view(-1, *self.shape)

    def write(self, pages: Tensor, ids: Tensor, states: Tensor) -> None:
        """Write ``[ids, heads, tokens, dim]`` to ``pages``, and nothing beside."""
        if self.strides is not None:
            self._strided(pages).index_copy_(0, ids, states)
        else:
            pages[ids[:, None], self.places[None]] = states.reshape(len(ids), -1)

    def _strided(self, pages: Tensor) -> Tensor:
        assert self.strides is not None
        strides = (pages.stride(0), *self.strides)
        return pages.as_strided((len(pages), *self.shape), strides, pages.storage_offset() + self.start)


@dataclass(frozen=True)
class PageLayout:
    """Where keys and values lie in a page of ``values`` values."""

    values: int
    key: Side
    value: Side

    @classmethod
    def learn(
        cls,
        write: Callable[[Tensor, Tensor, Tensor], None],
        values: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> PageLayout:
        """From ``write(keys, values, page)``, which stores two ``[heads, tokens, dim]`` in ``page`` ``[values]``.

        Raises `UnsupportedError`.
        """
        count = shape[0] * shape[1] * shape[2]
        numbers = torch.arange(2 * count, device=device)
        found = torch.zeros(values, dtype=torch.int64, device=device)
        touched = torch.ones(values, dtype=torch.bool, device=device)
        scale = 1
        while scale < 2 * count:  # digit by digit
            digits = (numbers // scale % _BASE).to(dtype)
            page = torch.full((values,), _UNTOUCHED, dtype=dtype, device=device)
            write(digits[:count].view(shape), digits[count:].view(shape), page)
            exact = page.double()
            touched &= (exact >= 0) & (exact < _BASE) & (exact == exact.floor())
            found += exact.clamp(0, _BASE).nan_to_num(0).long() * scale
            scale *= _BASE
        places = touched.nonzero().flatten()
        order = found[places].argsort()
        if len(places) != 2 * count or not torch.equal(found[places][order], numbers):
            raise UnsupportedError(
                f"pages of {values} values in which {2 * count} keys and values are not found as they were written; "
                f"allowed: a cache that keeps each in one place, in its own dtype"
            )
        places = places[order]
        return cls(values, _side(shape, places[:count]), _side(shape, places[count:]))

    def read(self, pages: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of some ``pages`` ``[pages, values]``, ``[ids, heads, tokens, dim]``."""
        return self.key.read(pages, ids), self.value.read(pages, ids)

    def write(self, pages: Tensor, ids: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write what `read` reads."""
        self.key.write(pages, ids, keys)
        self.value.write(pages, ids, values)


def _side(shape: tuple[int, int, int], places: Tensor) -> Side:
    grid = places.view(shape)
    start = int(grid[0, 0, 0])
    steps = [int(grid.select(axis, min(1, size - 1)).flatten()[0]) - start for axis, size in enumerate(shape)]
    heads, tokens, dim = (torch.arange(size, device=places.device) for size in shape)
    lines = heads[:, None, None] * steps[0] + tokens[:, None] * steps[1] + dim * steps[2]
    regular = torch.equal(start + lines, grid) and min(steps) >= 0
    return Side(shape, start, (steps[0], steps[1], steps[2]) if regular else None, places)
