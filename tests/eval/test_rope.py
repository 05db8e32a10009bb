"""Stretched positions: what the config becomes, and who is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from kvquant_eval.errors import InputError
from kvquant_eval.rope import stretch
from tests.models import FAMILIES


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2", "deepseek_v3"])
def test_transformers_takes_what_the_config_becomes(kind: str, family: str) -> None:
    config: Any = FAMILIES[family]()
    assert stretch(config, kind, 4096) == ""  # its own limit
    before = tf.AutoModelForCausalLM.from_config(config).get_decoder().rotary_emb
    assert stretch(config, kind, 16384) == f"{kind}×4"
    assert config.max_position_embeddings == 16384
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
            "llama is scaled already \\(linear, to 4096 tokens\\)",
        ),
    ],
)
def test_who_is_refused(config: Any, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        stretch(config(), "yarn", 16384)
