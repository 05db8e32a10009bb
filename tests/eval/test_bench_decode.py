"""`kvquant bench decode` and `peers` on tiny models: histories, steps that seal and others, rows, refusals."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import DynamicCache

from kvquant import KVQuantCache
from kvquant_eval.bench import decode, peers, steps
from kvquant_eval.bench.decode import FLOOR, STOCK, DecodeBench
from kvquant_eval.bench.history import Decoder, Rows, held_bytes, plain_rows, seals
from kvquant_eval.bench.peers import PEERS, Peer
from kvquant_eval.bench.rows import DENSE, Result
from kvquant_eval.cli import run
from kvquant_eval.exact import exact_cache
from tests.models import tiny

from .test_bench import COLUMNS
from .tiny import small_policy, tiny_gpt2

INT4 = small_policy("int4")


def quiet(line):
    """Nobody listens."""


def none(bench):
    """No more subjects."""
    return iter(())


@pytest.mark.parametrize(("recent", "length"), [(8, 200), (5, 90), (0, 40), (24, 60)])
def test_the_lengths_at_which_a_row_seals(llama, recent, length):
    policy = small_policy("int4", recent_tokens=recent)
    cache, state = KVQuantCache.for_model(llama, policy), torch.randn(1, 2, 1, 16)
    grown = []
    for total in range(1, length + 1):
        before = cache.stats().blocks
        for layer in range(4):
            cache.update(state, state, layer)
        grown.append(cache.stats().blocks > before)
        assert grown[-1] == seals(policy, total)
    assert any(grown)


def test_rows_of_a_batch_differ_around_the_context():
    assert Rows.around(1000, 1).lengths == (1000,)
    rows = Rows.around(1000, 4)
    assert rows.lengths == (750, 917, 1083, 1250)
    mask = rows.mask(1251)
    assert mask.sum(dim=1).tolist() == [751, 918, 1084, 1251]
    assert torch.equal(mask.diff(dim=1) >= 0, torch.ones(4, 1250, dtype=torch.bool))  # padding on the left
    assert rows.positions(1250, 1251).flatten().tolist() == list(rows.lengths)
    assert Rows.around(1, 3).lengths == (1, 1, 1)


@pytest.mark.parametrize("lengths", [(100,), (70, 41, 100)])
def test_a_filled_cache_is_one_that_has_read_so_much(llama, lengths, monkeypatch):
    monkeypatch.setattr("kvquant_eval.bench.history.FILL_TOKENS", 32)
    rows, decoder = Rows(lengths), Decoder.of(llama, 4)
    caches = [KVQuantCache.for_model(llama, INT4), DynamicCache(config=llama.config), exact_cache(llama, 104)]
    for cache in caches:
        decoder.fill(cache, rows)
        assert cache.get_seq_length() == 100
    assert caches[0].stats().tokens == lengths
    for layer in caches[1].layers:
        assert layer.keys.std() == pytest.approx(1, abs=0.1)
    dense = caches[1].layers[0].keys.nbytes * 2 * 4
    assert held_bytes(caches[1]) == held_bytes(caches[2]) == dense
    assert held_bytes(caches[0]) == sum(map(stored, lengths))


def stored(length):
    """Bytes of a row under int4 in blocks of 8: four layers of two heads of 16 channels, float32."""
    sealed = max(0, length - 8) // 8 * 8
    raw = length - sealed + 4 * (sealed > 0)  # tail and sinks
    codes, scales = sealed * 16, sealed // 8 * 16 * 4 + sealed * 4  # per 8 keys of a channel, per value
    return 4 * 2 * (raw * 16 * 4 * 2 + codes + scales)


def test_raw_storage_takes_what_an_uncompressed_cache_takes(llama):
    decoder, rows = Decoder.of(llama, 4), Rows((203,))
    cache, plain = KVQuantCache.for_model(llama, small_policy("fp16")), DynamicCache(config=llama.config)
    for each in (cache, plain):
        decoder.fill(each, rows)
    assert held_bytes(cache) == held_bytes(plain)


@pytest.fixture
def blocks(monkeypatch):
    """Blocks that are held after each step, of caches that have any."""
    seen = []
    real = steps.Stepper._step

    def step(self, cache, done):
        seconds = real(self, cache, done)
        if isinstance(cache, KVQuantCache):
            seen.append((cache.stats().blocks, cache.get_seq_length()))
        return seconds

    monkeypatch.setattr(steps.Stepper, "_step", step)
    return seen


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("context", [95, 96, 99, 100])
def test_steps_that_seal_are_told_apart(llama, blocks, batch, context):
    bench = DecodeBench(llama, [INT4], context, batch, 3, 1)
    makers = dict(bench._makers())
    plain, sealing = makers["int4"](), makers["int4 (sealing)"]()
    for _ in range(2):  # every turn is like the first
        blocks.clear()
        assert len(plain.run()) == 3
        held, width = plain.cache.stats().blocks, plain.rows.width
        assert blocks == [(held, width + step) for step in (1, 2, 3, 4)]
        blocks.clear()
        assert len(sealing.run()) == 1
        held, width = sealing.cache.stats().blocks, sealing.rows.width
        assert blocks == [(held, width + 1), (held + batch, width + 2)]
    assert all(0 <= own - length <= 4 for own, length in zip(plain.rows.lengths, bench.rows.lengths, strict=True))
    assert all(0 <= length - own <= 9 for own, length in zip(sealing.rows.lengths, bench.rows.lengths, strict=True))


def test_a_row_too_short_to_seal_has_no_such_step(llama):
    assert "int4 (sealing)" not in dict(DecodeBench(llama, [INT4], 9, 1, 1, 1)._makers())


@pytest.mark.parametrize("batch", [1, 2])
def test_steps_leave_baselines_as_they_were(llama, batch):
    bench = DecodeBench(llama, [INT4], 60, batch, 2, 1)
    makers = dict(bench._makers())
    for name in (STOCK, "fused", "two products", "fused in parts"):
        stepper = makers[name]()
        kept = stepper.cache.layers[0].keys.clone()
        stepper.run()
        assert torch.equal(stepper.cache.layers[0].keys, kept)
    floor = makers[FLOOR]()
    floor.run()
    assert not floor.cache.get_seq_length()
    assert floor.nbytes == 0


@pytest.mark.parametrize(
    ("family", "batch"),
    [("gemma3", 1), ("gemma3", 2), ("qwen3_next", 1), ("deepseek_v3", 2), ("gpt_oss", 1), ("gemma2", 1), ("bloom", 1)],
)
def test_families_of_models(small_caches, family, batch):
    outcome = DecodeBench(tiny(family), [INT4], 40, batch, 1, 1).run("decode", none, quiet)
    assert {row.subject for row in outcome.rows} == {"int4", "int4 (sealing)", FLOOR, STOCK, DENSE}
    assert all(row.ms_median > 0 for row in outcome.rows)


def test_models_that_cannot_attend_to_codes_say_so(small_caches):
    outcome = DecodeBench(tiny("bloom"), [INT4], 40, 1, 1, 1).run("decode", none, quiet)
    assert "decoded for attention" in next(row.detail for row in outcome.rows if row.subject == "int4")


def test_no_limit_of_the_model_counts(small_caches, llama):
    for model in (tiny_gpt2(), llama):
        context = 2 * model.config.max_position_embeddings + 1
        outcome = DecodeBench(model, [INT4], context, 2, 2, 1).run("decode", none, quiet)
        assert all(row.ratio > 0 for row in outcome.rows)


def test_rows(small_caches, llama):
    ticks = []
    bench = DecodeBench(llama, [INT4, small_policy("fp16")], 100, 2, 2, 2)
    outcome = bench.run("decode", none, quiet, lambda *bounds: ticks.append(bounds))
    assert len(ticks) == bench.ticks(0)
    rows = {(row.subject, row.baseline): row for row in outcome.rows}
    subjects = ["int4", "int4 (sealing)", "fp16", "fp16 (sealing)", FLOOR, STOCK, DENSE]
    assert set(rows) == {(name, base) for name in subjects for base in (STOCK, DENSE) if name != base}
    floor = rows[FLOOR, STOCK]
    assert (floor.bytes_moved, floor.value, floor.bandwidth_fraction) == (None, None, None)
    for (name, base), row in rows.items():
        assert (row.bench, row.case) == ("decode", 100)
        assert row.ratio == row.ms_median / row.baseline_ms_median
        assert row.baseline_ms_median == rows[base, STOCK if base == DENSE else DENSE].ms_median
        assert "rows of " in row.detail or name == FLOOR
        if name != FLOOR:
            assert row.value == pytest.approx(row.ms_median - floor.ms_median, abs=1e-5)
            assert row.bytes_moved > 0
            assert row.bandwidth_fraction is None or row.value > 0
    plain = plain_rows(INT4, bench.rows, 3)
    assert rows["int4", STOCK].bytes_moved == sum(map(stored, plain.lengths))
    assert "with one in 8 that seals" in rows["int4", STOCK].detail
    assert "median of 2 runs" in rows["int4 (sealing)", STOCK].detail
    assert "median of 4 runs" in rows["int4", STOCK].detail
    assert "slower: " in rows[DENSE, STOCK].detail


def test_a_cost_within_the_noise_tells_nothing_of_bandwidth():
    floor = Result((0.010, 0.011, 0.012))
    slow, near = Result((0.031, 0.031), bytes_moved=1000), Result((0.0111, 0.0112), bytes_moved=1000)
    found = decode._above(slow, floor, 1e6)
    assert found.value == 20
    assert found.bandwidth_fraction == pytest.approx(1000 / 0.020 / 1e6)
    found = decode._above(near, floor, 1e6)
    assert found.value == pytest.approx(0.15)
    assert found.bandwidth_fraction is None


def test_peers(small_caches, llama, monkeypatch):
    def raising(model):
        raise RuntimeError("shape\nerror")

    broken, absent = Peer("broken", "fp8"), Peer("absent", "hqq", {"nbits": 4}, lambda: False, "some-package")
    monkeypatch.setattr(Peer, "make", lambda self, model: raising(model) if self is broken else real(self, model))
    monkeypatch.setattr(peers, "PEERS", (broken, absent, next(peer for peer in PEERS if peer.name == "fp8")))
    outcome = DecodeBench(llama, [INT4], 50, 1, 1, 1).run("peers", peers._subjects, quiet)
    rows = {row.subject: row for row in outcome.rows if row.baseline == STOCK}
    assert rows["absent"].detail == "not installed: pip install some-package"
    assert rows["broken"].detail == "RuntimeError: shape error"
    for name in ("absent", "broken"):
        assert (rows[name].ms_median, rows[name].ratio, rows[name].value) == (None, None, None)
        assert rows[name].baseline_ms_median > 0
    assert rows["fp8"].bench == "peers"
    assert rows["fp8"].ratio > 0
    assert rows["fp8"].bytes_moved == 50 * 4 * 2 * 2 * 16  # tokens, layers, keys and values, heads, channels


real = Peer.make


@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer.installed()], ids=lambda peer: peer.name)
def test_peers_that_are_installed(llama, peer):
    bench = DecodeBench(llama, [], 300, 2, 2, 1)
    for name, make in peers._subjects(bench):
        if name.startswith(peer.name):
            stepper = make()
            assert len(stepper.run()) == (1 if "flush" in name else 2)
            assert stepper.cache.get_seq_length() == bench.rows.width
            assert stepper.nbytes < held_bytes(filled(bench))


def filled(bench):
    cache = DynamicCache(config=bench.model.config)
    bench.decoder.fill(cache, bench.rows)
    return cache


def test_memory_is_what_caches_take(llama):
    context = 1 << 10
    needed = decode.steps_memory(llama, [INT4, small_policy("fp16")], context)
    decoder, rows = Decoder.of(llama, 4), Rows((context,))
    taken = []
    for cache in (
        DynamicCache(config=llama.config),
        *(KVQuantCache.for_model(llama, small_policy(name)) for name in ("int4", "fp16")),
    ):
        decoder.fill(cache, rows)
        taken.append(held_bytes(cache))
    expected = 3 * taken[0] + 2 * taken[1] + 2 * taken[2]
    assert expected <= needed <= 1.1 * expected


def test_command_prints_json_or_a_table(small_caches, model_folder, policy_file, capsys):
    arguments = ["bench", "decode", "--model", str(model_folder), "--policies", str(policy_file("int4"))]
    arguments += ["--contexts", "600,40", "--repeats", "1", "--steps", "1", "--dtype", "float32"]
    assert run([*arguments, "--json", "--batch", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["command"].startswith("kvquant bench decode --model")
    assert [(case["case"], type(case["loaded"])) for case in document["cases"]] == [(40, bool), (600, bool)]
    assert [list(row) for row in document["rows"]] == [COLUMNS] * 16
    assert run(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("40 tokens, read bandwidth ")
    for line, subject in zip(lines[3:8], ["int4-small", "int4-small (sealing)", FLOOR, STOCK, DENSE], strict=True):
        assert line.startswith(subject)
    assert max(map(len, lines)) <= 100


def test_command_tells_of_peers_that_are_missing(small_caches, model_folder, policy_file, monkeypatch, capsys):
    monkeypatch.setattr(peers, "PEERS", (Peer("absent", "hqq", {"nbits": 4}, lambda: False, "some-package"),))
    arguments = ["bench", "peers", "--model", str(model_folder), "--policies", str(policy_file("int4"))]
    assert run([*arguments, "--contexts", "40", "--repeats", "1", "--steps", "1"]) == 1
    assert "absent: not installed: pip install some-package" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--contexts", "900000M"], "--contexts: 1 × 900000M needs about "),
        (["--contexts", "many"], "--contexts: 'many' is not a number of tokens"),
        (["--batch", "0"], "'--batch': Input should be greater than or equal to 1"),
        (["--steps", "127"], "--steps: 127; allowed: up to 126, or int4 would seal a block"),
        (["--policies", "int7"], "'int7' is neither a file nor a preset"),
        (["--model", "./nothing"], "no such file or folder"),
    ],
)
@pytest.mark.parametrize("command", ["decode", "peers"])
def test_bad_input(model_folder, capsys, command, arguments, complaint):
    assert run(["bench", command, "--model", str(model_folder), *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert complaint in err
    assert err.count("\n") == 1
