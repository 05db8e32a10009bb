"""`BlockTier`: blocks of an engine's cache, all their layers as one payload, compressed, in a store.

What adapters of engines share; it knows none of them. An engine's block is named by its own hash of the tokens up to
its end, under a namespace, the digest of all else that decides its bytes (`kvquant.keys.Identity`): with another
model, policy or tenant every block is a miss. A payload is

    count u32 | length u64 of each layer's block | the blocks, see `kvquant.blocks`, layer after layer

little endian. Each block carries a checksum over its bytes, its key and its layer. All are verified before any is
decoded, so that what comes back is what was put, whole, or nothing.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..blocks import KVBlock
from ..compressor import BlockCompressor
from ..errors import CodecError, FormatError, KVQuantWarning, StoreError
from ..exposition import Metric, exposition
from ..policy import PrecisionPolicy
from ..store.base import StoreStats
from ..store.tiered import TieredStore

States = Callable[[int], tuple[Tensor, Tensor]]
"""Gives a layer's keys and values of some blocks, ``[blocks, heads, block_tokens, dim]`` each."""

_COUNTS = ("stored", "loaded", "missed", "damaged", "dropped", "engine_bytes", "payload_bytes")


@dataclass(frozen=True)
class LayerShape:
    """Of one layer: ``heads`` of keys ``key_dim`` and values ``value_dim`` wide."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class BlockTierStats:
    """A snapshot of a `BlockTier`: counts since it was opened, and what its store holds.

    ``engine_bytes`` are those that the blocks stored take in the engine's cache, ``payload_bytes`` those they were
    stored in. ``damaged`` blocks were found but not as they had been put, and are misses too; ``dropped`` ones could
    not be stored.
    """

    stored: int
    loaded: int
    missed: int
    damaged: int
    dropped: int
    engine_bytes: int
    payload_bytes: int
    store_seconds: float
    load_seconds: float
    store: StoreStats

    @property
    def saved_bytes(self) -> int:
        """What compression saved of the blocks stored."""
        return self.engine_bytes - self.payload_bytes

    def __str__(self) -> str:
        times = self.engine_bytes / self.payload_bytes if self.payload_bytes else 1.0
        return (
            f"{self.stored} blocks stored, {self.engine_bytes / 2**20:.1f} MiB of the engine's cache in "
            f"{self.payload_bytes / 2**20:.1f} MiB ({times:.2f} times the tokens), {self.loaded} loaded, "
            f"{self.missed} missed, {self.damaged} damaged, {self.dropped} dropped; "
            f"{self.store_seconds:.3f} s storing, {self.load_seconds:.3f} s loading; {self.store}"
        )

    def prometheus(self, prefix: str = "kvquant_tier") -> str:
        """The snapshot in Prometheus' text format; ``store`` has its own."""
        metrics = [
            Metric("stored_blocks_total", "counter", "Blocks stored.", self.stored),
            Metric("loaded_blocks_total", "counter", "Blocks given back.", self.loaded),
            Metric("missed_blocks_total", "counter", "Blocks asked for that were not there.", self.missed),
            Metric("damaged_blocks_total", "counter", "Blocks found damaged, and missed.", self.damaged),
            Metric("dropped_blocks_total", "counter", "Blocks that could not be stored.", self.dropped),
            Metric("engine_bytes_total", "counter", "Bytes in the engine of the blocks stored.", self.engine_bytes),
            Metric("payload_bytes_total", "counter", "Bytes the blocks were stored in.", self.payload_bytes),
            Metric("store_seconds_total", "counter", "Time spent encoding and storing.", self.store_seconds),
            Metric("load_seconds_total", "counter", "Time spent reading and decoding.", self.load_seconds),
        ]
        return exposition(prefix, metrics)


class BlockTier:
    """Blocks of ``policy.block_tokens`` tokens of a model's layers, each with the codecs that ``policy`` gives it.

    ``shapes`` are those of the layers, in order, ``dtype`` that of their cache; ``namespace`` is a digest of 32 bytes,
    see the module. The tier takes over ``store``. Methods may be called from any thread.

    Raises `PolicyError` or `CodecError` where the policy does not fit the layers, `StoreError` where a tier of the
    store can't hold one block.
    """

    def __init__(
        self,
        policy: PrecisionPolicy,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        store: TieredStore,
        namespace: bytes,
    ) -> None:
        self.policy, self.shapes, self.dtype, self.store = policy, tuple(shapes), dtype, store
        self.compressors = BlockCompressor.for_layers(policy, len(self.shapes))
        self.block_tokens = policy.block_tokens
        self.block_bytes = sum(
            shape.heads * (shape.key_dim + shape.value_dim) * self.block_tokens * dtype.itemsize
            for shape in self.shapes
        )
        self._namespace = namespace
        self._counts: Counter[str] = Counter()
        self._seconds = {"store": 0.0, "load": 0.0}
        self._lock = threading.Lock()
        (payload,) = self._encoded([b"\0"], [True], self._zeros)  # also what shows that codecs and layers fit
        store.must_hold(len(payload))

    def key(self, name: bytes) -> bytes:
        """The content key, 48 bytes, of the block that the engine calls ``name``."""
        return self._namespace[:16] + hashlib.blake2b(self._namespace + name, digest_size=32).digest()

    def __contains__(self, name: bytes) -> bool:
        """Whether a block is there; `fetch` tells whether it is whole."""
        return self.key(name) in self.store

    def put(self, names: Sequence[bytes], first: Sequence[bool], states: States) -> int:
        """Store blocks; how many were.

        ``first`` tells of each whether its sequence starts with it, so that its sinks are kept as they are. A block
        for which there is no room, or which has no codes, is dropped, and counted.
        """
        began, stored = time.perf_counter(), 0
        try:
            payloads = self._encoded(names, first, states) if names else []
            for name, payload in reversed([*zip(names, payloads, strict=True)]):
                stored += self._put(self.key(name), payload)
        except CodecError as error:
            warnings.warn(f"{len(names)} blocks are not stored: {error}", KVQuantWarning, stacklevel=2)
        self._count("store", began, dropped=len(names) - stored)
        return stored

    def fetch(self, name: bytes) -> list[KVBlock] | None:
        """A block's layers, every byte verified, or None; a damaged one is forgotten."""
        began, key, damaged = time.perf_counter(), self.key(name), 0
        blocks = None
        try:
            there = key in self.store
            payload = self.store.get(key)
            damaged = int(there and payload is None)  # the disk's own checksum says so
            blocks = None if payload is None else self._parsed(key, payload)
        except FormatError as error:
            warnings.warn(f"a stored block is damaged, and recomputed: {error}", KVQuantWarning, stacklevel=2)
            self.store.delete([key])
            damaged = 1
        except StoreError:  # closed
            pass
        self._count("load", began, damaged=damaged, **{"missed" if blocks is None else "loaded": 1})
        return blocks

    def decode(self, layer: int, blocks: Sequence[KVBlock]) -> tuple[Tensor, Tensor]:
        """A layer's keys and values of blocks one after another, ``[heads, tokens, dim]``, in the engine's dtype."""
        began = time.perf_counter()
        found = self.compressors[layer].decompress(*blocks)
        self._count("load", began)
        return found

    def touch(self, names: Sequence[bytes]) -> None:
        """Count blocks of one sequence, in order, as used: where room is short its last blocks leave first.

        A block is of no use without those before it.
        """
        with self.store.lock:
            for key in map(self.key, reversed(names)):
                with self.store.pin([key]) as found:  # on disk, pinning counts as using
                    if found:
                        self.store.placement.use(self.store.placement.shelf(key))

    def forget(self) -> None:
        """Forget all blocks of this namespace, and take another, of this process: the weights may have changed."""
        found, mine = self.store.keys(), self._namespace[:16]
        self.store.delete([key for key in found if isinstance(key, bytes) and key.startswith(mine)])
        self._namespace = hashlib.blake2b(self._namespace + os.urandom(16), digest_size=32).digest()

    def counts(self) -> dict[str, int]:
        """The whole numbers of `stats`, at no cost however much is held."""
        with self._lock:
            return {name: self._counts[name] for name in _COUNTS}

    def stats(self) -> BlockTierStats:
        """What was done, and what is held."""
        counts = self.counts()
        with self._lock:
            store, load = self._seconds["store"], self._seconds["load"]
        return BlockTierStats(**counts, store_seconds=store, load_seconds=load, store=self.store.stats())

    def close(self) -> None:
        """Close the store; what is in memory goes to the disk, as far as there is room."""
        self.store.close()

    def _zeros(self, layer: int) -> tuple[Tensor, Tensor]:
        shape = self.shapes[layer]
        key, value = (
            torch.zeros(1, shape.heads, self.block_tokens, dim, dtype=self.dtype)
            for dim in (shape.key_dim, shape.value_dim)
        )
        return key, value

    def _encoded(self, names: Sequence[bytes], first: Sequence[bool], states: States) -> list[bytes]:
        """Payloads of blocks. Layer by layer, so that the states of one are there at a time."""
        keys = [self.key(name) for name in names]
        parts: list[list[bytes]] = [[] for _ in names]
        for layer, compressor in enumerate(self.compressors):
            k, v = states(layer)
            for start in (0, self.block_tokens):  # sinks are where sequences start
                rows = [row for row, is_first in enumerate(first) if is_first == (start == 0)]
                if not rows:
                    continue
                part = (k, v) if len(rows) == len(names) else (k[rows], v[rows])
                for row, (block,) in zip(rows, compressor.compress_rows(*part, start), strict=True):
                    parts[row].append(compressor.to_bytes(block, _part_key(keys[row], layer)))
        return [_packed(each) for each in parts]

    def _put(self, key: bytes, payload: bytes) -> bool:
        try:
            self.store.put(key, torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        except StoreError:  # no room, or closed
            return False
        with self._lock:
            self._counts.update(stored=1, engine_bytes=self.block_bytes, payload_bytes=len(payload))
        return True

    def _parsed(self, key: bytes, payload: Tensor) -> list[KVBlock]:
        parts = _unpacked(memoryview(payload.numpy().data), len(self.shapes))
        blocks = []
        for layer, (compressor, part) in enumerate(zip(self.compressors, parts, strict=True)):
            block = compressor.from_bytes(part, _part_key(key, layer))
            shape = self.shapes[layer]
            fits = (
                (block.first, block.tokens) == (0, self.block_tokens)
                and block.key.shape == (shape.heads, self.block_tokens, shape.key_dim)
                and block.value.shape == (shape.heads, self.block_tokens, shape.value_dim)
                and block.key.dtype == block.value.dtype == self.dtype
            )
            if not fits:
                raise FormatError(f"layer {layer}: a block of another model")
            blocks.append(block)
        return blocks

    def _count(self, stage: str, began: float, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)
            self._seconds[stage] += time.perf_counter() - began


def _part_key(key: bytes, layer: int) -> bytes:
    return key + layer.to_bytes(4, "little")


def _packed(parts: Sequence[bytes]) -> bytes:
    return b"".join([struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts)), *parts])


def _unpacked(payload: memoryview, count: int) -> list[memoryview]:
    """Views of ``count`` parts. Raises `FormatError`."""
    head = struct.Struct(f"<I{count}Q")
    if len(payload) < head.size:
        raise FormatError(f"{len(payload)} bytes are too short for {count} layers")
    found, *sizes = head.unpack(payload[: head.size])
    if found != count or head.size + sum(sizes) != len(payload):
        raise FormatError(f"{len(payload)} bytes that are not {count} layers one after another")
    parts, at = [], head.size
    for size in sizes:
        parts.append(payload[at : at + size])
        at += size
    return parts
