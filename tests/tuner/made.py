"""Candidates and sensitivities without a model, small enough to try every choice."""

from __future__ import annotations

import itertools

import numpy as np

from kvquant.tuner.candidates import Assignment, Candidates, Frame
from kvquant.tuner.footprint import ROLES, Footprint
from kvquant.tuner.measuring import all_cells
from kvquant.tuner.sensitivity import Cell, Sensitivity

FEW = ("fp16", "int8/channel/g64/none", "int4/channel/g64/none", "int2/channel/g64/none")
TWO_FRAMES = (Frame(4, 128), Frame(16, 0))


def candidates(layers=3, codecs=FEW, frames=TWO_FRAMES, heads=2, dims=(32, 64), context=4000) -> Candidates:
    """Of a model whose layers are all alike."""
    footprint = Footprint(dict.fromkeys(range(layers), (heads, *dims)), context, 128)
    return Candidates(footprint, codecs, codecs, frames)


def sensitivity(given: Candidates, seed=0, **settings) -> Sensitivity:
    """Random losses over several orders of magnitude, less for more bits."""
    dice = np.random.default_rng(seed)
    scales = {place: 10 ** dice.uniform(-4, 0) for place in itertools.product(given.footprint.shapes, ROLES)}
    cells = tuple(
        Cell(layer, role, codec, scales[layer, role] * 4.0 ** -int(codec[3]) * dice.uniform(0.5, 2), None)
        for layer, role, codec in all_cells(given)
    )
    factors = {frame: 1.0 + 0.1 * number for number, frame in enumerate(given.frames)}
    return Sensitivity(given, cells, factors, **settings)


def every(given: Candidates):
    """Every assignment there is."""
    pairs = [*itertools.product(given.key, given.value)]
    for frame in given.frames:
        for chosen in itertools.product(pairs, repeat=len(given.footprint.shapes)):
            yield Assignment(frame, dict(zip(given.footprint.shapes, chosen, strict=True)))


def additive(known: Sensitivity):
    """An objective that is the sum of losses, and counts its calls."""

    def objective(policy):
        objective.calls.append(policy.fingerprint())
        return known.predicted(known.candidates.assignment(policy))

    objective.calls = []
    return objective
