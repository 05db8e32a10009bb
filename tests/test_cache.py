"""`KVQuantCache` under transformers: every family, batches, chunks, turns, windows, copies."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf
from transformers import Gemma3Config, PreTrainedConfig

import kvquant
from kvquant import CacheStateError, KVQuantCache, KVQuantWarning, PrecisionPolicy, UnsupportedError
from kvquant.arena import SlotPool
from kvquant.testing import relative_rms
from tests.models import COMMON, FAMILIES, feed, generate, prompt, small, stock, tiny

ROOT = Path(__file__).parent.parent


FP16 = small("fp16", "fp16")


def padded(lengths, width, seed=3):
    ids, mask = prompt(width, rows=len(lengths), seed=seed), torch.ones(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, : width - length] = 0
        mask[row, : width - length] = 0
    return ids, mask


@pytest.fixture(params=FAMILIES)
def model(request):
    return tiny(request.param)


# --- fp16 policy: token-identical, logit-identical ---


def test_fp16_policy_generates_the_same_tokens(model):
    cache = KVQuantCache.for_model(model, FP16)
    ids = prompt(50, rows=2)
    assert torch.equal(generate(model, cache, ids, new=40), generate(model, stock(model), ids, new=40))
    assert cache.stats().blocks == 2 * ((89 - 16) // 16)


@pytest.mark.parametrize("chunks", [(90,), (1,), (3, 8, 13), (40, 1)])
def test_fp16_policy_gives_the_same_logits_in_any_chunks(model, chunks):
    ids = prompt(90, rows=2)
    mine = feed(model, KVQuantCache.for_model(model, FP16), ids, *chunks)
    assert torch.equal(mine, feed(model, stock(model), ids, *chunks))


def test_fp16_policy_samples_the_same_tokens(model):
    ids = prompt(40)
    torch.manual_seed(5)
    mine = generate(model, KVQuantCache.for_model(model, FP16), ids, do_sample=True, temperature=1.3)
    torch.manual_seed(5)
    assert torch.equal(mine, generate(model, stock(model), ids, do_sample=True, temperature=1.3))


def test_fp16_policy_with_left_padding(model):
    kvquant.enable(model)
    ids, mask = padded([60, 9, 33], 60)
    cache = KVQuantCache.for_model(model, FP16)
    mine = generate(model, cache, ids, new=40, attention_mask=mask)
    assert torch.equal(mine, generate(model, stock(model), ids, new=40, attention_mask=mask))
    assert cache.stats().tokens == (99, 48, 72)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp16_policy_means_the_models_own_dtype(dtype):
    model = tiny("llama", dtype)
    ids = prompt(60, rows=2)
    mine = feed(model, KVQuantCache.for_model(model, FP16), ids, 7)
    assert torch.equal(mine, feed(model, stock(model), ids, 7))


def test_beams_follow_their_rows(model):
    ids = prompt(40)
    cache = KVQuantCache.for_model(model, FP16)
    mine = generate(model, cache, ids, num_beams=3, num_return_sequences=2)
    assert torch.equal(mine, generate(model, stock(model), ids, num_beams=3, num_return_sequences=2))
    assert cache.rows.pool.live < 3 * cache.stats().blocks / 2  # beams share what they have in common


# --- lossy policies ---


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_lossy_policies_generate_on_every_family(model, codec):
    cache = KVQuantCache.for_model(model, small(codec, codec))
    ids = prompt(50, rows=2)
    logits = feed(model, cache, ids, 10)
    reference = feed(model, stock(model), ids, 10)
    assert logits.isfinite().all()
    assert 0 < relative_rms(logits[:, 40:], reference[:, 40:]) < (0.02 if codec == "int8" else 0.3)
    generate(model, cache, torch.cat((ids, prompt(1, rows=2)), dim=1))


def test_decoded_tokens_are_compressed_too(llama):
    ids = prompt(200)
    stepped, whole = (KVQuantCache.for_model(llama, small()) for _ in range(2))
    feed(llama, stepped, ids, 32, 1)
    feed(llama, whole, ids)
    for cache in (stepped, whole):
        assert cache.rows.rows[0].sealed == (200 - 16) // 16 * 16
    # Layer 0 sees no compressed history: its keys are the same however they came, but for rounding in the model.
    same = stepped.block(0, 0, 9).key.fields["codes"] == whole.block(0, 0, 9).key.fields["codes"]
    assert same.float().mean() > 0.999
    exact = stock(llama)
    feed(llama, exact, ids, 32, 1)
    error = stepped.layers[0].keys - exact.layers[0].keys
    assert (error[:, :, 4:176].abs().amax(dim=(0, 1, 3)) > 0).all()
    assert (error[:, :, 176:] == 0).all()
    assert (error[:, :, :4] == 0).all()


def test_the_first_sealed_block_never_changes(llama):
    cache = KVQuantCache.for_model(llama, "int4")
    feed(llama, cache, prompt(300))
    before, decoded = cache.block(2, 0, 0), cache.layers[2].keys[:, :, :128]
    feed(llama, cache, prompt(500, seed=8), 1)
    after = cache.block(2, 0, 0)
    assert before.to_bytes(b"") == after.to_bytes(b"")
    assert torch.equal(cache.layers[2].keys[:, :, :128], decoded)


def test_padding_occupies_nothing_and_rows_are_as_if_alone(llama):
    kvquant.enable(llama)
    lengths = [9, 2000]
    ids, mask = padded(lengths, 2000)
    batch = KVQuantCache.for_model(llama, "int4")
    feed(llama, batch, ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    alone = []
    for row, length in enumerate(lengths):
        cache = KVQuantCache.for_model(llama, "int4")
        feed(llama, cache, ids[row : row + 1, 2000 - length :])
        alone.append(cache)
    stats = batch.stats()
    assert stats.tokens == (9, 2000)
    assert stats.blocks == sum(cache.stats().blocks for cache in alone) == 14
    assert stats.kv_bytes == sum(cache.stats().kv_bytes for cache in alone)
    for number in range(14):
        mine, theirs = batch.block(0, 1, number), alone[1].block(0, 0, number)
        assert torch.equal(mine.key.fields["codes"], theirs.key.fields["codes"])
        assert torch.equal(mine.value.fields["codes"], theirs.value.fields["codes"])
        assert torch.equal(mine.key.fields["scale"], theirs.key.fields["scale"])
    # Deeper layers see other roundings of the batched matrix products; their codes agree but for those.
    same = [
        (batch.block(3, 1, n).key.fields["codes"] == alone[1].block(3, 0, n).key.fields["codes"]).float().mean()
        for n in range(14)
    ]
    assert min(same) > 0.999


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_left_padded_prompt_may_come_in_chunks(llama, chunk):
    kvquant.enable(llama)
    ids, mask = padded([100, 20], 100)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, exact = KVQuantCache.for_model(llama, FP16), stock(llama)
    logits = [[], []]
    with torch.no_grad():
        for first in range(0, 100, chunk):
            stop = min(first + chunk, 100)
            for out, target in zip(logits, (cache, exact), strict=True):
                given = {"attention_mask": mask[:, :stop], "position_ids": positions[:, first:stop]}
                out.append(llama(ids[:, first:stop], cache=target, **given).logits)
    mine, theirs = (torch.cat(parts, dim=1) for parts in logits)
    torch.testing.assert_close(mine[mask.bool()], theirs[mask.bool()], rtol=1e-4, atol=1e-5)
    assert not cache.stats().fallbacks
    assert cache.stats().tokens == (100, 20)


def test_multi_turn(model):
    ids = prompt(30)
    cache, exact = KVQuantCache.for_model(model, FP16), stock(model)
    for turn in range(3):
        mine, theirs = generate(model, cache, ids), generate(model, exact, ids)
        assert torch.equal(mine, theirs)
        ids = torch.cat((mine, prompt(15, seed=turn)), dim=1)


def test_a_lossless_half_keeps_no_sinks_and_the_lossy_half_keeps_its_own(llama):
    cache = KVQuantCache.for_model(llama, small("fp16", "int4"))
    exact = stock(llama)
    feed(llama, cache, prompt(60))
    feed(llama, exact, prompt(60))
    block = cache.block(0, 0, 0)
    assert block.key.sinks is None
    assert torch.equal(block.value.sinks, exact.layers[0].values[0, :, :4])
    assert torch.equal(cache.layers[0].keys, exact.layers[0].keys)


def test_keys_and_values_get_the_precision_named_for_them(llama):
    caches = {name: KVQuantCache.for_model(llama, small(*name)) for name in (("int8", "int4"), ("int4", "int8"))}
    for (key, value), cache in caches.items():
        feed(llama, cache, prompt(60))
        block = cache.block(3, 0, 0)
        widths = [part.fields["codes"].shape[-1] * 8 // 16 for part in (block.key, block.value)]
        assert [f"int{width}" for width in widths] == [key, value]
        layer = cache.stats().layers[3]
        assert (layer.key_codec.split("/")[0], layer.value_codec.split("/")[0]) == (key, value)


# --- sliding windows ---


@pytest.mark.parametrize("policy", [FP16, small("int8", "int8"), small()])
def test_sliding_layers_stay_transformers_own(policy):
    model = tiny("gemma3")
    cache, exact = KVQuantCache.for_model(model, policy), stock(model)
    ids = prompt(20)
    mine, theirs = generate(model, cache, ids, new=30), generate(model, exact, ids, new=30)
    if policy is FP16:
        assert torch.equal(mine, theirs)
    assert [type(layer).__name__ for layer in cache.layers] == ["DynamicSlidingWindowLayer", "KVQuantLayer"] * 2
    assert cache.layers[0].keys.shape[2] <= 8
    assert cache.get_seq_length() == cache.get_seq_length(1) == 49
    stats = cache.stats()
    assert [layer.key_codec for layer in stats.layers] == [None, policy.default.key.name] * 2
    assert stats.other_bytes == sum(2 * exact.layers[i].keys.numel() * 2 for i in (0, 2))


@pytest.mark.parametrize("chunks", [(3,), (8,), (13,), (40,)])
def test_chunked_prefill_past_the_window(chunks):
    model = tiny("gemma3")
    ids = prompt(40)
    mine = feed(model, KVQuantCache.for_model(model, FP16), ids, *chunks)
    assert relative_rms(mine, feed(model, stock(model), ids)) < 1e-5
    assert feed(model, KVQuantCache.for_model(model, small()), ids, *chunks).isfinite().all()


def test_gradients_reach_the_new_tokens(llama):
    cache = KVQuantCache.for_model(llama, small())
    feed(llama, cache, prompt(60))
    llama(prompt(4, seed=2), cache=cache).logits.sum().backward()
    assert llama.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0
    assert not cache.layers[0].held.key.tails[0].tokens.requires_grad


# --- shapes ---


@pytest.mark.parametrize("head_dim", [80, 96, 15])
@pytest.mark.parametrize("policy", ["int8", "int4", "k8v4", "balanced"])
def test_odd_head_sizes(head_dim, policy):
    model = tiny("gpt2", n_embd=4 * head_dim, n_positions=512) if head_dim % 2 else tiny("qwen3", head_dim=head_dim)
    cache = KVQuantCache.for_model(model, policy)
    logits = feed(model, cache, prompt(400), 100)
    assert relative_rms(logits, feed(model, stock(model), prompt(400), 100)) < 0.3
    assert cache.stats().blocks == 2


def test_keys_and_values_of_different_widths():
    config = tf.DeepseekV3Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=24, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = prompt(80)
    mine = feed(model, KVQuantCache.for_model(model, FP16), ids, 9)
    assert torch.equal(mine, feed(model, stock(model), ids, 9))
    cache = KVQuantCache.for_model(model, small("int8", "int4"))
    feed(model, cache, ids, 9)
    block = cache.block(0, 0, 0)
    assert block.key.shape[2] != block.value.shape[2]


def test_a_process_ends_quietly_with_caches_alive():
    code = (
        "from tests.models import *; import kvquant, logging; logging.getLogger('kvquant').setLevel('ERROR');"
        "m = tiny(); c = kvquant.KVQuantCache.for_model(m, 'int4');"
        "feed(m, c, prompt(600)); import copy; d = copy.deepcopy(c)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr == done.stdout == ""


def test_finalisers_may_run_at_any_moment():
    pool = SlotPool()
    slots = pool.allocate(6)
    pool.give_back(slots[:4])  # as a cache that is collected does, perhaps while the next line allocates
    assert pool.allocate(2) == slots[:2]
    assert pool.live == 4
    assert pool.references(slots[3]) == 0


def test_what_cannot_be_done_says_so(llama):
    cache = KVQuantCache.for_model(llama, small())
    with pytest.raises(UnsupportedError, match="cannot be pickled; copy.deepcopy"):
        pickle.dumps(cache)
    feed(llama, cache, prompt(20, rows=2))
    assert cache.is_initialized
    with pytest.raises(CacheStateError, match="layer 7: the cache was built for a model of 4 layers"):
        cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 7)
    for bad in (torch.tensor([True]), torch.tensor([[0, 1]]), torch.tensor([0.0, 1.0])):
        with pytest.raises(CacheStateError, match="rows tensor.* selected from a cache of 2 rows"):
            cache.batch_select_indices(bad)
        with pytest.raises(CacheStateError, match="rows tensor.* selected from a cache of 2 rows"):
            cache.reorder_cache(bad)
    assert cache.stats().tokens == (20, 20)


@pytest.mark.parametrize("policy", ["int8", "int4"])
def test_float16_at_its_limits_stays_finite(policy):
    chosen = PrecisionPolicy.load(policy).default
    x = torch.full((1, 2, 128, 64), 65000.0, dtype=torch.float16)
    x[:, :, ::3] *= -1
    for codec in (chosen.key, chosen.value):
        assert codec.decode(codec.encode(x), 64, torch.float16).isfinite().all()


# --- construction ---


def test_for_model_takes_names_files_policies_and_configs(llama, tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(small().to_yaml())
    for policy in ("int4", path, str(path), small()):
        assert len(KVQuantCache.for_model(llama, policy).layers) == 4
    assert len(KVQuantCache.for_model(llama.config, "int4").layers) == 4
    wrapper = Gemma3Config(text_config=FAMILIES["gemma3"]().to_dict())
    assert len(KVQuantCache.for_model(wrapper, "int4").layers) == 4


def test_for_model_refuses_what_it_cannot_serve():
    with pytest.raises(UnsupportedError, match="Linear is neither a transformers model nor its config"):
        KVQuantCache.for_model(torch.nn.Linear(2, 2), "int4")
    config = FAMILIES["mistral"]()
    config.sliding_window = 8
    with pytest.raises(UnsupportedError, match="nothing to compress: the model has 4 sliding_attention"):
        KVQuantCache.for_model(config, "int4")
    assert isinstance(config, PreTrainedConfig)


def test_phi3_long_rope_is_warned_about_and_still_right():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = tf.Phi3Config(
        **COMMON,
        original_max_position_embeddings=32,
        rope_parameters={**rope, "original_max_position_embeddings": 32},
    )
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for length, kept in ((20, 32), (40, 0)):
        with pytest.warns(KVQuantWarning, match="phi3 with long-rope: generate.. drops its cache .* past 32 tokens"):
            cache = KVQuantCache.for_model(model, FP16)
        mine = generate(model, cache, prompt(length), new=30)
        assert torch.equal(mine, generate(model, stock(model), prompt(length), new=30))
        assert cache.get_seq_length() == kept
    with pytest.warns(KVQuantWarning):
        cache = KVQuantCache.for_model(model, FP16)
    feed(model, cache, prompt(80), 20)
    assert cache.stats().blocks == 4


def test_blocks_that_are_not_there(llama):
    cache = KVQuantCache.for_model(tiny("gemma3"), small())
    with pytest.raises(CacheStateError, match="layer 0 is not compressed: DynamicSlidingWindowLayer"):
        cache.block(0, 0, 0)
    cache = KVQuantCache.for_model(llama, small())
    feed(llama, cache, prompt(40))
    with pytest.raises(CacheStateError, match="row 0 has 1 sealed blocks, there is no number 1"):
        cache.block(0, 0, 1)
