"""What a store owes whoever puts: the two phases, copies, and a refusal of all that is no key or no payload."""

from __future__ import annotations

from typing import Any

import torch

from ..blocks import BlockKey
from ..store.base import MAX_KEY, BlockStore, Key, key_bytes
from .store_case import StoreCase, payload_of, refused, version_of


class PutContract(StoreCase):
    """A part of `StoreContract`."""

    def test_it_has_all_methods(self) -> None:
        """It is a `BlockStore`."""
        assert isinstance(self.store(), BlockStore)

    def test_nothing_is_seen_before_the_commit(self) -> None:
        """Then all of it is, at once."""
        store = self.store()
        keys = self.names(3)
        with store.reserve(keys, self.nbytes, tag=4) as reservation:
            assert reservation.payloads.shape == (3, self.nbytes)
            assert reservation.payloads.dtype == torch.uint8
            reservation.payloads.copy_(torch.stack([payload_of(key, 4, self.nbytes) for key in keys]))
            assert not any(self.holds(store, key) for key in keys)
            assert store.keys() == []
            assert len(store) == 0
            reservation.commit()
            assert all(self.holds(store, key, 4) for key in keys)
        assert all(self.holds(store, key, 4) for key in keys)
        assert set(store.keys()) == set(keys)
        assert store.stats().puts == 3

    def test_what_is_given_back_leaves_no_trace(self) -> None:
        """By `abort`, by the end of ``with``, or by an exception there."""
        store = self.store()
        for _ in range(3 * self.room):  # more often than there is room for
            reservation = store.reserve([b"a", b"b"], self.nbytes)
            reservation.abort()
            reservation.abort()
            with store.reserve([b"a", b"b"], self.nbytes):
                pass
            try:
                with store.reserve([b"a", b"b"], self.nbytes):
                    raise KeyError
            except KeyError:
                pass
        assert store.keys() == []
        assert store.stats().used == 0
        with refused():
            reservation.commit()

    def test_a_commit_is_made_once(self) -> None:
        """Another is refused, and an abort afterwards does nothing."""
        store = self.store()
        with store.reserve([b"a"], self.nbytes, tag=1) as reservation:
            reservation.payloads[0].copy_(payload_of(b"a", 1, self.nbytes))
            reservation.commit()
            with refused():
                reservation.commit()
            reservation.abort()
        assert self.holds(store, b"a")

    def test_what_was_put_is_a_copy(self) -> None:
        """So is what is got."""
        store = self.store()
        for key in self.names(self.room):
            payload = payload_of(key, 1, self.nbytes)
            store.put(key, payload, tag=1)
            payload.zero_()
            for _ in range(2):
                got = store.get(key)
                assert got is not None
                assert version_of(key, got) == 1
                got.zero_()

    def test_payloads_of_any_size_and_stride(self) -> None:
        """From one byte on."""
        store = self.store()
        wide = torch.arange(4 * self.nbytes, dtype=torch.int32).to(torch.uint8).view(-1, 2)
        for nbytes in (1, 2, 63, 64, 65, self.nbytes - 1, self.nbytes):
            store.put(b"a", wide[:nbytes, 1], tag=nbytes % 256)
            got = store.get(b"a")
            assert got is not None
            assert torch.equal(got, wide[:nbytes, 1])
            assert store.tag(b"a") == nbytes % 256

    def test_the_two_kinds_of_keys_are_apart(self) -> None:
        """Also where they have the same bytes."""
        store = self.store()
        block = BlockKey(1, 2, 3)
        keys: list[Key] = [
            block,
            block.to_bytes(),
            key_bytes(block),
            BlockKey(1, 3, 2),
            bytes(1),
            bytes(2),
            bytes(MAX_KEY),
        ]
        for version, key in enumerate(keys):
            self.put(store, key, version=version)
        for version, key in enumerate(keys):
            assert self.holds(store, key, version)
        assert set(map(key_bytes, store.keys())) == set(map(key_bytes, keys))

    def test_overwriting_evicts_nothing_and_counts_once(self) -> None:
        """However full the store is."""
        store = self.store()
        keys = self.names(self.room)
        self.put(store, *keys)
        used = store.stats().used
        for version in (2, 3):
            for key in keys:
                self.put(store, key, version=version)
                assert len(store) == len(keys)
                assert store.stats().used == used
        assert all(self.holds(store, key, 3) for key in keys)

    def test_an_overwritten_payload_is_there_until_the_commit(self) -> None:
        """If there is room for both."""
        store = self.store()
        self.put(store, b"a")
        with store.reserve([b"a"], self.nbytes, tag=2) as reservation:
            assert self.holds(store, b"a")
        assert self.holds(store, b"a")
        with store.reserve([b"a"], self.nbytes, tag=2) as reservation:
            reservation.payloads[0].copy_(payload_of(b"a", 2, self.nbytes))
            reservation.commit()
        assert self.holds(store, b"a", 2)
        assert store.stats().used <= -(-self.nbytes // 64) * 64

    def test_what_is_no_key_is_refused(self) -> None:
        """By every call."""
        store = self.store()
        payload = payload_of(b"a", 1, self.nbytes)
        for key in self.hostile_keys():
            for call in (
                lambda key=key: store.put(key, payload),
                lambda key=key: store.reserve([key], self.nbytes),
                lambda key=key: store.get(key),
                lambda key=key: store.tag(key),
                lambda key=key: key in store,
                lambda key=key: store.delete([key]),
                lambda key=key: store.pin([key]).__enter__(),
            ):
                with refused():
                    call()
        assert store.stats().used == 0

    @staticmethod
    def hostile_keys() -> list[Any]:
        """What is none."""
        return [b"", bytes(MAX_KEY + 1), "a", "../x", 1, None, (1, 2, 3), 1.5]

    def test_what_is_no_payload_is_refused(self) -> None:
        """And leaves no trace."""
        store = self.store()
        one: Any = payload_of(b"a", 1, self.nbytes)
        for call in (
            lambda: store.put(b"a", one.float()),
            lambda: store.put(b"a", one.to(torch.int8)),
            lambda: store.put(b"a", one[None]),
            lambda: store.put(b"a", one[0]),
            lambda: store.put(b"a", one[:0]),
            lambda: store.put(b"a", one.tolist()),
            lambda: store.put(b"a", one, tag=-1),
            lambda: store.put(b"a", one, tag=256),
            lambda: store.put(b"a", one, tag="1"),  # type: ignore[arg-type]
            lambda: store.reserve([b"a"], 0),
            lambda: store.reserve([b"a"], -1),
            lambda: store.reserve([b"a"], 1.5),  # type: ignore[arg-type]
            lambda: store.reserve([b"a", b"a"], self.nbytes),
        ):
            with refused():
                call()
        assert store.stats().used == 0
        assert len(store) == 0
