"""The Triton kernels against the oracle and the codecs: interpreted on the CPU where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant import get_codec
from kvquant.attention import reference
from kvquant.kernels import Dense, Sealed, gpu
from kvquant.testing import assert_same_fields, relative_rms

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":  # see conftest.py
    pytest.skip("neither a GPU nor Triton's interpreter", allow_module_level=True)


@st.composite
def codecs(draw, role, tokens, bits=(8, 4, 2)):
    axis, rotate = draw(st.sampled_from(["channel", "token"])), draw(st.sampled_from(["none", "hadamard"]))
    group = draw(st.sampled_from([g for g in (8, 16, 24, 32, 48, 64) if axis == "token" or tokens % g == 0]))
    options = {"codec": f"int{draw(st.sampled_from(bits))}", "axis": axis, "group": group, "rotate": rotate}
    return get_codec(options, role, tokens)


@st.composite
def problems(draw, lengths=(1, 1, 2, 5), kinds=(8, 4, 2)):
    """(query, segments, value dim, settings)."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    heads, group, new = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 7])), draw(st.sampled_from(lengths))
    dim = draw(st.sampled_from([8, 15, 32, 48, 64, 80, 81, 96, 128]))
    widths = dim, draw(st.sampled_from([dim, dim, 64]))
    tokens, count = draw(st.sampled_from([8, 32, 48, 64, 72])), draw(st.integers(1, 3))
    both = [draw(codecs(role, tokens, kinds)) for role in ("key", "value")]
    size = draw(st.sampled_from([1.0, 1.0, 1e6]))  # beyond float16: float32 parameters
    fields = [
        codec.encode((torch.randn(count, heads, tokens, width) * (size if codec is both[1] else 1.0)).to(DEVICE))
        for codec, width in zip(both, widths, strict=True)
    ]
    if draw(st.booleans()):  # as in a slab: every second of a block's neighbours is another's
        fields = [{name: f.repeat_interleave(2, 0)[::2] for name, f in side.items()} for side in fields]
    first, left = draw(st.sampled_from([0, 4, tokens + 3])), draw(st.sampled_from([0, 3]))
    stop = count * tokens - left
    extra = torch.randn(count, heads, group * new, tokens, device=DEVICE) if draw(st.booleans()) else None
    run = Sealed(*both, *fields, widths, tokens, min(first, stop - 1), stop, 0, extra)
    others = [
        Dense(*(torch.randn(heads, n, width, device=DEVICE) for width in widths), causal=causal)
        for n, causal in ((4, False), (new + 3, True))
    ]
    segments = draw(st.sampled_from([[run], [run], [others[0], run, others[1]], [run, run]]))
    query = torch.randn(heads, group * new, dim, device=DEVICE)
    softcap = draw(st.sampled_from([0.0, 0.0, 5.0]))
    return query, segments, widths[1], {"scale": dim**-0.5, "softcap": softcap, "news": new}


def check(problem, limit):
    query, segments, dim, given_ = problem
    assert gpu.serves(query, segments)
    output, logs = gpu.attend(query, segments, dim, **given_)
    expected, expected_logs = reference.attend(query, segments, dim, **given_, dtype=torch.float64)
    assert output.shape == expected.shape
    assert output.dtype == logs.dtype == torch.float32
    assert relative_rms(output, expected) <= limit
    assert (logs - expected_logs).abs().max() <= limit * 10


@settings(deadline=None, max_examples=60)
@given(problems())
def test_attention(problem):
    check(problem, 1e-4)


@settings(deadline=None, max_examples=20)
@given(problems())
def test_attention_by_tensor_cores(problem):
    """As a GPU multiplies: by pairs of bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "_in_halves", lambda query: 1 if query.is_cuda else 2)
        check(problem, 1e-4)


@settings(deadline=None, max_examples=6)
@given(problems(lengths=(20, 60)))
def test_attention_of_many_queries(problem):
    check(problem, 1e-4)


@st.composite
def blocks(draw, kinds):
    """A codec and blocks for it."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    tokens, dim = draw(st.sampled_from([8, 32, 48, 64, 72])), draw(st.sampled_from([8, 15, 64, 80, 96, 128]))
    codec = draw(codecs(draw(st.sampled_from(["key", "value"])), tokens, kinds))
    x = torch.randn(draw(st.integers(1, 3)), draw(st.integers(1, 2)), tokens, dim, device=DEVICE)
    x = x * draw(st.sampled_from([1.0, 1e-6, 30.0])) + draw(st.sampled_from([0.0, 3.0]))
    x[..., :2, :] = draw(st.sampled_from([0.0, 1.0])) * x[..., :2, :]
    x = x.to(draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])))
    return codec, x.transpose(1, 2).contiguous().transpose(1, 2) if draw(st.booleans()) else x


@settings(deadline=None, max_examples=40)
@given(blocks((8, 4, 2)), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_decoding(given_, dtype):
    codec, x = given_
    fields, dim = codec.encode(x), x.shape[3]
    assert gpu.decodes(codec, fields)
    decoded, expected = gpu.decode(codec, fields, dim, dtype), codec.decode(fields, dim, dtype)
    assert decoded.dtype == dtype
    assert decoded.shape == expected.shape
    # Interpreted, what goes into bfloat16 is cut, not rounded.
    assert relative_rms(decoded, expected) <= {torch.float32: 1e-6, torch.float16: 1e-4, torch.bfloat16: 2**-7}[dtype]


@settings(deadline=None, max_examples=60)
@given(blocks((8, 4)))
def test_encoding(given_):
    codec, x = given_
    if not gpu.encodes(codec, x):
        return
    fields, expected = gpu.encode(codec, x), codec.encode(x)
    for name, field in expected.items():
        assert fields[name].dtype == field.dtype
        assert fields[name].shape == field.shape
    decoded, wanted = (codec.decode(each, x.shape[3], torch.float32) for each in (fields, expected))
    if codec.rotate == "none":
        scale, span = expected["scale"].float(), (x.shape[2] // expected["scale"].shape[2], expected["scale"].shape[3])
        step = scale.repeat_interleave(span[0], 2).repeat_interleave(x.shape[3] // span[1], 3)
        assert ((decoded - wanted).abs() <= 1.001 * step + 1e-6).all()
    error, least = ((each - x.float()).square().mean().sqrt() for each in (decoded, wanted))
    assert error <= 1.01 * least + 1e-7
    if DEVICE == "cpu":  # a GPU fuses multiplications with additions
        assert (fields["codes"] != expected["codes"]).float().mean() <= 1e-3


def test_encoding_of_what_float16_cannot_hold():
    x = torch.randn(2, 2, 32, 64, device=DEVICE)
    x[1] *= 1e6
    for name in ("int4/channel/g32/none", "int8/token/g64/hadamard"):
        codec = get_codec(name, "key", 32)
        assert_same_fields(gpu.encode(codec, x), codec.encode(x))


def test_encoding_of_constants():
    for constant in (0.0, -0.0, 100.0, 1e-7, -3.5):
        x = torch.full((1, 2, 32, 64), constant, device=DEVICE)
        for name in ("int4/channel/g32/none", "int4/token/g64/none", "int8/channel/g16/none", "int8/token/g16/none"):
            codec = get_codec(name, "key", 32)
            assert_same_fields(gpu.encode(codec, x), codec.encode(x))


def test_no_blocks():
    codec = get_codec("int4/channel/g32/none", "key", 32)
    fields = gpu.encode(codec, torch.randn(0, 2, 32, 64, device=DEVICE))
    assert gpu.decode(codec, fields, 64, torch.float16).shape == (0, 2, 32, 64)


def test_kernels_compile_for_a_gpu(tmp_path):
    """What the interpreter lets pass and the compiler does not, where there may be no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "error", "-m", "tests.compile_kernels", "90"]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all("True" in line for line in done.stdout.splitlines() if "attend" in line)
