"""`ChunkStore`: chunks under an engine's own keys, encoded, in a store of host and disk within budgets."""

from __future__ import annotations

import hashlib
import json
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields

from torch import Tensor

from ..errors import CodecError, FormatError, KVQuantError, KVQuantWarning, StoreError
from ..store.base import StoreStats
from ..store.tiered import TieredStore
from .chunks import ChunkCodec, ChunkShape

_NO_STORE = StoreStats(())


@dataclass(frozen=True)
class ChunkStats:
    """What was done with chunks, and ``store``, what the store below has done.

    ``raw_bytes`` are those of stored chunks before they were encoded, ``stored_bytes`` after. ``refused`` were not
    stored: there was no room, values were not finite, or a warning says why. ``damaged`` were found, but not as they
    were written, and count as ``misses`` too.
    """

    stored: int = 0
    restored: int = 0
    misses: int = 0
    damaged: int = 0
    refused: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    store: StoreStats = _NO_STORE

    def __str__(self) -> str:
        share = f" ({self.stored_bytes / self.raw_bytes:.3f})" if self.raw_bytes else ""
        return (
            f"{self.stored} chunks stored: {self.raw_bytes} bytes in {self.stored_bytes}{share}; {self.restored} "
            f"restored, {self.misses} misses, {self.damaged} damaged, {self.refused} refused; {self.store}"
        )


class ChunkStore:
    """Holds chunks that ``codec`` encodes. All methods may be called from any thread; no fault below is an error.

    ``identity`` is all that decides a chunk's meaning beside the engine's key, as text: change any of it, or the
    policy, and every key misses.
    """

    def __init__(self, store: TieredStore, codec: ChunkCodec, identity: Mapping[str, str | int]) -> None:
        self.store, self.codec = store, codec
        whole = {**identity, "policy": codec.policy.fingerprint(), "layers": codec.layers}
        self._seed = json.dumps(whole, sort_keys=True).encode()
        self._lock = threading.Lock()
        self._counts = dict.fromkeys((field.name for field in fields(ChunkStats) if field.name != "store"), 0)
        self._warned: set[type[Exception]] = set()
        self._pins: dict[bytes, list[ExitStack]] = {}

    def name(self, key: str) -> bytes:
        """What a chunk is called below, 32 bytes."""
        return hashlib.blake2b(key.encode(), key=hashlib.blake2b(self._seed).digest(), digest_size=32).digest()

    def put(self, key: str, keys: Tensor, values: Tensor, *, first: bool = True, first_layer: int = 0) -> bool:
        """Encode and store; see `ChunkCodec.encode`. Whether it is there now."""
        name = self.name(key)
        try:
            if name in self.store:
                return True
            data = self.codec.encode(keys, values, name, first=first, first_layer=first_layer)
            self.store.put_below(name, data)
        except (StoreError, CodecError):
            self._count(refused=1)
            return False
        except Warning:  # where they are errors
            raise
        except Exception as error:  # engines put in threads of theirs, where it would be lost
            self.refuse(error)
            return False
        self._count(stored=1, raw_bytes=keys.nbytes + values.nbytes, stored_bytes=len(data))
        return True

    def refuse(self, error: Exception) -> None:
        """Count a chunk that was not stored for an unforeseen reason; the first of each kind is warned of."""
        self._count(refused=1)
        with self._lock:
            known = type(error) in self._warned
            self._warned.add(type(error))
        if not known:
            kind = "" if isinstance(error, KVQuantError) else f"{type(error).__name__}: "
            why = " ".join(str(error).split())
            warnings.warn(f"kvquant: chunks are not stored: {kind}{why}", KVQuantWarning, stacklevel=2)

    def load(self, key: str) -> Chunk | None:
        """What is stored under a key, not yet verified, or None."""
        name = self.name(key)
        try:
            data = self.store.get(name)
            if data is not None:
                return Chunk(self, name, data, ChunkShape.read(data))
        except StoreError:
            pass  # it was closed meanwhile
        except FormatError:
            self.drop(name)
            return None
        self._count(misses=1)
        return None

    def drop(self, name: bytes) -> None:
        """Forget what is damaged."""
        with suppress(StoreError):  # it was closed meanwhile
            self.store.delete([name])
        self._count(misses=1, damaged=1)

    def __contains__(self, key: str) -> bool:
        with suppress(StoreError):
            return self.name(key) in self.store
        return False

    def prefix(self, keys: Sequence[str]) -> int:
        """How many of these are there, up to the first that is not."""
        return next((at for at, key in enumerate(keys) if key not in self), len(keys))

    def pin(self, key: str) -> bool:
        """Have a chunk stay until it is unpinned as often. Whether it is there."""
        name, held = self.name(key), ExitStack()
        with suppress(StoreError):
            if held.enter_context(self.store.pin([name])):
                with self._lock:
                    self._pins.setdefault(name, []).append(held)
                return True
        held.close()
        return False

    def unpin(self, key: str) -> bool:
        """Take back one `pin`. Whether there was one."""
        return self._unpin(self.name(key))

    def _unpin(self, name: bytes) -> bool:
        with self._lock:
            pins = self._pins.get(name)
            if not pins:
                return False
            held = pins.pop()
            if not pins:
                del self._pins[name]
        held.close()
        return True

    def remove(self, key: str) -> bool:
        """Forget a chunk, pinned or not. Whether it was there."""
        name = self.name(key)
        while self._unpin(name):
            pass
        return self.store.delete([name]) > 0

    def clear(self) -> int:
        """Forget all chunks in the store; how many there were."""
        for name in list(self._pins):
            while self._unpin(name):
                pass
        return self.store.delete(self.store.keys())

    def stats(self) -> ChunkStats:
        """A snapshot."""
        with self._lock:
            counts = dict(self._counts)
        return ChunkStats(**counts, store=self.store.stats())

    def close(self) -> None:
        """Hand all that is held to the disk, as far as there is one with room, and let go. Twice is harmless."""
        for name in list(self._pins):
            while self._unpin(name):
                pass
        self.store.close()

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self._counts[name] += count


@dataclass(frozen=True)
class Chunk:
    """A chunk that was found; ``shape`` is what its header says, which `decode` verifies with all the rest."""

    store: ChunkStore
    name: bytes
    data: Tensor
    shape: ChunkShape

    def decode(self, keys: Tensor, values: Tensor) -> bool:
        """Into ``keys`` and ``values`` of its shape. False, and it is forgotten, unless it is as it was written."""
        try:
            first_layer = self.shape.first_layer
            self.store.codec.decode(self.data, self.name, keys, values, first_layer=first_layer)
        except (FormatError, CodecError):
            self.store.drop(self.name)
            return False
        self.store._count(restored=1)
        return True
