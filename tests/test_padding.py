"""Masks with holes: rows that stopped early, prompts padded on either side."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

import kvquant
from kvquant import KVQuantCache
from tests.models import COMMON, feed, generate, prompt, stock, tiny
from tests.witness import DECODES, ECHO, FP16, LOSSY, Witness, attempt, same


@DECODES
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_row_goes_on_after_hidden_tokens(family, hooked):
    model = tiny(family)
    if hooked:
        kvquant.enable(model)
    mask = torch.ones(2, 44, dtype=torch.long)
    mask[1, 12:20] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for policy in (FP16, LOSSY):
        cache, exact, logits = Witness.for_model(model, policy), stock(model), []
        for one in (cache, exact):
            parts = []
            for first, stop in ((0, 20), (20, 24), (24, 25), (25, 44)):
                ids = prompt(stop - first, rows=2, seed=first)
                told = {"attention_mask": mask[:, :stop], "position_ids": positions[:, first:stop]}
                parts.append(feed(model, one, ids, **told))
            logits.append(torch.cat(parts, dim=1))
        cache.check()
        if policy is FP16:
            assert torch.equal(*logits)


@DECODES
def test_a_generated_padding_token_hides_nothing_from_the_next_turn():
    """transformers takes padding tokens in a prompt for padding when no mask is given."""
    model = tiny("llama")
    kvquant.enable(model)
    ids = prompt(30)
    ids[0, 20] = 0
    cache, exact = KVQuantCache.for_model(model, FP16), stock(model)
    for turn in range(3):
        mine, theirs = generate(model, cache, ids), generate(model, exact, ids)
        assert torch.equal(mine, theirs)
        ids = torch.cat((mine, prompt(9, seed=turn)), dim=1)
        ids[0, -4] = 0


def test_what_a_model_calls_its_decoder_may_be_its_output_layer():
    sizes = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
    config = tf.ModernBertDecoderConfig(
        **sizes,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=8,
        cls_token_id=1,
        sep_token_id=2,
    )
    config.eos_token_id = None
    torch.manual_seed(3)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    kvquant.enable(model)
    cold = generate(model, stock(model), ECHO)
    cache = KVQuantCache.for_model(model, FP16)
    assert torch.equal(generate(model, cache, ECHO), cold)
    assert cache.rows.rows[0].ids


@DECODES
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "opt", "bloom", "gemma3"])
@pytest.mark.parametrize("hooked", [False, True])
def test_batches_padded_on_either_side(family, side, hooked):
    model = tiny(family)
    if hooked:
        kvquant.enable(model)
    ids = prompt(36, rows=2)
    mask = torch.ones_like(ids)
    where = slice(0, 20) if side == "left" else slice(16, 36)
    ids[1, where] = mask[1, where] = 0
    cold = attempt(model, stock(model), ids, attention_mask=mask)
    assert same(attempt(model, KVQuantCache.for_model(model, FP16), ids, attention_mask=mask), cold)
