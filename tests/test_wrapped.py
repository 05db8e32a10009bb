"""Autocast, and models that are more than a decoder."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from transformers.cache_utils import DynamicCache

import kvquant
from kvquant import KVQuantCache, UnsupportedError
from kvquant.testing import relative_rms
from tests.models import COMMON, FAMILIES, feed, prompt, stock, tiny
from tests.witness import DECODES, ECHO, FP16, LOSSY, attempt, same


@pytest.mark.parametrize("policy", ["fp16", "int8", "int4", "mixed-3bit", "nf4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(policy, dtype):
    model = tiny("llama")
    with torch.autocast("cpu", dtype=dtype):
        cache, exact = KVQuantCache.for_model(model, policy), stock(model)
        mine, theirs = (feed(model, one, prompt(500), 90) for one in (cache, exact))
        keys = cache.layers[3].keys
    assert relative_rms(mine.float(), theirs.float()) < (1e-6 if policy == "fp16" else 0.5)
    assert torch.equal(cache.layers[3].keys, keys)
    assert cache.stats().blocks == 2


def vision(kind, text, **settings):
    """A tiny image-and-text model; only text is given to it."""
    config = getattr(tf, f"{kind}Config")(text_config=text, **settings)
    torch.manual_seed(3)
    return tf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


WRAPPED = {
    "gemma3": lambda: vision(
        "Gemma3",
        {**FAMILIES["gemma3"]().to_dict(), "vocab_size": 97},
        vision_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14,
        },
        image_token_id=96, boi_token_index=95, eoi_token_index=94, mm_tokens_per_image=4,
    ),
    "paligemma": lambda: vision(
        "PaliGemma",
        {**FAMILIES["gemma2"]().to_dict(), "model_type": "gemma2", "layer_types": ["full_attention"] * 4},
        vision_config={
            "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "projection_dim": 64,
        },
        image_token_id=96, projection_dim=64, hidden_size=64,
    ),
    "llava": lambda: vision(
        "Llava",
        {**FAMILIES["qwen2"]().to_dict(), "model_type": "qwen2"},
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "projection_dim": 16,
        },
        image_token_index=96,
    ),
    "qwen2_vl": lambda: vision(
        "Qwen2VL",
        {
            **COMMON, "num_hidden_layers": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1},
        image_token_id=96, video_token_id=95, vision_start_token_id=94, vision_end_token_id=93,
    ),
    "mllama": lambda: vision(
        "Mllama",
        {
            **COMMON, "num_hidden_layers": 5, "cross_attention_layers": [3],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        vision_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_global_layers": 1,
            "attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_output_dim": 32,
            "intermediate_layers_indices": [0],
        },
        image_token_index=96,
    ),
}  # fmt: skip


@DECODES
@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("hooked", [False, True])
def test_models_that_wrap_a_decoder(kind, hooked):
    model = WRAPPED[kind]()
    model.generation_config.eos_token_id = None
    if hooked:
        kvquant.enable(model)
    ids = prompt(40, rows=2).clamp(max=90)
    mask = torch.ones_like(ids)
    for padded in (False, True):
        if padded:
            ids[1, :15] = mask[1, :15] = 0
        for kwargs in ({}, {"num_beams": 2}):
            given = {"attention_mask": mask, **kwargs}
            cold = attempt(model, DynamicCache(config=model.config), ids, **given)
            assert isinstance(cold, torch.Tensor), cold
            cache = KVQuantCache.for_model(model, FP16)
            assert same(attempt(model, cache, ids, **given), cold)
            assert cache.stats().blocks > 0
            attempt(model, KVQuantCache.for_model(model, LOSSY), ids, **given)


SPEAKING = {
    "t5": lambda: tf.T5Config(
        vocab_size=97, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=1,
        pad_token_id=0,
    ),
    "bart": lambda: tf.BartConfig(
        vocab_size=97, d_model=64, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=200,
        decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, forced_eos_token_id=None,
    ),
}  # fmt: skip


@DECODES
@pytest.mark.parametrize("kind", SPEAKING)
@pytest.mark.parametrize("hooked", [False, True])
def test_encoder_decoders_in_every_way(kind, hooked):
    config = SPEAKING[kind]()
    config.eos_token_id = None
    torch.manual_seed(5)
    model = tf.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).eval()
    if hooked:
        kvquant.enable(model)

    def caches(own):
        return tf.EncoderDecoderCache(own, DynamicCache())

    for kwargs in ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"do_sample": True}):
        cold = attempt(model, caches(DynamicCache()), ECHO, new=40, **kwargs)
        assert isinstance(cold, torch.Tensor), cold
        cache = caches(KVQuantCache.for_model(model, FP16))
        assert same(attempt(model, cache, ECHO, new=40, **kwargs), cold)
        assert cache.self_attention_cache.stats().blocks > 0


def test_models_that_take_no_cache_are_refused():
    config = tf.XLNetConfig(vocab_size=97, d_model=32, n_layer=1, n_head=2, d_inner=32)
    with pytest.raises(UnsupportedError, match="takes no cache"):
        KVQuantCache.for_model(tf.AutoModelForCausalLM.from_config(config), FP16)
    with pytest.raises(UnsupportedError, match="BltConfig does not tell its layers"):
        KVQuantCache.for_model(tf.BltConfig(), FP16)
