"""What caches have in common that share blocks in a store: how these lie there, and how they are encoded.

A block has one of three kinds: as it was, encoded, and encoded in fewer bits for the disk, if the policy says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..arena import SlotPool
from ..codecs import Fields
from ..kernels import decode, encode
from ..policy import LayerPolicy
from ..records import Record, copy_fields
from ..store.placement import SHRINKABLE
from ..store.tiered import TieredStore
from .layer import History

_sequences = itertools.count()
# Tags of encoded payloads, and of those encoded in fewer bits for the disk; plus 1 where the keys' fields had to be
# widened, plus 2 where the values'.
ENCODED, COLD = 1, 5


@dataclass(frozen=True)
class Exact:
    """A block that is not encoded yet: the positions of its tokens, and how many are kept raw of either side."""

    positions: Tensor
    sinks: tuple[int, int]


@dataclass
class Recompressed:
    """How many blocks of a layer were encoded in fewer bits for the disk: from what they were, and from codes.

    ``errors`` sums up what that cost each of them: the root of the mean square error, in keys and values that were
    encoded anew, over that of what they were made from.
    """

    from_exact: int = 0
    from_codes: int = 0
    errors: float = 0.0

    @property
    def blocks(self) -> int:
        """All of them."""
        return self.from_exact + self.from_codes


Sides = tuple[History, History]
"""Of keys and values; these hold no tokens."""


@dataclass(eq=False)
class Shared:
    """What caches have in common that share blocks: they are one sequence of the store."""

    store: TieredStore
    pool: SlotPool
    layers: tuple[int, ...]
    exact: bool  # whether blocks stay as they were while there is room
    cold: LayerPolicy | None = None
    sequence: int = field(default_factory=lambda: next(_sequences))
    waiting: dict[int, Exact] = field(default_factory=dict)  # by slot
    sides: dict[int, dict[int, Sides]] = field(default_factory=dict)  # by layer and kind of payload
    records: dict[int, dict[int, Record]] = field(default_factory=dict)  # by layer and tag
    recompressed: Recompressed = field(default_factory=Recompressed)

    def __post_init__(self) -> None:
        self.pool.watch(self)

    def shrink(self, layer: int, slots: Sequence[int], payloads: Tensor, kind: int = ENCODED) -> tuple[Tensor, int]:
        """Encode blocks that were kept as they were; see `kvquant.store.placement.Shrink`."""
        exact = self.records[layer][SHRINKABLE].views(payloads)
        encoded = []
        for which, (side, fields) in enumerate(zip(self.sides[layer][kind], exact, strict=True)):
            (blocks,) = fields.values()
            prepared = [
                side.prepared(blocks[index : index + 1], self.waiting[slot].positions, self.waiting[slot].sinks[which])
                for index, slot in enumerate(slots)
            ]
            encoded.append(torch.cat(prepared))
        return self.packed(layer, self.encoded(layer, encoded, kind), kind)

    def encoded(self, layer: int, prepared: Sequence[Tensor], kind: int) -> list[Fields]:
        """Keys and values that were prepared for it; what encoding them for the disk costs is counted."""
        found, errors = [], []
        for side, usual, blocks in zip(self.sides[layer][kind], self.sides[layer][ENCODED], prepared, strict=True):
            found.append(encode(side.codec, blocks))
            if side.codec != usual.codec:
                again = decode(side.codec, found[-1], blocks.shape[3], torch.float32)
                errors.append(float((again - blocks).norm() / blocks.float().norm().clamp(min=1e-30)))
        self.recompressed.errors += len(prepared[0]) * sum(errors) / max(1, len(errors))
        return found

    def chill(self, layer: int, slots: Sequence[int], payloads: Tensor, tag: int) -> tuple[Tensor, int] | None:
        """Encode blocks in the fewer bits they have on disk: from what they were if they still are, else from codes.

        None if they are so already. See `kvquant.store.placement.Chill`.
        """
        if tag >= COLD or COLD not in self.sides[layer]:
            return None
        if tag == SHRINKABLE:
            self.recompressed.from_exact += len(slots)
            return self.shrink(layer, slots, payloads, COLD)
        sources = self.record_of(layer, tag).views(payloads)
        blocks = []
        for side, fields, places in zip(
            self.sides[layer][ENCODED], sources, self.records[layer][SHRINKABLE].sides, strict=True
        ):
            blocks.append(decode(side.codec, fields, places[0].shape[-1], torch.float32))
        self.recompressed.from_codes += len(slots)
        return self.packed(layer, self.encoded(layer, blocks, COLD), COLD)

    def packed(self, layer: int, encoded: Sequence[Fields], kind: int) -> tuple[Tensor, int]:
        """Payloads of what was encoded, and their tag."""
        tag, record = self.record(layer, encoded, kind)
        (first, *_) = encoded[0].values()
        packed = torch.empty(len(first), record.nbytes, dtype=torch.uint8, device=first.device)
        for source, to in zip(encoded, record.views(packed), strict=True):
            copy_fields(source, to)
        return packed, tag

    def record(self, layer: int, encoded: Sequence[Fields], kind: int = ENCODED) -> tuple[int, Record]:
        """The tag and the record that hold what was encoded."""
        record, tag = self.records[layer][kind], kind
        for which, fields in enumerate(encoded):
            if (wider := record.widened(which, fields)) is not record:
                record, tag = wider, tag + 1 + which
        self.records[layer].setdefault(tag, record)
        return tag, record

    def record_of(self, layer: int, tag: int) -> Record:
        """The record of payloads with a tag; see `ENCODED`."""
        records, kind = self.records[layer], kind_of(tag)
        if tag not in records:
            record = records[kind]
            for which, places in enumerate(record.sides):
                if (tag - kind) >> which & 1:
                    wide = {place.name: torch.empty(0, dtype=_widest(place.dtype)) for place in places}
                    record = record.widened(which, wide)
            records[tag] = record
        return records[tag]

    def drop(self, slots: Sequence[int]) -> None:
        """Forget blocks that nobody refers to any more."""
        for slot in slots:
            self.waiting.pop(slot, None)
        self.store.drop_blocks(self.sequence, self.layers, slots)


def kind_of(tag: int) -> int:
    """Whether payloads with a tag are blocks as they were, encoded, or encoded for the disk."""
    return COLD if tag >= COLD else min(tag, ENCODED)


def _widest(dtype: torch.dtype) -> torch.dtype:
    """What parameters are widened to."""
    return torch.float32 if dtype == torch.float16 else dtype
