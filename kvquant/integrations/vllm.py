"""vLLM: a host and SSD tier of compressed blocks behind its native `OffloadingConnector`.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "KVQuantOffloadingSpec",
        "spec_module_path": "kvquant.integrations.vllm", "policy": "int4", "host_budget": "4GiB"}}'

vLLM asks the manager, on the scheduler's side, which blocks are there, and has the worker store and load them. Its
connector takes no for an answer, but no failed load: so the manager reads and verifies a block when it is looked up,
and keeps it until it is loaded. What is missing or damaged is a miss then, and recomputed. Manager and worker share one
`BlockTier` and must live in one process.

Importing this module needs vLLM; anything but the versions it knows is refused.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..blocks import KVBlock
from ..errors import StoreError, UnsupportedError, shown
from ..keys import Identity, settings_of
from ..policy import PrecisionPolicy
from ..store.tiered import TieredStore
from .blockwise import BlockTier, load_policy
from .weights import weights_fingerprint

SERVED = ("0.32",)  # whose interface this was written to, and is tested with


def check_version(version: str | None) -> None:
    """Raises `UnsupportedError` unless this is a vLLM that is served."""
    if version is None or not version.startswith(tuple(f"{known}." for known in SERVED)):
        given = "is not installed" if version is None else f"{shown(version)} is not served"
        raise UnsupportedError(f"vLLM {given}; kvquant.integrations.vllm works with vLLM {', '.join(SERVED)}")


try:
    from vllm.version import __version__ as _found
except ImportError:
    _found = None
check_version(_found)

from vllm.config import get_current_vllm_config  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats  # noqa: E402
from vllm.logger import init_logger  # noqa: E402
from vllm.v1.kv_offload.base import (  # noqa: E402
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig  # noqa: E402

from .vllm_cache import Layers  # noqa: E402

logger = init_logger("vllm.kvquant")  # vLLM shows what is below its own name

OPTIONS = ("policy", "host_budget", "disk_budget", "disk_path", "tenant")
_OTHERS = ("spec_name", "spec_module_path", "block_size", "blocks_per_chunk", "offload_prompt_only")  # vLLM reads them
_METRICS = {
    "engine_bytes": "Bytes in the engine of the blocks that kvquant stored.",
    "payload_bytes": "Bytes that kvquant stored them in.",
    "stored": "Blocks that kvquant stored.",
    "loaded": "Blocks that kvquant gave back.",
    "damaged": "Blocks that were found damaged, and recomputed.",
    "dropped": "Blocks that could not be stored.",
}


@dataclass
class _Engine:
    """What manager and worker of one engine share."""

    tier: BlockTier
    generation: int = 0  # stores from before a reset are void
    open: bool = True

    def close(self) -> None:
        if self.open:
            self.open = False
            logger.info("kvquant: %s", self.tier.stats())
            self.tier.close()
            for name in [name for name, engine in _ENGINES.items() if engine is self]:
                del _ENGINES[name]
            atexit.unregister(self.close)


_ENGINES: dict[str, _Engine] = {}


@dataclass
class _Store(LoadStoreSpec):
    """Blocks to store: their names, and whether each is the first of its sequence."""

    names: list[bytes]
    first: list[bool]
    generation: int


@dataclass
class _Load(LoadStoreSpec):
    """Blocks to load, verified: the layers of each."""

    blocks: list[list[KVBlock]]


class KVQuantOffloadingSpec(OffloadingSpec):  # type: ignore[misc]
    """Named in vLLM's ``kv_connector_extra_config``.

    ``policy`` is a preset or a policy file; ``host_budget``, ``disk_budget`` and ``disk_path`` are `TieredStore`'s, at
    least one tier; ``tenant`` is text that keeps this engine's blocks apart from others' on the same disk. vLLM's own
    ``block_size`` is ``policy.block_tokens`` whether given or not. Raises `UnsupportedError`, `PolicyError`,
    `StoreError`.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        options = checked_options(config.extra_config)
        self.policy: PrecisionPolicy = load_policy("policy", options["policy"])
        self.options = options
        parallel = config.parallel
        sizes = {name: getattr(parallel, f"{name}_size") for name in ("tp", "pp", "pcp", "dcp")}
        if parallel.world_size != 1 or any(size != 1 for size in sizes.values()):
            raise UnsupportedError(
                f"{parallel.world_size} workers ({', '.join(f'{name} {n}' for name, n in sizes.items())}); "
                f"allowed: one worker, in the scheduler's process"
            )
        if len(config.groups) != 1:
            raise UnsupportedError(
                f"{len(config.groups)} groups of cache layers; allowed: one, of full attention "
                f"(vLLM's --disable-hybrid-kv-cache-manager makes one of several)"
            )
        (self.tokens,) = self.tokens_per_block
        self.blocks_per_chunk = blocks_per_chunk(config, self.policy.block_tokens, self.tokens)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """What vLLM exports to Prometheus, and logs."""
        return {f"kvquant:{name}": OffloadingCounterMetadata(documentation=told) for name, told in _METRICS.items()}

    def get_manager(self) -> OffloadingManager:
        """The scheduler's side. Raises `UnsupportedError` where the worker is in another process."""
        engine = _ENGINES.get(self.config.engine_id)
        if engine is None:
            raise UnsupportedError(
                "the worker runs in another process than the scheduler; allowed: one process for both "
                "(VLLM_ENABLE_V1_MULTIPROCESSING=0 where vLLM would start another, as it does on CPUs)"
            )
        return _Manager(engine, self.tokens * self.blocks_per_chunk)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker's side, which comes first; opens the store."""
        vllm_config = get_current_vllm_config()
        backend = vllm_config.parallel_config.distributed_executor_backend
        if backend != "uni":
            raise UnsupportedError(
                f"executor {shown(backend)}; allowed: 'uni', the worker in the scheduler's process "
                f"(VLLM_ENABLE_V1_MULTIPROCESSING=0 where vLLM would start another, as it does on CPUs)"
            )
        layers = Layers(vllm_config, self.config.groups[0].layer_names, kv_caches, self.tokens)
        disk = self.options["disk_path"] is not None
        identity = identity_of(vllm_config, self.policy, layers.dtype, self.options["tenant"] or "", disk)
        store = TieredStore(**{name: self.options[name] for name in ("host_budget", "disk_budget", "disk_path")})
        try:
            tier = BlockTier(self.policy, layers.shapes, layers.dtype, store, identity.digest())
        except BaseException:
            store.close()
            raise
        engine = _ENGINES[self.config.engine_id] = _Engine(tier)
        atexit.register(engine.close)
        described = self.policy.resolve(["full_attention"] * len(layers.shapes)).describe()
        logger.info("kvquant: blocks of %d tokens: %s", tier.block_tokens, "; ".join(described.splitlines()))
        return _Worker(engine, layers, self.blocks_per_chunk)


def checked_options(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``kv_connector_extra_config``. Raises `StoreError` for what is none of them, or of another type."""
    where = "kv_connector_extra_config"
    unknown = sorted(str(name) for name in extra if name not in OPTIONS + _OTHERS)
    if unknown:
        raise StoreError(f"{where}: {shown(unknown)}; allowed: {', '.join(OPTIONS + _OTHERS)}")
    options = {name: extra.get(name) for name in OPTIONS}
    if options["policy"] is None:
        raise StoreError(f"{where}: no policy; allowed: a preset's name, or a policy file's path")
    for name in ("policy", "disk_path", "tenant"):
        if not isinstance(options[name], str | None) or options[name] == "":
            raise StoreError(f"{where}: {name}: {shown(options[name])}; allowed: text")
    return options


def blocks_per_chunk(config: OffloadingConfig, block_tokens: int, tokens: int) -> int:
    """How many of vLLM's blocks, of ``tokens``, make one of the policy's. Raises `UnsupportedError`."""
    if block_tokens % tokens:
        raise UnsupportedError(
            f"vLLM's blocks of {tokens} tokens, the policy's of {block_tokens}; "
            f"allowed: a vLLM block size that divides block_tokens"
        )
    given = {"block_size", "blocks_per_chunk"} & config.extra_config.keys()
    if given and config.cache.blocks_per_chunk != block_tokens // tokens:
        name = given.pop()
        raise UnsupportedError(
            f"{name}: {shown(config.extra_config[name])}; allowed: none, or what makes chunks of the policy's "
            f"block_tokens, {block_tokens}"
        )
    return block_tokens // tokens


def identity_of(vllm_config: Any, policy: PrecisionPolicy, dtype: torch.dtype, tenant: str, lasting: bool) -> Identity:
    """All besides vLLM's block hash that decides a block's bytes. The hash covers tokens, adapters' names and salts.

    Raises `UnsupportedError` where blocks are to outlast the process, but nothing tells the weights from others.
    """
    model, unknown = vllm_config.model_config, os.urandom(16).hex()
    if vllm_config.load_config.load_format == "dummy":
        weights: str | None = f"dummy {model.seed}"
    else:
        weights = weights_fingerprint(model.model, model.revision)
    if weights is None and lasting:
        raise UnsupportedError(
            f"no weight files found of {shown(model.model)}, so that other weights might read its blocks from disk; "
            f"allowed: a folder or hub name with files in its cache, or no disk_path"
        )
    if vllm_config.lora_config is not None and lasting:
        logger.warning("kvquant: vLLM tells adapters by name alone, so blocks on disk are not read again once it ends")
    settings = {"engine": "vllm", "quantization": str(model.quantization), "config": settings_of(model.hf_config)}
    return Identity(
        model=f"{model.revision} {weights or unknown}",
        policy=policy.fingerprint(),
        dtype=str(dtype),
        settings=json.dumps(settings, sort_keys=True),
        adapter="" if vllm_config.lora_config is None else unknown,
        tenant=tenant,
    )


class _Manager(OffloadingManager):  # type: ignore[misc]
    """The scheduler's side: which blocks are there. What it says is there, it has read, and keeps until it is loaded."""

    def __init__(self, engine: _Engine, block_tokens: int) -> None:
        self._engine, self._block_tokens = engine, block_tokens
        self._read: dict[bytes, list[KVBlock]] = {}
        self._holders: dict[bytes, set[str]] = {}  # requests that are to load it
        self._storing: set[bytes] = set()
        self._told: dict[str, int] = {}

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        if not any(req_context.load_tier_filter.allows(medium, Locality.LOCAL) for medium in Medium):
            return LookupResult.MISS
        if key not in self._read:
            if key in self._storing:
                return LookupResult.HIT_PENDING
            blocks = self._engine.tier.fetch(key) if self._engine.open else None
            if blocks is None:
                return LookupResult.MISS
            self._read[key], self._holders[key] = blocks, set()
        self._holders[key].add(req_context.req_id)
        return LookupResult.HIT

    def prepare_load(self, keys: Collection[bytes], req_context: ReqContext) -> LoadStoreSpec:
        load = _Load([self._read[key] for key in keys])
        self._let_go(self._read.keys() - set(keys), req_context.req_id)
        return load

    def complete_load(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        self._let_go(keys, req_context.req_id)

    def prepare_store(self, keys: Collection[bytes], req_context: ReqContext) -> PrepareStoreOutput | None:
        if not self._engine.open:
            return None
        new = [key for key in keys if key not in self._storing and key not in self._engine.tier]
        self._storing.update(new)
        first = [req_context.get_offload_key_position(key) == self._block_tokens for key in new]
        return PrepareStoreOutput(new, _Store(new, first, self._engine.generation), evicted_keys=[])

    def complete_store(self, keys: Collection[bytes], req_context: ReqContext, success: bool = True) -> None:
        self._storing.difference_update(keys)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._let_go(list(self._read), req_context.req_id)

    def reset_cache(self) -> None:
        self._engine.generation += 1
        self._read.clear()
        self._holders.clear()
        self._storing.clear()
        if self._engine.open:
            self._engine.tier.forget()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was done since it was last asked."""
        if not self._engine.open:
            return None
        stats, now = OffloadingConnectorStats(), self._engine.tier.stats()
        for name in _METRICS:
            count = getattr(now, name)
            if count > self._told.get(name, 0):
                stats.increase_counter(f"kvquant:{name}", count - self._told.get(name, 0))
            self._told[name] = count
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        self._engine.close()

    def _let_go(self, keys: Collection[bytes], request: str) -> None:
        for key in keys:
            if key in self._holders:
                self._holders[key].discard(request)
                if not self._holders[key]:
                    del self._read[key], self._holders[key]


class _Worker(OffloadingWorker):  # type: ignore[misc]
    """Moves blocks between vLLM's cache and the tier, in the calling thread: threads beside it would slow it down."""

    def __init__(self, engine: _Engine, layers: Layers, blocks_per_chunk: int) -> None:
        self._engine, self._layers, self._per = engine, layers, blocks_per_chunk
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: _Store) -> bool:
        began, before = time.perf_counter(), self._engine.tier.payload_bytes
        valid = self._engine.open and dst_spec.generation == self._engine.generation
        if valid and len(src_spec.block_ids) == len(dst_spec.names) * self._per:
            ids = torch.from_numpy(src_spec.block_ids).long()
            read = partial(self._layers.read, ids=ids, per=self._per)
            self._engine.tier.put(dst_spec.names, dst_spec.first, read)
        self._done(job_id, self._engine.tier.payload_bytes - before, began)
        return True  # what was not stored is missed later

    def submit_load(self, job_id: int, src_spec: _Load, dst_spec: GPULoadStoreSpec) -> bool:
        began, tier = time.perf_counter(), self._engine.tier
        ids = torch.from_numpy(dst_spec.block_ids).long()
        skip = dst_spec.block_indices[0] % self._per
        for layer in range(len(self._layers.pages)):
            states = tier.decode(layer, [block[layer] for block in src_spec.blocks])
            self._layers.write(layer, states, ids, skip)
        self._done(job_id, sum(each.nbytes for block in src_spec.blocks for each in block), began)
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        self._engine.close()

    def _done(self, job_id: int, nbytes: int, began: float) -> None:
        self._finished.append(TransferResult(job_id, True, nbytes, time.perf_counter() - began))
