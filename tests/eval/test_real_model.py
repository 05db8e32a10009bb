"""The whole command on real weights."""

from __future__ import annotations

import json

import pytest

from kvquant_eval.__main__ import main


@pytest.mark.real_model
def test_the_sweep_on_smollm2(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "smollm2-135m", "--policies", "fp16,int8,int4", "--contexts", "1K", "--json"]
    assert main(["ppl", *options]) == 0
    exact, int8, int4 = json.loads(capsys.readouterr().out)["rows"]
    assert exact["kl_mean"] == exact["ppl_delta_pct"] == 0.0
    assert exact["tokens_scored"] == int4["tokens_scored"] == 512
    assert 0 < int8["kl_mean"] < 1e-4
    assert 1e-4 < int4["kl_mean"] < 0.006
    assert int4["kv_ratio"] < int8["kv_ratio"] < exact["kv_ratio"]
