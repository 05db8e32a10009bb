"""The Triton codecs against `Affine`, and that all kernels compile: interpreted on the CPU where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvquant import get_codec
from kvquant.codecs.affine import BITS
from kvquant.kernels import gpu_codecs
from kvquant.kernels.coding import encode as encode_here
from kvquant.testing import assert_same_fields, relative_rms
from tests.records import as_records, in_records, only_fields_written

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":  # see conftest.py
    pytest.skip("neither a GPU nor Triton's interpreter", allow_module_level=True)


@st.composite
def blocks(draw, bits=(4, *BITS)):
    """A codec and blocks for it: of any scale and offset, with constants, as they are or transposed."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    tokens, dim = draw(st.sampled_from([8, 32, 48, 64, 72])), draw(st.sampled_from([8, 15, 64, 80, 96, 128]))
    axis, rotate = draw(st.sampled_from(["channel", "token"])), draw(st.sampled_from(["none", "hadamard"]))
    group = draw(st.sampled_from([g for g in (8, 16, 24, 32, 48, 64) if axis == "token" or tokens % g == 0]))
    codec = get_codec(f"int{draw(st.sampled_from(bits))}/{axis}/g{group}/{rotate}", "key", tokens)
    x = torch.randn(draw(st.integers(1, 2)), draw(st.integers(1, 2)), tokens, dim)
    x = x * draw(st.sampled_from([1.0, 1e-6, 30.0])) + draw(st.sampled_from([0.0, 3.0]))
    x[..., :2, :] = draw(st.sampled_from([0.0, 1.0])) * x[..., :2, :]
    x = x.to(DEVICE, draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])))
    return codec, x.transpose(1, 2).contiguous().transpose(1, 2) if draw(st.booleans()) else x


@settings(deadline=None, max_examples=16, suppress_health_check=[HealthCheck.too_slow])
@given(blocks())
def test_encoding(given_):
    """Bit for bit, whatever is served."""
    codec, x = given_
    if gpu_codecs.encodes(codec, x):
        assert_same_fields(gpu_codecs.encode(codec, x), codec.encode(x))


@pytest.mark.parametrize("bits", BITS)
def test_what_models_have_is_served(bits):
    for dim in (64, 128, 256):
        x = torch.randn(1, 1, 64, dim, device=DEVICE)
        for axis, rotate in (("channel", "none"), ("token", "hadamard")):
            for group in (32, 64, 128) if axis == "token" else (32, 64):
                codec = get_codec(f"int{bits}/{axis}/g{group}/{rotate}", "key", 64)
                assert gpu_codecs.encodes(codec, x)
                if dim == 64 and group == 32:
                    assert_same_fields(gpu_codecs.encode(codec, x), codec.encode(x))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("rotate", ["none", "hadamard"])
def test_codes_are_those_of_a_cpu(bits, axis, rotate):
    """Bit for bit: content keys stand for them, whichever machine made them."""
    codec = get_codec(f"int{bits}/{axis}/g64/{rotate}", "key", 64)
    x = torch.randn(2, 1, 64, 128).mul_(torch.rand(128) * 8).to(torch.bfloat16)
    made = gpu_codecs.encode(codec, x.to(DEVICE))
    for expected in (codec.encode(x), encode_here(codec, x)):
        assert_same_fields({name: field.cpu() for name, field in made.items()}, expected)


@settings(deadline=None, max_examples=16, suppress_health_check=[HealthCheck.too_slow])
@given(blocks(), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), st.booleans())
def test_decoding(given_, dtype, into):
    codec, x = given_
    fields, dim = codec.encode(x), x.shape[3]
    if not gpu_codecs.decodes(codec, fields, dim):
        assert dim % {3: 8, 5: 8, 6: 4}[codec.bits]
        return
    out = torch.empty_like(x.transpose(1, 2).contiguous().transpose(1, 2), dtype=dtype) if into else None
    decoded, expected = gpu_codecs.decode(codec, fields, dim, dtype, out), codec.decode(fields, dim, dtype)
    assert out is None or decoded is out
    assert decoded.dtype == dtype
    assert decoded.shape == expected.shape
    # Interpreted, what goes into bfloat16 is cut, not rounded.
    assert relative_rms(decoded, expected) <= {torch.float32: 1e-6, torch.float16: 1e-4, torch.bfloat16: 2**-7}[dtype]


@settings(deadline=None, max_examples=16, suppress_health_check=[HealthCheck.too_slow])
@given(blocks())
def test_blocks_as_records(given_):
    """Written and read where they lie, and nothing else is written."""
    codec, x = given_
    fields, dim = codec.encode(x), x.shape[3]
    if gpu_codecs.encodes(codec, x):
        records, (out,) = in_records([codec.layout(*x.shape[1:], x.dtype)], len(x), device=DEVICE)
        assert gpu_codecs.encode(codec, x, out) is out
        assert_same_fields(out, fields)
        assert only_fields_written(records, [out])
    if gpu_codecs.decodes(codec, fields, dim):
        (views,) = as_records(fields)
        found, expected = (gpu_codecs.decode(codec, each, dim, x.dtype) for each in (views, fields))
        assert torch.equal(found, expected)


def test_fields_in_the_wrong_strides_are_not_written():
    codec, x = get_codec("int4/channel/g32/none", "key", 32), torch.randn(2, 2, 32, 64, device=DEVICE)
    layout = codec.layout(2, 32, 64, x.dtype)
    _, (out,) = in_records([layout], 2, device=DEVICE)
    (others,) = in_records([layout], 2, gap=2, device=DEVICE)[1]
    for name, wrong in (("zero", others["zero"]), ("codes", out["codes"].mT.contiguous().mT)):
        made = gpu_codecs.encode(codec, x, out | {name: wrong})
        assert made[name] is not wrong
        assert_same_fields(made, codec.encode(x))


def test_what_float16_cannot_hold():
    x = torch.randn(2, 2, 32, 64, device=DEVICE)
    x[1] *= 1e6
    for name in ("int4/channel/g32/none", "int8/token/g64/hadamard"):
        codec = get_codec(name, "key", 32)
        _, (out,) = in_records([codec.layout(2, 32, 64, x.dtype)], 2, device=DEVICE)
        for place in (None, out):
            assert_same_fields(gpu_codecs.encode(codec, x, place), codec.encode(x))


def test_constants():
    for constant in (0.0, -0.0, 100.0, 1e-7, -3.5):
        x = torch.full((1, 1, 32, 64), constant, device=DEVICE)
        for name in ("int4/channel/g32/none", "int4/token/g64/none", "int8/channel/g16/none", "int2/token/g16/none"):
            codec = get_codec(name, "key", 32)
            assert_same_fields(gpu_codecs.encode(codec, x), codec.encode(x))


def test_no_blocks():
    codec = get_codec("int4/channel/g32/none", "key", 32)
    fields = gpu_codecs.encode(codec, torch.randn(0, 2, 32, 64, device=DEVICE))
    assert gpu_codecs.decode(codec, fields, 64, torch.float16).shape == (0, 2, 32, 64)


def test_kernels_compile_for_a_gpu(tmp_path):
    """What the interpreter lets pass and the compiler does not; and what makes the attention kernel fast."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.compile_kernels", "90"]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [line.split() for line in done.stdout.splitlines()]
    usual = next(words for words in kernels if words[1] == "attend_kernel")
    registers, spilled, shared, multiplies, *loads = usual[2:]
    assert int(registers) <= 128
    assert spilled == "0"
    assert int(shared) < 64 << 10
    assert multiplies == "True"
    assert any(load.startswith("cp.async.cg") for load in loads)  # 16 bytes a thread, past the registers
    assert not any(load.endswith("b8") for load in loads)
    assert kernels[-1] == ["90", "growing", "2"]  # attention and merging, whatever the length
