"""`kvquant report`: what the page says, that it needs nothing else, and what it does with folders of all kinds."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvquant_eval.__main__ import main
from kvquant_eval.errors import InputError
from kvquant_eval.front import pareto_front
from kvquant_eval.page import render
from kvquant_eval.plot import Point
from kvquant_eval.report import GENERATOR, Report, write
from kvquant_eval.results import group, read
from kvquant_eval.rows import Bucket, Needle, Row

from .test_report import SKIPPED, row

Capture = pytest.CaptureFixture[str]

PNG = b"\x89PNG"
VOID = {"meta", "img", "br"}
ROOT = Path(__file__).parents[2]
POSITIONS = (Bucket(0, 1024, 3.5, 3.25, 0.011), Bucket(1024, 2048, 3.0, 3.125, 0.022))
NEEDLES = (Needle(0.0, -0.75, -0.5, 0.8125, 0.9375), Needle(0.5, -1.5, -0.625, 0.25, 1.0))
NESTED = {"by_position": POSITIONS, "by_depth": NEEDLES, "kl_floor": 1e-7, "rope_scaling": "yarn×4"}


class Page(HTMLParser):
    """The page's tables as text, its pictures, and a complaint about whatever is not well formed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    def all(self, tag: str, name: str) -> list[str]:
        return [value for its, key, value in self.attributes if (its, key) == (tag, name)]


def report(*rows: Row, **changes: Any) -> Report:
    facts = {"text": "a text, SHA-256 `00ff`, read from its start", "protocol": "the column *tokens* counts them"}
    policies = {"int4": "int4: a map\n  layers 0-3: key int4"}
    versions = {"python": "3.0.1", "commit": "c0ffee"}
    machine = {"cpu": "abacus", "cores": 1, "memory_gib": 2.5, "torch_threads": 1, "os": "none"}
    made = Report("kvquant ppl --model tiny", "2026-01-02T03:04:05+00:00", rows, facts, policies, versions, machine)
    return replace(made, **changes)


def shown(*rows: Row, **changes: Any) -> Page:
    return Page(render({"folder": report(*rows, **changes)})[0])


def test_the_page_says_what_the_folder_holds(tmp_path: Path) -> None:
    write(tmp_path, report(row(), row(context=4096, kl_mean=0.0044), SKIPPED))
    assert main(["report", str(tmp_path)]) == 0
    page = Page((tmp_path / "report.html").read_text())
    (table,) = page.tables
    assert table == [
        ["policy", "context", "PPL", "ΔPPL %", "95 %", "KL mean", "KL p99", "top-1", "tokens", "bytes", "bits", "s"],
        *(
            f"int4|{context}|12.5000|+0.400|-0.100 … +0.900|{kl}|0.02|97.50%|1536|30.0%|4.80|1.5".split("|")
            for context, kl in (("2K", "0.0021"), ("4K", "0.0044"))
        ),
        ["int8", "9000", "skipped: past a|limit"],
    ]
    places = [
        page.text.index(expected)
        for expected in (
            "KV-cache compression: tiny",
            "Text: a text, read from its start.",
            "2026-01-02T03:04:05+00:00",
            f"From: {tmp_path.name}.",
            "1 of 3 rows failed or were skipped.",
            "12.5000",
            "Pareto front",
            "Mean KL, log scale.",
            "int4: a map\n  layers 0-3: key int4",
            "How to read this",
            "kvquant ppl --model tiny",
            "c0ffee",
            "python 3.0.1",
            "cpu abacus, cores 1, memory gib 2.5, torch threads 1, os none",
            "SHA-256 00ff",
        )
    ]
    assert places == sorted(places)
    assert "the column tokens counts them" in page.text
    assert "not recorded" not in page.text


def test_pictures_are_in_the_page_and_beside_it(tmp_path: Path) -> None:
    write(tmp_path, report(row(**NESTED), row("fp16", kl_mean=0.0, **NESTED)))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "new/folder/it.html")]) == 0
    page = Page((tmp_path / "new/folder/it.html").read_text())
    beside = {path.name: path.read_bytes() for path in (tmp_path / "new/folder").glob("*.png")}
    assert set(beside) == {f"it-{name}.png" for name in ("bytes", "ppl", "kl", "positions-2048", "needles-2048")}
    embedded = [
        base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True)
        for source in page.all("img", "src")
    ]
    assert sorted(embedded) == sorted(beside.values())
    assert all(picture.startswith(PNG) for picture in embedded)
    assert all(len(text) > 40 for text in page.all("img", "alt"))
    assert len(page.all("img", "alt")) == len(embedded)


def test_nothing_is_loaded_and_nothing_runs() -> None:
    page = shown(row(**NESTED), SKIPPED)
    assert not {"script", "link", "iframe", "object", "base", "form"} & set(page.tags)
    assert not [value for _, name, value in page.attributes if name == "href" or name.startswith("on")]
    assert all(source.startswith("data:image/png;base64,") for source in page.all("img", "src"))
    assert "url(" not in render({"folder": report(row())})[0]
    assert any("default-src 'none'" in value for value in page.all("meta", "content"))


def test_positions_depths_floor_and_scaling_are_shown() -> None:
    page = shown(row(**NESTED), row("int8"))
    rows, positions, depths = page.tables
    shown_first = dict(zip(rows[0], rows[1], strict=True))
    assert (shown_first["RoPE"], shown_first["KL floor"]) == ("yarn×4", "1e-07")
    assert dict(zip(rows[0], rows[2], strict=True))["RoPE"] == "–"
    assert positions[1:] == [
        ["int4", "2K", "0–1023", "3.5000", "+0.25000", "0.011"],
        ["int4", "2K", "1024–2047", "3.0000", "-0.12500", "0.022"],
    ]
    assert depths[1:] == [
        ["int4", "2K", "0%", "-0.750", "-0.500", "81.2%", "93.8%"],
        ["int4", "2K", "50%", "-1.500", "-0.625", "25.0%", "100.0%"],
    ]
    assert "beyond what the model was made for" in page.text
    assert "beyond what the model was made for" not in shown(row()).text


def test_a_row_that_is_fine_but_for_a_number_has_both_numbers_and_reason() -> None:
    (table,) = shown(row(ppl=None, ppl_delta_pct=None, ppl_delta_ci95=None, reason="ppl: infinite")).tables
    assert table[1][2:5] == ["–", "–", "–"]
    assert table[2] == ["", "2K", "ppl: infinite"]


def test_whatever_a_folder_says_is_text() -> None:
    evil = "<script>alert('1')</script>&\"$x$ $\\frac \u202e\ud800\x00_"
    page = shown(
        row(evil, **NESTED),
        replace(SKIPPED, reason=evil, model=evil),
        command=f"kvquant ppl {evil}",
        date=evil,
        facts={"text": evil, evil: evil},
        policies={evil: evil},
        versions={evil: evil},
        machine={evil: evil},
    )
    assert "script" not in page.tags
    assert page.text.count("<script>alert('1')</script>&\"$x$") >= 8
    page.text.encode()


def test_long_names_are_shortened_in_their_middle() -> None:
    (table,) = shown(row(f"a{'b' * 5000}c")).tables
    assert table[1][0].startswith("abb")
    assert table[1][0].endswith("bbc")
    assert len(table[1][0]) == 100


NOTHING_MEASURED = row(**dict.fromkeys(("ppl", "ppl_delta_pct", "ppl_delta_ci95", "kl_mean", "kl_p99", "kv_ratio")))


@pytest.mark.parametrize(
    ("rows", "pictures"),
    [
        ([SKIPPED], set()),
        ([NOTHING_MEASURED], set()),
        ([row(kl_mean=0.0)], {"bytes", "ppl"}),
        ([row(ppl_delta_pct=1e300, ppl_delta_ci95=(-1e300, 1e300), kl_mean=1e300)], set()),
        ([row(ppl_delta_pct=5000.0, ppl_delta_ci95=None), row("b", kl_mean=1e-300)], {"bytes", "ppl", "kl"}),
        ([row(f"p{n % 10}", 1000 + n // 10, kl_mean=1e-5 * (n + 1)) for n in range(200)], {"bytes", "ppl", "kl"}),
        ([row(by_position=[Bucket(0, 0, 1, 1, 0)], kl_mean=None)], {"ppl", "positions-2048"}),
        ([row(by_depth=[Needle(n / 40, -1, -1, 1, 1) for n in range(41)], kl_mean=None)], {"ppl", "needles-2048"}),
    ],
)
def test_rows_of_all_kinds_give_the_pictures_they_can(rows: list[Row], pictures: set[str]) -> None:
    text, drawn = render({"folder": report(*rows)})
    assert set(drawn) == pictures
    assert len(Page(text).tables[0]) == len(rows) + 1


def test_the_front_is_what_nothing_beats() -> None:
    points = [Point("p", 1, ratio, kl, False) for ratio, kl in ((0.5, 3), (0.2, 9), (0.5, 2), (0.4, 4), (0.9, 2))]
    assert [(point.ratio, point.kl) for point in pareto_front(points)] == [(0.2, 9), (0.4, 4), (0.5, 2)]


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    written = report(row(**NESTED), replace(SKIPPED, model="other"))
    write(tmp_path, written)
    assert replace(read(tmp_path), rows=tuple(read(tmp_path).rows)) == written


def test_folders_of_earlier_and_later_releases_are_read(tmp_path: Path) -> None:
    folder = ROOT / "reports" / "smollm2-shakespeare"
    rows = json.loads((folder / "rows.json").read_text())["rows"]
    assert [(row.policy, row.kl_mean) for row in read(folder).rows] == [(r["policy"], r["kl_mean"]) for r in rows]
    old = {name: value for name, value in row().as_dict().items() if name in ("model", "policy", "context", "kl_mean")}
    nulls = dict.fromkeys(row().as_dict()) | old | {"protocol": "streaming", "dtype": "float32"}
    document = {"command": "kvquant ppl", "rows": [nulls | {"kl_p998": [1, {}]}], "machine": None, "carbon": {}}
    (tmp_path / "rows.json").write_text(json.dumps(document))
    found = read(tmp_path)
    assert (found.date, found.facts, found.policies, found.versions, found.machine) == ("", {}, {}, {}, {})
    assert found.rows == [Row("tiny", "int4", 2048, "streaming", "float32", kl_mean=0.0021)]
    page = Page(render({"folder": found})[0])
    assert "Text: not recorded." in page.text
    assert "Date: not recorded." in page.text
    assert page.text.lower().count("not recorded") == 8


GOOD = row().as_dict()
BAD = {
    "no JSON": ("{", "not JSON: JSONDecodeError"),
    "no text": (b"\xff\xfe\x00", "not JSON: UnicodeDecodeError"),
    "not a number": ('{"command": "kvquant ppl", "rows": [NaN]}', "not JSON: ValueError: NaN is not JSON"),
    "too deep": ("[" * 100000, "not JSON: RecursionError"),
    "a list": ([], "holds no results"),
    "no command": ({"rows": []}, "holds no results"),
    "another command": ({"command": "kvquant bench prefill", "rows": []}, "of `kvquant bench prefill`; allowed: of"),
    "no rows": ({"command": "kvquant ppl"}, "rows: missing"),
    "empty": ({"command": "kvquant ppl", "rows": []}, "no rows"),
    "rows of numbers": ({"command": "kvquant ppl", "rows": [1]}, r"rows\[0\]: .* expected, found 1"),
    "no policy": ([GOOD, GOOD | {"policy": None}], r"rows\[1\].policy: missing"),
    "a word": ([GOOD | {"kl_mean": "much"}], r"rows\[0\].kl_mean: .* found 'much'"),
    "infinity": ([GOOD | {"kl_mean": 10**400}], r"rows\[0\].kl_mean: "),
    "no tokens": ([GOOD | {"context": 0}], r"rows\[0\].context: 0 is not a number of tokens"),
    "many tokens": ([GOOD | {"context": 10**400}], r"rows\[0\].context: 1000"),
    "a bucket": ([GOOD | {"by_position": [{"first": 1}]}], r"rows\[0\].by_position\[0\].stop: missing"),
    "facts": ({"command": "kvquant ppl", "rows": [GOOD], "facts": [1]}, "facts: .* found"),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_folders_are_told_in_one_line(case: str, tmp_path: Path, capsys: Capture) -> None:
    content, says = BAD[case]
    if isinstance(content, list) and content:
        content = {"command": "kvquant ppl", "rows": content}
    if not isinstance(content, str | bytes):
        content = json.dumps(content)
    (tmp_path / "rows.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=says):
        read(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvquant: {tmp_path}/rows.json: ")
    assert len(err.splitlines()) == 1
    assert len(err) < 500
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_only_what_scores_the_same_tokens_is_compared() -> None:
    ours, theirs, older = report(row(), row("int8")), report(row(), row("int8", 4096)), report(row(), facts={})
    (one,) = group({"a": ours, "b": theirs})
    assert one.folders == ["a", "b"]
    assert [(row.policy, row.context) for row in one.rows] == [
        ("int4 (a)", 2048),
        ("int8", 2048),
        ("int4 (b)", 2048),
        ("int8", 4096),
    ]
    changed = (
        report(row(), facts={**ours.facts, "text": "another"}),
        report(row(), facts={**ours.facts, "protocol": "other chunks"}),
        report(replace(row(), dtype="bfloat16")),
        report(replace(row(), model="other")),
        older,
    )
    for other in changed:
        assert len(group({"a": ours, "b": other})) == 2
    assert [one.folders for one in group({"a": older, "b": older})] == [["a"], ["b"]]


def test_several_folders_make_one_page_in_groups(tmp_path: Path, capsys: Capture) -> None:
    folders = [tmp_path / "x" / "same", tmp_path / "y" / "same"]
    for folder, model in zip(folders, ("first", "second"), strict=True):
        folder.mkdir(parents=True)
        write(folder, report(replace(row(), model=model), command=f"kvquant ppl --model {model}"))
    words = [str(folder) for folder in (*folders, folders[0])]
    assert main(["report", *words]) == 2
    assert capsys.readouterr().err.startswith("kvquant: --out: missing; allowed: ")
    assert main(["report", *words, "--out", str(tmp_path / "both.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'both.html'}\n"
    text = (tmp_path / "both.html").read_text()
    page = Page(text)
    assert "KV-cache compression: first, second" in page.text
    assert len(page.tables) == 2
    for folder, model in zip(folders, ("first", "second"), strict=True):
        assert text.count(f"<h2>{model}</h2>") == 1
        assert f"How {folder} was made" in page.text
        assert f"kvquant ppl --model {model}" in page.text
    kinds = ("bytes", "ppl", "kl")
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"both-group{n}-{kind}.png" for n in (1, 2) for kind in kinds
    }


def test_a_page_replaces_its_like_and_nothing_else(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path, report(row(**NESTED)))
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report-needles-2048.png").exists()
    assert GENERATOR in (tmp_path / "report.html").read_text()
    (tmp_path / "report-of-mine.png").touch()
    copied = (tmp_path / "report.html").read_text()
    write(tmp_path, report(row()))
    assert [path.name for path in tmp_path.glob("report*")] == ["report-of-mine.png"]  # it was of other rows
    (tmp_path / "report.html").write_text(copied)
    assert main(["report", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("report*")} == {
        *("report.html", "report-of-mine.png", "report-bytes.png", "report-ppl.png", "report-kl.png")
    }
    (tmp_path / "report.html").write_text("mine")
    (tmp_path / "other-kl.png").touch()
    for out, named in (("report.html", "report.html"), ("other.html", "other-kl.png")):
        capsys.readouterr()
        assert main(["report", str(tmp_path), "--out", str(tmp_path / out)]) == 2
        assert f"{named}: not of an earlier `kvquant report`" in capsys.readouterr().err
    assert (tmp_path / "report.html").read_text() == "mine"


def test_places_that_cannot_be_written(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, report(row()))
    (tmp_path / "folder.html").mkdir()
    for out, says in (
        ("rows.json", "allowed: a file ending in .html"),
        ("folder.html", "allowed: a file ending in .html"),
        ("README.md/page.html", "allowed: a folder I can write to"),
    ):
        assert main(["report", str(tmp_path), "--out", str(tmp_path / out)]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"kvquant: --out: {tmp_path}")
        assert says in err
        assert len(err.splitlines()) == 1
    for folder in (tmp_path / "none", tmp_path / "README.md"):
        assert main(["report", str(folder)]) == 2
        assert "allowed: folders that `kvquant ppl --out` wrote" in capsys.readouterr().err
        assert not (tmp_path / "none").exists()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("report.html: No space left on device\n")
    assert not list(tmp_path.glob("report*"))


def test_help_shows_an_example(capsys: Capture) -> None:
    assert main(["report", "--help"]) == 0
    assert "kvquant report results-a results-b --out both.html" in capsys.readouterr().out
    assert main(["report"]) == 2
    assert "DIR" in capsys.readouterr().err
