"""SGLang 0.5.23: a storage of its hierarchical cache. The class appears when it is asked for.

    --enable-hierarchical-cache --page-size 64 --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{
        "backend_name": "kvquant", "module_path": "kvquant.integrations.sglang", "class_name": "KVQuantStorage",
        "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
        "policy": "int4", "host_budget": "8GiB", "disk_budget": "100GiB", "disk_path": "/mnt/ssd/kv"}'

A page is a chunk: it is encoded when SGLang backs it up, and decoded into the host pool when it is prefetched. SGLang
tells which page begins a sequence only with the second line's two settings: where it does not, every page keeps its
first ``sink_tokens`` raw. Layers are counted in the pool of a rank. Served are keys and values of all layers alike, in
float16, bfloat16 or float32; other pools are refused when they are registered. A rank has a folder of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from ..errors import StoreError, UnsupportedError, shown
from .chunks import DTYPES, ChunkCodec, ChunkShape
from .chunkstore import Chunk, ChunkStats, ChunkStore
from .settings import StoreSettings, require

SERVED = ("0.5.23",)
_ALIGNED = 8  # tokens of a page are a multiple of this: blocks are
_OTHERS = {  # settings that are SGLang's
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "hicache_storage_pass_prefix_keys",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "file_storage_path",
}
_LAYOUTS = {  # of SGLang's host pools: the dimensions of a page, but for the one of pages, which is 1
    "layer_first": ("side", "layer", "token", "head", "dim"),
    "page_first": ("side", "token", "layer", "head", "dim"),
    "page_first_direct": ("side", "layer", "token", "head", "dim"),
    "page_head": ("side", "head", "token", "layer", "dim"),
}


class _Storage:
    """What `KVQuantStorage` adds to SGLang's ``HiCacheStorage``.

    Raises `KVQuantError` for settings, and once pools are registered that it cannot serve. After that no fault is an
    error: what is not there, or not as it was written, is a miss.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        extra = storage_config.extra_config or {}
        given = {name: value for name, value in extra.items() if name not in _OTHERS}
        self.settings = StoreSettings.read(given, "extra_config.")
        self.policy = self.settings.load_policy("extra_config.")
        self.config = storage_config
        if storage_config.is_mla_model or storage_config.should_split_heads:
            raise UnsupportedError("MLA, or heads split by tp_lcm_size; allowed: keys and values, a rank's together")
        if storage_config.pp_size > 1 and self.policy.layers:
            raise UnsupportedError(
                f"pp_size {storage_config.pp_size} with policy {shown(self.policy.name)}, which has other codecs in "
                f"some layers; allowed: one that has not, since a rank does not know the layers of others"
            )
        self._chunks: ChunkStore | None = None
        self._pool: Any = None
        self._shape: ChunkShape | None = None

    @property
    def chunks(self) -> ChunkStore:
        """Where pages lie. Raises `StoreError` before `register_mem_pool_host`."""
        if self._chunks is None:
            raise StoreError("no host pool is registered; allowed: calls after register_mem_pool_host")
        return self._chunks

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Get to know the pages. Raises `UnsupportedError` for a pool that cannot be served, `StoreError`."""
        pool = self._pool = mem_pool_host
        name = type(pool).__name__
        if name != "MHATokenToKVPoolHost" or pool.layout not in _LAYOUTS:
            layout = getattr(pool, "layout", None)
            raise UnsupportedError(
                f"{name} in {shown(layout)}; allowed: MHATokenToKVPoolHost in {', '.join(_LAYOUTS)}"
            )
        if pool.dtype not in DTYPES or pool.page_size % _ALIGNED:
            raise UnsupportedError(
                f"pages of {pool.page_size} tokens of {pool.dtype}; "
                f"allowed: --page-size a multiple of {_ALIGNED}, {', '.join(map(str, DTYPES))}"
            )
        self._shape = ChunkShape(
            pool.layer_num, pool.head_num, pool.page_size, pool.head_dim, pool.head_dim, pool.dtype
        )
        config, codec = self.config, ChunkCodec(self.policy, pool.layer_num)
        rank = {name: getattr(config, name) for name in ("tp_rank", "tp_size", "pp_rank", "pp_size")}
        rank |= {name: getattr(config, name) for name in ("attn_cp_rank", "attn_cp_size")}
        identity = {"engine": "sglang", "model": config.model_name or "", "first layer": pool.start_layer, **rank}
        identity |= {"shape": repr(self._shape), "tenant": self.settings.tenant, "revision": self.settings.revision}
        folder = "-".join(f"{name}{number}" for name, number in {**rank, "dp_rank": config.dp_rank}.items())
        self._chunks = ChunkStore(self.settings.open_store(folder, place="extra_config."), codec, identity)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Raises `UnsupportedError` for pools beside that of keys and values."""
        if str(host_pool_name) != "kv":
            raise UnsupportedError(f"pool {shown(str(host_pool_name))}; allowed: kv, in models that have no other")

    def get_stats(self) -> None:
        """Nothing that SGLang's collector takes: see `stats`."""

    def stats(self) -> ChunkStats:
        """What was stored, and in how many bytes."""
        return self.chunks.stats()

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return key in self.chunks

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of these are there, up to the first that is not."""
        return self.chunks.prefix(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page of the pool's layout, flat or not. Whether it is there now."""
        return self.batch_set([key], None if value is None else [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages, up to the first that is refused. Whether all are there now."""
        if values is None or len(values) != len(keys):
            return False
        return all(self._put(key, value, first=True) for key, value in zip(keys, values, strict=True))

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages that lie in the host pool, of which ``host_indices`` tells each token's place."""
        before = None if extra_info is None else extra_info.prefix_keys
        stored: list[bool] = []
        for number, (key, at) in enumerate(zip(keys, self._starts(keys, host_indices), strict=True)):
            first = before is None or (not before and not number)
            stored.append(self._put(key, self._pool.get_data_page(at, flat=False), first=first))
        return stored

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        """A page, flat and of the pool's layout, in ``target_location`` if that is given, or None."""
        chunk = self._find(key)
        if chunk is None:
            return None
        page = target_location
        if page is None:
            page = self._pool.get_dummy_flat_data_page()
        return page if chunk.decode(*self._sides(page)) else None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Tensor | None]:
        """Pages up to the first that is not there, None from it on."""
        found: list[Tensor | None] = []
        for key, target in zip(keys, target_locations or [None] * len(keys), strict=True):
            if (page := self.get(key, target)) is None:
                break
            found.append(page)
        return found + [None] * (len(keys) - len(found))

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        """Pages into the host pool, up to the first that is not there; which ones are."""
        count = 0
        for key, at in zip(keys, self._starts(keys, host_indices), strict=True):
            chunk = self._find(key)
            if chunk is None or not chunk.decode(*self._sides(self._pool.get_data_page(at, flat=False))):
                break
            count += 1
        return [True] * count + [False] * (len(keys) - count)

    def clear(self) -> None:
        """Forget all pages."""
        self.chunks.clear()

    def close(self) -> None:
        """Hand what is held to the disk and let go of it."""
        if self._chunks is not None:
            self._chunks.close()

    def _starts(self, keys: Sequence[str], host_indices: Tensor) -> list[int]:
        """Where pages begin in the host pool. Raises `StoreError`."""
        size = self._pool.page_size
        if host_indices.numel() != len(keys) * size:
            raise StoreError(f"{host_indices.numel()} places for {len(keys)} pages; allowed: {size} each")
        starts: list[int] = host_indices[::size].tolist()
        return starts

    def _put(self, key: str, page: Tensor, *, first: bool) -> bool:
        return self.chunks.put(key, *self._sides(page), first=first)

    def _find(self, key: str) -> Chunk | None:
        chunk = self.chunks.load(key)
        if chunk is not None and chunk.shape != self._shape:
            self.chunks.drop(chunk.name)
            return None
        return chunk

    def _sides(self, page: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a page, views ``[layers, heads, tokens, dim]``."""
        shape, places = self._shape, _LAYOUTS[self._pool.layout]
        assert shape is not None  # a pool is registered
        sizes = {"side": 2, "layer": shape.layers, "head": shape.heads, "token": shape.tokens, "dim": shape.key_dim}
        if page.dtype != shape.dtype or page.numel() != 2 * shape.layers * shape.heads * shape.tokens * shape.key_dim:
            raise StoreError(f"page {page.dtype} {tuple(page.shape)}; allowed: {shape}")
        if page.dim() == 6:
            page = page.squeeze(1)
        whole = page.view([sizes[name] for name in places]) if page.dim() == 1 else page
        keys, values = whole.permute([places.index(name) for name in ("side", "layer", "head", "token", "dim")])
        return keys, values


def __getattr__(name: str) -> Any:
    if name == "KVQuantStorage":
        return _storage()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _storage() -> Any:
    """The class over SGLang's base. Raises `UnsupportedError` for other releases."""
    require("sglang", *SERVED)
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    body = {"__module__": __name__, "__doc__": _Storage.__doc__}
    return type(HiCacheStorage)("KVQuantStorage", (_Storage, HiCacheStorage), body)
