"""`kvquant ppl` and `report` with what nobody should give them: one line, the results kept, nothing untrue."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel

import kvquant_eval.report
from kvquant_eval.__main__ import main
from kvquant_eval.errors import one_line
from kvquant_eval.needle import summary
from kvquant_eval.rows import Needle

from .test_ppl_cli import ppl, rows_of
from .tiny import small_policy, tiny_llama, tiny_tokenizer

Capture = pytest.CaptureFixture[str]
PolicyFile = Callable[[str], Path]


@pytest.mark.parametrize("name", ["a[/x]", "mine[red]", "x|y", "<script>alert(1)</script>"])
def test_names_are_text(arguments: dict[str, str], capsys: Capture, tmp_path: Path, name: str) -> None:
    path = tmp_path / "named.yaml"
    path.write_text(small_policy("int8", name).to_yaml())
    assert ppl(arguments | {"--policies": str(path), "--out": str(tmp_path / "out"), "--contexts": "96"}) == 0
    assert name[:12] in capsys.readouterr().out
    readme = (tmp_path / "out" / "README.md").read_text().split("## Policies")[0]
    assert "<script>" not in readme.split("```", 2)[2]
    (line,) = [line for line in readme.splitlines() if line.startswith("| ") and "96" in line]
    rule = next(line for line in readme.splitlines() if line.startswith("|---"))
    assert line.replace("\\|", "").count("|") == rule.count("|")


@pytest.mark.parametrize(
    "given", [("--contexts", "96,1000M"), ("--contexts", "96,999999999999M"), ("--contexts", "96,9000000000")]
)
def test_a_text_is_read_no_further_than_it_goes(
    arguments: dict[str, str], capsys: Capture, given: tuple[str, str]
) -> None:
    model = arguments["--model"]
    config = json.loads((Path(model) / "config.json").read_text())
    (Path(model) / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**19}))
    try:
        assert ppl(arguments | dict([given]), "--json") == 1
    finally:
        (Path(model) / "config.json").write_text(json.dumps(config))
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["status"] for row in rows] == ["ok", "ok", "skipped", "skipped"]
    assert "the text has only" in rows[2]["reason"]


@pytest.mark.parametrize("option", ["--model", "--text", "--out", "--reuse-prefix"])
def test_the_home_of_nobody(arguments: dict[str, str], capsys: Capture, option: str) -> None:
    assert ppl(arguments | {"--protocol": "prefill", option: "~nobody-of-that-name/x"}) == 2
    err = capsys.readouterr().err
    assert "~nobody-of-that-name" in err
    assert err.count("\n") == 1


def test_a_file_name_that_is_no_text(arguments: dict[str, str], capsys: Capture, tmp_path: Path) -> None:
    strange = os.fsdecode(os.fsencode(tmp_path) + b"/s\xff.txt")
    os.replace(arguments["--text"], strange)
    out = tmp_path / "out"
    assert ppl(arguments | {"--text": strange, "--out": str(out)}, "--json") == 0
    printed, written = json.loads(capsys.readouterr().out), json.loads((out / "rows.json").read_text())
    assert printed["rows"] == written["rows"]
    assert "s\\udcff.txt" in (out / "README.md").read_text()


@pytest.mark.parametrize("how", ["ascii", "closed"])
def test_streams_that_take_little(arguments: dict[str, str], how: str) -> None:
    words = [sys.executable, "-m", "kvquant_eval", "ppl"]
    words += [word for pair in (arguments | {"--contexts": "96"}).items() for word in pair]
    if how == "closed":
        words = ["sh", "-c", 'exec "$@" >&-', "sh", *words]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if how == "ascii":
        assert "\\u0394PPL" in done.stdout


def test_a_model_that_sees_what_it_is_to_predict(arguments: dict[str, str], capsys: Capture, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertLMHeadModel(config).save_pretrained(tmp_path / "bert")
    tiny_tokenizer().save_pretrained(tmp_path / "bert")
    assert ppl(arguments | {"--model": str(tmp_path / "bert")}) == 2
    assert "sees later tokens (an encoder?)" in capsys.readouterr().err


def test_a_scaling_that_is_not_needed_is_told(arguments: dict[str, str], capsys: Capture) -> None:
    assert ppl(arguments | {"--rope-scaling": "yarn", "--contexts": "96"}) == 0
    assert "--rope-scaling: not needed" in capsys.readouterr().err


@pytest.mark.parametrize("protocol", ["streaming", "prefill"])
def test_moving_frequencies_and_chunks_that_are_long(
    arguments: dict[str, str], capsys: Capture, tmp_path: Path, protocol: str
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    tiny_llama(vocab_size=300, rope_parameters=rope, max_position_embeddings=300).save_pretrained(tmp_path / "m")
    tiny_tokenizer().save_pretrained(tmp_path / "m")
    given = arguments | {"--model": str(tmp_path / "m"), "--chunk": "450", "--contexts": "400,500"}
    assert ppl(given | {"--protocol": protocol}, "--json") == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["status"] for row in rows if row["context"] == 400} == {"skipped"}
    assert {row["status"] for row in rows if row["context"] == 500} <= {"ok", "skipped"}


def test_infinite_needles_are_none_with_a_reason(
    arguments: dict[str, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = summary([Needle(0.1, -float("inf"), -1.0, 0.0, 1.0)], "before")
    assert values["needle_logprob"] is None
    assert values["needle_exact"] == 0.0
    assert values["reason"] == "before; needle_logprob: infinite"
    assert "by_depth" not in values

    def fail(self: Any, haystack: Any) -> Any:
        raise RuntimeError("no such luck")
        yield

    monkeypatch.setattr(kvquant_eval.needle.Probe, "run", fail)
    assert ppl(arguments | {"--contexts": "500"}, "--json", "--needle") == 0
    assert all(row["ppl"] for row in json.loads(capsys.readouterr().out)["rows"])


def test_rows_are_kept_when_only_needles_are_missing(
    arguments: dict[str, str], capsys: Capture, tmp_path: Path
) -> None:
    given = arguments | {"--out": str(tmp_path / "out")}
    assert ppl(given) == 0
    before = rows_of(tmp_path / "out")
    capsys.readouterr()
    assert ppl(given, "--resume", "--needle") == 0
    assert "4 of 4 rows are done already" in capsys.readouterr().err
    after = rows_of(tmp_path / "out")
    for row in before + after:
        row.pop("reason")
    assert before == after


def test_needles_are_not_resumed_by_a_command_that_asks_for_none(
    arguments: dict[str, str], capsys: Capture, tmp_path: Path
) -> None:
    given = arguments | {"--out": str(tmp_path / "out")}
    assert ppl(given) == 0
    path = tmp_path / "out" / "rows.json"
    document = json.loads(path.read_text())
    told = {"logprob": -1.0, "logprob_baseline": -1.0, "exact": 1.0, "exact_baseline": 1.0}
    document["rows"][0]["by_depth"] = [{"depth": 0.5} | told]
    path.write_text(json.dumps(document))
    capsys.readouterr()
    assert ppl(given, "--resume") == 2
    assert "allowed: the same with --needle" in capsys.readouterr().err


def test_an_unfinished_report_says_so(arguments: dict[str, str], capsys: Capture, tmp_path: Path) -> None:
    out, written = tmp_path / "out", kvquant_eval.report.write

    def once(folder: Path, report: Any) -> None:
        written(folder, report)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvquant_eval.report, "write", once)
        assert ppl(arguments | {"--out": str(out)}) == 130
    assert len(rows_of(out)) == 2
    assert main(["report", str(out)]) == 0
    assert "2 of 4 rows are missing of out: the sweep was not finished" in (out / "report.html").read_text()
    assert ppl(arguments | {"--out": str(out)}, "--resume") == 0
    document = json.loads((out / "rows.json").read_text())
    assert "unfinished" not in document["facts"]
    assert document["facts"]["time"].startswith("since it was resumed: ")


@pytest.mark.parametrize("option", ["--text", "--model", "--out", "--policies", "--reuse-prefix"])
def test_names_do_not_command_the_terminal(
    arguments: dict[str, str], capsys: Capture, tmp_path: Path, option: str
) -> None:
    name = str(tmp_path / "na\x1b[31mme\x1b]0;x\a\nb")
    if option == "--text":
        Path(name).write_text(Path(arguments["--text"]).read_text())
    ppl(arguments | {"--contexts": "96", "--out": str(tmp_path / "out"), option: name})
    said = capsys.readouterr()
    assert not {"\x1b", "\a"} & {*said.out, *said.err}
    if option == "--text":
        assert not {"\x1b", "\a"} & {*(tmp_path / "out" / "README.md").read_text()}


@pytest.mark.parametrize("option", ["--model", "--out", "--reuse-prefix"])
def test_nothing_is_no_path(
    arguments: dict[str, str], capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = [*tmp_path.iterdir()]
    assert ppl(arguments | {option: ""}) == 2
    assert "'' names nothing" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == before


@pytest.mark.parametrize("given", [["report", ""], ["report", "out", "--out", ""]])
def test_nothing_is_no_report(
    arguments: dict[str, str], capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    assert ppl(arguments | {"--out": str(tmp_path / "out"), "--contexts": "96"}) == 0
    monkeypatch.chdir(tmp_path / "out" if given == ["report", ""] else tmp_path)
    capsys.readouterr()
    assert main(given) == 2
    assert "'' names nothing" in capsys.readouterr().err
    assert not [*tmp_path.rglob("*.html")]


def test_reasons_do_not_command_the_terminal() -> None:
    assert one_line(ValueError("a\x1b[31mb\nc")) == "ValueError: a [31mb c"


def test_more_memory_than_there_is(arguments: dict[str, str], capsys: Capture) -> None:
    assert ppl(arguments | {"--max-memory": "9" * 400 + "G"}) == 2
    assert "is not an amount of memory" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "name"), [("versions", "torch"), ("versions", "commit"), ("machine", "cpu")])
def test_rows_of_other_makers_are_not_mixed(
    arguments: dict[str, str], capsys: Capture, tmp_path: Path, kind: str, name: str
) -> None:
    out = tmp_path / "out"
    assert ppl(arguments | {"--out": str(out)}) == 0
    document = json.loads((out / "rows.json").read_text())
    document[kind][name] = "another"
    (out / "rows.json").write_text(json.dumps(document))
    capsys.readouterr()
    assert ppl(arguments | {"--out": str(out)}, "--resume") == 2
    assert f"{name} was 'another', now it is" in capsys.readouterr().err


def test_rows_of_a_changed_model_are_not_mixed(arguments: dict[str, str], capsys: Capture, tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "m"
    tiny_llama(vocab_size=300).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    given = arguments | {"--model": str(folder), "--out": str(out)}
    assert ppl(given) == 0
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    capsys.readouterr()
    assert ppl(given, "--resume") == 2
    assert "is of another sweep: weights:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"first": 10**9}, "by_position: not between 0 and the context"),
        ({"stop": 10**400}, "by_position: not between 0 and the context"),
        ({"first": -1}, "by_position"),
        ({"logprob": -1e308}, "by_depth: not the log of a probability"),
        ({"logprob_baseline": 1e308}, "by_depth: not the log of a probability"),
        ({"protocol": r"$\frac{1}$"}, ""),
        ({"dtype": r"$\frac{1}$"}, ""),
    ],
)
def test_pages_of_nonsense(
    arguments: dict[str, str], capsys: Capture, tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    out = tmp_path / "out"
    assert ppl(arguments | {"--out": str(out), "--contexts": "96"}) == 0
    document = json.loads((out / "rows.json").read_text())
    for row in document["rows"]:
        told = {"logprob": -1.0, "logprob_baseline": -1.0, "exact": 1.0, "exact_baseline": 1.0}
        row["by_depth"] = [{"depth": 0.5} | told]
        places = {"first": row["by_position"][0], "stop": row["by_position"][0]} | dict.fromkeys(
            told, row["by_depth"][0]
        )
        places.get(next(iter(change)), row).update(change)
    (out / "rows.json").write_text(json.dumps(document))
    capsys.readouterr()
    assert main(["report", str(out)]) == (2 if complaint else 0)
    assert complaint in capsys.readouterr().err


def test_a_page_that_was_deleted_is_made_again(arguments: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert ppl(arguments | {"--out": str(out), "--contexts": "96"}) == 0
    assert main(["report", str(out)]) == 0
    (out / "report.html").unlink()
    assert main(["report", str(out)]) == 0
    assert (out / "report.html").exists()
