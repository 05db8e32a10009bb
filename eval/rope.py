"""Contexts beyond a model's own: its rotary positions stretched by a rule of transformers'.

Nobody trained the model for them, so every number of such a sweep is marked.
"""

from __future__ import annotations

from typing import Any

from .errors import InputError

KINDS = ("yarn", "linear", "dynamic")


def stretch(config: Any, kind: str, longest: int) -> str:
    """Make a model's config serve ``longest`` tokens; what marks the rows (``yarn×4``), or "" if it does already.

    Layers with a window keep their positions: what they attend to is near. Raises `InputError` for a model whose
    positions are not rotary, or stretched already.
    """
    text = config.get_text_config(decoder=True)
    limit: int | None = getattr(text, "max_position_embeddings", None)
    if limit is None or longest <= limit:
        return ""
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict):
        raise InputError(f"--rope-scaling: {text.model_type} has no rotary positions; its limit is {limit} tokens")
    parameters = rope.get("full_attention", rope)
    if (given := parameters.get("rope_type", "default")) != "default":
        raise InputError(f"--rope-scaling: {text.model_type} is scaled already ({given}, to {limit} tokens)")
    factor = longest / limit
    parameters |= {"rope_type": kind, "factor": factor, "original_max_position_embeddings": limit}
    text.max_position_embeddings = longest
    return f"{kind}×{factor:g}"
