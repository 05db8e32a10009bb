"""What sessions and shared prefixes have in common: stored payloads become blocks of a cache that is empty."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import CacheStateError, StoreError, UnsupportedError, shown
from ..store.tiered import TieredStore
from .offload import Offloaded
from .tail import Tail

_AT_ONCE = 64  # payloads, at most


def store_of(store: TieredStore | None, what: str) -> TieredStore:
    """The store of a cache. Raises `CacheStateError` where it has none, `StoreError` for anything else."""
    if store is None:
        raise CacheStateError(f"{what} needs a store: build the cache with for_model(model, policy, store=…)")
    if not isinstance(store, TieredStore):
        raise StoreError(f"store: {shown(store)}; allowed: a TieredStore")
    return store


def blocks_of(layer: object) -> Offloaded:
    """Where a layer's blocks are, given that its cache has a store."""
    blocks = layer.blocks  # type: ignore[attr-defined]
    if not isinstance(blocks, Offloaded):
        raise UnsupportedError(f"blocks of {type(blocks).__name__} are not in a store")
    return blocks


def device_of(decoder: Any, layer: int) -> torch.device:
    """Where a layer of a model computes, as far as its parameters tell."""
    layers = getattr(decoder, "layers", None)
    module = decoder if layers is None or layer >= len(layers) else layers[layer]
    found = None if module is None else next(iter(module.parameters()), None)
    return torch.device("cpu") if found is None else found.device


def resume(blocks: Offloaded, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Have a layer that holds nothing hold tails, one of keys and one of values ``[heads, tokens, dim]`` a row."""
    layer = blocks.layer
    for side, tails in zip(layer.sides, (keys, values), strict=True):
        side.tails = [Tail.of(tail) for tail in tails]
    layer.record = layer.record_of(keys[0][None], values[0][None])
    blocks.prepare()


def put_blocks(blocks: Offloaded, slots: Sequence[int], stored: Sequence[tuple[Tensor, int]]) -> None:
    """Put payloads, each with its tag, into ``slots``."""
    pairs = zip(slots, stored, strict=True)
    for (tag, nbytes), group in itertools.groupby(pairs, key=lambda pair: (pair[1][1], len(pair[1][0]))):
        some = list(group)
        if nbytes != blocks.record(tag).nbytes:
            raise StoreError(f"a stored block of {nbytes} bytes where {blocks.record(tag).nbytes} are expected")
        for first in range(0, len(some), _AT_ONCE):
            part = some[first : first + _AT_ONCE]
            with blocks.room([slot for slot, _ in part], nbytes, tag) as room:
                room.payloads.copy_(torch.stack([payload for _, (payload, _) in part]))
                room.commit()
