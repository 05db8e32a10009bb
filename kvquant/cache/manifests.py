"""Which sessions a store has, and what belongs to them; see `sessions`."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import StoreError, shown
from ..store.base import BlockStore

VERSION = 1
MAX_NAME = 200
MANIFEST, PARTS = b"session/", b"s/"  # what keys begin with
_TOLD = {"name": str, "tenant": str, "saved": str, "tokens": list, "blocks": int, "parts": int}
GENERATION = 16  # bytes
_PLACE = struct.Struct("<HI")  # behind it: of a layer, and of a block
STATE = 0xFFFFFFFF  # in the place of a block's number: what a layer holds beside blocks
ROWS = 0xFFFF  # in the place of a layer's
saving: set[bytes] = set()  # generations that are being saved by this process


class Found(NamedTuple):
    """A manifest, under its key: what it tells of a session, or why that can't be loaded.

    ``generation`` is what its parts' keys begin with after `PARTS`, as far as the manifest can be understood;
    ``foreign`` is one of another release, which may know better.
    """

    key: bytes
    told: dict[str, Any] | None
    generation: bytes | None
    why: str = ""
    foreign: bool = False


def found(store: BlockStore) -> list[Found]:
    """All manifests of a store."""
    result = []
    for key in keys_from(store, MANIFEST):
        stored = store.get(key)
        if stored is None:
            result.append(Found(key, None, None, "its manifest is damaged"))
            continue
        generation = manifest = None
        try:
            manifest = _parsed(stored)
            generation = generation_in(manifest)
            _check(manifest)
            result.append(Found(key, {name: manifest[name] for name in _TOLD}, generation))
        except StoreError as error:
            foreign = manifest is not None and manifest["version"] != VERSION
            result.append(Found(key, None, generation, str(error), foreign))
    return result


def sessions(store: BlockStore) -> list[dict[str, Any]]:
    """The manifests of all sessions in a store that can be read, without what only a resume needs."""
    return [manifest.told for manifest in found(store) if manifest.told is not None]


def orphans(store: BlockStore) -> list[bytes]:
    """Keys of sessions' parts that no manifest names: what saves left that did not end."""
    return orphans_of(found(store), keys_from(store, PARTS))


def orphans_of(manifests: Sequence[Found], parts: Iterable[bytes]) -> list[bytes]:
    """Those of ``parts`` that none of ``manifests`` names."""
    alive = {manifest.generation for manifest in manifests} | saving
    return [key for key in parts if generation_of(key) not in alive]


def generation_of(part: bytes) -> bytes:
    """What keys of parts of one session have in common."""
    return part[len(PARTS) : len(PARTS) + GENERATION]


def part_in_words(key: bytes) -> str:
    """Which part of a session has a key."""
    try:
        layer, number = _PLACE.unpack(key[len(PARTS) + GENERATION :])
    except struct.error:
        return "an unknown part"
    if layer == ROWS:
        return "rows"
    return f"state of layer {layer}" if number == STATE else f"block {number} of layer {layer}"


def delete(store: BlockStore, name: str, tenant: str = "") -> None:
    """Forget a session. Raises `StoreError` where there is none."""
    key = key_of(name, tenant)
    manifest = manifest_of(store, key)
    store.delete([key])
    forget(store, generation_in(manifest))


def forget(store: BlockStore, generation: bytes) -> None:
    """Delete the parts of a session."""
    store.delete(keys_from(store, PARTS + generation))


def keys_from(store: BlockStore, start: bytes) -> list[bytes]:
    """The keys that begin so."""
    known = store.keys()
    return [key for key in known if isinstance(key, bytes) and key.startswith(start)]


def generation_in(manifest: Mapping[str, Any]) -> bytes:
    """What keys of the session's parts have in common."""
    return bytes.fromhex(manifest["generation"])


def key_of(name: str, tenant: str) -> bytes:
    """Of a session's manifest. Raises `StoreError` for what is no name."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise StoreError(f"session name {shown(name)}; allowed: 1 to {MAX_NAME} printable characters")
    return MANIFEST + hashlib.blake2b(json.dumps([tenant, name]).encode(), digest_size=32).digest()


def part_of(generation: bytes, layer: int, number: int) -> bytes:
    """The key of a block of a layer, or of its `STATE`; the layer may be `ROWS`."""
    return PARTS + generation + _PLACE.pack(layer, number)


def manifest_of(store: BlockStore, key: bytes) -> dict[str, Any]:
    """The manifest under a key. Raises `StoreError` where there is none that can be read."""
    stored = store.get(key)
    if stored is None:
        raise StoreError("no such session in this store, or it is damaged; kvquant store ls PATH lists them")
    manifest = _parsed(stored)
    _check(manifest)
    return manifest


def _parsed(stored: Tensor) -> dict[str, Any]:
    """A manifest of any version, with a version and a generation. Raises `StoreError`."""
    try:
        manifest = dict(json.loads(bytes(stored.numpy())))
        if "version" not in manifest or len(generation_in(manifest)) != GENERATION:
            raise ValueError("no version, or no generation")  # a shorter one would name the parts of others too
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(f"a session's manifest is damaged: {error}") from error
    return manifest


def _check(manifest: Mapping[str, Any]) -> None:
    if manifest["version"] != VERSION:
        raise StoreError(f"a session of version {shown(manifest['version'])}; this release reads {VERSION}")
    odd = [name for name, kind in _TOLD.items() if not isinstance(manifest.get(name), kind)]
    if not odd and any(not isinstance(tokens, int) for tokens in manifest["tokens"]):
        odd = ["tokens"]
    if odd:
        raise StoreError(f"a session's manifest is damaged: {odd[0]}: {shown(manifest.get(odd[0]))}")
