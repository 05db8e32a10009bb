"""What a choice of codecs gives each layer's keys and values, and what others would have cost."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvquant import get_codec
from kvquant.tuner.candidates import RAW
from kvquant.tuner.footprint import ROLES

from ..front import pareto_front

if TYPE_CHECKING:
    from kvquant.tuner.candidates import Assignment
    from kvquant.tuner.sensitivity import Sensitivity

TYPICAL_BITS = 4  # of codes, or what is nearest: layers are compared at these


@dataclass(frozen=True)
class Option:
    """A codec for one layer's keys or values: its share of all layers' 16-bit bytes, and of the predicted KL."""

    codec: str
    ratio: float
    kl: float


@dataclass(frozen=True)
class Choice:
    """What one layer's keys or values got.

    ``rank`` counts from 1, the most sensitive of that role. ``cheaper`` and ``dearer`` are the neighbours among the
    codecs that no other beats, None where there is none.
    """

    layer: int
    role: str
    chosen: Option
    rank: int
    cheaper: Option | None
    dearer: Option | None


def choices(sensitivity: Sensitivity, assignment: Assignment) -> dict[tuple[int, str], Choice]:
    """Every choice of an assignment, by layer and role."""
    ranks = {role: _ranks(sensitivity, role) for role in ROLES}
    return {
        (layer, role): _choice(sensitivity, assignment, layer, role, ranks[role][layer])
        for layer in sorted(assignment.layers)
        for role in ROLES
    }


def width(codec: str) -> int | None:
    """Bits of a code, by the codec's name: ``int4/token/g64/none`` and ``nf4`` have 4; None where it does not tell."""
    found = re.search(r"\d+", codec.split("/")[0])
    return int(found[0]) if found else None


def bits(sensitivity: Sensitivity, layer: int, role: str, codec: str) -> float:
    """Bits that an element of a sealed block takes, parameters included."""
    footprint = sensitivity.candidates.footprint
    heads, *dims = footprint.shapes[layer]
    dim, tokens = dims[ROLES.index(role)], footprint.block_tokens
    built = get_codec(codec, role, tokens)
    if built.lossless:
        return 16.0
    layout = built.layout(heads, tokens, dim, torch.float16)
    return sum(8 * math.prod(shape) * dtype.itemsize for shape, dtype in layout.values()) / (heads * tokens * dim)


def losses_at(sensitivity: Sensitivity, role: str, bits_of_code: int) -> dict[int, float]:
    """By layer, the least KL that a codec of so many bits has by itself."""
    found = {
        layer: [kl for codec, kl in sensitivity.losses[layer, role].items() if width(codec) == bits_of_code]
        for layer in sorted(sensitivity.candidates.footprint.shapes)
    }
    return {layer: min(losses) for layer, losses in found.items() if losses}


def widths(sensitivity: Sensitivity, role: str) -> list[int]:
    """The widths of lossy codes that the candidates have, ascending."""
    names = sensitivity.candidates.codecs(role)
    return sorted({found for name in names if name != RAW and (found := width(name)) is not None})


def typical_width(sensitivity: Sensitivity, role: str) -> int:
    """The width nearest to 4 bits that the candidates have."""
    return min(widths(sensitivity, role), key=lambda bits: abs(bits - TYPICAL_BITS), default=TYPICAL_BITS)


def _ranks(sensitivity: Sensitivity, role: str) -> Mapping[int, int]:
    """By layer, from 1; one of which nothing is known, for it overflows, is the most sensitive."""
    losses = losses_at(sensitivity, role, typical_width(sensitivity, role))
    layers = sorted(sensitivity.candidates.footprint.shapes)
    ranked = sorted(layers, key=lambda layer: losses.get(layer, math.inf), reverse=True)
    return {layer: rank for rank, layer in enumerate(ranked, start=1)}


def _choice(sensitivity: Sensitivity, assignment: Assignment, layer: int, role: str, rank: int) -> Choice:
    footprint, frame = sensitivity.candidates.footprint, assignment.frame
    factor = sensitivity.frame_factors[frame]
    options = {
        codec: Option(codec, footprint.side_bytes(layer, role, codec, frame) / footprint.baseline, factor * kl)
        for codec, kl in sensitivity.losses[layer, role].items()
    }
    chosen = options[assignment.codec(layer, role)]
    front = pareto_front(list(options.values()))
    return Choice(
        layer,
        role,
        chosen,
        rank,
        next((option for option in reversed(front) if option.ratio < chosen.ratio), None),
        next((option for option in front if option.ratio > chosen.ratio and option.kl < chosen.kl), None),
    )
