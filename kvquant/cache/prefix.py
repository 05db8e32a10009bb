"""Prefixes that caches share: sealed blocks under content keys, which say what tokens they hold and under what.

A block is under one key for each layer: its content key (see `kvquant.keys`) and the layer's number. Block 0 has the
tokens that are kept raw behind its record. A digest of all but the tokens holds the shapes of the layers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import CacheStateError, StoreError, StoreFullError, UnsupportedError
from ..geometry import COMPRESSED_KIND
from ..keys import content_keys
from .layer import History
from .offload import Offloaded
from .restore import blocks_of, device_of, put_blocks, resume, store_of

if TYPE_CHECKING:
    from .hf import KVQuantCache

PREFIX = b"p/"  # what keys begin with
_DIGEST = 32  # bytes
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def share(cache: KVQuantCache) -> int:
    """See `KVQuantCache.share`."""
    store = store_of(cache.store, "share()")
    if not store.has_below:
        raise StoreError("share() needs a store with room beside the device: give it host_budget or disk_budget")
    _check_layers(cache)
    cache.settle()
    shapes, shared = {}, 0
    for layer in cache.compressed():
        blocks = blocks_of(layer.held)
        if not layer.columns:
            continue
        shapes[str(layer.index)] = [
            [tail.shape[0], tail.shape[2], str(tail.dtype)]
            for tail in (side.tails[0].tokens for side in layer.held.sides)
        ]
        for index, row in enumerate(cache.rows.rows):
            for number, (key, slot) in enumerate(zip(cache.content_keys(index), row.slots, strict=False)):
                name = _name(key, layer.index)
                if row.ends[number] != (number + 1) * cache.rows.block_tokens or name in store:
                    continue
                if blocks.is_cold(slot):
                    break  # a key promises codes of the policy's usual codecs
                payload, tag = _encoded(blocks, slot)
                try:
                    store.put_below(name, _with_sinks(blocks, slot, payload), tag)
                except StoreFullError:
                    return shared  # what did not fit is recomputed by whoever would have used it
                shared += 1
    if shapes:
        store.put_below(_name(cache.identity().digest()), _bytes(shapes))
    return shared


def reuse(cache: KVQuantCache, input_ids: Tensor, attention_mask: Tensor | None) -> int:
    """See `KVQuantCache.reuse`."""
    store = store_of(cache.store, "reuse()")
    _check_layers(cache)
    if cache.rows.rows or cache.rows.width:
        raise CacheStateError("reuse() fills an empty cache: reset() this one, or build another")
    if input_ids.dim() != 2 or not input_ids.numel():
        raise CacheStateError(f"input_ids of shape {tuple(input_ids.shape)}; allowed: [rows, tokens]")
    identity, block = cache.identity(), cache.rows.block_tokens
    stored = store.get(_name(identity.digest()))
    shapes: dict[str, Any] = {} if stored is None else json.loads(bytes(stored.numpy()))
    starts = _starts(input_ids, attention_mask)
    layers = [layer for layer in cache.compressed() if str(layer.index) in shapes]
    if not layers:
        return 0
    rows: list[list[bytes]] = []
    for ids, start in zip(input_ids, starts, strict=True):
        usable = max(0, len(ids) - start - max(1, cache.rows.recent_tokens)) // block
        keys = content_keys(identity, ids[start:], block)[:usable]
        found = 0
        while found < len(keys) and all(_name(keys[found], layer.index) in store for layer in layers):
            found += 1
        rows.append(keys[:found])
    return _restore(cache, layers, shapes, input_ids, starts, rows)


def _restore(
    cache: KVQuantCache,
    layers: Sequence[Any],
    shapes: dict[str, Any],
    input_ids: Tensor,
    starts: Sequence[int],
    rows: Sequence[Sequence[bytes]],
) -> int:
    """Read blocks under the keys of each row, as far as none of any row is missing."""
    store = store_of(cache.store, "reuse()")
    unique = list(dict.fromkeys(key for keys in rows for key in keys))
    payloads: dict[int, list[tuple[Tensor, int]]] = {}
    lost = set()
    for layer in layers:
        payloads[layer.index] = []
        for key in unique:
            name = _name(key, layer.index)
            payload, tag = store.get(name), store.tag(name)
            if payload is None or tag is None:
                lost.add(key)
            else:
                payloads[layer.index].append((payload, tag))
    if lost:
        kept = [keys[: next((i for i, key in enumerate(keys) if key in lost), len(keys))] for keys in rows]
        return _restore(cache, layers, shapes, input_ids, starts, kept)
    # All rows end at one column: that of the row of which least was found.
    block = cache.rows.block_tokens
    width = min(start + len(keys) * block for start, keys in zip(starts, rows, strict=True))
    if not unique or width <= max(starts):
        return 0
    slots = cache.begin_with(input_ids[:, :width], starts, [[unique.index(key) for key in keys] for keys in rows])
    for layer in layers:
        blocks, device = blocks_of(layer.held), device_of(cache.decoder, layer.index)
        sides = [
            [torch.empty(heads, 0, dim, dtype=_DTYPES[dtype], device=device)] * len(rows)
            for heads, dim, dtype in shapes[str(layer.index)]
        ]
        resume(blocks, *sides)
        first = [slots[unique.index(keys[0])] for keys in rows if keys]
        stored = []
        for slot, (payload, tag) in zip(slots, payloads[layer.index], strict=True):
            record = payload[: blocks.record(tag).nbytes] if slot in first else payload
            if slot in first:
                _take_sinks(blocks, slot, payload[len(record) :])
            stored.append((record, tag))
        put_blocks(blocks, slots, stored)
        cache.hold(layer.index)
    return width


def _check_layers(cache: KVQuantCache) -> None:
    others = [layer.kind for layer in cache.resolved.layers if layer.kind != COMPRESSED_KIND]
    if others:
        raise UnsupportedError(
            f"prefixes can't be shared: the model has {len(others)} layers of kind {others[0]}, whose state at the "
            "end of a prefix is not kept; save() and load() serve it"
        )


def _starts(input_ids: Tensor, attention_mask: Tensor | None) -> list[int]:
    """How many columns of each row are padding."""
    if attention_mask is None:
        return [0] * len(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise CacheStateError(f"attention_mask of shape {tuple(attention_mask.shape)}: allowed is that of input_ids")
    hidden = attention_mask == 0
    starts = hidden.long().cumprod(dim=1).sum(dim=1)
    if not torch.equal(starts, hidden.sum(dim=1)):
        raise CacheStateError("attention_mask hides more than left padding: there is no prefix to share")
    return [int(start) for start in starts]


def _name(digest: bytes, layer: int | None = None) -> bytes:
    return PREFIX + digest + (b"" if layer is None else struct.pack("<H", layer))


def block_of(key: bytes) -> tuple[bytes, int] | None:
    """The content key of a shared block, and its layer; None of what is no block."""
    rest = key.removeprefix(PREFIX)
    return (rest[:_DIGEST], *struct.unpack("<H", rest[_DIGEST:])) if len(rest) == _DIGEST + 2 else None


def _bytes(plain: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)


def _encoded(blocks: Offloaded, slot: int) -> tuple[Tensor, int]:
    """A block's record, encoded, which keys promise; and its tag."""
    payload, tag = blocks.stored(slot)
    if blocks.is_exact(tag):
        (payload,), tag = blocks.shared.shrink(blocks.index, [slot], payload[None])
    return payload, tag


def _with_sinks(blocks: Offloaded, slot: int, payload: Tensor) -> Tensor:
    raw = [side.sinks[slot] for side in blocks.layer.sides if slot in side.sinks]
    parts = [tokens.contiguous().cpu().flatten().view(torch.uint8) for tokens in raw]
    return torch.cat([payload.cpu(), *parts])


def _take_sinks(blocks: Offloaded, slot: int, data: Tensor) -> None:
    sides: list[History] = [side for side in blocks.layer.sides if side.sink_tokens]
    sizes = [side.sink_tokens * side.token_elements * side.tails[0].tokens.itemsize for side in sides]
    if len(data) != sum(sizes):
        raise StoreError(f"{len(data)} bytes of first tokens where {sum(sizes)} are expected")
    for side, size in zip(sides, sizes, strict=True):
        like = side.tails[0].tokens
        shape = like.shape[0], side.sink_tokens, like.shape[2]
        tokens = data[:size].clone().view(like.dtype).view(shape)
        side.sinks.keep(slot, tokens.to(like.device))
        data = data[size:]
