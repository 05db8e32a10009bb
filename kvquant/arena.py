"""Where sealed blocks live: slabs of slots, one slot a block.

A `SlotPool` hands out slot numbers and counts their references; every layer of a cache uses the same number for
the same span of tokens, so one block table per sequence serves all layers. An `Arena` holds what one codec
stores of one layer at those slots. Slabs are added, never reallocated, and consecutive slots lie in contiguous
memory, so a run of blocks is read in one call.
"""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .codecs import Fields, Layout

MIN_SLAB = 4  # slots; a slab is at least this, and at least a sixteenth of what is there already


@dataclass(frozen=True)
class Run:
    """Consecutive slots of one slab: positions ``first ≤ i < stop`` within slab number ``slab``."""

    slab: int
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


class SlotPool:
    """Allocates slots for all layers of a cache and counts who refers to them.

    Copies of a cache share the pool and may be used in different threads; ``lock`` guards what they share.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._starts: list[int] = []  # first slot of each slab, ascending
        self._size = 0
        self._free: list[int] = []  # ascending
        self._references: dict[int, int] = {}
        self._returned: deque[list[int]] = deque()

    def allocate(self, count: int) -> list[int]:
        """``count`` slots with one reference each, ascending; adds a slab of just the right size if need be."""
        with self.lock:
            self._settle()
            missing = count - len(self._free)
            if missing > 0:
                size = max(missing, MIN_SLAB, self._size // 16)
                self._starts.append(self._size)
                self._free.extend(range(self._size, self._size + size))
                self._size += size
            slots, self._free = self._free[:count], self._free[count:]
            self._references.update(dict.fromkeys(slots, 1))
            return slots

    def retain(self, slots: Sequence[int]) -> None:
        """Count one more reference to each of ``slots``."""
        with self.lock:
            for slot in slots:
                self._references[slot] += 1

    def release(self, slots: Sequence[int]) -> None:
        """Count one reference less; slots nobody refers to may be handed out again."""
        with self.lock:
            for slot in slots:
                self._references[slot] -= 1
                if not self._references[slot]:
                    del self._references[slot]
                    bisect.insort(self._free, slot)

    def give_back(self, slots: list[int]) -> None:
        """Release ``slots`` at the next opportunity: for finalizers, which may run in the midst of anything."""
        self._returned.append(slots)

    def references(self, slot: int) -> int:
        """How many block tables refer to ``slot``."""
        with self.lock:
            self._settle()
            return self._references.get(slot, 0)

    @property
    def live(self) -> int:
        """Slots somebody refers to."""
        with self.lock:
            self._settle()
            return len(self._references)

    def _settle(self) -> None:
        while self._returned:
            self.release(self._returned.popleft())

    def slab_size(self, slab: int) -> int:
        """Slots in slab number ``slab``."""
        with self.lock:
            stop = self._starts[slab + 1] if slab + 1 < len(self._starts) else self._size
            return stop - self._starts[slab]

    def slot(self, run: Run) -> int:
        """The first slot of a run."""
        return self._starts[run.slab] + run.first

    def runs(self, slots: Sequence[int]) -> list[Run]:
        """``slots`` in their order, as the fewest contiguous runs."""
        runs: list[Run] = []
        for slot in slots:
            slab = bisect.bisect_right(self._starts, slot) - 1
            position = slot - self._starts[slab]
            if runs and runs[-1].slab == slab and runs[-1].stop == position:
                runs[-1] = Run(slab, runs[-1].first, position + 1)
            else:
                runs.append(Run(slab, position, position + 1))
        return runs


class Arena:
    """What one codec stores of the keys, or values, of one layer, by slot.

    ``raw`` holds, by slot, the tokens kept as they are beside their codes (attention sinks): ``[heads, count, dim]``.
    """

    def __init__(self, pool: SlotPool, layout: Layout, device: torch.device) -> None:
        self._pool = pool
        self._layout = layout
        self._device = device
        self._slabs: dict[int, Fields] = {}
        self.nbytes = self.elements = 0  # allocated for slots, in use or not
        self.raw: dict[int, Tensor] = {}
        self.stamp = 0  # another whenever what `read` or `raw` gave may be out of date

    def keep_raw(self, slot: int, tokens: Tensor | None) -> None:
        """Store ``tokens`` beside a block's codes, or nothing."""
        if tokens is not None or slot in self.raw:
            self.raw.pop(slot, None)
            self.stamp += 1
        if tokens is not None:
            self.raw[slot] = tokens

    def write(self, runs: Sequence[Run], fields: Fields) -> None:
        """Store fields of as many blocks as ``runs`` has slots.

        A slab whose field cannot hold the dtype given (float16 parameters, float32 needed) is widened first.
        """
        done = 0
        with self._pool.lock:  # or what another thread writes may go to a slab that is being replaced
            for run in runs:
                slab = self._slab(run.slab)
                for name, field in fields.items():
                    dtype = torch.promote_types(field.dtype, slab[name].dtype)
                    if dtype != slab[name].dtype:
                        slab[name] = slab[name].to(dtype)
                        self.stamp += 1
                        self._count()
                    slab[name][run.first : run.stop].copy_(field[done : done + len(run)])
                done += len(run)

    def fill(self, runs: Sequence[Run], encode: Callable[[Fields | None], Fields]) -> None:
        """Store what ``encode`` makes of as many blocks as ``runs`` has slots.

        It is given the place where they are to be, if that is one, and returns it, written, or fields to be copied.
        """
        with self._pool.lock:
            if len(runs) == 1:
                self._slab(runs[0].slab)
                place = self.read(runs[0])
                fields = encode(place)
                if fields is place:
                    return
            else:
                fields = encode(None)
            self.write(runs, fields)

    def read(self, run: Run) -> Fields:
        """Views of the stored fields of a run."""
        return {name: field[run.first : run.stop] for name, field in self._slabs[run.slab].items()}

    def _count(self) -> None:
        self.nbytes = sum(tensor.nbytes for tensor in self.storages())
        self.elements = sum(tensor.numel() for tensor in self.storages())

    def storages(self) -> Iterator[Tensor]:
        """Every tensor allocated for slots, in use or not."""
        for slab in self._slabs.values():
            yield from slab.values()

    def clear(self) -> None:
        """Free all memory; for a pool without live slots."""
        self._slabs.clear()
        self._count()
        self.raw.clear()
        self.stamp += 1

    def _slab(self, slab: int) -> Fields:
        if slab not in self._slabs:
            size = self._pool.slab_size(slab)
            self._slabs[slab] = {
                name: torch.empty((size, *shape), dtype=dtype, device=self._device)
                for name, (shape, dtype) in self._layout.items()
            }
            self._count()
        return self._slabs[slab]
