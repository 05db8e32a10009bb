"""What the attention kernels read, as a table of int64 that all programs share; made anew when segments change.

    runs    `RUN` words each: where codes, or tokens as they are, lie in memory and how far apart
    items   `ITEM` words each: what one program reads (row, kind, first run, last run, number of its result)
    rows    `ROW` words each: the results of a row, those of rotated values first

An item is some runs of codes, a run of tokens as they are, or a part of a row's newest tokens. Those change with every
step, and a table of their own, with a run for each row, says where they lie.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..codecs import Fields
from ..codecs.affine import BITS, Affine
from ..codecs.raw import Raw
from .gpu import sent
from .segments import Dense, Sealed, Segment, rotates, whole_blocks

RUN, ITEM, ROW = 16, 8, 4  # words, as in the kernels
CODES, DENSE, NEWEST = range(3)  # kinds of items, as in the kernels
RAW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NEWEST_EACH = 128  # newest tokens of an item, at least
VECTOR = 16  # bytes that a thread reads at once, at most


class Format(NamedTuple):
    """What a launch is compiled for: blocks of ``size`` tokens. Without codecs it reads no codes."""

    size: int
    key: Affine | None = None
    value: Affine | None = None
    key_wide: bool = False  # whether parameters are float32
    value_wide: bool = False


class Newest(NamedTuple):
    """Where rows' newest tokens lie: the words the table was made of, the table, and the alignment of it all."""

    words: list[list[int]]
    table: Tensor
    aligned: int


@dataclass
class Plan:
    """The table and what goes with it.

    ``launches`` are, by format, where in the table its items begin and how many they are; ``with_raw`` those with
    items that are no codes. Segments are told by row
    and number within it: ``rest`` are those that the kernels cannot read, ``coded`` those of codes in the order of
    their blocks.
    """

    rows: list[Sequence[Segment]]
    tiles: int  # of queries, that it was made for
    size: int  # of blocks
    table: Tensor
    launches: dict[Format, tuple[int, int]]
    with_raw: set[Format]
    rows_at: int
    results: int
    turned: bool  # whether there are rotated values
    aligned: int
    raw: torch.dtype
    raw_aligned: int
    newest_each: int
    newest_most: int
    rest: list[list[int]]
    coded: list[tuple[int, int]]
    keep: list[Tensor]  # what the table points to
    newest: Newest | None = None
    keep_newest: list[Tensor] = field(default_factory=list)

    def fits(self, rows: Sequence[Sequence[Segment]], newest: int) -> bool:
        """Whether rows are of the same memory; what is added to scores may be another."""
        if len(self.rows) != len(rows) or newest > self.newest_most:
            return False
        return all(len(a) == len(b) and all(map(_same, a, b)) for a, b in zip(self.rows, rows, strict=True))


def served(segment: Segment) -> bool:
    """Whether the kernels can read a segment."""
    if isinstance(segment, Dense):
        return segment.keys.dtype in RAW_DTYPES and segment.values.dtype in RAW_DTYPES
    codecs = segment.key, segment.value
    if all(isinstance(codec, Raw) for codec in codecs):
        return segment.extra is None and all(f["data"].dtype in RAW_DTYPES for f in (segment.keys, segment.values))
    return all(isinstance(codec, Affine) and codec.bits in BITS for codec in codecs)


def place(side: Tensor, dtype: torch.dtype, size: int) -> tuple[list[int], int, Tensor]:
    """Words of a run for tokens ``[…, heads, tokens, dim]`` as they are, read as blocks of ``size``.

    Also what all of them are a multiple of, in bytes, and the tensor they point to.
    """
    tensor = side.to(dtype)
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    head, token = tensor.stride()[-3:-1]
    words = [tensor.data_ptr(), head, token, tensor.stride(0) if tensor.dim() == 4 else size * token, 0]
    return words, math.gcd(VECTOR, words[0], *(word * tensor.itemsize for word in words[1:])), tensor


def make_plan(
    rows: Sequence[Sequence[Segment]], newest: int, raw: torch.dtype, span: int, tiles: int, device: torch.device
) -> Plan:
    """The plan of items of about ``span`` tokens, a multiple of what blocks have.

    Rows have up to ``newest`` tokens that are not among their segments; ``raw`` is what is no codes is read as.
    """
    return _Planner(rows, newest, raw, span).plan(tiles, device)


@dataclass
class _Planner:
    rows: Sequence[Sequence[Segment]]
    newest: int
    raw: torch.dtype
    span: int
    runs: list[list[int]] = field(default_factory=list)
    items: dict[Format, list[list[int]]] = field(default_factory=dict)
    keep: list[Tensor] = field(default_factory=list)
    coded: list[tuple[int, int]] = field(default_factory=list)
    aligned: int = VECTOR
    raw_aligned: int = VECTOR
    blocks: int = 0

    def plan(self, tiles: int, device: torch.device) -> Plan:
        segments = [segment for row in self.rows for segment in row if served(segment)]
        sizes = [segment.block_tokens for segment in segments if isinstance(segment, Sealed)]
        size = sizes[0] if sizes else NEWEST_EACH
        newest_each = -(-self.span // NEWEST_EACH) * NEWEST_EACH
        parts = self.newest // newest_each + 1 if self.newest else 0  # some more will come
        bounds, results = [], 0
        for number, row in enumerate(self.rows):
            found = self._codes(number, row)
            for segment in row:
                if served(segment) and not _coded(segment):
                    found += self._as_they_are(number, segment, size)
            found += [(Format(size), [number, NEWEST, part, 0]) for part in range(parts)]
            found.sort(key=lambda each: not rotates(each[0].value))
            turned = sum(rotates(kind.value) for kind, _ in found)
            bounds.append((results, results + turned, results + len(found), 0))
            for kind, item in found:
                self.items.setdefault(kind, []).append([*item, results, 0, 0, 0])
                results += 1
        with_raw = self._join()
        launches, begin = {}, RUN * len(self.runs)
        for kind, items in self.items.items():
            launches[kind] = begin, len(items)
            begin += ITEM * len(items)
        words = itertools.chain(*self.runs, *itertools.chain(*self.items.values()), *bounds)
        return Plan(
            rows=list(self.rows),
            tiles=tiles,
            size=size,
            table=sent(list(words), torch.int64, device),
            launches=launches,
            with_raw=with_raw,
            rows_at=begin,
            results=results,
            turned=any(rotates(kind.value) for kind in launches),
            aligned=self.aligned,
            raw=self.raw,
            raw_aligned=self.raw_aligned,
            newest_each=newest_each,
            newest_most=parts * newest_each,
            rest=[[index for index, segment in enumerate(row) if not served(segment)] for row in self.rows],
            coded=self.coded,
            keep=self.keep,
        )

    def _codes(self, number: int, row: Sequence[Segment]) -> list[tuple[Format, list[int]]]:
        """Items of a row's codes: long runs are cut, short ones share an item."""
        found: list[tuple[Format, list[int]]] = []
        room = 0  # tokens that still go into the last item
        for index, segment in enumerate(row):
            if not isinstance(segment, Sealed) or not _coded(segment) or not served(segment):
                continue
            self.coded.append((number, index))
            assert isinstance(segment.key, Affine)
            assert isinstance(segment.value, Affine)
            wide = [fields["scale"].dtype == torch.float32 for fields in (segment.keys, segment.values)]
            kind = Format(segment.block_tokens, segment.key, segment.value, *wide)
            places = self._side(segment.keys), self._side(segment.values)
            for first, stop in _cut(segment, self.span):
                self.runs.append([*places[0], *places[1], first, stop, self.blocks, 0, 0, 0])
                if not found or found[-1][0] != kind or room < stop - first:
                    found.append((kind, [number, CODES, len(self.runs) - 1, len(self.runs)]))
                    room = self.span
                found[-1][1][3] = len(self.runs)
                room -= stop - first
            self.blocks += len(segment.keys["codes"])
        return found

    def _as_they_are(self, number: int, segment: Segment, size: int) -> list[tuple[Format, list[int]]]:
        """Items of tokens that are no codes."""
        if isinstance(segment, Dense):
            sides, causal = (segment.keys, segment.values), int(segment.causal)
            first, stop = 0, segment.tokens
        else:
            sides, causal = (segment.keys["data"], segment.values["data"]), 0
            first, stop, size = segment.first, segment.stop, segment.block_tokens
        places: list[int] = []
        for side in sides:
            words, aligned, tensor = place(side, self.raw, size)
            self.raw_aligned = math.gcd(self.raw_aligned, aligned)
            self.keep.append(tensor)
            places += words
        count = stop
        found = []
        for begin in range(first // self.span * self.span, stop, self.span):
            self.runs.append([*places, max(first, begin), min(stop, begin + self.span), count, causal, 0, 0])
            found.append((Format(size), [number, DENSE, len(self.runs) - 1, len(self.runs)]))
        return found

    def _side(self, fields: Fields) -> list[int]:
        """Addresses of codes, scales and zeros, and steps from block to block: of codes, and of the other two."""
        codes, scale, zero = (whole_blocks(fields[name]) for name in ("codes", "scale", "zero"))
        if scale.stride(0) != zero.stride(0):
            scale, zero = scale.contiguous(), zero.contiguous()
        for name, tensor in (("codes", codes), ("scale", scale), ("zero", zero)):
            if tensor is not fields[name]:
                self.keep.append(tensor)
        words = [codes.data_ptr(), scale.data_ptr(), zero.data_ptr()]
        steps = [stride * tensor.itemsize for tensor in (codes, scale) for stride in tensor.stride()[:2]]
        self.aligned = math.gcd(self.aligned, *words, *steps)
        return [*words, codes.stride(0), scale.stride(0)]

    def _join(self) -> set[Format]:
        """Let what is as it is go along with codes of the same size of blocks; which formats it is in then."""
        joined = set()
        for kind in [kind for kind in self.items if kind.key is None]:
            other = next((other for other in self.items if other.key is not None and other.size == kind.size), kind)
            if other is not kind:
                self.items[other] += self.items.pop(kind)
            joined.add(other)
        return joined


def _same(a: Segment, b: Segment) -> bool:
    if a is b or isinstance(a, Dense) or isinstance(b, Dense):
        return a is b
    extra = (a.extra is None) == (b.extra is None)
    return extra and a.keys is b.keys and a.values is b.values and (a.first, a.stop) == (b.first, b.stop)


def _coded(segment: Segment) -> bool:
    return isinstance(segment, Sealed) and isinstance(segment.key, Affine)


def _cut(segment: Sealed, span: int) -> list[tuple[int, int]]:
    """A run's tokens in pieces of ``span``, which end where blocks do."""
    starts = range(segment.first // span * span, segment.stop, span)
    return [(max(segment.first, start), min(segment.stop, start + span)) for start in starts]
