"""One layer's keys and values: a tail at model precision and sealed blocks, row by row.

    appended ──> tail ──(a block beyond the last `recent_tokens` is complete)──> cut ──> blocks
                  │                                                                        │
                  └──────────────── attended: history, tail, new tokens <──────── read ────┘

Where sealed blocks are is told by `Blocks`. Nothing here knows transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import torch
from torch import Tensor

from ..arena import Encoder, SlotPool
from ..blocks import CompressedTensor, KVBlock
from ..codecs import Codec, Fields
from ..errors import CacheStateError
from ..kernels import decode, encode
from ..kernels.coding import CHUNK_ELEMENTS
from ..records import Record
from .blocks import Blocks, Cut, Side, Span
from .held import Held, decoded, no_autocast
from .rows import Call, Row, RowCall, Rows
from .tail import Tail

Offset = Callable[[Tensor, Tensor], Tensor]
"""What is known of tokens at positions int64 ``[tokens]``: ``(positions, like)`` to ``[heads, tokens, dim]``.

``like`` gives dtype and device of the states.
"""


class Sinks(dict[int, Tensor]):
    """By slot, the tokens kept as they are beside a block's codes: ``[heads, count, dim]``."""

    stamp = 0  # another whenever what was read here may be out of date

    def keep(self, slot: int, tokens: Tensor) -> None:
        """Keep ``tokens``, if there are any."""
        if tokens.shape[1]:
            self[slot] = tokens.clone()
            self.stamp += 1

    def drop(self, slots: Sequence[int]) -> None:
        """Forget what belonged to blocks that are gone."""
        for slot in slots:
            self.pop(slot, None)


class History:
    """The keys, or the values, of one layer for all rows of a batch, less what is in blocks.

    Heads, dim, dtype and device are those of the first call. Of what goes into blocks ``offset`` is taken away, and
    given back when they are decoded.
    """

    def __init__(
        self, codec: Codec, pool: SlotPool, block_tokens: int, sink_tokens: int, offset: Offset | None = None
    ) -> None:
        self.codec = codec
        self.offset = None if codec.lossless else offset
        self.block_tokens = block_tokens
        self.sink_tokens = 0 if codec.lossless else sink_tokens
        self.tails: list[Tail] = []  # per row
        self.sinks = Sinks()
        pool.watch(self.sinks)
        self._pool = pool
        self.grown = False  # whether the last call changed what is allocated
        self.encode_seconds = 0.0
        self.decode_seconds = 0.0

    def append(self, fresh: Tensor, call: Call) -> None:
        """Take the call's new columns ``[lines, heads, columns, dim]``; `check` tells beforehand whether they fit."""
        self.grown = bool(call.runs)
        while len(self.tails) < call.count:
            self.tails.append(Tail.of(fresh[0, :, :0]))
        for row in call.rows:
            if row.fresh:
                before, after = self.tails[row.index], self.tails[row.index].append(row.of(fresh))
                self.tails[row.index] = after
                self.grown |= after.room is not before.room

    def check(self, fresh: Tensor) -> None:
        """`CacheStateError` where new columns do not have the shape or dtype of those held."""
        if not self.tails:
            return
        tail = self.tails[0].tokens
        if (fresh.shape[1], fresh.shape[3], fresh.dtype) != (tail.shape[0], tail.shape[2], tail.dtype):
            raise CacheStateError(
                f"states of {fresh.shape[1]} heads × {fresh.shape[3]} in {fresh.dtype}, "
                f"but the cache holds {tail.shape[0]} heads × {tail.shape[2]} in {tail.dtype}"
            )

    def cut(self, row: RowCall) -> Tensor:
        """Take what a row seals off its tail: blocks ``[n, heads, block_tokens, dim]``, setting sinks aside.

        Places of a block before the row's first take the first token, so that they do not widen the range of codes.
        """
        tail = self.tails[row.index]
        tokens = tail.tokens[:, : row.sealing]
        self.tails[row.index] = tail.after(row.sealing)
        self.sinks.keep(row.slots[0], tokens[:, : self.sinks_of(row)])
        if place := row.sealed % self.block_tokens:
            tokens = torch.cat((tokens[:, :1].expand(-1, place, -1), tokens), dim=1)
        return torch.unflatten(tokens, 1, (-1, self.block_tokens)).transpose(0, 1)

    def sinks_of(self, row: RowCall) -> int:
        """How many of the tokens that a row seals are kept raw."""
        return max(0, self.sink_tokens - row.sealed)

    def prepared(self, blocks: Tensor, positions: Tensor, sinks: int) -> Tensor:
        """What of a row's ``blocks`` is encoded: less what is known, and sinks not widening the range either."""
        if self.offset is not None:
            known = self.offset(positions, blocks)
            blocks = blocks.float() - torch.unflatten(known, 1, (-1, self.block_tokens)).transpose(0, 1)
        if sinks and self.sink_tokens < self.block_tokens:
            # A copy, since of one head it would be a view of tokens that are still to be attended to.
            blocks = blocks.clone(memory_format=torch.contiguous_format)
            blocks[0, :, : self.sink_tokens] = blocks[0, :, self.sink_tokens, None]
        return blocks

    def side(self, fields: Fields, slot: int, first: int) -> Side:
        """What blocks from ``slot`` on hold, whose first token is the row's ``first``."""
        return Side(self.codec, fields, self.sinks[slot] if first < self.sink_tokens else None)

    def decode(self, span: Span, which: int, row: RowCall, out: Tensor) -> None:
        """Decode a span of a row into ``out[heads, token, dim]``, by their number in the row."""
        side = span.sides[which]
        first, offset = span.first, span.offset
        known = None if side.codec.lossless else self.offset
        for fields in _chunks(side.fields, out.shape[0] * self.block_tokens * out.shape[2]):
            many = len(next(iter(fields.values())))
            count = min(span.stop - first, many * self.block_tokens - offset)
            target = out[:, first : first + count]
            if known is None and count == many * self.block_tokens:
                blocks = torch.unflatten(target, 1, (many, self.block_tokens)).transpose(0, 1)
                decode(side.codec, fields, out.shape[2], out.dtype, out=blocks)
            else:
                dtype = out.dtype if known is None else torch.float32
                blocks = decode(side.codec, fields, out.shape[2], dtype)  # [n, heads, tokens, dim]
                tokens = blocks.transpose(0, 1).flatten(1, 2)[:, offset : offset + count]
                if known is not None:
                    limit = torch.finfo(out.dtype).max
                    tokens = (tokens + known(row.positions[first : first + count], out)).clamp_(-limit, limit)
                target.copy_(tokens)
            first, offset = first + count, 0
        if side.raw is not None:
            raw = side.raw[:, : span.stop - span.first]
            out[:, span.first : span.first + raw.shape[1]] = raw

    def crop(self, rows: Sequence[Row]) -> None:
        """Follow rows that were cropped: tails lose their last tokens."""
        self.tails = [tail.first(row.length - row.sealed) for tail, row in zip(self.tails, rows, strict=False)]

    def select(self, indices: Sequence[int]) -> None:
        """Follow rows that were selected; tails are shared, not copied."""
        if self.tails:
            self.tails = [self.tails[index] for index in indices]

    def fork(self) -> History:
        """A copy that shares sinks and, until it grows, tails."""
        twin = self.empty()
        twin.sinks = self.sinks
        twin.tails = [Tail.of(tail.tokens) for tail in self.tails]
        return twin

    def empty(self, codec: Codec | None = None) -> History:
        """One that holds nothing and encodes as this does, or with another codec."""
        return History(codec or self.codec, self._pool, self.block_tokens, self.sink_tokens, self.offset)

    @property
    def dim(self) -> int:
        """Channels of a head."""
        return int(self.tails[0].tokens.shape[2])

    @property
    def token_elements(self) -> int:
        """Values one token has here, over all heads; 0 before the first call."""
        return self.tails[0].tokens.shape[0] * self.dim if self.tails else 0

    def raw_tensors(self) -> Iterator[Tensor]:
        """What is allocated for tokens that are not in blocks, and for sinks."""
        rooms = [tail.room for tail in self.tails]
        yield from {id(room): room for room in rooms}.values()
        yield from self.sinks.values()


class Layer:
    """The keys and the values of one layer, and where their sealed blocks are."""

    def __init__(self, key: History, value: History, place: Callable[[Layer], Blocks]) -> None:
        self.key, self.value = key, value
        self.blocks = place(self)
        self.record: Record | None = None  # of a block, once shapes are known

    def append(self, keys: Tensor, values: Tensor, call: Call) -> tuple[Held, Held]:
        """Take a call's new columns and tell what is held with them; seal what is complete."""
        if self.record is None:
            self.record = self.record_of(keys, values)
        held = []
        for which, (side, fresh) in enumerate(zip(self.sides, (keys, values), strict=True)):
            side.append(fresh, call)
            held.append(Held(self, which, fresh, call, tuple(side.tails[row.index].tokens for row in call.rows)))
        if call.runs:
            with no_autocast(keys.device), torch.no_grad():
                self.blocks.seal(call, [self._cut(row) for row in call.rows if row.slots])
        return held[0], held[1]

    def encoders(self, cuts: Sequence[Cut]) -> tuple[Encoder, Encoder]:
        """What encodes the keys, and the values, that rows seal."""

        def of(which: int, side: History) -> Encoder:
            def encoder(place: Fields | None) -> Fields:
                started = time.perf_counter()
                batches = [side.prepared(cut.blocks[which], cut.positions, cut.sinks[which]) for cut in cuts]
                fields = encode(side.codec, torch.cat(batches) if batches[1:] else batches[0], place)
                side.encode_seconds += time.perf_counter() - started
                return fields

            return encoder

        return of(0, self.key), of(1, self.value)

    def dense(self, which: int, call: Call) -> Tensor:
        """All columns of a side as a call that adds none would attend to them."""
        tails = tuple(tail.tokens for tail in self.sides[which].tails)
        nothing = torch.stack([tail[:, :0] for tail in tails])
        return decoded(Held(self, which, nothing, call, tails))[0]

    def block(self, rows: Rows, row: Row, number: int) -> KVBlock:
        """A copy of the ``number``-th sealed span of a row, its keys less what is known of them."""
        call = rows.view_of(row, number)
        (piece,) = call.rows[0].history
        parts: list[CompressedTensor] = []
        for portion in self.blocks.read(call).each:  # each is good until the next is taken
            for span in portion[0]:
                for side, stored in zip(self.sides, span.sides, strict=True):
                    tail = side.tails[0].tokens
                    fields = {name: field[0].clone() for name, field in stored.fields.items()}
                    shape = tail.shape[0], side.block_tokens, tail.shape[2]
                    parts.append(CompressedTensor(stored.codec.name, shape, tail.dtype, fields, stored.raw))
        return KVBlock(parts[0], parts[1], piece.offset, piece.stop - piece.first)

    def nbytes(self) -> tuple[int, int]:
        """Bytes allocated for (sealed blocks, raw tokens); values at model precision count 2 bytes each."""
        raw = sum(tensor.numel() for side in self.sides for tensor in side.raw_tensors())
        return self.blocks.nbytes(), 2 * raw

    def tensors(self) -> Iterator[Tensor]:
        """Everything allocated on the layer's device: slots, used or not, and raw tokens."""
        yield from self.blocks.tensors()
        for side in self.sides:
            yield from side.raw_tensors()

    def crop(self, rows: Sequence[Row]) -> None:
        """Follow rows that were cropped."""
        for side in self.sides:
            side.crop(rows)

    def select(self, indices: Sequence[int]) -> None:
        """Follow rows that were selected; of the others nothing is left."""
        for side in self.sides:
            side.select(indices)
        self.blocks.select(indices)

    def clear(self) -> None:
        """Forget all rows."""
        for side in self.sides:
            side.tails = []
        self.blocks.clear()

    def fork(self, place: Callable[[Layer], Blocks] | None = None) -> Self:
        """A copy that shares blocks and, until it grows, tails; ``place``: see the constructor."""
        twin = type(self)(self.key.fork(), self.value.fork(), place or self.blocks.fork)
        twin.record = self.record
        return twin

    @property
    def sides(self) -> tuple[History, History]:
        """Keys and values."""
        return self.key, self.value

    def _cut(self, row: RowCall) -> Cut:
        positions = row.positions[row.sealed : row.sealed + row.sealing]
        if place := row.sealed % self.key.block_tokens:
            positions = torch.cat((positions[:1].expand(place), positions))
        sinks = self.key.sinks_of(row), self.value.sinks_of(row)
        return Cut(row.slots, (self.key.cut(row), self.value.cut(row)), positions, sinks)

    def record_of(self, keys: Tensor, values: Tensor) -> Record:
        """How blocks of states ``[rows, heads, tokens, dim]`` lie in memory."""
        key, value = (
            side.codec.layout(states.shape[1], side.block_tokens, states.shape[3], states.dtype)
            for side, states in zip(self.sides, (keys, values), strict=True)
        )
        return Record.of(key, value)


def _chunks(fields: Fields, elements: int) -> Iterator[Fields]:
    """Slices of fields over blocks, each of about CHUNK_ELEMENTS values at ``elements`` a block."""
    count = len(next(iter(fields.values())))
    step = max(1, CHUNK_ELEMENTS // elements)
    for first in range(0, count, step):
        yield {name: field[first : first + step] for name, field in fields.items()}
