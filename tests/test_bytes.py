"""What a cache takes: bytes measured from what is allocated, on whatever device each layer is."""

from __future__ import annotations

import pytest
import torch
from accelerate import dispatch_model

import kvquant
from kvquant import KVQuantCache, TieredStore
from tests.models import feed, generate, prompt, small, stock, tiny


@pytest.mark.parametrize(
    ("policy", "limit"), [("int8", 0.56), ("int4", 0.31), ("k8v4", 0.45), ("k6v5", 0.39), ("fp16", 1.02)]
)
def test_measured_bytes_at_8k(policy, limit):
    model = tiny("llama", head_dim=64, num_key_value_heads=1, max_position_embeddings=8192)
    cache = KVQuantCache.for_model(model, policy)
    feed(model, cache, prompt(8192), 2048)
    stats = cache.stats()
    assert stats.kv_bytes_baseline == 8192 * 2 * 64 * 4 * 2
    assert stats.kv_ratio <= limit
    assert stats.bits_per_element == 16 * stats.kv_ratio
    by_hand = 0
    for layer in cache.layers:
        held = layer.held
        of_floats = 2 if held.key.codec.lossless else 1  # float32 counts as 16 bits
        by_hand += sum(records.nbytes for records in held.blocks.tensors()) // of_floats
        for side in held.sides:
            by_hand += 2 * sum(t.numel() for t in [*(tail.room for tail in side.tails), *side.sinks.values()])
    assert stats.kv_bytes == by_hand


def test_a_prompt_leaves_only_its_tail_dense(llama):
    cache = KVQuantCache.for_model(llama, "int4")
    feed(llama, cache, prompt(1000))
    for layer in cache.layers:
        for side in layer.held.sides:
            (tail,) = side.tails
            assert tail.tokens.shape[1] == 1000 - 768
            assert tail.tokens.untyped_storage().nbytes() == tail.tokens.nbytes  # no view of the whole prompt


def test_peak_is_one_decoded_layer_above_what_stays(llama):
    cache = KVQuantCache.for_model(llama, "int4")
    feed(llama, cache, prompt(1024), 128)
    stats = cache.stats()
    one_layer = stats.kv_bytes_baseline // 4
    assert stats.kv_bytes + one_layer <= stats.peak_kv_bytes <= stats.kv_bytes + one_layer * 1.5
    assert stats.peak_kv_bytes < stats.kv_bytes_baseline


def test_stats_print_and_export(llama):
    cache = KVQuantCache.for_model(llama, "int4")
    assert cache.stats().kv_ratio == 0
    feed(llama, cache, prompt(700))
    stats = cache.stats()
    assert str(stats).startswith("700 tokens in 1 rows, 4 sealed blocks")
    metrics = dict(line.rsplit(" ", 1) for line in stats.prometheus().splitlines())
    assert metrics["kvquant_cache_tokens"] == "700"
    assert int(metrics['kvquant_cache_bytes{layer="3",kind="full_attention"}']) == stats.layers[3].kv_bytes
    assert stats.encode_seconds > 0


# --- by row ---


def slot_bytes(cache):
    """What one block takes, over all layers, everything counted as it is allocated."""
    return sum(next(layer.held.blocks.tensors())[0].nbytes for layer in cache.layers)


def raw_bytes(cache, row):
    rooms = [side.tails[row].room for layer in cache.layers for side in layer.held.sides]
    return 2 * sum(room.numel() for room in rooms)


def sink_bytes(cache):
    return 2 * sum(sink.numel() for layer in cache.layers for side in layer.held.sides for sink in side.sinks.values())


def test_rows_of_a_padded_batch_after_generate(llama):
    kvquant.enable(llama)
    ids = prompt(200, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :90] = ids[1, :90] = 0
    cache = KVQuantCache.for_model(llama, small())
    generate(llama, cache, ids, new=20, attention_mask=mask)
    stats = cache.stats()
    assert stats.tokens == (219, 129)
    long, short = (len(row.slots) for row in cache.rows.rows)
    assert (long, short) == (12, 7)
    each = sink_bytes(cache) // 2
    expected = [blocks * slot_bytes(cache) + raw_bytes(cache, row) + each for row, blocks in enumerate((long, short))]
    assert stats.row_bytes == tuple(expected)
    idle = sum(layer.block_bytes for layer in stats.layers) - (long + short) * slot_bytes(cache)
    assert sum(stats.row_bytes) == stats.kv_bytes - idle
    least, most = (f"{nbytes / 2**20:.2f}" for nbytes in reversed(stats.row_bytes))
    assert str(stats).endswith(f", {least} to {most} MiB a row")
    samples = dict(line.rsplit(" ", 1) for line in stats.prometheus().splitlines())
    assert [int(samples[f'kvquant_cache_row_bytes{{row="{row}"}}']) for row in (0, 1)] == expected


def test_what_rows_share_counts_in_each(llama):
    cache = KVQuantCache.for_model(llama, small())
    feed(llama, cache, prompt(100))
    (alone,), before = cache.stats().row_bytes, cache.stats().kv_bytes
    cache.batch_repeat_interleave(3)
    assert cache.stats().row_bytes == (alone,) * 3
    assert cache.stats().kv_bytes == before
    cache.batch_select_indices([0])
    cache.crop(-60)  # into a block, which stays whole
    sealed = cache.rows.rows[0].slots
    assert cache.stats().row_bytes == (len(sealed) * slot_bytes(cache) + raw_bytes(cache, 0) + sink_bytes(cache),)
    cache.reset()
    assert cache.stats().row_bytes == ()
    assert " a row" not in str(cache.stats())


@pytest.mark.parametrize("when", ["evict", "seal"])
def test_of_rows_in_a_store_what_lies_on_the_device_counts(llama, when):
    roomy, tight = TieredStore(device_budget="1MiB"), TieredStore(device_budget="12KiB", host_budget="1MiB")
    everything, some = (KVQuantCache.for_model(llama, small(when=when), store=store) for store in (roomy, tight))
    for cache in (everything, some):
        feed(llama, cache, prompt(200, rows=2))
        stats = cache.stats()
        assert sum(stats.row_bytes) == stats.kv_bytes
    assert sum(some.stats().row_bytes) < sum(everything.stats().row_bytes)
    assert tight.stats().tiers[1].payloads


def test_rows_of_a_pass_that_stopped_half_way(llama):
    cache = KVQuantCache.for_model(llama, small())
    for layer in range(2):
        cache.update(*(torch.randn(1, 2, 100, 16) for _ in range(2)), layer)
    assert cache.stats().row_bytes == (cache.stats().kv_bytes,)


# --- devices ---


POLICIES = ["fp16", "int8", "k6v5", "int4", "mixed-3bit", "int2-aggressive"]


@pytest.mark.parametrize("policy", POLICIES)
def test_state_follows_each_layers_device(policy):
    model = tiny("llama")
    cache = KVQuantCache.for_model(model, policy)
    for step in (400, 1, 1):
        for index, layer in enumerate(cache.layers):
            device = ("cpu", "meta")[index % 2]
            keys, values = (torch.randn(2, 2, step, 16).to(device) for _ in range(2))
            read = cache.update(keys, values, index)
            assert {tensor.device.type for tensor in read} == {device}
            assert {tensor.device.type for tensor in layer.held.tensors()} == {device}
    assert cache.stats().blocks == 4
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.crop(-20)
    assert [layer.keys.device.type for layer in cache.layers] == ["cpu", "meta"] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_without_memory_tells_the_bytes(policy, llama):
    """On ``meta`` nothing is computed, but everything counted."""
    bytes_by_device = []
    for device in ("cpu", "meta"):
        model = llama.to(device)
        cache = KVQuantCache.for_model(model, policy)
        feed(model, cache, prompt(700, rows=2).to(device), 300, attention_mask=None)
        bytes_by_device.append(cache.stats().kv_bytes)
    assert bytes_by_device[0] == bytes_by_device[1] > 0


def test_layers_dispatched_by_a_device_map(tmp_path):
    ids = prompt(300)
    whole = tiny("llama")
    expected = feed(whole, KVQuantCache.for_model(whole, "int4"), ids, 100)
    places = {f"model.layers.{index}": "disk" if index % 2 else "cpu" for index in range(4)}
    places |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    spread = dispatch_model(tiny("llama"), places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert spread.model.layers[1].self_attn.k_proj.weight.is_meta
    assert torch.equal(feed(spread, KVQuantCache.for_model(spread, "int4"), ids, 100), expected)
    assert torch.equal(
        feed(spread, KVQuantCache.for_model(spread, "fp16"), ids, 100), feed(whole, stock(whole), ids, 100)
    )
