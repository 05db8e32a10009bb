"""SGLang 0.5.23's controllers on the CPU: their threads back pages up to our storage and prefetch them."""

from __future__ import annotations

import json
import re
import threading
import warnings
from pathlib import Path

import pytest
import torch

from kvquant.errors import UnsupportedError
from kvquant.testing import relative_rms
from tests.integrations.sglang_pools import DYNAMIC, LAYOUTS, PAGE, TOKENS, device_pool, host_pool, pages

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of SGLang and all it imports
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
    from sglang.srt.runtime_context import get_parallel

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.fixture(scope="module")
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    ranks = {"attn_dcp_size": 1, "attn_dcp_rank": 0, "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
    with get_parallel().override(**ranks):
        yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def waited(ready, seconds=60):
    return ready.get(timeout=seconds)


class Controller:
    """SGLang's controller and its threads, over pools on the CPU."""

    def __init__(self, group, layout, hybrid=False, **options):
        device = device_pool()
        self.pool = host_pool(layout, device)
        self.request = CacheRequestHandle("request", 0) if hybrid else "request"
        entry = PoolEntry(PoolName.KV, self.pool, device, lambda layer: layer, is_primary_index_anchor=True)
        written = json.dumps(DYNAMIC | {"hicache_storage_pass_prefix_keys": True, "host_budget": "16MiB"} | options)
        parsed, *_ = HybridCacheController.parse_storage_backend_extra_config(written)  # as a server is given it
        self.controller = (HybridCacheController if hybrid else HiCacheController)(
            PagedTokenToKVPoolAllocator(TOKENS, PAGE, torch.bfloat16, "cpu", device, False),
            HostPoolGroup([entry]) if hybrid else self.pool,
            PAGE,
            group,
            threading.Event(),
            io_backend="direct",
            storage_backend="dynamic",
            model_name="model",
            storage_backend_extra_config=parsed,
        )
        self.storage = self.controller.storage_backend

    def back_up(self, ids):
        """Pages of tokens, of noise, to the storage; what they hold, and how many tokens were stored."""
        indices = self.pool.alloc(len(ids))
        self.controller.write_storage(indices, ids, self.controller.get_hash_str(ids, page_size=PAGE), prefix_keys=[])
        return pages(self.pool, indices), waited(self.controller.ack_backup_queue).completed_tokens

    def prefetch(self, ids):
        """What the storage says it has of tokens, what came back, and that."""
        self.controller.prefetch(self.request, ids)
        operation = waited(self.controller.prefetch_hit_queue)
        if not operation.storage_hit_count:
            return 0, 0, None
        operation.host_indices = self.pool.alloc(operation.storage_hit_count)
        self.controller.prefetch_buffer.put(operation)
        completed = 0
        while not (ack := waited(self.controller.ack_prefetch_queue)).completed_req:
            completed = max(completed, ack.completed_tokens or 0)
        return operation.storage_hit_count, completed, pages(self.pool, operation.host_indices)


@pytest.fixture
def control(one_rank):
    made = []

    def making(*args, **options):
        made.append(Controller(one_rank, *args, **options))
        return made[-1]

    yield making
    for each in made:
        each.controller.detach_storage_backend()


def test_the_readmes_configuration_is_loaded(control, tmp_path):
    (written,) = re.findall(r"--hicache-storage-backend-extra-config '(.*?)'", README, re.DOTALL)
    controller = control(
        "layer_first", True, **json.loads(written.replace("GiB", "MiB").replace("/mnt/ssd/kv", str(tmp_path)))
    )
    assert controller.back_up(list(range(PAGE)))[1] == PAGE
    host, disk = controller.storage.stats().store.tiers
    assert (host.budget >> 20, disk.budget >> 20) == (8, 200)
    assert any(tmp_path.rglob("*.slab"))


@pytest.mark.parametrize("hybrid", [False, True])  # the base, and what a server builds over it
@pytest.mark.parametrize("interface", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_controller_backs_up_and_prefetches(control, layout, interface, hybrid):
    controller = control(layout, hybrid, policy="int8", interface_v1=interface)
    ids = list(range(3 * PAGE))
    were, stored = controller.back_up(ids)
    assert stored == 3 * PAGE
    longer = [*ids, *range(1000, 1000 + PAGE)]
    hits, completed, found = controller.prefetch(longer)
    assert hits == completed == 3 * PAGE
    assert relative_rms(found, were) < 0.01
    assert controller.storage.stats().restored == 3
    assert controller.prefetch(list(range(5000, 5000 + PAGE)))[0] == 0


def test_the_controller_credits_only_what_is_intact(control):
    controller = control("page_first", policy="int4")
    ids = list(range(4 * PAGE))
    controller.back_up(ids)
    chunks = controller.storage.chunks
    name = chunks.name(controller.controller.get_hash_str(ids, page_size=PAGE)[2])
    data = chunks.store.get(name)
    data[-5] ^= 1
    chunks.store.put_below(name, data)
    hits, completed, _ = controller.prefetch(ids)
    assert (hits, completed) == (4 * PAGE, 2 * PAGE)
    assert controller.prefetch(ids)[:2] == (2 * PAGE, 2 * PAGE)


def test_the_controller_refuses_to_start_over_a_pool_that_cannot_be_served(one_rank):
    with pytest.raises(UnsupportedError, match="allowed: MHATokenToKVPoolHost"):
        Controller(one_rank, "page_unified")
