"""`kvquant doctor`: what a policy does to a model, layer by layer, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import kvquant
from kvquant.geometry import cache_hazard, layer_kinds

from .models import load_config

_REASONS = {
    "sliding_attention": "holds its window only, whatever the context",
    "chunked_attention": "holds its chunk only, whatever the context",
    "linear_attention": "a recurrent state, no keys and values",
    "conv": "a convolution's state, no keys and values",
    "hybrid": "attention and a recurrent state in one layer",
    "hybrid_sliding": "a window and a recurrent state in one layer",
    "dummy": "no keys and values of its own: it reads another layer's, or has no attention",
}

Status = Literal["compressed", "passed through", "refused"]


@dataclass(frozen=True)
class LayerRow:
    """What becomes of one layer, and why. ``key`` and ``value`` are codec names, empty where not compressed."""

    layer: int
    kind: str
    status: Status
    key: str = ""
    value: str = ""
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The row with JSON's own types only."""
        return asdict(self)


@dataclass(frozen=True)
class Diagnosis:
    """Rows for all layers, and what to know about the model as a whole, one line each."""

    rows: list[LayerRow]
    notes: list[str]

    @property
    def served(self) -> bool:
        """Whether the model can be given a compressed cache."""
        return all(row.status != "refused" for row in self.rows)

    def spans(self) -> list[tuple[str, LayerRow]]:
        """Neighbours with the same fate as one: ("0-7", a row of theirs)."""
        fates = groupby(self.rows, key=lambda row: (row.kind, row.status, row.key, row.value, row.reason))
        groups = [list(group) for _, group in fates]
        return [
            (f"{group[0].layer}-{group[-1].layer}" if len(group) > 1 else str(group[0].layer), group[0])
            for group in groups
        ]


def diagnose(model: str, policy: str, say: Callable[[str], None]) -> Diagnosis:
    """Examine a model by its config. Raises `kvquant.KVQuantError` for bad input, not for a model refused."""
    chosen = kvquant.PrecisionPolicy.load(policy)
    return diagnose_config(load_config(model, say), chosen)


def diagnose_config(config: Any, policy: Any) -> Diagnosis:
    """`diagnose` for a config and a policy at hand. Raises `kvquant.PolicyError` if they do not fit."""
    kinds = layer_kinds(config)
    try:
        resolved = policy.resolve(config)
        _check_decoder(config)
    except kvquant.UnsupportedError as error:
        rows = [LayerRow(index, kind, "refused", reason=_REASONS.get(kind, "")) for index, kind in enumerate(kinds)]
        return Diagnosis(rows, [str(error)])
    rows = []
    for layer in resolved.layers:
        if layer.policy is not None:
            codecs = layer.policy.key.name, layer.policy.value.name
            rows.append(LayerRow(layer.index, layer.kind, "compressed", *codecs))
        else:
            reason = _REASONS.get(layer.kind, f"layers of kind {layer.kind} are left to transformers")
            rows.append(LayerRow(layer.index, layer.kind, "passed through", reason=reason))
    hazard = cache_hazard(config)
    return Diagnosis(rows, [hazard] if hazard else [])


def _check_decoder(config: Any) -> None:
    """Build the model without weights and try the hook; `kvquant.UnsupportedError` if it takes no cache."""
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = auto.from_config(config)
    except ValueError as error:  # a model that generates no text, or code of its own
        raise kvquant.UnsupportedError(f"{config.model_type} is no model that generates text") from error
    kvquant.enable(model)
