"""One layer's keys or values: a tail at model precision and sealed blocks, row by row.

    appended ──> tail ──(a block beyond the last `recent_tokens` is complete)──> codec ──> arena slot
                  │                                                                          │
                  └──────────────── attended: history, tail, new tokens <────── decoded ─────┘

Nothing here knows transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..arena import Arena, SlotPool
from ..blocks import CompressedTensor
from ..codecs import Codec, Fields
from ..errors import CacheStateError
from ..kernels import decode, encode
from ..kernels.coding import CHUNK_ELEMENTS
from .rows import Call, Piece, Row, RowCall
from .tail import Tail

Offset = Callable[[Tensor, Tensor], Tensor]
"""What is known of tokens at positions int64 ``[tokens]``: ``(positions, like)`` to ``[heads, tokens, dim]``.

``like`` gives dtype and device of the states.
"""


class History:
    """The keys, or the values, of one layer for all rows of a batch.

    Tensors that come in and go out are ``[rows, heads, columns, dim]``; heads, dim, dtype and device are those
    of the first call. Of what goes into blocks ``offset`` is taken away, and given back when they are decoded.
    """

    def __init__(
        self, codec: Codec, pool: SlotPool, block_tokens: int, sink_tokens: int, offset: Offset | None = None
    ) -> None:
        self.codec = codec
        self.offset = None if codec.lossless else offset
        self.block_tokens = block_tokens
        self.sink_tokens = 0 if codec.lossless else sink_tokens
        self.tails: list[Tail] = []  # per row
        self.arena: Arena | None = None
        self.grown = False  # whether the last call changed what is allocated
        self.encode_seconds = 0.0
        self.decode_seconds = 0.0
        self._pool = pool

    def append(self, fresh: Tensor, call: Call) -> Held:
        """Take the call's new columns and tell what is held with them; seal what is complete.

        `check` tells beforehand whether ``fresh`` fits.
        """
        if self.arena is None:
            _, heads, _, dim = fresh.shape
            layout = self.codec.layout(heads, self.block_tokens, dim, fresh.dtype)
            self.arena = Arena(self._pool, layout, fresh.device)
        if not self.tails:
            self.tails = [Tail.of(fresh[0, :, :0]) for _ in call.rows]
        self.grown = bool(call.runs)
        for index, row in enumerate(call.rows):
            if row.fresh:
                new = fresh[index] if row.fresh == call.new else fresh[index, :, call.new - row.fresh :]
                before, after = self.tails[index], self.tails[index].append(new)
                self.tails[index] = after
                self.grown |= after.room is not before.room
        held = Held(self, fresh, call, tuple(tail.tokens for tail in self.tails))
        if call.runs:
            with _no_autocast(fresh.device), torch.no_grad():
                self._seal(call)
        return held

    def check(self, fresh: Tensor) -> None:
        """`CacheStateError` where new columns do not have the shape or dtype of those held."""
        if not self.tails:
            return
        tail = self.tails[0].tokens
        if fresh.shape[0] != len(self.tails):
            raise CacheStateError(f"a batch of {fresh.shape[0]} rows, but the cache holds {len(self.tails)} rows")
        if (fresh.shape[1], fresh.shape[3], fresh.dtype) != (tail.shape[0], tail.shape[2], tail.dtype):
            raise CacheStateError(
                f"states of {fresh.shape[1]} heads × {fresh.shape[3]} in {fresh.dtype}, "
                f"but the cache holds {tail.shape[0]} heads × {tail.shape[2]} in {tail.dtype}"
            )

    def dense(self, call: Call) -> Tensor:
        """All columns as a call that adds none would attend to them."""
        tails = tuple(tail.tokens for tail in self.tails)
        nothing = torch.stack([tail[:, :0] for tail in tails])
        return Held(self, nothing, call, tails).dense()

    def block(self, row: Row, number: int) -> CompressedTensor:
        """A copy of what is stored of the ``number``-th span in a row's table."""
        assert self.arena is not None
        slot = row.slots[number]
        (run,) = self._pool.runs([slot])
        fields = {name: field[0].clone() for name, field in self.arena.read(run).items()}
        tail = self.tails[0].tokens
        return CompressedTensor(
            codec=self.codec.name,
            shape=(tail.shape[0], self.block_tokens, tail.shape[2]),
            dtype=tail.dtype,
            fields=fields,
            sinks=self.arena.raw.get(slot),
        )

    def crop(self, rows: Sequence[Row]) -> None:
        """Follow rows that were cropped: tails lose their last tokens."""
        self.tails = [tail.first(row.length - row.sealed) for tail, row in zip(self.tails, rows, strict=False)]

    def select(self, indices: Sequence[int]) -> None:
        """Follow rows that were selected; tails are shared, not copied."""
        if self.tails:
            self.tails = [self.tails[index] for index in indices]

    def clear(self) -> None:
        """Forget all rows; memory of blocks is freed where no other cache uses the pool."""
        self.tails = []
        if not self._pool.live:
            self.arena = None  # what comes next may have other shapes

    def fork(self) -> History:
        """A copy that shares blocks and, until it grows, tails."""
        twin = History(self.codec, self._pool, self.block_tokens, self.sink_tokens, self.offset)
        twin.arena = self.arena
        twin.tails = [Tail.of(tail.tokens) for tail in self.tails]
        return twin

    def first_tokens(self, piece: Piece, count: int) -> Tensor:
        """The first tokens of a piece as they were: ``[heads, count, dim]``."""
        assert self.arena is not None
        if self.codec.lossless:
            fields = self.arena.read(replace(piece.run, stop=piece.run.first + 1))
            blocks = self.codec.decode(fields, self.dim, self.tails[0].tokens.dtype)
            return blocks[0, :, piece.offset : piece.offset + count]
        raw: Tensor = self.arena.raw[self._pool.slot(piece.run)]
        return raw[:, :count]

    @property
    def dim(self) -> int:
        """Channels of a head."""
        return int(self.tails[0].tokens.shape[2])

    @property
    def token_elements(self) -> int:
        """Values one token has here, over all heads; 0 before the first call."""
        return self.tails[0].tokens.shape[0] * self.dim if self.tails else 0

    def nbytes(self) -> tuple[int, int]:
        """Bytes allocated for (sealed blocks, raw tokens); values at model precision count 2 bytes each."""
        if self.arena is None:
            return 0, 0
        blocks = 2 * self.arena.elements if self.codec.lossless else self.arena.nbytes
        return blocks, 2 * sum(tensor.numel() for tensor in self._raw_tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Everything allocated: slots, used or not, and raw tokens."""
        if self.arena is not None:
            yield from self.arena.storages()
            yield from self._raw_tensors()

    def _raw_tensors(self) -> Iterator[Tensor]:
        assert self.arena is not None
        rooms = [tail.room for tail in self.tails]
        yield from {id(room): room for room in rooms}.values()
        yield from (sinks for slot, sinks in self.arena.raw.items() if self._pool.references(slot))

    def decode(self, row: RowCall, out: Tensor) -> None:
        """Decode a row's sealed tokens into ``out[heads, token, dim]``, by their number in the row."""
        assert self.arena is not None
        for piece in row.history:
            first, offset = piece.first, piece.offset
            for fields in _chunks(self.arena.read(piece.run), out.shape[0] * self.block_tokens * out.shape[2]):
                many = len(next(iter(fields.values())))
                count = min(piece.stop - first, many * self.block_tokens - offset)
                target = out[:, first : first + count]
                if self.offset is None and count == many * self.block_tokens:
                    blocks = torch.unflatten(target, 1, (many, self.block_tokens)).transpose(0, 1)
                    decode(self.codec, fields, out.shape[2], out.dtype, out=blocks)
                else:
                    dtype = out.dtype if self.offset is None else torch.float32
                    blocks = decode(self.codec, fields, out.shape[2], dtype)  # [n, heads, tokens, dim]
                    tokens = blocks.transpose(0, 1).flatten(1, 2)[:, offset : offset + count]
                    if self.offset is not None:
                        limit = torch.finfo(out.dtype).max
                        known = self.offset(row.positions[first : first + count], out)
                        tokens = (tokens + known).clamp_(-limit, limit)
                    target.copy_(tokens)
                first, offset = first + count, 0
            if piece.first < self.sink_tokens:
                stop = min(piece.stop, self.sink_tokens)
                sinks = self.arena.raw[self._pool.slot(piece.run)]
                out[:, piece.first : stop] = sinks[:, : stop - piece.first]

    def _seal(self, call: Call) -> None:
        """Encode what each row seals, write it to the call's slots and shorten the tails."""
        assert self.arena is not None
        started = time.perf_counter()
        batches = []
        for index, row in enumerate(call.rows):
            if row.slots:
                batches.append(self._cut(self.tails[index].tokens[:, : row.sealing], row))
                self.tails[index] = self.tails[index].after(row.sealing)
        blocks = torch.cat(batches) if len(batches) > 1 else batches[0]
        self.arena.fill(call.runs, lambda place: encode(self.codec, blocks, place))
        self.encode_seconds += time.perf_counter() - started

    def _cut(self, tokens: Tensor, row: RowCall) -> Tensor:
        """Cut ``[heads, tokens, dim]`` into blocks ``[n, heads, block_tokens, dim]``, setting sinks aside.

        Places of a block that hold no token of its own, or one kept raw, take the first token after them, so
        that they do not widen the range of the codes.
        """
        assert self.arena is not None
        for slot in row.slots:
            self.arena.keep_raw(slot, None)  # of a block that is gone
        sinks = max(0, self.sink_tokens - row.sealed)
        if sinks:
            self.arena.keep_raw(row.slots[0], tokens[:, :sinks].clone())
        if self.offset is not None:
            known = self.offset(row.positions[row.sealed : row.sealed + row.sealing], tokens)
            tokens = tokens.float() - known
        place = row.sealed % self.block_tokens
        if place:
            tokens = torch.cat((tokens[:, :1].expand(-1, place, -1), tokens), dim=1)
        blocks = torch.unflatten(tokens, 1, (-1, self.block_tokens)).transpose(0, 1)
        if sinks and self.sink_tokens < self.block_tokens:
            # A copy, since of one head it would be a view of tokens that are still to be attended to.
            blocks = blocks.clone(memory_format=torch.contiguous_format)
            blocks[0, :, : self.sink_tokens] = blocks[0, :, self.sink_tokens, None]
        return blocks


@dataclass(frozen=True, eq=False)
class Held:
    """What a history held in a call, new columns ``fresh`` and all: blocks from before it, and each row's tail.

    Good until the next call.
    """

    history: History
    fresh: Tensor
    call: Call
    tails: tuple[Tensor, ...]

    def dense(self) -> Tensor:
        """All columns, the new ones as given; padding columns of earlier calls are zeros."""
        fresh, call = self.fresh, self.call
        if not call.past:
            return fresh.contiguous()
        started = time.perf_counter()
        rows, heads, new, dim = fresh.shape
        with _no_autocast(fresh.device):
            dense = fresh.new_empty(rows, heads, call.past + new, dim)
            with torch.no_grad():
                for index, row in enumerate(call.rows):
                    dense[index, :, : row.start] = 0
                    tokens = dense[index, :, row.start : call.past]
                    self.history.decode(row, tokens)
                    tokens[:, row.sealed :] = self.tails[index][:, : row.tail]
            dense[:, :, call.past :] = fresh
        self.history.decode_seconds += time.perf_counter() - started
        return dense


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Codecs choose their dtypes themselves."""
    wanted = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if wanted else nullcontext()


def _chunks(fields: Fields, elements: int) -> Iterator[Fields]:
    """Slices of fields over blocks, each of about CHUNK_ELEMENTS values at ``elements`` a block."""
    count = len(next(iter(fields.values())))
    step = max(1, CHUNK_ELEMENTS // elements)
    for first in range(0, count, step):
        yield {name: field[first : first + step] for name, field in fields.items()}
