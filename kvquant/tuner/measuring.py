"""An objective that is asked nothing twice, and what it is asked: cells one by one, frames, whole choices."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real

from ..errors import PolicyError, shown
from ..policy import PrecisionPolicy
from .candidates import RAW, Assignment, Candidates, Frame
from .footprint import ROLES
from .sensitivity import Cell, Sensitivity

Objective = Callable[[PrecisionPolicy], float]
"""What a policy loses, in nats per token: 0 where nothing is lost. Any damage will do that grows with the loss."""

Tick = Callable[[str, int, int], None]
"""Told of progress: the stage, how much of it is done, and of how much; 0 where nobody knows."""

CELLS_SHARE = 0.6  # of the time, at most, for measuring cells: what is left is for whole choices


@dataclass(frozen=True)
class Step:
    """An assignment that was measured, ``what`` for, and what was predicted of it before."""

    what: str
    assignment: Assignment
    ratio: float
    predicted: float
    measured: float

    @property
    def agreed(self) -> bool:
        """Whether the two differ by less than a tenth."""
        return abs(self.predicted - self.measured) <= 0.1 * self.measured


def amount(what: str, given: object) -> float:
    """A loss, or a budget; `PolicyError` where it is none."""
    if getattr(given, "ndim", None) == 0:
        given = given.item()  # type: ignore[attr-defined]  # of a tensor, or an array
    try:
        number = float(given) if not isinstance(given, bool) and isinstance(given, Real) else math.nan
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf:
        raise PolicyError(f"{what}: {shown(given)}; allowed: a finite number, 0 or more")
    return number


class Meter:
    """Asks an objective for at most ``seconds``, and keeps what it said; ``steps`` are of whole assignments."""

    def __init__(self, objective: Objective, candidates: Candidates, seconds: float | None, tick: Tick) -> None:
        self.candidates = candidates
        self.tick = tick
        self.steps: list[Step] = []
        self._objective = objective
        self._seconds = math.inf if seconds is None else amount("seconds", seconds)
        self._started = time.monotonic()
        self._known: dict[str, float] = {}  # by fingerprint of the policy

    def late(self, share: float = 1.0) -> bool:
        """Whether a share of the time is over."""
        return time.monotonic() - self._started > share * self._seconds

    def knows(self, assignment: Assignment) -> bool:
        """Whether it is one of the steps."""
        return any(step.assignment == assignment for step in self.steps)

    def measure(self, what: str, assignment: Assignment) -> float:
        """The objective of an assignment, ``what`` for; `PolicyError` where that is no loss."""
        policy = self.candidates.policy(assignment, what)
        fingerprint = policy.fingerprint()
        if fingerprint not in self._known:
            self._known[fingerprint] = amount(f"objective: {what}", self._objective(policy))
        return self._known[fingerprint]

    def step(self, what: str, assignment: Assignment, sensitivity: Sensitivity) -> Step:
        """Measure a whole assignment, which becomes one of the steps."""
        predicted = sensitivity.predicted(assignment)
        ratio = self.candidates.footprint.ratio(assignment)
        step = Step(what, assignment, ratio, predicted, self.measure(what, assignment))
        self.steps.append(step)
        return step


def measure_cells(
    sensitivity: Sensitivity, meter: Meter, cells: Sequence[tuple[int, str, str]], needed: int = 0
) -> Sensitivity:
    """With cells ``(layer, role, codec)`` measured, in their order, as far as there is time.

    The first ``needed`` are measured in any case.
    """
    known = {(cell.layer, cell.role, cell.codec): cell for cell in sensitivity.cells}
    isolated = meter.candidates.uncompressed()
    for number, (layer, role, codec) in enumerate(cells):
        if number >= needed and meter.late(CELLS_SHARE):
            break
        meter.tick("cells", number, len(cells))
        cell = known.get((layer, role, codec), Cell(layer, role, codec, None, None))
        measured = meter.measure(f"layer {layer} {role} {codec}", isolated.replaced(layer, role, codec))
        known[layer, role, codec] = replace(cell, measured=measured)
    return replace(sensitivity, cells=tuple(known.values()))


def all_cells(candidates: Candidates) -> list[tuple[int, str, str]]:
    """Every cell, the smallest codec of all layers first: with those any budget can be met that can be met at all."""
    footprint, frame = candidates.footprint, candidates.frames[0]
    sized = [
        (rank, layer, role, codec)
        for layer in footprint.shapes
        for role in ROLES
        for rank, codec in enumerate(
            sorted(candidates.codecs(role), key=lambda codec: footprint.side_bytes(layer, role, codec, frame))
        )
    ]
    return [(layer, role, codec) for _, layer, role, codec in sorted(sized) if codec != RAW]


def unmeasured_cells(sensitivity: Sensitivity, solutions: Sequence[Assignment]) -> list[tuple[int, str, str]]:
    """The cells of solutions that were not measured: first one of each layer and role of which none was.

    Those that most solutions use come first.
    """
    measured = {(cell.layer, cell.role, cell.codec) for cell in sensitivity.cells if cell.measured is not None}
    seen = {(layer, role) for layer, role, _ in measured}
    used = Counter(place for solution in solutions for place in solution.places() if place[2] != RAW)
    first: list[tuple[int, str, str]] = []
    others: list[tuple[int, str, str]] = []
    for cell, _ in used.most_common():
        if cell in measured:
            continue
        (others if cell[:2] in seen else first).append(cell)
        seen.add(cell[:2])
    return first + others


def measure_frames(
    sensitivity: Sensitivity, meter: Meter, solve: Callable[[Sensitivity], Assignment]
) -> tuple[Sensitivity, list[Assignment]]:
    """With the factors of all frames, each measured on what would be chosen in it; and these choices.

    What a frame saves others spend on codecs, and a frame suits some codecs better than others.
    """
    factors: dict[Frame, float] = {}
    solutions = []
    for number, frame in enumerate(meter.candidates.frames):
        meter.tick("frames", number, len(meter.candidates.frames))
        alone = replace(sensitivity, frame_factors={frame: 1.0})
        solutions.append(solve(alone))
        added = alone.predicted(solutions[-1])
        factors[frame] = meter.measure("frame", solutions[-1]) / added if added else 1.0
    first = factors[meter.candidates.frames[0]] or 1.0
    return replace(sensitivity, frame_factors={frame: factor / first for frame, factor in factors.items()}), solutions
