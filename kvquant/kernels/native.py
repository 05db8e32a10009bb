"""The compiled CPU kernels of attention (``csrc/kernels.cpp``), called through a plain C interface."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..codecs import Codec
from ..codecs.affine import Affine
from ..codecs.raw import Raw
from ..codecs.rotation import hadamard
from .eager import merge
from .loading import at_hand, isa, library
from .segments import Dense, Sealed, Segment, rotates, together

DENSE_STEP = 64  # tokens of a dense segment that are one piece of work

_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_SHAPE = struct.Struct("5q2f")
_SIDE = struct.Struct("9q")
_FORMAT = struct.Struct("6q")
_REST = struct.Struct("6q")  # extra, blocks, tokens, first, stop, causal

_formats: dict[tuple[int, ...], ctypes.Array[ctypes.c_char]] = {}  # a few, for ever
_packed: WeakKeyDictionary[Segment, bytes] = WeakKeyDictionary()


def serves(query: Tensor, segments: Iterable[Segment]) -> bool:
    """Whether the library can do this attention."""
    formats = set()
    for segment in segments:
        if segment not in _packed and not _served(segment):  # what was packed is served
            return False
        if isinstance(segment, Sealed):
            formats.add(segment.value)
    return len(formats) < 2 and at_hand(query.device)


def attend(
    query: Tensor,
    segments: Sequence[Segment],
    dim: int,
    *,
    scale: float,
    softcap: float = 0.0,
    news: int = 1,
    level: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `eager.attend`; ``level`` picks an instruction set (an index of `ISAS`) other than the best."""
    output, logs = attend_rows(query[None], [segments], dim, scale=scale, softcap=softcap, news=news, level=level)
    return output[0], logs[0]


def attend_rows(
    query: Tensor,
    rows: Sequence[Sequence[Segment]],
    dim: int,
    *,
    scale: float,
    softcap: float = 0.0,
    news: int = 1,
    level: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend` of ``query`` ``[rows, heads, queries, key dim]``, each row over segments of its own, by all threads."""
    how = _How(dim, scale, softcap, news, isa() if level is None else level)
    query = query.to(torch.float32)
    if not any(_has_turned_keys(segment) for row in rows for segment in row):
        return _attend(query, rows, how)
    turned, plain = (
        [[segment for segment in row if _has_turned_keys(segment) is kind] for row in rows] for kind in (True, False)
    )
    return merge([_attend(hadamard(query), turned, how), _attend(query, plain, how)])


class _How(NamedTuple):
    dim: int
    scale: float
    softcap: float
    news: int
    level: int


def _attend(query: Tensor, rows: Sequence[Sequence[Segment]], how: _How) -> tuple[Tensor, Tensor]:
    found = library()
    assert found is not None
    count, heads, queries, key_dim = query.shape
    query = query.contiguous()
    output = torch.empty(count, heads, queries, how.dim)
    logs = torch.empty(count, heads, queries)
    failed = found.kvq_attention(
        _SHAPE.pack(heads, queries, how.news, key_dim, how.dim, how.scale, how.softcap),
        b"".join([_pack(segment) for row in rows for segment in row]),
        struct.pack(f"{count}q", *map(len, rows)),
        count,
        query.data_ptr(),
        output.data_ptr(),
        logs.data_ptr(),
        torch.get_num_threads(),
        how.level,
    )
    if failed:
        raise MemoryError("no memory for attention")
    return output, logs


def _served(segment: Segment) -> bool:
    if isinstance(segment, Dense):
        return segment.keys.dtype in _KINDS and segment.values.dtype in _KINDS
    sides = ((segment.key, segment.keys), (segment.value, segment.values))
    return all(field.stride(-1) == 1 for _, fields in sides for field in fields.values()) and all(
        (isinstance(codec, Affine) and together(fields["scale"]) and together(fields["zero"]))
        or (isinstance(codec, Raw) and next(iter(fields.values())).dtype in _KINDS)
        for codec, fields in sides
    )


def _has_turned_keys(segment: Segment) -> bool:
    return isinstance(segment, Sealed) and rotates(segment.key)


def _pack(segment: Segment) -> bytes:
    """A segment as the library reads it. All but the newest tokens are kept: they are the same at every step."""
    if isinstance(segment, Dense) and segment.causal:
        return _pack_dense(segment)
    found = _packed.get(segment)
    if found is None:
        found = _pack_dense(segment) if isinstance(segment, Dense) else _pack_sealed(segment)
        _packed[segment] = found
    return found


def _pack_dense(segment: Dense) -> bytes:
    keys, values = segment.keys, segment.values
    formats = (_format(_KINDS[states.dtype], 0, 0, 0, states.shape[2], 0) for states in (keys, values))
    step = DENSE_STEP
    return b"".join(
        (
            struct.pack("2q", *formats),
            _dense_side(keys, step),
            _dense_side(values, step),
            _REST.pack(0, -(-segment.tokens // step), step, 0, segment.tokens, int(segment.causal)),
        )
    )


def _pack_sealed(segment: Sealed) -> bytes:
    sides = ((segment.key, segment.keys), (segment.value, segment.values))
    formats = (_format_of(codec, fields, dim) for (codec, fields), dim in zip(sides, segment.dims, strict=True))
    extra = 0 if segment.extra is None else segment.extra.data_ptr()
    blocks = len(next(iter(segment.keys.values())))
    return b"".join(
        (
            struct.pack("2q", *formats),
            *(_sealed_side(fields) for _, fields in sides),
            _REST.pack(extra, blocks, segment.block_tokens, segment.first, segment.stop, 0),
        )
    )


def _dense_side(states: Tensor, step: int) -> bytes:
    if states.stride(2) != 1:
        raise ValueError("the channels of a token do not lie together")
    size = states.element_size()
    head, token = states.stride(0) * size, states.stride(1) * size
    return _SIDE.pack(states.data_ptr(), step * token, head, token, 0, 0, 0, 0, 0)


def _sealed_side(fields: dict[str, Tensor]) -> bytes:
    data = fields.get("codes", next(iter(fields.values())))
    size = data.element_size()
    block, head, token = (data.stride(axis) * size for axis in range(3))
    if "scale" not in fields:
        return _SIDE.pack(data.data_ptr(), block, head, token, 0, 0, 0, 0, 0)
    known = fields["scale"], fields["zero"]
    return _SIDE.pack(
        *(data.data_ptr(), block, head, token),
        *(field.data_ptr() for field in known),
        *(field.stride(0) * field.element_size() for field in known),
        int(known[0].dtype == torch.float32),
    )


def _format_of(codec: Codec, fields: dict[str, Tensor], dim: int) -> int:
    if not isinstance(codec, Affine):
        return _format(_KINDS[next(iter(fields.values())).dtype], 0, 0, 0, dim, 0)
    group = codec.group if codec.axis == "channel" else codec.channel_group(dim)
    return _format(0, codec.bits, int(codec.axis == "token"), group, dim, int(codec.rotate == "hadamard"))


def _format(*words: int) -> int:
    """The address of a format, which stays where it is."""
    if words not in _formats:
        _formats[words] = ctypes.create_string_buffer(_FORMAT.pack(*words), _FORMAT.size)
    return ctypes.addressof(_formats[words])
