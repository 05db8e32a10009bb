"""Every way `generate` uses a cache: as stock under a lossless policy, and as compressing the true history once."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf
from transformers.cache_utils import DynamicCache

import kvquant
from kvquant import KVQuantCache
from tests.models import FAMILIES, feed, generate, prompt, stock, tiny
from tests.witness import DECODES, ECHO, FP16, LOSSY, Witness, attempt, same


def assistant():
    return tiny("llama", num_hidden_layers=1)


WAYS = {
    "greedy": dict,
    "sampling": lambda: {"do_sample": True, "temperature": 1.2, "num_return_sequences": 3},
    "beams": lambda: {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
    "sampled beams": lambda: {"num_beams": 3, "do_sample": True, "temperature": 1.5},
    "early stopping": lambda: {
        "num_beams": 3,
        "early_stopping": True,
        "eos_token_id": [5, 9, 40],
        "min_new_tokens": 2,
    },
    "prompt lookup": lambda: {"prompt_lookup_num_tokens": 3},
    "assisted": lambda: {"assistant_model": assistant()},
    "assisted sampling": lambda: {"assistant_model": assistant(), "do_sample": True},
    "itself as assistant": lambda: {"assistant_model": tiny("llama")},
    "early exit": lambda: {"assistant_early_exit": 2},
    "penalties": lambda: {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "prefill in chunks": lambda: {"prefill_chunk_size": 7},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hooked", [False, True])
def test_every_way_of_generating(way, hooked):
    model = tiny("llama")
    if hooked:
        kvquant.enable(model)
    kwargs = WAYS[way]()
    cold = attempt(model, stock(model), ECHO, **kwargs)
    assert isinstance(cold, torch.Tensor), cold
    assert same(attempt(model, KVQuantCache.for_model(model, FP16), ECHO, **kwargs), cold)
    witness = Witness.for_model(model, LOSSY)
    attempt(model, witness, ECHO, **kwargs)
    witness.check()


@pytest.mark.parametrize("way", ["prompt lookup", "assisted", "sampled beams"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_every_family_assists_as_with_the_stock_cache(family, way):
    model = tiny(family)
    kwargs = WAYS[way]()
    cold = attempt(model, stock(model), ECHO, **kwargs)
    assert same(attempt(model, KVQuantCache.for_model(model, FP16), ECHO, **kwargs), cold)
    if isinstance(cold, torch.Tensor):
        witness = Witness.for_model(model, LOSSY)
        attempt(model, witness, ECHO, **kwargs)
        witness.check()


def test_contrastive_search_and_dola_have_left_transformers():
    with pytest.raises(ValueError, match="transformers-community/contrastive-search"):
        generate(tiny("llama"), None, ECHO, penalty_alpha=0.6, top_k=4)


@pytest.mark.parametrize("rows", [1, 3])
def test_expand_a_prompt_then_search_with_beams(rows):
    """A prompt read once, all but its last token, then several beams from it."""
    model = tiny("llama")
    ids = prompt(20, rows=rows)
    for policy in (FP16, LOSSY):
        cache = Witness.for_model(model, policy)
        feed(model, cache, ids[:, :-1])
        cache.batch_repeat_interleave(3)
        warm = generate(model, cache, ids, num_beams=3, num_return_sequences=3)
        if policy is FP16:
            assert torch.equal(warm, generate(model, stock(model), ids, num_beams=3, num_return_sequences=3))
        cache.check()
        cache.batch_select_indices(torch.tensor([0, 2]))
        cache.check()
        assert {len(cache.rows.rows), *(len(layer.held.key.tails) for layer in cache.layers)} == {2}
        feed(model, cache, prompt(20, rows=2, seed=3))
        cache.check()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "deepseek_v3"])
def test_reorders_compose(family):
    model = tiny(family)
    ids = prompt(40, rows=4)
    cache = Witness.for_model(model, LOSSY)
    feed(model, cache, ids, 13)
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    cache.reorder_cache(torch.tensor([1, 1, 0, 3]))
    cache.check()
    feed(model, cache, prompt(30, rows=4, seed=9), 7)
    cache.check()


@pytest.mark.parametrize("cut", [1, 5, 8])
def test_rollback_into_the_tail_then_more(cut):
    model = tiny("llama")
    cache = Witness.for_model(model, LOSSY)
    for turn in range(6):
        feed(model, cache, prompt(13, seed=turn))
        cache.crop(-cut)
    assert cache.get_seq_length() == 6 * (13 - cut)
    cache.check()


def test_short_rollbacks():
    model = tiny("llama")
    cache = KVQuantCache.for_model(model, LOSSY)
    cache.crop(-5)
    cache.crop(0)
    feed(model, cache, prompt(3))
    cache.crop(-5)
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, cache, ECHO), generate(model, KVQuantCache.for_model(model, LOSSY), ECHO))


def test_a_window_that_moved_on_refuses_rollback_and_nothing_is_lost():
    model = tiny("gemma3")
    cache, twin = (KVQuantCache.for_model(model, LOSSY) for _ in range(2))
    for one in (cache, twin):
        feed(model, one, prompt(40))
    with pytest.raises(RuntimeError, match="crop"):
        cache.crop(-5)
    assert torch.equal(feed(model, cache, prompt(9, seed=2)), feed(model, twin, prompt(9, seed=2)))


@DECODES
@pytest.mark.parametrize("policy", [FP16, LOSSY])
def test_rows_end_and_rows_begin(policy):
    """A batch whose rows end is cut down to the living; one that takes in a new row begins it in later columns."""
    model = tiny("llama")
    kvquant.enable(model)
    ids = prompt(40, rows=3)
    cache, alone = Witness.for_model(model, policy), KVQuantCache.for_model(model, policy)
    feed(model, cache, ids)
    feed(model, alone, ids[2:])
    cache.batch_select_indices(torch.tensor([2]))
    later = prompt(25, seed=8)
    assert torch.equal(feed(model, cache, later), feed(model, alone, later))
    cache.check()
    # A row that has been padding so far begins.
    cache = Witness.for_model(model, policy)
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[1, :45] = 0
    ids = prompt(70, rows=2)
    for first, stop in ((0, 30), (30, 40), (40, 60), (60, 70)):
        part = mask[:, :stop]
        positions = (part.cumsum(1) - 1).clamp(min=0)[:, first:]
        logits = feed(model, cache, ids[:, first:stop], attention_mask=part, position_ids=positions)
    assert cache.stats().tokens == (70, 25)
    cache.check()
    alone = KVQuantCache.for_model(model, policy)
    feed(model, alone, ids[1:, 45:60])
    torch.testing.assert_close(logits[1:], feed(model, alone, ids[1:, 60:]), rtol=0, atol=2e-5)


def test_a_batch_of_one_policy_per_row_length():
    model = tiny("qwen2")
    kvquant.enable(model)
    ids = prompt(60, rows=3)
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 51, 27)):
        ids[row, :pad] = mask[row, :pad] = 0
    for kwargs in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        given = {"attention_mask": mask, **kwargs}
        cold = attempt(model, stock(model), ids, **given)
        assert same(attempt(model, KVQuantCache.for_model(model, FP16), ids, **given), cold)
        witness = Witness.for_model(model, LOSSY)
        attempt(model, witness, ids, **given)
        witness.check()


@pytest.mark.parametrize("grad", [False, True])
def test_a_copy_and_its_original_go_their_own_ways(grad):
    model = tiny("llama")
    cache = KVQuantCache.for_model(model, LOSSY)
    feed(model, cache, ECHO)
    twin = copy.deepcopy(cache)
    before = [layer.keys for layer in cache.layers]
    with torch.set_grad_enabled(grad):
        model(prompt(20, seed=4), cache=twin)
        twin.batch_repeat_interleave(2)
        beams = generate(model, copy.deepcopy(twin), torch.cat((ECHO, prompt(21, seed=4)), dim=1), num_beams=2)
    assert all(torch.equal(was, layer.keys) for was, layer in zip(before, cache.layers, strict=True))
    again = KVQuantCache.for_model(model, LOSSY)
    feed(model, again, ECHO)
    feed(model, again, prompt(20, seed=4))
    again.batch_repeat_interleave(2)
    assert torch.equal(generate(model, again, torch.cat((ECHO, prompt(21, seed=4)), dim=1), num_beams=2), beams)


def test_encoder_decoder_generation():
    both = FAMILIES["gemma2"]().to_dict()
    config = tf.T5GemmaConfig(encoder=both, decoder=both, vocab_size=97, pad_token_id=0, bos_token_id=1)
    config.eos_token_id = None
    torch.manual_seed(5)
    model = tf.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).eval()
    ids = prompt(12, rows=2)

    def both_caches(policy):
        own = stock_decoder() if policy is None else KVQuantCache.for_model(model, policy)
        return tf.EncoderDecoderCache(own, DynamicCache())

    def stock_decoder():
        return DynamicCache(config=model.config.get_text_config(decoder=True))

    for hooked in (False, True):
        if hooked:
            kvquant.enable(model)
        for kwargs in ({}, {"num_beams": 3}, {"do_sample": True}):
            cold = attempt(model, both_caches(None), ids, new=40, decoder_start_token_id=1, **kwargs)
            assert isinstance(cold, torch.Tensor), cold
            cache = both_caches(FP16)
            assert same(attempt(model, cache, ids, new=40, decoder_start_token_id=1, **kwargs), cold)
            assert cache.self_attention_cache.stats().blocks > 0
            attempt(model, both_caches(LOSSY), ids, new=40, decoder_start_token_id=1, **kwargs)
