"""Where a model keeps its decoder and what layers that has, by transformers' own rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

COMPRESSED_KIND = "full_attention"
"""The layer kind whose keys and values grow with context and are compressed; all others pass through."""


def decoder_config(config: Any) -> Any:
    """The text decoder's part of a model's config: composite and multimodal configs wrap it."""
    return config.get_text_config(decoder=True)


def decoder_module(model: nn.Module) -> nn.Module:
    """The text decoder of a model, which takes the cache; the model itself where it is one."""
    get_decoder: Any = getattr(model, "get_decoder", None)
    decoder: nn.Module | None = get_decoder() if get_decoder else None
    return model if decoder is None else decoder


def layer_kinds(config: Any) -> list[str]:
    """Kind of each decoder layer (``full_attention``, ``sliding_attention``, ``linear_attention``, …)."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    return list(get_layer_types_and_kwargs(decoder_config(config))[0])


def caches_latents(config: Any) -> bool:
    """Whether the model caches MLA's latent as "key" and its rotary key as "value" (DeepSeek-V2 and -V3 and kin)."""
    return getattr(decoder_config(config), "kv_lora_rank", None) is not None


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
