"""Triton attention against the oracle, and models that use it: interpreted on the CPU where there is no GPU."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvquant
from kvquant import KVQuantCache, PrecisionPolicy, get_codec
from kvquant.attention import reference
from kvquant.codecs.affine import BITS
from kvquant.kernels import Dense, Memo, Sealed, gpu, gpu_attention
from kvquant.testing import relative_rms
from tests.models import feed, generate, prompt, tiny
from tests.records import as_records

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":  # see conftest.py
    pytest.skip("neither a GPU nor Triton's interpreter", allow_module_level=True)


@pytest.fixture(autouse=True)
def few_items(monkeypatch):
    if DEVICE == "cpu":  # each takes long to be interpreted
        monkeypatch.setattr(gpu_attention, "config", gpu_attention.config._replace(programs=1, waves=1))


LIMIT = (
    2e-3  # decoded values, queries and weights are float16; interpreters may round before they add, where GPUs do not
)


def check(outputs, logs, query, rows, dim, sinks=None, **how):
    """Each row against the oracle in float64."""
    for number, row in enumerate(rows):
        expected, expected_logs = reference.attend(query[number], row, dim, **how, dtype=torch.float64)
        if sinks is not None:
            expected = expected * torch.sigmoid(expected_logs - sinks)[..., None]
            expected_logs = torch.logaddexp(expected_logs, sinks.double())
        assert (logs[number] - expected_logs).abs().max() <= LIMIT
        assert outputs[number].shape == expected.shape
        assert relative_rms(outputs[number], expected) <= LIMIT


def slabs(codec, heads, tokens, width, count, size=1.0):
    """Fields of ``count`` blocks, as an arena holds them."""
    return {name: f.contiguous() for name, f in codec.encode(size * random_(count, heads, tokens, width)).items()}


def random_(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def cut(fields, first, stop):
    return {name: field[first:stop] for name, field in fields.items()}


@pytest.mark.parametrize("bits", BITS)
def test_every_kind_of_codes(bits):
    """Both sides at a width of codes, along both axes, rotated or not."""
    torch.manual_seed(bits)
    axes, turns = ("channel", "token"), ("none", "hadamard")
    for key_axis, key_turn, value_axis, value_turn in itertools.product(axes, turns, axes, turns):
        key = get_codec(f"int{bits}/{key_axis}/g16/{key_turn}", "key", 32)
        value = get_codec(f"int{bits}/{value_axis}/g16/{value_turn}", "value", 32)
        run = Sealed(key, value, slabs(key, 1, 32, 48, 2), slabs(value, 1, 32, 48, 2), (48, 48), 32, 4, 64)
        query, how = random_(1, 2, 48), {"scale": 0.2, "softcap": 0.0, "news": 1}
        output, logs = gpu_attention.attend(query, [run], 48, **how)
        check(output[None], logs[None], query[None], [[run]], 48, **how)


@pytest.mark.parametrize("bits", [*BITS, 16])
@pytest.mark.parametrize("size", [1.0, 1e6])
def test_blocks_as_records(bits, size):
    """Read where they lie, with the same results; of the larger blocks parameters are float32."""
    names = ["fp16"] if bits == 16 else [f"int{bits}/channel/g16/none", f"int{bits}/token/g24/hadamard"]
    for name in names:
        codec = get_codec(name, "key", 32)
        sides = [slabs(codec, 2, 32, 48, 3, size) for _ in range(2)]
        query, how = random_(1, 2, 2, 48), {"scale": 0.2 / size, "softcap": 0.0, "news": 1}
        results = []
        for keys, values in (sides, as_records(*sides)):
            run, memo = Sealed(codec, codec, cut(keys, 1, 3), cut(values, 1, 3), (48, 48), 32, 4, 64), Memo()
            results.append(gpu_attention.attend_rows(query, [[run]], 48, **how, memo=memo))
            assert {tensor.data_ptr() for tensor in memo.plan.keep} <= {
                run.keys.get("data", query).data_ptr(),
                run.values.get("data", query).data_ptr(),
            }
        for expected, actual in zip(*results, strict=True):
            assert torch.equal(expected, actual)
        expected, _ = reference.attend(query[0], [run], 48, **how, dtype=torch.float64)
        assert relative_rms(results[1][0][0], expected) <= LIMIT


@st.composite
def codecs(draw, role, tokens):
    bits = draw(st.sampled_from(BITS))
    axis, rotate = draw(st.sampled_from(["channel", "token"])), draw(st.sampled_from(["none", "hadamard"]))
    group = draw(st.sampled_from([g for g in (8, 16, 24, 32, 48, 64) if axis == "token" or tokens % g == 0]))
    return get_codec({"codec": f"int{bits}", "axis": axis, "group": group, "rotate": rotate}, role, tokens)


@st.composite
def batches(draw, shapes=((1, 1), (2, 1), (3, 1), (8, 1), (2, 3))):
    """(query, rows, value dim, sinks, settings): rows of runs from two slabs in any order, tokens as they are, a tail.

    Sometimes parameters are float32, codes are of several kinds, or there are none.
    """
    torch.manual_seed(draw(st.integers(0, 2**31)))
    chance = random.Random(draw(st.integers(0, 2**31)))
    heads, (group, new) = draw(st.integers(1, 2)), draw(st.sampled_from(shapes))
    dim = draw(st.sampled_from([8, 15, 32, 48, 64, 80, 81, 96, 128]))
    widths, tokens = (dim, draw(st.sampled_from([dim, dim, 64]))), draw(st.sampled_from([8, 32, 48, 64, 72]))
    kinds = [
        [draw(codecs(role, tokens)) for role in ("key", "value")] for _ in range(draw(st.sampled_from([1, 1, 2])))
    ]
    if draw(st.integers(0, 5)) == 5:
        kinds.append([get_codec("fp16", role) for role in ("key", "value")])
    size = draw(st.sampled_from([1.0, 1.0, 1e6]))
    held = []
    for both in kinds:
        sizes = (1.0, 1.0), (1.0, size)  # only the second slab is beyond float16
        for scales in sizes:
            fields = [slabs(c, heads, tokens, w, 4, s) for c, w, s in zip(both, widths, scales, strict=True)]
            held.append((both, fields))
    with_extra, dtype = draw(st.booleans()), draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row = [Dense(*(random_(heads, 4, width, dtype=dtype) for width in widths))] if chance.random() < 0.5 else []
        for _ in range(chance.randrange(4)):
            both, fields = chance.choice(held)
            start = chance.randrange(3)
            stop = chance.randrange(start + 1, 5)
            count = (stop - start) * tokens
            first, last = chance.choice([0, 0, 4, tokens - 1]), count - chance.choice([0, 0, 3])
            extra = (
                random_(stop - start, heads, group * new, tokens) if with_extra and both[0].name != "fp16" else None
            )
            parts = (cut(side, start, stop) for side in fields)
            row.append(Sealed(*both, *parts, widths, tokens, min(first, last - 1), last, 0, extra))
        if chance.random() < 0.8 or not row:
            tail = new + chance.choice([0, 3, 130])
            row.append(Dense(*(random_(heads, tail, width, dtype=dtype) for width in widths), causal=True))
        rows.append(row)
    query = random_(len(rows), heads, group * new, dim)
    sinks = random_(heads, group * new) if draw(st.booleans()) else None
    softcap = draw(st.sampled_from([0.0, 0.0, 5.0]))
    return query, rows, widths[1], sinks, {"scale": dim**-0.5, "softcap": softcap, "news": new}


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(batches(), st.sampled_from([1, 1, 1, 16]))
def test_batches(batch, waves):
    """Also from few items and from many, and again with other queries and scores by what was planned."""
    query, rows, dim, sinks, how = batch
    memo = Memo()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_attention, "config", gpu_attention.config._replace(programs=1, waves=waves))
        outputs, logs = gpu_attention.attend_rows(query, rows, dim, **how, sinks=sinks, memo=memo)
        check(outputs, logs, query, rows, dim, sinks, **how)
        plan = memo.plan
        rows = [[other(segment) for segment in row] for row in rows]
        query = random_(*query.shape)
        outputs, logs = gpu_attention.attend_rows(query, rows, dim, **how, sinks=sinks, memo=memo)
        check(outputs, logs, query, rows, dim, sinks, **how)
        assert memo.plan is plan


def other(segment):
    """The same memory, other scores to add; of the newest tokens, others."""
    if isinstance(segment, Sealed):
        return segment if segment.extra is None else replace(segment, extra=torch.randn_like(segment.extra))
    if not segment.causal:
        return segment
    return Dense(torch.randn_like(segment.keys), torch.randn_like(segment.values), causal=True)


@settings(deadline=None, max_examples=2, suppress_health_check=[HealthCheck.too_slow])
@given(batches(shapes=((1, 20), (2, 12))), st.sampled_from([1 << 15, 8]))
def test_many_queries(batch, turn):
    query, rows, dim, sinks, how = batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_attention, "TURN", turn)
        outputs, logs = gpu_attention.attend_rows(query, rows, dim, **how, sinks=sinks)
    check(outputs, logs, query, rows, dim, sinks, **how)


def test_16_bit_queries_keep_their_dtype():
    for dtype in (torch.float16, torch.bfloat16):
        tail = Dense(*(random_(2, 9, 64, dtype=dtype) for _ in range(2)), causal=True)
        query = random_(1, 2, 4, 64, dtype=dtype)
        outputs, _ = gpu_attention.attend_rows(query, [[tail]], 64, scale=0.1)
        expected, _ = reference.attend(query[0], [tail], 64, scale=0.1, dtype=torch.float64)
        assert outputs.dtype == dtype
        assert relative_rms(outputs[0], expected) <= 2**-7  # interpreted, what goes into bfloat16 is cut, not rounded


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]


def test_a_batch_takes_two_launches(monkeypatch):
    from kvquant.kernels import triton_attention, triton_merge

    kernels = Counted(triton_attention.attend_kernel), Counted(triton_merge.merge_kernel)
    monkeypatch.setattr(triton_attention, "attend_kernel", kernels[0])
    monkeypatch.setattr(triton_merge, "merge_kernel", kernels[1])
    key, value = get_codec("int4/channel/g16/none", "key", 16), get_codec("int4/token/g16/hadamard", "value", 16)
    fields = [slabs(codec, 1, 16, 16, 16) for codec in (key, value)]
    rows = []
    for row in range(8):
        runs = [[cut(side, at, at + 1) for side in fields] for at in range(row, 16, 8)]
        sealed = [Sealed(key, value, *run, (16, 16), 16, 0, 16) for run in runs]
        rows.append([Dense(random_(1, 4, 16), random_(1, 4, 16)), *sealed, Dense(*random_(2, 1, row + 1, 16), True)])
    query, how = random_(8, 1, 2, 16), {"scale": 0.25, "softcap": 0.0, "news": 1}
    check(*gpu_attention.attend_rows(query, rows, 16, **how), query, rows, 16, **how)
    assert [kernel.launches for kernel in kernels] == [1, 1]


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU to wait for")
def test_a_step_does_not_wait_for_the_gpu():
    codec = get_codec("int4/channel/g16/none", "key", 16)
    fields = slabs(codec, 1, 16, 16, 8)
    row = [Sealed(codec, codec, fields, fields, (16, 16), 16, 0, 128)]
    query, memo = random_(1, 1, 2, 16), Memo()
    for tokens in (5, 6, 6):
        tail = Dense(*random_(2, 1, tokens, 16), causal=True)
        torch.cuda.set_sync_debug_mode("error" if tokens > 5 else "default")  # once kernels are compiled
        try:
            gpu_attention.attend_rows(query, [[*row, tail]], 16, scale=0.25, memo=memo)
        finally:
            torch.cuda.set_sync_debug_mode("default")


SMALL = {"block_tokens": 16, "recent_tokens": 16}
POLICIES = [
    PrecisionPolicy(name="int4", default={"key": "int4", "value": {"codec": "int4", "rotate": "hadamard"}}, **SMALL),
    PrecisionPolicy(name="k8v3", default={"key": {"codec": "int8", "axis": "token"}, "value": "int3"}, **SMALL),
    PrecisionPolicy(name="fp16", default={"key": "fp16", "value": "fp16"}, **SMALL),
]


@pytest.fixture
def by_triton(monkeypatch):
    """Kernels are the means on the CPU too."""
    monkeypatch.setattr(gpu, "serves", gpu.runs_on)


@pytest.mark.parametrize(("family", "policy"), [("gemma2", 0), ("gpt_oss", 1), ("llama", 2), ("qwen2", 0)])
def test_models(family, policy, by_triton):
    """A cap on scores (Gemma-2), sinks (gpt-oss) and key biases (Qwen2) among them."""
    model, ids = tiny(family), prompt(43).to(DEVICE)
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):
            torch.nn.init.normal_(parameter, std=3.0)
    model.to(DEVICE)
    dense = feed(model, KVQuantCache.for_model(model, POLICIES[policy]), ids, 40, 3)
    kvquant.enable(model)
    cache = KVQuantCache.for_model(model, POLICIES[policy])
    streamed = feed(model, cache, ids, 40, 3)
    assert not cache.stats().fallbacks
    assert bool(cache.compressed()[0].segments.bias) == (family in ("qwen2", "gpt_oss"))
    assert (streamed - dense).norm() <= 5e-3 * dense.norm()


def test_a_ragged_batch_of_a_model(by_triton):
    model, ids = tiny("llama", num_hidden_layers=2).to(DEVICE), prompt(60, rows=2).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :25] = 0
    ids[mask == 0] = 0
    kvquant.enable(model)
    text = generate(model, KVQuantCache.for_model(model, POLICIES[0]), ids, new=2, attention_mask=mask)
    kvquant.disable(model)
    for row, start in enumerate((0, 25)):
        alone = generate(model, KVQuantCache.for_model(model, POLICIES[0]), ids[row : row + 1, start:], new=2)
        assert torch.equal(text[row, 60:], alone[0, 60 - start :])
