"""What the tests of stores are made of: payloads that tell whose they are, and a store that is checked in the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..blocks import BlockKey
from ..errors import StoreError
from ..store.base import BlockStore, Key, key_bytes


def payload_of(key: Key, version: int, nbytes: int) -> Tensor:
    """Bytes that only this version of this key has; its first eight, if there are as many, are the version."""
    seed = xxhash.xxh3_64_intdigest(key_bytes(key), seed=version)
    words = np.arange(1, nbytes // 8 + 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    words[0] = version
    return torch.from_numpy(words.view(np.uint8)[:nbytes].copy())


def version_of(key: Key, payload: Tensor) -> int:
    """Which version a payload is; fails unless every byte of it is that version's of that key."""
    version = int.from_bytes(payload[:8].cpu().numpy().tobytes(), "little")
    assert torch.equal(payload.cpu(), payload_of(key, version, len(payload))), f"wrong bytes under {key!r}"
    return version


@contextmanager
def refused(kind: type[StoreError] = StoreError) -> Iterator[None]:
    """Fails unless an error of this kind is raised, with a message of one line."""
    message = None
    try:
        yield
    except kind as error:
        message = str(error)
    assert message is not None, f"nothing was raised, not {kind.__name__}"
    assert "\n" not in message


class StoreCase:
    """What a store is tried with.

    ``nbytes`` is a payload's size, ``room`` how many the stores hold that most tests ask for. ``ordered``: of
    payloads none of which is needed more than the others, the least recently used leaves first.
    """

    nbytes = 640
    room = 8
    ordered = True

    def make(self, payloads: int) -> BlockStore:
        """An empty store whose tiers together hold ``payloads`` of ``nbytes``, and no more. Called once a test."""
        raise NotImplementedError

    def reopen(self, store: BlockStore) -> BlockStore | None:
        """Close a store and open it again; None where nothing outlives it."""
        return None

    def teardown_method(self) -> None:
        """Every store is sound in the end."""
        for store in self.__dict__.pop("opened", []):
            self.sound(store)
            assert store.check() == []
            assert store.stats().pinned == 0
            store.close()

    def store(self, payloads: int | None = None) -> BlockStore:
        """A new store, that is checked in the end."""
        return self._watched(self.make(self.room if payloads is None else payloads))

    def _watched(self, store: BlockStore) -> BlockStore:
        self.__dict__.setdefault("opened", []).append(store)
        return store

    def put(self, store: BlockStore, *keys: Key, version: int = 1, nbytes: int | None = None) -> None:
        """Store a version of each key, which is its tag too."""
        for key in keys:
            store.put(key, payload_of(key, version, nbytes or self.nbytes), tag=version)
            self.sound(store)

    def holds(self, store: BlockStore, key: Key, version: int = 1, nbytes: int | None = None) -> bool:
        """Whether a key can be got; fails if it has other bytes than that version's, or another tag."""
        assert (key in store) == (store.tag(key) is not None)
        there, payload = key in store, store.get(key)
        assert there == (payload is not None)
        if payload is None:
            return False
        assert payload.dtype == torch.uint8
        assert payload.device.type == "cpu"
        assert torch.equal(payload, payload_of(key, version, nbytes or self.nbytes)), f"wrong bytes under {key!r}"
        assert store.tag(key) == version
        return True

    @staticmethod
    def sound(store: BlockStore) -> None:
        """Fails if a tier is over its budget, or what is listed is not what is found."""
        stats = store.stats()
        for tier in stats.tiers:
            assert 0 <= tier.used <= tier.budget, tier
            assert tier.payloads >= 0, tier
        keys = store.keys()
        assert len(keys) == len(set(map(key_bytes, keys))) == len(store)
        assert all(key in store for key in keys)

    @staticmethod
    def names(count: int, first: int = 0) -> list[Key]:
        """Keys of either kind."""
        return [BlockKey(1, 2, n) if n % 3 == 2 else b"key %d" % n for n in range(first, first + count)]
