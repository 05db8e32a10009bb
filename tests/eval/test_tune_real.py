"""Tuning SmolLM2 after one layer was broken the way Qwen2's are: by a key bias far larger than the keys."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvquant import Candidates, PrecisionPolicy, tune_policy
from kvquant.tuner.candidates import Frame
from kvquant_eval.models import load
from kvquant_eval.texts import default_text
from kvquant_eval.tokens import tokenise
from kvquant_eval.tuning.calibrate import delta_pct
from kvquant_eval.tuning.objective import KLObjective
from kvquant_eval.tuning.second_order import estimates

CONTEXT, SCORED, BROKEN = 1024, 256, 18
KEEP = Frame(4, 128, "keep")  # or the bias would be removed, exactly


@pytest.fixture(scope="module")
def broken():
    """The bias lies where RoPE hardly turns within the context, so attention, and with it the model, stays sane."""
    loaded = load("smollm2-135m", "float32")
    projection = loaded.model.model.layers[BROKEN].self_attn.k_proj
    dim = loaded.model.config.head_dim
    bias = torch.zeros(projection.out_features // dim, dim)
    bias[:, dim // 2 - 1], bias[:, dim - 1] = 300.0, -150.0
    projection.bias = nn.Parameter(bias.flatten())
    ids = tokenise(loaded.tokenizer, default_text().content, 2 * CONTEXT).ids
    return loaded.model, ids[:CONTEXT], ids[CONTEXT:]


def uniform(key_bias):
    codecs = {"key": {"codec": "int4", "axis": "token"}, "value": "int4"}
    return PrecisionPolicy(name="uniform", default=codecs, key_bias=key_bias)


@pytest.mark.real_model
def test_the_tuner_finds_and_cures_a_broken_layer(broken):
    model, ids, following = broken
    objective = KLObjective(model, ids, SCORED)
    candidates = Candidates.of(model, CONTEXT, codecs=["int8", "int4", "int3"], frames=[KEEP])
    budget = candidates.footprint.ratio(candidates.assignment(uniform("keep")))
    found = estimates(objective.tail, candidates, samples=2)
    per_token = {layer: found[layer, "key", "int4/token/g64/none"] for layer in candidates.footprint.shapes}
    assert max(per_token, key=per_token.get) == BROKEN
    tuned = tune_policy(objective, candidates, budget, estimates=found, measurements=20, seconds=60)
    assert tuned.ratio <= budget
    assert "/channel/" in tuned.assignment.codec(BROKEN, "key")
    held_out = KLObjective(model, following, SCORED)
    assert delta_pct(held_out.scores(uniform("keep"))) > 10
    scores = held_out.scores(tuned.policy)
    assert abs(delta_pct(scores)) < 1
    assert scores.kl.mean() < 0.005
