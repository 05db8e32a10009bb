"""Tiny random models of many families, and the loops the tests drive them with."""

from __future__ import annotations

import torch
import transformers as tf
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

VOCAB = 97

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_WINDOWED = {"head_dim": 16, "sliding_window": 8}

FAMILIES = {
    "llama": lambda: tf.LlamaConfig(**COMMON),
    "qwen2": lambda: tf.Qwen2Config(**COMMON),
    "qwen3": lambda: tf.Qwen3Config(**COMMON, head_dim=16),
    "mistral": lambda: tf.MistralConfig(**COMMON, sliding_window=None),
    "mixtral": lambda: tf.MixtralConfig(**COMMON, num_local_experts=2, num_experts_per_tok=1),
    "gemma2": lambda: tf.Gemma2Config(**COMMON, **_WINDOWED),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **COMMON, **_WINDOWED, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=4,
        n_head=4,
        n_positions=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    ),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**{k: v for k, v in COMMON.items() if k != "num_key_value_heads"}),
}


def tiny(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: object) -> tf.PreTrainedModel:
    """A random model in eval mode, the same for the same arguments."""
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(1234)
    return tf.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def stock(model: tf.PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


def prompt(length: int, rows: int = 1, seed: int = 7) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed(model: tf.PreTrainedModel, cache: Cache, ids: Tensor, *chunks: int, **kwargs: Tensor) -> Tensor:
    """Logits ``[rows, tokens, vocabulary]`` of ids fed in chunks of the given sizes, the last size repeating."""
    logits, at, sizes = [], 0, list(chunks) or [ids.shape[1]]
    while at < ids.shape[1]:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        logits.append(model(input_ids=ids[:, at : at + size], cache=cache, use_cache=True, **kwargs).logits)
        at += size
    return torch.cat(logits, dim=1)


def generate(model: tf.PreTrainedModel, cache: Cache | None, ids: Tensor, new: int = 24, **kwargs: object) -> Tensor:
    kwargs = {"do_sample": False, **kwargs}
    return model.generate(ids, max_new_tokens=new, min_new_tokens=new, cache=cache, **kwargs)
