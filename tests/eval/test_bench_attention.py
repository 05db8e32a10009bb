"""`kvquant bench attention` at tiny shapes: rows, bytes, errors, refusals; and torch's dense ways."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvquant.kernels import Dense, Sealed
from kvquant_eval.bench import attention
from kvquant_eval.bench.attention import SDPA, AttentionBench
from kvquant_eval.bench.dense import FOLDED, folded_attention
from kvquant_eval.bench.layer import Shape, compressed, copies_of, stored_bytes
from kvquant_eval.bench.rows import DENSE
from kvquant_eval.cli import run

from .test_bench import COLUMNS
from .tiny import small_policy

TOKENS = 300
SHAPE = Shape(kv_heads=2, q_heads=6, head_dim=32, tokens=TOKENS, queries=1, dtype=torch.float32)
SEALED = (TOKENS - 8) // 8 * 8


def measured(policies=("int4",), shape=SHAPE, repeats=2):
    bench = AttentionBench(shape, [small_policy(name) for name in policies], repeats)
    ticks = []
    outcome = bench.run(lambda line: None, lambda *bounds: ticks.append(bounds))
    assert len(ticks) == bench.ticks
    return {(row.subject, row.baseline): row for row in outcome.rows}, outcome.cases


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_compare_with_both_baselines_of_the_same_run(small_caches, queries, dtype):
    shape = Shape(2, 6, 32, TOKENS, queries, dtype)
    rows, (case,) = measured(("int4", "fp16"), shape)
    subjects = ["int4", "fp16", SDPA, DENSE]
    assert set(rows) == {(subject, base) for subject in subjects for base in (SDPA, DENSE) if subject != base}
    for (subject, base), row in rows.items():
        assert (row.bench, row.case) == ("attention", TOKENS)
        assert row.ratio == row.ms_median / row.baseline_ms_median
        assert row.baseline_ms_median == rows[base, SDPA if base == DENSE else DENSE].ms_median
        read = row.bytes_moved / (row.ms_median / 1e3)
        assert row.bandwidth_fraction == pytest.approx(read / case.read_gb_per_second / 1e9, rel=1e-3)
        assert row.peak_bytes is None or row.peak_bytes >= 0
        limit = 1e-3 if subject in ("int4", "fp16") else {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
        assert 0 < row.value < limit
        named = "compiled kernel" in row.detail or "plain torch" in row.detail
        assert named == (subject in ("int4", "fp16"))


def test_bytes_are_those_that_codecs_store(small_caches):
    rows, _ = measured(("int4", "fp16"))
    tail = (TOKENS - SEALED) * 32 * 2 * 2 * 4  # channels, heads, keys and values, float32
    codes = SEALED * 32 * 2  # half a byte each, two heads, keys and values
    scales = SEALED // 8 * 32 * 2 * 4 + SEALED * 2 * 4  # per 8 keys of a channel, per 32 channels of a value
    assert rows["int4", SDPA].bytes_moved == codes + scales + tail
    assert rows["fp16", SDPA].bytes_moved == rows[DENSE, SDPA].bytes_moved == TOKENS * 32 * 2 * 2 * 4


def test_the_error_is_that_of_what_attention_returns(small_caches, monkeypatch):
    assert measured()[0]["int4", SDPA].value < 1e-3
    real = attention.streamed_attention

    def spoiled(query, segments):
        first, *rest = segments[0]
        codes = first.values["codes"].clone()
        codes[0] ^= 0x11  # the lowest bit of a block's codes
        broken = Sealed(**{**vars(first), "values": first.values | {"codes": codes}})
        return real(query, [[broken, *rest]])

    monkeypatch.setattr(attention, "streamed_attention", spoiled)
    assert measured()[0]["int4", SDPA].value > 3e-3


def test_blocks_and_a_tail_as_a_cache_holds_them():
    keys, values = SHAPE.states(2, TOKENS), SHAPE.states(2, TOKENS)
    sealed, tail = compressed(small_policy("fp16"), keys, values, SHAPE)
    assert isinstance(sealed, Sealed)
    assert isinstance(tail, Dense)
    assert torch.equal(torch.cat([sealed.keys["data"].transpose(0, 1).flatten(1, 2), tail.keys], dim=1), keys)
    assert torch.equal(tail.values, values[:, SEALED:])
    assert stored_bytes([sealed, tail]) == keys.nbytes + values.nbytes


def test_copies_fill_the_caches_twice(small_caches):
    for nbytes in (1000, small_caches, 3 * small_caches):
        assert (copies_of(nbytes) - 1) * nbytes >= 2 * small_caches or nbytes > 2 * small_caches
        assert copies_of(nbytes) >= 2


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize("mask", [None, "bool", "added"])
@pytest.mark.parametrize("tokens", [1, 3, 64, 65])
def test_dense_ways_are_attention(name, mask, tokens):
    query, keys, values = torch.randn(2, 3, 4, 8), torch.randn(2, 3, tokens, 8), torch.randn(2, 3, tokens, 5)
    if name == "fused" or name == "fused in parts":
        values = torch.randn(2, 3, tokens, 8)
    seen = torch.rand(2, 1, 1, tokens) < 0.7
    seen[..., 0] = True
    given = {None: None, "bool": seen, "added": torch.zeros(seen.shape).masked_fill(~seen, -1e30)}[mask]
    output = FOLDED[name](query, keys, values, given, 0.3)
    expected = scaled_dot_product_attention(
        query.double(), keys.double(), values.double(), None if mask is None else seen, scale=0.3
    )
    assert torch.allclose(output.double(), expected, atol=1e-5)


@pytest.mark.parametrize("name", FOLDED)
@torch.no_grad()
def test_models_attend_by_dense_ways_for_a_while(llama, ids, name):
    cache = llama(input_ids=ids[None, :50], use_cache=True).cache
    expected = llama(input_ids=ids[None, 50:51], cache=cache, use_cache=True).logits
    cache.crop(-1)
    calls = []

    def counted(*args):
        calls.append(args[0].shape)
        return FOLDED[name](*args)

    before = dict(ALL_ATTENTION_FUNCTIONS)
    with folded_attention(llama, counted):
        output = llama(input_ids=ids[None, 50:51], cache=cache, use_cache=True).logits
    assert calls == [(1, 2, 2, 16)] * 4
    assert torch.allclose(output, expected, atol=1e-4)
    assert llama.config._attn_implementation == "sdpa"
    assert dict(ALL_ATTENTION_FUNCTIONS) == before


COMMAND = ["bench", "attention", "--kv-heads", "1", "--q-heads", "2", "--head-dim", "16", "--repeats", "1"]


def test_command_prints_json_or_a_table(small_caches, capsys):
    arguments = [*COMMAND, "--tokens", "1K,300", "--dtype", "float32"]
    assert run([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["command"].startswith("kvquant bench attention --kv-heads 1")
    assert [case["case"] for case in document["cases"]] == [300, 1024]
    assert [list(row) for row in document["rows"]] == [COLUMNS] * 12
    assert run(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines if "tokens" in line] == ["300 tokens", "1K tokens"]
    assert [line.split()[0] for line in lines[3:7]] == ["int4", "int8", "SDPA", "best"]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--kv-heads", "0"], "'--kv-heads': Input should be greater than or equal to 1"),
        (["--head-dim", "wide"], "'--head-dim': Input should be a valid integer"),
        (["--q-heads", "5", "--kv-heads", "2"], "--q-heads: 5; allowed: a multiple of --kv-heads 2"),
        (["--tokens", "2.5K"], "--tokens: '2.5K' is not a number of tokens"),
        (["--tokens", "200"], "--tokens: of 200 int4 compresses none; allowed: from 256"),
        (["--tokens", "900000M"], "--tokens: 943718400000 needs about "),
        (["--policies", "int7"], "'int7' is neither a file nor a preset"),
        (["--dtype", "int8"], "'int8' is not one of"),
        (["--queries", "0"], "'--queries': Input should be greater than or equal to 1"),
    ],
)
def test_bad_input(capsys, arguments, complaint):
    assert run([*COMMAND, *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert complaint in err
    assert err.count("\n") == 1
