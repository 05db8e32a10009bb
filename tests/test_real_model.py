"""The real SmolLM2-135M: greedy text, bytes and fidelity on real weights."""

from __future__ import annotations

import pytest
import torch

from kvquant import KVQuantCache, disable, enable
from kvquant_eval.models import load
from kvquant_eval.texts import default_text
from tests.models import feed, generate, stock

pytestmark = pytest.mark.real_model
CONTEXT, SCORED = 1536, 256


@pytest.fixture(scope="module", autouse=True)
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def loaded():
    return load("smollm2-135m", "float32")


@pytest.fixture(scope="module")
def ids(loaded):
    return loaded.tokenizer(default_text().content[:20_000], return_tensors="pt").input_ids[:, : CONTEXT + SCORED]


def test_fp16_policy_writes_the_same_text_for_a_padded_batch(loaded, ids):
    model = loaded.model
    enable(model)
    batch, mask = ids[:, :600].repeat(2, 1), torch.ones(2, 600, dtype=torch.long)
    mask[1, :400] = 0
    cache = KVQuantCache.for_model(model, "fp16")
    mine = generate(model, cache, batch, new=16, attention_mask=mask)
    assert torch.equal(mine, generate(model, stock(model), batch, new=16, attention_mask=mask))
    assert cache.stats().tokens == (615, 215)


@pytest.fixture(scope="module")
def reference(loaded, ids):
    return feed(loaded.model, stock(loaded.model), ids, 128)[0, CONTEXT:].double().log_softmax(-1)


@pytest.mark.parametrize(
    ("policy", "kl", "ratio"),
    [("int8", 5e-5, 0.69), ("k8v4", 8e-4, 0.57), ("balanced", 2e-3, 0.51), ("int4", 6e-3, 0.45)],
)
def test_fidelity_and_bytes(loaded, ids, reference, policy, kl, ratio):
    cache = KVQuantCache.for_model(loaded.model, policy)
    scored = feed(loaded.model, cache, ids, 128)[0, CONTEXT:].double().log_softmax(-1)
    assert 0 < (reference.exp() * (reference - scored)).sum(-1).mean() <= kl
    assert (reference.argmax(-1) == scored.argmax(-1)).float().mean() >= 0.96
    assert cache.stats().kv_ratio <= ratio


@pytest.mark.parametrize("policy", ["fp16", "int4"])
def test_streamed_attention_writes_the_text_of_dense_mode(loaded, ids, policy):
    model, prompt = loaded.model, ids[:, :600]
    texts = []
    for switch in (disable, enable):
        switch(model)
        cache = KVQuantCache.for_model(model, policy)
        texts.append(generate(model, cache, prompt, new=200))
        assert cache.stats().blocks >= 4
    assert not cache.stats().fallbacks
    assert torch.equal(*texts)
