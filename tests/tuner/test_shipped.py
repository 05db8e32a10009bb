"""The tuned policies that are shipped."""

from __future__ import annotations

import pytest

from kvquant import PolicyError, PrecisionPolicy, tuned_names
from kvquant.tuner.candidates import Assignment, Frame
from kvquant.tuner.footprint import Footprint

FULL = "full_attention"
MODELS = {
    "smollm2-135m": (Footprint(dict.fromkeys(range(30), (3, 64, 64)), 8192, 128), [FULL] * 30),
    "gemma3-270m": (
        Footprint(dict.fromkeys((5, 11, 17), (1, 256, 256)), 32768, 128),
        (["sliding_attention"] * 5 + [FULL]) * 3,
    ),
}


def test_three_budgets_of_each_model():
    assert set(tuned_names()) == {f"{model}-{budget}" for model in MODELS for budget in ("0.24", "0.28", "0.40")}


@pytest.mark.parametrize("name", tuned_names())
def test_they_are_within_their_budgets(name):
    policy = PrecisionPolicy.load(name)
    model, budget = name.rsplit("-", 1)
    footprint, kinds = MODELS[model]
    assert policy.name == name
    layers = {
        layer.index: (layer.policy.key.name, layer.policy.value.name)
        for layer in policy.resolve(kinds).layers
        if layer.policy is not None
    }
    assert not policy.resolve(kinds).idle
    assert float(budget) - 0.01 < footprint.ratio(Assignment(Frame.of(policy), layers)) <= float(budget)


def test_they_fit_no_other_model():
    with pytest.raises(PolicyError, match=r"layer [0-9]+ does not exist; the model has layers 0-11"):
        PrecisionPolicy.load("smollm2-135m-0.28").resolve([FULL] * 12)
