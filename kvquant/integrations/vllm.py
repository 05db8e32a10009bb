"""vLLM: a host and SSD tier of compressed blocks behind its native `OffloadingConnector`.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "KVQuantOffloadingSpec",
        "spec_module_path": "kvquant.integrations.vllm", "policy": "int4", "host_budget": "4GiB"}}'

vLLM asks the manager, on the scheduler's side, which blocks are there, and has the worker store and load them. Its
connector takes no for an answer, but no failed load: so the manager reads and verifies a block when it is looked up,
and keeps it until it is loaded. What is missing or damaged is a miss then, and recomputed. Manager and worker share a
`BlockTier` and must live in one process.

Importing this module needs vLLM; anything but the versions it knows is refused.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import UnsupportedError, shown
from ..keys import Identity, settings_of
from ..policy import PrecisionPolicy
from ..store.tiered import TieredStore
from .blockwise import BlockTier
from .settings import StoreSettings
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
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector  # noqa: E402
from vllm.v1.kv_offload.base import (  # noqa: E402
    CanonicalKVCaches,
    OffloadingCounterMetadata,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig  # noqa: E402

from .vllm_cache import Layers  # noqa: E402
from .vllm_transfer import ENGINES, METRICS, Engine, Manager, Worker, logger  # noqa: E402

_PLACE = "kv_connector_extra_config."
_OTHERS = ("spec_name", "spec_module_path", "block_size", "blocks_per_chunk", "offload_prompt_only")  # vLLM reads them


class KVQuantOffloadingSpec(OffloadingSpec):
    """Named in vLLM's ``kv_connector_extra_config``.

    Options are those of `StoreSettings`: ``policy``, a preset or a policy file; ``host_budget``, ``disk_budget`` and
    ``disk_path``, at least one tier; ``tenant`` and ``revision`` keep blocks apart on the same disk. vLLM's own
    ``block_size`` is ``policy.block_tokens`` whether given or not. Raises `UnsupportedError`, `PolicyError`,
    `StoreError`.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.options = read_options(config.extra_config)
        self.policy = self.options.load_policy(_PLACE)
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
        return {f"kvquant:{name}": OffloadingCounterMetadata(documentation=told) for name, told in METRICS.values()}

    def open_store(self) -> TieredStore:
        """The tiers that the options tell of. Raises `StoreError`."""
        return self.options.open_store(place=_PLACE)

    def get_manager(self) -> OffloadingManager:
        """The scheduler's side. Raises `UnsupportedError` where the worker is in another process."""
        engine = ENGINES.get(self.config.engine_id)
        if engine is None:
            raise UnsupportedError(
                "the worker runs in another process than the scheduler; allowed: one process for both "
                "(VLLM_ENABLE_V1_MULTIPROCESSING=0 where vLLM would start another, as it does on CPUs)"
            )
        return Manager(engine, self.tokens * self.blocks_per_chunk)

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
        identity = identity_of(vllm_config, self.policy, layers.dtype, self.options)
        store = self.open_store()
        try:
            tier = BlockTier(self.policy, layers.shapes, layers.dtype, store, identity.digest())
        except BaseException:
            store.close()
            raise
        engine = ENGINES[self.config.engine_id] = Engine(tier)
        atexit.register(engine.close)
        _, *described = self.policy.resolve(["full_attention"] * len(layers.shapes)).describe().splitlines()
        logger.info("kvquant: blocks of %d tokens; %s", tier.block_tokens, "; ".join(map(str.strip, described)))
        return Worker(engine, layers, self.blocks_per_chunk)


class KVQuantConnector(OffloadingConnector):
    """vLLM's connector, but that of a prompt of which every block is stored it counts one token less as loaded.

    vLLM computes that token anyway, for its logits, and its own connector counts it as cached. Named as
    ``kv_connector``, with ``kv_connector_module_path`` this module.
    """

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens to load beyond those that vLLM holds, and whether there are any; None: ask again."""
        found, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found is not None:
            found = min(found, request.num_tokens - 1 - num_computed_tokens)
        return found, later and bool(found)


def read_options(extra: Mapping[str, Any]) -> StoreSettings:
    """Ours among the options of ``kv_connector_extra_config``. Raises `StoreError`."""
    return StoreSettings.read({name: given for name, given in extra.items() if name not in _OTHERS}, _PLACE)


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


def identity_of(vllm_config: Any, policy: PrecisionPolicy, dtype: torch.dtype, options: StoreSettings) -> Identity:
    """All besides vLLM's block hash that decides a block's bytes. The hash covers tokens, adapters' names and salts.

    Raises `UnsupportedError` where blocks are to outlast the process, but nothing tells the weights from others.
    """
    model, unknown, lasting = vllm_config.model_config, os.urandom(16).hex(), options.disk_path is not None
    if vllm_config.load_config.load_format == "dummy":
        weights: str | None = f"dummy {model.seed}"
    else:
        weights = weights_fingerprint(model.model, model.revision) or options.revision or None
    if weights is None and lasting:
        raise UnsupportedError(
            f"no weight files found of {shown(model.model)}, so that other weights might read its blocks from disk; "
            f"allowed: a folder or hub name with files in its cache, a revision of yours, or no disk_path"
        )
    if vllm_config.lora_config is not None and lasting:
        logger.warning("kvquant: vLLM tells adapters by name alone, so blocks on disk are not read again once it ends")
    settings = {"engine": "vllm", "quantization": str(model.quantization), "config": settings_of(model.hf_config)}
    return Identity(
        model=f"{model.revision} {options.revision} {weights or unknown}",
        policy=policy.fingerprint(),
        dtype=str(dtype),
        settings=json.dumps(settings, sort_keys=True),
        adapter="" if vllm_config.lora_config is None else unknown,
        tenant=options.tenant,
    )
