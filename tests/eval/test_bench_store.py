"""`kvquant bench store`: turns move what they say, files go, rows and refusals."""

from __future__ import annotations

import json
import os

import pytest

from kvquant import BlockKey
from kvquant_eval.bench import disk
from kvquant_eval.bench.disk import forget, payload_files, scratch
from kvquant_eval.bench.store import COLD, LAYER, WARM, WRITE, StoreBench, _runs
from kvquant_eval.cli import run
from kvquant_eval.errors import InputError

from .test_bench import COLUMNS

BLOCK = 5 * 1024 - 12  # no multiple of what places are


def test_runs_are_consecutive_blocks_of_a_layer():
    runs = _runs(2 * LAYER + 5, 29)
    assert [len(run) for run in runs] == [29, 29, 6, 29, 29, 6, 5]
    assert runs[0][:2] == [BlockKey(0, 0, 0), BlockKey(0, 0, 1)]
    assert runs[-1][-1] == BlockKey(0, 2, 4)


def test_both_hold_what_was_written(tmp_path):
    with StoreBench(tmp_path, BLOCK, 70) as bench:
        for _ in range(2):  # room is given back and taken again
            for name, move in ((WRITE, bench._put), (WRITE, bench._pwrite)):
                assert bench._turn(name, move)[0] > 0
        assert len(bench._store) == 70
        assert (tmp_path / "plain").stat().st_size == 70 * BLOCK
        for move in (bench._get, bench._pread):
            bench._target.zero_()
            bench._turn(COLD, move)
            assert bench._target[:6].equal(bench._source[:6])  # the last run's
        assert not bench._store.stats().faults


def test_rows(small_caches, tmp_path, capsys):
    arguments = ["bench", "store", "--path", str(tmp_path), "--block", "20K", "--total", "3M", "--repeats", "2"]
    assert run([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["subject"] for row in document["rows"]] == [WRITE, WARM, COLD]
    for row in document["rows"]:
        assert list(row) == COLUMNS
        assert (row["bench"], row["case"], row["baseline"]) == ("store", 20 << 10, f"plain {row['subject']}")
        assert row["bytes_moved"] == 153 * (20 << 10)
        assert row["value"] == pytest.approx(row["bytes_moved"] / row["ms_median"] / 1e6)
        assert row["ratio"] == row["ms_median"] / row["baseline_ms_median"]
        assert f"{1 / row['ratio']:.2f} of the plain file's" in row["detail"]
    assert [path.name for path in tmp_path.iterdir()] == ["cpus"]  # small_caches'
    assert run(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Payloads of 20 KiB")
    assert lines[2].split() == ["subject", "ms", "ratio", "moved", "GB/s"]
    names = [*(f"plain {name}" for name in (WRITE, WARM, COLD)), WRITE, WARM, COLD]
    assert all(line.startswith(f"{name} ") for line, name in zip(lines[3:9], names, strict=True))


def test_what_was_written_goes_even_when_it_fails(tmp_path, monkeypatch, capsys):
    def broken(self, *rest):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StoreBench, "_pwrite", broken)
    assert run(["bench", "store", "--path", str(tmp_path), "--total", "1M"]) == 2
    assert "No space left on device; allowed: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_files_are_dropped_from_memory(tmp_path):
    file = tmp_path / "a.slab"
    file.write_bytes(os.urandom(1 << 20))
    (tmp_path / "index.db").write_bytes(b"rows")
    assert payload_files(tmp_path) == [file]
    assert isinstance(forget(file, 1 << 20), bool)  # a file system in memory keeps it
    assert len(file.read_bytes()) == 1 << 20


def test_a_folder_without_room_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"--path: .* are needed, .* are free"), scratch("--path", tmp_path, 1 << 59):
        pass
    assert not list(tmp_path.iterdir())


def test_a_system_that_drops_nothing_is_told_of(small_caches, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(disk, "is_cached", lambda handle, at: True)
    arguments = ["bench", "store", "--path", str(tmp_path), "--block", "20K", "--total", "1M", "--repeats", "1"]
    assert run([*arguments, "--json"]) == 0
    details = {row["subject"]: row["detail"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert "the system kept files in memory" in details[COLD]
    assert "the system kept" not in details[WARM]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--path", "{}/nowhere"], "nowhere: No such file or directory; allowed: an existing folder I can write to"),
        (["--path", "{}/file"], "file: Not a directory; allowed: "),
        (["--path", "{}", "--total", "900000G"], "are needed, "),
        (["--path", "{}", "--total", "1K"], "--block: 140K; allowed: from 64 bytes to --total, 1K"),
        (["--path", "{}", "--block", "63"], "--block: 63; allowed: from 64 bytes"),
        (["--path", "{}", "--block", "many"], "--block: 'many' is not a number of bytes"),
        (["--path", "{}", "--total", "0"], "--total: '0' is not a number of bytes"),
        ([], "Missing option '--path'"),
    ],
)
def test_bad_input(tmp_path, capsys, arguments, complaint):
    (tmp_path / "file").write_text("")
    assert run(["bench", "store", *(word.format(tmp_path) for word in arguments)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert complaint in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
