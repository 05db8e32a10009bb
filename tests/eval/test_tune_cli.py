"""`kvquant tune` from outside: what it finds, prints and writes, and one line for whatever is wrong."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvquant import PrecisionPolicy, preset_names
from kvquant.tuner.sensitivity import Sensitivity
from kvquant_eval.__main__ import main
from kvquant_eval.rows import Row
from kvquant_eval.tuning.calibrate import _broken
from kvquant_eval.tuning.goal import Goal

from .tiny import SAMPLE, tiny_llama, tiny_tokenizer

Capture = pytest.CaptureFixture[str]
CONTEXT = 1024
FILES = {"rows.json", "sensitivity.json", "README.md", "layers.png", "pareto.png"}


def words(count: int, seed: int = 0) -> str:
    """A text that does not repeat itself."""
    chosen = random.Random(seed)
    return " ".join(chosen.choices(SAMPLE.split(), k=count))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for some blocks, two texts, and what tuning it to 0.4 of the bytes left."""
    folder = tmp_path_factory.mktemp("tune")
    tiny_llama(vocab_size=300, max_position_embeddings=4096).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    tiny_llama(1, vocab_size=300, max_position_embeddings=4096).save_pretrained(folder / "other")
    tiny_tokenizer().save_pretrained(folder / "other")
    (folder / "text.txt").write_text(words(2000))
    (folder / "short.txt").write_text(words(600))
    (folder / "held-out.txt").write_text(words(2000, seed=1))
    assert tune(folder, "--budget", "0.5", "--out", str(folder / "made.yaml")) == 0
    return folder


def tune(place: Path, *more: str, **changes: str | None) -> int:
    given = {
        "--model": str(place / "model"),
        "--text": str(place / "text.txt"),
        "--context": str(CONTEXT),
        "--score-tokens": "256",
        "--codecs": "int8,int4,int2",
        "--minutes": "0.05",
    }
    given |= {f"--{name.replace('_', '-')}": value for name, value in changes.items()}  # type: ignore[dict-item]
    code: int = main(["tune", *(word for pair in given.items() if pair[1] is not None for word in pair), *more])
    return code


def test_a_policy_and_its_folder(place: Path) -> None:
    path, folder = place / "made.yaml", place / "made"
    assert {file.name for file in folder.iterdir()} == FILES
    policy = PrecisionPolicy.load(path)
    assert policy.name == "made"
    sensitivity = Sensitivity.from_json((folder / "sensitivity.json").read_text())
    assignment = sensitivity.candidates.assignment(policy)
    assert assignment is not None
    assert sensitivity.candidates.footprint.ratio(assignment) <= 0.5
    text = path.read_text()
    assert text.startswith("# kvquant tune: the least KL in 0.5 of the bytes.\n# kvquant tune --model ")
    for said in (
        "# weights: fingerprint ",
        "# text: ",
        "(budget 0.5)",
        "measured",
        "# on held-out text: KL",
        "in KL as predicted and in all bytes.",
        "rank 1 of 4",
    ):
        assert said in text
    readme = (folder / "README.md").read_text()
    for said in ("kvquant tune --model", "- commit: ", "- machine: ", "SHA-256", "scored passes", "| int4 | 1K |"):
        assert said in readme
    assert "Not met" not in readme
    for picture in ("layers.png", "pareto.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")


def test_rows_are_of_the_policy_and_the_presets_on_held_out_text(place: Path) -> None:
    document = json.loads((place / "made" / "rows.json").read_text(), parse_constant=pytest.fail)
    assert document["command"].startswith("kvquant tune --model ")
    assert document["sensitivity"] == str(place / "made" / "sensitivity.json")
    assert document["policy"] == (place / "made.yaml").read_text()
    assert document["goal"] == {"budget": 0.5, "max_kl": None, "max_delta_ppl": None}
    assert document["broken"] == []
    ratios = [point["ratio"] for point in document["curve"]]
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.2
    assert ratios[-1] <= 0.6
    losses = [point["predicted"] for point in document["curve"]]
    assert losses == sorted(losses, reverse=True)
    assert min(trial["measured"] for trial in document["trials"]) <= document["rows"][0]["measured"]
    tuned, *presets = document["rows"]
    assert {row["policy"] for row in presets} == set(preset_names())
    for row in document["rows"]:
        assert {each.name for each in fields(Row)} < set(row)
        assert (row["status"], row["protocol"], row["context"]) == ("ok", "prefill", CONTEXT)
    assert tuned["policy"] == "made"
    assert tuned["budget"] == 0.5
    assert tuned["predicted"] == pytest.approx(tuned["measured"], rel=0.3)
    assert tuned["kl_mean"] == pytest.approx(tuned["measured"], rel=0.5)
    assert tuned["ratio_to_rivals"] == pytest.approx(tuned["kl_mean"] / tuned["kl_at_equal_bytes"])
    assert tuned["ratio_to_rivals"] < 0.8
    assert all(row["budget"] is row["measured"] is row["kl_at_equal_bytes"] is None for row in presets)


def test_another_budget_needs_no_model(place: Path, capsys: Capture, tmp_path: Path) -> None:
    source = str(place / "made" / "sensitivity.json")
    assert main(["tune", "--from", source, "--budget", "0.3", "--out", str(tmp_path / "small.yaml")]) == 0
    out = capsys.readouterr().out
    assert "small at 1K: skipped: not measured: no --model" in out
    (line,) = [line for line in out.splitlines() if line.startswith(f"{tmp_path / 'small.yaml'} written: ")]
    row = json.loads((tmp_path / "small" / "rows.json").read_text())["rows"][0]
    assert f"at most {row['kv_ratio']:.4f} of the 16-bit bytes (" in line
    assert f"MiB at 1K), KL predicted {row['predicted']:.3g}, not measured; see {tmp_path / 'small'}" in line
    assert {file.name for file in (tmp_path / "small").iterdir()} == FILES
    assert PrecisionPolicy.load(tmp_path / "small.yaml").name == "small"
    assert main(["tune", "--from", source, "--max-kl", "0.01", "--json"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["sensitivity"] is None
    (row,) = document["rows"]
    assert row["status"] == "skipped"
    assert row["predicted"] <= 0.01
    assert 0.1 < row["kv_ratio"] < 0.5
    assert PrecisionPolicy.from_yaml(document["policy"]).name == "tuned"
    assert main(["tune", "--from", source, "--max-delta-ppl", "1"]) == 0
    out, err = capsys.readouterr()
    assert PrecisionPolicy.from_yaml(out).name == "tuned"
    assert out.startswith("# kvquant tune: the fewest bytes with perplexity up by at most 1 %.")
    assert "tuned at 1K: skipped" in err


def test_without_a_model_nothing_slow_is_loaded(place: Path, tmp_path: Path) -> None:
    arguments = ["tune", "--from", str(place / "made" / "sensitivity.json"), "--budget", "0.3"]
    code = (
        "import sys; from kvquant_eval.__main__ import main; code = main(sys.argv[1:]);"
        "slow = {'transformers', 'datasets', 'matplotlib', 'pandas', 'huggingface_hub'} & set(sys.modules);"
        "assert not slow, slow; sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)


def test_a_model_may_go_on_with_what_was_measured(place: Path, capsys: Capture) -> None:
    source = str(place / "made" / "sensitivity.json")
    assert tune(place, "--from", source, "--budget", "0.5", "--json", codecs=None, context=None) == 0
    out, err = capsys.readouterr()
    assert "estimates" not in err
    assert "cells" not in err
    tuned = json.loads(out)["rows"][0]
    assert tuned["measured"] > 0
    assert tuned["ratio_to_rivals"] < 0.8
    assert (
        tune(place, "--from", source, "--budget", "0.35", codecs=None, context=None, model=str(place / "other")) == 2
    )
    _one_complaint(capsys, "another model")


@pytest.mark.parametrize(("goal", "limit"), [("--max-kl", "0.02"), ("--max-delta-ppl", "0.5")])
def test_fewest_bytes(place: Path, capsys: Capture, goal: str, limit: str) -> None:
    assert tune(place, goal, limit, "--json", "--no-verify") == 0
    document = json.loads(capsys.readouterr().out)
    (row,) = document["rows"]
    assert row["reason"] == "not compared: --no-verify"
    assert row["measured"] <= (0.02 if goal == "--max-kl" else 0.005)
    assert row["kv_ratio"] < 0.5
    if goal == "--max-delta-ppl":
        assert float(document["facts"]["perplexity on the calibration text"].split()[0]) <= 0.5
    assert "held-out text" not in document["facts"]


def test_other_text_is_held_out(place: Path, capsys: Capture) -> None:
    given = {"text": str(place / "short.txt"), "held_out": str(place / "held-out.txt")}
    assert tune(place, "--budget", "0.5", "--json", **given) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["facts"]["held-out text"].startswith(given["held_out"])
    assert document["rows"][0]["status"] == "ok"


def test_what_was_not_met_is_told() -> None:
    assert list(_broken(Goal(budget=0.3), 0.29, 1.0, None)) == []
    assert "0.3100 of the bytes" in next(_broken(Goal(budget=0.3), 0.31, 0.0, None))
    assert "KL 0.02" in next(_broken(Goal(max_kl=0.01), 0.3, 0.02, None))
    assert "up by 1.50 %" in next(_broken(Goal(max_delta_ppl=1.0), 0.3, 0.001, 1.5))


@pytest.mark.parametrize("budget", ["0", "-0.2", "nan", "inf", "17", "much", ""])
def test_bad_budgets(place: Path, capsys: Capture, budget: str) -> None:
    assert tune(place, "--budget", budget) == 2
    _one_complaint(capsys, f"--budget: {budget!r}; allowed: a share")


WRONG: dict[str, tuple[list[str], dict[str, str | None], str]] = {
    "no goal": ([], {}, "exactly one of --budget, --max-kl, --max-delta-ppl"),
    "two goals": (["--budget", "0.3", "--max-kl", "1"], {}, "--budget and --max-kl: exactly one"),
    "kl of zero": (["--max-kl", "0"], {}, "--max-kl: '0'"),
    "kl of words": (["--max-kl", "low"], {}, "--max-kl: 'low'"),
    "ppl falls": (["--max-delta-ppl", "-1"], {}, "--max-delta-ppl: '-1'"),
    "impossible": (["--budget", "0.05"], {}, "allowed: 0.1"),
    "no model": (["--budget", "0.3"], {"model": None}, "--text: needs --model"),
    "missing model": (["--budget", "0.3"], {"model": "./none"}, "no such file or folder"),
    "no context": (["--budget", "0.3"], {"context": None}, "--context: missing"),
    "long context": (["--budget", "0.3"], {"context": "8K"}, "model's limit, 4096"),
    "short context": (["--max-kl", "0.3"], {"context": "300"}, "--context"),
    "bad context": (["--budget", "0.3"], {"context": "2X"}, "--context: '2X'"),
    "one scored": (["--budget", "0.3"], {"score_tokens": "1"}, "--score-tokens: 1; allowed: 2 or more"),
    "all scored": (["--budget", "0.3"], {"score_tokens": "2K"}, "--context"),
    "unknown codec": (
        ["--budget", "0.3"],
        {"codecs": "int4,int7"},
        "--codecs: 'int7' is no codec; allowed: fp16",
    ),
    "no codecs": (["--budget", "0.3"], {"codecs": ","}, "--codecs"),
    "no time": (["--budget", "0.3"], {"minutes": "0"}, "--minutes: '0'"),
    "missing text": (["--budget", "0.3"], {"text": "none.txt"}, "--text: none.txt: No such file"),
    "missing held-out": (["--budget", "0.3"], {"held_out": "none.txt"}, "--held-out: none.txt: No such file"),
    "idle held-out": (["--budget", "0.3", "--no-verify"], {"held_out": "x"}, "--held-out: not read with --no-verify"),
    "not yaml": (["--budget", "0.3", "--out", "tuned"], {}, "ending in .yaml"),
    "bad name": (["--budget", "0.3", "--out", " x.yaml"], {}, "--out: x.yaml: the policy's name"),
    "stray word": (["--budget", "0.3", "extra"], {}, "extra"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_gets_one_line_and_exit_2(place: Path, capsys: Capture, case: str) -> None:
    more, changes, says = WRONG[case]
    assert tune(place, *more, **changes) == 2
    _one_complaint(capsys, says)
    assert not Path("tuned").exists()
    assert not Path(" x").exists()


def test_texts_that_are_too_short_or_the_same(place: Path, capsys: Capture) -> None:
    short, text = str(place / "short.txt"), str(place / "text.txt")
    assert tune(place, "--budget", "0.5", text=short) == 2
    _one_complaint(capsys, "another text as --held-out, or --no-verify")
    assert tune(place, "--budget", "0.5", text=short, context="4K") == 2
    _one_complaint(capsys, "at least --context (4K)")
    assert tune(place, "--budget", "0.5", held_out=text) == 2
    _one_complaint(capsys, "--held-out: the same tokens as --text")
    assert tune(place, "--budget", "0.5", context="2K", held_out=short) == 2
    _one_complaint(capsys, "--held-out: ")


def test_a_text_whose_name_is_half_a_character(place: Path, tmp_path: Path) -> None:
    text = tmp_path / "b\udcffk.txt"
    text.write_bytes((place / "text.txt").read_bytes())
    out = tmp_path / "made.yaml"
    given = {"codecs": "int4", "minutes": "0.01", "text": str(text)}
    assert tune(place, "--budget", "0.6", "--no-verify", "--out", str(out), **given) == 0
    told = Sensitivity.from_json((tmp_path / "made" / "sensitivity.json").read_text()).facts["text"]
    assert "b\udcffk.txt" in told
    assert PrecisionPolicy.load(out).name == "made"


def test_what_loses_nothing_is_written_too(place: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "made.yaml"
    assert tune(place, "--max-kl", "1", "--no-verify", "--out", str(out), codecs="fp16") == 0
    told = capsys.readouterr().out
    (row,) = json.loads((tmp_path / "made" / "rows.json").read_text())["rows"]
    assert f"{out} written: at most {row['kv_ratio']:.4f} of the 16-bit bytes (" in told
    assert "KL predicted 0, measured 0; see " in told
    assert not PrecisionPolicy.load(out).layers


def test_what_is_no_file_is_not_read(capsys: Capture) -> None:
    assert main(["tune", "--from", "/dev/zero", "--budget", "0.3"]) == 2
    _one_complaint(capsys, "--from: /dev/zero: not a file of up to 64 MiB")


def test_bad_sensitivities(place: Path, capsys: Capture, tmp_path: Path) -> None:
    whole = (place / "made" / "sensitivity.json").read_text()
    path = tmp_path / "changed.json"
    for text, says in (
        ("", "not JSON"),
        ("[]", "not a sensitivity file"),
        (whole.replace('"format": 1', '"format": 2'), "reads format 1"),
        (whole.replace('"context": 1024', '"context": 2048'), "changed.json: "),
        (whole[: len(whole) // 2], "not JSON"),
    ):
        path.write_text(text)
        assert main(["tune", "--from", str(path), "--budget", "0.3"]) == 2
        _one_complaint(capsys, says)
    assert main(["tune", "--from", str(tmp_path), "--budget", "0.3"]) == 2
    _one_complaint(capsys, "not a file of up to 64 MiB")
    source = ["--from", str(place / "made" / "sensitivity.json")]
    for more, says in (
        (["--budget", "0.05"], "allowed: 0.1"),
        (["--budget", "0.3", "--seed", "1"], "--seed: needs --model"),
        (["--budget", "0.3", "--codecs", "int4"], "--codecs: were chosen"),
    ):
        assert main(["tune", *source, *more]) == 2
        _one_complaint(capsys, says)
    assert tune(place, *source, "--budget", "0.3", codecs=None, context="2K") == 2
    _one_complaint(capsys, "--context: 2048, but --from was measured at 1024")


def test_files_of_others_are_not_replaced(place: Path, capsys: Capture, tmp_path: Path) -> None:
    source = ["tune", "--from", str(place / "made" / "sensitivity.json"), "--budget", "0.3"]
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: precious\n")
    assert main([*source, "--out", str(mine)]) == 2
    _one_complaint(capsys, "not of an earlier `kvquant tune`")
    assert mine.read_text() == "name: precious\n"
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "README.md").write_text("precious")
    assert main([*source, "--out", str(tmp_path / "book.yaml")]) == 2
    _one_complaint(capsys, "README.md is not an earlier report's")
    for _ in range(2):  # what it wrote itself may go
        assert main([*source, "--out", str(tmp_path / "new.yaml")]) == 0


def test_what_is_refused_leaves_no_folder(place: Path, capsys: Capture, tmp_path: Path) -> None:
    source = ["tune", "--from", str(place / "made" / "sensitivity.json"), "--budget", "0.05", "--out"]
    assert main([*source, str(tmp_path / "new" / "f01.yaml")]) == 2
    _one_complaint(capsys, "allowed: 0.1")
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()  # was there before
    assert main([*source, str(tmp_path / "mine.yaml")]) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]
    (tmp_path / "sealed").write_text("no folder")
    assert main([*source, str(tmp_path / "sealed" / "f01.yaml")]) == 2


def test_ctrl_c_is_short(place: Path) -> None:
    command = [sys.executable, "-m", "kvquant_eval", "tune", "--model", str(place / "model"), "--budget", "0.5"]
    command += ["--text", str(place / "text.txt"), "--context", "1K", "--score-tokens", "256", "--minutes", "5"]
    command += ["--out", str(place / "stopped.yaml")]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        while "estimates: 10 %" not in (line := process.stderr.readline()):
            assert line, "ended before"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "kvquant: interrupted"
    assert not [*place.glob("stopped*")]


def _one_complaint(capsys: Capture, says: str) -> None:
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = [line for line in err.splitlines() if not line.startswith("reading the text")]
    assert line.startswith("kvquant: ")
    assert says in line, line


def test_help_shows_examples(capsys: Capture) -> None:
    assert main(["tune", "--help"]) == 0
    out: Any = capsys.readouterr().out
    assert "kvquant tune --from tuned/sensitivity.json --budget 0.2 --out smaller.yaml" in out
