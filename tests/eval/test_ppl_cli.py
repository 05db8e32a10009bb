"""The command line from outside: streams, exit codes, and one line for whatever is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvquant_eval.ppl
import kvquant_eval.report
from kvquant_eval.__main__ import main
from kvquant_eval.rows import COLUMNS, NESTED

PolicyFile = Callable[[str], Path]
Capture = pytest.CaptureFixture[str]


def ppl(arguments: dict[str, str], *more: str) -> int:
    code: int = main(["ppl", *(word for pair in arguments.items() for word in pair), *more])
    return code


def test_a_sweep_prints_a_table_that_fits_80_columns(arguments: dict[str, str], capsys: Capture) -> None:
    assert ppl(arguments) == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 80
    assert "96 tokens, 64 scored, uncompressed PPL" in out
    for column in ("policy", "ΔPPL", "95 % interval", "KL", "top-1", "bytes", "int8-small", "int4-small"):
        assert column in out
    assert "…" not in out.replace("…+", "").replace("…-", "")  # no name was cut
    assert "layers 0-3: key int4/" in err  # the exact map is echoed
    assert "Traceback" not in out + err


def test_json_is_all_there_is_on_standard_output(arguments: dict[str, str], capsys: Capture, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert ppl(arguments, "--json", "--out", str(out)) == 0
    printed = capsys.readouterr().out
    document = json.loads(printed, parse_constant=pytest.fail)
    assert list(document) == ["command", "date", "versions", "machine", "facts", "policies", "rows"]
    assert document["command"].startswith("kvquant ppl --model ")
    assert document["command"].endswith(f"--json --out {out}")
    assert [(row["context"], row["policy"]) for row in document["rows"]] == [
        (96, "int8-small"),
        (96, "int4-small"),
        (128, "int8-small"),
        (128, "int4-small"),
    ]
    for row in document["rows"]:
        assert tuple(row) == (*COLUMNS, *NESTED)
        assert row["status"] == "ok"
        assert (row["model"], row["dtype"]) == (arguments["--model"], "float32")
    assert (out / "rows.json").read_text() == printed
    readme = (out / "README.md").read_text()
    assert "0 BOS tokens" in readme
    assert arguments["--text"] in readme
    assert "layers 0-3: key int8/" in readme


def test_the_same_seed_gives_the_same_rows(arguments: dict[str, str], capsys: Capture) -> None:
    documents = []
    for seed in ("7", "7", "8"):
        assert ppl(arguments, "--json", "--seed", seed) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        documents.append([{name: row[name] for name in row if not name.endswith("seconds")} for row in rows])
    assert documents[0] == documents[1]
    assert documents[0] != documents[2]


def test_both_protocols_and_where_the_time_went(arguments: dict[str, str], capsys: Capture) -> None:
    rows = {}
    for protocol in ("streaming", "prefill"):
        assert ppl(arguments | {"--contexts": "96,500"}, "--json", "--protocol", protocol) == 0
        out, err = capsys.readouterr()
        rows[protocol] = json.loads(out)["rows"]
        terms = r"uncompressed model [\d.]+ s, .*policies' forwards [\d.]+ s.*; all [\d.]+ s, [\d.]+ × their sum"
        assert re.search(terms, err)
        assert re.search(r"Memory: .* with the model loaded, .* at most", err)
    for read, exact in zip(rows["streaming"], rows["prefill"], strict=True):
        assert (read["policy"], read["tokens_scored"]) == (exact["policy"], exact["tokens_scored"])
        assert exact["ppl_baseline"] == pytest.approx(read["ppl_baseline"], rel=1e-5)
        assert exact["kl_mean"] != read["kl_mean"]
        assert exact["compress_seconds"] > 0
        assert read["compress_seconds"] is None


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = json.loads((folder / "rows.json").read_text())["rows"]
    return [{name: value for name, value in row.items() if not name.endswith("seconds")} for row in rows]


@pytest.mark.parametrize("protocol", ["streaming", "prefill"])
def test_a_sweep_that_was_killed_is_resumed(
    arguments: dict[str, str], capsys: Capture, tmp_path: Path, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments | {"--contexts": "96,200,500", "--protocol": protocol, "--out": str(tmp_path / "whole")}
    assert ppl(given) == 0
    whole = rows_of(tmp_path / "whole")
    cut = tmp_path / "cut"
    written = []
    original = kvquant_eval.report.write

    def killed(folder: Path, report: Any) -> None:
        original(folder, report)
        written.append(len(report.rows))
        if len(written) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(kvquant_eval.report, "write", killed)
    assert ppl(given | {"--out": str(cut)}) == 130
    monkeypatch.undo()
    assert written == [2, 4]
    assert rows_of(cut) == whole[:4]
    capsys.readouterr()
    assert ppl(given | {"--out": str(cut)}, "--resume") == 0
    assert "4 of 6 rows are done already" in capsys.readouterr().err
    assert rows_of(cut) == whole
    assert ppl(given | {"--out": str(cut)}, "--resume") == 0  # nothing is left to do
    assert rows_of(cut) == whole


def test_what_cannot_be_resumed(arguments: dict[str, str], capsys: Capture, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert ppl(arguments, "--resume") == 2
    assert "--resume: goes on with the report of --out" in capsys.readouterr().err
    assert ppl(arguments | {"--out": str(out)}, "--resume") == 0  # there is none yet
    for name, value, place in (
        ("--contexts", "96", "cells"),
        ("--chunk", "16", "protocol"),
        ("--protocol", "prefill", "protocol"),
        ("--dtype", "bfloat16", "model"),
        ("--seed", "5", "seed"),
    ):
        capsys.readouterr()
        assert ppl(arguments | {"--out": str(out), name: value}, "--resume") == 2
        err = capsys.readouterr().err
        assert f"is of another sweep: {place}:" in err, err
    assert ppl(arguments | {"--out": str(out)}, "--resume", "--needle") == 0


@pytest.mark.parametrize("protocol", ["streaming", "prefill"])
def test_needles(
    arguments: dict[str, str], capsys: Capture, tmp_path: Path, protocol: str, policy_file: PolicyFile
) -> None:
    text = tmp_path / "long.txt"
    text.write_text(Path(arguments["--text"]).read_text() * 20)
    policies = f"{policy_file('fp16')},{policy_file('int4')}"
    wide = arguments | {"--text": str(text), "--contexts": "96,3K", "--policies": policies, "--protocol": protocol}
    wide |= {"--rope-scaling": "linear", "--chunk": "64"}
    assert ppl(wide, "--json", "--needle") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    for row in rows[:2]:
        assert row["by_depth"] == []
        assert row["reason"].startswith("no needles: 20 facts do not fit into 96 tokens")
    exact, lossy = rows[2:]
    assert [needle["depth"] for needle in exact["by_depth"]] == [0.1, 0.3, 0.5, 0.7, 0.9]
    assert exact["needle_logprob"] == pytest.approx(exact["needle_logprob_baseline"], rel=1e-4)
    assert exact["needle_logprob_baseline"] == lossy["needle_logprob_baseline"]
    assert lossy["needle_logprob"] != pytest.approx(lossy["needle_logprob_baseline"], rel=1e-6)


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic"])
def test_contexts_beyond_the_models_own_are_marked(arguments: dict[str, str], capsys: Capture, kind: str) -> None:
    stretched = arguments | {"--contexts": "96,1K", "--rope-scaling": kind, "--protocol": "prefill", "--chunk": "32"}
    assert ppl(stretched, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["rope_scaling"] for row in rows] == [f"{kind}×2"] * 4
    assert all(row["status"] == "ok" for row in rows)
    assert ppl(stretched | {"--contexts": "96"}, "--json") == 0
    assert [row["rope_scaling"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["", ""]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes(arguments: dict[str, str], capsys: Capture, dtype: str) -> None:
    assert ppl(arguments, "--json", "--dtype", dtype) == 0
    assert {row["dtype"] for row in json.loads(capsys.readouterr().out)["rows"]} == {dtype}


def test_skipped_rows_are_told_and_set_the_exit_code(arguments: dict[str, str], capsys: Capture) -> None:
    assert ppl(arguments | {"--contexts": "16,96,1K"}) == 1
    out = capsys.readouterr().out
    assert "int8-small at 16: skipped: no tokens scored" in out
    assert "int4-small at 1K: skipped: the model's limit is 512 tokens" in out
    assert "96 tokens, 64 scored" in out
    assert ppl(arguments | {"--contexts": "1K"}, "--json") == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["status"], row["tokens_scored"], row["ppl"]) for row in rows] == [("skipped", 0, None)] * 2


def test_help_shows_examples(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    assert "ppl" in capsys.readouterr().out
    assert main(["ppl", "--help"]) == 0
    out = capsys.readouterr().out
    assert "kvquant ppl --model smollm2-135m --policies int8,int4 --contexts 2K,4K" in out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvquant 0.")
    assert main([]) == 2


WRONG = {
    "unknown option": ({}, ["--speed", "9"], "--speed"),
    "unknown protocol": ({"--protocol": "magic"}, [], "streaming"),
    "unknown dtype": ({"--dtype": "int4"}, [], "bfloat16"),
    "chunk of zero": ({"--chunk": "0"}, [], "--chunk"),
    "chunk of zero, joined": ({}, ["--chunk=0"], "'0'"),
    "chunk of words": ({"--chunk": "many"}, [], "many"),
    "negative scores": ({"--score-tokens": "-1"}, [], "--score-tokens"),
    "negative seed": ({"--seed": "-1"}, [], "--seed"),
    "bad contexts": ({"--contexts": "2X"}, [], "--contexts: '2X'"),
    "no policies": ({"--policies": ","}, [], "--policies"),
    "unknown policy": ({"--policies": "int7"}, [], "'int7' is neither a file nor a preset"),
    "policy with a blank": ({"--policies": "int4 x"}, [], "'int4 x'"),
    "missing text": ({"--text": "none.txt"}, [], "--text: none.txt: No such file"),
    "missing model": ({"--model": "./none"}, [], "model: ./none: no such file or folder"),
    "stray word": ({}, ["extra"], "extra"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_gets_one_line_and_exit_2(case: str, arguments: dict[str, str], capsys: Capture) -> None:
    changes, more, says = WRONG[case]
    assert ppl(arguments | changes, *more) == 2
    _one_complaint(capsys, says)


def test_what_is_missing_is_named(capsys: Capture) -> None:
    assert main(["ppl", "--policies", "int4"]) == 2
    _one_complaint(capsys, "--model")
    assert main(["unheard-of"]) == 2
    _one_complaint(capsys, "unheard-of")


@pytest.mark.parametrize("setting", ["bits: 3", "default: int4", "block_tokens: 0", "layers: {99: {key: int4}}"])
def test_bad_policy_files_are_named(
    arguments: dict[str, str], capsys: Capture, policy_file: PolicyFile, setting: str
) -> None:
    path = policy_file("int4")
    kept = [line for line in path.read_text().splitlines() if not line.startswith(setting.split(":")[0] + ":")]
    path.write_text("\n".join(kept).replace("default:\n", "default:\n", 1) + f"\n{setting}\n")
    assert ppl(arguments | {"--policies": str(path)}) == 2
    _one_complaint(capsys, str(path))


def test_layers_the_model_lacks_are_refused_before_running(
    arguments: dict[str, str], capsys: Capture, policy_file: PolicyFile
) -> None:
    path = policy_file("int4")
    path.write_text(path.read_text().replace("layers: {}", "layers: {7: {key: int8, value: int8}}"))
    assert ppl(arguments | {"--policies": str(path)}) == 2
    _one_complaint(capsys, "7")


def test_two_policies_of_one_name_are_refused(
    arguments: dict[str, str], capsys: Capture, policy_file: PolicyFile, tmp_path: Path
) -> None:
    twin = tmp_path / "twin.yaml"
    twin.write_text(policy_file("int4").read_text())
    assert ppl(arguments | {"--policies": f"{policy_file('int4')},{twin}"}) == 2
    _one_complaint(capsys, "'int4-small'")


def test_an_output_folder_that_cannot_be_is_refused_before_running(
    arguments: dict[str, str], capsys: Capture, text_file: Path
) -> None:
    assert ppl(arguments, "--out", str(text_file)) == 2
    _one_complaint(capsys, f"--out: {text_file}")


def _one_complaint(capsys: Capture, says: str) -> None:
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("kvquant: ")
    assert says in err


def test_a_missing_extra_is_a_hint(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert main(["ppl", "--help"]) == 2
    assert capsys.readouterr().err == ("kvquant: the command line needs its extra: pip install 'kvquant[eval]'\n")


def test_bugs_of_ours_are_not_hidden(arguments: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(kvquant_eval.ppl, "tokens_of", broken)
    with pytest.raises(ZeroDivisionError):
        ppl(arguments)


def test_ctrl_c_is_short(arguments: dict[str, str]) -> None:
    command = [sys.executable, "-m", "kvquant_eval", "ppl"]
    command += [word for pair in (arguments | {"--contexts": "512", "--chunk": "1"}).items() for word in pair]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # tests run in the background ignore it
    ) as process:
        assert process.stderr is not None
        while "layers 0-3" not in (line := process.stderr.readline()):
            assert line, "ended before the sweep"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "kvquant: interrupted"
    assert "Traceback" not in err
