"""Triton kernels of attention over affine codes (called by ``gpu.py``).

Attention is FlashAttention-2 (Dao, 2023) with the tokens split over programs (Flash-Decoding), on codes as KIVI (Liu
et al., 2024) leaves them. A tile of bytes is read as it lies and its channels come in pieces: piece i is channels
``i · WIDTH …``, of one bit position and, where there are groups of channels, of one group. So codes are multiplied as
they are, counted from the middle one, and scales go into the query, the weights or the result (as in ``eager.py``).

A side's compile-time numbers are a tuple (`gpu.Side`): ``DIM`` channels of ``BITS`` bits in ``BYTES`` bytes a token;
``PIECES`` of ``WIDTH`` channels, padded to ``LANES``; the parameters of (token, channel) lie at (token // ``SPAN``,
channel // ``GROUP``); ``MODE`` is where they go.
"""

from __future__ import annotations

import triton
import triton.language as tl

PER_TOKEN = tl.constexpr(0)  # one pair for a token and piece
PER_CHANNEL = tl.constexpr(1)  # one pair for a channel and tile
EACH = tl.constexpr(2)  # neither: values are decoded one by one


@triton.jit
def _product(left: tl.tensor, right: tl.tensor, EXACT: tl.constexpr, HALVES: tl.constexpr) -> tl.tensor:
    """``left @ right`` of float32. With ``HALVES``, each factor is the sum of two bfloat16, for tensor cores.

    ``EXACT`` says that ``right`` is codes, which bfloat16 holds. ``HALVES`` 2 does the same in float32, as the
    interpreter cannot multiply bfloat16.
    """
    if HALVES:
        KIND: tl.constexpr = tl.float32 if HALVES == 2 else tl.bfloat16
        high, main = left.to(tl.bfloat16), right.to(tl.bfloat16)
        low = (left - high.to(tl.float32)).to(tl.bfloat16).to(KIND)
        high, main = high.to(KIND), main.to(KIND)
        result = tl.dot(low, main, input_precision="ieee")
        if not EXACT:
            rest = (right - main.to(tl.float32)).to(tl.bfloat16).to(KIND)
            result = tl.dot(high, rest, acc=result, input_precision="ieee")
        result = tl.dot(high, main, acc=result, input_precision="ieee")
    else:
        result = tl.dot(left, right, input_precision="ieee")
    return result


@triton.jit
def _codes(
    codes: tl.tensor,
    rows: tl.tensor,
    counted: tl.tensor,
    PIECE: tl.constexpr,
    SIDE: tl.constexpr,
) -> tl.tensor:
    """Codes of a piece of the tokens at offsets ``rows``, counted from the middle one, float32 ``[tokens, LANES]``."""
    DIM: tl.constexpr = SIDE[0]
    BITS: tl.constexpr = SIDE[1]
    BYTES: tl.constexpr = SIDE[2]
    WIDTH: tl.constexpr = SIDE[4]
    LANES: tl.constexpr = SIDE[5]
    lane = tl.arange(0, LANES)
    inside = (lane < WIDTH) & (PIECE * WIDTH + lane < DIM)
    places = rows[:, None] + (PIECE * WIDTH % BYTES) + lane[None, :]
    packed = tl.load(codes + places, mask=counted[:, None] & inside[None, :], other=0).to(tl.int32)
    unpacked = (packed >> (BITS * (PIECE * WIDTH // BYTES))) & ((1 << BITS) - 1)
    return (unpacked - (1 << (BITS - 1))).to(tl.float32)


@triton.jit
def _parameters(
    scales: tl.tensor, zeros: tl.tensor, places: tl.tensor, inside: tl.tensor, BITS: tl.constexpr
) -> tl.tensor:
    """Scale, and what the middle code stands for, at ``places``."""
    scale = tl.load(scales + places, mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(zeros + places, mask=inside, other=0.0).to(tl.float32)
    return scale, zero + (1 << (BITS - 1)) * scale


@triton.jit
def _score(
    scores: tl.tensor,
    query: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    row: tl.tensor,
    param_row: tl.tensor,
    begin: tl.tensor,
    tokens: tl.tensor,
    counted: tl.tensor,
    PIECE: tl.constexpr,
    SIDE: tl.constexpr,
    HALVES: tl.constexpr,
) -> tl.tensor:
    """``scores`` and the products of a piece of the query ``[queries, LANES]`` with that of the keys."""
    DIM: tl.constexpr = SIDE[0]
    BITS: tl.constexpr = SIDE[1]
    WIDTH: tl.constexpr = SIDE[4]
    LANES: tl.constexpr = SIDE[5]
    SPAN: tl.constexpr = SIDE[6]
    GROUP: tl.constexpr = SIDE[7]
    MODE: tl.constexpr = SIDE[8]
    keys = _codes(codes, tokens * row, counted, PIECE, SIDE)
    lane = tl.arange(0, LANES)
    channel = PIECE * WIDTH + lane
    inside = (lane < WIDTH) & (channel < DIM)
    if MODE == PER_TOKEN:
        scale, middle = _parameters(scales, zeros, tokens * param_row + PIECE * WIDTH // GROUP, counted, BITS)
        products = _product(query, tl.trans(keys), True, HALVES) * scale[None, :]
        scores += products + tl.sum(query, 1)[:, None] * middle[None, :]
    elif MODE == PER_CHANNEL:
        at = begin // SPAN * param_row
        scale, middle = _parameters(scales, zeros, at + channel, inside, BITS)
        products = _product(query * scale[None, :], tl.trans(keys), True, HALVES)
        scores += products + tl.sum(query * middle[None, :], 1)[:, None]
    else:
        places = (tokens // SPAN * param_row)[:, None] + (channel // GROUP)[None, :]
        scale, middle = _parameters(scales, zeros, places, counted[:, None] & inside[None, :], BITS)
        scores += _product(query, tl.trans(keys * scale + middle), False, HALVES)
    return scores


@triton.jit
def _weigh(
    sums: tl.tensor,
    weights: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    row: tl.tensor,
    param_row: tl.tensor,
    begin: tl.tensor,
    tokens: tl.tensor,
    counted: tl.tensor,
    PIECE: tl.constexpr,
    SIDE: tl.constexpr,
    HALVES: tl.constexpr,
) -> tl.tensor:
    """``sums`` ``[queries, LANES]`` and the sum of a piece of the values by ``weights`` ``[queries, tokens]``."""
    DIM: tl.constexpr = SIDE[0]
    BITS: tl.constexpr = SIDE[1]
    WIDTH: tl.constexpr = SIDE[4]
    LANES: tl.constexpr = SIDE[5]
    SPAN: tl.constexpr = SIDE[6]
    GROUP: tl.constexpr = SIDE[7]
    MODE: tl.constexpr = SIDE[8]
    values = _codes(codes, tokens * row, counted, PIECE, SIDE)
    lane = tl.arange(0, LANES)
    channel = PIECE * WIDTH + lane
    inside = (lane < WIDTH) & (channel < DIM)
    if MODE == PER_TOKEN:
        scale, middle = _parameters(scales, zeros, tokens * param_row + PIECE * WIDTH // GROUP, counted, BITS)
        products = _product(weights * scale[None, :], values, True, HALVES)
        sums += products + tl.sum(weights * middle[None, :], 1)[:, None]
    elif MODE == PER_CHANNEL:
        at = begin // SPAN * param_row
        scale, middle = _parameters(scales, zeros, at + channel, inside, BITS)
        products = _product(weights, values, True, HALVES) * scale[None, :]
        sums += products + tl.sum(weights, 1)[:, None] * middle[None, :]
    else:
        places = (tokens // SPAN * param_row)[:, None] + (channel // GROUP)[None, :]
        scale, middle = _parameters(scales, zeros, places, counted[:, None] & inside[None, :], BITS)
        sums += _product(weights, values * scale + middle, False, HALVES)
    return sums


@triton.jit
def _query(query: tl.tensor, rows: tl.tensor, asked: tl.tensor, PIECE: tl.constexpr, SIDE: tl.constexpr) -> tl.tensor:
    """A piece of the query, float32 ``[queries, LANES]``, 0 where there is none."""
    DIM: tl.constexpr = SIDE[0]
    WIDTH: tl.constexpr = SIDE[4]
    LANES: tl.constexpr = SIDE[5]
    lane = tl.arange(0, LANES)
    inside = (lane < WIDTH) & (PIECE * WIDTH + lane < DIM)
    return tl.load(
        query + rows[:, None] + PIECE * WIDTH + lane[None, :], mask=asked[:, None] & inside[None, :], other=0.0
    )


@triton.jit
def _write(
    output: tl.tensor,
    rows: tl.tensor,
    asked: tl.tensor,
    sums: tl.tensor,
    PIECE: tl.constexpr,
    SIDE: tl.constexpr,
) -> None:
    """Store a piece of the output."""
    DIM: tl.constexpr = SIDE[0]
    WIDTH: tl.constexpr = SIDE[4]
    LANES: tl.constexpr = SIDE[5]
    lane = tl.arange(0, LANES)
    inside = (lane < WIDTH) & (PIECE * WIDTH + lane < DIM)
    tl.store(output + rows[:, None] + PIECE * WIDTH + lane[None, :], sums, mask=asked[:, None] & inside[None, :])


# What changes from step to step is kept from making new kernels.
@triton.jit(
    do_not_specialize=["scale", "softcap", "first", "stop", "tile_start", "tile_stop", "tiles_each", "queries"]
)
def attend_kernel(
    query: tl.tensor,
    k_codes: tl.tensor,
    k_scales: tl.tensor,
    k_zeros: tl.tensor,
    v_codes: tl.tensor,
    v_scales: tl.tensor,
    v_zeros: tl.tensor,
    extra: tl.tensor,
    output: tl.tensor,
    logs: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    tile_start: tl.tensor,
    tile_stop: tl.tensor,
    tiles_each: tl.tensor,
    queries: tl.tensor,
    k_block: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    kp_block: tl.tensor,
    kp_head: tl.tensor,
    kp_row: tl.tensor,
    v_block: tl.tensor,
    v_head: tl.tensor,
    v_row: tl.tensor,
    vp_block: tl.tensor,
    vp_head: tl.tensor,
    vp_row: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    EXTRA: tl.constexpr,
    CAPPED: tl.constexpr,
    HALVES: tl.constexpr,
) -> None:
    """One split's tiles of ``TOKENS`` tokens of one head, for ``QUERIES`` of its queries.

    Grid: (splits, heads, tiles of queries). ``query`` float32 ``[heads, queries, DIM]``, scaled; ``extra`` float32
    ``[blocks, heads, queries, SIZE]``; ``output`` float32 ``[splits, heads, queries, DIM]`` with ``logs`` its
    log-sum-exps ``[splits, heads, queries]``. A block has ``SIZE`` tokens; those of ``first ≤ token < stop`` count.
    """
    K_DIM: tl.constexpr = K[0]
    K_PIECES: tl.constexpr = K[3]
    V_DIM: tl.constexpr = V[0]
    V_PIECES: tl.constexpr = V[3]
    V_LANES: tl.constexpr = V[5]
    split, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    own = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    asked = own < queries
    lead = (head * queries + own).to(tl.int64)
    q0 = _query(query, lead * K_DIM, asked, 0, K)
    # Pieces are named one by one: a list could not be carried through the loop.
    if K_PIECES > 1:
        q1 = _query(query, lead * K_DIM, asked, 1, K)
    if K_PIECES > 2:
        q2 = _query(query, lead * K_DIM, asked, 2, K)
    if K_PIECES > 3:
        q3 = _query(query, lead * K_DIM, asked, 3, K)
    most = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    o0 = tl.zeros((QUERIES, V_LANES), tl.float32)
    if V_PIECES > 1:
        o1 = tl.zeros((QUERIES, V_LANES), tl.float32)
    if V_PIECES > 2:
        o2 = tl.zeros((QUERIES, V_LANES), tl.float32)
    if V_PIECES > 3:
        o3 = tl.zeros((QUERIES, V_LANES), tl.float32)

    tile_start += split * tiles_each
    for tile in range(tile_start, tl.minimum(tile_start + tiles_each, tile_stop)):
        TILES: tl.constexpr = (SIZE + TOKENS - 1) // TOKENS
        block = tl.cast(tile // TILES, tl.int64)  # offsets of a large cache outgrow 32 bits
        begin = tile % TILES * TOKENS
        tokens = begin + tl.arange(0, TOKENS)
        place = tile // TILES * SIZE + tokens
        counted = (tokens < SIZE) & (place >= first) & (place < stop)

        kc, kp = k_codes + block * k_block + head * k_head, block * kp_block + head * kp_head
        ks, kz = k_scales + kp, k_zeros + kp
        scores = tl.zeros((QUERIES, TOKENS), tl.float32)
        scores = _score(scores, q0, kc, ks, kz, k_row, kp_row, begin, tokens, counted, 0, K, HALVES)
        if K_PIECES > 1:
            scores = _score(scores, q1, kc, ks, kz, k_row, kp_row, begin, tokens, counted, 1, K, HALVES)
        if K_PIECES > 2:
            scores = _score(scores, q2, kc, ks, kz, k_row, kp_row, begin, tokens, counted, 2, K, HALVES)
        if K_PIECES > 3:
            scores = _score(scores, q3, kc, ks, kz, k_row, kp_row, begin, tokens, counted, 3, K, HALVES)
        if EXTRA:
            rows = ((block * heads + head) * queries + own) * SIZE
            more = tl.load(extra + rows[:, None] + tokens[None, :], mask=asked[:, None] & counted[None, :], other=0.0)
            scores += scale * more
        if CAPPED:
            grown = tl.exp(-2.0 * tl.abs(scores) / softcap)  # of what is at most 0: never infinite
            capped = softcap * (1.0 - grown) / (1.0 + grown)
            scores = tl.where(scores < 0, -capped, capped)
        scores = tl.where(counted[None, :], scores, float("-inf"))

        highest = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        change = tl.exp(most - base)
        weights = tl.exp(scores - base[:, None])
        total = total * change + tl.sum(weights, 1)
        most = highest

        vc, vp = v_codes + block * v_block + head * v_head, block * vp_block + head * vp_head
        vs, vz = v_scales + vp, v_zeros + vp
        o0 = _weigh(o0 * change[:, None], weights, vc, vs, vz, v_row, vp_row, begin, tokens, counted, 0, V, HALVES)
        if V_PIECES > 1:
            o1 = _weigh(o1 * change[:, None], weights, vc, vs, vz, v_row, vp_row, begin, tokens, counted, 1, V, HALVES)
        if V_PIECES > 2:
            o2 = _weigh(o2 * change[:, None], weights, vc, vs, vz, v_row, vp_row, begin, tokens, counted, 2, V, HALVES)
        if V_PIECES > 3:
            o3 = _weigh(o3 * change[:, None], weights, vc, vs, vz, v_row, vp_row, begin, tokens, counted, 3, V, HALVES)

    some = tl.where(total > 0, total, 1.0)
    lead += (split * heads * queries).to(tl.int64)
    tl.store(logs + lead, most + tl.log(some), mask=asked)
    _write(output, lead * V_DIM, asked, o0 / some[:, None], 0, V)
    if V_PIECES > 1:
        _write(output, lead * V_DIM, asked, o1 / some[:, None], 1, V)
    if V_PIECES > 2:
        _write(output, lead * V_DIM, asked, o2 / some[:, None], 2, V)
    if V_PIECES > 3:
        _write(output, lead * V_DIM, asked, o3 / some[:, None], 3, V)
