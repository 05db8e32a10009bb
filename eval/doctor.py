"""`kvquant doctor`: what a policy does to a model, layer by layer, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

import kvquant
from kvquant.cache.hooks import why_decoded
from kvquant.geometry import cache_hazard, decoder_config, layer_kinds

from .errors import InputError, one_line
from .models import load_config

_REASONS = {
    "sliding_attention": "holds its window only, whatever the context",
    "chunked_attention": "holds its chunk only, whatever the context",
    "linear_attention": "a recurrent state, no keys and values",
    "conv": "a convolution's state, no keys and values",
    "hybrid": "attention and a recurrent state in one layer",
    "hybrid_sliding": "a window and a recurrent state in one layer",
    "cross_attention": "attends to an image, whose keys and values do not grow",
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
        return bool(self.rows) and all(row.status != "refused" for row in self.rows)

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
    """`diagnose` for a config and a policy at hand.

    Raises `kvquant.PolicyError` if they do not fit, `InputError` where transformers can build nothing from the config.
    """
    try:
        auto, given = _builder(config)
        if auto is None:
            return Diagnosis([], [f"{config.model_type} is no model that writes text, as far as transformers tells"])
        kinds = layer_kinds(config)
        with torch.device("meta"):
            model = auto.from_config(given)
    except Exception as error:  # a config that makes no sense may fail anywhere
        raise InputError(f"model: transformers can't build it: {one_line(error)}") from error
    try:
        kvquant.enable(model)
        resolved = policy.resolve(config)
    except kvquant.UnsupportedError as error:
        why = str(error)
        rows = [LayerRow(layer, kind, "refused", reason=_REASONS.get(kind, why)) for layer, kind in enumerate(kinds)]
        return Diagnosis(rows, [why])
    hazard = cache_hazard(config)
    rows = []
    for layer in resolved.layers:
        if layer.policy is not None:
            codecs = layer.policy.key.name, layer.policy.value.name
            rows.append(LayerRow(layer.index, layer.kind, "compressed", *codecs, hazard or ""))
        else:
            reason = _REASONS.get(layer.kind, f"layers of kind {layer.kind} are left to transformers")
            rows.append(LayerRow(layer.index, layer.kind, "passed through", reason=reason))
    why = why_decoded(model)
    slower = f"keys and values are decoded for attention, which is slower: {why}" if why else ""
    return Diagnosis(rows, [note for note in (hazard, slower) if note])


def _builder(config: Any) -> tuple[Any, Any]:
    """transformers' class that builds the model of a config, or of its text part; (None, …) if it has none."""
    text = decoder_config(config)
    choices = [
        (AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, config),
        (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING, text),
        (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, config),
        (AutoModelForSpeechSeq2Seq, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, config),
        (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING, config),
    ]
    return next(((auto, given) for auto, known, given in choices if type(given) in known), (None, config))
