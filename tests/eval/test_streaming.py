"""Canaries, window arithmetic and memory of the streaming protocol, on a tiny Llama."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from transformers import DynamicCache

from kvquant import KVQuantCache
from kvquant_eval import walk
from kvquant_eval.rows import Row
from kvquant_eval.sweep import Settings, Sweep
from kvquant_eval.walk import chunk_bounds

from .tiny import scored, small_policy, tiny_llama

Codec = Callable[[str, Callable[[torch.Tensor], torch.Tensor]], None]


def sweep(model: Any, ids: torch.Tensor, policies: list[Any], *contexts: int, **settings: Any) -> list[Row]:
    chosen = Settings(contexts, **({"chunk": 16, "score_tokens": 64} | settings))
    new = partial(KVQuantCache.for_model, model)
    return sorted(Sweep("tiny", model, ids, policies, new, chosen).rows(), key=lambda row: row.context)


def expected(model: Any, ids: torch.Tensor, cache: Any, chunk: int) -> torch.Tensor:
    """Log-probabilities ``[n, vocabulary]`` in float64 from a loop that knows nothing of the harness."""
    parts = []
    with torch.no_grad():
        for start in range(0, len(ids), chunk):
            logits = model(input_ids=ids[None, start : start + chunk], cache=cache, use_cache=True).logits
            parts.append(torch.log_softmax(logits[0].double(), dim=-1))
    return torch.cat(parts)


# -- canaries


@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_with_the_quantiser_off_every_logit_is_the_same(llama: Any, ids: torch.Tensor, chunk: int) -> None:
    for row in sweep(llama, ids, [small_policy("fp16")], 100, 131, chunk=chunk):
        assert row.status == "ok"
        assert row.kl_mean == row.kl_p99 == row.ppl_delta_pct == 0.0
        assert row.ppl_delta_ci95 == (0.0, 0.0)
        assert row.ppl == row.ppl_baseline
        assert row.top1_agreement == 1.0


def test_a_codec_that_zeroes_what_it_stores_moves_perplexity(llama: Any, ids: torch.Tensor, codec: Codec) -> None:
    codec("zeros", torch.zeros_like)
    (row,) = sweep(llama, ids, [small_policy("zeros")], 128)
    assert abs(row.ppl_delta_pct or 0) > 5
    assert (row.kl_mean or 0) > 0.1


def test_damage_to_the_first_block_alone_is_seen(llama: Any, ids: torch.Tensor, codec: Codec) -> None:
    seen: Counter[str] = Counter()

    def spoil_first(blocks: torch.Tensor) -> torch.Tensor:
        seen["blocks"] += len(blocks)
        return blocks if seen["blocks"] > len(blocks) else torch.zeros_like(blocks)

    codec("first", spoil_first)
    (row,) = sweep(llama, ids, [small_policy("first", sink_tokens=0)], 128)
    assert (row.kl_mean or 0) > 1e-6


# -- golden numbers


def test_rows_equal_an_independent_loop(llama: Any, ids: torch.Tensor) -> None:
    policies = [small_policy("int8"), small_policy("int4")]
    rows = sweep(llama, ids, policies, 96, 160, chunk=16, score_tokens=64)
    base = expected(llama, ids[:160], DynamicCache(config=llama.config), 16)
    for row in rows:
        policy = next(policy for policy in policies if policy.name == row.policy)
        cache = KVQuantCache.for_model(llama, policy)
        ours = expected(llama, ids[: row.context], cache, 16)
        window = torch.tensor(scored(row.context, 16, 64, (96,)))
        p, q = base[window - 1], ours[window - 1]
        kl = (p.exp() * (p - q)).sum(-1)
        assert row.tokens_scored == len(window)
        assert row.ppl == pytest.approx(math.exp(-q.gather(1, ids[window, None]).mean()), rel=1e-6)
        assert row.ppl_baseline == pytest.approx(math.exp(-p.gather(1, ids[window, None]).mean()), rel=1e-6)
        assert row.kl_mean == pytest.approx(kl.mean().item(), rel=1e-4)
        assert row.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-4)
        assert row.top1_agreement == (p.argmax(-1) == q.argmax(-1)).double().mean()
        stats = cache.stats()
        assert (row.kv_bytes, row.kv_bytes_baseline) == (stats.kv_bytes, stats.kv_bytes_baseline)
        assert row.kv_ratio == stats.kv_ratio


def test_pinned_numbers(llama: Any, ids: torch.Tensor) -> None:
    int8, int4 = sweep(llama, ids, [small_policy("int8"), small_policy("int4")], 160)
    assert int4.ppl_baseline == pytest.approx(457.7116, rel=1e-4)
    assert int8.kl_mean == pytest.approx(1.803e-4, rel=0.03)
    assert int4.kl_mean == pytest.approx(0.04181, rel=0.03)
    assert (int8.kv_bytes, int4.kv_bytes, int4.kv_bytes_baseline) == (62464, 41984, 81920)


# -- windows (case 26)


@pytest.mark.parametrize("chunk", [5, 8, 16])
def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(
    ids: torch.Tensor, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    model.lm_head.weight.data.zero_()
    counts: list[int] = []
    original = walk.Reference.of

    def spy(logits: torch.Tensor, targets: torch.Tensor) -> Any:
        counts.append(len(targets))
        return original(logits, targets)

    monkeypatch.setattr(walk.Reference, "of", spy)
    w = 40
    lengths = (w - 1, w, w + 1, 2 * w + 3)
    rows = sweep(model, ids, [small_policy("int4")], *lengths, chunk=chunk, score_tokens=w)
    for row, length in zip(rows, lengths, strict=True):
        assert row.ppl == pytest.approx(97, rel=1e-6)
        assert row.tokens_scored == len(scored(length, chunk, w, lengths))
    # One pass scores the union of all windows, each target once.
    union = set().union(*(scored(length, chunk, w, lengths) for length in lengths))
    assert sum(counts) == len(union)


@hypothesis.settings(deadline=None)
@hypothesis.given(st.sets(st.integers(1, 300), min_size=1, max_size=5), st.integers(1, 320))
def test_chunks_cover_every_token_once_and_end_at_each_context(contexts: set[int], chunk: int) -> None:
    bounds = chunk_bounds(contexts, chunk)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == max(contexts)
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert all(0 < end - start <= chunk for start, end in bounds)
    assert contexts <= {end for _, end in bounds}


def test_a_shorter_context_in_a_sweep_equals_a_sweep_of_its_own(llama: Any, ids: torch.Tensor) -> None:
    together = sweep(llama, ids, [small_policy("int4")], 64, 128, 150)
    for row in together[:2]:
        (alone,) = sweep(llama, ids, [small_policy("int4")], row.context, chunk=16)
        for name, value in alone.as_dict().items():
            if isinstance(value, int | float) and name not in ("seconds", "compress_seconds", "kl_floor"):
                assert getattr(row, name) == pytest.approx(value, rel=1e-4), name


def test_the_same_numbers_for_every_chunk_size(llama: Any, ids: torch.Tensor) -> None:
    rows = [sweep(llama, ids, [small_policy("fp16")], 150, chunk=chunk, score_tokens=20)[0] for chunk in (1, 3, 8, 64)]
    for row in rows:
        assert row.ppl == pytest.approx(rows[0].ppl, rel=1e-5)
        assert row.tokens_scored == 20


@pytest.mark.parametrize("chunk", [76, 149, 150, 1000])
def test_a_chunk_that_hides_the_compressed_past_scores_nothing(
    llama: Any, ids: torch.Tensor, codec: Codec, chunk: int
) -> None:
    codec("zeros", torch.zeros_like)
    (row,) = sweep(llama, ids, [small_policy("zeros")], 150, chunk=chunk, score_tokens=20)
    assert (row.status, row.tokens_scored, row.kl_mean) == ("skipped", 0, None)
    assert row.reason.endswith(f"before a chunk of {chunk} began")


@pytest.mark.parametrize("chunk", [8, 16, 48, 64, 75])
def test_zeroed_codes_show_whatever_the_chunk(llama: Any, ids: torch.Tensor, codec: Codec, chunk: int) -> None:
    codec("zeros", torch.zeros_like)
    (row,) = sweep(llama, ids, [small_policy("zeros")], 150, chunk=chunk)
    assert row.tokens_scored == len(scored(150, chunk, 64))
    assert (row.kl_mean or 0) > 0.1


# -- memory (case 27)


def test_logits_are_bounded_by_the_chunk_and_dropped(llama: Any, ids: torch.Tensor) -> None:
    largest: dict[int, int] = {}
    for context in (128, 512):
        rows: list[int] = []
        alive: list[int] = []
        refs: list[Any] = []

        def spy(module: Any, args: Any, output: torch.Tensor, rows=rows, alive=alive, refs=refs) -> None:
            rows.append(output.shape[1])
            refs.append(weakref.ref(output.untyped_storage()))
            alive.append(sum(ref() is not None for ref in refs))

        hook = llama.lm_head.register_forward_hook(spy)
        policies = [small_policy(codec) for codec in ("fp16", "int8", "int4")]
        sweep(llama, ids, policies, context, chunk=32, score_tokens=64)
        hook.remove()
        largest[context] = max(rows)
        assert max(alive) <= 2  # the reference's and the policy's in work
        assert sum(rows) == 5 * len(scored(context, 32, 64))  # nothing is computed for tokens that are not scored
    assert largest[128] == largest[512] == 32
