"""LMCache 0.5.6: a storage backend of its engine, and a serde of its server. Classes appear when they are asked for.

`KVQuantBackend` (in-process mode) keeps chunks encoded in a `TieredStore`:

    storage_plugins: ["kvquant"]
    extra_config:
      storage_plugin.kvquant.module_path: kvquant.integrations.lmcache
      storage_plugin.kvquant.class_name: KVQuantBackend
      storage_plugin.kvquant.policy: int4          # and the rest of `StoreSettings`
      storage_plugin.kvquant.host_budget: 8GiB

The serde ``kvquant`` (multi-process mode) encodes what a server's L2 adapter stores. LMCache loads a class for an
adapter of type ``plugin`` but none for a serde, so `KVQuantAdapter` registers it and then is the adapter it names:

    --l2-adapter '{"type": "plugin", "module_path": "kvquant.integrations.lmcache", "class_name": "KVQuantAdapter",
                   "adapter_params": {"type": "fs", "base_path": "/cache"},
                   "serde": {"type": "kvquant", "policy": "int4", "head_dim": 128}}'

Whoever starts LMCache from Python calls `register` instead. A key of LMCache does not tell whether its chunk begins a
sequence, so that every chunk keeps its first ``sink_tokens`` raw. Layers are counted as LMCache does, within a worker.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from ..errors import KVQuantWarning, StoreError, UnsupportedError, shown
from .chunks import ChunkCodec, ChunkShape
from .chunkstore import ChunkStats, ChunkStore
from .lmcache_serde import CLASSES, SERVED, create_serde, made, only_tensor, register, sides
from .settings import StoreSettings, require

__all__ = ["create_serde", "register"]  # and the classes that __getattr__ knows


class _Backend:
    """What `KVQuantBackend` adds to LMCache's ``StoragePluginInterface``.

    Raises `KVQuantError` for settings, and for caches it cannot serve; LMCache logs it and goes on without.
    """

    def __init__(
        self,
        dst_device: str = "cpu",
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)  # type: ignore[call-arg]
        self.metadata, self.local_cpu_backend = metadata, local_cpu_backend
        place, settings = _settings_of(config)
        if metadata.role == "scheduler" or local_cpu_backend is None:
            raise UnsupportedError(f"{place}role {shown(metadata.role)}; allowed: workers, with a CPU backend")
        if metadata.use_mla or config.enable_blending:
            raise UnsupportedError(f"{place}MLA or enable_blending; allowed: keys and values, without blending")
        layers, _, self._chunk_tokens, self._heads, self._dim = metadata.kv_shape
        codec = ChunkCodec(settings.load_policy(place), layers)
        folder = f"worker-{metadata.worker_id}-of-{metadata.world_size}"
        identity = {"engine": "lmcache", "heads": self._heads, "dim": self._dim}
        identity |= {"tenant": settings.tenant, "revision": settings.revision}
        self.chunks = ChunkStore(settings.open_store(folder, place=place), codec, identity)
        self._lock = threading.Lock()
        self._putting: set[str] = set()
        self._lookups: dict[str, Counter[str]] = {}  # pins taken for a lookup, until its chunks are loaded
        self._writer, self._reader = (ThreadPoolExecutor(1, f"kvquant-{name}") for name in ("put", "get"))
        self._closed = False
        self._outlive(local_cpu_backend)

    def __str__(self) -> str:
        return "KVQuantBackend"

    def stats(self) -> ChunkStats:
        """What was stored, and in how many bytes."""
        return self.chunks.stats()

    def contains(self, key: Any, pin: bool = False) -> bool:
        """Whether a chunk is there; ``pin`` has it stay until `unpin`."""
        name = key.to_string()
        return self.chunks.pin(name) if pin else name in self.chunks

    def exists_in_put_tasks(self, key: Any) -> bool:
        """Whether a chunk is on its way into the store."""
        with self._lock:
            return key.to_string() in self._putting

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> list[Future[None]] | None:
        """Encode and store chunks in another thread; what is there or on its way already is left alone."""
        futures = []
        for key, obj in zip(keys, objs, strict=True):
            name = key.to_string()
            with self._lock:
                if self._closed or name in self._putting or name in self.chunks:
                    continue
                self._putting.add(name)
                obj.ref_count_up()
                futures.append(self._writer.submit(self._put, key, obj, on_complete_callback))
        return futures or None

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:
        """The same, and wait for it."""
        for future in self.batched_submit_put_task(keys, objs, transfer_spec, on_complete_callback) or ():
            await asyncio.wrap_future(future)

    def _put(self, key: Any, obj: Any, done: Callable[[Any], None] | None) -> None:
        stored = False
        try:
            keys, values = sides(only_tensor(obj), obj.get_memory_format().name, self._heads, self._dim)
            stored = self.chunks.put(key.to_string(), keys, values, first_layer=getattr(key, "layer_id", 0))
        except Warning:  # where they are errors
            raise
        except Exception as error:  # in this thread it would be lost
            self.chunks.refuse(error)
        finally:
            obj.ref_count_down()
            with self._lock:
                self._putting.discard(key.to_string())
        if stored and done is not None:
            try:
                done(key)
            except Exception as error:  # LMCache wants what its callbacks raise to end here
                _warn(f"on_complete_callback: {error}")

    def _outlive(self, memory: Any) -> None:
        """Have LMCache's CPU backend, which it closes first, keep its memory until nothing is read from there."""
        close = memory.close

        def drained() -> None:
            with suppress(RuntimeError):  # there is no writer any more
                self._writer.submit(int).result()
            close()

        memory.close = drained

    def get_blocking(self, key: Any) -> Any:
        """A memory object of LMCache's CPU backend that holds the chunk, or None."""
        chunk = self.chunks.load(key.to_string())
        if chunk is None:
            return None
        layer = getattr(key, "layer_id", None)
        expected = ChunkShape(
            self.chunks.codec.layers if layer is None else 1,
            self._heads,
            min(chunk.shape.tokens, self._chunk_tokens),
            self._dim,
            self._dim,
            key.dtype,
            layer or 0,
        )
        if chunk.shape != expected:
            self.chunks.drop(chunk.name)
            return None
        width, tokens = self._heads * self._dim, expected.tokens
        layout = "KV_2LTD" if layer is None else "KV_T2D"
        shape = (2, expected.layers, tokens, width) if layer is None else (tokens, 2, width)
        obj = self.local_cpu_backend.allocate(
            torch.Size(shape), key.dtype, fmt=_memory_format(layout), busy_loop=False
        )
        if obj is None:
            return None
        if not chunk.decode(*sides(obj.tensor, layout, self._heads, self._dim)):
            obj.ref_count_down()
            return None
        return obj

    def batched_get_blocking(self, keys: list[Any]) -> list[Any]:
        """Memory objects up to the first chunk that is not there, None from it on."""
        found = self._leading(keys)
        return found + [None] * (len(keys) - len(found))

    def _leading(self, keys: Sequence[Any]) -> list[Any]:
        found = []
        for key in keys:
            if (obj := self.get_blocking(key)) is None:
                break
            found.append(obj)
        return found

    def get_non_blocking(self, key: Any, location: str | None = None) -> Future[Any] | None:
        """A future of what `get_blocking` gives, or None where there is nothing."""
        return self._reader.submit(self.get_blocking, key) if self.contains(key) else None

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any], transfer_spec: Any = None) -> list[Any]:
        """Memory objects up to the first chunk that is not there; a lookup's pins end."""
        found = await asyncio.wrap_future(self._reader.submit(self._leading, keys))
        with self._lock:
            pins = self._lookups.pop(lookup_id, Counter())
        for name in pins.elements():
            self.chunks.unpin(name)
        return found

    def batched_contains(self, keys: list[Any], pin: bool = False) -> int:
        """How many of these are there, up to the first that is not."""
        return next((at for at, key in enumerate(keys) if not self.contains(key, pin)), len(keys))

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        """The same; pins last until the lookup's chunks are got."""
        count = self.batched_contains(keys, pin)
        if pin:
            with self._lock:
                self._lookups.setdefault(lookup_id, Counter()).update(key.to_string() for key in keys[:count])
        return count

    def pin(self, key: Any) -> bool:
        """Have a chunk stay. Whether it is there."""
        return self.chunks.pin(key.to_string())

    def unpin(self, key: Any) -> bool:
        """Take back one pin. Whether there was one."""
        name = key.to_string()
        with self._lock:
            for pins in self._lookups.values():
                pins[name] -= pins[name] > 0
        return self.chunks.unpin(name)

    def remove(self, key: Any, force: bool = True) -> bool:
        """Forget a chunk. Whether it was there."""
        return self.chunks.remove(key.to_string())

    def clear(self) -> int:
        """Forget all chunks; how many tokens they held at most."""
        return self.chunks.clear() * int(self._chunk_tokens)

    def touch_cache(self) -> None:
        """Nothing to do: the store orders itself by use."""

    def get_allocator_backend(self) -> Any:
        """LMCache's CPU backend."""
        return self.local_cpu_backend

    def close(self) -> None:
        """Store what is on its way, and hand it to the disk."""
        with self._lock:
            self._closed = True
        self._writer.shutdown()
        self._reader.shutdown()
        self.chunks.close()


def __getattr__(name: str) -> Any:
    if name == "KVQuantBackend":
        return _backend()
    if name in CLASSES:
        return made(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _backend() -> Any:
    """The class over LMCache's base. Raises `UnsupportedError` for other releases."""
    require("lmcache", *SERVED)
    from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

    return type(StoragePluginInterface)(
        "KVQuantBackend", (_Backend, StoragePluginInterface), {"__doc__": _Backend.__doc__, "__module__": __name__}
    )


def _settings_of(config: Any) -> tuple[str, StoreSettings]:
    """Where the backend's settings stand, and what they say. Raises `StoreError`."""
    given = config.extra_config or {}
    names = [
        name
        for name in config.storage_plugins or ()
        if given.get(f"storage_plugin.{name}.module_path") == __name__
        and given.get(f"storage_plugin.{name}.class_name") == "KVQuantBackend"
    ]
    if len(names) != 1:
        raise StoreError(f"storage_plugins: {len(names)} of {__name__}; allowed: one")
    place = f"storage_plugin.{names[0]}."
    options = {name.removeprefix(place): value for name, value in given.items() if name.startswith(place)}
    del options["module_path"], options["class_name"]
    return place, StoreSettings.read(options, place)


def _memory_format(layout: str) -> Any:
    from lmcache.v1.memory_management import MemoryFormat

    return MemoryFormat[layout]


def _warn(message: str) -> None:
    warnings.warn(f"kvquant in LMCache: {message}", KVQuantWarning, stacklevel=2)
