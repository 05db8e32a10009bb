"""What is written, and that it is written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvquant_eval.errors import InputError
from kvquant_eval.files import to_json
from kvquant_eval.plot import fidelity_plot
from kvquant_eval.report import Report, prepare, write
from kvquant_eval.rows import COLUMNS, NESTED, Row
from kvquant_eval.table import columns


def row(policy: str = "int4", context: int = 2048, **changes: Any) -> Row:
    numbers = {
        "ppl": 12.5,
        "ppl_baseline": 12.25,
        "ppl_delta_pct": 0.4,
        "ppl_delta_ci95": (-0.1, 0.9),
        "kl_mean": 0.0021,
        "kl_p99": 0.02,
        "top1_agreement": 0.975,
        "tokens_scored": 1536,
        "kv_bytes": 300,
        "kv_bytes_baseline": 1000,
        "kv_ratio": 0.3,
        "bits_per_element": 4.8,
        "peak_kv_bytes": 900,
        "seconds": 1.5,
    }
    return Row("tiny", policy, context, "streaming", "float32", **(numbers | changes))


SKIPPED = Row("tiny", "int8", 9000, "streaming", "float32", status="skipped", reason="past a|limit")


def report(*rows: Row) -> Report:
    facts = {"text": "a text", "tokens": "0 BOS tokens"}
    return Report("kvquant ppl --model tiny", "2026-01-02T03:04:05+00:00", rows, facts, {"int4": "int4: a map"})


def test_a_report_has_everything_needed_to_make_it_again(tmp_path: Path) -> None:
    write(tmp_path, report(row(), row("fp16", kl_mean=0.0), SKIPPED))
    assert {path.name for path in tmp_path.iterdir()} == {"rows.json", "rows.csv", "plot.png", "README.md"}
    document = json.loads((tmp_path / "rows.json").read_text(), parse_constant=pytest.fail)
    assert list(document) == ["command", "date", "versions", "machine", "facts", "policies", "rows"]
    assert document["date"] == "2026-01-02T03:04:05+00:00"
    assert document["facts"] == {"text": "a text", "tokens": "0 BOS tokens"}
    assert document["policies"] == {"int4": "int4: a map"}
    assert {"python", "torch", "transformers", "kvquant", "commit"} <= set(document["versions"])
    assert {"cpu", "cores", "memory_gib", "torch_threads", "os"} == set(document["machine"])
    assert document["rows"][0] == row().as_dict()
    assert document["rows"][0]["ppl_delta_ci95"] == [-0.1, 0.9]
    assert tuple(document["rows"][2]) == (*COLUMNS, *NESTED)
    readme = (tmp_path / "README.md").read_text()
    for expected in (
        "kvquant ppl --model tiny",
        "2026-01-02T03:04:05+00:00",
        "- text: a text",
        "- tokens: 0 BOS tokens",
        "int4: a map",
        "plot.png",
        "| int4 | 2K | 12.5000 | +0.400 | -0.100 … +0.900 | 0.0021 | 0.02 | 97.50% | 1536 | 30.0% | 4.80 | 1.5 |",
        "skipped: past a\\|limit",
    ):
        assert expected in readme
    lines = [line for line in readme.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_columns_that_say_nothing_are_left_out() -> None:
    plain = [column.heading for column in columns([row(), SKIPPED])]
    assert plain[:3] == ["policy", "context", "PPL"]
    full = row(rope_scaling="yarn×4", kl_floor=1e-7, needle_logprob=-0.5, needle_exact=0.75, compress_seconds=2.0)
    shown = {column.heading: column.cell(full) for column in columns([full, SKIPPED])}
    assert {name: shown[name] for name in shown.keys() - set(plain)} == {
        "RoPE": "yarn×4",
        "KL floor": "1e-07",
        "needles, log p": "-0.500 (–)",
        "needles, exact": "75% (–)",
        "compressing, s": "2.0",
    }


def test_the_csv_keeps_types_and_splits_the_interval(tmp_path: Path) -> None:
    write(tmp_path, report(row(), SKIPPED))
    table = pd.read_csv(tmp_path / "rows.csv", dtype_backend="numpy_nullable", keep_default_na=True)
    assert [name for name in table.columns.astype(str) if not name.startswith("ppl_delta_ci95")] == [
        name for name in COLUMNS if name != "ppl_delta_ci95"
    ]
    assert table.loc[0, "ppl_delta_ci95_low"] == -0.1
    assert table.loc[0, "ppl_delta_ci95_high"] == 0.9
    assert table.loc[0, "kv_bytes"] == 300
    assert table["kv_bytes"].dtype == "Int64"
    assert table["ppl"].isna().tolist() == [False, True]


def test_a_picture_of_nothing_is_not_kept(tmp_path: Path) -> None:
    write(tmp_path, report(row()))
    write(tmp_path, report(SKIPPED))
    assert {path.name for path in tmp_path.iterdir()} == {"rows.json", "rows.csv", "README.md"}
    assert "plot.png" not in (tmp_path / "README.md").read_text()


def test_pictures_of_one_many_and_exact_rows() -> None:
    assert fidelity_plot([SKIPPED, row(kl_mean=None)]) is None
    for rows in (
        [row()],
        [row("fp16", kl_mean=0.0, kv_ratio=1.1)],
        [row(f"policy-{n}", context, kl_mean=10.0**-n) for n in range(12) for context in range(1000, 1010)],
        [row(f"policy-{n}") for n in range(12)],
    ):
        assert (fidelity_plot(rows) or b"").startswith(b"\x89PNG")


def test_strict_json_refuses_what_json_lacks() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        to_json({"rows": [float("nan")]})


@pytest.mark.parametrize("inner", ["", "deeper/still"])
def test_folders_are_made_and_tried_before_anything_runs(tmp_path: Path, inner: str) -> None:
    prepare(tmp_path / inner)
    assert not list((tmp_path / inner).iterdir())


def test_a_folder_that_cannot_be_written_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    for place in (file, file / "below"):
        with pytest.raises(InputError, match=r"^--out: .*file.*; allowed: a folder I can write to$"):
            prepare(place)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    out = tmp_path / "out"
    prepare(out)
    with pytest.raises(InputError, match=r"^--out: .*out: No space left on device$"):
        write(out, report(row()))
    assert not list(out.iterdir())


def test_an_interrupted_write_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, report(row()))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, report(SKIPPED))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["README.md", "plot.png", "rows.csv"])
def test_files_that_are_no_report_are_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    for other in ("", "[]", '{"command": 3}', '{"command": "kvquant tune"}', "nonsense"):
        if other:
            (tmp_path / "rows.json").write_text(other)
        with pytest.raises(InputError, match="is not an earlier report's and would be replaced"):
            prepare(tmp_path)
    assert (tmp_path / name).read_text() == "precious"
    (tmp_path / "rows.json").write_text('{"command": "kvquant ppl"}')
    prepare(tmp_path)
