"""Stretched positions: what the config becomes, and who is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from kvquant_eval.errors import InputError
from kvquant_eval.rope import context_limit, frequencies_of, prefixes_nest, stretch
from tests.models import FAMILIES


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2", "deepseek_v3"])
def test_transformers_takes_what_the_config_becomes(kind: str, family: str) -> None:
    config: Any = FAMILIES[family]()
    assert stretch(config, kind, 4096) == ""  # its own limit
    before = tf.AutoModelForCausalLM.from_config(config).get_decoder().rotary_emb
    assert stretch(config, kind, 16384) == f"{kind}×4"
    assert context_limit(config) == 16384
    assert config.max_position_embeddings == (4096 if kind == "dynamic" else 16384)
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    rotary = model.get_decoder().rotary_emb
    name = "full_attention_inv_freq" if hasattr(rotary, "full_attention_inv_freq") else "inv_freq"
    if kind == "linear":
        assert torch.allclose(getattr(rotary, name) * 4, getattr(before, name))
    if kind == "yarn":
        assert (getattr(rotary, name) <= getattr(before, name) * 1.0001).all()
        assert not torch.equal(getattr(rotary, name), getattr(before, name))
    if family == "gemma3":
        assert torch.equal(rotary.sliding_attention_inv_freq, before.sliding_attention_inv_freq)
    model(torch.arange(3, 40)[None])


def test_multimodal_configs_are_stretched_in_their_text_part() -> None:
    config = tf.Gemma3Config(text_config=FAMILIES["gemma3"]().to_dict())
    assert stretch(config, "yarn", 8192) == "yarn×2"
    assert config.text_config.max_position_embeddings == 8192


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (FAMILIES["gpt2"], "gpt2 has no rotary positions; its limit is 1024 tokens"),
        (
            lambda: tf.LlamaConfig(
                max_position_embeddings=4096, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
            ),
            "llama is scaled already \\(linear\\); its limit is 4096 tokens",
        ),
    ],
)
def test_who_is_refused(config: Any, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        stretch(config(), "yarn", 16384)


MOVING = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0 + i for i in range(8)],
        "original_max_position_embeddings": 64,
        "factor": 4.0,
    },
}


@pytest.mark.parametrize("kind", MOVING)
@pytest.mark.parametrize("context", [50, 150])
def test_chunks_are_turned_as_one_forward_turns_the_whole(kind: str, context: int) -> None:
    config: Any = FAMILIES["llama"]()
    config.max_position_embeddings, config.rope_parameters = 64, MOVING[kind]
    assert not prefixes_nest(config)
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 90, (1, 200))

    def chunked(length: int) -> torch.Tensor:
        cache = tf.DynamicCache(config=config)
        with torch.no_grad():
            parts = [model(input_ids=part, cache=cache).logits for part in ids[:, :length].split(20, dim=1)]
        return torch.cat(parts, dim=1)

    with torch.no_grad():
        whole = model(input_ids=ids[:, :context]).logits
        model(input_ids=ids)  # a longer text leaves its mark on the module
        with frequencies_of(model, context):
            held = chunked(context)
        after = model(input_ids=ids[:, :context]).logits
    assert torch.allclose(held, whole, atol=1e-4)
    assert torch.allclose(after, whole, atol=1e-4)  # everything is as before
    assert torch.allclose(chunked(context), whole, atol=1e-3) == (context < 64)


def test_dynamic_positions_are_what_transformers_makes_of_them() -> None:
    config: Any = FAMILIES["llama"]()
    config.max_position_embeddings = 64
    assert stretch(config, "dynamic", 256) == "dynamic×4"
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    rotary = model.get_decoder().rotary_emb
    plain = rotary.inv_freq.clone()
    dim, base = 16, config.rope_parameters["rope_theta"]
    with frequencies_of(model, 256):
        stretched = base * (4 * 256 / 64 - 3) ** (dim / (dim - 2))
        expected = stretched ** (-torch.arange(0, dim, 2) / dim)
        assert torch.allclose(rotary.inv_freq, expected, rtol=1e-5)
    assert torch.allclose(plain, base ** (-torch.arange(0, dim, 2) / dim))
