"""The best policy for a budget of bytes or of loss, by any objective.

cells      what each layer's keys and values lose by themselves: all, or where there are estimates those that matter
frames     what the numbers of sinks and of recent tokens make of a loss
solve      the best choice if losses add up, measured; and rivals
repair     where they do not add up: corrected by what is lost in company, solved and measured again
swap       one codec smaller, another larger, while that gains
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import PolicyError, shown
from ..policy import PrecisionPolicy
from .allocation import allocate, curve, smallest
from .candidates import RAW, Assignment, Candidates
from .footprint import ROLES
from .measuring import (
    CELLS_SHARE,
    Meter,
    Objective,
    Step,
    Tick,
    all_cells,
    amount,
    measure_cells,
    measure_frames,
    unmeasured_cells,
)
from .repair import FewestBytes, Goal, LeastLoss, Search
from .sensitivity import Cell, Sensitivity

SPREAD = 8  # budgets whose solutions tell which cells matter
LARGEST = 0.6  # of them


@dataclass(frozen=True)
class Tuned:
    """What came out.

    ``predicted`` was told before it was ``measured``, both in units of the objective, and ``agreed`` whether they
    differ by less than a tenth; ``sensitivity`` has learned from all ``steps``, the assignments measured on the way.
    """

    policy: PrecisionPolicy
    assignment: Assignment
    sensitivity: Sensitivity
    ratio: float
    predicted: float
    measured: float
    agreed: bool
    steps: tuple[Step, ...]


def tune_policy(
    objective: Objective,
    candidates: Candidates,
    budget: float | None = None,
    *,
    max_loss: float | None = None,
    estimates: Mapping[tuple[int, str, str], float] | None = None,
    sensitivity: Sensitivity | None = None,
    fingerprint: str = "",
    facts: Mapping[str, str] | None = None,
    measurements: int | None = None,
    seconds: float | None = None,
    rivals: Sequence[PrecisionPolicy] = (),
    name: str = "tuned",
    tick: Tick = lambda stage, done, total: None,
) -> Tuned:
    """The policy that loses least by an objective within ``budget``, or takes the fewest bytes within ``max_loss``.

    A budget is a share of the bytes of an uncompressed 16-bit cache, as `Footprint` counts them, and is always met.
    The objective is called with a policy, never twice with the same.

    Args:
        objective: see there.
        candidates: what may be chosen.
        budget: this or ``max_loss``.
        max_loss: the most that may be lost, in units of the objective, measured.
        estimates: losses by layer, role and codec, of all cells that may be chosen: only what matters is measured.
        sensitivity: of the same candidates, from an earlier run: no cell is measured.
        fingerprint: of the model; a ``sensitivity`` must be of it.
        facts: what else the result's sensitivity is to tell.
        measurements: the most cells to measure. Without estimates at least one of each layer's keys and values.
        seconds: after which nothing more is measured but what an answer needs: without estimates the smallest codec
            of each layer's keys and values, all frames, the first choice, and rivals.
        rivals: policies that are measured too, where they are among the candidates and fit: the best measured wins.
        name: the policy's.
        tick: told of progress.

    Raises `BudgetError` where no choice meets the limit, `PolicyError` on other arguments that make no sense and on
    losses that are none.
    """
    goal = _goal(budget, max_loss)
    most = None if measurements is None else int(amount("measurements", measurements))
    known = _told(candidates, estimates, sensitivity, fingerprint, facts or {})
    if isinstance(goal, LeastLoss):
        allocate(_lossless(known), goal.budget)  # so that hours of measuring do not end in a refusal
    meter = Meter(objective, candidates, seconds, tick)
    solutions: list[Assignment] = []
    if sensitivity is None:
        known = _with_cells(known, meter, goal, most, estimated=estimates is not None)
        known, solutions = measure_frames(known, meter, goal.reference)
    search = Search(goal, meter, known)
    first = search.take("first", goal.solve(known))
    for solution in solutions:
        if solution != first.assignment:
            search.take("frame", solution)
    search.challenge(rivals)
    search.repair(first)
    search.insist()
    search.swap()
    best = search.best
    assert best is not None
    return Tuned(
        policy=candidates.policy(best.assignment, name),
        assignment=best.assignment,
        sensitivity=search.sensitivity,
        ratio=best.ratio,
        predicted=best.predicted,
        measured=best.measured,
        agreed=best.agreed,
        steps=tuple(meter.steps),
    )


def require_feasible(candidates: Candidates, budget: float) -> None:
    """`BudgetError` where no choice is so small: to be known before anything is measured."""
    allocate(_lossless(Sensitivity(candidates, (), {})), budget)


def _goal(budget: float | None, max_loss: float | None) -> Goal:
    if budget is not None and max_loss is None:
        return LeastLoss(amount("budget", budget))
    if max_loss is not None and budget is None:
        return FewestBytes(amount("max_loss", max_loss))
    raise PolicyError("tune_policy takes a budget or a max_loss: one of the two")


def _told(
    candidates: Candidates,
    estimates: Mapping[tuple[int, str, str], float] | None,
    sensitivity: Sensitivity | None,
    fingerprint: str,
    facts: Mapping[str, str],
) -> Sensitivity:
    """What is known before anything is measured."""
    if sensitivity is not None:
        if estimates is not None:
            raise PolicyError("tune_policy takes estimates or a sensitivity, not both")
        if fingerprint:
            sensitivity.require(fingerprint)
        if sensitivity.candidates != candidates:
            raise PolicyError("sensitivity: of other candidates; allowed: one of the candidates that are given")
        return replace(sensitivity, facts={**sensitivity.facts, **facts})
    cells = []
    for (layer, role, codec), loss in (estimates or {}).items():
        if layer not in candidates.footprint.shapes or role not in ROLES or codec not in candidates.codecs(role):
            raise PolicyError(f"estimates: {shown((layer, role, codec))} is none of the candidates")
        number = amount(f"estimates: layer {layer} {role} {codec}", loss)
        if codec != RAW:
            cells.append(Cell(layer, role, codec, number, None))
    return Sensitivity(candidates, tuple(cells), {candidates.frames[0]: 1.0}, fingerprint, dict(facts))


def _lossless(known: Sensitivity) -> Sensitivity:
    """The same if nothing lost anything: of all cells, where none are known yet."""
    candidates = known.candidates
    places = [(cell.layer, cell.role, cell.codec) for cell in known.cells] or all_cells(candidates)
    cells = tuple(Cell(*place, 0.0, None) for place in places)
    return Sensitivity(candidates, cells, dict.fromkeys(candidates.frames, 1.0))


def _with_cells(
    known: Sensitivity, meter: Meter, goal: Goal, measurements: int | None, estimated: bool
) -> Sensitivity:
    """With cells measured: all, or if they are estimated those of solutions, until these are of measured ones only."""
    if not estimated:
        cells = all_cells(meter.candidates)
        needed = len({cell[:2] for cell in cells})  # the smallest codec of each place: without, little is feasible
        if measurements is not None and measurements < needed:
            raise PolicyError(f"measurements: {measurements}; allowed without estimates: {needed} and more")
        return measure_cells(known, meter, cells[:measurements], needed)
    left = len(known.cells) if measurements is None else measurements
    while not meter.late(CELLS_SHARE):
        least = smallest(known)
        spread = curve(known, np.linspace(least, max(least, LARGEST), SPREAD).tolist())
        solutions = [goal.reference(known), *(assignment for _, _, assignment in spread)]
        cells = unmeasured_cells(known, solutions)[:left]
        if not cells:
            break
        known = measure_cells(known, meter, cells)
        left -= len(cells)
    return known
