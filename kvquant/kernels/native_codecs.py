"""The affine codec as the compiled library has it (``csrc/codecs.cpp``), called through a plain C interface."""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache

import torch
from torch import Tensor

from ..codecs import Fields, Layout
from ..codecs.affine import BITS, Affine
from .loading import at_hand, isa, library
from .segments import together, whole_blocks

FEW = 1 << 15  # values that one thread takes by itself: waking another costs as much

_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_STORED = [[torch.uint8, parameters, parameters] for parameters in (torch.float16, torch.float32)]
_FORMAT = struct.Struct("6q")
_STATES = struct.Struct("8q")
_FIELDS = struct.Struct("7q")
_WIDE = 1  # of a block, as csrc/codecs.h numbers it; what is above is left to the codec's own method


def serves(codec: Affine, given: Tensor) -> bool:
    """Whether the library has this codec for blocks, or codes, that lie where ``given`` does."""
    return type(codec) is Affine and codec.bits in BITS and at_hand(given.device)


def encode(codec: Affine, blocks: Tensor, out: Fields | None = None, level: int | None = None) -> Fields | None:
    """The fields of `Affine.encode`, bit for bit; None if that must do it.

    ``blocks`` is ``[n, heads, tokens, dim]`` in any strides. Left to the codec's own method are dtypes other than
    float32, bfloat16 and float16, values that are not finite or from 2^50 on, and shapes it refuses. For ``out`` see
    `coding.encode`. ``level`` picks an instruction set (an index of `loading.ISAS`) other than the best.
    """
    layout = _layout(codec, blocks)
    if layout is None:
        return None
    found = library()
    assert found is not None
    if blocks.stride(3) != 1:
        blocks = blocks.contiguous()
    count, dim = len(blocks), blocks.shape[3]
    if out is not None and all(
        out[name].dtype == dtype and together(out[name]) for name, (_, dtype) in layout.items()
    ):
        fields = out
    else:
        fields = {name: torch.empty((count, *shape), dtype=dtype) for name, (shape, dtype) in layout.items()}
    seen = bytearray(count)

    def fill() -> int:
        failed = found.kvq_encode(
            _format(codec, dim),
            _states(blocks),
            _fields(fields),
            (ctypes.c_char * count).from_buffer(seen),
            _threads(blocks),
            isa() if level is None else level,
        )
        if failed:
            raise MemoryError("no memory to encode blocks")
        return max(seen, default=0)

    worst = fill()
    if worst > _WIDE:
        return None
    if worst == _WIDE:
        fields = fields | {name: fields[name].float() for name in ("scale", "zero")}
        fill()
    return fields


def decode(codec: Affine, fields: Fields, out: Tensor, level: int | None = None) -> bool:
    """Decode as `Affine.decode` does into ``out`` ``[n, heads, tokens, dim]`` in any strides; False if that must.

    The result is the same bit for bit, but for the rotation: see `coding.decode`.
    """
    layout = _layout(codec, out)
    if layout is None or out.stride(3) != 1:
        return False
    if any(fields[name].shape != (len(out), *shape) for name, (shape, _) in layout.items()):
        return False
    if [fields[name].dtype for name in layout] not in _STORED:
        return False
    found = library()
    assert found is not None
    fields = {name: whole_blocks(field) for name, field in fields.items()}
    failed = found.kvq_decode(
        _format(codec, out.shape[3]),
        _fields(fields),
        _states(out),
        _threads(out),
        isa() if level is None else level,
    )
    if failed:
        raise MemoryError("no memory to decode blocks")
    return True


def _layout(codec: Affine, states: Tensor) -> Layout | None:
    """Of the fields of ``[n, heads, tokens, dim]``; None if the library does not have such states."""
    return _layout_of(codec, *states.shape[1:], states.dtype)


@lru_cache
def _layout_of(codec: Affine, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Layout | None:
    if dtype not in _KINDS or not dim or (codec.axis == "channel" and tokens % codec.group):
        return None
    return codec.layout(heads, tokens, dim, dtype)


def _threads(states: Tensor) -> int:
    return torch.get_num_threads() if states.numel() > FEW else 1


@lru_cache
def _format(codec: Affine, dim: int) -> bytes:
    per_token = codec.axis == "token"
    group = codec.channel_group(dim) if per_token else codec.group
    return _FORMAT.pack(0, codec.bits, per_token, group, dim, codec.rotate == "hadamard")


def _states(states: Tensor) -> bytes:
    size = states.element_size()
    strides = (stride * size for stride in states.stride()[:3])
    return _STATES.pack(states.data_ptr(), _KINDS[states.dtype], *strides, *states.shape[:3])


def _fields(fields: Fields) -> bytes:
    parts = [fields[name] for name in ("codes", "scale", "zero")]
    strides = (part.stride(0) * part.element_size() for part in parts)
    return _FIELDS.pack(*(part.data_ptr() for part in parts), *strides, parts[1].dtype == torch.float32)
