"""What every codec owes its users, as tests.

class TestMyCodec(CodecContract):
    codec = MyCodec()
    sqnr_floor = 20.0
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ..codecs import Codec, Fields, get_codec
from .measures import sqnr_db


class CodecContract:
    """What every codec owes its users. Subclass it, set ``codec``, and let pytest collect it.

    ``sqnr_floor`` is the least signal to noise, in dB, on standard normal blocks of 3 × 128 × 64.
    """

    codec: Codec
    sqnr_floor: float
    block_tokens = 128
    dims = (64, 80, 96, 15, 1, 128)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def blocks(self, n: int = 3, heads: int = 3, dim: int = 64, seed: int = 0) -> Tensor:
        """Standard normal blocks ``[n, heads, block_tokens, dim]``."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(n, heads, self.block_tokens, dim, generator=generator)

    def roundtrip(self, x: Tensor) -> Tensor:
        """Encode and decode."""
        return self.codec.decode(self.codec.encode(x), x.shape[-1], x.dtype)

    def test_fidelity(self) -> None:
        """Noise stays below the floor."""
        x = self.blocks()
        assert sqnr_db(self.roundtrip(x), x) >= self.sqnr_floor

    def test_lossless_means_lossless(self) -> None:
        """`lossless` says what happens."""
        x = self.blocks()
        assert torch.equal(self.roundtrip(x), x) == self.codec.lossless

    def test_name_gives_the_codec_back(self) -> None:
        """`name` is canonical."""
        assert get_codec(self.codec.name, block_tokens=self.block_tokens) == self.codec

    def test_shape_and_dtype_come_back(self) -> None:
        """Every head size and float dtype is served."""
        for dim in self.dims:
            for dtype in self.dtypes:
                x = self.blocks(n=2, dim=dim).to(dtype)
                decoded = self.roundtrip(x)
                assert decoded.shape == x.shape
                assert decoded.dtype == dtype
                assert decoded.isfinite().all()
                assert self.codec.lossless or sqnr_db(decoded, x) >= self.sqnr_floor - 2  # bfloat16 rounds once more

    def test_layout_is_what_encode_returns(self) -> None:
        """`layout` tells the truth."""
        for dim in self.dims:
            for dtype in self.dtypes:
                x = self.blocks(n=2, dim=dim).to(dtype)
                layout = self.codec.layout(x.shape[1], self.block_tokens, dim, dtype)
                fields = self.codec.encode(x)
                described = {name: (tuple(f.shape[1:]), f.dtype) for name, f in fields.items()}
                assert described == layout

    def test_views_encode_like_contiguous_tensors(self) -> None:
        """Strides do not matter."""
        x = self.blocks(n=4)
        for view in (x[::2], x.transpose(0, 1).contiguous().transpose(0, 1), x.flip(0).flip(0), x[:, ::2]):
            assert_same_fields(self.codec.encode(view), self.codec.encode(view.clone()))

    def test_fields_whose_blocks_lie_apart(self) -> None:
        """Nor do they in decoding: a block's fields may be views of a record that holds more."""
        for heads, dim in itertools.product((1, 3), self.dims):
            fields = self.codec.encode(self.blocks(heads=heads, dim=dim))
            apart = {name: torch.stack((f, torch.full_like(f, 99)), dim=1)[:, 0] for name, f in fields.items()}
            decoded, expected = (self.codec.decode(each, dim, torch.float32) for each in (apart, fields))
            assert torch.equal(decoded, expected)

    def test_a_block_does_not_depend_on_its_batch(self) -> None:
        """Codes depend on their block alone, bit for bit, also where a sum's order would show in its last bit."""
        for dim in self.dims:
            x = self.blocks(n=7, dim=dim)
            together = self.codec.encode(x.transpose(1, 2).contiguous().transpose(1, 2))
            for index in range(len(x)):
                alone = self.codec.encode(x[index : index + 1])
                assert_same_fields({k: f[index : index + 1] for k, f in together.items()}, alone)

    def test_input_is_left_alone(self) -> None:
        """Encoding has no side effect."""
        x = self.blocks()
        before = x.clone()
        self.codec.encode(x)
        assert torch.equal(x, before)

    def test_degenerate_blocks(self) -> None:
        """Constant blocks, zeros of both signs and tiny values come back."""
        for constant in (0.0, -0.0, 100.0, 1e-7, -3.5):
            x = torch.full((1, 2, self.block_tokens, 64), constant)
            decoded = self.roundtrip(x)
            assert decoded.isfinite().all()
            assert (decoded - x).abs().max() <= max(abs(constant) / 32, 2**-24)

    def test_huge_values_stay_finite(self) -> None:
        """Values beyond float16 are served."""
        x = self.blocks() * 1e6
        decoded = self.roundtrip(x)
        assert decoded.isfinite().all()
        assert sqnr_db(decoded, x) >= self.sqnr_floor

    def test_no_blocks(self) -> None:
        """An empty batch is a batch."""
        fields = self.codec.encode(self.blocks()[:0])
        assert self.codec.decode(fields, 64, torch.float32).shape == (0, 3, self.block_tokens, 64)


def assert_same_fields(actual: Fields, expected: Fields) -> None:
    """Assert that two encodings are equal bit for bit."""
    assert actual.keys() == expected.keys()
    for name, field in expected.items():
        assert actual[name].dtype == field.dtype, name
        assert torch.equal(actual[name], field), name
