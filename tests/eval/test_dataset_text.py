"""Datasets as texts: every part of their names, what is read of them, and one line for whatever is wrong."""

from __future__ import annotations

import gc
import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import HfApi

from kvquant_eval import hub, texts
from kvquant_eval.__main__ import main
from kvquant_eval.dataset_text import Reference, names_dataset, parse
from kvquant_eval.errors import InputError
from kvquant_eval.texts import find_text

from .tiny import SAMPLE

ROWS = [" = Title = \n", "", "Ünïcode, 日本", "two\nlines"]
CONTENT = " = Title = \n\nÜnïcode, 日本\ntwo\nlines\n"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library's cache, of this test alone, and its settings as they were afterwards."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    verbosity = datasets.logging.get_verbosity()
    yield cache
    datasets.logging.set_verbosity(verbosity)
    datasets.enable_progress_bars()


def write(path: Path, rows: Sequence[Any] = ROWS, **columns: Sequence[Any]) -> Path:
    """A data file of the kind its suffix says, with ``rows`` in its column ``text``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table: dict[str, Any] = {"text": list(rows) or pa.array([], pa.string())} | columns
    if path.suffix == ".parquet":
        pq.write_table(pa.table(table), path)
    elif path.suffix == ".csv":
        pd.DataFrame(table).to_csv(path, index=False)
    elif path.suffix == ".arrow":
        arrow = pa.table(table)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, arrow.schema) as writer:
            writer.write_table(arrow)
    else:
        lines = [json.dumps(dict(zip(table, row, strict=True))) for row in zip(*table.values(), strict=True)]
        data = "".join(line + "\n" for line in lines).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def refused(value: str, *, starts: str | None = None) -> str:
    with pytest.raises(InputError) as caught:
        find_text([value])
    message = str(caught.value)
    assert message.startswith(f"--text: {value.partition(':')[0] if starts is None else starts}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json", ".csv", ".arrow", ".jsonl.gz", ".PARQUET"])
def test_data_files_are_read_row_by_row(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"set{suffix}"
    rows = [row or " " for row in ROWS]  # an empty cell of CSV is null
    written = write(tmp_path / f"set{suffix.lower()}", rows, id=range(len(rows)))
    written.rename(path)
    text = find_text([str(path)])
    assert text.content == CONTENT.replace("\n\n", "\n \n")
    assert text.sha256 == hashlib.sha256(text.content.encode()).hexdigest()
    assert text.name == f"{path} (split train, column text; each row ends with a newline)"


def test_a_json_array_is_a_dataset_too(tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    path.write_text(json.dumps([{"text": row} for row in ROWS], indent=1))
    assert find_text([str(path)]).content == CONTENT


def test_a_text_file_is_a_dataset_of_lines_if_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("one\n\ntwo")
    assert find_text([f"{path}::train:text"]).content == "one\n\ntwo\n"


def test_names_with_signs_of_patterns_are_taken_as_they_are(tmp_path: Path) -> None:
    write(tmp_path / "a1.parquet", ["other"])
    for name in ("a[1].parquet", "a*.parquet", "日本 #%20.parquet", "a,b.parquet"):
        write(tmp_path / name, ["this"])
        assert find_text([str(tmp_path / name)]).content == "this\n"


def test_a_folder_has_splits_and_the_default_is_the_one_to_test_on(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    for split in ("train", "validation", "test"):
        write(folder / f"{split}.jsonl", [split])
    assert find_text([f"{folder}::train"]).content == "train\n"
    assert find_text([f"{folder}:default:validation:text"]).content == "validation\n"
    text = find_text([str(folder)])
    assert text.content == "test\n"
    assert text.name == f"{folder} (config default, split test, column text; each row ends with a newline)"
    for last, then in (("test", "validation"), ("validation", "train")):
        (folder / f"{last}.jsonl").unlink()
        assert find_text([str(folder)]).content == f"{then}\n"


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """A folder with two configs; the second has two splits of other names than usual, and other columns."""
    folder = tmp_path / "configs"
    write(folder / "a.parquet", ["first"])
    for part in ("b", "c"):
        pq.write_table(pa.table({"id": [1], "title": [f"title {part}"], "body": [part]}), folder / f"{part}.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: one\n  data_files: a.parquet\n- config_name: two\n  data_files:\n"
        "  - split: left\n    path: b.parquet\n  - split: right\n    path: c.parquet\n---\n"
    )
    return folder


def test_configs_splits_and_columns_are_chosen_by_name(configs: Path) -> None:
    assert find_text([f"{configs}:one"]).content == "first\n"
    assert "(config two, split right, column body; " in find_text([f"{configs}:two:right:body"]).name
    assert find_text([f"{configs}:two:right:body"]).content == "c\n"


def test_choices_that_are_not_there_are_answered_with_those_that_are(configs: Path) -> None:
    assert "a config is needed; allowed: one, two" in refused(str(configs))
    assert "no config 'three'; allowed: one, two" in refused(f"{configs}:three")
    assert "a split is needed; allowed: left, right" in refused(f"{configs}:two")
    assert "no split 'test'; allowed: left, right" in refused(f"{configs}:two:test")
    assert "a column is needed; allowed: title, body" in refused(f"{configs}:two:left")
    assert "column 'text' is not there; allowed: title, body" in refused(f"{configs}:two:left:text")
    assert "column 'id' holds int64, not strings; allowed: title, body" in refused(f"{configs}:two:left:id")
    assert "a single file has no configs" in refused(f"{configs / 'a.parquet'}:one")


def test_a_long_list_of_choices_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "wide.parquet"
    pq.write_table(pa.table({f"c{index}": ["x"] for index in range(500)}), path)
    assert refused(str(path)).endswith("c18, c19 and 480 more")


def test_the_only_column_of_strings_needs_no_name(tmp_path: Path) -> None:
    path = tmp_path / "set.parquet"
    pq.write_table(pa.table({"id": [1, 2], "story": ["a", "b"]}), path)
    assert find_text([str(path)]).content == "a\nb\n"
    pq.write_table(pa.table({"id": [1, 2], "tags": [["a"], ["b"]]}), path)
    assert "no column holds strings; there are: id (int64), tags (" in refused(str(path))


def test_only_the_beginning_of_a_huge_dataset_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_LEAST_CHARACTERS", 300)
    folder = tmp_path / "huge"
    write(folder / "train-00000-of-00002.jsonl", ["x" * 99] * 20)
    (folder / "train-00001-of-00002.jsonl").write_text("damaged")
    assert find_text([str(folder)]).content == ("x" * 99 + "\n") * 3
    assert find_text([str(folder)], tokens=20).content == ("x" * 99 + "\n") * 12 + "x" * 80  # 64 characters each
    assert len(find_text([str(folder)], tokens=31).content) == 31 * 64
    with pytest.raises(InputError, match="can't be read"):
        find_text([str(folder)], tokens=32)


def test_leaving_most_of_a_parquet_file_unread_does_not_abort_the_process(tmp_path: Path) -> None:
    path = tmp_path / "long.parquet"
    pq.write_table(pa.table({"text": [f"{row} " * 200 for row in range(50_000)]}), path, row_group_size=1000)
    code = f"from kvquant_eval.texts import find_text; find_text([{str(path)!r}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_files_and_datasets_are_joined_in_the_order_given(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("A book.")
    data = write(tmp_path / "set.parquet", ["row"])
    text = find_text([f"{data},{book}", f"{data}::train"])
    assert text.content == "row\nA book.row\n"
    assert text.name.startswith(f"{data} (split train")
    assert f", {book}, {data} (" in text.name
    assert text.sha256 == hashlib.sha256(text.content.encode()).hexdigest()


def test_a_report_says_which_dataset_was_read(
    tmp_path: Path, model_folder: Path, policy_file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "set.parquet", [SAMPLE])
    words = ["ppl", "--model", str(model_folder), "--policies", str(policy_file("int8")), "--contexts", "128"]
    assert main([*words, "--text", str(path), "--out", str(tmp_path / "out"), "--chunk", "8"]) == 0
    assert f"{path} (split train, column text; each row" in (tmp_path / "out" / "README.md").read_text()
    assert "Generating" not in capsys.readouterr().err  # of the library's bars
    assert main([*words, "--text", f"{path}::test"]) == 2
    assert capsys.readouterr().err == f"kvquant: --text: {path}: no split 'test'; allowed: train\n"


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "empty"),
        (["", " "], "empty"),
        (["a", "b\0c"], "a binary file (NUL at character 3)"),
        (["a", None, "b"], "column 'text' is null in row 1; allowed: strings"),
        ([1, 2], "no column holds strings; there are: text (int64)"),
        ([None, None], "no column holds strings; there are: text (null)"),
    ],
)
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_rows_that_are_no_text_are_refused(tmp_path: Path, suffix: str, rows: list[Any], says: str) -> None:
    assert says in refused(str(write(tmp_path / f"set{suffix}", rows)))


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")  # of datasets
def test_a_column_that_stops_holding_strings_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    write(folder / "train-0.csv", ["a", "b"])
    write(folder / "train-1.csv", [1, 2])
    assert "column 'text' holds int64 in row 2; allowed: strings" in refused(str(folder))
    gc.collect()  # the warning above is to come now


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    for name, data in {
        "a.parquet": b"junk",
        "b.jsonl": b'{"text": "\xff"}\n',
        "c.jsonl": b'{"text": "\\ud800"}\n',
    }.items():
        (tmp_path / name).write_bytes(data)
        assert "can't be read: " in refused(str(tmp_path / name))


def test_what_holds_no_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no data files there" in refused(str(tmp_path / "empty"))
    assert "not a file of data" in refused("/dev/zero::train")
    os.mkfifo(tmp_path / "pipe.parquet")
    assert "not a file of data" in refused(str(tmp_path / "pipe.parquet"))
    datasets.Dataset.from_dict({"text": ROWS}).save_to_disk(tmp_path / "saved")
    assert "written by save_to_disk" in refused(str(tmp_path / "saved"))
    assert find_text([str(next((tmp_path / "saved").glob("*.arrow")))]).content == CONTENT


def test_programs_are_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    program = tmp_path / "loader" / "loader.py"
    write(program.parent / "train.jsonl", ["row"])
    program.write_text(f"open({str(ran)!r}, 'w').close()")
    assert "it is a program, which is never run; allowed: data files" in refused(str(program.parent))
    program.rename(program.with_name("other.py"))
    assert find_text([str(program.parent)]).content == "row\n"
    assert not ran.exists()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (":::", "names no dataset; allowed: name[@revision][:config][:split][:column]"),
        ("::train", "names no dataset"),
        ("a:b:c:d:e", "names no dataset"),
        ("https://example.com/set.parquet", "addresses are not read"),
    ],
)
def test_forms_that_name_nothing_are_refused_whole(value: str, says: str) -> None:
    assert says in refused(value, starts=value)


@pytest.mark.parametrize(
    "value", ["none.parquet::train", "./none:a", "~/none/here:a", "a/b/c:x", "book.txt.gz::train"]
)
def test_paths_that_lead_nowhere_are_not_asked_of_the_hub(value: str) -> None:
    assert refused(value).endswith("no such file or folder")


def test_what_is_a_dataset_and_what_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("book.txt", "a:b", "notes", "set.csv", "json"):
        Path(name).touch()
    Path("folder").mkdir()
    for value in ("owner/name", "owner/name@v1", "owner/na.me-1", "name:config", "folder", "folder::train", "set.csv"):
        assert names_dataset(value), value
    for value in ("book.txt", "a:b", "notes", "json", "nothing", "none.csv", "owner/none.txt", "a/b/c", "./a", "日本"):
        assert not names_dataset(value), value


def test_names_are_split_into_their_parts() -> None:
    assert parse("owner/name@refs/convert/parquet:c: s :t") == Reference(
        "owner/name", "refs/convert/parquet", "c", "s", "t", local=False
    )
    assert parse("name::") == Reference("name", "", "", "", "", local=False)


@pytest.fixture
def answer(hub: dict[str, Any]) -> dict[str, Any]:
    """What the hub says of every dataset."""
    hub["code"] = "RepoNotFound"
    return hub


def test_what_the_hub_denies(answer: dict[str, Any]) -> None:
    assert "the hub has no such dataset, or shows you none" in refused("nobody/nothing")
    assert "the hub has no such dataset" in refused("two words:train")
    answer["code"] = "RevisionNotFound"
    with pytest.raises(InputError, match="--text: nobody/nothing: .* the hub has no revision 'v9' of such a dataset"):
        find_text(["nobody/nothing@v9"])
    answer.update(status=403, code="GatedRepo")
    assert "a gated dataset; accept its terms on its page of the hub, then hf auth login" in refused("owner/gated:a")


@pytest.mark.parametrize("way", ["offline", "refusing", "failing"])
def test_without_the_hub_the_cache_is_read_at_once(
    way: str, answer: dict[str, Any], own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer["status"] = 503
    if way == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    elif way == "refusing":
        monkeypatch.setattr(hub, "HfApi", partial(HfApi, endpoint="http://127.0.0.1:9"))
    assert "the hub can't be reached, and the local cache has no such dataset" in refused("owner/name")
    assert "give a file or folder, or fill the cache" in refused("owner/name:config")
    write(tmp_path / "name" / "test.jsonl")
    datasets.load_dataset(str(tmp_path / "name"), cache_dir=own_cache)
    (own_cache / "name").rename(own_cache / "owner___name")
    text = find_text(["owner/name"])
    assert text.content == CONTENT
    revision = text.name.partition("@")[2].partition(" ")[0]
    assert f"{revision} (config default, split test, column text; " in text.name
    assert find_text([f"owner/name@{revision}:default:test:text"]).content == CONTENT
    assert f"the local cache has revision {revision} only" in refused("owner/name@v9", starts="owner/name")
    assert "config 'other'" in refused("owner/name:other")


class Hub:
    """Stands for a hub that has every dataset."""

    def dataset_info(self, name: str, **options: Any) -> Any:
        return type("Info", (), {"id": f"owner/{name.split('/')[-1]}", "sha": "f00d"})


def test_what_the_hub_has_is_loaded_at_the_revision_it_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = datasets.load_dataset_builder
    asked: list[Any] = []

    def loading(path: str, name: str | None, **options: Any) -> Any:
        asked.append((path, name, options))
        if path == "owner/old":
            raise RuntimeError("Dataset scripts are no longer supported, but found old.py")
        if path == "owner/shut":
            raise DatasetNotFoundError("Dataset 'owner/shut' is a gated dataset on the Hub.")
        builder = load(str(tmp_path / "set"))
        builder.hash = options["revision"]
        return builder

    write(tmp_path / "set" / "test.jsonl")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "HfApi", Hub)
    monkeypatch.setattr(datasets, "load_dataset_builder", loading)
    text = find_text(["name@main:default"])
    assert asked == [("owner/name", "default", {"revision": "f00d"})]
    assert text.name.startswith("name@f00d (config default, split test, column text; ")
    assert text.content == CONTENT
    assert "its Parquet version, where the hub made one, is old@refs/convert/parquet" in refused("old:x")
    assert "a gated dataset" in refused("owner/shut")


def test_a_missing_library_is_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "set.jsonl")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'kvquant[eval]'" in refused(str(path), starts="datasets need their library")
