"""The Triton kernel that makes one attention of partial ones (launched by ``gpu_attention.py``)."""

from __future__ import annotations

import triton
import triton.language as tl

ROW_WORDS = tl.constexpr(4)  # of the table of ``gpu_attention.py``
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["rows_at", "queries"])
def merge_kernel(
    table: tl.tensor,
    outputs: tl.tensor,
    logs: tl.tensor,
    matrix: tl.tensor,
    sinks: tl.tensor,
    result: tl.tensor,
    result_logs: tl.tensor,
    rows_at: tl.tensor,
    heads: tl.tensor,
    queries: tl.tensor,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    ITEMS: tl.constexpr,
    ROTATED: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """One attention of a query from those of its row's items. Grid: (rows · heads, queries).

    ``outputs`` and ``logs`` are what `attend_kernel` wrote. Of a row's items the first, up to the split, are rotated,
    which ``matrix``, float32 ``[DIM, DIM]``, undoes for ``CHUNK`` channels at a time. ``sinks`` ``[heads, queries]``
    are logits of nothing. ``result`` is any float ``[rows, heads, queries, DIM]``, ``result_logs``, natural, float32.
    """
    pair, own = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = pair % heads
    entry = table + rows_at + pair // heads * ROW_WORDS
    first, split = tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32)
    stop = tl.load(entry + 2).to(tl.int32)
    item, lane, none = tl.arange(0, ITEMS), tl.arange(0, LANES), tl.zeros((1,), tl.int32)
    most = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    if SINKS:
        most = tl.load(sinks + head * queries + own + none).to(tl.float32) * LOG2_E
        total += 1.0
    for begin in range(first, stop, ITEMS):
        rows = ((begin + item).to(tl.int64) * heads + head) * queries + own
        log = tl.load(logs + rows, mask=begin + item < stop, other=float("-inf"))
        highest = tl.maximum(most, tl.max(log, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp2(most - base) + tl.sum(tl.exp2(log - base), 0)
        most = highest
    some = tl.where(total > 0, total, 1.0)
    base = tl.where(most == float("-inf"), 0.0, most) + tl.log2(some)
    place = pair * queries + own
    tl.store(result_logs + place + none, (most + tl.log2(some)) * LN_2)

    turned = tl.zeros((LANES,), tl.float32)
    if ROTATED:
        for begin in range(first, split, ITEMS):
            rows = ((begin + item).to(tl.int64) * heads + head) * queries + own
            log = tl.load(logs + rows, mask=begin + item < split, other=float("-inf"))
            inside = (begin + item < split)[:, None] & (lane < DIM)[None, :]
            part = tl.load(outputs + (rows * DIM)[:, None] + lane[None, :], mask=inside, other=0.0)
            turned += tl.sum(part * tl.exp2(log - base)[:, None], 0)
    for chunk in tl.static_range(0, DIM, CHUNK):
        channel = chunk + tl.arange(0, CHUNK)
        held = channel < DIM
        summed = tl.zeros((CHUNK,), tl.float32)
        if ROTATED:
            known = (lane < DIM)[:, None] & held[None, :]
            weights = tl.load(matrix + (lane * DIM)[:, None] + channel[None, :], mask=known, other=0.0)
            summed += tl.sum(turned[:, None] * weights, 0)
        for begin in range(split, stop, ITEMS):
            rows = ((begin + item).to(tl.int64) * heads + head) * queries + own
            log = tl.load(logs + rows, mask=begin + item < stop, other=float("-inf"))
            inside = (begin + item < stop)[:, None] & held[None, :]
            part = tl.load(outputs + (rows * DIM)[:, None] + channel[None, :], mask=inside, other=0.0)
            summed += tl.sum(part * tl.exp2(log - base)[:, None], 0)
        tl.store(result + place * DIM + channel, summed.to(result.dtype.element_ty), mask=held)
