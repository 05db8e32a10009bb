"""What can't be run is skipped with its reason; what fails does not take the others along (cases 28 and 29)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .test_streaming import sweep
from .tiny import small_policy, tiny_llama

Codec = Callable[[str, Callable[[torch.Tensor], torch.Tensor]], None]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_context_past_the_models_limit_is_skipped_before_running(kind: str, gpt2: Any, ids: torch.Tensor) -> None:
    model = gpt2 if kind == "gpt2" else tiny_llama(max_position_embeddings=64)
    forwards = []
    hook = model.register_forward_pre_hook(lambda module, args, kwargs: forwards.append(1), with_kwargs=True)
    fits, beyond = sweep(model, ids, [small_policy("int8")], 64, 65)
    hook.remove()
    assert (fits.status, fits.tokens_scored) == ("ok", 31)
    assert (beyond.status, beyond.tokens_scored, beyond.ppl) == ("skipped", 0, None)
    why = "gpt2 has no rotary positions" if kind == "gpt2" else "allowed with --rope-scaling"
    assert beyond.reason == f"the model's limit is 64 tokens (max_position_embeddings); {why}"
    # The context that fits, in chunks of 16: the reference, the policy, and the noise floor in halves.
    assert len(forwards) == (1 + 1 + 2) * 4


def test_a_text_shorter_than_the_context_is_not_stretched(llama: Any, ids: torch.Tensor) -> None:
    fits, beyond = sweep(llama, ids[:99], [small_policy("int8")], 99, 100)
    assert fits.status == "ok"
    assert (beyond.status, beyond.reason) == ("skipped", "the text has only 99 tokens")


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_text_of_no_or_one_token(llama: Any, ids: torch.Tensor, tokens: int) -> None:
    row, beyond = sweep(llama, ids[:tokens], [small_policy("int8")], 1, 64)
    assert row.status == beyond.status == "skipped"
    assert row.tokens_scored == 0


@pytest.mark.parametrize("context", [1, 2, 32])
def test_contexts_that_fit_into_the_raw_tail_score_nothing(llama: Any, ids: torch.Tensor, context: int) -> None:
    (row,) = sweep(llama, ids, [small_policy("int8")], context)
    assert (row.status, row.tokens_scored) == ("skipped", 0)
    assert row.reason.startswith("no tokens scored: scoring starts at token 32")


def test_every_policy_is_scored_on_the_same_tokens(llama: Any, ids: torch.Tensor) -> None:
    wide = small_policy("int8", "wide", block_tokens=16, recent_tokens=32)
    rows = sweep(llama, ids, [small_policy("int8"), wide], 128, score_tokens=1000)
    assert [row.tokens_scored for row in rows] == [128 - 2 * (16 + 32)] * 2
    assert rows[0].ppl_baseline == rows[1].ppl_baseline


def test_without_recent_tokens_position_zero_is_still_not_scored(llama: Any, ids: torch.Tensor) -> None:
    (row,) = sweep(llama, ids, [small_policy("int8", recent_tokens=0)], 64, score_tokens=1000)
    assert row.tokens_scored == 64 - 16 - 1  # the first of them would be predicted by a chunk that saw nothing sealed


def test_a_policy_that_raises_fails_alone(llama: Any, ids: torch.Tensor, codec: Codec) -> None:
    calls = []

    def fail_later(blocks: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 30:
            raise RuntimeError("disk on fire\nwith details")
        return blocks

    codec("fails", fail_later)
    rows = sweep(llama, ids, [small_policy("int8"), small_policy("fails"), small_policy("int4")], 48, 96, 128)
    by_cell = {(row.policy, row.context): row for row in rows}
    assert len(by_cell) == 9
    assert by_cell["fails", 48].status == "ok"
    for context in (96, 128):
        failed = by_cell["fails", context]
        assert (failed.status, failed.reason) == ("failed", "RuntimeError: disk on fire with details")
        assert (failed.ppl, failed.kv_bytes, failed.tokens_scored) == (None, None, 0)
    alone = sweep(llama, ids, [small_policy("int4")], 48, 96, 128)
    assert [row.kl_mean for row in alone] == [by_cell["int4", c].kl_mean for c in (48, 96, 128)]


def test_numbers_that_are_none_fail_the_policy(llama: Any, ids: torch.Tensor, codec: Codec) -> None:
    codec("nan", lambda blocks: torch.full_like(blocks, torch.nan))
    (row,) = sweep(llama, ids, [small_policy("nan")], 64)
    assert row.status == "failed"
    assert row.reason.startswith("ArithmeticError: the logits at position 32 are not numbers")


def test_a_reference_that_fails_is_told_in_every_row(ids: torch.Tensor) -> None:
    model = tiny_llama()
    model.lm_head.weight.data.fill_(torch.nan)
    rows = sweep(model, ids, [small_policy("int8"), small_policy("int4")], 64, 96)
    assert len(rows) == 4
    for row in rows:
        assert row.status == "failed"
        assert row.reason.startswith("reference run: ArithmeticError: the logits at position 32")


def test_losses_beyond_floats_are_rows_not_crashes(ids: torch.Tensor) -> None:
    model = tiny_llama()
    model.lm_head.weight.data *= 1e3
    (row,) = sweep(model, ids, [small_policy("int8")], 64)
    assert (row.status, row.ppl, row.ppl_baseline) == ("ok", None, None)
    assert "infinite (mean loss" in row.reason
    assert row.kl_mean is not None


def test_a_model_without_logits_to_keep(ids: torch.Tensor) -> None:
    model = tiny_llama()
    (usual,) = sweep(model, ids, [small_policy("int4")], 64)
    keep = model.forward

    def forward(input_ids: Any, cache: Any, use_cache: bool) -> Any:
        return keep(input_ids=input_ids, cache=cache, use_cache=use_cache)

    model.forward = forward
    (row,) = sweep(model, ids, [small_policy("int4")], 64)
    assert row.kl_mean == pytest.approx(usual.kl_mean, rel=1e-5)
