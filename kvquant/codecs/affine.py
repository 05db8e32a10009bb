"""Affine integer codes: ``x ≈ zero + scale · code``, asymmetric, one (scale, zero) pair per group.

``axis="channel"``: a group is ``group`` consecutive tokens of one channel (for keys, whose outliers sit in fixed
channels). ``axis="token"``: a group is ``group`` channels of one token. Method: KIVI (Liu et al., 2024); with
``rotate="hadamard"``, QuaRot (Ashkboos et al., 2024).

From 5 bits on the codes span a group's extremes: a line as at 4 is 0.1 to 0.2 dB better, and takes longer. At 4 it is
fitted once, by least squares, to the values over the codes they get so, and each end may move by half a step: more
would clip the keys that attention is after. (Per token and without a rotation the extremes are the same channels all
along, and the codes span them.) At 2 and 3 bits the extremes waste codes: the range of least squared error is searched
for, then fitted.

Zero is rounded down and scale up to what float16 holds *before* codes are taken, so that every value decodes to within
half a step, whatever the range; at 4 bits a stored step or a fifteenth of the range, and below not those cut off.

A block whose range float16 cannot hold keeps float32 parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import CodecError, shown
from .base import FP16_MAX, Fields, Layout, to_dtype
from .options import read_axis_and_rotation
from .packing import pack, packed_width, unpack
from .rotation import hadamard, unrotate

BITS = (8, 6, 5, 4, 3, 2)  # of a code
MIN_GROUP = 8  # a group of one value has min == max: it would look lossless and save nothing
MAX_GROUP = 4096
DEFAULT_GROUP = 64
SHRINK = (1.0, 0.8, 0.6)  # shares of the half-ranges below and above the middle that the search tries
REFINEMENTS = 4


@dataclass(frozen=True)
class Affine:
    """``bits``-bit codes of ``group`` values along ``axis``, optionally after a rotation."""

    bits: int
    axis: Literal["channel", "token"]
    group: int = DEFAULT_GROUP
    rotate: Literal["none", "hadamard"] = "none"
    lossless: bool = False

    @property
    def name(self) -> str:
        """E.g. ``int4/channel/g64/none``."""
        return f"int{self.bits}/{self.axis}/g{self.group}/{self.rotate}"

    def layout(self, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Layout:
        """``codes`` uint8 ``[heads, tokens, packed_width]``; ``scale``, ``zero`` float16.

        Parameters are ``[heads, tokens/group, dim]`` (channel) or ``[heads, tokens, dim/group]`` (token).
        """
        if self.axis == "channel":
            params = (heads, tokens // self.group, dim)
        else:
            params = (heads, tokens, dim // self.channel_group(dim))
        return {
            "codes": ((heads, tokens, packed_width(dim, self.bits)), torch.uint8),
            "scale": (params, torch.float16),
            "zero": (params, torch.float16),
        }

    def encode(self, blocks: Tensor) -> Fields:
        """See `Codec.encode`."""
        n, heads, tokens, dim = blocks.shape
        x = blocks.float()
        if self.rotate == "hadamard":
            x = hadamard(x)
        grouped, reduced = self._group(x)
        zero, scale = self._parameters(*self._range(grouped, reduced))
        codes = self._codes(grouped, zero, scale).to(torch.int16).to(torch.uint8)  # at once takes four times as long
        return {
            "codes": pack(codes.reshape(n, heads, tokens, dim), self.bits),
            "scale": scale.squeeze(reduced),
            "zero": zero.squeeze(reduced),
        }

    def decode(self, fields: Fields, dim: int, dtype: torch.dtype) -> Tensor:
        """See `Codec.decode`."""
        codes = unpack(fields["codes"], self.bits, dim)
        grouped, reduced = self._group(codes.float())
        scale = fields["scale"].float().unsqueeze(reduced)
        zero = fields["zero"].float().unsqueeze(reduced)
        x = grouped.mul_(scale).add_(zero).reshape(codes.shape)
        if self.rotate == "hadamard":
            x = unrotate(x)
        return to_dtype(x, dtype)

    def channel_group(self, dim: int) -> int:
        """Channels that share a scale: the largest divisor of ``dim`` up to ``group``.

        A head size with no divisor near ``group`` (127, say) takes all its channels as one group.
        """
        best = _largest_divisor(dim, self.group)
        return best if 2 * best > min(self.group, dim) else dim

    def _group(self, x: Tensor) -> tuple[Tensor, int]:
        """View ``[n, heads, tokens, dim]`` with its groups in a dimension of their own; which one that is."""
        n, heads, tokens, dim = x.shape
        if self.axis == "channel":
            if tokens % self.group:
                raise CodecError(f"group: {self.group} does not divide a block of {tokens} tokens")
            return x.reshape(n, heads, tokens // self.group, self.group, dim), -2
        group = self.channel_group(dim)
        return x.reshape(n, heads, tokens, dim // group, group), -1

    @property
    def _fits(self) -> bool:
        """Whether 4-bit codes may cut off the extremes of a group: not those of a token's channels as they are.

        There the extremes are the same channels in every token, and what is cut off adds up.
        """
        return self.axis == "channel" or self.rotate != "none"

    @property
    def _top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def _codes(self, grouped: Tensor, zero: Tensor, scale: Tensor) -> Tensor:
        return _steps(grouped, zero, scale).round_().clamp_(0, self._top)

    def _range(self, x: Tensor, reduced: int) -> tuple[Tensor, Tensor]:
        """What the lowest and the highest code of each group stand for."""
        # aminmax takes ten times as long on a CPU. Which zero of two these give depends on the machine: it becomes +0.
        low, high = x.amin(reduced, keepdim=True).add_(0.0), x.amax(reduced, keepdim=True).add_(0.0)
        if self.bits > 4 or (self.bits == 4 and not self._fits):
            return low, high
        zero, scale = low, (high - low) / self._top
        if self.bits == 4:
            half = scale / 2
            zero, scale = self._fit(x, zero, scale, reduced)
            return zero.clamp(low - half, low + half), (zero + self._top * scale).clamp(high - half, high + half)
        zero, scale = self._search(x, low, high, reduced)
        for _ in range(REFINEMENTS):
            zero, scale = self._fit(x, zero, scale, reduced)
        return zero, zero + self._top * scale

    def _search(self, x: Tensor, low: Tensor, high: Tensor, reduced: int) -> tuple[Tensor, Tensor]:
        """Zero and scale of least squared error on a grid of narrower ranges."""
        middle = (low + high) / 2
        best = torch.full_like(low, torch.inf)
        zero, scale = low, (high - low) / self._top
        for below, above in itertools.product(SHRINK, SHRINK):
            lowest = middle - (middle - low) * below
            step = ((high - middle) * above + (middle - low) * below) / self._top
            error = _sum(self._codes(x, lowest, step).mul_(step).add_(lowest).sub_(x).square_(), reduced)
            better = error < best
            best = torch.where(better, error, best)
            zero, scale = torch.where(better, lowest, zero), torch.where(better, step, scale)
        return zero, scale

    def _fit(self, x: Tensor, zero: Tensor, scale: Tensor, reduced: int) -> tuple[Tensor, Tensor]:
        """The line of least squared error through the values over their codes: its start and slope.

        Values are counted in whole parts of a step, so that sums are exact in float32. (The order of a sum depends on
        strides and batch; codes must not.)
        """
        top, count = self._top, x.shape[reduced]
        parts = 2 ** (24 - (3 * top * top * count).bit_length())  # a sum's terms are at most 3 · top · top · parts
        steps = _steps(x, zero, scale).mul_(parts).round_().clamp_(-2 * top * parts, 3 * top * parts)
        codes = (steps / parts).round_().clamp_(0, top)
        sum_steps, sum_codes = (part.sum(reduced, keepdim=True) for part in (steps, codes))
        products = steps.mul_(codes).sum(reduced, keepdim=True)
        squares = codes.square_().sum(reduced, keepdim=True)
        slope = (products - sum_codes * sum_steps / count) / (squares - sum_codes * sum_codes / count) / parts
        start = (sum_steps / parts - slope * sum_codes) / count
        fits = slope.isfinite()
        return torch.where(fits, zero + scale * start, zero), torch.where(fits, scale * slope, scale)

    def _parameters(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Zero and scale as stored; float32 holding float16 values unless a block overflows float16."""
        zero = _round_down_fp16(low)
        scale = -_round_down_fp16(-((high - zero) / self._top))
        # Per block, so that a block's parameters never depend on its neighbours.
        wide = torch.maximum(low.abs(), high.abs()).flatten(1).amax(dim=1) > FP16_MAX
        if wide.is_meta or not wide.any():
            return zero.half(), scale.half()
        wide = wide.view(-1, *[1] * (low.dim() - 1))
        return torch.where(wide, low, zero), torch.where(wide, (high - low) / self._top, scale)


def _steps(x: Tensor, zero: Tensor, scale: Tensor) -> Tensor:
    """Values in steps of ``scale`` above ``zero``; of a constant group, whose scale is 0, any do."""
    return (x - zero).div_(torch.where(scale > 0, scale, 1.0))


def _sum(x: Tensor, dim: int) -> Tensor:
    """Sum over ``dim``, kept, always in the same order: that of `torch.sum` depends on strides and batch."""
    while (size := x.shape[dim]) > 1:
        left, right, *odd = torch.split(x, size // 2, dim)
        x = left + right
        if odd:
            x = torch.cat((x, odd[0]), dim)
    return x


def _round_down_fp16(x: Tensor) -> Tensor:
    """The largest float16 value ≤ ``x``, as float32; finite input within float16's range."""
    half = x.half()
    bits = half.view(torch.int16)
    # One step down: a positive float16 is its bit pattern minus one, a negative plus one, zero the least negative.
    below = torch.where(half > 0, bits - 1, torch.where(half < 0, bits + 1, torch.full_like(bits, -32767)))
    return torch.where(half.float() > x, below.view(torch.float16), half).float()


def make_affine(bits: int, options: Mapping[str, Any], role: str, block_tokens: int) -> Affine:
    """Build from a policy's options ``axis``, ``group`` and ``rotate``."""
    axis, rotate = read_axis_and_rotation(f"int{bits}", options, role)
    span = block_tokens if axis == "channel" else MAX_GROUP  # what the group must divide, where that is known
    group = options.get("group", _largest_divisor(span, DEFAULT_GROUP))
    if isinstance(group, bool) or not isinstance(group, int) or not MIN_GROUP <= group <= MAX_GROUP:
        raise CodecError(f"group: {shown(group)}; allowed: an integer from {MIN_GROUP} to {MAX_GROUP}")
    if axis == "channel" and span % group:
        raise CodecError(f"group: {group} does not divide block_tokens {span}; allowed: a divisor of it")
    return Affine(bits, axis, group, rotate)


def _largest_divisor(number: int, limit: int) -> int:
    return max(size for size in range(1, min(limit, number) + 1) if number % size == 0)
