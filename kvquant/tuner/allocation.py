"""The choice of least predicted loss within a budget of bytes, or of fewest bytes within a budget of loss.

Bytes and losses are sums over layers and roles, so this is a multiple-choice knapsack: for each layer's keys, and for
its values, one codec. It is solved exactly, frame by frame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ..errors import BudgetError
from .candidates import Assignment, Frame
from .footprint import ROLES
from .knapsack import Knapsack, Numbers, Picks
from .sensitivity import Sensitivity

DIGITS = 4  # of ratios told to users


@dataclass(frozen=True)
class Options:
    """The codecs of one layer's keys, or values, that no other beats in both: ``nbytes`` ascend, ``losses`` fall."""

    layer: int
    role: str
    codecs: tuple[str, ...]
    nbytes: Numbers
    losses: Numbers


Tables = Mapping[Frame, Sequence[Options]]


def allocate(sensitivity: Sensitivity, budget: float) -> Assignment:
    """The assignment of least predicted loss that takes ``budget`` of the baseline's bytes, over all frames.

    Of equals the one of fewer bytes. Raises `BudgetError` where none is small enough.
    """
    chosen = _allocated(sensitivity, _tables(sensitivity), budget)
    if chosen is None:
        least = smallest(sensitivity)
        told = round(least, DIGITS)
        told += (told < least) * 10**-DIGITS
        raise BudgetError(f"budget {budget:g}: no choice is so small; allowed: {told:.{DIGITS}f} and more")
    return chosen


def fewest_bytes(sensitivity: Sensitivity, max_loss: float) -> Assignment:
    """The assignment of fewest bytes whose predicted loss is at most ``max_loss``, over all frames.

    Raises `BudgetError` where none loses so little.
    """
    chosen = _best(_tables(sensitivity), lambda option: (option.nbytes, option.losses), max_loss)
    if chosen is None:
        raise BudgetError(f"max_loss {max_loss:g}: no choice loses so little; allowed: 0 and more")
    return chosen


def smallest(sensitivity: Sensitivity) -> float:
    """The least ratio of bytes to the baseline that any assignment has."""
    least = min(sum(float(group.nbytes[0]) for group in groups) for groups in _tables(sensitivity).values())
    return least / sensitivity.candidates.footprint.baseline


def curve(sensitivity: Sensitivity, budgets: Sequence[float]) -> list[tuple[float, float, Assignment]]:
    """``(budget, predicted loss, assignment)`` for each of ``budgets`` that is feasible."""
    tables = _tables(sensitivity)
    solved = [(budget, _allocated(sensitivity, tables, budget)) for budget in budgets]
    return [(budget, sensitivity.predicted(chosen), chosen) for budget, chosen in solved if chosen is not None]


def options(sensitivity: Sensitivity, frame: Frame) -> Iterator[Options]:
    """What may be chosen for each layer's keys and values in a frame."""
    footprint, factor = sensitivity.candidates.footprint, sensitivity.frame_factors[frame]
    for (layer, role), losses in sensitivity.losses.items():
        priced = sorted(
            (footprint.side_bytes(layer, role, codec, frame), factor * loss, codec) for codec, loss in losses.items()
        )
        kept: list[tuple[int, float, str]] = []
        for entry in priced:
            if not kept or entry[1] < kept[-1][1]:
                kept.append(entry)
        nbytes, lost, codecs = zip(*kept, strict=True)
        yield Options(layer, role, codecs, np.array(nbytes, float), np.array(lost))


def _tables(sensitivity: Sensitivity) -> Tables:
    """What may be chosen in each frame of which anything is known."""
    known = [frame for frame in sensitivity.candidates.frames if frame in sensitivity.frame_factors]
    return {frame: [*options(sensitivity, frame)] for frame in known}


def _allocated(sensitivity: Sensitivity, tables: Tables, budget: float) -> Assignment | None:
    limit = _whole_bytes(budget, sensitivity.candidates.footprint.baseline)
    return _best(tables, lambda option: (option.losses, option.nbytes), limit)


def _best(tables: Tables, terms: Callable[[Options], tuple[Numbers, Numbers]], limit: float) -> Assignment | None:
    """The assignment of least cost, then of least weight, of a weight within ``limit``; ``terms`` give both."""
    best, least = None, (math.inf, math.inf)
    for frame, groups in tables.items():
        knapsack = Knapsack.of([terms(option) for option in groups])
        picks = knapsack.solve(limit, least[0])
        if picks is None or (total := knapsack.totals(picks)) >= least:
            continue
        best, least = Assignment(frame, _layers(groups, picks)), total
    return best


def _layers(groups: Sequence[Options], picks: Picks) -> dict[int, tuple[str, str]]:
    chosen = {(group.layer, group.role): group.codecs[pick] for group, pick in zip(groups, picks, strict=True)}
    key, value = ROLES
    return {layer: (chosen[layer, key], chosen[layer, value]) for layer in dict.fromkeys(layer for layer, _ in chosen)}


def _whole_bytes(budget: float, baseline: int) -> int:
    """The most bytes whose ratio to the baseline, a float, is not above ``budget``."""
    limit = math.floor(Fraction(budget) * baseline)
    return limit + 1 if (limit + 1) / baseline <= budget else limit
