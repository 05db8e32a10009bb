"""Tiny random models of many families, and the loops the tests drive them with."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as tf
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from kvquant import PrecisionPolicy

VOCAB = 97
SMALL = {"block_tokens": 16, "recent_tokens": 16, "sink_tokens": 4}

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

_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}


def small(key="int4", value="int4", **settings):
    """A policy whose blocks are small enough for tiny models to fill."""
    return PrecisionPolicy(name="small", default={"key": key, "value": value}, **{**SMALL, **settings})


def _config(kind: str, **settings: object) -> Callable[[], tf.PreTrainedConfig]:
    return lambda: getattr(tf, f"{kind}Config")(**{**COMMON, **settings})


FAMILIES = {
    "llama": _config("Llama"),
    "qwen2": _config("Qwen2"),
    "qwen2_moe": _config("Qwen2Moe", num_experts=4, shared_expert_intermediate_size=32, **_EXPERTS),
    "qwen3": _config("Qwen3", head_dim=16),
    "qwen3_moe": _config("Qwen3Moe", head_dim=16, num_experts=4, **_EXPERTS),
    "mistral": _config("Mistral", sliding_window=None),
    "mixtral": _config("Mixtral", num_local_experts=2, num_experts_per_tok=1),
    "gemma2": _config("Gemma2", **_WINDOWED),
    "gemma3": _config("Gemma3Text", **_WINDOWED, layer_types=_ALTERNATING),
    "gemma3n": _config(
        "Gemma3nText",
        **_WINDOWED,
        num_hidden_layers=6,
        intermediate_size=[96] * 6,
        activation_sparsity_pattern=[0.0] * 6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        altup_num_inputs=2,
    ),
    "phi": _config("Phi"),
    "phi3": _config("Phi3"),
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
    "falcon": lambda: tf.FalconConfig(
        **{k: v for k, v in COMMON.items() if k not in ("num_key_value_heads", "intermediate_size")},
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    "opt": lambda: tf.OPTConfig(
        **{k: v for k, v in COMMON.items() if k not in ("num_key_value_heads", "intermediate_size")},
        ffn_dim=96,
        word_embed_proj_dim=64,
    ),
    "bloom": lambda: tf.BloomConfig(
        vocab_size=VOCAB, hidden_size=64, n_layer=4, n_head=4, pad_token_id=0, bos_token_id=1, eos_token_id=None
    ),
    "stablelm": _config("StableLm"),
    "starcoder2": _config("Starcoder2", use_bias=True),
    "cohere2": _config("Cohere2", **_WINDOWED, layer_types=_ALTERNATING),
    "glm4": _config("Glm4", head_dim=16),
    "olmo2": _config("Olmo2"),
    "smollm3": _config("SmolLM3"),
    "deepseek_v2": _config("DeepseekV2", num_key_value_heads=4, **_EXPERTS, **_LATENT),
    "deepseek_v3": _config("DeepseekV3", num_key_value_heads=4, **_EXPERTS, **_LATENT),
    "gpt_oss": _config("GptOss", **_WINDOWED, num_local_experts=4, num_experts_per_tok=2, layer_types=_ALTERNATING),
    "qwen3_next": _config(
        "Qwen3Next",
        head_dim=16,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        shared_expert_intermediate_size=32,
        **_EXPERTS,
    ),
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
    kwargs = {"do_sample": False, "min_new_tokens": new, **kwargs}
    return model.generate(ids, max_new_tokens=new, cache=cache, **kwargs)
