"""What all benches share: rows, turns, the guard against busy machines, the machine's limits."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from rich.console import Console

from kvquant_eval.bench import load, machine, peak
from kvquant_eval.bench.load import LoadGuard, Reading, read_clocks
from kvquant_eval.bench.machine import Reader, cache_bytes, check_memory
from kvquant_eval.bench.rows import BenchRow, Case, Outcome, Result, best_of, compare, take_turns
from kvquant_eval.display import print_bench
from kvquant_eval.errors import InputError

COLUMNS = [
    *("bench", "case", "subject", "ms_median", "baseline", "baseline_ms_median", "ratio"),
    *("bytes_moved", "bandwidth_fraction", "peak_bytes", "value", "detail"),
]


def test_subjects_take_turns_and_every_other_round_runs_backwards():
    calls, ticks = [], []

    def subject(name):
        return lambda: calls.append(name) or [len(calls), len(calls)]

    seconds = take_turns({name: subject(name) for name in "abc"}, 3, lambda *bounds: ticks.append(bounds))
    assert "".join(calls) == "abccbaabc"
    assert seconds == {"a": [1, 1, 6, 6, 7, 7], "b": [2, 2, 5, 5, 8, 8], "c": [3, 3, 4, 4, 9, 9]}
    assert ticks == [(0, 1)] * 9


def test_a_row_for_each_baseline_with_ratios_of_medians():
    results = {
        "fast": Result((0.001, 0.009, 0.002), bytes_moved=5, detail="first"),
        "slow": Result((0.003, 0.005)),
        "base": Result((0.004,)),
        "broken": Result(detail="no such package"),
    }
    rows = list(compare("decode", 64, results, ["base", "slow"]))
    assert [(row.subject, row.baseline, row.ms_median, row.ratio) for row in rows] == [
        ("fast", "base", 2.0, 0.5),
        ("fast", "slow", 2.0, 0.5),
        ("slow", "base", 4.0, 1.0),
        ("base", "slow", 4.0, 1.0),
        ("broken", "base", None, None),
        ("broken", "slow", None, None),
    ]
    assert list(rows[0].as_dict()) == COLUMNS
    assert rows[0].detail == "first; median of 3 runs, fastest 1 ms, half within 1.5–5.5"
    assert rows[-1] == BenchRow("decode", 64, "broken", None, "slow", 4.0, None, detail="no such package")


def test_the_best_of_several_names_the_others():
    best = best_of({"a": Result((0.003,)), "b": Result((0.001, 0.002, 0.009), detail="x"), "c": Result((0.004,))})
    assert best.ms == 2.0
    assert best.detail == "x; b (slower: a 3 ms, c 4 ms)"
    assert best_of({"only": Result((1.0,))}).detail == "only"


@pytest.mark.parametrize(
    ("before", "during", "note"),
    [
        (0.0, 0.0, ""),
        (0.3, 0.3, ""),  # of four cores
        (1.5, 0.0, "before the first run other programs took 1.5 of its 4 cores"),
        (0.0, 2.5, "during the runs other programs took 2.5 of its 4 cores"),
        (4.0, 0.5, "during the runs other programs took 0.5 of its 4 cores"),
    ],
)
def test_a_busy_machine_is_told_once_and_marks_results(monkeypatch, before, during, note):
    told = []
    clocks = iter(
        [
            Reading(10.0, 100.0, 20.0),
            Reading(11.0, 101.0 + before, 21.0),  # this process takes one core, others so many
            Reading(21.0, 131.0 + before + 10 * during, 51.0),  # and three while it measures
        ]
    )
    monkeypatch.setattr(load, "read_clocks", lambda: next(clocks))
    monkeypatch.setattr(load.psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(load, "_LOOK_SECONDS", 0.0)
    with LoadGuard(told.append) as guard:
        pass
    assert guard.note == (f"a busy machine: {note}" if note else "")
    assert len(told) == bool(note)
    assert all(line.startswith("kvquant: warning: a busy machine: ") and "\n" not in line for line in told)
    assert guard.marked({"x": Result(detail="d")})["x"].detail == "; ".join(filter(None, ["d", guard.note]))


def test_clocks_count_this_process_into_the_machine():
    first = read_clocks()
    while read_clocks().own - first.own < 0.03:
        torch.ones(1000).sum()
    last = read_clocks()
    assert last.machine - first.machine >= last.own - first.own - 0.03
    assert last.wall > first.wall


def test_last_level_caches_are_counted_once(small_caches, tmp_path, monkeypatch):
    assert cache_bytes() == small_caches
    (tmp_path / "cpus" / "cpu2" / "cache" / "index1" / "shared_cpu_list").write_text("2\n")
    assert cache_bytes() == 2 * small_caches  # two clusters of cores
    monkeypatch.setattr(machine, "_CPUS", tmp_path / "nowhere")
    assert cache_bytes() == 32 << 20


def test_the_fastest_reader_reads_what_no_cache_holds(small_caches):
    reader = Reader.fastest()
    assert reader.buffer.nbytes == 8 * small_caches
    case = reader.case(64, [0.5, 2.0, 1.0], loaded=True)
    assert case.read_gb_per_second == pytest.approx(reader.buffer.nbytes / 1e9, rel=1e-3)
    assert (case.case, case.loaded, case.cache_bytes) == (64, True, small_caches)


def test_what_does_not_fit_is_refused():
    check_memory("--tokens", "1", 1)
    with pytest.raises(InputError, match=r"--tokens: 7 needs about \d+\.\d GiB of memory, .* are free; allowed: "):
        check_memory("--tokens", "7", 1 << 60)


@pytest.mark.skipif(sys.platform != "linux", reason="told by Linux only")
def test_the_peak_of_a_call_counts_what_it_frees_again():
    def call():
        torch.ones(16 << 20, dtype=torch.uint8)  # freed at once
        return torch.ones(24 << 20, dtype=torch.uint8)

    for _ in range(3):  # what the allocator keeps from the last call hides nothing
        assert 23 << 20 <= peak.extra_peak(call) < 41 << 20
    assert peak.extra_peak(lambda: None) < 1 << 20


def test_without_linux_there_is_no_peak(monkeypatch, tmp_path):
    monkeypatch.setattr(peak, "_SELF", tmp_path / "nowhere")
    assert peak.extra_peak(lambda: None) is None


def test_the_least_peak_of_a_few_calls():
    peaks = iter([7, 5, 9, 1])
    assert peak.least(lambda: next(peaks)) == 5
    assert peak.least(lambda: None) is None


def test_slow_calls_are_measured_once(monkeypatch):
    monkeypatch.setattr(peak, "_PEAK_SECONDS", 0.0)
    peaks = iter([7, 5, 9])
    assert peak.least(lambda: next(peaks)) == 7


def test_long_times_and_names_fit_a_narrow_terminal():
    results = {
        "shallow-fp16-deep-int4 (sealing)": Result((45.6789,), 1 << 30, 0.5, 1 << 30, 12345.6),
        "DynamicCache": Result((0.0567891,)),
        "best dense": Result((0.1,)),
        "broken": Result(detail="[red]why"),
    }
    rows = list(compare("decode", 1 << 15, results, ["DynamicCache", "best dense"]))
    stream = io.StringIO()
    print_bench(Console(file=stream, width=80), Outcome(rows, [Case(1 << 15, True, 12.34)]))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "32K tokens, read bandwidth 12.3 GB/s, on a busy machine"
    assert lines[1] == "÷ Dynamic ÷ best MiB of read peak ms for"
    assert lines[3] == "shallow-fp16-deep-int4 45679 804.360 456.789 1024.0 50% 1024.0 12346"
    assert lines[4:6] == ["(sealing)", "DynamicCache 56.79 – 0.568 – – – –"]
    assert "broken: [red]why" in text
