"""A row of `kvquant ppl`: one policy at one context."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from .metrics import bootstrap_delta_pct

BUCKETS = 8

Status = Literal["ok", "skipped", "failed"]


@dataclass(frozen=True)
class Bucket:
    """Means over the scored tokens at positions ``first ≤ p < stop``, in nats per token."""

    first: int
    stop: int
    nll: float
    nll_baseline: float
    kl: float


@dataclass(frozen=True)
class Needle:
    """How well facts planted at a ``depth`` (share of the context) are told back.

    ``logprob`` in nats per token of the answer, given the ones before; ``exact`` is the share of answers whose every
    token was the most likely one.
    """

    depth: float
    logprob: float
    logprob_baseline: float
    exact: float
    exact_baseline: float


@dataclass(frozen=True)
class Row:
    """What a policy costs and saves at a context. Numbers that could not be had are None, and ``reason`` says why.

    Losses and KL are in nats per token, ``ppl_delta_pct`` and its 95 % interval in percent, ``kl_p99`` is the 99th
    percentile over tokens, ``top1_agreement`` a fraction. Bytes are those of `CacheStats`: full-attention layers,
    the baseline at 2 bytes an element. ``seconds`` is the time of the policy's own forwards up to this context,
    ``compress_seconds`` that of taking over an exact prefix. ``kl_floor`` is the KL that arithmetic alone makes: that
    of an uncompressed cache fed in other chunks. ``rope_scaling`` (``yarn×4``) marks contexts beyond the model's own.
    """

    model: str
    policy: str
    context: int
    protocol: str
    dtype: str
    ppl: float | None = None
    ppl_baseline: float | None = None
    ppl_delta_pct: float | None = None
    ppl_delta_ci95: tuple[float, float] | None = None
    kl_mean: float | None = None
    kl_p99: float | None = None
    top1_agreement: float | None = None
    tokens_scored: int = 0
    kv_bytes: int | None = None
    kv_bytes_baseline: int | None = None
    kv_ratio: float | None = None
    bits_per_element: float | None = None
    peak_kv_bytes: int | None = None
    seconds: float | None = None
    status: Status = "ok"
    reason: str = ""
    rope_scaling: str = ""
    compress_seconds: float | None = None
    kl_floor: float | None = None
    needle_logprob: float | None = None
    needle_logprob_baseline: float | None = None
    needle_exact: float | None = None
    needle_exact_baseline: float | None = None
    by_position: tuple[Bucket, ...] = ()
    by_depth: tuple[Needle, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The row with JSON's own types only."""
        values = asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def without_numbers(self, status: Status, reason: str) -> Row:
        """The same cell, skipped or failed."""
        return replace(self, status=status, reason=reason)


NESTED = ("by_position", "by_depth")  # lists of objects, which a table of values has no place for
COLUMNS = tuple(field.name for field in fields(Row) if field.name not in NESTED)


@dataclass(frozen=True)
class Scores:
    """One cell's scores, float64 ``[tokens]``: NLL of policy and reference, KL, agreement (0 or 1).

    ``positions`` ``[tokens]``, ascending, are those of the tokens scored.
    """

    positions: Sequence[int]
    nll: np.ndarray
    reference_nll: np.ndarray
    kl: np.ndarray
    agree: np.ndarray


def fidelity(scores: Scores, seed: int) -> dict[str, Any]:
    """The row's fidelity fields; what is not finite becomes None with a ``reason``."""
    with np.errstate(over="ignore", invalid="ignore"):
        loss, reference_loss = float(scores.nll.mean()), float(scores.reference_nll.mean())
        difference = scores.nll - scores.reference_nll
        numbers = {
            "ppl": float(np.exp(loss)),
            "ppl_baseline": float(np.exp(reference_loss)),
            "ppl_delta_pct": float(100 * np.expm1(difference.mean())),
            "kl_mean": float(scores.kl.mean()),
            "kl_p99": float(np.quantile(scores.kl, 0.99)),
        }
    infinite = [name for name, value in numbers.items() if not math.isfinite(value)]
    if {"ppl", "ppl_baseline"} & set(infinite):
        infinite = list(dict.fromkeys([*infinite, "ppl_delta_pct"]))  # of infinities a percentage says nothing
    values: dict[str, Any] = numbers | dict.fromkeys(infinite)
    if infinite:
        values["reason"] = (
            f"{', '.join(infinite)}: infinite (mean loss {loss:.6g}, baseline {reference_loss:.6g} nats per token)"
        )
    values["ppl_delta_ci95"] = None if "ppl_delta_pct" in infinite else bootstrap_delta_pct(difference, seed)
    values["by_position"] = tuple(_buckets(scores))
    return values | {"top1_agreement": float(scores.agree.mean()), "tokens_scored": len(scores.nll)}


def _buckets(scores: Scores) -> Iterator[Bucket]:
    """Means over eight equal shares of the scored tokens, in order of position; none where some are infinite."""
    parts = [part for part in np.array_split(np.arange(len(scores.nll)), BUCKETS) if len(part)]
    for part in parts:
        with np.errstate(over="ignore", invalid="ignore"):
            means = [float(values[part].mean()) for values in (scores.nll, scores.reference_nll, scores.kl)]
        if all(map(math.isfinite, means)):
            yield Bucket(int(scores.positions[part[0]]), int(scores.positions[part[-1]]) + 1, *means)


def footprint(stats: Any, seconds: float) -> dict[str, Any]:
    """The row's byte fields from `CacheStats`, and its seconds."""
    return {
        "kv_bytes": int(stats.kv_bytes),
        "kv_bytes_baseline": int(stats.kv_bytes_baseline),
        "kv_ratio": float(stats.kv_ratio),
        "bits_per_element": float(stats.bits_per_element),
        "peak_kv_bytes": int(stats.peak_kv_bytes),
        "seconds": round(seconds, 3),
    }
