"""The two sides of vLLM's offloading connector: the manager, which the scheduler asks, and the worker, which moves.

Both work on one `BlockTier`, which they share, as `Engine`.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingManager,
    OffloadingWorker,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
)

from ..blocks import KVBlock
from .blockwise import BlockTier
from .vllm_cache import Layers

logger = init_logger("vllm.kvquant")  # vLLM shows what is below its own name

METRICS = {  # fields of `BlockTierStats`
    "stored": ("stored_blocks", "Blocks that kvquant stored."),
    "loaded": ("loaded_blocks", "Blocks that kvquant gave back."),
    "damaged": ("damaged_blocks", "Blocks that were found damaged, and recomputed."),
    "dropped": ("dropped_blocks", "Blocks that could not be stored."),
    "engine_bytes": ("engine_bytes", "Bytes in the engine of the blocks that kvquant stored."),
    "payload_bytes": ("payload_bytes", "Bytes that kvquant stored them in."),
}


@dataclass
class Engine:
    """What manager and worker of one engine share."""

    tier: BlockTier
    generation: int = 0  # stores from before a reset are void
    open: bool = True

    def close(self) -> None:
        """Log what was done, and close the store; what is in memory goes to its disk. Once."""
        if self.open:
            self.open = False
            logger.info("kvquant: %s", self.tier.stats())
            self.tier.close()
            for name in [name for name, engine in ENGINES.items() if engine is self]:
                del ENGINES[name]
            atexit.unregister(self.close)


ENGINES: dict[str, Engine] = {}


@dataclass
class Store(LoadStoreSpec):
    """Blocks to store: their names, and whether each is the first of its sequence."""

    names: list[bytes]
    first: list[bool]
    generation: int


@dataclass
class Load(LoadStoreSpec):
    """Blocks to load, verified: the layers of each."""

    blocks: list[list[KVBlock]]


class Manager(OffloadingManager):
    """The scheduler's side: which blocks are there. Those it has read, and keeps until they are loaded."""

    def __init__(self, engine: Engine, block_tokens: int) -> None:
        self._engine, self._block_tokens = engine, block_tokens
        self._read: dict[bytes, list[KVBlock]] = {}
        self._holders: dict[bytes, set[str]] = {}  # requests that are to load it
        self._storing: set[bytes] = set()
        self._chains: dict[str, dict[bytes, int]] = {}  # of each request, its blocks and where they end
        self._distrusting: set[str] = set()  # requests that met a damaged block, and store anew what follows it
        self._told: dict[str, int] = {}

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """Whether a block is there, every byte verified; it is kept until the request has loaded it, or ended."""
        if not any(req_context.load_tier_filter.allows(medium, Locality.LOCAL) for medium in Medium):
            return LookupResult.MISS
        self._note([key], req_context)
        if key not in self._read:
            if key in self._storing:
                return LookupResult.HIT_PENDING
            there = self._engine.open and key in self._engine.tier
            blocks = self._engine.tier.fetch(key) if self._engine.open else None
            if blocks is None:
                if there:
                    self._distrusting.add(req_context.req_id)
                return LookupResult.MISS
            self._read[key], self._holders[key] = blocks, set()
        self._holders[key].add(req_context.req_id)
        return LookupResult.HIT

    def prepare_load(self, keys: Collection[bytes], req_context: ReqContext) -> LoadStoreSpec:
        """What the worker needs to load blocks that were looked up."""
        load = Load([self._read[key] for key in keys])
        self._let_go(self._read.keys() - set(keys), req_context.req_id)
        return load

    def complete_load(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """They are loaded."""
        self._let_go(keys, req_context.req_id)

    def prepare_store(self, keys: Collection[bytes], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Which blocks are to be stored: those that neither are nor are about to be."""
        if not self._engine.open:
            return None
        self._note(keys, req_context)
        anew = req_context.req_id in self._distrusting
        new = [key for key in keys if key not in self._storing and (anew or key not in self._engine.tier)]
        self._storing.update(new)
        first = [req_context.get_offload_key_position(key) == self._block_tokens for key in new]
        return PrepareStoreOutput(new, Store(new, first, self._engine.generation), evicted_keys=[])

    def complete_store(self, keys: Collection[bytes], req_context: ReqContext, success: bool = True) -> None:
        """They are stored, or were dropped: `lookup` tells."""
        self._storing.difference_update(keys)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Blocks are stored as they come."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Its blocks count as used, the first one last."""
        self._let_go(list(self._read), req_context.req_id)
        self._distrusting.discard(req_context.req_id)
        chain = self._chains.pop(req_context.req_id, {})
        if self._engine.open:
            self._engine.tier.touch(sorted(chain, key=chain.__getitem__))

    def reset_cache(self) -> None:
        """Forget all; stores under way are void. The weights may have changed."""
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
        stats, now = OffloadingConnectorStats(), self._engine.tier.counts()
        for field, (name, _) in METRICS.items():
            count = now[field]
            if count > self._told.get(field, 0):
                stats.increase_counter(f"kvquant:{name}", count - self._told.get(field, 0))
            self._told[field] = count
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        """Close what both sides share."""
        self._engine.close()

    def _note(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        chain = self._chains.setdefault(req_context.req_id, {})
        for key in keys:
            chain[key] = req_context.get_offload_key_position(key) or 0

    def _let_go(self, keys: Collection[bytes], request: str) -> None:
        for key in keys:
            if key in self._holders:
                self._holders[key].discard(request)
                if not self._holders[key]:
                    del self._read[key], self._holders[key]


class Worker(OffloadingWorker):
    """Moves blocks between vLLM's cache and the tier, in the calling thread: threads beside it would slow it down."""

    def __init__(self, engine: Engine, layers: Layers, blocks_per_chunk: int) -> None:
        self._engine, self._layers, self._per = engine, layers, blocks_per_chunk
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Store) -> bool:
        """Encode blocks of vLLM's cache, and store them."""
        began, before = time.perf_counter(), self._engine.tier.counts()["payload_bytes"]
        valid = self._engine.open and dst_spec.generation == self._engine.generation
        if valid and len(src_spec.block_ids) == len(dst_spec.names) * self._per:
            ids = torch.from_numpy(src_spec.block_ids).long()
            read = partial(self._layers.read, ids=ids, per=self._per)
            self._engine.tier.put(dst_spec.names, dst_spec.first, read)
        self._done(job_id, self._engine.tier.counts()["payload_bytes"] - before, began)
        return True  # what was not stored is missed later

    def submit_load(self, job_id: int, src_spec: Load, dst_spec: GPULoadStoreSpec) -> bool:
        """Decode blocks into vLLM's cache."""
        began, tier = time.perf_counter(), self._engine.tier
        ids = torch.from_numpy(dst_spec.block_ids).long()
        skip = dst_spec.block_indices[0] % self._per
        for layer in range(len(self._layers.pages)):
            states = tier.decode(layer, [block[layer] for block in src_spec.blocks])
            self._layers.write(layer, states, ids, skip)
        self._done(job_id, sum(each.nbytes for block in src_spec.blocks for each in block), began)
        return True

    def get_finished(self) -> list[TransferResult]:
        """What was done since it was last asked."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        """Close what both sides share."""
        self._engine.close()

    def _done(self, job_id: int, nbytes: int, began: float) -> None:
        self._finished.append(TransferResult(job_id, True, nbytes, time.perf_counter() - began))
