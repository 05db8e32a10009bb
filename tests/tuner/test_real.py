"""Tuning of models through the real cache."""

from __future__ import annotations

import pytest

from kvquant import KVQuantCache, tune_policy
from kvquant.tuner.candidates import Candidates, Frame
from tests.models import feed, prompt, stock, tiny
from tests.test_keybias import biased, mean_kl

CONTEXT, SCORED = 160, 32


class RealLoss:
    """Mean KL of the last tokens of a text, whose past is compressed."""

    def __init__(self, model):
        self.model, self.ids = model, prompt(CONTEXT + SCORED)
        self.cold = feed(model, stock(model), self.ids)

    def __call__(self, policy):
        return max(0.0, mean_kl(self.model, policy, self.ids, self.cold, CONTEXT))

    def ratio(self, policy):
        """Of the bytes that caches take, given the past in one call or in several."""
        ratios = []
        for call in (CONTEXT, 128):
            cache = KVQuantCache.for_model(self.model, policy)
            feed(self.model, cache, self.ids[:, :CONTEXT], call)
            ratios.append(cache.stats().kv_ratio)
        return max(ratios)


@pytest.fixture(scope="module")
def qwen():
    """Case 11: the biases of the first and the last layer's keys are a hundred times the others'."""
    return biased("qwen2", scale=1.0, outliers=(0, 3))


def test_layers_of_large_key_biases_are_the_worst(qwen):
    objective = RealLoss(qwen)
    frames = (Frame(4, 16, "keep"),)
    given = Candidates.of(qwen, CONTEXT, codecs=["int4", "int2"], frames=frames, block_tokens=16)
    tuned = tune_policy(objective, given, 0.7)
    for codec in given.key[1:]:
        ranked = sorted(range(4), key=lambda layer: tuned.sensitivity.loss(layer, "key", codec))
        assert set(ranked[2:]) == {0, 3}, codec
    assert tuned.measured == objective(tuned.policy)
    assert objective.ratio(tuned.policy) <= tuned.ratio <= 0.7
    shares = {
        layer: given.footprint.side_bytes(layer, "key", pair[0], frames[0])
        for layer, pair in tuned.assignment.layers.items()
    }
    assert min(shares[0], shares[3]) > max(shares[1], shares[2])


def test_a_bias_that_can_be_removed_is(qwen):
    objective = RealLoss(qwen)
    frames = (Frame(4, 16, "keep"), Frame(4, 16))
    given = Candidates.of(qwen, CONTEXT, codecs=["int4"], frames=frames, block_tokens=16)
    tuned = tune_policy(objective, given, 0.8)
    assert tuned.sensitivity.frame_factors[frames[1]] < 0.3
    assert tuned.policy.key_bias == "remove"
    assert objective.ratio(tuned.policy) <= tuned.ratio <= 0.8


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
def test_other_kinds_of_models(family):
    objective = RealLoss(tiny(family))
    given = Candidates.of(objective.model, CONTEXT, codecs=["int8", "int4"], frames=[Frame(4, 16)], block_tokens=16)
    tuned = tune_policy(objective, given, 0.8)
    assert objective.ratio(tuned.policy) <= tuned.ratio <= 0.8
    assert tuned.measured <= min(step.measured for step in tuned.steps)
