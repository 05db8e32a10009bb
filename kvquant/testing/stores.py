"""What every store owes its users, as tests; see `kvquant.store.base` for the promises.

    class TestMyStore(StoreContract):
        def make(self, payloads):
            return MyStore(budget=payloads * self.nbytes)

        def reopen(self, store):  # only where what has a key of bytes outlives the store
            store.close()
            return MyStore(…)

Whatever a test did, in the end `BlockStore.check` finds nothing, nothing is pinned, and no tier is over its budget.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import torch

from ..blocks import BlockKey
from ..errors import StoreFullError
from ..store.base import BlockStore, Key
from .store_case import payload_of, refused, version_of
from .store_puts import PutContract

_THREADS, _STEPS = 8, 40
_PATIENCE = 30.0  # seconds until a thread that does not end has failed


class StoreContract(PutContract):
    """Subclass it, define `make`, and let pytest collect it."""

    # -- who leaves ------------------------------------------------------------------------------------------------

    def test_exactly_as_many_leave_as_it_takes(self) -> None:
        """Of a full store, one for one; and the rest is unharmed."""
        store = self.store()
        old = self.names(self.room)
        self.put(store, *old)
        kept = set(old)
        for number, count in enumerate((1, 2, 1)):
            new = self.names(count, 100 + 10 * number)
            with store.reserve(new, self.nbytes, tag=1) as reservation:
                reservation.payloads.copy_(torch.stack([payload_of(key, 1, self.nbytes) for key in new]))
                reservation.commit()
            self.sound(store)
            assert set(new) <= set(store.keys())
            assert len(store) == self.room
            kept = {key for key in store.keys() if key in kept} | set(new)  # noqa: SIM118
            assert kept == set(store.keys())
        assert all(self.holds(store, key) for key in kept)

    def test_the_least_recently_used_leaves(self) -> None:
        """Room for two: put a, b; get a; put c, and b goes; overwrite c, and nothing does."""
        store = self.store(2)
        self.put(store, b"a", b"b")
        assert self.holds(store, b"a")
        self.put(store, b"c")
        assert len(store) == 2
        assert b"c" in store
        assert not self.ordered or set(store.keys()) == {b"a", b"c"}
        self.put(store, b"c", version=2)
        assert len(store) == 2
        assert self.holds(store, b"c", 2)

    def test_what_fits_in_no_tier_is_refused_and_nothing_leaves(self) -> None:
        """A payload larger than the store, or more at once than it holds."""
        store = self.store()
        keys = self.names(self.room)
        self.put(store, *keys)
        large = torch.zeros(self.room * self.nbytes + 64, dtype=torch.uint8)
        for call in (
            lambda: store.put(b"large", large),
            lambda: store.put(keys[0], large),
            lambda: store.reserve([b"large"], len(large)),
            lambda: store.reserve([b"large"], 1 << 40),
            lambda: store.reserve(self.names(self.room + 1, 50), self.nbytes),
            lambda: store.reserve([*keys, b"large"], self.nbytes),
        ):
            with refused(StoreFullError):
                call()
            self.sound(store)
            assert set(store.keys()) == set(keys)
        assert all(self.holds(store, key) for key in keys)

    def test_room_in_pieces(self) -> None:
        """Small payloads leave for a large one, wherever they lie."""
        store, draw = self.store(), random.Random(2)
        small = [b"small %d" % n for n in range(self.room * self.nbytes // 64)]
        for key in small:
            store.put(key, payload_of(key, 1, 64))
        for key in draw.sample(small, len(small)):
            store.get(key)
        self.put(store, b"large")
        assert self.holds(store, b"large")
        assert len(store) >= len(small) // 4

    def test_many_lookups_of_what_is_not_there(self) -> None:
        """10 000 misses take nothing."""
        store = self.store()
        self.put(store, b"a")
        before = store.stats()
        for n in range(5000):
            assert store.get(b"absent %d" % n) is None
            assert store.get(BlockKey(n, n, n)) is None
            assert BlockKey(n, 0, 0) not in store
            assert store.tag(b"absent") is None
        store.prefetch([b"absent", BlockKey(0, 0, 0)])
        after = store.stats()
        assert after.misses == before.misses + 10_000
        assert (after.used, after.pinned, after.hits) == (before.used, 0, before.hits)
        assert store.keys() == [b"a"]

    # -- pins ------------------------------------------------------------------------------------------------------

    def test_what_is_pinned_stays(self) -> None:
        """Whatever is put; and pins are counted."""
        store = self.store()
        keys = self.names(self.room)
        self.put(store, *keys)
        with store.pin([*keys[:2], b"absent"]) as pinned, store.pin(keys[:1]):
            assert pinned == keys[:2]
            assert store.stats().pinned == 2
            for n in range(3 * self.room):
                self.put(store, b"other %d" % n)
                assert keys[0] in store
                assert keys[1] in store
            with store.pin(keys[:2]):
                pass
            assert store.stats().pinned == 2
            assert all(self.holds(store, key) for key in keys[:2])
        assert store.stats().pinned == 0
        for n in range(3 * self.room):
            self.put(store, b"more %d" % n)
        assert len(store) == self.room

    def test_a_put_that_pins_forbid_is_refused_at_once(self) -> None:
        """And nothing leaves for it."""
        store = self.store()
        keys = self.names(self.room)
        self.put(store, *keys)
        with store.pin(keys):
            for call in (lambda: self.put(store, b"new"), lambda: store.reserve([b"new", b"newer"], self.nbytes)):
                with refused(StoreFullError):
                    call()
                self.sound(store)
                assert set(store.keys()) == set(keys)
        with store.pin(keys[1:]):
            with refused(StoreFullError):
                store.reserve([b"new", b"newer"], self.nbytes)
            assert set(store.keys()) == set(keys)
            self.put(store, b"new")
            assert set(store.keys()) == {*keys[1:], b"new"}
        assert store.stats().pinned == 0
        self.put(store, b"newer")
        assert self.holds(store, b"newer")

    def test_deleting_and_overwriting_what_is_pinned(self) -> None:
        """It is not found any more, and its room follows with the pin."""
        store = self.store()
        self.put(store, b"a", b"b")
        with store.pin([b"a", b"b"]):
            assert store.delete([b"a"]) == 1
            assert not self.holds(store, b"a")
            assert store.delete([b"a"]) == 0
            self.put(store, b"b", version=2)
            assert self.holds(store, b"b", 2)
            self.put(store, b"a", version=3)
            assert self.holds(store, b"a", 3)
        assert store.stats().pinned == 0
        assert store.stats().used <= 2 * (-(-self.nbytes // 64) * 64)
        assert self.holds(store, b"a", 3)
        assert self.holds(store, b"b", 2)

    def test_an_exception_ends_a_pin(self) -> None:
        """As the end of ``with`` does."""
        store = self.store()
        self.put(store, b"a")
        try:
            with store.pin([b"a"]):
                raise KeyError
        except KeyError:
            pass
        assert store.stats().pinned == 0

    # -- forgetting ------------------------------------------------------------------------------------------------

    def test_what_is_deleted_is_gone(self) -> None:
        """Its room too."""
        store = self.store()
        keys = self.names(self.room)
        self.put(store, *keys)
        assert store.delete([keys[0], b"absent", keys[1], keys[0]]) == 2
        assert set(store.keys()) == set(keys[2:])
        assert not self.holds(store, keys[0])
        assert store.delete([]) == 0
        assert store.delete(iter(keys)) == len(keys) - 2
        assert len(store) == 0
        assert store.stats().used == 0

    def test_a_sequence_is_deleted(self) -> None:
        """Its blocks, and nothing else."""
        store = self.store()
        mine = [BlockKey(7, layer, block) for layer in range(2) for block in range(2)]
        others: Sequence[Key] = [BlockKey(8, 0, 0), BlockKey(0, 7, 7), b"7", BlockKey(7, 0, 0).to_bytes()]
        self.put(store, *mine, *others)
        assert store.delete_sequence(7) == 4
        assert store.delete_sequence(7) == 0
        assert set(store.keys()) == set(others)
        assert all(self.holds(store, key) for key in others)

    # -- the end, and another beginning ----------------------------------------------------------------------------

    def test_a_closed_store_refuses(self) -> None:
        """All but closing it again, and giving back."""
        store = self.make(self.room)
        self.put(store, b"a")
        reservation, pin = store.reserve([b"b"], self.nbytes), store.pin([b"a"])
        pin.__enter__()
        store.close()
        store.close()
        calls: list[Callable[[], object]] = [
            lambda: store.put(b"a", payload_of(b"a", 1, self.nbytes)),
            lambda: store.reserve([b"c"], self.nbytes),
            lambda: store.get(b"a"),
            lambda: store.tag(b"a"),
            lambda: store.prefetch([b"a"]),
            lambda: store.pin([b"a"]).__enter__(),
            lambda: store.delete([b"a"]),
            lambda: store.delete_sequence(1),
            lambda: b"a" in store,
            lambda: len(store),
            store.keys,
            store.stats,
            store.check,
            store.flush,
            reservation.commit,
        ]
        for call in calls:
            with refused():
                call()
        reservation.abort()
        pin.__exit__(None, None, None)

    def test_what_has_a_key_of_bytes_is_there_when_the_store_is_opened_again(self) -> None:
        """Where anything is."""
        store = self.store()
        keys = [key for key in self.names(3) if isinstance(key, bytes)]
        self.put(store, *self.names(3))
        store.flush()
        self.__dict__["opened"].remove(store)
        again = self.reopen(store)
        if again is None:
            again = self._watched(self.make(self.room))
            assert len(again) == 0
            return
        self._watched(again)
        self.sound(again)
        assert {key for key in again.keys() if isinstance(key, bytes)} == set(keys)  # noqa: SIM118
        assert all(self.holds(again, key) for key in keys)

    # -- all of it together ----------------------------------------------------------------------------------------

    def test_a_walk_of_many_steps(self) -> None:
        """Puts of many sizes, gets, deletes and pins: whatever is served is what was put."""
        store, draw = self.store(), random.Random(1)
        latest: dict[Key, tuple[int, int]] = {}
        keys = self.names(2 * self.room)
        for step in range(300):
            key, choice = draw.choice(keys), draw.random()
            if choice < 0.5:
                nbytes = draw.choice((64, self.nbytes // 2, self.nbytes, self.nbytes))
                with store.pin(draw.sample(keys, 2)) as pinned:
                    try:
                        self.put(store, key, version=step % 256, nbytes=nbytes)
                        latest[key] = step % 256, nbytes
                    except StoreFullError:
                        pass
                    assert all(other in store for other in pinned)
            elif choice < 0.9:
                if key in latest:
                    self.holds(store, key, *latest[key])
                else:
                    assert store.get(key) is None
            else:
                assert store.delete([key]) in (0, 1)
                latest.pop(key, None)
            self.sound(store)
        assert store.stats().hits > 20

    def test_many_threads(self) -> None:
        """Every get gives bytes of its key."""
        store = self.store(2 * self.room)
        keys, wrong = self.names(3 * self.room), []

        def use(thread: int) -> None:
            draw = random.Random(thread)
            try:
                for step in range(_STEPS):
                    key = draw.choice(keys)
                    if draw.random() < 0.5:
                        try:
                            store.put(key, payload_of(key, 1 + thread * _STEPS + step, self.nbytes))
                        except StoreFullError:  # the others pin what they read
                            continue
                    elif (got := store.get(key)) is not None:
                        assert 0 < version_of(key, got) <= _THREADS * _STEPS
                    if step % 10 == 0:
                        store.delete([draw.choice(keys)])
                        self.sound_tiers(store)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=use, args=(n,), daemon=True) for n in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_PATIENCE)
            assert not thread.is_alive(), "a thread hangs"
        assert wrong == []
        self.sound(store)

    @staticmethod
    def sound_tiers(store: BlockStore) -> None:
        """The part of `sound` that holds while others work."""
        assert all(0 <= tier.used <= tier.budget for tier in store.stats().tiers)
