"""From what adds up to what is measured: losses in company are not the sum of losses by themselves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ..errors import BudgetError
from ..policy import PrecisionPolicy
from .allocation import allocate, fewest_bytes, options, smallest
from .candidates import RAW, Assignment
from .measuring import Meter, Step
from .sensitivity import Sensitivity

PROBES = 8  # layers' keys or values that are measured without, a round: those that lose most
ROUNDS = 2  # without gain, and repair ends
PATIENCE = 16  # swaps without gain, and the search ends
FIRMNESS = 10.0  # how many times more or less than others a layer may be corrected
MARGINS = (0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1)  # shares of a limit of loss that are tried where it is not held


Move = tuple[int, str, str, float, float]
"""Layer, role, the codec it gets, and how many more bytes and how much more loss that is."""


class Goal(Protocol):
    """What is asked for."""

    def solve(self, sensitivity: Sensitivity, margin: float = 1.0) -> Assignment:
        """The best by prediction, whose loss is held to ``margin`` of its limit, if it has one."""

    def reference(self, sensitivity: Sensitivity) -> Assignment:
        """The same while not all frames are known: where they leave nothing within the limit, what comes nearest."""

    def holds(self, step: Step) -> bool:
        """Whether a measured assignment is within the limit."""

    def key(self, step: Step) -> tuple[float, float]:
        """Of those within the limit, that of the least key is the best."""

    def most(self, best: Step) -> float:
        """The ratio of bytes up to which an assignment may be better than the best one."""


@dataclass(frozen=True)
class LeastLoss:
    """The least loss within a budget of bytes."""

    budget: float

    def solve(self, sensitivity: Sensitivity, margin: float = 1.0) -> Assignment:
        """See `Goal`."""
        return allocate(sensitivity, self.budget)

    def reference(self, sensitivity: Sensitivity) -> Assignment:
        """See `Goal`."""
        return allocate(sensitivity, max(self.budget, smallest(sensitivity)))

    def holds(self, step: Step) -> bool:
        """See `Goal`."""
        return step.ratio <= self.budget

    def key(self, step: Step) -> tuple[float, float]:
        """See `Goal`."""
        return step.measured, step.ratio

    def most(self, best: Step) -> float:
        """See `Goal`."""
        return self.budget


@dataclass(frozen=True)
class FewestBytes:
    """The fewest bytes within a limit of loss."""

    max_loss: float

    def solve(self, sensitivity: Sensitivity, margin: float = 1.0) -> Assignment:
        """See `Goal`."""
        return fewest_bytes(sensitivity, margin * self.max_loss)

    def reference(self, sensitivity: Sensitivity) -> Assignment:
        """See `Goal`."""
        return self.solve(sensitivity)

    def holds(self, step: Step) -> bool:
        """See `Goal`."""
        return step.measured <= self.max_loss

    def key(self, step: Step) -> tuple[float, float]:
        """See `Goal`."""
        return step.ratio, step.measured

    def most(self, best: Step) -> float:
        """See `Goal`."""
        return math.nextafter(best.ratio, 0)


class Search:
    """Measures assignments, corrects a ``sensitivity`` by what they lose, and keeps the ``best`` that holds."""

    def __init__(self, goal: Goal, meter: Meter, sensitivity: Sensitivity) -> None:
        self.goal, self.meter = goal, meter
        self.sensitivity = sensitivity
        self.best: Step | None = None

    def take(self, what: str, assignment: Assignment) -> Step:
        """Measure one."""
        self.meter.tick(what, len(self.meter.steps), 0)
        step = self.meter.step(what, assignment, self.sensitivity)
        if self.goal.holds(step) and (self.best is None or self.goal.key(step) < self.goal.key(self.best)):
            self.best = step
        return step

    def challenge(self, rivals: Sequence[PrecisionPolicy]) -> None:
        """Measure policies that are among the candidates and may be better."""
        for rival in rivals:
            assignment = self.meter.candidates.assignment(rival)
            if assignment is None or not self.sensitivity.covers(assignment):
                continue
            ratio = self.meter.candidates.footprint.ratio(assignment)
            if self.best is None or ratio <= self.goal.most(self.best):
                self.take(f"rival {rival.name}", assignment)

    def repair(self, step: Step) -> None:
        """Correct by what a step lost, solve and measure, until nothing new is solved for or nothing is gained."""
        idle = 0
        while idle < ROUNDS and not self.meter.late():
            factors = self.sensitivity.corrections if step.agreed else self._marginal_factors(step)
            self.sensitivity = scaled(self.sensitivity, factors, step)
            solved = self.goal.solve(self.sensitivity)
            if self.meter.knows(solved):
                break
            before = self.best
            step = self.take("repaired", solved)
            idle = 0 if self.best is not before else idle + 1

    def insist(self) -> None:
        """Where none held so far, measure ever more careful ones; `BudgetError` where not even the last one holds."""
        for margin in () if self.meter.late() else MARGINS:
            if self.best is None and not self.meter.knows(solved := self.goal.solve(self.sensitivity, margin)):
                self.take("careful", solved)
        if self.best is None:
            self.take("uncompressed", self.meter.candidates.uncompressed())
        if self.best is None:
            least = min(step.measured for step in self.meter.steps)
            raise BudgetError(f"max_loss: no choice was measured to lose so little; allowed: {least:g} and more")

    def swap(self) -> None:
        """Exchange one codec of the best for a smaller one and another for a larger one, while that gains."""
        misses = 0
        while misses < PATIENCE and not self.meter.late():
            base = self.best
            assert base is not None
            for assignment in neighbours(self.sensitivity, base.assignment, self.goal.most(base)):
                if misses >= PATIENCE or self.meter.late():
                    return
                if not self.meter.knows(assignment):
                    self.take("swap", assignment)
                    misses += 1
                if self.best is not base:
                    misses = 0
                    break
            else:
                return

    def _marginal_factors(self, step: Step) -> dict[tuple[int, str], float]:
        """By what the losses of each layer's keys and values differ, measured by doing without their codecs.

        Of those that lose most; the others get the factor these have on average.
        """
        alone = replace(self.sensitivity, corrections={})
        places = [place for place in step.assignment.places() if place[2] != RAW]
        places.sort(key=lambda place: -self.sensitivity.loss(*place))
        frame_factor = alone.frame_factors[step.assignment.frame]
        marginals, isolated = {}, {}
        for number, (layer, role, codec) in enumerate(places[:PROBES]):
            if self.meter.late():
                break
            self.meter.tick("without", number, min(PROBES, len(places)))
            without = self.meter.measure("without", step.assignment.replaced(layer, role, RAW))
            marginals[layer, role] = max(0.0, step.measured - without)
            isolated[layer, role] = frame_factor * alone.loss(layer, role, codec)
        average = sum(marginals.values()) / sum(isolated.values()) if sum(isolated.values()) else 0.0
        factors = dict.fromkeys(alone.losses, average or 1.0)
        for place, marginal in marginals.items():
            if average and isolated[place]:
                share = marginal / isolated[place] / average
                factors[place] = average * min(max(share, 1 / FIRMNESS), FIRMNESS)
        return factors


def scaled(sensitivity: Sensitivity, factors: Mapping[tuple[int, str], float], step: Step) -> Sensitivity:
    """With corrections by ``factors``, all of them scaled so that what is predicted of a step is what it lost."""
    corrected = replace(sensitivity, corrections={place: factors.get(place, 1.0) for place in sensitivity.losses})
    predicted = corrected.predicted(step.assignment)
    if not predicted or not step.measured:
        return corrected
    scale = step.measured / predicted
    return replace(corrected, corrections={place: scale * factor for place, factor in corrected.corrections.items()})


def neighbours(sensitivity: Sensitivity, assignment: Assignment, most: float) -> Iterator[Assignment]:
    """Assignments with one codec or two exchanged for the next smaller or larger, of a ratio up to ``most``.

    Those of least predicted loss first.
    """
    footprint = sensitivity.candidates.footprint
    moves: list[Move] = []
    for group in options(sensitivity, assignment.frame):
        layer, role = group.layer, group.role
        codec = assignment.codec(layer, role)
        nbytes = footprint.side_bytes(layer, role, codec, assignment.frame)
        loss = sensitivity.frame_factors[assignment.frame] * sensitivity.loss(layer, role, codec)
        for side in (np.flatnonzero(group.nbytes < nbytes)[-1:], np.flatnonzero(group.nbytes > nbytes)[:1]):
            moves += [(layer, role, group.codecs[i], group.nbytes[i] - nbytes, group.losses[i] - loss) for i in side]
    room = (most - footprint.ratio(assignment)) * footprint.baseline
    several: list[tuple[Move, ...]] = [(move,) for move in moves]
    several += [pair for pair in itertools.combinations(moves, 2) if pair[0][:2] != pair[1][:2]]
    fitting = [some for some in several if sum(move[3] for move in some) <= room]
    for some in sorted(fitting, key=lambda some: sum(move[4] for move in some)):
        changed = assignment
        for layer, role, codec, _, _ in some:
            changed = changed.replaced(layer, role, codec)
        yield changed
