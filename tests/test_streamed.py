"""Streamed attention within models: the text of dense mode, and what cannot be streamed is decoded and told."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings

import pytest
import torch
import transformers as tf

import kvquant
from kvquant import KVQuantCache, KVQuantWarning, PrecisionPolicy
from kvquant.cache.hooks import why_decoded
from kvquant.kernels import Sealed
from tests.models import FAMILIES, feed, generate, prompt, tiny

SMALL = {"block_tokens": 16, "recent_tokens": 16}
POLICIES = [
    PrecisionPolicy(name="fp16", default={"key": "fp16", "value": "fp16"}, **SMALL),
    PrecisionPolicy(name="int4", default={"key": "int4", "value": {"codec": "int4", "rotate": "hadamard"}}, **SMALL),
    PrecisionPolicy(name="mixed", default={"key": {"codec": "int8", "axis": "token"}, "value": "int3"}, **SMALL),
    PrecisionPolicy(name="k6v5", default={"key": "int6", "value": {"codec": "int5", "rotate": "hadamard"}}, **SMALL),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_are_those_of_dense_mode(family, policy):
    model, ids = tiny(family), prompt(120)
    dense = feed(model, KVQuantCache.for_model(model, policy), ids, 50, 1, 1, 20, 1)
    kvquant.enable(model)
    cache = KVQuantCache.for_model(model, policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KVQuantWarning)
        streamed = feed(model, cache, ids, 50, 1, 1, 20, 1)
    assert (cache.stats().fallbacks > 0) == bool(why_decoded(model))
    limit = 1e-4 if policy.name == "fp16" else 5e-3  # queries and weights are rounded to 16 bits
    assert (streamed - dense).norm() <= limit * dense.norm()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_ragged_batch(policy):
    model, ids = tiny(), prompt(90, rows=3)
    mask = torch.ones_like(ids)
    mask[1, :40], mask[2, :7] = 0, 0
    ids[mask == 0] = 0
    kvquant.enable(model)
    cache = KVQuantCache.for_model(model, policy)
    text = generate(model, cache, ids, new=40, attention_mask=mask)
    assert not cache.stats().fallbacks
    for row, start in enumerate((0, 40, 7)):
        alone = generate(model, KVQuantCache.for_model(model, policy), ids[row : row + 1, start:], new=40)
        assert torch.equal(text[row, 90:], alone[0, 90 - start :])


def test_beams_crops_and_copies():
    model, ids = tiny(), prompt(70)
    kvquant.enable(model)
    plain = tiny()
    for policy in POLICIES:
        for given in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
            cache = KVQuantCache.for_model(model, policy)
            streamed = generate(model, cache, ids, **given)
            assert torch.equal(streamed, generate(plain, KVQuantCache.for_model(plain, policy), ids, **given))
            assert not cache.stats().fallbacks
        cache = KVQuantCache.for_model(model, policy)
        feed(model, cache, ids, 40, 30)
        twin = copy.deepcopy(cache)
        cache.crop(-25)
        again = feed(model, cache, ids[:, 45:], 5, 20)
        assert torch.allclose(again, feed(model, twin_cropped(twin), ids[:, 45:], 25), atol=1e-2)


def twin_cropped(cache):
    cache.crop(-25)
    return cache


def test_what_cannot_be_streamed_is_decoded_and_told_once():
    model, ids = tiny(), prompt(80)
    kvquant.enable(model)
    cache = KVQuantCache.for_model(model, POLICIES[0])
    feed(model, cache, ids[:, :60], 60)
    odd = torch.ones(1, 1, 10, 70, dtype=torch.bool).tril(60)
    odd[..., 3] = False
    with torch.no_grad(), pytest.warns(KVQuantWarning, match="mask is not the causal one") as caught:
        hidden = model(input_ids=ids[:, 60:70], attention_mask=odd, cache=cache).logits
    assert len([one for one in caught if one.category is KVQuantWarning]) == 1
    assert cache.stats().fallbacks == 2 * len(cache.layers)
    kvquant.disable(model)
    plain = KVQuantCache.for_model(model, POLICIES[0])
    feed(model, plain, ids[:, :60], 60)
    assert torch.allclose(hidden, model(input_ids=ids[:, 60:70], attention_mask=odd, cache=plain).logits, atol=1e-5)


@pytest.mark.parametrize("asked", ["argument", "config"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "qwen2"])
def test_attention_weights_that_are_wanted_are_given(family, asked):
    """Not every family tells its attention function that they are."""
    model, ids = tiny(family), prompt(50)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids, output_attentions=True, use_cache=False).attentions
        model.config.output_attentions = asked == "config"
        kvquant.enable(model)
        cache = KVQuantCache.for_model(model, POLICIES[0])
        model(ids[:, :40], cache=cache)
        given = {"output_attentions": True} if asked == "argument" else {}
        with pytest.warns(KVQuantWarning, match="attention weights are wanted"):
            found = model(ids[:, 40:], cache=cache, **given).attentions
        assert len(found) == len(expected)
        for part, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(part, whole[:, :, 40:], atol=1e-5, rtol=1e-4)
        assert cache.stats().fallbacks == 2 * len(cache.layers)
        model(ids[:, :1], cache=cache, output_attentions=False)
        assert cache.stats().fallbacks == 2 * len(cache.layers)


def test_models_that_give_the_mask_by_its_name():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = tf.DogeConfig(vocab_size=97, num_key_value_heads=2, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    model, ids = tf.AutoModelForCausalLM.from_config(config).eval(), prompt(60)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        kvquant.enable(model)
        assert torch.allclose(model(ids, use_cache=False).logits, expected, atol=1e-5)
        cache = KVQuantCache.for_model(model, POLICIES[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KVQuantWarning)  # it masks by what keys say
            found = torch.cat([model(part, cache=cache).logits for part in ids.split(20, dim=1)], dim=1)
    assert found.shape == expected.shape


def gradients(model, policy):
    """Of a call after 50 tokens, by parameters that want one, in dense mode and streamed."""
    ids = prompt(60)
    for switch in (kvquant.disable, kvquant.enable):
        switch(model)
        cache = KVQuantCache.for_model(model, policy)
        feed(model, cache, ids[:, :50], 50)
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KVQuantWarning)
            model(input_ids=ids[:, 50:], cache=cache).logits.square().sum().backward()
        yield {name: x.grad.clone() for name, x in model.named_parameters() if x.requires_grad}


def test_gradients_are_those_of_dense_mode():
    grads = [found["model.layers.0.self_attn.q_proj.weight"] for found in gradients(tiny(), POLICIES[0])]
    assert torch.allclose(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("trained", ["k_proj", "v_proj", "q_proj"])
def test_gradients_of_keys_or_values_alone(trained):
    model = tiny()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    dense, streamed = gradients(model, POLICIES[1])
    assert dense
    assert all(torch.allclose(streamed[name], grad, rtol=1e-4, atol=1e-5) for name, grad in dense.items())


def test_enable_switches_attention_and_disable_brings_it_back():
    for family in ("llama", "gpt_oss", "deepseek_v3"):
        model = tiny(family)
        before = model.config._attn_implementation
        kvquant.enable(model)
        assert model.config._attn_implementation.startswith("kvquant")
        kvquant.enable(model)
        kvquant.disable(model)
        assert model.config._attn_implementation == before


def test_blocks_are_looked_up_once_between_seals():
    model, ids = tiny(), prompt(70)
    kvquant.enable(model)
    cache = KVQuantCache.for_model(model, POLICIES[1])
    feed(model, cache, ids, 70)
    found = []
    for _ in range(3):
        feed(model, cache, ids[:, :1], 1)
        layer = cache.layers[0]
        (portion,) = layer.held.blocks.read(cache.rows.view()).each
        made = [one for span in portion[0] for one in span.memo["segments"]]
        found.append([one for one in made if isinstance(one, Sealed)])
    assert found[0]
    assert all(a is b for one in found[1:] for a, b in zip(one, found[0], strict=True))


@pytest.mark.parametrize("rope", [None, {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}])
@pytest.mark.parametrize("family", ["qwen2", "stablelm", "opt"])
def test_key_biases_are_counted_at_their_positions(family, rope):
    """RoPE over all channels, over some, and none; YaRN also lengthens."""
    changes = {} if rope is None or family != "qwen2" else {"rope_parameters": rope}
    model, ids = tiny(family, **({"use_qkv_bias": True} if family == "stablelm" else {}), **changes), prompt(120)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):
            torch.nn.init.normal_(parameter, std=3.0)
    policy = POLICIES[1]
    dense = feed(model, KVQuantCache.for_model(model, policy), ids, 50, 1, 1, 20, 1)
    kvquant.enable(model)
    cache = KVQuantCache.for_model(model, policy)
    assert cache.layers[0].segments.bias
    streamed = feed(model, cache, ids, 50, 1, 1, 20, 1)
    assert not cache.stats().fallbacks
    assert (streamed - dense).norm() <= 5e-3 * dense.norm()


def test_an_enabled_model_is_loaded_elsewhere(tmp_path):
    model = tiny()
    kvquant.enable(model)
    torch.save(model, tmp_path / "model.pt")
    code = (
        f"import torch; m = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); m(torch.tensor([[5, 6]]))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_disable_leaves_an_attention_chosen_since():
    model = tiny()
    kvquant.enable(model)
    model.set_attn_implementation("eager")
    kvquant.disable(model)
    assert model.config._attn_implementation == "eager"


def test_what_is_always_decoded_is_counted_where_it_is_enabled():
    model, ids = tiny("falcon"), prompt(40)
    kvquant.enable(model)
    cache = KVQuantCache.for_model(model, POLICIES[0])
    feed(model, cache, ids[:, :30], 30)
    assert not cache.stats().fallbacks  # nothing was held yet
    feed(model, cache, ids[:, 30:], 8, 1, 1)
    assert cache.stats().fallbacks == 3 * 2 * len(cache.layers)
    assert str(cache.stats()).endswith("; keys or values were decoded for attention 24 times")
    kvquant.disable(model)
    feed(model, cache, ids, 20)
    assert cache.stats().fallbacks == 24


def test_copies_count_their_own_fallbacks():
    model, ids = tiny(), prompt(40)
    kvquant.enable(model)
    cache = KVQuantCache.for_model(model, POLICIES[0])
    feed(model, cache, ids, 40)
    twin = copy.deepcopy(cache)
    odd = torch.ones(1, 1, 1, 41, dtype=torch.bool)
    odd[..., 3] = False
    with torch.no_grad(), pytest.warns(KVQuantWarning, match="its mask is not"):
        model(input_ids=ids[:, :1], attention_mask=odd, cache=twin)
    assert twin.stats().fallbacks
    assert not cache.stats().fallbacks
