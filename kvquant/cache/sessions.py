"""Sessions: all that a cache holds, saved to its store's disk under a name, and resumed in another process.

Blocks are saved as they are stored, tails and sinks as they are, so what is computed after a resume is what would have
been without it. A session is written beside the one it replaces, its manifest last: whatever happens meanwhile,
there is the old session or the new one. Layers that are not compressed are saved whole.

Keys: ``session/`` and a digest of tenant and name hold the manifest, JSON; what belongs to it has keys of
its generation, a random number. Tensors are in safetensors' format. Nothing is executed when any of it is read.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import KVQuantError, StoreError, UnsupportedError, shown
from ..policy import PrecisionPolicy
from ..store.base import BlockStore
from ..store.tiered import TieredStore
from .hf_window import WindowLayer
from .manifests import (
    GENERATION,
    PARTS,
    ROWS,
    STATE,
    VERSION,
    forget,
    generation_in,
    key_of,
    keys_from,
    manifest_of,
    orphans,
    part_of,
    saving,
)
from .restore import blocks_of, device_of, put_blocks, resume, store_of
from .rows import Row
from .shared import Exact

if TYPE_CHECKING:
    from .hf import KVQuantCache


def save(cache: KVQuantCache, name: str) -> None:
    """See `KVQuantCache.save`."""
    store = store_of(cache.store, "save()")
    key = key_of(name, cache.tenant)
    if not store.keeps:
        raise StoreError("save() needs a store with a disk: give it disk_budget and disk_path")
    cache.settle()
    old = None
    with contextlib.suppress(StoreError):  # there is none, or it is damaged
        old = manifest_of(store, key)
    generation = secrets.token_bytes(GENERATION)
    saving.add(generation)
    store.delete(orphans(store))  # of saves that did not end: no other process writes here
    slots = list(dict.fromkeys(slot for row in cache.rows.rows for slot in row.slots))
    numbers = {slot: number for number, slot in enumerate(slots)}
    try:
        waiting = _save_blocks(cache, store, generation, slots)
        rows = [
            {
                "start": row.start,
                "length": row.length,
                "ends": row.ends,
                "blocks": [numbers[slot] for slot in row.slots],
                "ids": row.ids is not None,
            }
            for row in cache.rows.rows
        ]
        _keep(store, part_of(generation, ROWS, STATE), _row_tensors(cache.rows.rows))
        manifest = {
            "version": VERSION,
            "name": name,
            "tenant": cache.tenant,
            "adapter": cache.adapter,
            "saved": datetime.now(UTC).isoformat(timespec="seconds"),
            "generation": generation.hex(),
            "identity": asdict(cache.identity()),
            "policy": cache.resolved.policy.to_yaml(),
            "width": cache.rows.width,
            "packed": cache.rows.packed,
            "tokens": [row.length for row in cache.rows.rows],
            "rows": rows,
            "blocks": len(slots),
            "exact": waiting,
            "plain": _save_plain_layers(cache, store, generation),
            "parts": 0,
        }
        manifest["parts"] = len(keys_from(store, PARTS + generation))
        store.flush()  # what a manifest names is on disk before it is
    except BaseException:
        forget(store, generation)
        raise
    finally:
        saving.discard(generation)
    # What goes wrong from here on leaves both: which of them the manifest names is not known.
    store.keep([key], torch.frombuffer(bytearray(json.dumps(manifest).encode()), dtype=torch.uint8)[None])
    store.flush()
    if old is not None:
        forget(store, generation_in(old))


def load(
    cls: type[KVQuantCache], model: Any, name: str, store: TieredStore, tenant: str, adapter: str
) -> KVQuantCache:
    """See `KVQuantCache.load`."""
    store = store_of(store, "load()")
    manifest = manifest_of(store, key_of(name, tenant))
    cache = cls.for_model(
        model, PrecisionPolicy.from_yaml(manifest["policy"]), store=store, tenant=tenant, adapter=adapter
    )
    told, now = manifest["identity"], asdict(cache.identity())
    for field in reversed(now):  # what is asked for before what follows from it
        if now[field] != told.get(field):
            raise StoreError(f"session {shown(name)} was saved with {_other(field, told.get(field), now[field])}")
    generation = generation_in(manifest)
    try:
        slots = _resume_rows(cache, manifest, _tensors(store, part_of(generation, ROWS, STATE)))
        for index, stored in manifest["plain"].items():
            _resume_plain_layer(cache, int(index), stored, store, generation)
        for layer in cache.compressed():
            _resume_layer(cache, layer, manifest, store, generation, slots)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, KVQuantError):
            raise
        raise StoreError(f"session {shown(name)} is damaged: {error}") from error
    return cache


def _other(field: str, then: object, now: str) -> str:
    """What was another, of settings each by its name."""
    if field == "settings" and isinstance(then, str):
        with contextlib.suppress(ValueError):
            before, after = json.loads(then), json.loads(now)
            differ = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
            return "; ".join(_other(name, before.get(name), after.get(name)) for name in differ[:3])
    return f"another {field}: {shown(then)}, now {shown(now)}"


def _keep(store: TieredStore, key: bytes, tensors: Mapping[str, Tensor]) -> None:
    data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})
    store.keep([key], torch.frombuffer(bytearray(data), dtype=torch.uint8)[None])


def _tensors(store: BlockStore, key: bytes) -> dict[str, Tensor]:
    stored = store.get(key)
    if stored is None:
        raise StoreError("a part of the session is lost: save it again")
    try:
        return dict(safetensors.torch.load(bytes(stored.numpy())))
    except SafetensorError as error:
        raise StoreError(f"a part of the session is damaged: {error}") from error


def _save_blocks(cache: KVQuantCache, store: TieredStore, generation: bytes, slots: list[int]) -> dict[str, Any]:
    """Save what compressed layers hold; of blocks that are not encoded yet, how many tokens of each side stay raw."""
    exact: dict[str, Any] = {}
    for layer in cache.compressed():
        blocks = blocks_of(layer.held)
        tensors: dict[str, Tensor] = {}
        for which, side in zip(("key", "value"), layer.held.sides, strict=True):
            # Rows that were one a moment ago share a tail, which the format does not take.
            tensors |= {f"{which}.tail.{row}": tail.tokens.clone() for row, tail in enumerate(side.tails)}
            tensors |= {f"{which}.sinks.{n}": side.sinks[slot] for n, slot in enumerate(slots) if slot in side.sinks}
        for number, slot in enumerate(slots) if layer.columns else ():
            payload, tag = blocks.stored(slot)
            store.keep([part_of(generation, layer.index, number)], payload[None], tag)
            if (waiting := blocks.shared.waiting.get(slot)) is not None:
                tensors[f"positions.{number}"] = waiting.positions.cpu()
                exact[str(number)] = waiting.sinks
        _keep(store, part_of(generation, layer.index, STATE), tensors)
    return exact


def _row_tensors(rows: list[Row]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for index, row in enumerate(rows):
        if row.ids:
            tensors[f"ids.{index}"] = torch.cat([ids.cpu() for ids in row.ids])
        if row.positions:
            tensors[f"positions.{index}"] = torch.cat([positions.cpu() for positions in row.positions])
    return tensors


def _resume_rows(cache: KVQuantCache, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[int]:
    """Make the rows, and slots for their blocks."""
    count = int(manifest["blocks"])
    if not 0 <= count <= sum(len(row["blocks"]) for row in manifest["rows"]):
        raise ValueError(f"{count} blocks")
    slots = cache.rows.pool.allocate(count)
    for index, told in enumerate(manifest["rows"]):
        ids = [tensors[f"ids.{index}"]] if f"ids.{index}" in tensors else []
        row = Row(
            start=int(told["start"]),
            length=int(told["length"]),
            slots=[slots[number] for number in told["blocks"]],
            ends=[int(end) for end in told["ends"]],
            ids=ids if told["ids"] else None,
            positions=[tensors[f"positions.{index}"]] if f"positions.{index}" in tensors else [],
        )
        cache.rows.pool.retain(row.slots)
        cache.rows.rows.append(row)
    cache.rows.pool.release(slots)  # whose rows have them now
    cache.rows.width, cache.rows.packed = int(manifest["width"]), bool(manifest.get("packed"))
    return slots


def _resume_layer(
    cache: KVQuantCache,
    layer: Any,
    manifest: Mapping[str, Any],
    store: TieredStore,
    generation: bytes,
    slots: list[int],
) -> None:
    device = device_of(cache.decoder, layer.index)
    tensors = {name: x.to(device) for name, x in _tensors(store, part_of(generation, layer.index, STATE)).items()}
    tails = [
        [tensors[f"{which}.tail.{row}"] for row in range(len(manifest["rows"])) if f"{which}.tail.{row}" in tensors]
        for which in ("key", "value")
    ]
    if not tails[0]:
        return  # it held nothing
    blocks = blocks_of(layer.held)
    resume(blocks, *tails)
    for which, side in zip(("key", "value"), layer.held.sides, strict=True):
        for number, slot in enumerate(slots):
            if f"{which}.sinks.{number}" in tensors:
                side.sinks.keep(slot, tensors[f"{which}.sinks.{number}"])
    for number, sinks in manifest["exact"].items():
        blocks.shared.waiting[slots[int(number)]] = Exact(tensors[f"positions.{number}"].cpu(), tuple(sinks))
    stored = []
    for number in range(len(slots)):
        key = part_of(generation, layer.index, number)
        payload, tag = store.get(key), store.tag(key)
        if payload is None or tag is None:
            raise StoreError(f"block {number} of layer {layer.index} is lost: save the session again")
        stored.append((payload, tag))
    put_blocks(blocks, slots, stored)
    cache.hold(layer.index)


def _save_plain_layers(cache: KVQuantCache, store: TieredStore, generation: bytes) -> dict[str, dict[str, Any]]:
    """Save layers that are not compressed: their tensors, and by layer the rest, which are numbers and the like."""
    saved = {}
    for index, layer in enumerate(cache.layers):
        if cache.resolved.layers[index].policy is not None:
            continue
        layer = layer.whole() if isinstance(layer, WindowLayer) else layer
        tensors = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
        plain = {
            name: value
            for name, value in vars(layer).items()
            if not isinstance(value, Tensor | torch.device | torch.dtype)
        }
        if odd := [name for name, value in plain.items() if not isinstance(value, bool | int | float | str | None)]:
            raise UnsupportedError(f"layer {index} can't be saved: {type(layer).__name__}.{odd[0]} is no tensor")
        _keep(store, part_of(generation, index, STATE), tensors)
        saved[str(index)] = plain
    return saved


def _resume_plain_layer(
    cache: KVQuantCache, index: int, plain: Mapping[str, Any], store: TieredStore, generation: bytes
) -> None:
    layer, device = cache.layers[index], device_of(cache.decoder, index)
    for name, value in plain.items():
        if name in vars(layer):
            setattr(layer, name, value)
    for name, tensor in _tensors(store, part_of(generation, index, STATE)).items():
        setattr(layer, name, tensor.to(device))
    if isinstance(getattr(layer, "keys", None), Tensor):
        layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
