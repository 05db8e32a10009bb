"""Tuning by objectives that are no models: additive, not additive, noisy, broken."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvquant import BudgetError, PolicyError, PrecisionPolicy, tune_policy
from kvquant.tuner.allocation import allocate, smallest
from kvquant.tuner.candidates import Frame
from kvquant.tuner.footprint import ROLES
from kvquant.tuner.measuring import all_cells
from tests.tuner import made

CLOSE = pytest.approx
BUDGETS = (0.3, 0.4, 0.55)
ONE = (Frame(4, 0),)


@pytest.fixture(scope="module")
def known():
    return made.sensitivity(made.candidates(layers=2))


def estimates_of(known, seed=1, spread=1.0):
    """Off by up to a factor of ten to the ``spread``."""
    dice = np.random.default_rng(seed)
    return {
        (cell.layer, cell.role, cell.codec): cell.estimate * 10 ** dice.uniform(-spread, spread)
        for cell in known.cells
    }


def interacting(known, strength=20.0):
    """Layer 0 loses ``strength`` times as much where layer 1 keeps its keys in few bits."""
    base = made.additive(known)

    def objective(policy):
        assignment = known.candidates.assignment(policy)
        together = [known.loss(layer, "key", assignment.codec(layer, "key")) for layer in (0, 1)]
        return base(policy) + strength * math.sqrt(together[0] * together[1])

    objective.calls = base.calls
    return objective


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("estimated", [False, True])
def test_what_adds_up_is_solved_at_once(known, budget, estimated):
    objective, ratio = made.additive(known), known.candidates.footprint.ratio
    tuned = tune_policy(
        objective, known.candidates, budget, estimates=estimates_of(known, spread=0.1) if estimated else None
    )
    least = min(known.predicted(one) for one in made.every(known.candidates) if ratio(one) <= budget)
    assert tuned.measured == CLOSE(least, rel=1e-3 if estimated else 1e-9)
    assert tuned.predicted == CLOSE(least, rel=1e-2 if estimated else 1e-9)
    assert tuned.agreed
    assert tuned.ratio == ratio(tuned.assignment) <= budget
    assert known.candidates.assignment(tuned.policy) == tuned.assignment
    assert tuned.sensitivity.frame_factors == CLOSE(known.frame_factors)
    assert max(Counter(objective.calls).values()) == 1  # nothing is measured twice


@pytest.mark.parametrize("limit", [1e-5, 1e-3, 0.05])
def test_fewest_bytes_within_a_measured_loss(known, limit):
    ratio = known.candidates.footprint.ratio
    least = min(ratio(one) for one in made.every(known.candidates) if known.predicted(one) <= limit)
    tuned = tune_policy(made.additive(known), known.candidates, max_loss=limit)
    assert tuned.measured <= limit * (1 + 1e-12)
    assert tuned.ratio == least


@pytest.mark.parametrize("limit", [1e-5, 1e-3, 0.05])
def test_a_limit_of_loss_holds_where_losses_do_not_add_up(known, limit):
    tuned = tune_policy(interacting(known), known.candidates, max_loss=limit)
    assert tuned.measured <= limit
    assert tuned.ratio < 1


def test_a_limit_that_nothing_keeps(known):
    with pytest.raises(BudgetError, match="max_loss: no choice was measured to lose so little; allowed: 0.5 and more"):
        tune_policy(lambda policy: 0.5, known.candidates, max_loss=0.1)


def best_interacting(known, budget, strength):
    """The least of `interacting` that any assignment within a budget has; of the layers from 2 on losses add up."""
    footprint, (frame,) = known.candidates.footprint, known.candidates.frames
    layers = [
        [
            (
                footprint.layer_bytes(layer, *pair, frame),
                sum(map(known.loss, (layer, layer), ROLES, pair)),
                known.loss(layer, "key", pair[0]),
            )
            for pair in itertools.product(made.FEW, repeat=2)
        ]
        for layer in footprint.shapes
    ]
    nbytes, losses, keys = np.moveaxis(np.array(layers), 2, 0)  # [layers, pairs]
    total = nbytes[0][:, None, None, None] + nbytes[1][:, None, None] + nbytes[2][:, None] + nbytes[3]
    lost = losses[0][:, None, None, None] + losses[1][:, None, None] + losses[2][:, None] + losses[3]
    lost = lost + strength * np.sqrt(keys[0][:, None] * keys[1])[..., None, None]
    return lost[total <= budget * footprint.baseline].min()


def test_repair_finds_the_best_where_losses_do_not_add_up():
    """Mostly: it measures some fifty of 65536 assignments."""
    found = []
    for seed in range(7):
        known = made.sensitivity(made.candidates(layers=4, frames=ONE), seed)
        objective = interacting(known, 100.0)
        unrepaired = objective(known.candidates.policy(allocate(known, 0.38), "unrepaired"))
        tuned = tune_policy(objective, known.candidates, 0.38)
        assert tuned.ratio <= 0.38
        assert tuned.steps[0].measured == CLOSE(unrepaired)
        assert tuned.measured == min(step.measured for step in tuned.steps if step.ratio <= 0.38)
        found.append((tuned.measured / best_interacting(known, 0.38, 100.0), tuned.measured / unrepaired))
    assert all(excess < 1.5 for excess, _ in found), found
    assert sum(excess < 1 + 1e-9 for excess, _ in found) >= 5, found
    assert sum(gain < 0.85 for _, gain in found) >= 3  # the others were the best at once


def test_repair_learns_whose_losses_differ_in_company():
    """A layer that loses a hundred times more once others are compressed too."""
    known = made.sensitivity(made.candidates(layers=4, frames=ONE), 3)

    def objective(policy):
        assignment = known.candidates.assignment(policy)
        alone = sum(pair != ("fp16", "fp16") for pair in assignment.layers.values()) == 1
        losses = {
            layer: sum(map(known.loss, (layer, layer), ROLES, pair)) for layer, pair in assignment.layers.items()
        }
        return sum(losses.values()) + (0 if alone else 99 * losses[2])

    tuned = tune_policy(objective, known.candidates, 0.38)
    learned = {layer: tuned.sensitivity.corrections[layer, "key"] for layer in range(4)}
    assert max(learned, key=learned.get) == 2
    assert tuned.measured < 0.5 * tuned.steps[0].measured
    assert tuned.sensitivity.predicted(tuned.assignment) == CLOSE(tuned.measured, rel=0.6)


def test_a_noisy_objective_ends_and_keeps_the_budget(known):
    dice = np.random.default_rng(0)
    tuned = tune_policy(lambda policy: made.additive(known)(policy) * dice.uniform(0.5, 1.5), known.candidates, 0.4)
    assert tuned.ratio <= 0.4
    assert tuned.measured == min(step.measured for step in tuned.steps if step.ratio <= 0.4)


def test_an_objective_that_sees_nothing(known):
    tuned = tune_policy(lambda policy: 0, known.candidates, 0.5)
    assert tuned.measured == tuned.predicted == 0
    assert tuned.ratio == smallest(tuned.sensitivity)


def test_a_broken_layer_is_found_and_spared(known):
    given = made.candidates(layers=6)
    known = made.sensitivity(given)
    broken = replace(
        known,
        cells=tuple(replace(cell, estimate=5.0 if cell.layer == 4 else cell.estimate) for cell in known.cells),
    )
    tuned = tune_policy(made.additive(broken), given, 0.45)
    worst = {layer: tuned.sensitivity.loss(layer, "key", made.FEW[2]) for layer in given.footprint.shapes}
    assert max(worst, key=worst.get) == 4
    assert tuned.assignment.layers[4] == ("fp16", "fp16")


def test_an_impossible_budget_is_refused_before_anything_is_measured(known):
    def never(policy):
        raise AssertionError

    with pytest.raises(BudgetError, match=r"budget 0.05: no choice is so small; allowed: 0\.[0-9]{4} and more"):
        tune_policy(never, known.candidates, 0.05)


def test_few_measurements_are_of_what_matters():
    given = made.candidates(layers=8, frames=ONE)
    known = made.sensitivity(given)
    objective = made.additive(known)
    estimates = estimates_of(known, spread=0.3)
    tuned = tune_policy(objective, given, 0.4, estimates=estimates, measurements=16)
    measured = [cell for cell in tuned.sensitivity.cells if cell.measured is not None]
    assert len(measured) == 16
    assert {(cell.layer, cell.role) for cell in measured} == {(layer, role) for layer in range(8) for role in ROLES}
    unlimited = tune_policy(made.additive(known), given, 0.4, estimates=estimates)
    more = [cell for cell in unlimited.sensitivity.cells if cell.measured is not None]
    assert 16 < len(more) <= len(all_cells(given))
    used = {
        (layer, role, codec)
        for layer, pair in unlimited.steps[0].assignment.layers.items()
        for role, codec in zip(ROLES, pair, strict=True)
    }
    assert used - {(cell.layer, cell.role, cell.codec) for cell in more} <= {
        (layer, role, "fp16") for layer in range(8) for role in ROLES
    }
    assert unlimited.measured <= known.predicted(allocate(known, 0.4)) * (1 + 1e-9)


def test_cells_are_measured_only_as_far_as_told(known):
    tuned = tune_policy(made.additive(known), known.candidates, smallest(known), measurements=4)
    assert len(tuned.sensitivity.cells) == 4
    assert all(cell.codec == made.FEW[-1] for cell in tuned.sensitivity.cells)  # the smallest of each


def test_limits_without_estimates_leave_what_is_needed(known):
    places = 2 * len(known.candidates.footprint.shapes)
    for limits in ({"seconds": 0}, {"measurements": places}):
        objective = made.additive(known)
        tuned = tune_policy(objective, known.candidates, smallest(known) + 0.01, **limits)
        assert tuned.ratio <= smallest(known) + 0.01
        assert len(tuned.sensitivity.cells) == places
    with pytest.raises(PolicyError, match=f"measurements: {places - 1}; allowed without estimates: {places} and more"):
        tune_policy(made.additive(known), known.candidates, 0.3, measurements=places - 1)


def test_numbers_of_all_kinds(known):
    tuned = tune_policy(lambda policy: torch.tensor(0.25), known.candidates, np.float32(0.5))
    assert tuned.measured == 0.25
    assert tune_policy(lambda policy: np.array(0.5), known.candidates, torch.tensor(0.5)).measured == 0.5
    with pytest.raises(PolicyError, match="budget: 1000.*; allowed: a finite number"):
        tune_policy(made.additive(known), known.candidates, 10**400)
    with pytest.raises(PolicyError, match=r"objective: layer 0 key .*: tensor\(\[0.5000\]\); allowed"):
        tune_policy(lambda policy: torch.tensor([0.5]), known.candidates, 0.5)


def test_time_that_is_over(known):
    """What is needed for an answer is measured all the same, and no more."""
    objective = made.additive(known)
    estimates = estimates_of(known)
    tuned = tune_policy(objective, known.candidates, 0.4, estimates=estimates, seconds=0)
    assert [step.what for step in tuned.steps] == ["first", "frame"]
    assert len(objective.calls) <= len(known.candidates.frames) + 1
    held = tune_policy(
        lambda policy: 10 * objective(policy), known.candidates, max_loss=1e-3, estimates=estimates, seconds=0
    )
    assert held.measured <= 1e-3


def test_rivals_win_where_they_are_better(known):
    given = known.candidates
    winner = PrecisionPolicy(name="winner", default=dict(zip(ROLES, made.FEW[1:3], strict=True)))
    small = PrecisionPolicy(name="small", default=dict(zip(ROLES, made.FEW[3:] * 2, strict=True)))
    large = PrecisionPolicy(name="large", default={"key": "fp16", "value": "fp16"})
    foreign = PrecisionPolicy(name="foreign", default={"key": "nf4", "value": "nf4"})
    favourite = given.policy(given.assignment(winner), "x").fingerprint()
    rivals = (small, winner, large, foreign)

    def objective(policy):
        return 1e-6 if policy.fingerprint() == favourite else 1.0

    for limit in ({"budget": 0.7}, {"max_loss": 1e-3}):
        tuned = tune_policy(objective, given, **limit, rivals=rivals, name="mine")
        assert tuned.assignment == given.assignment(winner)
        assert tuned.policy.name == "mine"
        assert tuned.measured == 1e-6
        assert not tuned.agreed
        assert "rival winner" in [step.what for step in tuned.steps]
        assert "rival foreign" not in [step.what for step in tuned.steps]
    assert "rival large" not in [step.what for step in tune_policy(objective, given, 0.7, rivals=rivals).steps]


def test_an_earlier_sensitivity_serves(known):
    first = tune_policy(made.additive(known), known.candidates, 0.4, fingerprint="abc", facts={"text": "a"})
    assert (first.sensitivity.fingerprint, first.sensitivity.facts) == ("abc", {"text": "a"})
    objective = made.additive(known)
    again = tune_policy(
        objective, known.candidates, 0.3, sensitivity=first.sensitivity, fingerprint="abc", facts={"context": "b"}
    )
    assert len(objective.calls) == len(again.steps)  # no cell, and no frame
    assert again.measured == CLOSE(tune_policy(made.additive(known), known.candidates, 0.3).measured)
    assert again.sensitivity.facts == {"text": "a", "context": "b"}
    with pytest.raises(PolicyError, match="of another model"):
        tune_policy(objective, known.candidates, 0.3, sensitivity=first.sensitivity, fingerprint="xyz")
    with pytest.raises(PolicyError, match="of other candidates"):
        tune_policy(objective, made.candidates(layers=1), 0.3, sensitivity=first.sensitivity)


def test_progress_is_told(known):
    told = []
    tune_policy(made.additive(known), known.candidates, 0.4, tick=lambda *each: told.append(each))
    stages = list(dict.fromkeys(stage for stage, _, _ in told))
    assert stages[:3] == ["cells", "frames", "first"]
    assert [each for each in told if each[0] == "cells"] == [("cells", n, 12) for n in range(12)]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -1e-9, "0.1", None, True, np.float64("nan")])
def test_losses_that_are_none(known, loss):
    with pytest.raises(
        PolicyError, match=r"objective: layer 0 key int2/\S+: .*; allowed: a finite number, 0 or more"
    ) as error:
        tune_policy(lambda policy: loss, known.candidates, 0.4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "a budget or a max_loss: one of the two"),
        ({"budget": 0.3, "max_loss": 1}, "a budget or a max_loss: one of the two"),
        ({"budget": math.nan}, "budget: nan; allowed"),
        ({"budget": 0.3, "seconds": math.nan}, "seconds: nan; allowed"),
        ({"budget": 0.3, "measurements": -1}, "measurements: -1; allowed"),
        ({"budget": True}, "budget: True; allowed"),
        ({"max_loss": -1}, "max_loss: -1; allowed"),
        ({"max_loss": "1"}, "max_loss: '1'; allowed"),
        ({"budget": 0.3, "estimates": {(9, "key", made.FEW[1]): 1.0}}, "estimates: .* is none of the candidates"),
        (
            {"budget": 0.3, "estimates": {(0, "key", made.FEW[1]): math.nan}},
            "estimates: layer 0 key int8.*: nan; allowed",
        ),
    ],
)
def test_arguments_that_make_no_sense(known, settings, why):
    with pytest.raises(PolicyError, match=why):
        tune_policy(made.additive(known), known.candidates, **settings)


def test_numpy_numbers_are_numbers(known):
    tuned = tune_policy(lambda policy: np.float32(0.25), known.candidates, np.float64(0.5))
    assert tuned.measured == 0.25
