"""Compiled encoding and decoding at every instruction set, against the codec's own methods, bit for bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant.arena import SlotPool
from kvquant.cache.calls import Calls
from kvquant.cache.held import decoded
from kvquant.cache.layer import History, Layer
from kvquant.cache.resident import Resident
from kvquant.cache.rows import Rows
from kvquant.codecs import Affine, Raw, get_codec
from kvquant.codecs.affine import BITS
from kvquant.codecs.base import to_dtype
from kvquant.codecs.rotation import hadamard
from kvquant.errors import CodecError
from kvquant.kernels import coding, decode, encode, native, native_codecs
from kvquant.kernels.segments import whole_blocks
from kvquant.testing import relative_rms
from tests.records import as_records, in_records, only_fields_written

pytestmark = pytest.mark.skipif(native_codecs.library() is None, reason="the library is not built here: no compiler")

LEVELS = range(native.isa() + 1)
ERROR = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}  # of the order of additions
DTYPES = list(ERROR)
DIMS = [8, 15, 48, 64, 80, 96, 127, 128, 160]


def same(actual, expected):
    """Equal bytes; `torch.equal` would take one zero for the other."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    one, other = (x.clone(memory_format=torch.contiguous_format).view(torch.uint8) for x in (actual, expected))
    assert torch.equal(one, other)


def check_encode(codec, blocks):
    expected = codec.encode(blocks)
    for level in LEVELS:
        fields = native_codecs.encode(codec, blocks, level=level)
        assert fields.keys() == expected.keys()
        for name, field in fields.items():
            same(field, expected[name])
    return expected


def check_decode(codec, fields, dim, dtype):
    """Without a rotation as `Affine.decode` does it; with one, undone by the additions that made it."""
    plain = Affine(codec.bits, codec.axis, codec.group).decode(fields, dim, torch.float32)
    expected = to_dtype(hadamard(plain) if codec.rotate == "hadamard" else plain, dtype)
    eager = codec.decode(fields, dim, dtype)
    for level in LEVELS:
        out = torch.empty(eager.shape, dtype=dtype)
        assert native_codecs.decode(codec, fields, out, level)
        same(out, expected)
        if codec.rotate == "none":
            same(out, eager)
        assert not out.numel() or relative_rms(out, eager) < ERROR[dtype]


@st.composite
def codecs(draw, tokens):
    axis = draw(st.sampled_from(["channel", "token"]))
    group = draw(st.sampled_from([g for g in (8, 12, 24, 32, 40, 64, 128) if axis == "token" or tokens % g == 0]))
    rotate = draw(st.sampled_from(["none", "hadamard"]))
    return Affine(draw(st.sampled_from(BITS)), axis, group, rotate)


@st.composite
def blocks(draw, tokens):
    """``[n, heads, tokens, dim]`` of any magnitude, with what rounding is hard on, in any strides."""
    n, heads = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    dim, dtype = draw(st.sampled_from(DIMS)), draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(n, heads, tokens, dim, generator=generator)
    kind = draw(st.sampled_from(["normal", "outliers", "ties", "zeros", "constant"]))
    if kind == "outliers":
        x = x * torch.rand(dim, generator=generator).mul(10).exp2() + 20 * torch.randn(dim, generator=generator)
    if kind == "ties":
        x = (x * 4).round() / 2
    if kind == "zeros":
        x = torch.where(x.abs() < 1, 0.0, x.clamp(min=-0.0)) * torch.randn(x.shape, generator=generator).sign()
    if kind == "constant":
        x = torch.where(torch.rand(heads, 1, dim, generator=generator) < 0.5, x[:, :, :1], x)
    exponent = draw(st.integers(-149, 40)) if dtype == torch.float32 else draw(st.integers(-26, 14))
    x = x * torch.ones(()).mul(2.0**exponent)
    if n and draw(st.booleans()):
        x[0] *= 2.0 ** draw(st.integers(0, 20))  # one block that may be wide among others
    most = min(torch.finfo(dtype).max, 2.0**46)
    x = x.clamp(-most, most).to(dtype)
    strides = draw(st.sampled_from(["dense", "by token", "cut", "stepped"]))
    if strides == "by token":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if strides == "cut":
        return torch.cat((x, x, x), dim=3)[..., dim : 2 * dim]
    return x.repeat_interleave(2, dim=3)[..., ::2] if strides == "stepped" else x


TOKENS = st.sampled_from([8, 24, 64, 120, 128])


@settings(deadline=None, max_examples=1000)
@given(st.data(), TOKENS)
def test_any_blocks(data, tokens):
    codec, x = data.draw(codecs(tokens)), data.draw(blocks(tokens))
    fields = check_encode(codec, x)
    check_decode(codec, fields, x.shape[3], x.dtype)


@settings(deadline=None, max_examples=300)
@given(st.data(), TOKENS, st.sampled_from([0, 1, 2]))
def test_blocks_as_records(data, tokens, gap):
    """Written and read where they lie, and nothing else is written."""
    codec, x = data.draw(codecs(tokens)), data.draw(blocks(tokens))
    expected, dim = codec.encode(x), x.shape[3]
    (views,) = as_records(expected, gap=gap)
    assert all(whole_blocks(view) is view for view in views.values())
    same(codec.decode(views, dim, x.dtype), codec.decode(expected, dim, x.dtype))
    for level in LEVELS:
        records, (out,) = in_records([codec.layout(*x.shape[1:], x.dtype)], len(x), gap)
        fields = native_codecs.encode(codec, x, out, level)
        assert (fields is out) == (expected["scale"].dtype == torch.float16)
        for name, field in expected.items():
            same(fields[name], field)
        assert only_fields_written(records, [out])
        decoded = [torch.empty(x.shape, dtype=x.dtype) for _ in range(2)]
        for given_, to in zip((expected, views), decoded, strict=True):
            assert native_codecs.decode(codec, given_, to, level)
        same(*decoded)


def test_fields_that_do_not_lie_together_are_not_written():
    codec, x = Affine(4, "channel", 8), torch.randn(2, 2, 16, 24)
    out = {
        name: torch.empty(2, *shape[1:], shape[0], dtype=dtype).movedim(-1, 1)
        for name, (shape, dtype) in codec.layout(2, 16, 24, x.dtype).items()
    }
    fields, expected = encode(codec, x, out), codec.encode(x)
    for name, field in expected.items():
        assert fields[name] is not out[name]
        same(fields[name], field)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("rotate", ["none", "hadamard"])
def test_every_head_size(bits, axis, rotate):
    codec = Affine(bits, axis, 16, rotate)
    for dim in (1, *DIMS, 300):
        x = torch.randn(2, 2, 32, dim) * torch.rand(dim).mul(6).exp2() + 4 * torch.randn(dim)
        for dtype in DTYPES:
            check_decode(codec, check_encode(codec, x.to(dtype)), dim, dtype)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_around_the_limits_of_float16(bits, axis):
    codec, limit = Affine(bits, axis, 8), 65504.0
    for low, high in ((-limit, limit), (65503.0, limit), (-limit, -65500.0), (0.0, 65505.0), (65519.0, 65521.0)):
        x = torch.empty(3, 1, 8, 16).uniform_(low, high)
        x[1] /= 2  # float16 holds it, but must not have it where its neighbours do not
        x[2, 0, 0, 0] = high
        fields = check_encode(codec, x)
        if bits > 4:
            assert fields["scale"].dtype == (torch.float32 if max(-low, high) > limit else torch.float16)
        check_decode(codec, fields, 16, torch.float32)
        check_decode(codec, fields, 16, torch.float16)
    for tiny in (2.0**-24, 2.0**-25, 2.0**-126, 2.0**-149):
        check_encode(codec, torch.randint(-9, 10, (2, 2, 8, 16)) * torch.tensor(tiny))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**52, -3e38])
@pytest.mark.parametrize("codec", [Affine(8, "channel", 8), Affine(3, "token", 8, "hadamard")])
def test_what_is_left_to_the_codec(codec, value):
    x = torch.randn(3, 2, 8, 20)
    x[1, 1, 7, 19] = value
    for level in LEVELS:
        assert native_codecs.encode(codec, x, level=level) is None
    expected = codec.encode(x)
    for name, field in encode(codec, x).items():
        assert torch.equal(field.nan_to_num(), expected[name].nan_to_num())
    assert native_codecs.encode(codec, x.double()) is None
    with pytest.raises(CodecError, match="group: 8 does not divide a block of 12 tokens"):
        encode(Affine(8, "channel", 8), torch.randn(1, 1, 12, 8))


def test_fields_of_other_shapes_are_left_to_the_codec():
    codec = Affine(4, "channel", 8)
    fields = codec.encode(torch.randn(2, 2, 16, 24))
    wider, longer, more = torch.empty(2, 2, 16, 32), torch.empty(2, 2, 24, 24), torch.empty(3, 2, 16, 24)
    for out in (wider, longer, more, torch.empty(2, 2, 16, 24).double(), torch.empty(2, 2, 16, 48)[..., ::2]):
        assert not native_codecs.decode(codec, fields, out)
    into = torch.empty(2, 2, 16, 48)[..., ::2]
    assert torch.equal(decode(codec, fields, 24, torch.float32, out=into), codec.decode(fields, 24, torch.float32))


def test_threads_make_no_difference():
    x = torch.randn(5, 3, 128, 80)
    torch.set_num_threads(3)
    try:
        for codec in (Affine(4, "channel"), Affine(2, "token", 32, "hadamard")):
            assert x.numel() > native_codecs.FEW
            check_decode(codec, check_encode(codec, x), 80, torch.bfloat16)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["int4", "int3/token/g32/hadamard", "int6", "fp16", "nf4"])
@pytest.mark.parametrize("built", [True, False])
def test_coding_serves_every_codec(name, built, monkeypatch):
    if not built:
        monkeypatch.setattr(native_codecs, "at_hand", lambda device: False)
    monkeypatch.setattr(coding, "CHUNK_ELEMENTS", 3 * 128 * 64)  # a block at once
    codec = get_codec(name)
    x = torch.randn(3, 128, 3, 64).transpose(1, 2).bfloat16()
    fields, expected = encode(codec, x), codec.encode(x)
    for field in expected:
        same(fields[field], expected[field])
    decoded = decode(codec, fields, 64, torch.bfloat16)
    assert relative_rms(decoded, codec.decode(expected, 64, torch.bfloat16)) < 1e-3
    room = torch.zeros(3, 1 + 3 * 128, 70, dtype=torch.bfloat16)
    into = torch.unflatten(room[:, 1:, 3:67], 1, (3, 128)).transpose(0, 1)
    assert decode(codec, fields, 64, torch.bfloat16, out=into) is into
    same(into, decoded)
    assert not room[:, 0].any()
    assert not room[..., :3].any()
    assert not room[..., 67:].any()


def fill(codec, chunks, heads=2, rows=2, sinks=4, offset=None):
    """A history of blocks of 16 tokens; what its rows hold, and what was decoded at the end."""
    pool = SlotPool()
    table = Rows(pool, 16, 8)
    calls = Calls(table)
    history, values = History(codec, pool, 16, sinks, offset), History(Raw(), pool, 16, sinks)
    layer = Layer(history, values, partial(Resident, pool))
    generator = torch.Generator().manual_seed(0)
    for count in chunks:
        fresh = (torch.randn(rows, heads, count, 24, generator=generator) * 3).bfloat16()
        dense = decoded(layer.append(fresh, fresh, calls.take(0, rows, count))[0])[0]
    return layer, table, dense


@pytest.mark.parametrize("spec", [{"codec": "int4"}, {"codec": "int3", "axis": "token", "rotate": "hadamard"}])
@pytest.mark.parametrize("offset", [None, lambda positions, like: positions[None, :, None] * torch.ones(2, 1, 24)])
def test_the_cache_seals_the_same_bytes_without_the_library(spec, offset, monkeypatch):
    codec = get_codec(spec, block_tokens=16)
    with_library = fill(codec, (70, 1, 30), offset=offset)
    monkeypatch.setattr(native_codecs, "at_hand", lambda device: False)
    without = fill(codec, (70, 1, 30), offset=offset)
    count = 0
    for one, other in zip(with_library[1].rows, without[1].rows, strict=True):
        for number in range(len(one.slots)):
            first, second = (
                layer.block(table, row, number).key
                for (layer, table, _), row in ((with_library, one), (without, other))
            )
            for name, field in first.fields.items():
                same(field, second.fields[name])
            count += 1
    assert count == 2 * 5
    assert relative_rms(with_library[2], without[2]) < 1e-3


def test_sealing_leaves_the_tokens_of_its_call_alone():
    """A single head's tail is a row of blocks already: sinks must not be overwritten where they are attended."""
    *_, lossy = fill(Affine(8, "channel", 16), (10, 40), heads=1)
    *_, exact = fill(Raw(), (10, 40), heads=1)
    same(lossy, exact)
