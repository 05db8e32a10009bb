"""A tiered store against a plain dict: whatever is done to it in whatever order, what it serves is what was put."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvquant.blocks import BlockKey
from kvquant.errors import StoreError, StoreFullError
from kvquant.store.placement import SHRINKABLE
from kvquant.store.residency import residency_names
from kvquant.store.tiered import BUFFERS, TieredStore
from kvquant.testing import payload_of
from tests.store.streams import Inline

UNIT = 128
LAYERS = 2
SEQUENCES = (0, 1)
FULL = 2 * UNIT  # of a block that can shrink, to half of that

KEYS = [b"key %d" % n for n in range(8)] + [BlockKey(9, layer, block) for layer in range(2) for block in range(3)]
keys = st.sampled_from(KEYS)
sizes = st.sampled_from([1, 64, UNIT - 1, UNIT, FULL, 3 * UNIT])
budgets = st.sampled_from([None, 2 * UNIT, 5 * UNIT, 12 * UNIT])
sequences = st.sampled_from(SEQUENCES)


def shrink(layer, blocks, payloads):
    return payloads[:, : FULL // 2].contiguous(), 1


class Sequence:
    """A stream, and the blocks that it must have."""

    def __init__(self, store, number, shrinks):
        self.number = number
        self.stream = store.stream(number, range(LAYERS), shrink if shrinks else None)
        self.table: tuple[int, ...] = ()
        self.reading = None  # a generator, its layer, and what it gave last
        self.given = 0

    def verify(self, runs, layer):
        for run in runs:
            for block, row in zip(self.table[run.first :], run.payloads, strict=False):
                whole = payload_of(BlockKey(self.number, layer, block), 1, FULL)
                assert len(row) == (FULL if run.tag == SHRINKABLE else FULL // 2)
                assert row.equal(whole[: len(row)])
        return {run.first + n for run in runs for n in range(len(run.payloads))}


class TieredMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.exit = ExitStack()
        self.version = 0
        self.model: dict = {}
        self.pins: list = []
        self.live: dict[int, Sequence] = {}

    @initialize(
        device=budgets,
        host=budgets,
        disk=budgets,
        residency=st.sampled_from(residency_names()),
        staging=st.sampled_from([BUFFERS * 64, BUFFERS * FULL, 4 * BUFFERS * FULL]),
        overlaps=st.booleans(),
    )
    def open(self, device, host, disk, residency, staging, overlaps):
        if not (device or host or disk):
            host = 5 * UNIT
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        folder = self.exit.enter_context(tempfile.TemporaryDirectory(dir=memory)) if disk else None
        path = None if folder is None else f"{folder}/store"
        self.build = lambda: TieredStore(device, host, disk, path, residency=residency, staging=staging)
        self.overlaps = overlaps
        self.disk = bool(disk)
        self._open()

    def _open(self):
        self.store = self.build()
        self.store.lane.overlaps = self.overlaps

    def _pinned(self):
        return {key for _, found in self.pins for key in found}

    def _unpinned(self, keys):
        """What had these keys is pinned on, but is not found by them any more."""
        self.pins = [(pin, [key for key in found if key not in keys]) for pin, found in self.pins]

    # -- a cache of payloads

    @rule(key=keys, nbytes=sizes)
    def put(self, key, nbytes):
        self.version += 1
        before = set(self.store.keys())
        try:
            self.store.put(key, payload_of(key, self.version, nbytes), tag=self.version % 256)
        except StoreFullError:
            assert set(self.store.keys()) == before
            return
        self.model[key] = self.version, nbytes
        self._unpinned([key])
        assert key in self.store
        self._matches(key)

    @rule(key=keys)
    def get(self, key):
        self._matches(key)

    def _matches(self, key):
        there, payload = key in self.store, self.store.get(key)
        assert there == (payload is not None)
        if payload is None:
            self.model.pop(key, None)
            return
        version, nbytes = self.model[key]
        assert torch.equal(payload, payload_of(key, version, nbytes))
        assert self.store.tag(key) == version % 256

    @rule(keys=st.lists(keys, min_size=1, max_size=3, unique=True), commit=st.booleans())
    def reserve(self, keys, commit):
        try:
            room = self.store.reserve(keys, UNIT, 7)
        except StoreFullError:
            return
        with room:
            if commit:
                self.version += 256 - (self.version - 7) % 256
                for row, key in zip(room.payloads, keys, strict=True):
                    row.copy_(payload_of(key, self.version, UNIT))
                room.commit()
                self.model.update(dict.fromkeys(keys, (self.version, UNIT)))
                self._unpinned(keys)

    @rule(keys=st.lists(keys, max_size=3))
    def delete(self, keys):
        there = [key for key in dict.fromkeys(keys) if key in self.store]
        assert self.store.delete(keys) == len(there)
        assert not any(key in self.store for key in keys)
        self._unpinned(keys)

    @rule()
    def delete_sequence(self):
        there = [key for key in KEYS if isinstance(key, BlockKey) and key in self.store]
        assert self.store.delete_sequence(9) == len(there)
        self._unpinned(there)

    @rule(keys=st.lists(keys, max_size=4, unique=True))
    def pin(self, keys):
        if len(self.pins) < 3:
            pin = self.store.pin(keys)
            self.pins.append((pin, pin.__enter__()))

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 2))
    def unpin(self, which):
        self.pins.pop(which % len(self.pins))[0].__exit__(None, None, None)

    @rule(keys=st.lists(keys, max_size=3))
    def prefetch(self, keys):
        """By this thread: a worker would pin what it reads at moments nobody can foresee."""
        worker = self.store.worker
        self.store.worker = Inline()
        self.store.prefetch(keys)
        self.store.worker = worker

    @rule()
    def flush(self):
        before = set(self.store.keys())
        self.store.flush()
        assert set(self.store.keys()) == before

    @precondition(lambda self: self.disk and not self.pins)
    @rule()
    def reopen(self):
        self._end_all()
        self.store.close()
        self._open()
        assert all(isinstance(key, bytes) for key in self.store.keys())  # noqa: SIM118
        for key in KEYS:
            self._matches(key)

    # -- sequences that are decoded

    @rule(number=sequences, shrinks=st.booleans())
    def begin_sequence(self, number, shrinks):
        if number not in self.live:
            self.live[number] = Sequence(self.store, number, shrinks)

    def _idle(self, number):
        sequence = self.live.get(number)
        return sequence if sequence and sequence.reading is None else None

    @rule(number=sequences, blocks=st.integers(1, 3), exact=st.booleans())
    def seal(self, number, blocks, exact):
        """Some blocks of all layers, or of none."""
        if (sequence := self._idle(number)) is None:
            return
        first = max(sequence.table, default=-1) + 1
        new = range(first, first + blocks)
        for layer in range(LAYERS):
            room = sequence.stream.reserve(layer, new, FULL, SHRINKABLE, spare=True) if exact else None
            tag = SHRINKABLE if room is not None else 1
            if room is None:
                room = sequence.stream.reserve(layer, new, FULL // 2, 1)
            if room is None:
                self.store.drop_blocks(number, range(LAYERS), new)
                return
            with room:
                for row, block in zip(room.payloads, new, strict=True):
                    row.copy_(payload_of(BlockKey(number, layer, block), 1, FULL)[: len(row)])
                room.commit()
            assert self.store.tag(BlockKey(number, layer, first)) == tag
        sequence.table = (*sequence.table, *new)

    @rule(number=sequences)
    def read_all(self, number):
        if (sequence := self._idle(number)) is None:
            return
        sequence.stream.begin(sequence.table)
        for layer in range(LAYERS):
            seen = set()
            for runs in sequence.stream.read(layer, sequence.table).runs():
                seen |= sequence.verify(runs, layer)
            assert seen == set(range(len(sequence.table)))

    @rule(number=sequences, layer=st.integers(0, LAYERS - 1))
    def begin_reading(self, number, layer):
        if (sequence := self._idle(number)) is None or not sequence.table:
            return
        sequence.stream.begin(sequence.table)
        for earlier in range(layer):
            for runs in sequence.stream.read(earlier, sequence.table).runs():
                sequence.verify(runs, earlier)
        sequence.reading = sequence.stream.read(layer, sequence.table).runs(), layer, ()

    @rule(number=sequences, give_up=st.booleans())
    def go_on_reading(self, number, give_up):
        sequence = self.live.get(number)
        if sequence is None or sequence.reading is None:
            return
        generator, layer, last = sequence.reading
        sequence.verify(last, layer)  # it was good until now
        if give_up:
            generator.close()
            runs = None
        else:
            runs = next(generator, None)
        sequence.reading = None if runs is None else (generator, layer, runs)

    @rule(number=sequences, data=st.data())
    def drop(self, number, data):
        if (sequence := self._idle(number)) is None or not sequence.table:
            return
        gone = data.draw(st.sets(st.sampled_from(sequence.table), max_size=3))
        sequence.table = tuple(block for block in sequence.table if block not in gone)
        self.store.drop_blocks(number, range(LAYERS), list(gone))

    @rule(number=sequences)
    def end_sequence(self, number):
        sequence = self.live.pop(number, None)
        if sequence is not None:
            sequence.stream.close()
            if sequence.reading is not None:
                sequence.reading[0].close()
            assert not any(isinstance(key, BlockKey) and key.sequence == number for key in self.store.keys())  # noqa: SIM118

    def _end_all(self):
        for number in list(self.live):
            self.end_sequence(number)

    # -- always

    @invariant()
    def sound(self):
        if not hasattr(self, "store"):
            return
        assert self.store.check() == []
        stats = self.store.stats()
        assert all(0 <= tier.used <= tier.budget for tier in stats.tiers), stats
        there = set(self.store.keys())
        assert self._pinned() <= there
        assert {key for key in there if key in KEYS} <= set(self.model)
        for number, sequence in self.live.items():
            blocks = {BlockKey(number, layer, block) for layer in range(LAYERS) for block in sequence.table}
            assert blocks == {key for key in there if isinstance(key, BlockKey) and key.sequence == number}
        assert stats.faults == {}

    def teardown(self):
        with self.exit:
            self._teardown()

    def _teardown(self):
        if hasattr(self, "store"):
            for pin, _ in self.pins:
                pin.__exit__(None, None, None)
            self._end_all()
            assert self.store.stats().pinned == 0
            assert self.store.check() == []
            assert self.store.ring.made == len(self.store.ring.free)
            self.store.close()
            with pytest.raises(StoreError):
                self.store.keys()


TieredMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("KVQUANT_MACHINE", "60")),
    stateful_step_count=40,
    derandomize=True,
    report_multiple_bugs=False,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestTieredMachine = TieredMachine.TestCase
