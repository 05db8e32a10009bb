"""Contexts beyond a model's own, and rotary positions that depend on the length of the text.

Positions are stretched by a rule of transformers'. Nobody trained the model for them, so every number of such a sweep
is marked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvquant.geometry import decoder_config
from kvquant.keybias import MOVING

from .errors import InputError

KINDS = ("yarn", "linear", "dynamic")
_HELD = "held longrope"  # of which transformers moves none, while a key bias still counts as one that moves


def stretch(config: Any, kind: str, longest: int) -> str:
    """Make a model's config serve ``longest`` tokens; what marks the rows (``yarn×4``), or "" if it does already.

    Layers with a window keep their positions: what they attend to is near. Raises `InputError` for a model whose
    positions are not rotary, or stretched already.
    """
    text = decoder_config(config)
    limit = context_limit(config)
    if limit is None or longest <= limit:
        return ""
    if obstacle := cannot_stretch(config):
        raise InputError(f"--rope-scaling: {obstacle}; its limit is {limit} tokens")
    factor = longest / limit
    parameters = _parameters(text)
    assert parameters is not None
    parameters |= {"rope_type": kind, "factor": factor}
    if kind != "dynamic":  # which counts from the model's own limit
        parameters["original_max_position_embeddings"] = limit
        text.max_position_embeddings = longest
    return f"{kind}×{factor:g}"


def is_rotary(config: Any) -> bool:
    """Whether a model turns its keys by their positions, which then need no table."""
    return _parameters(decoder_config(config)) is not None


def cannot_stretch(config: Any) -> str:
    """Why a model's positions cannot be stretched, or nothing."""
    text = decoder_config(config)
    parameters = _parameters(text)
    if parameters is None:
        return f"{text.model_type} has no rotary positions"
    given = parameters.get("rope_type", "default")
    return "" if given == "default" else f"{text.model_type} is scaled already ({given})"


def context_limit(config: Any) -> int | None:
    """The most tokens a model takes (``max_position_embeddings`` of its text decoder), None where it sets none.

    Under dynamic scaling, ``factor`` times as many.
    """
    text = decoder_config(config)
    limit: int | None = getattr(text, "max_position_embeddings", None)
    parameters = _parameters(text) or {}
    if limit is not None and parameters.get("rope_type") == "dynamic":
        limit = round(limit * parameters.get("factor", 1.0))
    return limit


def prefixes_nest(config: Any) -> bool:
    """Whether a shorter context's keys are the beginning of a longer one's: not where frequencies move with it."""
    rope = getattr(decoder_config(config), "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return not any(kind.get("rope_type") in MOVING for kind in kinds)


@contextmanager
def frequencies_of(model: Any, context: int) -> Iterator[None]:
    """Keep positions as they are in a text of ``context`` tokens, however little of it has been read.

    Else the first chunks of a long text would be turned as a short text is, which no single forward does.
    """
    moved: list[tuple[Any, Any]] = []
    try:
        for module in model.modules():
            kinds = getattr(module, "rope_type", None)
            by_layer = dict(kinds) if isinstance(kinds, dict) else {None: kinds}
            moving = {layer: kind for layer, kind in by_layer.items() if kind in MOVING}
            if not moving or not hasattr(module, "inv_freq" if None in moving else f"{next(iter(moving))}_inv_freq"):
                continue
            _forget_length(module)
            with torch.no_grad():
                for layer in moving:
                    module.forward(
                        torch.empty(0, dtype=model.dtype, device=model.device),
                        torch.tensor([[context - 1]], device=model.device),
                        **({} if layer is None else {"layer_type": layer}),
                    )
            moved.append((module, kinds))
            module.rope_type = _HELD if None in moving else by_layer | dict.fromkeys(moving, _HELD)
        yield
    finally:
        for module, kinds in moved:
            module.rope_type = kinds
            _forget_length(module)


def _forget_length(module: Any) -> None:
    """Have dynamic frequencies reckoned anew, whatever lengths were seen."""
    for name in vars(module):
        if name.endswith("max_seq_len_cached"):
            setattr(module, name, 0)


def _parameters(text: Any) -> dict[str, Any] | None:
    """How the layers that grow turn their keys; None where positions are not rotary."""
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict):
        return None
    parameters: dict[str, Any] = rope.get("full_attention", rope)
    return parameters
