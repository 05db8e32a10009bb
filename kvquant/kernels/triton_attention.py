"""Triton kernels of attention over affine codes (launched by ``gpu_attention.py``).

FlashAttention-2 (Dao, 2023) with the tokens of all rows split over programs (Flash-Decoding), on codes as KIVI (Liu et
al., 2024) leaves them. Codes become float16 in registers, in four operations for two of them: the bits go into the
mantissa of 1024 (Marlin; Frantar et al., 2024), so that no integer is converted. Queries are columns, not rows, of the
products: of those tensor cores take as few as eight at a time, and one step of decoding has few.

A tile of bytes is read as it lies and its channels come in pieces: piece i is channels ``i · WIDTH …``, of one bit
position and, where there are groups of channels, of one group. A side's compile-time numbers are a tuple
(`gpu_attention.Side`): ``DIM`` channels of ``BITS`` bits in ``BYTES`` bytes a token; ``PIECES`` of ``WIDTH``
channels, padded to ``LANES``; the parameters of (token, channel) lie at (token // ``SPAN``, channel // ``GROUP``) of
rows of ``COLUMNS``; ``MODE`` is how many a piece has; ``HIGH`` are the bits of codes' second plane, if any, and then
one piece has all channels.

The table of int64 that all programs share is described in ``gpu_attention.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

PER_TOKEN = tl.constexpr(0)  # one pair for a token and piece
PER_CHANNEL = tl.constexpr(1)  # one pair for a channel and tile
EACH = tl.constexpr(2)  # neither

RUN_WORDS = tl.constexpr(16)  # of the table's rows
ITEM_WORDS = tl.constexpr(8)
ROW_WORDS = tl.constexpr(4)
CODES, DENSE, NEWEST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # kinds of items

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
HEADROOM = tl.constexpr(10.0)  # weights reach 2^10, so that small ones stay above what float16 loses


# Few and large functions: the interpreter takes long to enter one.
@triton.jit
def _codes(codes: tl.tensor, tokens: tl.tensor, present: tl.tensor, magic: tl.tensor, SIDE: tl.constexpr) -> tl.tensor:
    """Codes of each piece, float16 ``[tokens, LANES]``. ``magic`` is 0x6400, the 1024 whose last bits they take.

    (As a constant it would be loaded anew for every use, and would keep values out of shared memory.)
    """
    DIM: tl.constexpr = SIDE[0]
    BITS: tl.constexpr = SIDE[1]
    BYTES: tl.constexpr = SIDE[2]
    PIECES: tl.constexpr = SIDE[3]
    WIDTH: tl.constexpr = SIDE[4]
    LANES: tl.constexpr = SIDE[5]
    HIGH: tl.constexpr = SIDE[10]
    LOW: tl.constexpr = BITS - HIGH
    LOW_BYTES: tl.constexpr = (DIM * LOW + 7) // 8
    HIGH_BYTES: tl.constexpr = BYTES - LOW_BYTES
    lane = tl.arange(0, LANES)
    # Of a mask that is all true, the compiler makes nothing.
    held = tl.full((LANES,), True, tl.int1) if LANES == WIDTH else lane < WIDTH
    inside = present[:, None] & held[None, :]
    source = codes + (tokens * BYTES)[:, None]
    found = ()
    for piece in tl.static_range(PIECES):
        if HIGH:  # the low bits of a code in the first bytes, the others after them
            low = tl.load(source + (lane % LOW_BYTES)[None, :], mask=inside, other=0).to(tl.int32)
            high = tl.load(source + (LOW_BYTES + lane % HIGH_BYTES)[None, :], mask=inside, other=0).to(tl.int32)
            low = (low >> (lane // LOW_BYTES * LOW)[None, :]) & ((1 << LOW) - 1)
            high = (high >> (lane // HIGH_BYTES * HIGH)[None, :]) & ((1 << HIGH) - 1)
            bits = ((high << LOW) | low).to(tl.uint16)
        else:
            packed = tl.load(source + (piece * WIDTH % BYTES + lane)[None, :], mask=inside, other=0)
            bits = (packed & (((1 << BITS) - 1) << (BITS * (piece * WIDTH // BYTES)))).to(tl.uint16)
        shifted = (bits | magic).to(tl.float16, bitcast=True)
        step = tl.full((1, 1), 1.0 / (1 << (BITS * (piece * WIDTH // BYTES))), tl.float16)
        less = tl.full((1, 1), -1024.0 / (1 << (BITS * (piece * WIDTH // BYTES))), tl.float16)
        found = found + (tl.fma(shifted, step, less),)
    return found


@triton.jit
def _parameters(
    scales: tl.tensor, zeros: tl.tensor, begin: tl.tensor, present: tl.tensor, SIDE: tl.constexpr, TOKENS: tl.constexpr
) -> tl.tensor:
    """Scale and zero, and so on, of each piece of ``TOKENS`` tokens from ``begin`` on; of a shape to go with codes."""
    DIM: tl.constexpr = SIDE[0]
    PIECES: tl.constexpr = SIDE[3]
    WIDTH: tl.constexpr = SIDE[4]
    LANES: tl.constexpr = SIDE[5]
    SPAN: tl.constexpr = SIDE[6]
    GROUP: tl.constexpr = SIDE[7]
    COLUMNS: tl.constexpr = SIDE[8]
    MODE: tl.constexpr = SIDE[9]
    tokens, lane = begin + tl.arange(0, TOKENS), tl.arange(0, LANES)
    found = ()
    for piece in tl.static_range(PIECES):
        channel = piece * WIDTH + lane
        if MODE == PER_TOKEN:
            places, known = (tokens * COLUMNS + piece * WIDTH // GROUP)[:, None], present[:, None]
        else:
            held = tl.full((LANES,), True, tl.int1)
            if LANES != WIDTH or DIM % WIDTH != 0:
                held = (lane < WIDTH) & (channel < DIM)
            if MODE == PER_CHANNEL:
                places, known = (begin // SPAN * COLUMNS + channel)[None, :], held[None, :]
            else:
                places = (tokens // SPAN * COLUMNS)[:, None] + (channel // GROUP)[None, :]
                known = present[:, None] & held[None, :]
        found = found + (tl.load(scales + places, mask=known, other=0), tl.load(zeros + places, mask=known, other=0))
    return found


@triton.jit
def _raw(source: tl.tensor, tokens: tl.tensor, row: tl.tensor, counted: tl.tensor, SIDE: tl.constexpr) -> tl.tensor:
    """The pieces of tokens as they are, float32 ``[tokens, LANES]``, 0 where nothing is counted."""
    DIM: tl.constexpr = SIDE[0]
    PIECES: tl.constexpr = SIDE[3]
    WIDTH: tl.constexpr = SIDE[4]
    LANES: tl.constexpr = SIDE[5]
    lane = tl.arange(0, LANES)
    pieces = ()
    for piece in tl.static_range(PIECES):
        channel = piece * WIDTH + lane
        inside = counted[:, None] & ((lane < WIDTH) & (channel < DIM))[None, :]
        loaded = tl.load(source + (tokens * row)[:, None] + channel[None, :], mask=inside, other=0.0)
        pieces = pieces + (loaded.to(tl.float32),)
    return pieces


@triton.jit
def _query(query: tl.tensor, rows: tl.tensor, asked: tl.tensor, SIDE: tl.constexpr) -> tl.tensor:
    """The pieces of the queries, float32 ``[LANES, queries]``, 0 where there is none."""
    DIM: tl.constexpr = SIDE[0]
    PIECES: tl.constexpr = SIDE[3]
    WIDTH: tl.constexpr = SIDE[4]
    LANES: tl.constexpr = SIDE[5]
    lane = tl.arange(0, LANES)
    pieces = ()
    for piece in tl.static_range(PIECES):
        channel = piece * WIDTH + lane
        inside = asked[None, :] & ((lane < WIDTH) & (channel < DIM))[:, None]
        loaded = tl.load(query + (rows * DIM)[None, :] + channel[:, None], mask=inside, other=0.0)
        pieces = pieces + (loaded.to(tl.float32),)
    return pieces


@triton.jit
def _capped(scores: tl.tensor, softcap: tl.tensor) -> tl.tensor:
    """``softcap · tanh(scores / softcap)``."""
    grown = tl.exp(-2.0 * tl.abs(scores) / softcap)  # of what is at most 0: never infinite
    bounded = softcap * (1.0 - grown) / (1.0 + grown)
    return tl.where(scores < 0, -bounded, bounded)


@triton.jit
def _weights(scores: tl.tensor, most: tl.tensor) -> tl.tensor:
    """Weights ``[tokens, queries]`` of scores in units of log 2, the new maximum, and what old sums shrink by."""
    highest = tl.maximum(most, tl.max(scores, 0) - HEADROOM)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    return tl.exp2(scores - base[None, :]), highest, tl.exp2(most - base)


# What changes from step to step is kept from making new kernels.
@triton.jit(do_not_specialize=["items_at", "queries", "news", "newest_each", "magic"])
def attend_kernel(
    table: tl.tensor,
    query: tl.tensor,
    turned: tl.tensor,
    extra: tl.tensor,
    newest: tl.tensor,
    counts: tl.tensor,
    output: tl.tensor,
    logs: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    items_at: tl.tensor,
    heads: tl.tensor,
    queries: tl.tensor,
    news: tl.tensor,
    newest_each: tl.tensor,
    magic: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    K_PARAM: tl.constexpr,
    V_PARAM: tl.constexpr,
    ALIGNED: tl.constexpr,
    RAW: tl.constexpr,
    RAW_ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    RAW_TOKENS: tl.constexpr,
    QUERIES: tl.constexpr,
    HAS_CODES: tl.constexpr,
    HAS_RAW: tl.constexpr,
    EXTRA: tl.constexpr,
    CAPPED: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Attention of ``QUERIES`` queries of one head to the tokens of one item.

    Grid: (items, heads, tiles of queries). ``query`` is any float ``[rows, heads, queries, K_DIM]``, ``turned`` the
    same, rotated as the keys' codes are; ``output``
    ``[items, heads, queries, V_DIM]`` and ``logs``, of base 2, ``[items, heads, queries]`` are float32. ``extra`` is
    float32 ``[blocks, heads, queries, SIZE]``. ``newest`` has a run for each row, of which ``counts[row]`` tokens
    count, ``newest_each`` for an item; these and other tokens that are no codes are ``RAW``.
    """
    K_PIECES: tl.constexpr = K[3]
    V_PIECES: tl.constexpr = V[3]
    V_LANES: tl.constexpr = V[5]
    TILES: tl.constexpr = (SIZE + TOKENS - 1) // TOKENS
    item = table + items_at + tl.program_id(0) * ITEM_WORDS
    head = tl.program_id(1).to(tl.int64)
    row, kind = tl.load(item), tl.load(item + 1)
    start, stop, slot = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    own = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    asked = own < queries
    own_rows = (row * heads + head) * queries + own

    most = tl.full((QUERIES,), float("-inf"), tl.float32)
    totals = tl.zeros((TOKENS, QUERIES), tl.float32)  # summed up at the end
    total = tl.zeros((QUERIES,), tl.float32)
    sums = ()
    for _ in tl.static_range(V_PIECES):
        sums = sums + (tl.zeros((V_LANES, QUERIES), tl.float32),)
    place = tl.arange(0, TOKENS)
    magic = magic.to(tl.uint16)
    # Addresses are counted from the table: of an integer that is made a pointer the compiler forgets the alignment.
    here = table.to(tl.int64)

    # An item is of one kind; what is for others finds nothing to go through.
    if HAS_CODES:
        asking = _query(turned, own_rows, asked, K)
        # Queries in float16: divided by the power of two that is at most their largest value, which is exact.
        largest = tl.zeros((QUERIES,), tl.float32)
        for piece in tl.static_range(K_PIECES):
            largest = tl.maximum(largest, tl.max(tl.abs(asking[piece]), 0))
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.where(power > 0, power, 1.0)
        small = ()
        for piece in tl.static_range(K_PIECES):
            divided = tl.div_rn(asking[piece], tl.broadcast_to(power[None, :], asking[piece].shape))
            small = small + (divided.to(K_PARAM),)
        factor = power * scale
        if not CAPPED:
            factor *= LOG2_E

        WHOLE: tl.constexpr = SIZE % TOKENS == 0
        K_BYTES: tl.constexpr = K_PARAM.primitive_bitwidth // 8
        V_BYTES: tl.constexpr = V_PARAM.primitive_bitwidth // 8
        as_bytes = table.to(tl.pointer_type(tl.uint8))
        k_params, v_params = table.to(tl.pointer_type(K_PARAM)), table.to(tl.pointer_type(V_PARAM))
        for index in range(start, tl.where(kind == CODES, stop, start)):
            run = table + index * RUN_WORDS
            k_codes = tl.load(run) - here + head * (SIZE * K[2])
            k_scales = (tl.load(run + 1) - here) // K_BYTES + head * (SIZE // K[6] * K[8])
            k_zeros = (tl.load(run + 2) - here) // K_BYTES + head * (SIZE // K[6] * K[8])
            k_codes_step, k_step = tl.load(run + 3), tl.load(run + 4)
            v_codes = tl.load(run + 5) - here + head * (SIZE * V[2])
            v_scales = (tl.load(run + 6) - here) // V_BYTES + head * (SIZE // V[6] * V[8])
            v_zeros = (tl.load(run + 7) - here) // V_BYTES + head * (SIZE // V[6] * V[8])
            v_codes_step, v_step = tl.load(run + 8), tl.load(run + 9)
            first, last = tl.load(run + 10).to(tl.int32), tl.load(run + 11).to(tl.int32)
            block_in_extra = tl.load(run + 12)
            begin_tile = first // SIZE * TILES + first % SIZE // TOKENS
            end_tile = (last - 1) // SIZE * TILES + (last - 1) % SIZE // TOKENS + 1
            for tile in tl.range(begin_tile, end_tile, num_stages=STAGES):
                block = tl.cast(tile // TILES, tl.int64)
                begin = tile % TILES * TOKENS
                present = tl.full((TOKENS,), True, tl.int1) if WHOLE else begin + place < SIZE
                k_from = as_bytes + tl.multiple_of(k_codes + block * k_codes_step, ALIGNED)
                v_from = as_bytes + tl.multiple_of(v_codes + block * v_codes_step, ALIGNED)
                scales = k_params + tl.multiple_of(k_scales + block * k_step, ALIGNED // K_BYTES)
                zeros = k_params + tl.multiple_of(k_zeros + block * k_step, ALIGNED // K_BYTES)
                k_known = _parameters(scales, zeros, begin, present, K, TOKENS)
                scales = v_params + tl.multiple_of(v_scales + block * v_step, ALIGNED // V_BYTES)
                zeros = v_params + tl.multiple_of(v_zeros + block * v_step, ALIGNED // V_BYTES)
                v_known = _parameters(scales, zeros, begin, present, V, TOKENS)  # early: it takes a while to come
                numbers = _codes(k_from, begin + place, present, 0x6400, K)
                scores = tl.zeros((TOKENS, QUERIES), tl.float32)
                for piece in tl.static_range(K_PIECES):
                    keys = tl.fma(numbers[piece].to(K_PARAM), k_known[2 * piece], k_known[2 * piece + 1])
                    scores = tl.dot(keys, small[piece], acc=scores, input_precision="tf32x3")
                scores *= factor[None, :]
                if EXTRA:
                    rows = ((block_in_extra + block) * heads + head) * queries + own
                    places = (rows * SIZE)[None, :] + (begin + place)[:, None]
                    more = tl.load(extra + places, mask=present[:, None] & asked[None, :], other=0.0)
                    scores += (scale if CAPPED else scale * LOG2_E) * more
                if CAPPED:
                    scores = _capped(scores, softcap) * LOG2_E
                low = tile // TILES * SIZE + begin
                if not WHOLE or (low < first) | (low + TOKENS > last):
                    counted = present & (low + place >= first) & (low + place < last)
                    scores = tl.where(counted[:, None], scores, float("-inf"))
                weights, most, change = _weights(scores, most)
                totals = totals * change[None, :] + weights

                numbers = _codes(v_from, begin + place, present, magic, V)
                summed = ()
                for piece in tl.static_range(V_PIECES):
                    values = tl.fma(numbers[piece].to(V_PARAM), v_known[2 * piece], v_known[2 * piece + 1])
                    before = sums[piece] * change[None, :]
                    weighed = tl.dot(tl.trans(values), weights.to(V_PARAM), acc=before, input_precision="tf32x3")
                    summed = summed + (weighed,)
                sums = summed

    if HAS_RAW:
        BYTES: tl.constexpr = RAW.primitive_bitwidth // 8
        as_raw = table.to(tl.pointer_type(RAW))
        asking = _query(query, own_rows, asked, K)
        if kind == NEWEST:
            run = newest + row * RUN_WORDS
        else:
            run = table + tl.where(kind == DENSE, start, 0) * RUN_WORDS
        k_source = (tl.load(run) - here) // BYTES + head * tl.load(run + 1)
        v_source = (tl.load(run + 5) - here) // BYTES + head * tl.load(run + 6)
        k_pitch, k_step = tl.load(run + 2), tl.load(run + 3)
        v_pitch, v_step = tl.load(run + 7), tl.load(run + 8)
        first, last, count, causal = tl.load(run + 10), tl.load(run + 11), tl.load(run + 12), tl.load(run + 13)
        if kind == NEWEST:
            count = tl.load(counts + row).to(tl.int64)
            first = start * newest_each
            last = tl.minimum(first + newest_each, count)
        seen = tl.where(causal > 0, own % news + count - news, count)  # the last token that a query sees
        raw_place = tl.arange(0, RAW_TOKENS)
        RAW_TILES: tl.constexpr = (SIZE + RAW_TOKENS - 1) // RAW_TOKENS
        begin_tile = first // SIZE * RAW_TILES + first % SIZE // RAW_TOKENS
        end_tile = (last - 1) // SIZE * RAW_TILES + (last - 1) % SIZE // RAW_TOKENS + 1
        end_tile = tl.where((kind == CODES) | (last <= first), begin_tile, end_tile)
        for tile in tl.range(begin_tile.to(tl.int32), end_tile.to(tl.int32), num_stages=1):
            block = tl.cast(tile // RAW_TILES, tl.int64)
            begin = tile % RAW_TILES * RAW_TOKENS
            tokens = block * SIZE + begin + raw_place
            counted = (begin + raw_place < SIZE) & (tokens >= first) & (tokens < last)
            source = as_raw + tl.multiple_of(k_source + block * k_step, RAW_ALIGNED // BYTES)
            pitch = tl.multiple_of(k_pitch, RAW_ALIGNED // BYTES)
            scores = tl.zeros((RAW_TOKENS, QUERIES), tl.float32)
            keys = _raw(source, begin + raw_place, pitch, counted, K)
            for piece in tl.static_range(K_PIECES):
                scores = tl.dot(keys[piece], asking[piece], acc=scores, input_precision=PRECISION)
            scores *= scale
            if CAPPED:
                scores = _capped(scores, softcap)
            visible = counted[:, None] & (tokens[:, None] <= seen[None, :])
            weights, most, change = _weights(tl.where(visible, scores * LOG2_E, float("-inf")), most)
            total = total * change + tl.sum(weights, 0)
            source = as_raw + tl.multiple_of(v_source + block * v_step, RAW_ALIGNED // BYTES)
            pitch = tl.multiple_of(v_pitch, RAW_ALIGNED // BYTES)
            values = _raw(source, begin + raw_place, pitch, counted, V)
            summed = ()
            for piece in tl.static_range(V_PIECES):
                before = sums[piece] * change[None, :]
                weighed = tl.dot(tl.trans(values[piece]), weights, acc=before, input_precision=PRECISION)
                summed = summed + (weighed,)
            sums = summed

    total += tl.sum(totals, 0)
    some = tl.where(total > 0, total, 1.0)
    rows = (slot * heads + head) * queries + own
    tl.store(logs + rows, most + tl.log2(some), mask=asked)
    lane = tl.arange(0, V_LANES)
    for piece in tl.static_range(V_PIECES):
        inside = (lane < V[4]) & (piece * V[4] + lane < V[0])
        places = (rows * V[0])[None, :] + (piece * V[4] + lane)[:, None]
        tl.store(output + places, sums[piece] / some[None, :], mask=inside[:, None] & asked[None, :])
