"""The tuned policy beside the presets, on text that nothing was chosen by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from kvquant import KVQuantCache, KVQuantError, PrecisionPolicy, preset_names
from kvquant.tuner.candidates import Assignment, Frame
from kvquant.tuner.footprint import Footprint

from ..front import kl_at
from ..models import LoadedModel
from ..rows import Row
from ..sweep import Settings, Sweep
from .solution import Solution, TuneRow, tuned_row, widened


@dataclass(frozen=True)
class _Rival:
    ratio: float
    kl: float


def rivals(model: Any) -> list[PrecisionPolicy]:
    """The presets that can serve a model, but for those that were tuned, for this one or another."""
    return [policy for policy in map(PrecisionPolicy.load, preset_names()) if _serves(model, policy)]


def comparison(loaded: LoadedModel, ids: Tensor, solution: Solution, settings: Settings) -> Sweep:
    """The sweep over held-out ``ids`` of the tuned policy and the presets, in one reading."""
    tuned = solution.policy
    others = [policy for policy in rivals(loaded.model) if policy.name != tuned.name]
    new = partial(KVQuantCache.for_model, loaded.model)
    return Sweep(loaded.name, loaded.model, ids, [tuned, *others], new, settings)


def compared(solution: Solution, rows: Sequence[Row], most: Mapping[str, float]) -> list[TuneRow]:
    """The rows of `comparison`, the tuned policy's first and beside what the presets give in as many bytes.

    ``most`` is the share of bytes that each preset may come to, by name.
    """
    ours, *others = sorted(rows, key=lambda row: row.policy != solution.policy.name)
    points = [
        _Rival(row.kv_ratio, row.kl_mean)
        for row in others
        if row.status == "ok" and row.kv_ratio is not None and row.kl_mean is not None
    ]
    rival = kl_at(points, ours.kv_ratio) if ours.kv_ratio is not None else None
    tuned = replace(
        tuned_row(solution, ours),
        kl_at_equal_bytes=rival,
        ratio_to_rivals=ours.kl_mean / rival if rival and ours.kl_mean is not None else None,
    )
    return [tuned, *(widened(row, most.get(row.policy)) for row in others)]


def most_ratios(model: Any, footprint: Footprint, policies: Sequence[PrecisionPolicy]) -> dict[str, float]:
    """By name, the share of the 16-bit bytes that each policy may come to."""
    found = {}
    for policy in policies:
        layers = {
            layer.index: (layer.policy.key.name, layer.policy.value.name)
            for layer in policy.resolve(model).layers
            if layer.policy is not None
        }
        found[policy.name] = footprint.ratio(Assignment(Frame.of(policy), layers))
    return found


def _serves(model: Any, policy: PrecisionPolicy) -> bool:
    try:
        KVQuantCache.for_model(model, policy)
    except KVQuantError:
        return False
    return True
