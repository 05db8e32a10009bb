"""Triton kernels that encode and decode affine codes (called by ``gpu.py``); methods as in ``codecs/affine.py``.

Tiles are ``[parts, tokens, bytes]``: part p of the channels shares bytes with the others, as ``codecs/packing.py``
lays them out, so that a tile's codes are packed where they are computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

FP16_MAX = tl.constexpr(65504.0)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 · 2²³: added and taken away, it rounds to an integer, halves to even


@triton.jit
def _round(x: tl.tensor) -> tl.tensor:
    """To the nearest integer, of magnitudes below 2²²."""
    return (x + ROUNDER) - ROUNDER


@triton.jit
def _clamp(x: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """``x``, kept within ``low`` and ``high``."""
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _round_down(x: tl.tensor) -> tl.tensor:
    """The largest float16 value ≤ ``x``, as float32; what float16 cannot hold is cut to what it can."""
    x = _clamp(x, -FP16_MAX, FP16_MAX)
    half = x.to(tl.float16)
    near = half.to(tl.float32)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    below = tl.where(near > 0, bits - 1, tl.where(near < 0, bits + 1, -32767)).to(tl.int16)
    return tl.where(near > x, below.to(tl.float16, bitcast=True).to(tl.float32), near)


@triton.jit
def _sum(x: tl.tensor, AXIS: tl.constexpr, SHARED: tl.constexpr) -> tl.tensor:
    """Sum over each group, dimensions kept; ``SHARED`` if the parts are of one group."""
    result = tl.sum(x, AXIS, keep_dims=True)
    return tl.sum(result, 0, keep_dims=True) if SHARED else result


@triton.jit
def _most(x: tl.tensor, AXIS: tl.constexpr, SHARED: tl.constexpr) -> tl.tensor:
    """Largest of each group, dimensions kept."""
    result = tl.max(x, AXIS, keep_dims=True)
    return tl.max(result, 0, keep_dims=True) if SHARED else result


@triton.jit
def _steps(x: tl.tensor, zero: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Values in steps of ``scale`` above ``zero``; of a constant group, whose scale is 0, any do."""
    return tl.div_rn(x - zero, tl.where(scale > 0, scale, 1.0))


@triton.jit
def _fit(
    x: tl.tensor,
    inside: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    TOP: tl.constexpr,
    COUNT: tl.constexpr,
    FINE: tl.constexpr,
    AXIS: tl.constexpr,
    SHARED: tl.constexpr,
) -> tl.tensor:
    """What the lowest and the highest code stand for, by one least-squares fit (`Affine._fit` and `Affine._range`).

    Values are counted in steps of 1 / ``FINE``, so that sums over ``COUNT`` of them are exact.
    """
    scale = tl.div_rn(high - low, TOP * 1.0)  # "/" is not rounded to nearest
    steps = _round(_clamp(_steps(x, low, scale) * FINE, -2.0 * TOP * FINE, 3.0 * TOP * FINE))
    steps = tl.where(inside, steps, 0.0)
    codes = _clamp(_round(steps * (1.0 / FINE)), 0.0, TOP * 1.0)
    sum_steps, sum_codes = _sum(steps, AXIS, SHARED), _sum(codes, AXIS, SHARED)
    products, squares = _sum(steps * codes, AXIS, SHARED), _sum(codes * codes, AXIS, SHARED)
    spread = squares - tl.div_rn(sum_codes * sum_codes, COUNT * 1.0)
    fits = spread > 0
    slope = products - tl.div_rn(sum_codes * sum_steps, COUNT * 1.0)
    slope = tl.div_rn(slope, tl.where(fits, spread, 1.0)) * (1.0 / FINE)
    start = tl.div_rn(sum_steps * (1.0 / FINE) - slope * sum_codes, COUNT * 1.0)
    zero = tl.where(fits, low + scale * start, low)
    slope = tl.where(fits, scale * slope, scale)
    half = scale / 2
    return _clamp(zero, low - half, low + half), _clamp(zero + TOP * slope, high - half, high + half)


@triton.jit
def encode_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    beyond: tl.tensor,
    heads: tl.tensor,
    x_block: tl.tensor,
    x_head: tl.tensor,
    x_row: tl.tensor,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    COUNT: tl.constexpr,
    FINE: tl.constexpr,
    AXIS: tl.constexpr,
    SHARED: tl.constexpr,
) -> None:
    """Encode ``ROWS`` tokens and ``WIDTH`` bytes of a token: whole groups of ``COUNT`` values.

    Grid: (blocks · heads, tiles of tokens, tiles of bytes). ``x`` is any float ``[blocks, heads, SIZE, DIM]``,
    ``codes`` uint8 ``[blocks, heads, SIZE, BYTES]``; ``scales`` and ``zeros`` are float16, per channel (``AXIS`` 1)
    ``[blocks, heads, SIZE / COUNT, DIM]`` or per token (``AXIS`` 2) ``[blocks, heads, SIZE, DIM / COUNT]``.
    ``SHARED`` says that a group is all of a token. ``beyond``, int32 ``[1]``, becomes 1 where float16 cannot hold a
    range.
    """
    PARTS: tl.constexpr = 8 // BITS
    TOP: tl.constexpr = (1 << BITS) - 1
    pair = tl.program_id(0).to(tl.int64)
    row, column, part = tl.arange(0, ROWS_PADDED), tl.arange(0, WIDTH_PADDED), tl.arange(0, PARTS)
    token, byte = tl.program_id(1) * ROWS + row, tl.program_id(2) * WIDTH + column
    rows = (row < ROWS) & (token < SIZE)
    columns = (column < WIDTH) & (byte < BYTES)
    channel = part[:, None, None] * BYTES + byte[None, None, :]
    channels = columns[None, None, :] & (channel < DIM)
    inside = rows[None, :, None] & channels
    source = x + pair // heads * x_block + pair % heads * x_head
    values = tl.load(source + token[None, :, None] * x_row + channel, mask=inside, other=0.0).to(tl.float32)

    low = -_most(tl.where(inside, -values, float("-inf")), AXIS, SHARED)
    high = _most(tl.where(inside, values, float("-inf")), AXIS, SHARED)
    some = low <= high
    low, high = tl.where(some, low, 0.0), tl.where(some, high, 0.0)
    if BITS == 4:
        low, high = _fit(values, inside, low, high, TOP, COUNT, FINE, AXIS, SHARED)
    tl.store(beyond, 1, mask=tl.max(tl.maximum(tl.abs(low), tl.abs(high))) > FP16_MAX)
    zero = _round_down(low)
    scale = -_round_down(-tl.div_rn(high - zero, TOP * 1.0))

    steps = _round(_clamp(_steps(values, zero, scale), 0.0, TOP * 1.0))
    numbers = tl.where(inside, steps, 0.0).to(tl.int32) << (BITS * part)[:, None, None]
    places = pair * SIZE * BYTES + token[:, None] * BYTES + byte[None, :]
    tl.store(codes + places, tl.sum(numbers, 0).to(tl.uint8), mask=rows[:, None] & columns[None, :])

    if AXIS == 1:
        at = (pair * (SIZE // ROWS) + tl.program_id(1)) * DIM + channel
        held = channels
    else:
        GROUPS: tl.constexpr = DIM // COUNT
        group = tl.arange(0, 1 if SHARED else PARTS) * (BYTES // WIDTH) + tl.program_id(2)
        at = (pair * SIZE + token[None, :, None]) * GROUPS + group[:, None, None]
        held = rows[None, :, None] & (group < GROUPS)[:, None, None]
    tl.store(scales + at, scale.to(tl.float16), mask=held)
    tl.store(zeros + at, zero.to(tl.float16), mask=held)


@triton.jit
def decode_kernel(
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    output: tl.tensor,
    heads: tl.tensor,
    c_block: tl.tensor,
    c_head: tl.tensor,
    c_row: tl.tensor,
    p_block: tl.tensor,
    p_head: tl.tensor,
    p_row: tl.tensor,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    BOUNDED: tl.constexpr,
) -> None:
    """Decode ``ROWS`` tokens of a head. Grid: (blocks · heads, tiles of tokens).

    ``output`` is any float ``[blocks, heads, SIZE, DIM]``, ``BOUNDED`` if float16. The parameters of (token, channel)
    lie at (token // ``SPAN``, channel // ``GROUP``).
    """
    PARTS: tl.constexpr = 8 // BITS
    pair = tl.program_id(0).to(tl.int64)
    token, byte = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH_PADDED)
    stored = (token < SIZE)[:, None] & (byte < BYTES)[None, :]
    source = codes + pair // heads * c_block + pair % heads * c_head
    packed = tl.load(source + token[:, None] * c_row + byte[None, :], mask=stored, other=0).to(tl.int32)
    params = pair // heads * p_block + pair % heads * p_head + (token // SPAN * p_row)[:, None]
    for part in tl.static_range(PARTS):
        channel = part * BYTES + byte
        inside = stored & (channel < DIM)[None, :]
        places = params + (channel // GROUP)[None, :]
        scale = tl.load(scales + places, mask=inside, other=0.0).to(tl.float32)
        zero = tl.load(zeros + places, mask=inside, other=0.0).to(tl.float32)
        values = ((packed >> (BITS * part)) & ((1 << BITS) - 1)).to(tl.float32) * scale + zero
        if BOUNDED:
            values = _clamp(values, -FP16_MAX, FP16_MAX)
        target = output + pair * SIZE * DIM + token[:, None] * DIM + channel[None, :]
        tl.store(target, values.to(output.dtype.element_ty), mask=inside)
