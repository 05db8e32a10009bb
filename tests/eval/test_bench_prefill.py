"""`kvquant bench prefill` on a tiny model: rows, table, refusals."""

from __future__ import annotations

import json

import pytest

from kvquant.kernels import wide
from kvquant_eval.bench.decode import STOCK
from kvquant_eval.bench.prefill import PrefillBench
from kvquant_eval.cli import run

from .tiny import small_policy


def test_rows_compare_with_the_uncompressed_cache_of_the_same_run(small_caches, llama, ids):
    ticks = []
    policies = [small_policy("int8"), small_policy("fp16")]
    bench = PrefillBench(llama, ids, policies, 50, 3, lambda *bounds: ticks.append(bounds))
    outcome = bench.run(120)
    assert [row.subject for row in outcome.rows] == ["int8", "fp16"]
    assert ticks == [(0, 50), (50, 100), (100, 120)] * 9
    for row in outcome.rows:
        assert (row.bench, row.case, row.baseline) == ("prefill", 120, STOCK)
        assert row.ratio == row.ms_median / row.baseline_ms_median
        assert 0 < row.value < 1
        assert row.peak_bytes > 0


def test_chunks_attend_to_codes_where_they_lie(small_caches, llama, ids, monkeypatch):
    calls = []
    real = wide.attend
    monkeypatch.setattr(wide, "attend", lambda query, *args, **given: calls.append(0) or real(query, *args, **given))
    PrefillBench(llama, ids, [small_policy("int8")], 50, 1).run(150)
    assert len(calls) == 2 * llama.config.num_hidden_layers
    assert llama.config._attn_implementation == "sdpa"


def test_command_prints_json_or_a_table(small_caches, model_folder, capsys):
    arguments = ["bench", "prefill", "--model", str(model_folder), "--contexts", "256,300", "--repeats", "1"]
    arguments += ["--chunk", "1K"]
    assert run([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["command"].startswith("kvquant bench prefill --model")
    assert [(row["case"], row["subject"]) for row in document["rows"]] == [(256, "int4"), (300, "int4")]
    assert "chunks of 1024" in document["rows"][0]["detail"]
    assert run(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("256 tokens")
    assert lines[1].split() == ["÷", "Dynamic", "peak"]
    assert lines[2].split() == ["subject", "ms", "Cache", "MiB", "encoding"]
    assert [line.split()[0] for line in lines[3:5]] == [STOCK, "int4"]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--contexts", "1M"], "--contexts: 1048576; allowed: up to the model's limit of 512 tokens"),
        (["--policies", "int7"], "'int7' is neither a file nor a preset"),
        (["--repeats", "0"], "'--repeats': Input should be greater than or equal to 1; given: '0'"),
        (["--chunk", "half"], "--chunk: 'half' is not a number of tokens"),
    ],
)
def test_bad_input(model_folder, capsys, arguments, complaint):
    assert run(["bench", "prefill", "--model", str(model_folder), *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert complaint in err
    assert err.count("\n") == 1
