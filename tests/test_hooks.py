"""`enable`, `disable`, `begin`: what reaches the cache besides keys and values, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf

import kvquant
from kvquant import CacheStateError, KVQuantCache, PrecisionPolicy, UnsupportedError, model_fingerprint
from tests.models import FAMILIES, feed, generate, prompt, stock, tiny

POLICY = PrecisionPolicy(
    name="small", block_tokens=16, recent_tokens=16, sink_tokens=2, default={"key": "int8", "value": "int8"}
)


FP16 = PrecisionPolicy(**{**dict(POLICY), "default": {"key": "fp16", "value": "fp16"}})


@pytest.fixture
def model():
    return tiny("llama")


def fresh(model, **kwargs):
    return KVQuantCache.for_model(model, POLICY, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hook_tells_padding_and_ids_on_every_family(family):
    model = tiny(family)
    kvquant.enable(model)
    ids = prompt(40, rows=2)
    ids[1, :30] = 0
    cache = fresh(model)
    out = generate(model, cache, ids, new=10, attention_mask=(ids != 0).long())
    assert cache.stats().tokens == (49, 19)
    for row, start in ((0, 0), (1, 30)):
        assert torch.cat(cache.rows.rows[row].ids).tolist() == out[row, start:-1].tolist()


def test_enable_twice_then_disable(model):
    kvquant.enable(model)
    kvquant.enable(model)
    decoder = model.get_decoder()
    assert len(decoder._forward_pre_hooks) == 1
    kvquant.disable(model)
    kvquant.disable(model)
    assert not decoder._forward_pre_hooks
    cache = fresh(model)
    feed(model, cache, prompt(20))
    assert cache.rows.rows[0].ids is None


def test_other_caches_are_left_alone(model):
    ids = prompt(20)
    before = feed(model, stock(model), ids)
    kvquant.enable(model)
    assert torch.equal(feed(model, stock(model), ids), before)
    assert torch.equal(model(ids, use_cache=False).logits, before)


def test_positional_arguments_and_the_old_name_are_understood(model):
    kvquant.enable(model)
    ids = prompt(20)
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    cache = fresh(model)
    model.model(ids, mask, (mask.cumsum(1) - 1).clamp(min=0), cache)
    assert cache.stats().tokens == (15,)


def test_embeddings_instead_of_ids(model):
    kvquant.enable(model)
    cache = fresh(model)
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[:, :4] = 0
    model(inputs_embeds=model.get_input_embeddings()(prompt(20)), attention_mask=mask, cache=cache)
    assert cache.stats().tokens == (16,)
    with pytest.raises(CacheStateError, match="content keys need token ids"):
        cache.content_keys(0)


def test_encoder_decoder_self_attention():
    config = tf.T5GemmaConfig(
        encoder=FAMILIES["gemma2"]().to_dict(), decoder=FAMILIES["gemma2"]().to_dict(), vocab_size=97
    )
    model = tf.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).eval()
    kvquant.enable(model)
    cross = tf.DynamicCache()
    cache = tf.EncoderDecoderCache(KVQuantCache.for_model(model.config.decoder, POLICY), cross)
    model(input_ids=prompt(6), decoder_input_ids=prompt(9), cache=cache)
    assert cache.self_attention_cache.stats().tokens == (9,)
    assert torch.cat(cache.self_attention_cache.rows.rows[0].ids).tolist() == prompt(9)[0].tolist()


def test_models_without_a_cache_are_refused():
    bert = tf.ViTModel(tf.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8))
    with pytest.raises(UnsupportedError, match="takes neither cache nor past_key_values"):
        kvquant.enable(bert)
    with pytest.raises(UnsupportedError, match="Linear is not a transformers model"):
        kvquant.enable(torch.nn.Linear(2, 2))


def test_a_copied_model_is_enabled_on_its_own(model):
    kvquant.enable(model)
    twin = copy.deepcopy(model)
    cache = fresh(twin)
    feed(twin, cache, prompt(20))
    assert cache.rows.rows[0].ids is not None  # the hook came along with the copy
    kvquant.enable(twin)
    kvquant.disable(twin)
    kvquant.disable(model)
    assert not model.get_decoder()._forward_pre_hooks
    assert not twin.get_decoder()._forward_pre_hooks


# --- what does not continue the cache ---


# Their windows and recurrent states cannot take a token back.
FORGETFUL = ["gemma2", "gemma3", "gemma3n", "cohere2", "gpt_oss", "qwen3_next"]


# Bloom has no positions and `generate` drops a mask of ones: nothing tells its repeated prompt from new tokens.
@pytest.mark.parametrize(
    ("family", "masked"),
    [
        (name, masked)
        for name in FAMILIES
        for masked in (False, True)
        if name not in FORGETFUL and (masked or name != "bloom")
    ],
)
def test_a_prompt_that_is_cached_whole_costs_one_token_and_gives_the_cold_text(family, masked):
    model = tiny(family)
    kvquant.enable(model)
    ids = prompt(40, rows=2)
    mask = torch.ones_like(ids)
    if masked:
        ids[1, :15] = mask[1, :15] = 0
    given = {"attention_mask": mask} if masked else {}
    cache = KVQuantCache.for_model(model, FP16)
    positions = {} if family == "bloom" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    feed(model, cache, ids, attention_mask=mask, **positions)
    lengths = []
    handle = model.get_decoder().register_forward_hook(lambda m, args, out: lengths.append(out[0].shape[1]))
    mine = generate(model, cache, ids, **given)
    handle.remove()
    assert torch.equal(mine, generate(model, stock(model), ids, **given))
    assert lengths[0] == 1


@pytest.mark.parametrize("family", FORGETFUL)
def test_a_prompt_cached_whole_is_refused_where_no_token_can_be_taken_back(family):
    model = tiny(family)
    kvquant.enable(model)
    cache = fresh(model)
    feed(model, cache, prompt(20))
    with pytest.raises(CacheStateError, match=r"go on at 0, but the cache holds 20 tokens|must be \[rows, 40\]"):
        generate(model, cache, prompt(20))
    assert cache.get_seq_length() == 20


def test_the_same_tokens_once_more_are_new_tokens(model):
    kvquant.enable(model)
    for length in (1, 20):
        cache, exact = KVQuantCache.for_model(model, FP16), stock(model)
        ids = prompt(length)
        for _ in range(3):
            torch.testing.assert_close(feed(model, cache, ids), feed(model, exact, ids), rtol=1e-4, atol=1e-5)
        positions = torch.arange(3 * length, 4 * length)[None]
        mine, theirs = (feed(model, target, ids, position_ids=positions) for target in (cache, exact))
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        assert cache.stats().tokens == (4 * length,)


def test_another_prompt_of_the_same_length_is_refused(model):
    kvquant.enable(model)
    cache = fresh(model)
    feed(model, cache, prompt(20))
    with pytest.raises(CacheStateError, match="position_ids of row 0 go on at 0, but the cache holds 20 tokens"):
        generate(model, cache, prompt(20, seed=8))


def test_positions_may_count_tokens_or_columns(model):
    kvquant.enable(model)
    mask = torch.tensor([[0] * 3 + [1] * 17])
    for positions in ((mask.cumsum(1) - 1).clamp(min=0), torch.arange(20)[None]):
        feed(model, fresh(model), prompt(20), attention_mask=mask, position_ids=positions)
    for then in (27, 20):  # some models count from 1, or further
        cache = fresh(model)
        feed(model, cache, prompt(20), position_ids=torch.arange(7, 27)[None])
        feed(model, cache, prompt(5), position_ids=torch.arange(then, then + 5)[None])
    cache = fresh(model)
    feed(model, cache, prompt(20), position_ids=torch.arange(7, 27)[None])
    with pytest.raises(CacheStateError, match="position_ids of row 0 go on at 7, but the cache holds 20 tokens"):
        feed(model, cache, prompt(20), position_ids=torch.arange(7, 27)[None])


def test_masks_that_do_not_fit_the_cache(model):
    kvquant.enable(model)
    cache = fresh(model)
    feed(model, cache, prompt(20, rows=2))
    with pytest.raises(CacheStateError, match=r"the mask must be \[rows, 25\]"):
        model(prompt(5, rows=2), attention_mask=torch.ones(2, 5), cache=cache)
    mask = torch.ones(2, 25, dtype=torch.long)
    mask[1, :3] = 0
    with pytest.raises(
        CacheStateError, match="row 1 begins with 3 padding columns, but the cache began that row after 0"
    ):
        model(prompt(5, rows=2), attention_mask=mask, cache=cache)
    assert cache.get_seq_length() == 20


def test_masked_tokens_inside_a_row_are_kept_as_tokens(model):
    kvquant.enable(model)
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[:, 10:14] = 0
    ids = prompt(40)
    cache = KVQuantCache.for_model(model, "fp16")
    mine = feed(model, cache, ids, attention_mask=mask)
    assert torch.equal(mine, feed(model, stock(model), ids, attention_mask=mask))
    assert cache.stats().tokens == (40,)


def test_four_dimensional_masks_are_the_models_business(model):
    kvquant.enable(model)
    ids = prompt(6)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    cache = fresh(model)
    mine = model(ids, attention_mask=mask, cache=cache).logits
    assert torch.equal(mine, model(ids, attention_mask=mask, use_cache=False).logits)


def test_begin_by_hand(model):
    ids = prompt(30, rows=2)
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    cache = fresh(model)
    cache.begin(ids, mask)
    feed(model, cache, ids, attention_mask=mask)
    assert cache.stats().tokens == (10, 30)
    with pytest.raises(CacheStateError, match="begin\\(\\) needs input_ids"):
        cache.begin(attention_mask=mask)


# --- content keys ---


@pytest.mark.parametrize("kind", ["hole", "right", "four-dimensional"])
def test_masks_that_decide_bytes_leave_no_content_keys(model, kind):
    kvquant.enable(model)
    mask = torch.ones(1, 40, dtype=torch.long)
    if kind == "hole":
        mask[:, 10:14] = 0
    elif kind == "right":
        mask[:, 30:] = 0
    else:
        mask = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    cache = fresh(model)
    model(prompt(40), attention_mask=mask, cache=cache)
    with pytest.raises(CacheStateError, match="content keys need token ids"):
        cache.content_keys(0)


def test_another_models_states_get_no_content_keys(model):
    other = tiny("llama")
    kvquant.enable(other)
    cache = fresh(model)
    feed(other, cache, prompt(40))
    with pytest.raises(CacheStateError, match="content keys need token ids"):
        cache.content_keys(0)


def test_equal_content_gives_equal_keys_whatever_the_row_and_padding(model):
    kvquant.enable(model)
    ids = prompt(100, rows=2)
    mask = torch.ones_like(ids)
    ids[1, 40:] = ids[0, :60]
    ids[1, :40] = mask[1, :40] = 0
    cache = fresh(model)
    generate(model, cache, ids, new=2, attention_mask=mask)
    first, second = cache.content_keys(0), cache.content_keys(1)
    assert len(first) == 5
    assert second == first[: len(second)]
    assert len(second) == 2
    assert len(set(first)) == 5


def test_every_part_of_the_identity_changes_every_key(model):
    kvquant.enable(model)
    keys = []

    def record(model, policy=POLICY, **kwargs):
        kvquant.enable(model)
        cache = KVQuantCache.for_model(model, policy, **kwargs)
        feed(model, cache, prompt(100))
        keys.append(cache.content_keys(0))

    record(model)
    record(model, tenant="a")
    record(model, adapter="lora-1")
    for change in ({"block_tokens": 32}, {"sink_tokens": 0}, {"default": {"key": "int8", "value": "int4"}}):
        record(model, PrecisionPolicy(**{**dict(POLICY), **change}))
    record(tiny("llama", torch.bfloat16))
    record(tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    revised = tiny("llama")
    with torch.no_grad():
        revised.lm_head.weight[0, 0] += 1
    record(revised)
    assert len({key for row in keys for key in row}) == sum(len(row) for row in keys)
    record(tiny("llama"))
    assert keys[-1] == keys[0]


def test_a_cropped_and_a_copied_row_keep_their_ids(model):
    kvquant.enable(model)
    cache = fresh(model)
    feed(model, cache, prompt(100), 30)
    keys = cache.content_keys(0)
    cache.crop(-45)
    assert cache.content_keys(0) == keys[:3]
    twin = copy.deepcopy(cache)
    feed(model, twin, prompt(60, seed=9))
    assert twin.content_keys(0)[:3] == keys[:3]
    assert twin.content_keys(0)[3] != keys[3]


def test_content_keys_need_the_model(model):
    cache = KVQuantCache.for_model(model.config, POLICY)
    feed(model, cache, prompt(40))
    with pytest.raises(CacheStateError, match="content keys need the model"):
        cache.content_keys(0)


def test_model_fingerprint():
    model = tiny("llama")
    assert model_fingerprint(model) == model_fingerprint(tiny("llama"))
    assert model_fingerprint(model, full=True) != model_fingerprint(model)
    changed = tiny("llama")
    weight = changed.model.embed_tokens.weight
    with torch.no_grad():
        weight[50, 31] += 1e-3  # one value in the middle of 6208: sampled or not, the full hash sees it
    assert model_fingerprint(changed, full=True) != model_fingerprint(model, full=True)
    assert model_fingerprint(tiny("qwen2")) != model_fingerprint(model)
    assert model_fingerprint(model.to("meta")) == model_fingerprint(tiny("llama").to("meta"))


def test_block_keys_are_handles(model):
    cache = fresh(model)
    feed(model, cache, prompt(60, rows=2))
    handles = {cache.block_key(layer, row, 0) for layer in range(4) for row in range(2)}
    assert len(handles) == 8
    assert len({handle.to_bytes() for handle in handles}) == 8
