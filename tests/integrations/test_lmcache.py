"""LMCache 0.5.6 itself, on the CPU: its configuration, loader, allocators and storage manager with our backend."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend import CreateStorageBackends
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface
from lmcache.v1.storage_backend.storage_manager import StorageManager

import kvquant
from kvquant.errors import KVQuantWarning, StoreError, UnsupportedError
from kvquant.integrations import lmcache as adapter
from kvquant.testing import relative_rms

README = (Path(__file__).parents[2] / "README.md").read_text()
LAYERS, HEADS, DIM, CHUNK = 4, 2, 64, 256
SHAPE = torch.Size((2, LAYERS, CHUNK, HEADS * DIM))
PLUGIN = {
    "storage_plugin.mine.module_path": "kvquant.integrations.lmcache",
    "storage_plugin.mine.class_name": "KVQuantBackend",
}


def config_of(**options):
    extra = PLUGIN | {f"storage_plugin.mine.{name}": value for name, value in options.items()}
    return LMCacheEngineConfig.from_dict(
        {
            "chunk_size": CHUNK,
            "local_cpu": False,
            "max_local_cpu_size": 0.1,
            "storage_plugins": ["mine"],
            "extra_config": extra,
        }
    )


def test_the_readmes_configuration_is_loaded(tmp_path):
    (written,) = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    written = json.loads(written.replace("GiB", "MiB").replace("/mnt/ssd/kv", str(tmp_path)))
    config = LMCacheEngineConfig.from_dict(written | {"max_local_cpu_size": 0.1})
    manager = StorageManager(config, metadata_of(), EventManager())
    assert manager.list_backends()["kvquant"] == "KVQuantBackend"
    assert [tier.budget >> 20 for tier in manager.storage_backends["kvquant"].stats().store.tiers] == [8, 200]
    close(manager)


def metadata_of(model="model", worker=0, workers=1, dtype=torch.bfloat16, shape=None, **others):
    shape = shape or (LAYERS, 2, CHUNK, HEADS, DIM)
    return LMCacheMetadata(model, workers, workers, worker, worker, dtype, shape, **others)


def close(manager):
    """LMCache stops the loop of a storage manager, but does not close it."""
    if not manager.loop.is_closed():
        manager.close()
        manager.loop.close()


class Engine:
    """LMCache's storage manager with our backend, loaded by its configuration."""

    def __init__(self, metadata=None, **options):
        metadata = metadata or metadata_of()
        self.manager = StorageManager(config_of(**options), metadata, EventManager())
        self.backend = self.manager.storage_backends["mine"]

    def close(self):
        close(self.manager)

    def put(self, *keys, fill=None, shape=SHAPE, fmt=MemoryFormat.KV_2LTD):
        """Chunks of noise under keys; what they were."""
        objs = [self.manager.allocate(shape, key.dtype, fmt) for key in keys]
        for obj in objs:
            obj.tensor.normal_() if fill is None else obj.tensor.fill_(fill)
        were = [obj.tensor.clone() for obj in objs]
        self.manager.batched_put(keys, objs)
        self.settle(keys)
        return were

    def settle(self, keys):
        deadline = time.monotonic() + 60
        while any(self.backend.exists_in_put_tasks(key) for key in keys) and time.monotonic() < deadline:
            time.sleep(0.002)

    def get(self, *keys):
        return self.manager.batched_get(list(keys), location="mine")

    def memory_in_use(self):
        allocator = self.manager.local_cpu_backend.memory_allocator
        assert allocator.memcheck()
        manager = getattr(allocator.pin_allocator, "address_manager", None)
        return manager.get_heap_size() - manager.get_free_size()


@pytest.fixture
def open_engine():
    opened = []

    def opening(*args, **options):
        opened.append(Engine(*args, **({"host_budget": "64MiB"} | options)))
        return opened[-1]

    yield opening
    for engine in opened:
        engine.close()


def key_of(number, model="model", dtype=torch.bfloat16, **others):
    return CacheEngineKey(model, others.pop("workers", 1), others.pop("worker", 0), number, dtype, **others)


def test_lmcache_loads_the_backend_by_its_configuration(open_engine):
    engine = open_engine()
    assert engine.manager.list_backends()["mine"] == "KVQuantBackend"
    assert isinstance(engine.backend, StoragePluginInterface)
    assert engine.backend.get_allocator_backend() is engine.manager.local_cpu_backend


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fp16_comes_back_bit_for_bit(open_engine, dtype):
    engine = open_engine(metadata_of(dtype=dtype), policy="fp16")
    keys = [key_of(number, dtype=dtype) for number in range(3)]
    were = engine.put(*keys)
    for obj, was in zip(engine.get(*keys), were, strict=True):
        assert torch.equal(obj.tensor, was)
        assert obj.get_memory_format() == MemoryFormat.KV_2LTD
        assert obj.get_ref_count() == 1


def test_each_layer_has_the_error_of_its_codec(open_engine):
    policy = {
        "name": "mixed",
        "default": {"key": "int4", "value": "int4"},
        "layers": {"0": {"key": "fp16", "value": "int8"}},
    }
    engine = open_engine(policy=policy)
    (was,) = engine.put(key_of(1))
    (obj,) = engine.get(key_of(1))
    assert torch.equal(obj.tensor[0, 0], was[0, 0])
    assert relative_rms(obj.tensor[1, 0], was[1, 0]) < 0.01
    for layer in range(1, LAYERS):
        for side in range(2):
            assert 0.05 < relative_rms(obj.tensor[side, layer], was[side, layer]) < 0.1
    assert torch.equal(obj.tensor[:, :, :4], was[:, :, :4])  # sinks: any chunk may begin a sequence


def test_a_chunk_that_is_not_full_comes_back_as_long_as_it_was(open_engine):
    engine = open_engine(policy="int8")
    shape = torch.Size((2, LAYERS, 77, HEADS * DIM))
    (was,) = engine.put(key_of(1), shape=shape)
    (obj,) = engine.get(key_of(1))
    assert obj.tensor.shape == shape
    assert relative_rms(obj.tensor, was) < 0.01
    assert engine.backend.stats().stored_bytes < 0.65 * was.nbytes


def test_layers_one_by_one_get_their_own_codecs(open_engine):
    policy = {
        "name": "mixed",
        "default": {"key": "int4", "value": "int4"},
        "layers": {"2": {"key": "fp16", "value": "fp16"}},
    }
    engine = open_engine(policy=policy)
    keys = key_of(1).split_layers(LAYERS)
    were = engine.put(*keys, shape=torch.Size((CHUNK, 2, HEADS * DIM)), fmt=MemoryFormat.KV_T2D)
    for layer, (obj, was) in enumerate(zip(engine.get(*keys), were, strict=True)):
        assert torch.equal(obj.tensor, was) == (layer == 2)
        assert relative_rms(obj.tensor, was) < 0.1


def test_int4_holds_three_times_the_tokens(open_engine):
    """Of what a budget holds, 3.3 × as many tokens as stored raw; what is beyond it leaves, the budget is kept."""
    shape, held = (2, 2, CHUNK, 8, 128), {}  # two layers of a model of 8 billion parameters
    for policy in ("fp16", "int4"):
        engine = open_engine(metadata_of(shape=shape), policy=policy, host_budget="16MiB")
        keys = [key_of(number) for number in range(32)]
        for key in keys:
            engine.put(key, shape=torch.Size((2, 2, CHUNK, 8 * 128)))
        held[policy] = sum(engine.backend.contains(key) for key in keys)
        (host,) = engine.backend.stats().store.tiers
        assert host.used <= host.budget == 16 << 20
        assert engine.get(keys[-1])[0] is not None
    assert held["int4"] >= 3.3 * held["fp16"] > 0
    stats = engine.backend.stats()
    assert stats.stored == 32
    assert stats.raw_bytes == 32 << 21
    assert stats.raw_bytes >= 3.3 * stats.stored_bytes
    assert f"in {stats.stored_bytes} (0.2" in str(stats)


def test_batches_end_at_the_first_chunk_that_is_missing(open_engine):
    engine = open_engine()
    keys = [key_of(number) for number in range(5)]
    engine.put(*keys)
    engine.manager.remove(keys[2])
    assert engine.backend.batched_contains(keys) == 2
    assert engine.manager.batched_contains(keys)[0] == 2
    assert [obj is not None for obj in engine.get(*keys)] == [True, True, False, False, False]
    found = asyncio.run(engine.backend.batched_get_non_blocking("lookup", keys))
    assert len(found) == 2
    assert asyncio.run(engine.backend.batched_async_contains("lookup", keys)) == 2
    assert engine.backend.get_non_blocking(keys[2]) is None
    assert engine.backend.get_non_blocking(keys[1]).result() is not None


def test_damage_is_a_miss_once_and_leaves_no_memory_behind(open_engine):
    engine = open_engine()
    keys = [key_of(1), key_of(2)]
    engine.put(*keys)
    before = engine.memory_in_use()
    chunks = engine.backend.chunks
    name = chunks.name(keys[0].to_string())
    for at in (4, 30, 200, -1):
        data = chunks.store.get(name)
        whole = data.clone()
        data[at] ^= 1
        chunks.store.put_below(name, data)
        assert engine.get(*keys) == [None, None]
        assert not engine.backend.contains(keys[0])  # it is computed anew
        chunks.store.put_below(name, whole[:-50])
        assert engine.get(keys[0]) == [None]
        chunks.store.put_below(name, whole)
    assert engine.backend.stats().damaged == 8
    assert engine.memory_in_use() == before
    assert engine.get(keys[1])[0] is not None


def test_chunks_outlive_the_process_on_disk_alone(open_engine, tmp_path):
    options = {"disk_budget": "8MiB", "disk_path": str(tmp_path), "host_budget": 0, "policy": "fp16"}
    engine = open_engine(**options)
    (was,) = engine.put(key_of(1))
    engine.close()
    again = open_engine(**options)
    assert torch.equal(again.get(key_of(1))[0].tensor, was)
    again.close()
    slab = next(tmp_path.rglob("*.slab"))
    data = bytearray(slab.read_bytes())
    data[5000] ^= 1
    slab.write_bytes(data)
    damaged = open_engine(**options)
    assert damaged.backend.contains(key_of(1))
    assert damaged.get(key_of(1)) == [None]
    assert not damaged.backend.contains(key_of(1))


def test_what_is_on_its_way_when_lmcache_closes_arrives(open_engine, tmp_path):
    options = {"disk_budget": "16MiB", "disk_path": str(tmp_path), "policy": "fp16"}
    engine = open_engine(**options)
    keys = [key_of(number) for number in range(8)]
    objs = [engine.manager.allocate(SHAPE, torch.bfloat16) for _ in keys]
    for number, obj in enumerate(objs):
        obj.tensor.fill_(number)
    engine.manager.batched_put(keys, objs)
    engine.close()  # frees the memory that chunks lie in before it closes our backend
    again = open_engine(**options)
    for number, obj in enumerate(again.get(*keys)):
        assert bool((obj.tensor == number).all())


def test_every_part_of_the_identity_makes_a_miss(open_engine, tmp_path):
    """Case 34: what LMCache tells of a chunk, and what the configuration adds."""
    options = {"disk_budget": "8MiB", "disk_path": str(tmp_path), "policy": "int4", "revision": "a", "tenant": "t"}
    engine = open_engine(**options)
    key = key_of(1)
    engine.put(key)
    others = [
        key_of(1, model="other"),
        key_of(1, dtype=torch.float16),
        key_of(1, worker=1),
        key_of(1, workers=2),
        key_of(2),
        key_of(1, request_configs={"lmcache.tag.user": "other"}),
    ]
    assert not any(engine.backend.contains(other) for other in others)
    assert engine.get(key_of(1))[0] is not None
    engine.close()
    group = {"name": "int4", "default": {"key": {"codec": "int4", "group": 32}, "value": "int4"}}
    for change in ({"policy": "int8"}, {"policy": group}, {"revision": "b"}, {"tenant": "u"}):
        other = open_engine(**(options | change))
        assert not other.backend.contains(key), change
        assert other.get(key) == [None]
        other.close()
    assert open_engine(**options).get(key)[0] is not None


def test_pins_keep_chunks_while_others_leave(open_engine):
    engine = open_engine(policy="fp16", host_budget="1MiB")  # room for one
    engine.put(key_of(1))
    assert engine.backend.contains(key_of(1), pin=True)
    engine.put(key_of(2))
    assert engine.backend.contains(key_of(1))
    assert not engine.backend.contains(key_of(2))
    assert engine.backend.stats().refused == 1
    assert engine.backend.unpin(key_of(1))
    assert not engine.backend.unpin(key_of(1))
    engine.put(key_of(2))
    assert engine.backend.contains(key_of(2))
    assert not engine.backend.pin(key_of(1))
    assert asyncio.run(engine.backend.batched_async_contains("lookup", [key_of(2)], pin=True)) == 1
    assert engine.backend.stats().store.pinned == 1
    asyncio.run(engine.backend.batched_get_non_blocking("lookup", [key_of(2)]))
    assert engine.backend.stats().store.pinned == 0


def test_callbacks_come_once_a_chunk_is_stored(open_engine):
    engine = open_engine()
    obj = engine.manager.allocate(SHAPE, torch.bfloat16)
    obj.tensor.normal_()
    called = []
    (future,) = engine.backend.batched_submit_put_task([key_of(1)], [obj], on_complete_callback=called.append)
    future.result()
    assert called == [key_of(1)]
    assert obj.get_ref_count() == 1
    assert engine.backend.batched_submit_put_task([key_of(1)], [obj]) is None  # it is there
    asyncio.run(engine.backend.async_batched_submit_put_task([key_of(2)], [obj]))
    assert engine.backend.contains(key_of(2))
    assert engine.manager.remove(key_of(2)) == 1
    assert engine.manager.clear(["mine"]) == CHUNK
    assert not engine.backend.contains(key_of(1))


def test_infinite_values_are_not_stored(open_engine):
    engine = open_engine()
    engine.put(key_of(1), fill=float("inf"))
    assert not engine.backend.contains(key_of(1))
    assert engine.backend.stats().refused == 1


def test_a_layout_that_cannot_be_served_is_not_stored(open_engine):
    engine = open_engine()
    obj = engine.manager.allocate(SHAPE, torch.bfloat16, MemoryFormat.KV_MLA_FMT)
    (future,) = engine.backend.batched_submit_put_task([key_of(1)], [obj])
    with pytest.raises(KVQuantWarning, match="are not stored: chunk KV_MLA_FMT"):  # in tests, warnings are errors
        future.result()
    assert obj.get_ref_count() == 1
    assert not engine.backend.exists_in_put_tasks(key_of(1))
    assert engine.backend.stats().refused == 1


@pytest.mark.parametrize(
    ("options", "metadata", "message"),
    [
        ({"polcy": "int4"}, {}, r"^storage_plugin\.mine\.polcy: unknown option; allowed: policy, host_budget, "),
        ({"policy": 4}, {}, r"^storage_plugin\.mine\.policy: 4; allowed: text or a mapping$"),
        ({"policy": "int5x"}, {}, r"^storage_plugin\.mine\.policy: policy 'int5x' is neither a file nor a preset"),
        ({"tenant": True}, {}, r"^storage_plugin\.mine\.tenant: True; allowed: text$"),
        ({"host_budget": "much"}, {}, r"^storage_plugin\.mine\.host_budget: 'much'; allowed: bytes"),
        ({"host_budget": None}, {}, r"host_budget: None; allowed: a whole number or text"),
        ({"disk_budget": "1MiB"}, {}, r"^storage_plugin\.mine: disk_budget and disk_path go together"),
        ({}, {"role": "scheduler"}, r"role 'scheduler'; allowed: workers"),
        ({}, {"use_mla": True}, r"MLA or enable_blending; allowed: keys and values"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(options, metadata, message):
    config = config_of(**({"host_budget": "1MiB"} | options))
    with pytest.raises((StoreError, UnsupportedError, kvquant.PolicyError), match=message) as caught:
        adapter.KVQuantBackend("cpu", config, metadata_of(**metadata), object())
    assert "\n" not in str(caught.value)


def test_lmcache_goes_on_without_a_backend_that_refuses():
    loop = asyncio.new_event_loop()
    backends = CreateStorageBackends(config_of(polcy="int4"), metadata_of(), loop)
    loop.close()
    assert list(backends) == ["LocalCPUBackend"]
    backends["LocalCPUBackend"].close()


def test_other_releases_are_refused(monkeypatch):
    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.5.5")
    adapter._backend.cache_clear()
    with pytest.raises(UnsupportedError, match=r"^lmcache 0\.5\.5; kvquant works with lmcache 0\.5\.6$"):
        _ = adapter.KVQuantBackend
    with pytest.raises(UnsupportedError, match=r"^lmcache 0\.5\.5; kvquant works with lmcache 0\.5\.6$"):
        adapter.register()
