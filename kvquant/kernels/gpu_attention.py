"""Attention of a whole batch on a GPU in two launches: over all that rows hold, where it lies, and over the results.

What the kernels cannot read goes to `eager`. Rotated keys cost a product of the query with a matrix beforehand;
rotated values are turned back as results are merged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..codecs.affine import Affine
from ..codecs.packing import packed_width, planes
from ..codecs.rotation import matrix
from . import eager
from .gpu import on, power_of_two, sent
from .gpu_plan import RUN, VECTOR, Format, Newest, Plan, make_plan, place, served
from .segments import Dense, Memo, Sealed, Segment, rotates

PER_TOKEN, PER_CHANNEL, EACH = range(3)  # as in the kernels
MAX_PIECES = 4  # of a side: with more, each code has its parameters looked up
MAGIC = 0x6400  # see `triton_attention._codes`
TURN = 1 << 15  # queries of a head: more take turns, since every item has results for all of them


class Config(NamedTuple):
    """What decides about speed and nothing else."""

    tokens: int = 64  # of a tile, at most
    raw_tokens: int = 32  # of a tile of tokens that are no codes
    warps: int = 4
    stages: int = 3  # tiles on their way from memory
    programs: int = 4  # on a multiprocessor at once, about
    waves: int = 6  # of those


config = Config()


class How(NamedTuple):
    """See `eager.attend`."""

    scale: float
    softcap: float
    news: int


class Side(NamedTuple):
    """How the kernels read keys or values; see ``triton_attention.py``."""

    dim: int
    bits: int
    bytes: int
    pieces: int
    width: int
    lanes: int
    span: int
    group: int
    columns: int
    mode: int
    high: int = 0


def attend(
    query: Tensor, segments: Sequence[Segment], dim: int, *, scale: float, softcap: float = 0.0, news: int = 1
) -> tuple[Tensor, Tensor]:
    """See `eager.attend`."""
    output, logs = attend_rows(query[None].float(), [segments], dim, scale=scale, softcap=softcap, news=news)
    return output[0], logs[0]


def attend_rows(
    query: Tensor,
    rows: Sequence[Sequence[Segment]],
    dim: int,
    *,
    scale: float,
    softcap: float = 0.0,
    news: int = 1,
    sinks: Tensor | None = None,
    memo: Memo | None = None,
) -> tuple[Tensor, Tensor]:
    """As `kernels.attend_rows`; also returns the log of the sum of exponentials ``[rows, heads, queries]``, sinks
    among them.
    """
    count, heads, queries, _ = query.shape
    how = How(scale, softcap, news)
    if queries > TURN and news > 1:
        return _in_turns(query, rows, dim, how, sinks)
    tiles = -(-queries // _query_tile(queries, max(query.shape[3], dim)))
    rows, newest = _apart(rows)
    most = max((segment.tokens for segment in newest if segment is not None), default=0)
    plan = None if memo is None else memo.plan
    if plan is None or plan.tiles != tiles or not plan.fits(rows, most):
        raw = _raw_dtype(itertools.chain(*rows, newest))
        plan = make_plan(rows, most, raw, _span(rows, heads * tiles, query.device), tiles, query.device)
        if memo is not None:
            memo.plan = plan
    query = query.contiguous()
    rest = any(plan.rest)
    found = (
        query.new_empty((count, heads, queries, dim), dtype=torch.float32 if rest else query.dtype),
        query.new_empty((count, heads, queries), dtype=torch.float32),
    )
    with on(query):
        parts = _launch(plan, query, rows, newest, dim, how)
        _merge(plan, parts, None if rest else sinks, *found)
    if rest:
        found = _with_rest(plan, query, rows, found, how)
        if sinks is not None:
            found = found[0] * torch.sigmoid(found[1] - sinks)[..., None], torch.logaddexp(found[1], sinks)
    return found[0].to(query.dtype), found[1]


def _launch(
    plan: Plan,
    query: Tensor,
    rows: Sequence[Sequence[Segment]],
    newest: Sequence[Dense | None],
    dim: int,
    how: How,
) -> tuple[Tensor, Tensor]:
    """What each item gives: outputs and logs of base 2."""
    from .triton_attention import attend_kernel

    _, heads, queries, key_dim = query.shape
    outputs = query.new_empty((plan.results, heads, queries, dim), dtype=torch.float32)
    logs = query.new_empty((plan.results, heads, queries), dtype=torch.float32)
    extra = _extra(plan, rows)
    turned = query
    if any(rotates(kind.key) for kind in plan.launches):
        turned = query.float() @ matrix(key_dim, query.device)
    places, counts = _newest(plan, newest, query.device)
    for kind, (begin, items) in plan.launches.items():
        sides = [_side(codec, width) for codec, width in ((kind.key, key_dim), (kind.value, dim))]
        channels = max(side.pieces * side.lanes for side in sides)
        tile = _query_tile(queries, channels)
        launch = partial(
            attend_kernel[items, heads, -(-queries // tile)],
            plan.table,
            query,
            turned if rotates(kind.key) else query,
            query if extra is None else extra,
            places.table,
            counts,
            outputs,
            logs,
            how.scale,
            how.softcap,
            begin,
            heads,
            queries,
            how.news,
            plan.newest_each,
            MAGIC,
            K=tuple(sides[0]),
            V=tuple(sides[1]),
            K_PARAM=_element(torch.float32 if kind.key_wide else torch.float16),
            V_PARAM=_element(torch.float32 if kind.value_wide else torch.float16),
            ALIGNED=plan.aligned,
            RAW=_element(plan.raw),
            RAW_ALIGNED=math.gcd(plan.raw_aligned, places.aligned),
            PRECISION="tf32x3" if plan.raw == torch.float32 else "tf32",
            SIZE=kind.size,
            TOKENS=_token_tile(kind, sides, channels),
            RAW_TOKENS=config.raw_tokens,
            QUERIES=tile,
            HAS_CODES=kind.key is not None,
            HAS_RAW=kind in plan.with_raw,
            EXTRA=extra is not None,
            CAPPED=how.softcap != 0,
            num_warps=config.warps,
            maxnreg=_registers(plan, tile, channels, sides),
            enable_fp_fusion=True,
        )
        _start(launch)
    return outputs, logs


def _start(kernel: Callable[..., Any]) -> None:
    """Launch, with fewer tiles on their way from memory where a GPU has no room for so many."""
    from triton.runtime.errors import OutOfResources

    for stages in range(config.stages, 0, -1):
        try:
            kernel(STAGES=stages)
            return
        except OutOfResources:
            if stages == 1:
                raise


def _merge(plan: Plan, parts: tuple[Tensor, Tensor], sinks: Tensor | None, result: Tensor, logs: Tensor) -> None:
    """Write one attention of a row from those of its items."""
    from .triton_merge import merge_kernel

    rows, heads, queries, dim = result.shape
    merge_kernel[rows * heads, queries](
        plan.table,
        *parts,
        matrix(dim, result.device) if plan.turned else logs,
        logs if sinks is None else sinks,
        result,
        logs,
        plan.rows_at,
        heads,
        queries,
        DIM=dim,
        LANES=power_of_two(dim),
        CHUNK=min(32, power_of_two(dim)) if plan.turned else power_of_two(dim),
        ITEMS=16,
        ROTATED=plan.turned,
        SINKS=sinks is not None,
        num_warps=4,
    )


def _with_rest(
    plan: Plan,
    query: Tensor,
    rows: Sequence[Sequence[Segment]],
    found: tuple[Tensor, Tensor],
    how: How,
) -> tuple[Tensor, Tensor]:
    """What was found, merged with attention to what the kernels cannot read."""
    outputs, logs = found
    for row, numbers in enumerate(plan.rest):
        if numbers:
            segments = [rows[row][number] for number in numbers]
            more = eager.attend(query[row], segments, outputs.shape[3], **how._asdict())
            outputs[row], logs[row] = eager.merge([(outputs[row], logs[row]), more])
    return outputs, logs


def _in_turns(
    query: Tensor,
    rows: Sequence[Sequence[Segment]],
    dim: int,
    how: How,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The queries of some new tokens after those of others, as if they had come so."""
    count, heads, queries, key_dim = query.shape
    news = how.news
    group = queries // news
    each = max(1, TURN // group)
    apart = query.view(count, heads, group, news, key_dim)
    found = []
    for first in range(0, news, each):
        stop = min(first + each, news)
        asking = apart[:, :, :, first:stop].reshape(count, heads, -1, key_dim)
        seen = [[_until(segment, group, news, first, stop) for segment in row] for row in rows]
        sunk = None if sinks is None else sinks.view(heads, group, news)[:, :, first:stop].reshape(heads, -1)
        pair = attend_rows(asking, seen, dim, scale=how.scale, softcap=how.softcap, news=stop - first, sinks=sunk)
        found.append([torch.unflatten(each, 2, (group, stop - first)) for each in pair])
    outputs, logs = (torch.cat(each, dim=3).flatten(2, 3) for each in zip(*found, strict=True))
    return outputs, logs


def _until(segment: Segment, group: int, news: int, first: int, stop: int) -> Segment:
    """A segment as the new tokens from ``first`` to ``stop`` see it."""
    if isinstance(segment, Dense):
        count = max(0, segment.tokens - news + stop) if segment.causal else segment.tokens
        return Dense(segment.keys[:, :count], segment.values[:, :count], segment.causal)
    if segment.extra is None:
        return segment
    extra = torch.unflatten(segment.extra, 2, (group, news))[:, :, :, first:stop].flatten(2, 3)
    return replace(segment, extra=extra)


def _extra(plan: Plan, rows: Sequence[Sequence[Segment]]) -> Tensor | None:
    """What is added to scores, block after block, None if nothing is."""
    segments = [segment for row, number in plan.coded if isinstance(segment := rows[row][number], Sealed)]
    if all(segment.extra is None for segment in segments):
        return None
    known = next(segment.extra for segment in segments if segment.extra is not None)
    parts = [
        known.new_zeros(len(segment.keys["codes"]), *known.shape[1:]) if segment.extra is None else segment.extra
        for segment in segments
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).float().contiguous()


def _apart(rows: Sequence[Sequence[Segment]]) -> tuple[list[Sequence[Segment]], list[Dense | None]]:
    """Rows without their newest tokens, and those."""
    newest = [
        last if row and isinstance(last := row[-1], Dense) and last.causal and served(last) else None for row in rows
    ]
    return [row if last is None else row[:-1] for row, last in zip(rows, newest, strict=True)], newest


def _newest(plan: Plan, newest: Sequence[Dense | None], device: torch.device) -> tuple[Newest, Tensor]:
    """Where the newest tokens of rows lie, made anew where it is elsewhere, and how many they are."""
    counts = _counts(tuple(0 if segment is None else segment.tokens for segment in newest), device)
    words, aligned, keep = [], VECTOR, []
    for segment in newest:
        words.append([0] * RUN)
        for begin, side in () if segment is None else ((0, segment.keys), (5, segment.values)):
            words[-1][begin : begin + 5], multiple, tensor = place(side, plan.raw, plan.size)
            aligned = math.gcd(aligned, multiple)
            keep.append(tensor)
        words[-1][13] = 1  # causal
    if plan.newest is None or plan.newest.words != words:
        plan.newest = Newest(words, sent(words, torch.int64, device), aligned)
    plan.keep_newest = keep
    return plan.newest, counts


def _raw_dtype(segments: Iterable[Segment | None]) -> torch.dtype:
    """What tokens that are no codes are read as."""
    dtypes = set()
    for segment in segments:
        if segment is not None and served(segment):
            if isinstance(segment, Dense):
                dtypes |= {segment.keys.dtype, segment.values.dtype}
            elif "data" in segment.keys:
                dtypes |= {segment.keys["data"].dtype, segment.values["data"].dtype}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


@lru_cache(maxsize=16)
def _counts(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """The same for all layers of a step."""
    return sent(counts, torch.int32, device)


def _span(rows: Sequence[Sequence[Segment]], each: int, device: torch.device) -> int:
    """Tokens of an item, for enough items when each is ``each`` programs: whole blocks."""
    tokens = sum(segment.tokens for row in rows for segment in row)
    blocks = math.lcm(*{segment.block_tokens for row in rows for segment in row if isinstance(segment, Sealed)})
    wanted = -(-tokens * each // (_multiprocessors(device) * config.programs * config.waves))
    return max(1, -(-wanted // blocks)) * blocks


def _registers(plan: Plan, tile: int, channels: int, sides: Sequence[Side]) -> int | None:
    """Of a thread, at most: so that as many programs as meant fit, where that spills next to none."""
    usual = tile == 8 and channels <= 128 and plan.aligned == VECTOR and all(side.mode != EACH for side in sides)
    return 65536 // (32 * config.warps * config.programs) if usual else None


def _query_tile(queries: int, channels: int) -> int:
    """Queries of a program: tensor cores take eight at least."""
    return min(64 if channels <= 128 else 16, max(8, 1 << (queries - 1).bit_length()))


def _token_tile(kind: Format, sides: Sequence[Side], channels: int) -> int:
    """Tokens of a tile; wide heads leave it less memory."""
    most = config.tokens if channels <= 256 else 16
    if any(side.mode == EACH for side in sides):
        most = min(most, 16)  # with a scale and a zero for every code
    spans = [_divisor(side.span) for side in sides if side.mode == PER_CHANNEL]
    return min(power_of_two(min(kind.size, most)), *spans, most)


@lru_cache(maxsize=256)
def _side(codec: Affine | None, dim: int) -> Side:
    """How the kernels read ``dim`` channels of a codec, or of what is no codes."""
    if codec is None:
        return Side(dim, 8, dim, 1, dim, power_of_two(dim), 1, dim, 1, PER_TOKEN)
    width, parts, (_, high) = packed_width(dim, codec.bits), 8 // codec.bits, planes(codec.bits)
    by_channel = codec.axis == "channel"
    group = 1 if by_channel else codec.channel_group(dim)
    span, columns = (codec.group, dim) if by_channel else (1, dim // group)
    mode = PER_CHANNEL if by_channel and _divisor(span) >= 16 else PER_TOKEN if group == dim else EACH
    pieces, piece = parts, width
    if high:
        pieces, piece = 1, dim
    elif not by_channel and mode == EACH and width * parts == dim:
        common = math.gcd(width, group)
        if dim // common <= MAX_PIECES:
            pieces, piece, mode = dim // common, common, PER_TOKEN
    return Side(dim, codec.bits, width, pieces, piece, power_of_two(piece), span, group, columns, mode, high)


def _divisor(number: int) -> int:
    """The largest power of two that divides ``number``."""
    return number & -number


@lru_cache(maxsize=8)
def _element(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
