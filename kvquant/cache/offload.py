"""Blocks that lie in a store: on the device while there is room, below it else, and read through staging buffers.

    when: evict   sealed blocks stay as they were while the device has room; then those needed last are encoded
    when: seal    blocks are encoded at once

A block is encoded once, from what it was, whenever that is; and what is encoded never returns to what it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ..arena import SlotPool
from ..blocks import BlockKey
from ..codecs import Codec, Fields, Raw
from ..errors import StoreError, StoreFullError, shown
from ..geometry import kv_shape
from ..policy import LayerPolicy, ResolvedPolicy
from ..records import Record, copy_fields
from ..store.placement import SHRINKABLE
from ..store.plan import Run
from ..store.reserved import Reserved
from ..store.residency import DEVICE, DISK
from ..store.stream import Stream
from ..store.tiered import TieredStore
from .blocks import Cut, Portions, Side, Span
from .layer import Layer
from .rows import Call, Piece
from .shared import COLD, ENCODED, Exact, Shared, kind_of

_RAW: tuple[Codec, Codec] = (Raw(), Raw())


class Offload:
    """How one cache reads its blocks from a store."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.stream: Stream = shared.store.stream(
            shared.sequence,
            shared.layers,
            shared.shrink if shared.exact else None,
            None if shared.cold is None else shared.chill,
        )
        self._call: Call | None = None
        self._table: tuple[int, ...] = ()
        self._rows: list[tuple[tuple[Piece, ...], list[Piece], list[int]]] = []
        weakref.finalize(self, shared.store.retire, self.stream).atexit = False

    def blocks(self, index: int, layer: Layer) -> Offloaded:
        """Those of a layer."""
        return Offloaded(self, index, layer)

    def fork(self) -> Offload:
        """The same for a copy of the cache."""
        return Offload(self.shared)

    def table(self, call: Call) -> tuple[int, ...]:
        """Begin a pass, if ``call`` is another than before: the slots that it reads, each once."""
        if call is not self._call:
            self._call = call
            histories = [row.history for row in call.rows]
            if len(histories) != len(self._rows) or any(
                known[0] is not history for known, history in zip(self._rows, histories, strict=True)
            ):
                self._look_up(histories)
            self.stream.begin(self._table)
        return self._table

    def pieces(self, row: int) -> Iterator[tuple[int, Piece]]:
        """The blocks of a row in order, each as a piece of one slot, and its number in the table."""
        _, pieces, numbers = self._rows[row]
        yield from zip(numbers, pieces, strict=True)

    def _look_up(self, histories: Sequence[tuple[Piece, ...]]) -> None:
        numbers: dict[int, int] = {}  # by slot
        self._rows = []
        block = next((sides[ENCODED][0].block_tokens for sides in self.shared.sides.values()), 0)
        for history in histories:
            pieces, own = [], []
            for piece in history:
                slot = self.shared.pool.slot(piece.run)
                for index in range(len(piece.run)):
                    first = piece.first if not index else piece.first - piece.offset + index * block
                    stop = min(piece.stop, piece.first - piece.offset + (index + 1) * block)
                    pieces.append(Piece(piece.run, first, stop, piece.offset if not index else 0))
                    own.append(numbers.setdefault(slot + index, len(numbers)))
            self._rows.append((history, pieces, own))
        self._table = tuple(numbers)

    @property
    def rows(self) -> object:
        """Another whenever the rows' blocks are others."""
        return self._rows

    @property
    def slots(self) -> tuple[int, ...]:
        """By number in the table."""
        return self._table


class Offloaded:
    """The blocks of one layer; see `Blocks`."""

    def __init__(self, offload: Offload, index: int, layer: Layer) -> None:
        self._offload, self.index = offload, index
        self._owner = weakref.ref(layer)  # a cycle would keep the blocks of a cache that is gone
        self.shared = offload.shared

    def seal(self, call: Call, cuts: Sequence[Cut]) -> None:
        """Give blocks to the store, as many at once as a staging buffer holds."""
        self._offload.table(call)
        self.prepare()
        for cut in cuts:
            step = max(1, self.shared.store.ring.nbytes // self._records[SHRINKABLE].nbytes)
            for first in range(0, len(cut.slots), step):
                self._seal(_part(cut, first, first + step, self.layer.key.block_tokens))

    def read(self, call: Call) -> Portions:
        """What lies on the device, and then the rest as it is fetched; codes and blocks as they were apart."""
        reading = self._offload.stream.read(self.index, self._offload.table(call))
        kinds = {kind_of(tag) for tag in reading.tags}
        return Portions(reading.parts > 1 or len(kinds) > 1, self._portions(call, reading.runs()))

    def nbytes(self) -> int:
        """See `Blocks`."""
        return sum(self._placed().values())

    def slot_nbytes(self, slots: Sequence[int]) -> dict[int, int]:
        """See `Blocks`."""
        placed = self._placed()
        return {slot: placed.get(slot, 0) for slot in slots}

    def _placed(self) -> dict[int, int]:
        """Bytes of what lies on the device, by slot."""
        counted = {
            tag: record.counted(_RAW if tag == SHRINKABLE else self._codecs) for tag, record in self._records.items()
        }
        placed = self.shared.store.placed(self.shared.sequence, self.index, DEVICE)
        return {slot: counted[tag] for slot, tag in placed.items()}

    def tensors(self) -> Iterator[Tensor]:
        """The device's memory is the store's."""
        return iter(())

    def select(self, indices: Sequence[int]) -> None:
        """The pool has told the store already."""

    def clear(self) -> None:
        """See `Blocks`; the pool has told the store already."""
        if not self.shared.pool.live:
            self.layer.record = None  # what comes next may have other shapes
            self.shared.records.pop(self.index, None)

    def fork(self, layer: Layer) -> Offloaded:
        """For a copy of the layer within the same cache; see `Offload.fork`."""
        return Offloaded(self._offload, self.index, layer)

    @property
    def layer(self) -> Layer:
        """Whose blocks these are."""
        layer = self._owner()
        assert layer is not None
        return layer

    @property
    def _codecs(self) -> tuple[Codec, Codec]:
        return self.layer.key.codec, self.layer.value.codec

    @property
    def _records(self) -> dict[int, Record]:
        return self.shared.records.get(self.index, {})

    def prepare(self) -> None:
        """Find out how blocks lie in memory, once the layer knows its shapes. Raises `StoreError` for small tiers."""
        if self.index in self.shared.records:
            return
        exact = []
        for side in self.layer.sides:
            tail = side.tails[0].tokens
            exact.append(Raw().layout(tail.shape[0], side.block_tokens, tail.shape[2], tail.dtype))
        assert self.layer.record is not None
        self.shared.store.must_hold(self.layer.record.nbytes)
        key, value = (side.empty() for side in self.layer.sides)
        self.shared.records[self.index] = {SHRINKABLE: Record.of(*exact), ENCODED: self.layer.record}
        self.shared.sides[self.index] = {ENCODED: (key, value)}
        if self.shared.cold is not None:
            self._prepare_cold(self.shared.cold)

    def _prepare_cold(self, cold: LayerPolicy) -> None:
        """Find out how blocks lie on disk, if they take less room there."""
        sides, layouts = [], []
        for side, codec in zip(self.layer.sides, (cold.key, cold.value), strict=True):
            tail = side.tails[0].tokens
            sides.append(side.empty() if side.codec.lossless else side.empty(codec))
            layouts.append(sides[-1].codec.layout(tail.shape[0], side.block_tokens, tail.shape[2], tail.dtype))
        record = Record.of(*layouts)
        if record.nbytes < self._records[ENCODED].nbytes:
            self.shared.records[self.index][COLD] = record
            self.shared.sides[self.index][COLD] = sides[0], sides[1]

    def record(self, tag: int) -> Record:
        """How payloads with a tag lie in memory."""
        return self.shared.record_of(self.index, tag)

    def is_exact(self, tag: int) -> bool:
        """Whether payloads with a tag are blocks as they were, to be encoded yet."""
        return tag == SHRINKABLE

    def is_cold(self, slot: int) -> bool:
        """Whether a block was encoded in fewer bits for the disk."""
        tag = self.shared.store.tag(BlockKey(self.shared.sequence, self.index, slot))
        return tag is not None and kind_of(tag) == COLD

    def stored(self, slot: int) -> tuple[Tensor, int]:
        """A copy of a block's payload on the CPU, and its tag. Raises `StoreError` if it is lost."""
        found = self.shared.store.get_tagged(BlockKey(self.shared.sequence, self.index, slot))
        if found is None:
            raise StoreError(f"a block of layer {self.index} is lost: reset() the cache and feed it again")
        return found

    def room(self, slots: Sequence[int], nbytes: int, tag: int, below: bool = False) -> Reserved:
        """Room for blocks, ``below``: on disk. Raises `StoreFullError`."""
        room = self._offload.stream.reserve(self.index, slots, nbytes, tag, first=DISK if below else DEVICE)
        if room is None:
            raise StoreFullError(
                f"the store has no room for {len(slots)} more blocks of layer {self.index} ({nbytes} bytes each): "
                f"{self.shared.store.in_words()}"
            )
        return room

    def _seal(self, cut: Cut) -> None:
        stream, nbytes = self._offload.stream, self._records[SHRINKABLE].nbytes
        exact = self.shared.exact and not all(codec.lossless for codec in self._codecs)
        room = stream.reserve(self.index, cut.slots, nbytes, SHRINKABLE, spare=True) if exact else None
        if room is not None:
            with room:
                for fields, blocks in zip(self._records[SHRINKABLE].views(room.payloads), cut.blocks, strict=True):
                    (place,) = fields.values()
                    place.copy_(blocks)
                self._wait(cut)
                room.commit()
            return
        tag, record = ENCODED, self._records[ENCODED]
        encoders = self.layer.encoders([cut])
        with self.room(cut.slots, record.nbytes, tag) as room:
            if room.on_disk and COLD in self._records:
                room.abort()
                self._seal_cold(cut)
                return
            places = record.views(room.payloads)
            encoded = [encoder(place) for encoder, place in zip(encoders, places, strict=True)]
            tag, wider = self.shared.record(self.index, encoded)
            if wider is record:
                self._write(encoded, places)
                room.commit()
                return
        with self.room(cut.slots, wider.nbytes, tag) as room:
            self._write(encoded, wider.views(room.payloads))
            room.commit()

    @staticmethod
    def _write(encoded: Iterable[Fields], places: Iterable[Fields]) -> None:
        for source, to in zip(encoded, places, strict=True):
            if source is not to:
                copy_fields(source, to)

    def _seal_cold(self, cut: Cut) -> None:
        """Encode blocks, which are as they were, for the disk at once."""
        sides = self.shared.sides[self.index][COLD]
        prepared = [
            side.prepared(blocks, cut.positions, sinks)
            for side, blocks, sinks in zip(sides, cut.blocks, cut.sinks, strict=True)
        ]
        encoded = self.shared.encoded(self.index, prepared, COLD)
        tag, record = self.shared.record(self.index, encoded, COLD)
        with self.room(cut.slots, record.nbytes, tag, below=True) as room:
            self._write(encoded, record.views(room.payloads))
            room.commit()
        self.shared.recompressed.from_exact += len(cut.slots)

    def _wait(self, cut: Cut) -> None:
        """Remember what it takes to encode blocks later."""
        tokens = self.layer.key.block_tokens
        for index, slot in enumerate(cut.slots):
            positions = cut.positions[index * tokens : (index + 1) * tokens]
            self.shared.waiting[slot] = Exact(positions, (0, 0) if index else cut.sinks)

    def _portions(self, call: Call, portions: Iterable[Sequence[Run]]) -> Iterator[Sequence[Sequence[Span]]]:
        for runs in portions:
            kinds: dict[int, list[Run]] = {}
            for run in runs:
                kinds.setdefault(kind_of(run.tag), []).append(run)
            for some in kinds.values() if kinds else [[]]:
                yield [[span for run in some for span in self._spans(index, run)] for index in range(len(call.rows))]

    def _spans(self, row: int, run: Run) -> list[Span]:
        """What a row has of a run, in as few spans as it may."""
        made = run.memo.get("rows")
        if made is None or made[0] is not self._offload.rows:
            made = run.memo["rows"] = self._offload.rows, {}
        spans: dict[int, list[Span]] = made[1]
        if row not in spans:
            spans[row] = list(self._find_spans(row, run))
        return spans[row]

    def _find_spans(self, row: int, run: Run) -> Iterator[Span]:
        group: list[tuple[int, Piece]] = []
        last = run.first + len(run.payloads)
        block = self.layer.key.block_tokens
        for number, piece in self._offload.pieces(row):
            follows = group and number == group[-1][0] + 1 and piece.first == group[-1][1].stop
            whole = group and piece.first % block == 0 and not piece.offset
            if group and not (follows and whole and run.first <= number < last):
                yield self._span(run, group)
                group = []
            if run.first <= number < last:
                group.append((number, piece))
        if group:
            yield self._span(run, group)

    def _span(self, run: Run, group: Sequence[tuple[int, Piece]]) -> Span:
        number, piece = group[0]
        fields = self.record(run.tag).views(run.payloads[number - run.first :][: len(group)])
        slot = self._offload.slots[number]
        if run.tag == SHRINKABLE:
            key, value = (Side(codec, found, None) for codec, found in zip(_RAW, fields, strict=True))
        else:
            kind = self.shared.sides[self.index][kind_of(run.tag)]
            key, value = (
                Side(coded.codec, found, side.side(found, slot, piece.first).raw)
                for side, coded, found in zip(self.layer.sides, kind, fields, strict=True)
            )
        return Span(piece.first, group[-1][1].stop, piece.offset, (key, value))


def offload_to(store: TieredStore, pool: SlotPool, resolved: ResolvedPolicy, config: Any) -> Offload:
    """How a new cache's blocks lie in a store. Raises `StoreError` where a tier can't hold one of them."""
    if not isinstance(store, TieredStore):
        raise StoreError(f"store: {shown(store)}; allowed: a TieredStore")
    layers = [(layer.index, layer.policy) for layer in resolved.layers if layer.policy is not None]
    policy = resolved.policy
    if (shape := kv_shape(config)) is not None:
        heads, dim, dtype = shape
        for codecs in dict.fromkeys((codecs.key, codecs.value) for _, codecs in layers):
            key, value = (codec.layout(heads, policy.block_tokens, dim, dtype) for codec in codecs)
            store.must_hold(Record.of(key, value).nbytes)
    indexes = tuple(index for index, _ in layers)
    return Offload(Shared(store, pool, indexes, policy.when == "evict", resolved.cold))


def _part(cut: Cut, first: int, stop: int, tokens: int) -> Cut:
    """Some blocks of a cut."""
    key, value = (blocks[first:stop] for blocks in cut.blocks)
    positions = cut.positions[first * tokens : stop * tokens]
    return Cut(cut.slots[first:stop], (key, value), positions, (0, 0) if first else cut.sinks)
