"""The prefill protocol: one exact walk for all policies and contexts, compressed where each tail begins."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvquant import KVQuantCache
from kvquant_eval.protocols import take_over
from kvquant_eval.sweep import Settings, Sweep
from kvquant_eval.walk import EXACT_CHUNK, Lane, chunk_bounds, steps
from tests.models import FAMILIES, feed, stock, tiny

from .test_streaming import sweep
from .tiny import scored, small_policy, tiny_llama

Codec = Callable[[str, Callable[[torch.Tensor], torch.Tensor]], None]


def prefill(model: Any, ids: torch.Tensor, policies: list[Any], *contexts: int, **settings: Any) -> list[Any]:
    return sweep(model, ids, policies, *contexts, protocol="prefill", **settings)


# -- canaries


@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_with_the_quantiser_off_every_logit_is_the_same(llama: Any, ids: torch.Tensor, chunk: int) -> None:
    for row in prefill(llama, ids, [small_policy("fp16")], 100, 131, 300, chunk=chunk):
        assert row.status == "ok"
        assert row.kl_mean == row.kl_p99 == row.ppl_delta_pct == 0.0
        assert row.ppl == row.ppl_baseline
        assert row.top1_agreement == 1.0
        assert row.by_position


def test_a_codec_that_zeroes_what_it_stores_moves_perplexity(llama: Any, ids: torch.Tensor, codec: Codec) -> None:
    codec("zeros", torch.zeros_like)
    for row in prefill(llama, ids, [small_policy("zeros")], 128, 300):
        assert abs(row.ppl_delta_pct or 0) > 5
        assert (row.kl_mean or 0) > 0.1


# -- golden numbers


def test_rows_equal_an_independent_loop(llama: Any, ids: torch.Tensor) -> None:
    """From an exact cache of one's own, compressed through `update` alone, and a tail fed by hand."""
    policies = [small_policy("int8"), small_policy("int4")]
    contexts, chunk, count = (96, 160, 401), 16, 48
    rows = prefill(llama, ids, policies, *contexts, chunk=chunk, score_tokens=count)
    assert [(row.policy, row.context) for row in rows] == [(p.name, c) for c in contexts for p in policies]
    for row in rows:
        window = torch.tensor(scored(row.context, chunk, count, contexts))
        ends = sorted({*range(chunk, row.context, chunk), *(c for c in contexts if c <= row.context)})
        first = max(end for end in [0, *ends] if end < window[0])
        exact = DynamicCache(config=llama.config)
        policy = next(policy for policy in policies if policy.name == row.policy)
        cache = KVQuantCache.for_model(llama, policy)
        base, ours = [], []
        with torch.no_grad():
            llama(input_ids=ids[None, :first], cache=exact)
            for index, layer in enumerate(exact.layers):
                cache.update(layer.keys, layer.values, index)
            for start, end in zip([0, *ends], ends, strict=False):
                if start >= first:
                    for held, logits in ((exact, base), (cache, ours)):
                        out = llama(input_ids=ids[None, start:end], cache=held).logits[0]
                        logits.append(out.double().log_softmax(-1))
        p, q = torch.cat(base)[window - 1 - first], torch.cat(ours)[window - 1 - first]
        kl = (p.exp() * (p - q)).sum(-1)
        assert row.tokens_scored == len(window)
        assert row.ppl == pytest.approx(math.exp(-q.gather(1, ids[window, None]).mean()), rel=1e-4)
        assert row.ppl_baseline == pytest.approx(math.exp(-p.gather(1, ids[window, None]).mean()), rel=1e-4)
        assert row.kl_mean == pytest.approx(kl.mean().item(), rel=1e-3)
        assert row.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-3)
        stats = cache.stats()
        assert (row.kv_bytes, row.kv_bytes_baseline) == (stats.kv_bytes, stats.kv_bytes_baseline)
        assert row.by_position[0].first == window[0]
        assert row.by_position[-1].stop == row.context
        weights = [bucket.stop - bucket.first for bucket in row.by_position]
        assert np.average([bucket.kl for bucket in row.by_position], weights=weights) == pytest.approx(row.kl_mean)


def test_pinned_numbers(llama: Any, ids: torch.Tensor) -> None:
    int8, int4 = prefill(llama, ids, [small_policy("int8"), small_policy("int4")], 160)
    assert int4.ppl_baseline == pytest.approx(457.7116, rel=1e-4)
    assert int8.kl_mean == pytest.approx(1.809e-4, rel=0.03)
    assert int4.kl_mean == pytest.approx(0.03627, rel=0.03)


def test_errors_of_the_prefix_do_not_add_up(llama: Any, ids: torch.Tensor) -> None:
    """What distinguishes the protocols: an exact prefix is no worse than one read through compressed eyes."""
    policies = [small_policy("int4")]
    (exact,), (read,) = (run(llama, ids, policies, 400, score_tokens=32) for run in (prefill, sweep))
    assert exact.kl_mean < read.kl_mean
    assert exact.kv_bytes <= read.kv_bytes  # a prefix is given slots that just fit
    assert exact.ppl_baseline == pytest.approx(read.ppl_baseline, rel=1e-4)


# -- cost: the model reads the text once


def test_the_text_is_read_once_however_many_cells(llama: Any, ids: torch.Tensor) -> None:
    read: list[int] = []
    hook = llama.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    policies = [small_policy(codec) for codec in ("int8", "int4", "int2")]
    contexts = (96, 200, 500)
    rows = prefill(llama, ids, policies, *contexts, score_tokens=16)
    hook.remove()
    assert all(row.status == "ok" for row in rows)
    tails = 16 + 15  # a tail begins at the chunk that predicts its first token
    assert sum(read) <= contexts[-1] + (len(policies) * len(contexts) + 1) * tails


def test_each_cell_is_dropped_when_its_context_ends(llama: Any, ids: torch.Tensor) -> None:
    alive: list[int] = []
    caches: list[Any] = []

    def watched(policy: Any) -> Any:
        cache = KVQuantCache.for_model(llama, policy)
        caches.append(weakref.ref(cache))
        alive.append(sum(ref() is not None for ref in caches))
        return cache

    settings = Settings((96, 200, 500), "prefill", 16, 16)
    policies = [small_policy("int8"), small_policy("int4")]
    rows = list(Sweep("tiny", llama, ids, policies, watched, settings).rows())
    assert len(rows) == 6
    assert max(alive) <= 2


def test_quiet_stretches_are_read_in_large_steps() -> None:
    lanes = [Lane("a", 3840, 4000, lambda _: None), Lane("b", 9984, 10_000, lambda _: None)]
    bounds = steps([4000, 10_000], 128, lanes)
    assert bounds[0] == (0, EXACT_CHUNK)
    assert {start for start, _ in bounds} >= {0, 3840, 4000, 9984}
    assert [end for _, end in bounds][:-1] == [start for start, _ in bounds][1:]
    for start, end in bounds:
        inside = any(lane.first <= start < lane.stop for lane in lanes)
        assert end - start <= (128 if inside else EXACT_CHUNK)
    assert len(bounds) < len(chunk_bounds([4000, 10_000], 128)) / 4


# -- families: what is not compressed comes along as it was


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_taken_over_goes_on_as_the_exact_one(family: str) -> None:
    model = tiny(family)
    ids = torch.randint(3, 97, (1, 90), generator=torch.Generator().manual_seed(5))
    exact = stock(model)
    feed(model, exact, ids[:, :60], 25)
    cache = take_over(KVQuantCache.for_model(model, small_policy("fp16")), exact)
    lossy = take_over(KVQuantCache.for_model(model, small_policy("int4")), exact)
    for held in (cache, lossy):
        assert held.get_seq_length() == 60
    mine = feed(model, cache, ids[:, 60:], 7)
    assert torch.equal(mine, feed(model, exact, ids[:, 60:], 7))
    assert not torch.equal(mine, feed(model, lossy, ids[:, 60:], 7))


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3_next"])
def test_sweeps_of_models_with_windows_and_states(family: str) -> None:
    model = tiny(family)
    ids = torch.randint(3, 97, (300,), generator=torch.Generator().manual_seed(5))
    rows = prefill(model, ids, [small_policy("fp16"), small_policy("int4")], 100, 200, 300, score_tokens=24)
    for row in rows:
        assert row.status == "ok", row.reason
        assert (row.kl_mean == 0.0) == (row.policy == "fp16")


def test_prefixes_that_do_not_nest_are_read_for_each_context(ids: torch.Tensor) -> None:
    model = tiny_llama(
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, max_position_embeddings=512
    )
    policies = [small_policy("int8")]
    together = prefill(model, ids, policies, 100, 200, 400, score_tokens=24)
    for row in together:
        (alone,) = prefill(model, ids, policies, row.context, score_tokens=24)
        assert (row.kl_mean, row.ppl, row.kv_bytes) == (alone.kl_mean, alone.ppl, alone.kv_bytes)


def test_the_noise_floor_is_that_of_the_arithmetic(llama: Any, ids: torch.Tensor) -> None:
    for protocol in ("streaming", "prefill"):
        rows = sweep(llama, ids, [small_policy("int8")], 128, 300, protocol=protocol)
        assert 0 < rows[0].kl_floor < 1e-9
        assert rows[1].kl_floor is None
    low = tiny_llama().to(torch.bfloat16)
    (row,) = prefill(low, ids, [small_policy("int8")], 128)
    assert row.kl_floor > 1e-6


def test_a_policy_that_cannot_take_over_fails_alone(llama: Any, ids: torch.Tensor, codec: Codec) -> None:
    def refuse(blocks: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no room")

    codec("refuses", refuse)
    rows = prefill(llama, ids, [small_policy("refuses"), small_policy("int8")], 128, 200)
    assert [(row.policy, row.status) for row in rows] == [("refuses", "failed"), ("int8", "ok")] * 2
    assert rows[0].reason == "RuntimeError: no room"
