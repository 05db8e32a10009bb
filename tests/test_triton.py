"""The Triton kernels against the oracle and the codecs: interpreted on the CPU where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant import get_codec
from kvquant.attention import reference
from kvquant.kernels import Dense, Sealed, gpu
from kvquant.testing import relative_rms

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, which is when they are first used


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


@settings(deadline=None, max_examples=80)
@given(problems())
def test_attention(problem):
    check(problem, 1e-4)


@settings(deadline=None, max_examples=8)
@given(problems(lengths=(20, 60)))
def test_attention_of_many_queries(problem):
    check(problem, 1e-4)
