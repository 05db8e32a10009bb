from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvquant_eval.files import to_json
from kvquant_eval.rows import COLUMNS, NESTED, Row, Scores, fidelity

ROW = Row("m", "int4", 2048, "streaming", "float32")


def cell(nll: list[float], reference: list[float], kl: list[float] | None = None) -> Scores:
    zeros = np.zeros(len(nll))
    return Scores(range(len(nll)), np.array(nll), np.array(reference), np.array(kl) if kl else zeros, zeros + 1)


def test_columns_are_those_promised() -> None:
    assert ", ".join(COLUMNS) == (
        "model, policy, context, protocol, dtype, ppl, ppl_baseline, ppl_delta_pct, ppl_delta_ci95, kl_mean, kl_p99, "
        "top1_agreement, tokens_scored, kv_bytes, kv_bytes_baseline, kv_ratio, bits_per_element, peak_kv_bytes, "
        "seconds, status, reason, rope_scaling, compress_seconds, kl_floor, needle_logprob, needle_logprob_baseline, "
        "needle_exact, needle_exact_baseline"
    )
    assert NESTED == ("by_position", "by_depth")
    assert tuple(ROW.as_dict()) == COLUMNS + NESTED


def test_averages_are_over_tokens() -> None:
    values = fidelity(cell([1.0, 2.0, 6.0], [1.0, 2.0, 3.0], [0.0, 0.0, 0.3]), seed=0)
    assert values["ppl"] == pytest.approx(np.exp(3.0))
    assert values["ppl_baseline"] == pytest.approx(np.exp(2.0))
    assert values["ppl_delta_pct"] == pytest.approx(100 * (np.e - 1))
    assert values["kl_mean"] == pytest.approx(0.1)
    assert values["kl_p99"] == pytest.approx(np.quantile([0, 0, 0.3], 0.99))
    assert values["tokens_scored"] == 3
    assert "reason" not in values


def test_a_loss_of_800_is_told_not_raised() -> None:
    values = fidelity(cell([800.0, 800.0], [2.0, 2.0]), seed=0)
    assert values["ppl"] is values["ppl_delta_pct"] is values["ppl_delta_ci95"] is None
    assert values["ppl_baseline"] == pytest.approx(np.exp(2.0))
    assert values["reason"] == "ppl, ppl_delta_pct: infinite (mean loss 800, baseline 2 nats per token)"
    both = fidelity(cell([800.0], [800.0]), seed=0)
    assert both["ppl"] is both["ppl_baseline"] is None
    assert both["ppl_delta_pct"] is both["ppl_delta_ci95"] is None


@settings(deadline=None)
@example([(0.0, 0.0, 1e308)] * 2)
@given(st.lists(st.tuples(*[st.floats(0, allow_nan=False)] * 3), min_size=1, max_size=20))
def test_whatever_the_losses_the_row_is_strict_json(losses: list[tuple[float, float, float]]) -> None:
    nll, reference, kl = (list(column) for column in zip(*losses, strict=True))
    row = Row(**(ROW.as_dict() | fidelity(cell(nll, reference, kl), seed=0)))
    parsed = json.loads(to_json(row.as_dict()), parse_constant=pytest.fail)
    assert parsed["tokens_scored"] == len(losses)
    numbers = (*COLUMNS[5:8], "kl_mean", "kl_p99")
    assert (parsed["reason"] == "") == all(parsed[name] is not None for name in numbers)
