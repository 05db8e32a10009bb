"""Every way of attending to segments against the oracle, which decodes everything first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant import get_codec
from kvquant.attention import reference
from kvquant.codecs.affine import BITS
from kvquant.kernels import Dense, Sealed, attend, eager, encode, native, wide
from kvquant.testing import relative_rms
from tests.records import as_records

CODECS = ["fp16", *(f"int{bits}" for bits in BITS)]
LEVELS = range(native.isa() + 1) if native.library() else []


@st.composite
def sides(draw, codecs, tokens):
    codec = draw(st.sampled_from(codecs))
    if codec == "fp16":
        return codec
    group = draw(st.sampled_from([g for g in (8, 16, 32, 64) if tokens % g == 0]))
    if codec in ("nf4", "fp4", "dynamic8"):
        return {"codec": codec} if tokens % 64 == 0 else "fp16"
    axis, rotate = draw(st.sampled_from(["channel", "token"])), draw(st.sampled_from(["none", "hadamard"]))
    return {"codec": codec, "axis": axis, "group": group, "rotate": rotate}


@st.composite
def problems(draw, codecs=CODECS, lengths=(1, 1, 2, 5)):
    """(query, segments, value dim, settings): sinks, a run of blocks some of whose tokens do not count, a tail."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    heads, group, new = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4, 7])), draw(st.sampled_from(lengths))
    dim = draw(st.sampled_from([8, 15, 32, 48, 64, 80, 128, 160]))
    value_dim = draw(st.sampled_from([dim, dim, 64]))
    tokens, count = draw(st.sampled_from([8, 32, 64, 128])), draw(st.integers(1, 4))
    key, value = draw(sides(codecs, tokens)), draw(sides(codecs, tokens))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    blocks = [torch.randn(count, heads, tokens, width).to(dtype) for width in (dim, value_dim)]
    codecs_ = get_codec(key, "key", tokens), get_codec(value, "value", tokens)
    fields = [
        {name: field.contiguous() for name, field in codec.encode(block).items()}
        for codec, block in zip(codecs_, blocks, strict=True)
    ]
    first, left = draw(st.sampled_from([0, 4])), draw(st.sampled_from([0, 3]))
    extra = torch.randn(count, heads, group * new, tokens) if draw(st.booleans()) else None
    tail = draw(st.sampled_from([0, 1, 70])) + new
    segments = [
        Dense(*(torch.randn(heads, 4, width).to(dtype) for width in (dim, value_dim))),
        Sealed(*codecs_, *fields, (dim, value_dim), tokens, first, count * tokens - left, 0, extra),
        Dense(*(torch.randn(heads, tail, width).to(dtype) for width in (dim, value_dim)), causal=True),
    ]
    query = torch.randn(heads, group * new, dim)
    softcap = draw(st.sampled_from([0.0, 0.0, 5.0]))
    return query, segments, value_dim, {"scale": dim**-0.5, "softcap": softcap, "news": new}


def check(way, problem, limit, **more):
    query, segments, dim, given_ = problem
    output, logs = way(query, segments, dim, **given_, **more)
    expected, expected_logs = reference.attend(query, segments, dim, **given_, dtype=torch.float64)
    assert output.shape == expected.shape
    assert relative_rms(output, expected) <= limit
    assert (logs - expected_logs).abs().max() <= limit * 10


@settings(deadline=None, max_examples=120)
@given(problems())
def test_eager(problem):
    check(eager.attend, problem, 1e-5)


@settings(deadline=None, max_examples=25)
@given(problems(lengths=(48, 60)))
def test_many_queries_at_once(problem):
    query, segments, dim, given_ = problem
    if wide.serves(query, segments, dim, given_["softcap"]):
        check(wide.attend, problem, 1e-5)
    check(eager.attend, problem, 1e-5)


@pytest.mark.skipif(not LEVELS, reason="the library is not built here: no compiler")
@settings(deadline=None, max_examples=120)
@given(problems())
def test_compiled(problem):
    """Plain paths multiply in float32, the fast ones by queries and weights rounded to 16 bits."""
    query, segments, _, _ = problem
    if native.serves(query, segments):
        for level in LEVELS:
            check(native.attend, problem, 1e-3 if level >= 2 else 2e-5, level=level)


@settings(deadline=None, max_examples=20)
@given(problems(codecs=["fp16", "nf4", "fp4", "dynamic8"]))
def test_whatever_the_codec(problem):
    query, segments, dim, given_ = problem
    output, _ = attend(query, segments, dim, **given_)
    expected, _ = reference.attend(query, segments, dim, **given_, dtype=torch.float64)
    assert relative_rms(output, expected) <= 1e-3


@settings(deadline=None, max_examples=80)
@given(
    problems(codecs=[*CODECS, "nf4", "fp4", "dynamic8"], lengths=(1, 2, 50)), st.booleans(), st.sampled_from([0, 1, 2])
)
def test_blocks_as_records(problem, in_float32, gap):
    """Whatever lies between fields and between blocks: the same, to the last bit."""
    query, (sinks, run, tail), dim, given_ = problem
    if in_float32:
        run = replace(run, keys=widened(run.keys), values=widened(run.values))
    keys, values = as_records(run.keys, run.values, gap=gap)
    one, other = [sinks, run, tail], [sinks, replace(run, keys=keys, values=values), tail]
    ways = [(eager.attend, {})]
    if wide.serves(query, one, dim, given_["softcap"]):
        ways.append((wide.attend, {}))
    assert native.serves(query, one) == native.serves(query, other)
    if native.serves(query, one):
        ways += [(native.attend, {"level": level}) for level in LEVELS]
    for way, more in ways:
        results = [way(query, segments, dim, **given_, **more) for segments in (one, other)]
        for expected, actual in zip(*results, strict=True):
            assert torch.equal(expected, actual)


def widened(fields):
    """Parameters in float32, as of blocks that float16 cannot hold."""
    return {name: field.float() if name in ("scale", "zero") else field for name, field in fields.items()}


@pytest.mark.parametrize("held", [0, 1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_that_begins_in_the_call(held, dtype):
    """Of 64 new columns the first are padding, which sees nothing."""
    query = torch.randn(2, 2 * 64, 32).to(dtype)
    segments = [Dense(torch.randn(2, held, 32).to(dtype), torch.randn(2, held, 32).to(dtype), causal=True)]
    expected, expected_logs = reference.attend(query, segments, 32, scale=0.2, news=64, dtype=torch.float64)
    for way in [eager.attend, wide.attend, *[native.attend] * bool(LEVELS)]:
        output, logs = way(query, segments, 32, scale=0.2, news=64)
        assert torch.allclose(output.double(), expected, atol=1e-2 if dtype is torch.bfloat16 else 1e-5)
        blind = expected_logs.isinf()
        assert torch.equal(logs.isinf(), blind)
        assert not output[blind].any()
        assert torch.allclose(logs[~blind].double(), expected_logs[~blind], atol=1e-2)
        assert blind.sum() == 4 * (64 - held)


@pytest.fixture
def three_threads():
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.mark.skipif(not LEVELS, reason="the library is not built here: no compiler")
@pytest.mark.parametrize("rotate", ["none", "hadamard"])
def test_ragged_rows_by_several_threads(rotate, three_threads):
    """What threads begin and end with need not be a row, and rows may hold nothing."""
    heads, dim, size = 3, 64, 64
    codecs = [
        get_codec({"codec": "int4", "axis": "channel", "group": 32, "rotate": rotate}, "key", size),
        get_codec({"codec": "int4", "axis": "token", "group": 64, "rotate": "hadamard"}, "value", size),
    ]
    rows = []
    for blocks, tail in [(0, 0), (1, 5), (40, 1), (0, 70), (7, 64), (0, 0), (90, 3), (0, 0)]:
        row = [Dense(*torch.randn(2, heads, tail, dim), causal=True)]
        if blocks:
            fields = [encode(codec, torch.randn(blocks, heads, size, dim)) for codec in codecs]
            row.insert(0, Sealed(*codecs, *fields, (dim, dim), size, 4, blocks * size))
        rows.append(row)
    query = torch.randn(len(rows), heads, 2, dim)
    for level in LEVELS:
        outputs, logs = native.attend_rows(query, rows, dim, scale=0.1, level=level)
        for asked, row, output, log in zip(query, rows, outputs, logs, strict=True):
            expected, expected_log = reference.attend(asked, row, dim, scale=0.1, dtype=torch.float64)
            assert torch.allclose(log.double(), expected_log, atol=1e-3)
            assert (output - expected).norm() <= 1e-3 * expected.norm()


def test_fields_as_a_codec_gives_them():
    """Whose strides may be any."""
    codecs = (
        get_codec({"codec": "int8", "axis": "channel", "rotate": "hadamard"}, "key", 64),
        get_codec("int4", "value", 64),
    )
    blocks, query = torch.randn(2, 3, 64, 64), torch.randn(3, 1, 64)
    segments = [Sealed(*codecs, *(codec.encode(blocks) for codec in codecs), (64, 64), 64, 0, 128)]
    expected, _ = reference.attend(query, segments, 64, scale=0.125, dtype=torch.float64)
    assert relative_rms(attend(query, segments, 64, scale=0.125)[0], expected) <= 1e-3


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [256, 512])
def test_wide_heads(bits, dim):
    """Whose rows of codes are longer than a vector."""
    codecs = get_codec(f"int{bits}/channel/g32/none", "key", 32), get_codec(f"int{bits}/token/g64/none", "value", 32)
    fields = [encode(codec, torch.randn(2, 2, 32, dim)) for codec in codecs]
    problem = torch.randn(2, 3, dim), [Sealed(*codecs, *fields, (dim, dim), 32, 4, 64)], dim, {"scale": dim**-0.5}
    check(eager.attend, problem, 1e-5)
    for level in LEVELS:
        check(native.attend, problem, 1e-3 if level >= 2 else 2e-5, level=level)
