"""What a tuning found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvquant.tuner.allocation import curve, smallest

from .. import environment
from ..rows import Row
from .goal import Goal

if TYPE_CHECKING:
    from kvquant.policy import PrecisionPolicy
    from kvquant.tuner.candidates import Assignment
    from kvquant.tuner.sensitivity import Sensitivity

_LARGEST_BUDGET = 0.6  # that the curve is drawn to
_CURVE_POINTS = 40


@dataclass(frozen=True)
class TuneRow(Row):
    """A policy on held-out text. Of the tuned one also what was asked, predicted and measured while tuning.

    ``predicted`` and ``measured`` are KL on the calibration text. ``kl_at_equal_bytes`` is the least KL of the presets
    at the tuned policy's bytes, between two of them linear in its logarithm, and ``ratio_to_rivals`` the tuned
    policy's over it; None where no preset is that small. ``kv_ratio`` is what the comparison's caches took, and
    ``kv_ratio_most`` the most that may come to, by the calls that bring the text: what a budget limits.
    """

    budget: float | None = None
    predicted: float | None = None
    measured: float | None = None
    kl_at_equal_bytes: float | None = None
    ratio_to_rivals: float | None = None
    kv_ratio_most: float | None = None


@dataclass(frozen=True)
class Trial:
    """A policy that was tried, ``what`` for: its share of the 16-bit bytes, and KL on the calibration text."""

    what: str
    ratio: float
    kl: float
    predicted: float

    def as_dict(self) -> dict[str, str | float]:
        """With JSON's own types."""
        return {"what": self.what, "ratio": self.ratio, "predicted": self.predicted, "measured": self.kl}


@dataclass(frozen=True)
class Point:
    """A point of the predicted curve: the least KL to be had in ``ratio`` of the bytes."""

    ratio: float
    kl: float

    def as_dict(self) -> dict[str, float]:
        """With JSON's own types."""
        return {"ratio": self.ratio, "predicted": self.kl}


@dataclass(frozen=True)
class Solution:
    """A policy that meets a goal, and what is known of it.

    ``ratio`` is its share of the 16-bit bytes, ``predicted`` and ``measured`` its KL on the calibration text;
    ``measured`` is None without a model. ``broken`` says what of the goal was not met when it was verified.
    """

    goal: Goal
    policy: PrecisionPolicy
    assignment: Assignment
    sensitivity: Sensitivity
    ratio: float
    predicted: float
    measured: float | None = None
    trials: Sequence[Trial] = ()
    rows: Sequence[TuneRow] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    broken: Sequence[str] = ()

    def with_rows(self, rows: Sequence[TuneRow]) -> Solution:
        """The same with rows."""
        return replace(self, rows=rows)


@dataclass(frozen=True)
class Outcome:
    """A solution and what is needed to make it again. ``saved`` is where its sensitivity was written, if it was."""

    command: str
    date: str
    solution: Solution
    yaml: str
    saved: str | None
    versions: Mapping[str, Any] = field(default_factory=environment.versions)
    machine: Mapping[str, Any] = field(default_factory=environment.machine)

    @cached_property
    def curve(self) -> list[Point]:
        """The least predicted KL from the smallest budget there is to 0.6, each choice once."""
        sensitivity = self.solution.sensitivity
        least = smallest(sensitivity)
        step = (max(least, _LARGEST_BUDGET) - least) / (_CURVE_POINTS - 1)
        solved = curve(sensitivity, [least + step * number for number in range(_CURVE_POINTS)])
        ratio = sensitivity.candidates.footprint.ratio
        return list(dict.fromkeys(Point(ratio(assignment), kl) for _, kl, assignment in solved))

    def document(self) -> dict[str, Any]:
        """What ``--json`` prints and ``rows.json`` holds."""
        solution = self.solution
        return {
            "command": self.command,
            "date": self.date,
            "versions": dict(self.versions),
            "machine": dict(self.machine),
            "facts": dict(solution.facts),
            "goal": vars(solution.goal),
            "broken": list(solution.broken),
            "policy": self.yaml,
            "sensitivity": self.saved,
            "curve": [point.as_dict() for point in self.curve],
            "trials": [trial.as_dict() for trial in solution.trials],
            "rows": [row.as_dict() for row in solution.rows],
        }


def widened(row: Row, most: float | None) -> TuneRow:
    """The same row, with its ``kv_ratio_most`` and room for more."""
    return TuneRow(**{each.name: getattr(row, each.name) for each in fields(Row)}, kv_ratio_most=most)


def tuned_row(solution: Solution, row: Row) -> TuneRow:
    """A row of the tuned policy, with what was asked and found."""
    told = widened(row, solution.ratio)
    return replace(told, budget=solution.goal.budget, predicted=solution.predicted, measured=solution.measured)


def untested_row(solution: Solution, reason: str) -> TuneRow:
    """The tuned policy's row where nothing was run on held-out text: its bytes, and why there is no more."""
    footprint, facts = solution.sensitivity.candidates.footprint, solution.facts
    row = Row(
        model=facts.get("model", ""),
        policy=solution.policy.name,
        context=footprint.context,
        protocol="prefill",
        dtype=facts.get("dtype", ""),
        kv_bytes=round(solution.ratio * footprint.baseline),
        kv_bytes_baseline=footprint.baseline,
        kv_ratio=solution.ratio,
        bits_per_element=16 * solution.ratio,
        status="skipped",
        reason=reason,
    )
    return tuned_row(solution, row)
