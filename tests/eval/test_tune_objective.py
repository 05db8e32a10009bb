"""What the tuner is told a policy costs: it is what a sweep measures, at less work."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

import kvquant
from kvquant import Candidates, PrecisionPolicy
from kvquant_eval.errors import InputError
from kvquant_eval.protocols import prefill_lanes
from kvquant_eval.tuning.objective import KLObjective
from kvquant_eval.tuning.second_order import estimates
from kvquant_eval.walk import Walk, steps

from ..models import tiny as build
from .tiny import Stand, tiny_llama

CONTEXT, SCORED = 1024, 256


def text(vocabulary=97, tokens=CONTEXT):
    return torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(1))


def alone(layer, role="key", codec="int2"):
    raw = {"key": "fp16", "value": "fp16"}
    return PrecisionPolicy(name="alone", default=raw, layers={layer: raw | {role: codec}})


@pytest.fixture(scope="module")
def model():
    return tiny_llama(max_position_embeddings=2048)


@pytest.fixture(scope="module")
def objective(model):
    return KLObjective(model, text(), SCORED)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2", "deepseek_v3", "gpt2"])
def test_the_objective_is_what_a_sweep_measures(family):
    model = build(family, initializer_range=0.2)
    kinds = PrecisionPolicy.load("int4").resolve(model).layers
    last = max(layer.index for layer in kinds if layer.policy is not None)
    policies = [PrecisionPolicy.load("int2-aggressive"), alone(last)]
    objective = KLObjective(model, text(), SCORED)
    windows = {CONTEXT: list(range(CONTEXT - SCORED + 1, CONTEXT))}
    lanes = list(prefill_lanes(policies, windows, 128, partial(kvquant.KVQuantCache.for_model, model)).values())
    walk = Walk(model, text(), windows, lanes, steps(windows, 128, lanes))
    assert list(walk.run()) == [CONTEXT]
    for policy, lane in zip(policies, lanes, strict=True):
        assert lane.error is None
        scores = objective.scores(policy)
        assert list(scores.positions) == windows[CONTEXT]
        expected = lane.kl[windows[CONTEXT]]
        assert expected.mean() > 1e-6
        np.testing.assert_allclose(scores.kl, expected, rtol=1e-3, atol=1e-9)
        np.testing.assert_allclose(scores.nll, lane.nll[windows[CONTEXT]], rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_layers_below_a_change_are_not_computed_again(family, monkeypatch):
    model = build(family)
    objective = KLObjective(model, text(), SCORED)
    layers = [layer.index for layer in PrecisionPolicy.load("int4").resolve(model).layers if layer.policy is not None]
    computed = []
    for index, block in enumerate(model.model.layers):
        block.self_attn.register_forward_hook(lambda *_, index=index: computed.append(index))
    for layer in layers:
        computed.clear()
        objective(alone(layer))
        assert set(computed) == set(range(layer, len(model.model.layers)))


def test_a_change_in_between_leaves_no_trace(objective):
    first = objective(alone(2))
    objective(PrecisionPolicy.load("int2-aggressive"))
    assert objective(alone(2)) == first


def test_nothing_is_lost_where_nothing_is_lossy(objective):
    scores = objective.scores(PrecisionPolicy.load("fp16"))
    assert not scores.kl.any()
    assert scores.agree.all()
    assert (scores.nll == scores.reference_nll).all()


def test_a_codec_that_stores_zeros_shows(objective, monkeypatch):
    monkeypatch.setitem(
        kvquant.codecs.base._REGISTRY, "zeros", lambda options, role, tokens: Stand("zeros", torch.zeros_like)
    )
    assert objective(alone(3, "value", "zeros")) > 100 * objective(alone(3, "value", "int8"))


def test_a_text_too_short_is_refused(model):
    with pytest.raises(InputError, match="--context: 600 tokens, of which the last 256 are scored, are too few"):
        KLObjective(model, text(tokens=600), 256)


def test_passes_count_what_policies_took(model):
    objective = KLObjective(model, text(), SCORED)
    assert objective.passes == 0
    objective(alone(0))
    assert objective.passes == objective.seconds / objective.tail.exact_seconds > 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_estimates_are_what_is_measured(family):
    model = build(family, initializer_range=0.2)
    objective = KLObjective(model, text(), SCORED)
    candidates = Candidates.of(model, CONTEXT, codecs=["int8", "int4", "int3"])
    told = []
    found = estimates(objective.tail, candidates, samples=24, tick=lambda done, total: told.append((done, total)))
    assert set(found) == {
        (layer, role, codec)
        for layer in candidates.footprint.shapes
        for role in ("key", "value")
        for codec in candidates.codecs(role)
        if codec != "fp16"
    }
    some = sorted(found)[:: len(found) // 40]
    ratios = [math.log(found[cell] / objective(candidates.isolated(*cell))) for cell in some]
    assert abs(np.median(ratios)) < 0.4
    assert np.std(ratios) < 0.6
    assert told[-1][0] == told[-1][1]


def test_estimates_do_not_depend_on_the_memory_they_may_take(objective, model):
    candidates = Candidates.of(model, CONTEXT, codecs=["int4"])
    at_once = estimates(objective.tail, candidates, samples=2)
    by_layer = estimates(objective.tail, candidates, samples=2, memory=1)
    assert at_once == pytest.approx(by_layer, rel=1e-2)
    assert all(parameter.requires_grad for parameter in model.parameters())
