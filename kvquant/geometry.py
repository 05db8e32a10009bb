"""Where a model keeps its decoder and what layers that has, by transformers' own rules."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from .errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import nn

CROSS_KIND = "cross_attention"
"""Layers that attend to an image only (Mllama): transformers calls them full attention."""

COMPRESSED_KIND = "full_attention"
"""The layer kind whose keys and values grow with context and are compressed; all others pass through."""

CACHE_NAMES = ("cache", "past_key_values")
"""What models call their cache argument, and called it before transformers 5.24."""


def decoder_config(config: Any) -> Any:
    """The text decoder's part of a model's config: composite and multimodal configs wrap it."""
    return config.get_text_config(decoder=True)


def takes_cache(module: Any) -> bool:
    """Whether a module's forward has an argument for the cache."""
    return any(name in inspect.signature(module.forward).parameters for name in CACHE_NAMES)


def decoder_module(model: nn.Module) -> nn.Module:
    """The text decoder of a model, which takes the cache; the model itself where there is none inside."""
    get_decoder: Any = getattr(model, "get_decoder", None)
    # What a model calls its decoder may be its output layer.
    inside = [get_decoder() if get_decoder else None, getattr(model, "base_model", None)]
    return next((part for part in inside if part is not None and takes_cache(part)), model)


def layer_kinds(config: Any) -> list[str]:
    """Kind of each decoder layer (``full_attention``, ``sliding_attention``, ``linear_attention``, …)."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    decoder = decoder_config(config)
    try:
        kinds = list(get_layer_types_and_kwargs(decoder)[0])
    except Exception as error:  # a config without layers, or one that makes no sense
        raise UnsupportedError(f"{type(config).__name__} does not tell its layers: {error}") from error
    for index in getattr(decoder, "cross_attention_layers", None) or ():
        if index < len(kinds):
            kinds[index] = CROSS_KIND
    return kinds


def caches_latents(config: Any) -> bool:
    """Whether the model caches MLA's latent as "key" and its rotary key as "value" (DeepSeek-V2 and -V3 and kin)."""
    decoder = decoder_config(config)
    return all(getattr(decoder, name, None) is not None for name in ("kv_lora_rank", "qk_rope_head_dim"))


def cache_hazard(config: Any) -> str | None:
    """Why a model will not keep the cache it is given, in one line; None where it does."""
    decoder = decoder_config(config)
    rope = getattr(decoder, "rope_parameters", None) or {}
    limit = getattr(decoder, "original_max_position_embeddings", None)
    if decoder.model_type.startswith("phi") and rope.get("rope_type") == "longrope" and limit:
        return (
            f"{decoder.model_type} with long-rope: generate() drops its cache once the text is past {limit} "
            f"tokens and goes on with an uncompressed one of its own; calling the model directly keeps it"
        )
    return None


def kv_shape(config: Any) -> tuple[int, int, torch.dtype] | None:
    """Heads of keys and values, their channels and their dtype, as far as a config tells; None if it does not.

    Layers of a kind may differ: it is for telling early what is certain to fail.
    """
    import torch

    decoder = decoder_config(config)
    heads = getattr(decoder, "num_key_value_heads", None) or getattr(decoder, "num_attention_heads", None)
    dim = getattr(decoder, "head_dim", None)
    if dim is None and isinstance(heads, int) and isinstance(getattr(decoder, "hidden_size", None), int):
        dim = decoder.hidden_size // decoder.num_attention_heads
    dtype = getattr(decoder, "dtype", None)
    if caches_latents(decoder) or not isinstance(heads, int) or not isinstance(dim, int):
        return None
    return heads, dim, dtype if isinstance(dtype, torch.dtype) else torch.float32
