"""The sequences of a batch: what each holds, where its blocks are, and what a forward call adds to it.

No tensors of keys or values here. A row is one sequence; its tokens are counted from its first real token, so
left padding occupies nothing. A batch is as wide as its columns: token ``p`` of a row stands in column
``start + p``, and all rows end at the same column. A call either brings as many columns of each row, or is packed: one
line, in which some tokens of some rows follow one another. After that the batch is as wide as its longest row.

    columns   0 1 2 3 4 5 6 7 8 9          block_tokens 4, recent_tokens 1
    row 0     t t t t t t t t t t          start 0, length 10: blocks [0,4) [4,8), tail 8 9
    row 1     · · · t t t t t t t          start 3, length 7:  block [0,4), tail 4 5 6

A block table entry is a slot and the token where its span ends. Spans are whole blocks, except around a token
where the row was cropped: codes are never rewritten, so the rest of that block gets a slot of its own.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ..arena import Run, SlotPool
from ..errors import CacheStateError

MANY_PIECES = 64

_sequences = itertools.count()
_families = itertools.count(1)


@dataclass(frozen=True)
class Piece:
    """Tokens ``first ≤ p < stop`` of a row, in a run of slots, the first of them ``offset`` tokens into it."""

    run: Run
    first: int
    stop: int
    offset: int


@dataclass
class Row:
    """One sequence. ``ends[i]`` is where the span in ``slots[i]`` ends; ``ids`` is None once some are unknown.

    ``positions``, in pieces, are those the model gave the tokens: 0, 1, … unless the caller counts otherwise.
    ``family`` owns its slots: rows that began in one batch are one, with all their copies; a packed row is its own.
    """

    start: int = 0
    length: int = 0
    slots: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    ids: list[Tensor] | None = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    sequence: int = field(default_factory=lambda: next(_sequences))
    family: int = field(default_factory=lambda: next(_families))

    @property
    def next_position(self) -> int:
        """The position of the token to come; to ask may wait for a GPU."""
        return int(self.positions[-1][-1]) + 1 if self.positions else 0

    @property
    def sealed(self) -> int:
        """Tokens in blocks; the tail holds the rest."""
        return self.ends[-1] if self.ends else 0

    def at_home(self) -> bool:
        """Whether the tokens are at positions 0, 1, …"""
        return not self.length or torch.equal(_joined(self.positions).cpu(), torch.arange(self.length))

    def fork(self) -> Row:
        """A copy that is a sequence of its own from here on."""
        ids = None if self.ids is None else list(self.ids)
        slots, ends, positions = list(self.slots), list(self.ends), list(self.positions)
        return Row(self.start, self.length, slots, ends, ids, positions, family=self.family)


@dataclass(frozen=True)
class RowCall:
    """What one forward call does to a row; ``start`` and ``pieces`` of positions are the row's.

    ``history`` are the blocks from before the call, ``sealed`` the tokens in them. ``fresh`` tokens arrive, in line
    ``line`` of the call from its column ``at`` on. After it, the first ``sealing`` tokens of the tail go into
    ``slots``. ``index`` is the number of the row.
    """

    start: int
    pieces: tuple[Tensor, ...]
    history: tuple[Piece, ...]
    sealed: int
    tail: int
    fresh: int
    slots: tuple[int, ...]
    sealing: int
    index: int = 0
    line: int = 0
    at: int = 0

    @property
    def before(self) -> int:
        """Tokens from before the call."""
        return self.sealed + self.tail

    def of(self, states: Tensor) -> Tensor:
        """The row's part ``[heads, tokens, dim]`` of what a call brings, ``[lines, heads, columns, dim]``."""
        return states[self.line, :, self.at : self.at + self.fresh]

    @cached_property
    def positions(self) -> Tensor:
        """The position of every token of the row, int64 ``[tokens]``."""
        return _joined(self.pieces)

    @cached_property
    def in_order(self) -> bool:
        """Whether sealed tokens are at positions that follow one another; to ask waits for a GPU."""
        positions = self.positions[: self.sealed]
        return len(positions) < 2 or bool((positions.diff() == 1).all())


@dataclass(frozen=True)
class Call:
    """One forward call over ``new`` columns after ``past``; the same for every layer.

    ``rows`` are those that take part, of ``count`` rows that there are.
    """

    past: int
    new: int
    rows: tuple[RowCall, ...]
    runs: tuple[Run, ...]  # of the slots that all rows seal, row after row
    count: int
    packed: bool = False

    @property
    def lines(self) -> int:
        """What the model takes for the size of the batch."""
        return 1 if self.packed else self.count

    @cached_property
    def places(self) -> list[int]:
        """The column where each row begins among all that is attended to; packed rows follow one another."""
        if not self.packed:
            return [row.start for row in self.rows]
        return list(itertools.accumulate((row.before + row.fresh for row in self.rows), initial=0))[:-1]


class Rows:
    """All rows of a batch, and the reference they hold on every slot in their tables."""

    def __init__(self, pool: SlotPool, block_tokens: int, recent_tokens: int) -> None:
        self.pool = pool
        self.block_tokens = block_tokens
        self.recent_tokens = recent_tokens
        self.rows: list[Row] = []  # always this list: the finalizer holds it
        self.width = 0
        self.packed = False  # whether rows were packed ever: tokens are not at the positions of their columns then
        self._pieces: dict[int, tuple[Piece, ...]] = {}  # by sequence, while its table stays as it is
        weakref.finalize(self, _give_back, pool, self.rows).atexit = False

    def advance(
        self, starts: Sequence[int], new: int, ids: Tensor | None = None, positions: Tensor | None = None
    ) -> Call:
        """Add ``new`` columns to every row; row i's first token stands at column ``starts[i]`` or later.

        ``ids`` are the call's token ids ``[rows, new]``, ``positions`` theirs ``[rows or 1, new]``, where known.
        """
        if not self.rows:
            family = next(_families)
            self.rows += [Row(family=family) for _ in starts]
        past = self.width
        self.width = past + new
        calls = []
        for index, (row, start) in enumerate(zip(self.rows, starts, strict=True)):
            if not row.length:
                row.start = start
            fresh = self.width - row.start - row.length
            if not 0 <= fresh <= self.width:
                raise CacheStateError(f"a row of {row.length} tokens cannot start at column {row.start}")
            told = positions[index % len(positions)] if positions is not None else None
            own = ids[index] if ids is not None else None
            calls.append(replace(self._advance_row(row, fresh, own, told), index=index, line=index, at=new - fresh))
        return Call(past, new, tuple(calls), self._runs(calls), len(self.rows))

    def advance_packed(
        self, segments: Sequence[tuple[int, int, int]], ids: Tensor | None, positions: Tensor | None
    ) -> Call:
        """Add tokens ``first ≤ t < stop`` of one line to a row, for each ``(row, first, stop)`` of ``segments``.

        Rows that are not there yet are made. ``ids`` and ``positions`` are those of the line, where known.
        """
        past, calls = self.width, []
        for index, first, stop in segments:
            while index >= len(self.rows):
                self.rows.append(Row())
            own, told = (None if x is None else x[first:stop] for x in (ids, positions))
            found = self._advance_row(self.rows[index], stop - first, own, told)
            calls.append(replace(found, index=index, at=first))
        self.width = max(row.length for row in self.rows)
        for row in self.rows:
            row.start = self.width - row.length
        self.packed = True
        return Call(past, segments[-1][2], tuple(calls), self._runs(calls), len(self.rows), packed=True)

    def _runs(self, calls: Sequence[RowCall]) -> tuple[Run, ...]:
        return tuple(self.pool.runs([slot for call in calls for slot in call.slots]))

    def _advance_row(self, row: Row, fresh: int, ids: Tensor | None, positions: Tensor | None) -> RowCall:
        block = self.block_tokens
        history, sealed, tail = self.history(row), row.sealed, row.length - row.sealed
        row.length += fresh
        if fresh:
            row.positions = _compact([*row.positions, _following(row.positions, fresh, positions)])
        if ids is None:
            row.ids = None
        elif row.ids is not None and fresh:
            row.ids.append(ids[len(ids) - fresh :].clone())
        stop = max(sealed, (row.length - self.recent_tokens) // block * block)
        ends = list(range(sealed // block * block + block, stop + 1, block))
        slots = self.pool.allocate(len(ends), row.family)
        if ends:
            row.slots += slots
            row.ends += ends
            self._pieces.pop(row.sequence, None)
        return RowCall(row.start, tuple(row.positions), history, sealed, tail, fresh, tuple(slots), stop - sealed)

    def begin_with(self, ids: Tensor, starts: Sequence[int], slots: Sequence[Sequence[int]]) -> None:
        """Hold ``ids`` ``[rows, columns]``, row i from column ``starts[i]`` on, in blocks at ``slots``.

        A row whose blocks reach beyond the last column shows that much less of them.
        """
        self.width = ids.shape[1]
        for row_ids, start, own in zip(ids, starts, slots, strict=True):
            length = self.width - start
            count = -(-length // self.block_tokens)
            ends = [min(length, (number + 1) * self.block_tokens) for number in range(count)]
            row = Row(start, length, list(own[:count]), ends, [row_ids[start:].clone()], [torch.arange(length)])
            self.pool.retain(row.slots)
            self.rows.append(row)

    def view(self) -> Call:
        """The rows as a call that adds nothing sees them."""
        calls = []
        for index, row in enumerate(self.rows):
            held = self.history(row), row.sealed, row.length - row.sealed
            calls.append(RowCall(row.start, tuple(row.positions), *held, 0, (), 0, index, index))
        return Call(self.width, 0, tuple(calls), (), len(calls))

    def view_of(self, row: Row, number: int) -> Call:
        """The ``number``-th span of a row's table by itself, as a call that adds nothing sees it."""
        (run,) = self.pool.runs([row.slots[number]])
        first, stop = row.ends[number - 1] if number else 0, row.ends[number]
        piece = Piece(run, first, stop, first % self.block_tokens)
        return Call(self.width, 0, (RowCall(row.start, tuple(row.positions), (piece,), stop, 0, 0, (), 0),), (), 1)

    def history(self, row: Row) -> tuple[Piece, ...]:
        """The sealed tokens of a row in order: whole blocks in runs, fragments one by one."""
        if row.sequence not in self._pieces:
            self._pieces[row.sequence] = tuple(self._find_pieces(row))
        return self._pieces[row.sequence]

    def _find_pieces(self, row: Row) -> list[Piece]:
        block = self.block_tokens
        pieces: list[Piece] = []
        spans = list(zip(row.slots, [0, *row.ends], row.ends, strict=False))
        for whole, group in itertools.groupby(spans, key=lambda span: span[2] - span[1] == block):
            members = list(group)
            if not whole:
                for slot, first, stop in members:
                    (run,) = self.pool.runs([slot])
                    pieces.append(Piece(run, first, stop, first % block))
                continue
            first = members[0][1]
            for run in self.pool.runs([slot for slot, _, _ in members]):
                pieces.append(Piece(run, first, first + len(run) * block, 0))
                first += len(run) * block
        return pieces

    def crop(self, columns: int) -> None:
        """Forget the last ``columns`` columns; codes stay as they are, rows see less of them."""
        self.width = max(0, self.width - columns)
        for row in self.rows:
            row.start = min(row.start, self.width)
            if row.length == self.width - row.start:
                continue
            row.length = self.width - row.start
            row.ids = None if row.ids is None else _first(row.ids, row.length)
            row.positions = _first(row.positions, row.length)
            if row.sealed > row.length:
                keep = sum(first < row.length for first in [0, *row.ends[:-1]])
                self.pool.release(row.slots[keep:])
                del row.slots[keep:], row.ends[keep:]
                if row.ends:
                    row.ends[-1] = min(row.ends[-1], row.length)
                self._pieces.pop(row.sequence, None)

    def select(self, indices: Sequence[int]) -> None:
        """Row i becomes row ``indices[i]``, a copy of it where it is chosen again; no code moves."""
        if any(not -len(self.rows) <= index < len(self.rows) for index in indices):
            raise CacheStateError(f"rows {list(indices)} selected from a cache of {len(self.rows)} rows")
        chosen: dict[int, Row] = {}  # a row that stays is the same row, if it stays once
        rows = []
        for index in indices:
            row = self.rows[index]
            if row.sequence in chosen:
                row = row.fork()
                self.pool.retain(row.slots)
            chosen[row.sequence] = row
            rows.append(row)
        for row in self.rows:
            if row.sequence not in chosen:
                self._pieces.pop(row.sequence, None)
                self.pool.release(row.slots)
        self.rows[:] = rows

    def clear(self) -> None:
        """Drop all rows and columns."""
        for row in self.rows:
            self.pool.release(row.slots)
        self.rows.clear()
        self._pieces.clear()
        self.width, self.packed = 0, False

    def fork(self) -> Rows:
        """A copy that shares every block."""
        twin = Rows(self.pool, self.block_tokens, self.recent_tokens)
        twin.width, twin.packed = self.width, self.packed
        twin.rows += [row.fork() for row in self.rows]
        for row in twin.rows:
            self.pool.retain(row.slots)
        return twin


def _give_back(pool: SlotPool, rows: list[Row]) -> None:
    for row in rows:
        pool.give_back(row.slots)


def _following(before: list[Tensor], count: int, told: Tensor | None) -> Tensor:
    """Positions of ``count`` more tokens: the last of those told, or on from the last token's."""
    if told is not None:
        return told[len(told) - count :].to(torch.int64, copy=True)
    if not before:
        return torch.arange(count)
    return before[-1][-1] + torch.arange(1, count + 1, device=before[-1].device)


def _compact(pieces: list[Tensor]) -> list[Tensor]:
    """The same tensors end to end, in few pieces."""
    if len(pieces) < MANY_PIECES:
        return pieces
    return [_joined(pieces)]


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat([piece.to(pieces[-1].device) for piece in pieces])


def _first(pieces: list[Tensor], count: int) -> list[Tensor]:
    """The first ``count`` elements of tensors end to end."""
    kept: list[Tensor] = []
    for piece in pieces:
        if count <= 0:
            break
        kept.append(piece[:count])
        count -= len(kept[-1])
    return kept
