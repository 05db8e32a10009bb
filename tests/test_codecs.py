"""Codecs: the shipped contract, an independent implementation, and the half-step guarantee."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant.codecs import Affine, BitsAndBytes, Raw, get_codec
from kvquant.codecs.affine import BITS
from kvquant.codecs.bnb import GROUPS
from kvquant.codecs.packing import pack, packed_width, unpack
from kvquant.codecs.rotation import hadamard, segments, unrotate
from kvquant.testing import CodecContract, assert_same_fields, relative_rms

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


class TestRaw(CodecContract):
    codec = Raw()
    sqnr_floor = float("inf")


class TestInt8Channel(CodecContract):
    codec = Affine(8, "channel")
    sqnr_floor = 45.0


class TestInt8Token(CodecContract):
    codec = Affine(8, "token")
    sqnr_floor = 45.0


class TestInt6Channel(CodecContract):
    codec = Affine(6, "channel")
    sqnr_floor = 33.0


class TestInt6ChannelWholeBlock(CodecContract):
    codec = Affine(6, "channel", group=128)
    sqnr_floor = 32.0


class TestInt5Token(CodecContract):
    codec = Affine(5, "token")
    sqnr_floor = 26.8


class TestInt5Rotated(CodecContract):
    codec = Affine(5, "token", rotate="hadamard")
    sqnr_floor = 26.8


class TestInt4Channel(CodecContract):
    codec = Affine(4, "channel")
    sqnr_floor = 20.5


class TestInt4Token(CodecContract):
    codec = Affine(4, "token")
    sqnr_floor = 20.5


class TestInt4Rotated(CodecContract):
    codec = Affine(4, "token", rotate="hadamard")
    sqnr_floor = 20.5


class TestInt4ChannelRotatedWholeBlock(CodecContract):
    codec = Affine(4, "channel", group=128, rotate="hadamard")
    sqnr_floor = 19.5


class TestInt3Channel(CodecContract):
    codec = Affine(3, "channel")
    sqnr_floor = 15.4


class TestInt3Rotated(CodecContract):
    codec = Affine(3, "token", rotate="hadamard")
    sqnr_floor = 15.4


class TestInt2Channel(CodecContract):
    codec = Affine(2, "channel")
    sqnr_floor = 9.7


class TestInt2Rotated(CodecContract):
    codec = Affine(2, "token", group=32, rotate="hadamard")
    sqnr_floor = 9.7


class TestNF4Channel(CodecContract):
    codec = BitsAndBytes("nf4", "channel")
    sqnr_floor = 20.5


class TestNF4Rotated(CodecContract):
    codec = BitsAndBytes("nf4", "token", rotate="hadamard")
    sqnr_floor = 20.5


class TestFP4Token(CodecContract):
    codec = BitsAndBytes("fp4", "token", group=32)
    sqnr_floor = 18.5


class TestDynamic8Channel(CodecContract):
    codec = BitsAndBytes("dynamic8", "channel")
    sqnr_floor = 39.5


class TestDynamic8Token(CodecContract):
    codec = BitsAndBytes("dynamic8", "token", group=256)
    sqnr_floor = 39.0
    block_tokens = 256


def plain_affine(x: np.ndarray, codec: Affine) -> tuple[np.ndarray, np.ndarray]:
    """The affine codec for one block, group by group in float64, from its description alone: values and steps."""
    heads, tokens, dim = x.shape
    out, steps = np.empty((2, *x.shape))
    spans = (
        [(slice(t, t + codec.group), slice(c, c + 1)) for t in range(0, tokens, codec.group) for c in range(dim)]
        if codec.axis == "channel"
        else [
            (slice(t, t + 1), slice(c, c + codec.channel_group(dim)))
            for t in range(tokens)
            for c in range(0, dim, codec.channel_group(dim))
        ]
    )
    for head in range(heads):
        for rows, columns in spans:
            group = x[head, rows, columns].astype(np.float64)
            low, high = plain_range(group.ravel(), codec.bits, fits=codec.axis == "channel")
            zero = np.float16(low)
            if zero > low:
                zero = np.nextafter(zero, np.float16(-np.inf))
            exact = np.float32(high - np.float64(zero)) / np.float32(2**codec.bits - 1)
            scale = np.float16(exact)
            if scale < exact:
                scale = np.nextafter(scale, np.float16(np.inf))
            step = np.float64(scale) or 1.0
            codes = np.clip(np.rint((group - np.float64(zero)) / step), 0, 2**codec.bits - 1)
            out[head, rows, columns] = np.float64(zero) + codes * np.float64(scale)
            steps[head, rows, columns] = step
    return out, steps


def plain_range(group: np.ndarray, bits: int, fits: bool) -> tuple[float, float]:
    """What the first and the last code stand for: the extremes, or at 4 bits the ends of a fitted line near them."""
    low, high = group.min(), group.max()
    if bits > 4 or not fits or low == high:
        return low, high
    step = (high - low) / 15
    slope, start = np.polyfit(np.rint((group - low) / step), group, 1)
    return (
        np.clip(start, low - step / 2, low + step / 2),
        np.clip(start + 15 * slope, high - step / 2, high + step / 2),
    )


@pytest.mark.parametrize("bits", [8, 6, 5, 4])
@pytest.mark.parametrize(("axis", "group"), [("channel", 64), ("channel", 32), ("token", 64), ("token", 16)])
@pytest.mark.parametrize("dim", [64, 80, 15])
def test_equals_an_independent_implementation(bits, axis, group, dim):
    codec = Affine(bits, axis, group)
    x = torch.randn(1, 2, 64, dim) * torch.rand(dim).mul(4).exp2() + torch.randn(dim)
    decoded = codec.decode(codec.encode(x), dim, torch.float32)
    expected, step = plain_affine(x[0].numpy(), codec)
    # Codes at an exact half may round either way in float32, and a fit reckons in parts of a step; else they agree.
    fitted = bits == 4 and axis == "channel"
    tolerance = {"rtol": 0, "atol": 0.05 * step} if fitted else {"rtol": 1e-5, "atol": 1e-6}
    close = np.isclose(decoded[0].numpy(), expected, **tolerance)
    assert close.mean() > (0.99 if fitted else 0.9999)
    truth = x[0].double().numpy()
    assert np.square(decoded[0].numpy() - truth).sum() == pytest.approx(np.square(expected - truth).sum(), rel=5e-3)


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from([8, 6, 5, 4]),
    axis=st.sampled_from(["channel", "token"]),
    tokens=st.sampled_from([8, 24, 64, 128]),
    heads=st.integers(1, 3),
    dim=st.integers(1, 130),
    magnitude=st.integers(-30, 20),
    offset=st.sampled_from([0.0, 1.0, -7.0, 300.0]),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**31),
)
def test_every_value_decodes_to_within_half_a_step(bits, axis, tokens, heads, dim, magnitude, offset, dtype, seed):
    codec = get_codec({"codec": f"int{bits}", "axis": axis}, block_tokens=tokens)
    generator = torch.Generator().manual_seed(seed)
    scale = 2.0**magnitude
    x = ((torch.randn(2, heads, tokens, dim, generator=generator) + offset) * scale).to(dtype)
    if not x.isfinite().all():
        return  # beyond float16: nothing to encode
    fields = codec.encode(x)
    decoded = codec.decode(fields, dim, torch.float32)
    step = fields["scale"].float()
    if axis == "channel":
        step = step.repeat_interleave(codec.group, dim=2)
        groups, where = x.float().unflatten(2, (-1, codec.group)), -2
    else:
        step = step.repeat_interleave(codec.channel_group(dim), dim=3)
        groups, where = x.float().unflatten(3, (-1, codec.channel_group(dim))), -1
    if bits == 4:  # a fitted line may be flatter than one from end to end
        span = groups.amax(where, keepdim=True) - groups.amin(where, keepdim=True)
        step = torch.maximum(step, (span / 15).expand(groups.shape).reshape(x.shape))
    error = (decoded - x.float()).abs()
    slack = x.float().abs().amax() * 2**-21  # float32 arithmetic
    assert (error <= step / 2 + slack).all()


def test_float16_parameters_only_where_they_fit_and_block_by_block():
    codec = Affine(8, "channel")
    x = torch.randn(2, 1, 64, 8)
    x[1] *= 1e6
    fields = codec.encode(x)
    assert fields["scale"].dtype == torch.float32
    assert torch.equal(fields["codes"][0], codec.encode(x[:1])["codes"][0])
    assert torch.equal(fields["scale"][0], codec.encode(x[:1])["scale"][0].float())
    assert codec.encode(x[:1])["scale"].dtype == torch.float16


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_int4_takes_the_line_through_its_values_but_clips_no_outlier(axis):
    """Where the values stand between two codes, a line fitted freely would leave the extreme far outside."""
    x = torch.full((1, 1, 64, 64), 1.5)
    x[..., ::2, ::2] = 1.49
    x[..., 1::2, 1::2] = 1.51
    x[:, :, range(64), range(64)] = 0.0
    x[:, :, range(64), [*range(32, 64), *range(32)]] = 15.0
    codec = Affine(4, axis)
    decoded = codec.decode(codec.encode(x), 64, torch.float32)
    assert (decoded[x == 15] >= 14.49).all()
    assert (decoded[x == 0].abs() <= 0.51).all()
    noise = torch.randn(1, 2, 128, 64)
    low, high = (f(noise.unflatten(2, (2, 64)), 3, keepdim=True) for f in (torch.amin, torch.amax))
    plain = (noise.unflatten(2, (2, 64)) - low).div((high - low) / 15).round() * ((high - low) / 15) + low
    between_extremes = (plain.flatten(2, 3) - noise).square().mean()
    codec = Affine(4, "channel")
    assert (codec.decode(codec.encode(noise), 64, torch.float32) - noise).square().mean() < 0.98 * between_extremes


def test_int4_really_is_two_codes_in_a_byte():
    fields = Affine(4, "channel").encode(torch.randn(1, 3, 128, 64))
    assert fields["codes"].numel() == 3 * 128 * 64 // 2
    assert len(fields["codes"].unique()) > 200  # both nibbles carry codes


def test_a_constant_channel_among_others_is_recovered():
    x = torch.randn(1, 1, 128, 64)
    x[..., 5] = 100.0
    decoded = Affine(4, "channel").decode(Affine(4, "channel").encode(x), 64, torch.float32)
    assert (decoded[..., 5] == 100.0).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_zeros_of_two_signs_are_one(bits, axis):
    """Which of them is the lower depends on the machine, and bytes must not."""
    x = torch.tensor([0.0, -0.0, 1.0])[torch.randint(3, (3, 2, 64, 64))]
    x[0] = -0.0
    zero = Affine(bits, axis).encode(x)["zero"]
    assert not zero[zero == 0].signbit().any()


@given(bits=st.sampled_from([1, 2, 3, 4, 5, 6, 8]), dim=st.integers(1, 70), seed=st.integers(0, 99))
@settings(deadline=None)
def test_packing_roundtrip(bits, dim, seed):
    codes = torch.randint(0, 2**bits, (3, 5, dim), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, 5, packed_width(dim, bits))
    assert torch.equal(unpack(packed, bits, dim), codes)


def test_bit_order_is_pinned():
    codes = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [1 | 3 << 4, 2 | 4 << 4]
    assert pack(torch.tensor([1, 2, 3, 0], dtype=torch.uint8), 2).tolist() == [1 | 2 << 2 | 3 << 4]


def test_the_order_of_two_planes_is_pinned():
    """The low bits of all codes come first; what is left of them follows."""
    for bits, low, high in ((3, 2, 1), (5, 4, 1), (6, 4, 2)):
        codes = torch.arange(3, 3 + 24, dtype=torch.uint8).mul_(11).remainder_(1 << bits)
        expected = torch.cat((pack(codes % (1 << low), low), pack(codes >> low, high)))
        assert torch.equal(pack(codes, bits), expected)
    codes = torch.tensor([0b101010, 0b011001, 0b110111, 0b000100], dtype=torch.uint8)
    low = [0b0111_1010, 0b0100_1001]
    assert pack(codes, 6).tolist() == [*low, 0b00_11_01_10]
    assert pack(codes & 31, 5).tolist() == [*low, 0b0110]
    assert pack(codes & 7, 3).tolist() == [0b00_11_01_10, 0b1100]


@pytest.mark.parametrize("dim", [1, 2, 15, 64, 80, 96, 128, 255])
def test_rotation_is_orthonormal_and_its_own_inverse(dim):
    assert sum(segments(dim)) == dim
    x = torch.randn(7, dim)
    rotated = hadamard(x)
    assert relative_rms(rotated.norm(dim=-1), x.norm(dim=-1)) < 1e-6
    assert relative_rms(hadamard(rotated), x) < 1e-6
    assert relative_rms(unrotate(rotated), x) < 1e-6


def test_rotation_is_the_sylvester_matrix():
    expected = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    assert torch.equal(hadamard(torch.eye(4)), expected)


def test_rotation_tames_an_outlier_channel():
    x = torch.randn(1, 1, 128, 64)
    x[..., 3] *= 50
    plain, rotated = Affine(4, "token"), Affine(4, "token", rotate="hadamard")
    error = {c.rotate: relative_rms(c.decode(c.encode(x), 64, torch.float32), x) for c in (plain, rotated)}
    assert error["hadamard"] < error["none"]


@pytest.mark.parametrize(
    ("dim", "group", "expected"),
    [(64, 64, 64), (80, 64, 40), (96, 64, 48), (15, 64, 15), (127, 64, 127), (128, 64, 64)],
)
def test_channel_group_is_valid_for_every_head_size(dim, group, expected):
    assert Affine(4, "token", group).channel_group(dim) == expected
    assert dim % expected == 0


@pytest.mark.parametrize(("bits", "gain"), [(2, 0.55), (3, 0.8)])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_few_bits_take_the_range_of_least_squared_error(bits, gain, axis):
    x = torch.randn(2, 2, 128, 64) + torch.randn(64)
    codec = Affine(bits, axis)
    error = (codec.decode(codec.encode(x), 64, torch.float32) - x).square().mean()
    groups = x.unflatten(2, (2, 64)).transpose(3, 4) if axis == "channel" else x  # a group in the last dimension
    low, high = groups.aminmax(dim=-1, keepdim=True)
    top, middle = 2**bits - 1, (low + high) / 2
    best = None
    for below, above in itertools.product(torch.linspace(1, 0.3, 15).tolist(), repeat=2):
        start, stop = middle + (low - middle) * below, middle + (high - middle) * above
        step = (stop - start) / top
        decoded = start + step * ((groups - start) / step).round().clamp(0, top)
        candidate = (decoded - groups).square().mean(-1)
        best = candidate if best is None else torch.minimum(best, candidate)
        if below == above == 1:
            whole_range = candidate.mean()
    assert error <= 1.03 * best.mean()  # an exhaustive search over 225 ranges
    assert error <= gain * whole_range


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("rotate", ["none", "hadamard"])
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_a_fitted_range_does_not_depend_on_the_batch(bits, rotate, axis):
    """Of thousands of fits a few end where float16 rounds: a sum in another order would show there."""
    codec = get_codec({"codec": f"int{bits}", "axis": axis, "rotate": rotate}, block_tokens=16)
    for seed in range(30):
        x = torch.randn(7, 16, 3, 16, generator=torch.Generator().manual_seed(seed)).transpose(1, 2)
        together = codec.encode(x)
        for index in range(len(x)):
            alone = codec.encode(x[index : index + 1])
            assert_same_fields({name: field[index : index + 1] for name, field in together.items()}, alone)


@pytest.mark.parametrize(("format", "group"), [(name, group) for name, groups in GROUPS.items() for group in groups])
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_bitsandbytes_groups_run_on_over_any_head_size(format, group, axis):
    """Head sizes that are no multiple of the group: each keeps the error it has where they are."""
    codec = get_codec({"codec": format, "axis": axis, "group": group}, block_tokens=256)
    limit = {"nf4": 0.11, "fp4": 0.15, "dynamic8": 0.015}[format]
    for dim in (1, 15, 16, 48, 64, 80, 96, 112, 127, 160):
        x = torch.randn(3, 2, 256, dim, generator=torch.Generator().manual_seed(dim))
        decoded = codec.decode(codec.encode(x), dim, x.dtype)
        assert relative_rms(decoded, x) < limit, dim
        alone = codec.decode(codec.encode(x[1:2]), dim, x.dtype)
        assert torch.equal(alone, decoded[1:2]), dim


@pytest.mark.parametrize("name", ["nf4", "fp4", "dynamic8", "int6", "int5", "int4", "int3"])
def test_float16_near_its_limit_stays_finite_in_every_codec(name):
    codec = get_codec({"codec": name, "axis": "token", "rotate": "hadamard"})
    x = (torch.randn(1, 2, 128, 64) + 6.4e4).clamp(max=65504).half()
    assert codec.decode(codec.encode(x), 64, torch.float16).isfinite().all()
