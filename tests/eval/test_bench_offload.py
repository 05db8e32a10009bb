"""`kvquant bench offload` on tiny models: where blocks lie, what steps bring to the device, rows and refusals."""

from __future__ import annotations

import json

import pytest

from kvquant_eval.bench.decode import STOCK
from kvquant_eval.bench.offload import OffloadBench, OffloadOptions
from kvquant_eval.cli import run
from tests.models import tiny

from .test_bench import COLUMNS
from .test_bench_decode import quiet
from .tiny import small_policy

INT4 = small_policy("int4")
RECORD = 448  # bytes of a block of 8 tokens: codes of two heads × 16 channels, scales by channel and by token
LAYERS, DENSE = 4, 2 * 2 * 16 * 4  # of a token of a layer


def bench(model, context=200, device=0.25, budget=None, disk=0.0, steps=1, repeats=1, policy=INT4):
    options = OffloadOptions("", "", "", device, None, disk, None, "float32", steps, repeats)
    return OffloadBench(model, policy, context, options, budget)


def found(outcome, baseline=STOCK):
    return {row.subject: row for row in outcome.rows if row.baseline == baseline}


def test_where_blocks_lie(small_caches, llama, tmp_path):
    case = bench(llama, disk=0.5)
    ways = {name: make() for name, make in case._makers(tmp_path)}
    blocks = LAYERS * (200 - 8) // 8
    assert case.compressed == blocks * RECORD
    for name, shares in {
        "int4, 25% on device": {"device": 24, "host": 72},
        "int4, 50% on disk": {"device": 24, "host": 24, "disk": 48},
        "int4, when: evict": {"device": 96, "host": 0},
    }.items():
        held = {tier.name: tier.payloads for tier in ways[name].store.stats().tiers}
        assert held == pytest.approx(shares, abs=3)  # blocks that come together lie together
        assert sum(held.values()) == blocks
    for way in ways.values():
        way.close()


def test_rows(small_caches, llama, tmp_path):
    case, ticks = bench(llama, disk=0.5), []
    outcome = case.run(tmp_path, quiet, lambda *bounds: ticks.append(bounds))
    assert len(ticks) == case.ticks
    names = [f"int4{rest}" for rest in ("", ", 25% on device", ", 50% on disk")]
    names.append("int4, when: evict")
    rows = found(outcome)
    assert list(rows) == names
    assert list(found(outcome, "int4")) == [STOCK, *names[1:]]
    dense = found(outcome, "int4")[STOCK]
    assert dense.value == 1
    assert dense.peak_bytes == LAYERS * DENSE * (200 + 4)  # grown by two turns of two steps
    for row in outcome.rows:
        assert (row.bench, row.case) == ("offload", 200)
        assert row.ratio == row.ms_median / row.baseline_ms_median
        assert row.value == row.peak_bytes / dense.peak_bytes
        assert f"{row.value:.3f} of DynamicCache's" in row.detail
    for name in names[1:3]:
        assert 0 < row_moved(rows[name]) < case.compressed
        assert "prefetches in a step: " in rows[name].detail
    assert row_moved(rows[names[1]]) == case.compressed - 24 * RECORD
    assert " of the longer of a resident step, " in rows[names[2]].detail
    evict = rows[names[3]]
    assert evict.bytes_moved == 0
    assert "96 of 96 blocks are as they were" in evict.detail
    assert evict.value >= 1


def row_moved(row):
    assert isinstance(row.bytes_moved, int)
    return row.bytes_moved


def test_what_the_device_holds_does_not_grow_with_the_context(small_caches, llama):
    held = {}
    for context in (200, 800):
        rows = found(bench(llama, context, budget=20 * RECORD).run(None, quiet))
        held[context] = {name: row.peak_bytes for name, row in rows.items()}
    name = "int4, 8.8 KiB on device"
    assert held[200][name] == held[800][name]
    assert held[800]["int4"] > 2 * held[200]["int4"]


def test_steps_seal_nothing_and_all_caches_grow_alike(small_caches, llama, tmp_path):
    case = bench(llama, context=205, disk=0.5, steps=2)
    ways = {name: make() for name, make in case._makers(tmp_path)}
    assert case.rows.width == 208  # of which six steps seal nothing
    for way in ways.values():
        blocks = way.stepper.cache.stats().blocks if way.store else 0
        for _ in range(2):
            assert len(way.run()) == 2
        assert way.stepper.cache.get_seq_length() == 208 + 6
        if way.store:
            assert way.stepper.cache.stats().blocks == blocks
            assert not way.store.check()
        way.close()


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3", "bloom", "qwen3_next"])
def test_families_of_models(small_caches, family, tmp_path):
    rows = found(bench(tiny(family), 100, disk=0.5).run(tmp_path, quiet))
    assert len(rows) == 4
    assert all(row.ratio > 0 for row in rows.values())


def test_command_prints_json_or_a_table(small_caches, model_folder, policy_file, tmp_path, capsys):
    arguments = ["bench", "offload", "--model", str(model_folder), "--policy", str(policy_file("int4"))]
    arguments += ["--contexts", "300,100", "--repeats", "1", "--steps", "1", "--dtype", "float32"]
    disk = tmp_path / "disk"
    disk.mkdir()
    assert run([*arguments, "--json", "--disk-share", ".5", "--path", str(disk)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [case["case"] for case in document["cases"]] == [100, 300]
    assert [list(row) for row in document["rows"]] == [COLUMNS] * 16
    assert not list(disk.iterdir())
    assert run([*arguments, "--device-budget", "8K"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("100 tokens")
    assert any(line.startswith("int4-small, 8.0 KiB on device") for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--contexts", "900000M"], "--contexts: 900000M needs about "),
        (["--contexts", "200"], "--contexts: of 200 int4 compresses none; allowed: from 256"),
        (["--policy", "int7"], "'int7' is neither a file nor a preset"),
        (["--disk-share", ".5"], "--disk-share and --path go together"),
        (["--path", "."], "--disk-share and --path go together"),
        (["--disk-share", ".9", "--path", "."], "--disk-share: 0.9; allowed: up to 0.75"),
        (["--device-share", ".5", "--device-budget", "1M"], "--device-share 0.5, --device-budget 1M; allowed: one"),
        (["--device-share", "2"], "'--device-share': Input should be"),
        (["--device-budget", "few"], "--device-budget: 'few' is not a number of bytes"),
        (["--device-budget", "1K"], "device_budget: 1024 bytes can't hold one block"),
        (["--disk-share", ".5", "--path", "./nowhere"], "nowhere: No such file or directory; allowed: "),
        (["--steps", "20", "--repeats", "6"], "--steps, --repeats: 20, 6; allowed: (steps + 1) × (repeats + 1) up to"),
    ],
)
def test_bad_input(model_folder, capsys, arguments, complaint):
    assert run(["bench", "offload", "--model", str(model_folder), *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert complaint in err
    assert "Traceback" not in err
