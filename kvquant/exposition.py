"""Prometheus' text format, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Labels = tuple[tuple[str, str], ...]
"""Names and values."""


@dataclass(frozen=True)
class Metric:
    """A number, or numbers by their labels. ``kind`` tells whether it only grows (until its owner begins anew)."""

    name: str  # ends in _total if it only grows, before that in its unit if it has one
    kind: Literal["counter", "gauge"]
    help: str  # what it means, in one line
    value: float | Mapping[Labels, float]


def by(label: str, values: Mapping[str, float]) -> Mapping[Labels, float]:
    """Values by one label."""
    return {((label, each),): value for each, value in values.items()}


def exposition(prefix: str, metrics: Sequence[Metric]) -> str:
    """Metrics as text, each name after ``prefix`` and an underscore."""
    lines = []
    for metric in metrics:
        name = f"{prefix}_{metric.name}"
        lines += [f"# HELP {name} {_escaped(metric.help)}", f"# TYPE {name} {metric.kind}"]
        values = metric.value if isinstance(metric.value, Mapping) else {(): metric.value}
        for labels, value in values.items():
            told = ",".join(f'{label}="{_escaped(text, quoted=True)}"' for label, text in labels)
            lines.append(f"{name}{{{told}}} {_number(value)}" if told else f"{name} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)
