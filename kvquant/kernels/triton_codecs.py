"""Triton kernels that encode and decode affine codes (launched by ``gpu_codecs.py``), as ``codecs/affine.py`` does.

Tiles that are encoded are ``[groups, parts, tokens, channels]``: a part's channels share bytes with those of other
parts, as ``codecs/packing.py`` lays them out, so that codes are packed where they are computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

FP16_MAX = tl.constexpr(65504.0)
REFINEMENTS = tl.constexpr(4)
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
def _sum(x: tl.tensor, PER_TOKEN: tl.constexpr) -> tl.tensor:
    """Sum over each group, dimensions kept, of numbers whose sums are exact."""
    return tl.sum(tl.sum(x, 3, keep_dims=True), 1, keep_dims=True) if PER_TOKEN else tl.sum(x, 2, keep_dims=True)


@triton.jit
def _most(x: tl.tensor, PER_TOKEN: tl.constexpr) -> tl.tensor:
    """Largest of each group, dimensions kept."""
    return tl.max(tl.max(x, 3, keep_dims=True), 1, keep_dims=True) if PER_TOKEN else tl.max(x, 2, keep_dims=True)


@triton.jit
def _halves(x: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """Sum over the middle of ``[…, COUNT, …]``, a power of two, one half and the other at a time."""
    return x if COUNT == 1 else _halves(tl.sum(tl.reshape(x, (x.shape[0], 2, COUNT // 2, x.shape[2])), 1), COUNT // 2)


@triton.jit
def _ordered_sum(x: tl.tensor, PER_TOKEN: tl.constexpr) -> tl.tensor:
    """Sum over each group, dimensions kept, in the order of ``_sum`` in ``codecs/affine.py``."""
    GROUPS: tl.constexpr = x.shape[0]
    SPREAD: tl.constexpr = x.shape[1]
    ROWS: tl.constexpr = x.shape[2]
    WIDTH: tl.constexpr = x.shape[3]
    if PER_TOKEN:
        result = _halves(tl.reshape(x, (GROUPS, SPREAD, ROWS * WIDTH)), SPREAD)
        result = tl.reshape(_halves(tl.reshape(result, (GROUPS * ROWS, WIDTH, 1)), WIDTH), (GROUPS, 1, ROWS, 1))
    else:
        result = tl.reshape(_halves(tl.reshape(x, (GROUPS * SPREAD, ROWS, WIDTH)), ROWS), (GROUPS, SPREAD, 1, WIDTH))
    return result


@triton.jit
def _steps(x: tl.tensor, zero: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Values in steps of ``scale`` above ``zero``; of a constant group, whose scale is 0, any do."""
    return tl.div_rn(x - zero, tl.broadcast_to(tl.where(scale > 0, scale, 1.0), x.shape))


@triton.jit
def _divided(x: tl.tensor, by: tl.constexpr) -> tl.tensor:
    """``x / by``, rounded to nearest, which "/" is not."""
    return tl.div_rn(x, tl.full(x.shape, by, tl.float32))


@triton.jit
def _shrunk(index: tl.tensor) -> tl.tensor:
    """One of the shares of a half-range that are tried."""
    return tl.where(index == 0, 1.0, tl.where(index == 1, 0.8, 0.6))


@triton.jit
def _search(
    x: tl.tensor,
    inside: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    TOP: tl.constexpr,
    PER_TOKEN: tl.constexpr,
) -> tl.tensor:
    """Zero and scale of least squared error on a grid of narrower ranges (`Affine._search`)."""
    middle = (low + high) / 2
    best = tl.full(low.shape, float("inf"), tl.float32)
    zero, scale = low, _divided(high - low, TOP)
    for index in tl.range(9):  # all of them at once would fill the registers
        below, above = _shrunk(tl.cast(index // 3, tl.int32)), _shrunk(tl.cast(index % 3, tl.int32))
        lowest = middle - (middle - low) * below
        step = _divided((high - middle) * above + (middle - low) * below, TOP)
        codes = _round(_clamp(_steps(x, lowest, step), 0.0, TOP * 1.0))
        off = codes * step + lowest - x
        error = _ordered_sum(tl.where(inside, off * off, 0.0), PER_TOKEN)
        better = error < best
        best = tl.where(better, error, best)
        zero, scale = tl.where(better, lowest, zero), tl.where(better, step, scale)
    return zero, scale


@triton.jit
def _fit(
    x: tl.tensor,
    inside: tl.tensor,
    zero: tl.tensor,
    scale: tl.tensor,
    TOP: tl.constexpr,
    COUNT: tl.constexpr,
    FINE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
) -> tl.tensor:
    """Zero and scale of the line of least squared error through the values over their codes (`Affine._fit`).

    Values are counted in steps of 1 / ``FINE``, so that sums over ``COUNT`` of them are exact.
    """
    steps = _round(_clamp(_steps(x, zero, scale) * FINE, -2.0 * TOP * FINE, 3.0 * TOP * FINE))
    steps = tl.where(inside, steps, 0.0)
    codes = _clamp(_round(steps * (1.0 / FINE)), 0.0, TOP * 1.0)
    sum_steps, sum_codes = _sum(steps, PER_TOKEN), _sum(codes, PER_TOKEN)
    products, squares = _sum(steps * codes, PER_TOKEN), _sum(codes * codes, PER_TOKEN)
    spread = squares - _divided(sum_codes * sum_codes, COUNT)
    slope = products - _divided(sum_codes * sum_steps, COUNT)
    slope = tl.div_rn(slope, tl.where(spread == 0, 1.0, spread)) * (1.0 / FINE)
    start = _divided(sum_steps * (1.0 / FINE) - slope * sum_codes, COUNT)
    fits = (spread != 0) & (tl.abs(slope) < float("inf"))
    return tl.where(fits, zero + scale * start, zero), tl.where(fits, scale * slope, scale)


@triton.jit
def _range(
    x: tl.tensor,
    inside: tl.tensor,
    BITS: tl.constexpr,
    FITTED: tl.constexpr,
    COUNT: tl.constexpr,
    FINE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
) -> tl.tensor:
    """What the lowest and the highest code of each group stand for (`Affine._range`)."""
    TOP: tl.constexpr = (1 << BITS) - 1
    low = -_most(tl.where(inside, -x, float("-inf")), PER_TOKEN)
    high = _most(tl.where(inside, x, float("-inf")), PER_TOKEN)
    some = low <= high
    low, high = tl.where(some, low, 0.0), tl.where(some, high, 0.0)
    if BITS == 4 and FITTED:
        scale = _divided(high - low, TOP)
        half = scale / 2
        zero, slope = _fit(x, inside, low, scale, TOP, COUNT, FINE, PER_TOKEN)
        end = _clamp(zero + TOP * slope, high - half, high + half)
        low, high = _clamp(zero, low - half, low + half), end
    elif BITS < 4:
        zero, scale = _search(x, inside, low, high, TOP, PER_TOKEN)
        for _ in tl.range(REFINEMENTS):
            zero, scale = _fit(x, inside, zero, scale, TOP, COUNT, FINE, PER_TOKEN)
        low, high = zero, zero + TOP * scale
    return low, high


@triton.jit
def _packed(numbers: tl.tensor) -> tl.tensor:
    """Bytes ``[1, 1, tokens, bytes]`` of what each part adds to them."""
    return tl.sum(tl.sum(numbers, 0, keep_dims=True), 1, keep_dims=True).to(tl.uint8)


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
    c_block: tl.tensor,
    p_block: tl.tensor,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    HIGH: tl.constexpr,
    FITTED: tl.constexpr,
    GROUPS: tl.constexpr,
    SPREAD: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    COUNT: tl.constexpr,
    FINE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
) -> None:
    """Encode ``ROWS`` tokens and ``WIDTH`` channels of each of their parts: whole groups of ``COUNT``.

    Grid: (blocks · heads, tiles of tokens, tiles of channels). ``x`` is any float ``[blocks, heads, SIZE, DIM]``,
    ``codes`` uint8 ``[blocks, heads, SIZE, …]``; ``scales`` and ``zeros`` are float16, per channel
    ``[blocks, heads, SIZE / COUNT, DIM]`` or ``PER_TOKEN`` ``[blocks, heads, SIZE, DIM / COUNT]``. Within a block each
    is dense; from block to block it is ``c_block``, or ``p_block``. Parts come as ``GROUPS`` of ``SPREAD``, over which
    a token's group is spread. ``HIGH`` are the bits of codes' second plane, if any. ``FITTED`` says whether 4 bits cut
    off extremes. ``beyond``, int32 ``[1]``, becomes 1 where float16 cannot hold a range.
    """
    TOP: tl.constexpr = (1 << BITS) - 1
    PARTS: tl.constexpr = GROUPS * SPREAD
    LANES: tl.constexpr = (DIM + PARTS - 1) // PARTS  # channels of a part
    LOW: tl.constexpr = BITS - HIGH
    SHARES: tl.constexpr = LOW // HIGH if HIGH else 1  # of the first plane's bytes, as many as a part has lanes
    BYTES: tl.constexpr = (SHARES + 1) * LANES if HIGH else LANES
    pair = tl.program_id(0).to(tl.int64)
    part = (tl.arange(0, GROUPS)[:, None] * SPREAD + tl.arange(0, SPREAD)[None, :])[:, :, None, None]
    row, column = tl.arange(0, ROWS_PADDED), tl.arange(0, WIDTH_PADDED)
    token, lane = tl.program_id(1) * ROWS + row, tl.program_id(2) * WIDTH + column
    rows = ((row < ROWS) & (token < SIZE))[None, None, :, None]
    columns = ((column < WIDTH) & (lane < LANES))[None, None, None, :]
    token, lane = token[None, None, :, None], lane[None, None, None, :]
    channel = part * LANES + lane
    channels = columns & (channel < DIM)
    inside = rows & channels
    source = x + pair // heads * x_block + pair % heads * x_head
    values = tl.load(source + token * x_row + channel, mask=inside, other=0.0).to(tl.float32)

    low, high = _range(values, inside, BITS, FITTED, COUNT, FINE, PER_TOKEN)
    tl.store(beyond, 1, mask=tl.max(tl.maximum(tl.abs(low), tl.abs(high))) > FP16_MAX)
    zero = _round_down(low)
    scale = -_round_down(-_divided(high - zero, TOP))

    steps = _round(_clamp(_steps(values, zero, scale), 0.0, TOP * 1.0))
    numbers = tl.where(inside, steps, 0.0).to(tl.int32)
    places = codes + pair // heads * c_block + (pair % heads * SIZE + token) * BYTES + lane
    held = rows & columns
    if HIGH:  # the low bits of each code, of every SHARES-th part in the same bytes; then the high ones, of all
        for share in tl.static_range(SHARES):
            own = tl.where(part % SHARES == share, (numbers & ((1 << LOW) - 1)) << (LOW * (part // SHARES)), 0)
            tl.store(places + share * LANES, _packed(own), mask=held)
        tl.store(places + SHARES * LANES, _packed((numbers >> LOW) << (HIGH * part)), mask=held)
    else:
        tl.store(places, _packed(numbers << (BITS * part)), mask=held)

    if PER_TOKEN:
        IN_TOKEN: tl.constexpr = DIM // COUNT
        group = tl.arange(0, GROUPS)[:, None, None, None] * (1 if SPREAD > 1 else LANES // WIDTH) + tl.program_id(2)
        at = (pair % heads * SIZE + token) * IN_TOKEN + group
        stored = rows & (group < IN_TOKEN)
    else:
        at = (pair % heads * (SIZE // ROWS) + tl.program_id(1)) * DIM + channel
        stored = channels
    at += pair // heads * p_block
    tl.store(scales + at, scale.to(tl.float16), mask=stored)
    tl.store(zeros + at, zero.to(tl.float16), mask=stored)


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
    o_block: tl.tensor,
    o_head: tl.tensor,
    o_row: tl.tensor,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    HIGH: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES_PADDED: tl.constexpr,
    BOUNDED: tl.constexpr,
) -> None:
    """Decode ``ROWS`` tokens of a head. Grid: (blocks · heads, tiles of tokens).

    ``output`` is any float ``[blocks, heads, SIZE, DIM]``, ``BOUNDED`` if float16. The parameters of (token, channel)
    lie at (token // ``SPAN``, channel // ``GROUP``).
    """
    PARTS: tl.constexpr = 8 // HIGH if HIGH else 8 // BITS
    LOW: tl.constexpr = BITS - HIGH
    SHARES: tl.constexpr = LOW // HIGH if HIGH else 1
    LANES: tl.constexpr = (DIM + PARTS - 1) // PARTS  # channels of a part
    pair = tl.program_id(0).to(tl.int64)
    token, lane = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES_PADDED)
    stored = (token < SIZE)[:, None] & (lane < LANES)[None, :]
    source = codes + pair // heads * c_block + pair % heads * c_head + token[:, None] * c_row + lane[None, :]
    packed = ()  # as `encode_kernel` writes them
    for share in tl.static_range(SHARES + 1 if HIGH else 1):
        packed = packed + (tl.load(source + share * LANES, mask=stored, other=0).to(tl.int32),)
    target = output + pair // heads * o_block + pair % heads * o_head + (token * o_row)[:, None]
    params = pair // heads * p_block + pair % heads * p_head + (token // SPAN * p_row)[:, None]
    for part in tl.static_range(PARTS):
        channel = part * LANES + lane
        inside = stored & (channel < DIM)[None, :]
        if GROUP % LANES == 0:  # one pair for a token and part
            places, known = params + part * LANES // GROUP, (token < SIZE)[:, None]
        else:
            places, known = params + (channel // GROUP)[None, :], inside
        scale = tl.load(scales + places, mask=known, other=0.0).to(tl.float32)
        zero = tl.load(zeros + places, mask=known, other=0.0).to(tl.float32)
        numbers = (packed[part % SHARES] >> (LOW * (part // SHARES))) & ((1 << LOW) - 1)
        if HIGH:
            numbers |= ((packed[SHARES] >> (HIGH * part)) & ((1 << HIGH) - 1)) << LOW
        values = numbers.to(tl.float32) * scale + zero
        if BOUNDED:
            values = _clamp(values, -FP16_MAX, FP16_MAX)
        tl.store(target + channel[None, :], values.to(output.dtype.element_ty), mask=inside)
