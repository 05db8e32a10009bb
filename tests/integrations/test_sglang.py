"""SGLang 0.5.23 on the CPU: its factory, base class and memory pools with our storage."""

from __future__ import annotations

import dataclasses
import importlib.metadata

import pytest
import torch

import kvquant
from kvquant.errors import StoreError, UnsupportedError
from kvquant.integrations import sglang as adapter
from kvquant.testing import relative_rms
from tests.integrations.sglang_pools import DYNAMIC, LAYOUTS, PAGE, device_pool, host_pool, pages  # before SGLang

from sglang.srt.mem_cache.hicache_storage import (  # isort: skip
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # isort: skip
from sglang.srt.mem_cache.utils import get_hash_str  # isort: skip


def config_of(model="model", **options):
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=model,
    )
    changed = {field.name: options.pop(field.name) for field in dataclasses.fields(config) if field.name in options}
    return dataclasses.replace(config, extra_config=DYNAMIC | {"host_budget": "32MiB"} | options, **changed)


def hashes(count, page=PAGE):
    return get_hash_str(list(range(count * page)), page_size=page)


def extra(*prefix):
    return HiCacheStorageExtraInfo(prefix_keys=list(prefix))


@pytest.fixture
def open_storage():
    opened = []

    def opening(pool=None, **options):
        pool = pool or host_pool()
        storage = StorageBackendFactory.create_backend("dynamic", config_of(**options), pool)
        storage.register_mem_pool_host(pool)
        opened.append(storage)
        return storage

    yield opening
    for storage in opened:
        storage.close()


def test_sglang_loads_the_storage_by_its_configuration(open_storage):
    assert isinstance(open_storage(), HiCacheStorage)
    assert open_storage().get_stats() is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fp16_comes_back_bit_for_bit(open_storage, layout, dtype):
    pool = host_pool(layout, dtype=dtype)
    storage = open_storage(pool, policy="fp16")
    source, target = pool.alloc(2 * PAGE), pool.alloc(2 * PAGE)
    keys = hashes(2)
    assert storage.batch_set_v1(keys, source, extra()) == [True, True]
    assert storage.batch_get_v1(keys, target, extra()) == [True, True]
    assert torch.equal(pages(pool, target), pages(pool, source))
    flat = [pool.get_dummy_flat_data_page() for _ in keys]
    assert torch.equal(torch.stack(storage.batch_get(keys, flat)), pages(pool, source))
    assert torch.equal(storage.get(keys[1]), pages(pool, source)[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layer_has_the_error_of_its_codec(open_storage, layout):
    """Pages written flat, as the older interface has it, and read in place."""
    policy = {
        "name": "mixed",
        "default": {"key": "int4", "value": "int4"},
        "layers": {"1": {"key": "fp16", "value": "int8"}},
    }
    pool = host_pool(layout)
    storage = open_storage(pool, policy=policy)
    source, target = pool.alloc(2 * PAGE), pool.alloc(2 * PAGE)
    assert storage.batch_set(hashes(2), list(pages(pool, source)))
    assert storage.batch_get_v1(hashes(2), target) == [True, True]
    for start, was in zip(target[::PAGE].tolist(), source[::PAGE].tolist(), strict=True):
        new, old = (storage._sides(pool.get_data_page(at, flat=False)) for at in (start, was))
        assert torch.equal(new[0][1], old[0][1])
        assert relative_rms(new[1][1], old[1][1]) < 0.01
        for layer in (0, 2, 3):
            assert 0.05 < relative_rms(new[0][layer], old[0][layer]) < 0.1
            assert 0.05 < relative_rms(new[1][layer], old[1][layer]) < 0.1


def test_only_the_page_that_begins_a_sequence_keeps_sinks_where_sglang_tells(open_storage):
    pool = host_pool()
    source, target = pool.alloc(3 * PAGE), pool.alloc(3 * PAGE)

    def kept(storage, keys, *told):
        storage.batch_set_v1(keys, source, *told)
        storage.batch_get_v1(keys, target)
        sides = [storage._sides(pool.get_data_page(at, flat=False))[0] for at in target[::PAGE].tolist()]
        were = [storage._sides(pool.get_data_page(at, flat=False))[0] for at in source[::PAGE].tolist()]
        return [torch.equal(new[:, :, :4], old[:, :, :4]) for new, old in zip(sides, were, strict=True)]

    keys = hashes(7)
    assert kept(open_storage(pool), keys[:3], extra()) == [True, False, False]
    assert kept(open_storage(pool), keys[3:6], extra(*keys[:3])) == [False, False, False]
    assert kept(open_storage(pool), keys[:3]) == [True, True, True]
    assert kept(open_storage(pool), keys[:3], HiCacheStorageExtraInfo()) == [True, True, True]


def test_int4_holds_three_times_the_tokens(open_storage):
    held = {}
    for policy in ("fp16", "int4"):
        pool = host_pool(pool=device_pool(layers=2, heads=8, dim=128))
        storage = open_storage(pool, policy=policy, host_budget="4MiB")
        keys, source = hashes(32), pool.alloc(PAGE)
        for number, key in enumerate(keys):
            assert storage.batch_set_v1([key], source, extra(*keys[:number])) == [True]
        held[policy] = sum(map(storage.exists, keys))
        (host,) = storage.stats().store.tiers
        assert host.used <= host.budget == 4 << 20
    assert held["int4"] >= 3.3 * held["fp16"] > 0
    assert storage.stats().raw_bytes >= 3.3 * storage.stats().stored_bytes > 0


def test_batches_end_at_the_first_page_that_is_missing(open_storage):
    """Case 36: what is counted is what comes back."""
    pool = host_pool()
    storage = open_storage(pool)
    keys, source, target = hashes(5), pool.alloc(5 * PAGE), pool.alloc(5 * PAGE)
    assert storage.batch_exists(keys) == 0
    storage.batch_set_v1(keys, source)
    assert storage.batch_exists(keys, extra()) == 5
    storage.chunks.remove(keys[2])
    assert storage.batch_exists(keys) == 2
    before = pages(pool, target)
    assert storage.batch_get_v1(keys, target) == [True, True, False, False, False]
    assert torch.equal(pages(pool, target)[2:], before[2:])
    assert [page is not None for page in storage.batch_get(keys)] == [True, True, False, False, False]
    assert not storage.exists(keys[2])
    assert storage.exists(keys[3])
    assert storage.get(keys[2]) is None
    storage.clear()
    assert storage.batch_exists(keys) == 0


def test_damage_is_a_miss_and_leaves_the_pool_as_it_was(open_storage):
    pool = host_pool()
    storage = open_storage(pool, policy="int4")
    keys, source, target = hashes(2), pool.alloc(2 * PAGE), pool.alloc(2 * PAGE)
    storage.batch_set_v1(keys, source)
    name, store = storage.chunks.name(keys[0]), storage.chunks.store
    whole, before = store.get(name), pages(pool, target)
    for at in (2, 20, 300, -1):
        data = whole.clone()
        data[at] ^= 1
        store.put_below(name, data)
        assert storage.batch_get_v1(keys, target) == [False, False]
        assert storage.batch_exists(keys) == 0
        store.put_below(name, whole)
    store.put_below(name, store.get(storage.chunks.name(keys[1])))  # another page's
    assert storage.batch_get(keys) == [None, None]
    assert torch.equal(pages(pool, target), before)
    assert storage.stats().damaged == 5


def test_pages_outlive_the_process_in_a_folder_of_their_rank(open_storage, tmp_path):
    pool = host_pool()
    options = {"policy": "fp16", "host_budget": "1MiB", "disk_budget": "16MiB", "disk_path": str(tmp_path)}
    ranks = [open_storage(pool, tp_rank=rank, tp_size=2, **options) for rank in range(2)]
    keys, source, target = hashes(2), pool.alloc(2 * PAGE), pool.alloc(2 * PAGE)
    ranks[0].batch_set_v1(keys, source)
    assert ranks[1].batch_exists(keys) == 0
    for storage in ranks:
        storage.close()
    again = open_storage(pool, tp_rank=0, tp_size=2, **options)
    assert again.batch_get_v1(keys, target) == [True, True]
    assert torch.equal(pages(pool, target), pages(pool, source))
    with pytest.raises(StoreError, match=r"^extra_config\..*(process|writ)"):
        open_storage(pool, tp_rank=0, tp_size=2, **options)


def test_every_part_of_the_identity_makes_a_miss(open_storage, tmp_path):
    """Case 34: the same keys, and one thing else."""
    pool = host_pool()
    options = {"policy": "int4", "disk_budget": "16MiB", "disk_path": str(tmp_path), "revision": "a", "tenant": "t"}
    source = pool.alloc(PAGE)
    first = open_storage(pool, **options)
    (key,) = hashes(1)
    first.batch_set_v1([key], source)
    first.close()
    group = {"name": "int4", "default": {"key": {"codec": "int4", "group": 32}, "value": "int4"}}
    changes = [{"model": "other"}, {"policy": "int8"}, {"policy": group}, {"revision": "b"}, {"tenant": "u"}]
    pools = [host_pool(dtype=torch.float16), host_pool(heads=4), host_pool(page=32), host_pool(layers=3)]
    for change, other_pool in [*((change, pool) for change in changes), *(({}, other) for other in pools)]:
        other = open_storage(other_pool, **(options | change))
        assert not other.exists(key), change
        other.close()
    assert open_storage(pool, **options).exists(key)


def test_values_that_are_not_finite_and_pages_of_other_sizes_are_not_stored(open_storage):
    pool = host_pool()
    storage = open_storage(pool)
    source = pool.alloc(2 * PAGE)
    pool.kv_buffer[..., PAGE + 3, 0, 0] = float("nan")
    assert storage.batch_set_v1(hashes(2), source) == [True, False]
    assert storage.stats().refused == 1
    assert not storage.set("key", None)
    with pytest.raises(StoreError, match=r"places for 2 pages; allowed: 64 each$"):
        storage.batch_set_v1(hashes(2), source[:PAGE])
    with pytest.raises(StoreError, match=r"^page torch.bfloat16 \(64,\); allowed: ChunkShape\("):
        storage.set("key", torch.zeros(64, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"polcy": "int4"}, r"^extra_config\.polcy: unknown option; allowed: policy, host_budget, "),
        ({"policy": ["int4"]}, r"^extra_config\.policy: \['int4'\]; allowed: text or a mapping$"),
        ({"policy": {"name": "x", "default": {"key": "int4"}}}, r"^extra_config\.policy: default\.value: missing"),
        ({"host_budget": 1.5}, r"^extra_config\.host_budget: 1\.5; allowed: a whole number or text$"),
        ({"is_mla_model": True}, r"^MLA, or heads split by tp_lcm_size; allowed: keys and values"),
        ({"pp_size": 2, "policy": "balanced"}, r"^pp_size 2 with policy 'balanced', .* allowed: one that has not"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(options, message):
    with pytest.raises((StoreError, UnsupportedError, kvquant.PolicyError), match=message) as caught:
        StorageBackendFactory.create_backend("dynamic", config_of(**options), None)
    assert "\n" not in str(caught.value)


def test_pools_that_cannot_be_served_are_refused_in_a_line(open_storage):
    for pool, message in (
        (host_pool("page_unified"), r"^MHATokenToKVPoolHost in 'page_unified'; allowed: .*page_head$"),
        (host_pool(page=1), r"^pages of 1 tokens of torch\.bfloat16; allowed: --page-size a multiple of 8, "),
        (
            host_pool(pool=device_pool(dtype=torch.float8_e4m3fn)),
            r"^pages of 64 tokens of torch\.(uint8|float8_e4m3fn); ",
        ),
        (
            host_pool("page_first", device_pool(v_head_dim=32)),
            r"^AsymmetricMHATokenToKVPoolHost in 'page_first'; allowed: ",
        ),
    ):
        with pytest.raises(UnsupportedError, match=message):
            open_storage(pool)
    storage = open_storage()
    storage.register_mem_host_pool_v2(host_pool(), "kv")
    with pytest.raises(UnsupportedError, match=r"^pool 'mamba'; allowed: kv"):
        storage.register_mem_host_pool_v2(host_pool(), "mamba")
    bare = StorageBackendFactory.create_backend("dynamic", config_of(), None)
    with pytest.raises(StoreError, match="no host pool is registered"):
        bare.exists("key")
    bare.close()


def test_other_releases_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.5.22")
    adapter._storage.cache_clear()
    with pytest.raises(UnsupportedError, match=r"^sglang 0\.5\.22; kvquant works with sglang 0\.5\.23$"):
        _ = adapter.KVQuantStorage
