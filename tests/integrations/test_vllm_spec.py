"""What the adapter refuses, in one line, and what keeps blocks of one thing from another; without an engine."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    Locality,
    LookupResult,
    Medium,
    ReqContext,
    TierFilter,
    TierMatcher,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvquant import KVQuantError, PrecisionPolicy, TieredStore, UnsupportedError
from kvquant.integrations import vllm as adapter
from kvquant.integrations.blockwise import BlockTier, LayerShape
from kvquant.integrations.settings import StoreSettings
from kvquant.integrations.vllm_transfer import Engine, Manager

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's, and of what it loads

GOOD = {"policy": "int4", "host_budget": "64MiB"}
NAMES = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")


def config(extra=GOOD, tokens=32, groups=1, per=1, **parallel):
    sizes = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    named = {"spec_name": "KVQuantOffloadingSpec", "spec_module_path": "kvquant.integrations.vllm"}
    return OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(tokens, NAMES, group) for group in range(groups)),
        worker_kv_bytes_per_block=1,
        enable_kv_cache_events=False,
        extra_config=named | extra,
        engine_id="engine",
        model=OffloadingModelConfig("model", "float32"),
        cache=OffloadingCacheConfig(tokens, per),
        parallel=OffloadingParallelConfig(
            **sizes | parallel,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )


def created(*args, **settings):
    return OffloadingSpecFactory.create_spec(config(*args, **settings))


def test_versions():
    for version in ("0.32.0", "0.32.1", "0.32.0+cpu"):
        adapter.check_version(version)
    for version in ("0.31.9", "0.33.0", "0.320.0", "1.0", ""):
        with pytest.raises(UnsupportedError, match=r"^vLLM '.*' is not served; .* works with vLLM 0\.32$"):
            adapter.check_version(version)
    with pytest.raises(UnsupportedError, match=r"^vLLM is not installed; .* works with vLLM 0\.32$"):
        adapter.check_version(None)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "^kv_connector_extra_config: no tier: give host_budget, or disk_budget and"),
        ({"policy": ""}, "neither a file nor a preset"),
        ({"policy": 4}, "policy: 4; allowed: text or a mapping"),
        ({"policy": ["int4"]}, "policy: .*; allowed: text or a mapping"),
        ({"policy": {"name": "mine", "defualt": "int4"}}, "policy: "),
        ({"policy": "no-such-policy"}, "neither a file nor a preset"),
        ({"policy": "/etc"}, "neither a file nor a preset"),
        ({"policy": "int4", "polcy": "int8"}, "polcy: unknown option; allowed: policy, host_budget"),
        ({"policy": "int4", "__class__": 1, "../x": 2}, "allowed: policy, host_budget"),
        ({"policy": "int4", 5: "x"}, "allowed: policy, host_budget"),
        ({"policy": "int4", "tenant": 7}, "tenant: 7; allowed: text"),
        ({"policy": "int4", "disk_path": 7}, "disk_path: 7; allowed: text"),
        ({"policy": "int4"}, "^kv_connector_extra_config: no tier: give host_budget, or disk_budget and"),
        ({"policy": "int4", "host_budget": "lots"}, "host_budget: 'lots'; allowed: bytes"),
        ({"policy": "int4", "host_budget": -1}, "host_budget: -1; allowed: bytes"),
        ({"policy": "int4", "host_budget": True}, "host_budget: True; allowed: a whole number or text"),
        ({"policy": "int4", "host_budget": {}}, "host_budget: {}; allowed: a whole number or text"),
        ({"policy": "int4", "host_budget": "1e400GiB"}, "host_budget: .*; allowed: bytes"),
        ({"policy": "int4", "host_budget": 3}, "host_budget: 3 bytes hold nothing"),
        (
            {"policy": "int4", "disk_budget": "1GiB"},
            "^kv_connector_extra_config: disk_budget and disk_path go",
        ),
        ({"policy": "int4", "disk_path": "/tmp/x"}, "^kv_connector_extra_config: no tier: "),
        ({"policy": "int4", "host_budget": "1GiB", "block_size": 64}, "block_size: 64; allowed: none, or"),
    ],
)
def test_hostile_options(extra, message):
    with pytest.raises(KVQuantError, match=message) as caught:
        created(extra).open_store()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_what_is_served():
    for tokens in (16, 32, 64, 128):
        assert created(tokens=tokens).blocks_per_chunk == 138 // tokens
    assert created(GOOD | {"block_size": 128}, per=4).blocks_per_chunk == 4
    for tokens in (48, 256):
        with pytest.raises(UnsupportedError, match=f"^vLLM's blocks of {tokens} tokens, the policy's of 128; "):
            created(tokens=tokens)
    with pytest.raises(UnsupportedError, match="^2 workers .*tp 2.*; allowed: one worker, in"):
        created(world_size=2, tp_size=2)
    with pytest.raises(UnsupportedError, match="^1 workers .*dcp 2"):
        created(dcp_size=2)
    with pytest.raises(UnsupportedError, match="^2 groups of cache layers; allowed: one, of full attention"):
        created(groups=2)
    with pytest.raises(UnsupportedError, match="^the worker runs in another process than the scheduler; allowed: one"):
        created().get_manager()


@pytest.mark.parametrize("backend", ["mp", "ray", None])
def test_other_executors(backend, monkeypatch):
    parallel = SimpleNamespace(distributed_executor_backend=backend)
    monkeypatch.setattr(adapter, "get_current_vllm_config", lambda: SimpleNamespace(parallel_config=parallel))
    with pytest.raises(UnsupportedError, match=f"^executor {backend!r}; allowed: 'uni'"):
        created().get_worker(CanonicalKVCaches([], [[]]))


def served(folder):
    """As much of vLLM's configuration as an identity is made of."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder),
            revision=None,
            quantization=None,
            seed=0,
            hf_config=LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2),
        ),
        load_config=SimpleNamespace(load_format="auto"),
        lora_config=None,
    )


def policy(codec="int4", group=64, block_tokens=128):
    side = {"codec": codec, "group": group}
    return PrecisionPolicy(name="p", default={"key": side, "value": side}, block_tokens=block_tokens)


def test_another_of_anything_is_another_identity(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(10000))

    def digest(change=lambda config: None, chosen=None, dtype=torch.bfloat16, **told):
        config = served(tmp_path)
        config.model_config.hf_config = copy.deepcopy(config.model_config.hf_config)
        change(config)
        return adapter.identity_of(config, chosen or policy(), dtype, StoreSettings(disk_path="x", **told)).digest()

    def revision(config):
        config.model_config.revision = "other"

    def quantized(config):
        config.model_config.quantization = "fp8"

    def rope(config):
        config.model_config.hf_config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}

    def dummy(config):
        config.load_config.load_format = "dummy"

    known = digest()
    assert known == digest()
    others = [digest(change) for change in (revision, quantized, rope, dummy)]
    others += [digest(chosen=policy(**other)) for other in ({"codec": "int8"}, {"group": 32}, {"block_tokens": 64})]
    others += [digest(dtype=torch.float16), digest(tenant="other"), digest(revision="other")]
    weights.write_bytes(bytes(9999) + b"\1")
    others.append(digest())
    weights.write_bytes(bytes(10001))
    others.append(digest())
    assert len({known, *others}) == 13


def test_adapters_known_by_name_alone_do_not_outlive_the_process(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    config = served(tmp_path)
    config.lora_config = object()
    assert (
        len(
            {
                adapter.identity_of(config, policy(), torch.float32, StoreSettings(disk_path="x")).digest()
                for _ in range(3)
            }
        )
        == 3
    )


def test_weights_that_nothing_tells_apart(tmp_path):
    with pytest.raises(UnsupportedError, match="^no weight files found of .*; allowed: a folder or hub"):
        adapter.identity_of(served(tmp_path), policy(), torch.float32, StoreSettings(disk_path="x"))
    within = {adapter.identity_of(served(tmp_path), policy(), torch.float32, StoreSettings()).digest() for _ in "ab"}
    assert len(within) == 2
    told = StoreSettings(disk_path="x", revision="mine")
    assert len({adapter.identity_of(served(tmp_path), policy(), torch.float32, told).digest() for _ in "ab"}) == 1


@pytest.fixture
def manager():
    store = TieredStore(host_budget="1MiB")
    tier = BlockTier(PrecisionPolicy.load("fp16"), [LayerShape(1, 16, 16)], torch.float32, store, bytes(32))
    return Manager(Engine(tier), 128)


def put(manager, *names):
    zeros = torch.zeros(len(names), 1, 128, 16)
    manager._engine.tier.put(names, [False] * len(names), lambda layer: (zeros, zeros))


def test_the_life_of_a_block(manager):
    one, two = ReqContext("one"), ReqContext("two")
    one.set_offload_key_position(b"a", 128)
    one.set_offload_key_position(b"b", 256)
    assert manager.lookup(b"a", one) is LookupResult.MISS
    output = manager.prepare_store([b"a", b"b"], one)
    assert output.keys_to_store == [b"a", b"b"]
    assert output.store_spec.first == [True, False]
    assert manager.lookup(b"a", two) is LookupResult.HIT_PENDING
    assert manager.prepare_store([b"a", b"c"], two).keys_to_store == [b"c"]
    put(manager, b"a")  # but not b, for which there was no room
    manager.complete_store([b"a", b"b"], one)
    assert manager.lookup(b"b", two) is LookupResult.MISS
    assert manager.lookup(b"a", two) is LookupResult.HIT
    manager._engine.tier.store.delete(manager._engine.tier.store.keys())
    assert manager.lookup(b"a", one) is LookupResult.HIT  # what was found is kept
    (blocks,) = manager.prepare_load([b"a"], two).blocks
    assert len(blocks) == 1
    manager.complete_load([b"a"], two)
    assert manager.lookup(b"a", two) is LookupResult.HIT  # for the other
    for request in (one, two):
        manager.on_request_finished(request)
    assert manager.lookup(b"a", one) is LookupResult.MISS


def test_stores_from_before_a_reset_are_void(manager):
    request = ReqContext("one")
    spec = manager.prepare_store([b"a"], request).store_spec
    manager.reset_cache()
    assert spec.generation != manager._engine.generation
    assert manager.prepare_store([b"a"], request).store_spec.generation == manager._engine.generation


def test_requests_that_want_no_tier(manager):
    put(manager, b"a")
    nothing = ReqContext("none", load_tier_filter=TierFilter(()))
    remote = ReqContext("remote", load_tier_filter=TierFilter((TierMatcher(locality=Locality.REMOTE),)))
    storage = ReqContext("disk", load_tier_filter=TierFilter((TierMatcher(medium=Medium.STORAGE),)))
    found = [manager.lookup(b"a", request) for request in (nothing, remote, storage)]
    assert found == [LookupResult.MISS, LookupResult.MISS, LookupResult.HIT]


def test_counts_go_to_vllm_once(manager):
    put(manager, b"a")
    manager.lookup(b"a", ReqContext("one"))
    told = manager.get_stats().reduce()
    assert told["kvquant:stored_blocks"] == told["kvquant:loaded_blocks"] == 1
    assert told["kvquant:engine_bytes"] == 2 * 128 * 16 * 4
    assert manager.get_stats() is None
    assert set(told) <= set(adapter.KVQuantOffloadingSpec.build_metric_definitions({}))


def test_after_the_end_all_is_a_miss(manager):
    put(manager, b"a")
    manager.shutdown()
    manager.shutdown()
    assert manager.lookup(b"a", ReqContext("one")) is LookupResult.MISS
    assert manager.prepare_store([b"b"], ReqContext("one")) is None
    assert manager.get_stats() is None
    manager.reset_cache()
