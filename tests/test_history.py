"""Rows, block tables and sealing, without a model: a state machine against plain lists of tokens."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvquant.arena import Arena, SlotPool
from kvquant.cache.calls import Calls
from kvquant.cache.held import decoded
from kvquant.cache.layer import History, Layer
from kvquant.cache.resident import Resident
from kvquant.cache.rows import Rows
from kvquant.codecs import Affine, Raw
from kvquant.errors import CacheStateError
from kvquant.records import Record

HEADS, DIM, BLOCK, RECENT, SINKS = 2, 8, 8, 5, 3


def ramp(positions, like):
    """An offset that depends on head, position and channel, and is far larger than the tokens."""
    angles = positions[None, :, None].float() * torch.arange(1, DIM + 1)
    return 50 * torch.cos(angles) + torch.tensor([0.0, 99.0])[:, None, None]


class One:
    """A layer of whose keys all is told; its values are the same, at model precision."""

    def __init__(self, codec, pool, block, sinks, offset=None, layer=None):
        sides = History(codec, pool, block, sinks, offset), History(Raw(), pool, block, sinks)
        self.layer = layer or Layer(*sides, partial(Resident, pool))
        self.parts = pool, block, sinks, offset
        self.codec, self.offset, self.check = codec, self.layer.key.offset, self.layer.key.check
        self.crop, self.select = self.layer.crop, self.layer.select

    def append(self, fresh, call):
        keys, values = self.layer.append(fresh, fresh, call)
        assert torch.equal(decoded(values)[0][:, :, call.past :], fresh)
        return keys

    def dense(self, call):
        return self.layer.dense(0, call)

    def fork(self):
        return One(self.codec, *self.parts, layer=self.layer.fork())

    @property
    def tails(self):
        return self.layer.key.tails


class Sequence:
    """What one row must hold: every token as it came, and what it decoded to once sealed."""

    def __init__(self, start, origin):
        self.start = start
        self.origin = origin
        self.tokens = torch.empty(HEADS, 0, DIM)
        self.sealed: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # without and with an offset

    def copy(self):
        twin = Sequence(self.start, self.origin)
        twin.tokens, twin.sealed = self.tokens, dict(self.sealed)
        return twin


def encoded_once(codec, sequence, first, stop):
    """Note what the tokens of a new span decode to: the codec over the true tokens of its block, sinks raw."""
    begin = first // BLOCK * BLOCK
    block = sequence.tokens[:, begin : begin + BLOCK].clone()
    leader = max(first, SINKS) - begin  # the first token that is neither in an older span nor kept raw
    if 0 < leader < BLOCK:
        block[:, :leader] = block[:, leader, None]
    decoded = codec.decode(codec.encode(block[None]), DIM, torch.float32)[0]
    for position in range(first, stop):
        token = sequence.tokens[:, position] if position < SINKS else decoded[:, position - begin]
        sequence.sealed[position] = token.clone(), None


class HistoryMachine(RuleBasedStateMachine):
    """Appends, crops, selections and copies in any order; three histories share the rows, as layers do.

    The third has an offset, and is given tokens that include it.
    """

    @initialize(
        pads=st.lists(st.integers(0, 12), min_size=1, max_size=3), first=st.integers(13, 40), by_column=st.booleans()
    )
    def begin(self, pads, first, by_column):
        self.pool = SlotPool()
        self.rows = Rows(self.pool, BLOCK, RECENT)
        self.calls = Calls(self.rows)
        codec = Affine(8, "channel", 8)
        self.histories = [
            One(Raw(), self.pool, BLOCK, SINKS),
            One(codec, self.pool, BLOCK, SINKS),
            One(codec, self.pool, BLOCK, SINKS, ramp),
        ]
        self.sequences = [Sequence(pad, pad if by_column else 0) for pad in pads]
        self.kept: list[Rows] = []
        mask = torch.ones(len(pads), first)
        for row, pad in enumerate(pads):
            mask[row, :pad] = 0
        positions = torch.arange(first).expand(len(pads), -1)
        if not by_column:
            positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        self.calls.announce(first, None, mask, positions)
        self.append(first)

    @rule(count=st.integers(1, 30))
    def append(self, count):
        if not self.sequences:
            return
        fresh = torch.randn(len(self.sequences), HEADS, count, DIM)
        past, batch = self.rows.width, len(self.sequences)
        for layer, history in enumerate(self.histories):
            given = fresh
            if history.offset:
                given = fresh + self.offsets(past, past + count)
            (dense,) = decoded(history.append(given, self.calls.take(layer, batch, count)))
            assert torch.equal(dense[:, :, past:], given)  # attended at model precision in its own call
            self.check_dense(history, dense[:, :, :past])
        for index, sequence in enumerate(self.sequences):
            new = min(count, self.rows.width - sequence.start)
            sequence.tokens = torch.cat((sequence.tokens, fresh[index, :, count - new :]), dim=1)

    def offsets(self, first, stop):
        """What `ramp` adds to columns ``first ≤ c < stop`` of each row."""
        shifts = [sequence.origin - sequence.start for sequence in self.sequences]
        return torch.stack([ramp(torch.arange(first + shift, stop + shift), None) for shift in shifts])

    def check_dense(self, history, dense):
        if history.offset:
            hidden = [torch.arange(dense.shape[2]) < sequence.start for sequence in self.sequences]
            dense = (dense - self.offsets(0, dense.shape[2])).masked_fill(torch.stack(hidden)[:, None, :, None], 0)
        for index, sequence in enumerate(self.sequences):
            row = dense[index, :, sequence.start :]
            assert row.shape == sequence.tokens.shape
            if dense.shape[2]:
                assert (dense[index, :, : sequence.start] == 0).all()
            if history.codec.lossless:
                assert torch.equal(row, sequence.tokens)
            else:
                sealed = self.rows.rows[index].sealed
                slack = 1e-4 if history.offset else 0  # float32 of the tokens with the offset on them
                for part in (slice(sealed, None), slice(SINKS)):
                    torch.testing.assert_close(row[:, part], sequence.tokens[:, part], rtol=0, atol=slack)
                assert (row - sequence.tokens).abs().max() < 0.05 if row.numel() else True

    @rule(count=st.integers(0, 60))
    def crop(self, count):
        self.calls.crop(count)
        for history in self.histories:
            history.crop(self.rows.rows)
        for sequence in self.sequences:
            sequence.start = min(sequence.start, self.rows.width)
            sequence.tokens = sequence.tokens[:, : self.rows.width - sequence.start]
            if not sequence.tokens.shape[1]:
                sequence.origin = 0  # it begins anew, with positions nobody tells
            for position in [p for p in sequence.sealed if p >= sequence.tokens.shape[1]]:
                del sequence.sealed[position]

    @rule(data=st.data())
    def select(self, data):
        last = len(self.sequences) - 1
        indices = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=4))
        self.rows.select(indices)
        for history in self.histories:
            history.select(indices)
        self.sequences = [self.sequences[index].copy() for index in indices]

    @rule()
    def copy_and_go_on_with_the_copy(self):
        self.kept.append(self.rows)
        self.rows = self.rows.fork()
        self.calls = self.calls.fork(self.rows)
        self.histories = [history.fork() for history in self.histories]

    @precondition(lambda self: self.kept)
    @rule()
    def drop_the_oldest_copy(self):
        self.kept.pop(0)

    @invariant()
    def sealed_tokens_never_change(self):
        if not hasattr(self, "rows") or not self.rows.width:
            return
        view = self.rows.view()
        lossy = torch.cat([history.dense(view) for history in self.histories[1:]], dim=1)
        assert torch.equal(self.histories[0].dense(view), self.expected())
        for index, (row, sequence) in enumerate(zip(self.rows.rows, self.sequences, strict=True)):
            for first, stop in pairwise([0, *row.ends]):
                if first not in sequence.sealed:
                    encoded_once(self.histories[1].codec, sequence, first, stop)
                elif stop - 1 not in sequence.sealed:
                    raise AssertionError(f"tokens {first}-{stop} are sealed as one, but were not at once")
            for position in range(row.sealed):
                value = lossy[index, :, sequence.start + position]
                plain, with_offset = value[:HEADS], value[HEADS:]
                expected, kept = sequence.sealed[position]
                assert torch.equal(plain, expected)
                assert torch.equal(with_offset, kept if kept is not None else with_offset)
                sequence.sealed[position] = expected, with_offset.clone()

    def expected(self):
        out = torch.zeros(len(self.sequences), HEADS, self.rows.width, DIM)
        for index, sequence in enumerate(self.sequences):
            out[index, :, sequence.start :] = sequence.tokens
        return out

    @invariant()
    def tails_are_bounded_and_blocks_are_counted(self):
        if not hasattr(self, "rows"):
            return
        counted: dict[int, int] = {}
        for rows in [self.rows, *self.kept]:
            for row in rows.rows:
                for slot in row.slots:
                    counted[slot] = counted.get(slot, 0) + 1
        assert self.pool.live == len(counted)
        assert all(self.pool.references(slot) == count for slot, count in counted.items())
        for row, sequence in zip(self.rows.rows, self.sequences, strict=True):
            assert row.length == sequence.tokens.shape[1]
            assert row.length - row.sealed <= RECENT + BLOCK - 1
            assert row.ends == sorted(set(row.ends))
        for history in self.histories:
            assert [tail.tokens.shape[1] for tail in history.tails] == [r.length - r.sealed for r in self.rows.rows]


TestHistory = HistoryMachine.TestCase
TestHistory.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


@pytest.fixture
def parts():
    pool = SlotPool()
    rows = Rows(pool, BLOCK, RECENT)
    return rows, Calls(rows), One(Affine(8, "channel", 8), pool, BLOCK, SINKS)


def test_blocks_start_at_the_first_real_token(parts):
    rows, calls, history = parts
    x = torch.randn(1, HEADS, 40, DIM)
    calls.announce(45, None, torch.tensor([[0] * 5 + [1] * 40]), None)
    padded = torch.cat((torch.full((1, HEADS, 5, DIM), 1e9), x), dim=2)
    history.append(padded, calls.take(0, 1, 45))
    alone_rows = Rows(SlotPool(), BLOCK, RECENT)
    alone = One(history.codec, alone_rows.pool, BLOCK, SINKS)
    alone.append(x, Calls(alone_rows).take(0, 1, 40))
    assert rows.rows[0].ends == alone_rows.rows[0].ends == [8, 16, 24, 32]
    assert torch.equal(history.dense(rows.view())[:, :, 5:], alone.dense(alone_rows.view()))


def test_sinks_do_not_widen_the_range_of_the_codes(parts):
    rows, calls, history = parts
    x = torch.randn(1, HEADS, 20, DIM)
    x[:, :, :SINKS] = 1000.0
    history.append(x, calls.take(0, 1, 20))
    decoded = history.dense(rows.view())
    assert torch.equal(decoded[:, :, :SINKS], x[:, :, :SINKS])
    assert (decoded - x).abs().max() < 0.05


def test_a_pass_that_stops_between_layers_is_found(parts):
    rows, calls, history = parts
    other = One(history.codec, rows.pool, BLOCK, SINKS)
    x = torch.randn(1, HEADS, 4, DIM)
    for layer, part in enumerate((history, other)):
        part.append(x, calls.take(layer, 1, 4))
    history.append(x, calls.take(0, 1, 4))  # … and the pass dies before layer 1
    with pytest.raises(CacheStateError, match="stopped after 1 of 2 layers"):
        calls.take(0, 1, 4)
    with pytest.raises(CacheStateError, match="stopped after 1 of 2 layers"):
        calls.settle()


def test_a_first_pass_that_stops_between_layers_is_found(parts):
    _, calls, _ = parts
    calls.take(0, 1, 4)
    calls.take(0, 1, 4)
    with pytest.raises(CacheStateError, match="layer 1 holds 0 columns"):
        calls.take(1, 1, 4)


def test_an_announced_call_that_never_runs_leaves_no_trace(parts):
    rows, calls, history = parts
    calls.announce(9, None, torch.ones(3, 9), None)
    calls.announce(4, None, torch.ones(1, 4), None)
    history.append(torch.randn(1, HEADS, 4, DIM), calls.take(0, 1, 4))
    assert [row.length for row in rows.rows] == [4]


def test_another_batch_or_shape_is_refused(parts):
    _, calls, history = parts
    history.append(torch.randn(2, HEADS, 4, DIM), calls.take(0, 2, 4))
    with pytest.raises(CacheStateError, match="a batch of 3 rows, but the cache holds 2 rows"):
        calls.take(0, 3, 4)
    with pytest.raises(CacheStateError, match="3 heads × 8 in torch.float32, but the cache holds 2 heads"):
        history.check(torch.randn(2, 3, 4, DIM))


def test_slots_are_shared_contiguously_and_reused():
    pool = SlotPool()
    first = pool.allocate(31)
    assert [len(run) for run in pool.runs(first)] == [31]  # a prompt's blocks lie in one run
    second = pool.allocate(2)
    assert len(pool.runs([*first, *second])) == 2
    pool.release(first[3:5])
    assert pool.live == 31
    assert set(pool.allocate(4)) >= set(first[3:5])
    assert pool.references(first[3]) == 1


@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 13, 14, 33])
def test_any_count_of_tokens_in_any_strides(tokens):
    base = torch.randn(2, 2 * tokens, HEADS, DIM)
    views = {
        "transposed": base[:, :tokens].transpose(1, 2),  # how models hand states over
        "strided": base.transpose(1, 2)[:, :, ::2],
        "expanded": torch.randn(1, HEADS, tokens, DIM).expand(2, -1, -1, -1),
    }
    for name, view in views.items():
        held = []
        for fresh in (view, view.clone(memory_format=torch.contiguous_format)):
            rows = Rows(SlotPool(), BLOCK, RECENT)
            history = One(Affine(4, "channel", 8), rows.pool, BLOCK, SINKS)
            (dense,) = decoded(history.append(fresh, Calls(rows).take(0, 2, tokens)))
            assert dense.shape == (2, HEADS, tokens, DIM), name
            held.append(history.dense(rows.view()))
        assert torch.equal(*held), name
        assert [row.length for row in rows.rows] == [tokens, tokens]


def test_threads_that_share_an_arena_keep_what_they_wrote():
    """New slabs and float32 parameters, which replace a slab, at every turn."""
    pool = SlotPool()
    layout = {"x": ((4,), torch.float16)}
    arena = Arena(pool, Record.of(layout, layout), torch.device("cpu"))

    def work(number):
        written = {}
        for turn in range(60):
            slots = pool.allocate(1 + turn % 3)
            value = float(100 * number + turn)
            dtype = torch.float32 if turn % 7 == 6 else torch.float16
            fields = {"x": torch.full((len(slots), 4), value, dtype=dtype)}
            arena.fill(pool.runs(slots), [lambda place, fields=fields: fields] * 2)
            written |= dict.fromkeys(slots, value)
            if turn % 5 == 4:
                pool.release([slot := slots[0]])
                del written[slot]
        return written

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as executor:
            parts = list(executor.map(work, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert sum(map(len, parts)) == pool.live == len({slot for part in parts for slot in part})
    for part in parts:
        for slot, value in part.items():
            (run,) = pool.runs([slot])
            assert all((fields["x"] == value).all() for fields in arena.read(run))


@pytest.mark.parametrize("heads", [1, 2])
def test_sinks_set_aside_are_still_seen_by_the_call_that_seals_them(heads):
    """With one head, blocks cut from a tail are views of it unless copied."""
    rows = Rows(SlotPool(), BLOCK, RECENT)
    calls, history = Calls(rows), One(Affine(4, "channel", 8), rows.pool, BLOCK, SINKS)
    x = torch.randn(1, heads, 5 + 40, DIM)
    history.append(x[:, :, :5], calls.take(0, 1, 5))
    (seen,) = decoded(history.append(x[:, :, 5:], calls.take(0, 1, 40)))
    assert rows.rows[0].sealed
    assert torch.equal(seen, x)
