"""The best of all choices, against trying every one and against HiGHS."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from kvquant import BudgetError
from kvquant.codecs.affine import BITS
from kvquant.tuner.allocation import allocate, curve, fewest_bytes, smallest
from kvquant.tuner.candidates import FRAMES, Candidates, Frame
from kvquant.tuner.footprint import Footprint
from kvquant.tuner.knapsack import Knapsack
from kvquant.tuner.sensitivity import Cell, Sensitivity
from tests.models import tiny
from tests.tuner import made

CLOSE = 1e-9  # relative


@pytest.fixture(scope="module")
def small():
    return made.sensitivity(made.candidates(layers=2))


@pytest.fixture(scope="module")
def every(small):
    ratio = small.candidates.footprint.ratio
    return [(ratio(one), small.predicted(one)) for one in made.every(small.candidates)]


def test_least_loss_within_any_budget(small, every):
    assert smallest(small) == min(ratio for ratio, _ in every)
    for budget in [*np.linspace(smallest(small), 1.3, 40), *(ratio for ratio, _ in every[::29])]:
        found = allocate(small, budget)
        ratio, loss = small.candidates.footprint.ratio(found), small.predicted(found)
        assert ratio <= budget
        assert loss <= min(loss for ratio, loss in every if ratio <= budget) * (1 + CLOSE)


def test_fewest_bytes_within_any_loss(small, every):
    for limit in [0.0, *np.geomspace(1e-7, 1, 30)]:
        found = fewest_bytes(small, limit)
        assert small.predicted(found) <= limit * (1 + CLOSE)
        assert small.candidates.footprint.ratio(found) == min(ratio for ratio, loss in every if loss <= limit)


def test_of_equals_the_smaller(small):
    nothing = replace(small, cells=tuple(replace(cell, estimate=0.0) for cell in small.cells))
    found = allocate(nothing, 1.0)
    assert small.candidates.footprint.ratio(found) == smallest(small)


def test_what_is_feasible_is_told(small):
    for budget in (0.0, 0.1, smallest(small) - 1e-9):
        with pytest.raises(
            BudgetError, match=r"budget .*: no choice is so small; allowed: 0\.[0-9]{4} and more"
        ) as error:
            allocate(small, budget)
        told = float(str(error.value).split("allowed: ")[1].split()[0])
        assert smallest(small) <= told < smallest(small) + 1e-4
        assert small.candidates.footprint.ratio(allocate(small, told)) <= told


def test_a_curve(small):
    budgets = np.linspace(0, 0.6, 20).tolist()
    points = curve(small, budgets)
    assert [budget for budget, _, _ in points] == [budget for budget in budgets if budget >= smallest(small)]
    losses = [loss for _, loss, _ in points]
    assert losses == sorted(losses, reverse=True)
    assert all(loss == small.predicted(assignment) for _, loss, assignment in points)


def test_frames_are_chosen_by_what_they_cost_and_save():
    known = made.sensitivity(made.candidates(frames=(Frame(4, 128), Frame(4, 0), Frame(64, 0))))
    frames = known.candidates.frames
    for factors, best in (((1, 1, 1), 1), ((1, 1e6, 1e6), 0), ((1, 1, 0.01), 2)):
        weighed = replace(known, frame_factors=dict(zip(frames, factors, strict=True)))
        assert allocate(weighed, 0.45).frame == frames[best]
    only = replace(known, frame_factors={frames[0]: 1.0})  # others were not measured
    assert allocate(only, 0.45).frame == frames[0]


def test_what_nothing_is_known_of_is_not_chosen(small):
    known = replace(small, cells=tuple(cell for cell in small.cells if "int2" not in cell.codec))
    chosen = allocate(known, smallest(known)).layers.values()
    assert {codec.split("/")[0] for pair in chosen for codec in pair} == {"int4"}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_small_knapsack(data):
    """Against all partial sums, whatever their scales; equal costs and weights are common."""
    count = data.draw(st.integers(1, 6))
    number = st.one_of(st.integers(0, 5), st.integers(0, 1 << 40), st.floats(1e-12, 1))
    groups = [
        [np.array(data.draw(st.lists(number, min_size=size, max_size=size)), float) for _ in range(2)]
        for size in data.draw(st.lists(st.integers(1, 6), min_size=count, max_size=count))
    ]
    sums = [(0.0, 0.0)]
    for costs, weights in groups:
        sums = [(a + c, b + w) for a, b in set(sums) for c, w in zip(costs, weights, strict=True)]
    limit = data.draw(st.sampled_from(sums))[1] * data.draw(st.sampled_from([1, 1, 0.9, 1.1]))
    knapsack = Knapsack.of(groups)
    picks = knapsack.solve(limit)
    within = [(cost, weight) for cost, weight in sums if weight <= limit]
    if picks is None:
        assert not any(weight < limit * (1 - CLOSE) for _, weight in within)
        return
    cost, weight = knapsack.totals(picks)
    assert weight <= limit
    surely = [cost for cost, weight in sums if weight <= limit * (1 - CLOSE)]
    assert cost <= min(surely, default=math.inf) * (1 + CLOSE)
    assert cost >= min((cost for cost, weight in sums if weight <= limit * (1 + CLOSE))) * (1 - CLOSE)


def large() -> Sensitivity:
    """Of 30 layers as SmolLM2 has them, and every codec."""
    like = Candidates.of(tiny("llama", head_dim=64), 8192)
    footprint = Footprint(dict.fromkeys(range(30), (3, 64, 64)), 8192, 128)
    given = Candidates(footprint, like.key, like.value, FRAMES)
    bits = {"fp16": 16, "nf4": 4, "fp4": 4, "dynamic8": 8} | {f"int{width}": width for width in BITS}
    dice = np.random.default_rng(5)
    cells = [
        Cell(layer, role, codec, scale * 4.0 ** -bits[codec.split("/")[0]] * 10 ** dice.uniform(-0.5, 0.5), None)
        for layer in range(30)
        for role in ("key", "value")
        for scale in [10 ** dice.uniform(-8, 0)]
        for codec in given.codecs(role)
        if codec != "fp16"
    ]
    return Sensitivity(given, tuple(cells), {frame: 1.0 + 0.1 * n for n, frame in enumerate(FRAMES)})


@pytest.fixture(scope="module")
def many():
    return large()


@pytest.mark.parametrize("budget", [0.16, 0.2, 0.28, 0.44])
def test_thirty_layers_and_every_codec_as_highs_solves_them(many, budget):
    found = allocate(many, budget)
    footprint, frame = many.candidates.footprint, found.frame
    places = [(*place, codec, loss) for place, losses in many.losses.items() for codec, loss in losses.items()]
    costs = np.array([loss for *_, loss in places]) / many.predicted(found)
    nbytes = np.array([footprint.side_bytes(layer, role, codec, frame) for layer, role, codec, _ in places])
    one_each = np.array([[(layer, role) == place for layer, role, *_ in places] for place in many.losses], float)
    limits = [
        LinearConstraint(one_each, 1, 1),
        LinearConstraint(nbytes[None] / footprint.baseline, ub=budget),
    ]
    highs = milp(costs, integrality=np.ones(len(places)), bounds=Bounds(0, 1), constraints=limits)
    assert highs.success
    assert highs.fun * many.frame_factors[frame] == pytest.approx(1, rel=2e-4)  # its own tolerance is 1e-4
    assert highs.fun * many.frame_factors[frame] >= 1 - 1e-6


def test_a_solution_takes_less_than_a_second(many):
    seconds = []
    for budget in (0.16, 0.24, 0.28, 0.4):
        fresh = replace(many)  # nothing kept from before
        started = time.process_time()
        allocate(fresh, budget)
        seconds.append(time.process_time() - started)
    assert max(seconds) < 1


def test_solving_again_needs_neither_model_nor_solver():
    code = """
import sys
from kvquant.tuner.allocation import allocate
from kvquant.tuner.sensitivity import Sensitivity
known = Sensitivity.from_json(sys.stdin.read())
print(known.candidates.policy(allocate(known, 0.5), "again").to_yaml())
assert not {"transformers", "scipy", "bitsandbytes"} & set(sys.modules)
"""
    text = made.sensitivity(made.candidates()).to_json()
    done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, check=True)
    assert "name: again" in done.stdout
