"""Attention over affine codes on a GPU, by Triton kernels; nothing needs them.

Runs of integer codes go to the kernels, everything else to `eager`; parts are merged by their log-sum-exps.
Rotations are applied outside the kernels, to the query and to the output. With ``TRITON_INTERPRET=1`` the kernels run,
slowly, on tensors of the CPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from ..codecs import Codec, Fields
from ..codecs.affine import Affine
from ..codecs.base import to_dtype
from ..codecs.packing import packed_width
from ..codecs.rotation import hadamard, unrotate
from . import eager
from .segments import Sealed, Segment

BITS = (8, 4, 2)
TOKENS = 64  # of a tile, at most
MAX_PIECES = 4  # that the attention kernel has names for
PROGRAMS = 4  # of a multiprocessor: tokens are split until there are so many

ENCODED = 4096  # values of a tile that is encoded, about: they stay in registers
MAX_GROUP = 1024  # of those

_OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
_PER_TOKEN, _PER_CHANNEL, _EACH = range(3)  # as in the kernels


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
    mode: int


@lru_cache(maxsize=1)
def installed() -> bool:
    """Whether there is a Triton."""
    return find_spec("triton") is not None


def serves(query: Tensor, segments: Sequence[Segment]) -> bool:
    """Whether the kernels can do some of this attention."""
    return _runs_on(query) and any(_served(segment) for segment in segments)


def attend(
    query: Tensor, segments: Sequence[Segment], dim: int, *, scale: float, softcap: float = 0.0, news: int = 1
) -> tuple[Tensor, Tensor]:
    """See `eager.attend`."""
    plain: list[tuple[Tensor, Tensor]] = []
    rotated: list[tuple[Tensor, Tensor]] = []
    rest = [segment for segment in segments if not _served(segment)]
    if rest:
        plain.append(eager.attend(query, rest, dim, scale=scale, softcap=softcap, news=news))
    query = query.float().contiguous() * scale
    turned = None
    for segment in segments:
        if not isinstance(segment, Sealed) or not _served(segment) or segment.tokens <= 0:
            continue
        asking = query
        if _rotates(segment.key):
            asking = turned = hadamard(query).contiguous() if turned is None else turned
        (rotated if _rotates(segment.value) else plain).append(_attend(asking, segment, scale, softcap))
    if rotated:
        output, logs = eager.merge(rotated)
        plain.append((hadamard(output), logs))
    if not plain:
        return eager.attend(query, [], dim, scale=scale)
    return plain[0] if len(plain) == 1 else eager.merge(plain)


def decode(codec: Affine, fields: Fields, dim: int, dtype: torch.dtype) -> Tensor:
    """As `Affine.decode`, for the codecs of `decodes`: n blocks ``[n, heads, tokens, dim]`` of ``dtype``."""
    from .triton_codecs import decode_kernel

    codes, scale, zero = _laid_out(fields)
    blocks, heads, size, width = codes.shape
    turns = _rotates(codec)
    output = torch.empty((blocks, heads, size, dim), dtype=torch.float32 if turns else dtype, device=codes.device)
    if not output.numel():
        return output.to(dtype)
    side = _side(codec, dim)
    lanes = _power(width)
    rows = max(1, 4096 // lanes)
    with _on(codes):
        decode_kernel[blocks * heads, -(-size // rows)](
            codes,
            scale,
            zero,
            output,
            heads,
            *codes.stride()[:3],
            *scale.stride()[:3],
            size,
            dim,
            codec.bits,
            width,
            side.span,
            side.group,
            rows,
            lanes,
            output.dtype == torch.float16,
            **_OPTIONS,
        )
    return to_dtype(unrotate(output), dtype) if turns else output


def encode(codec: Affine, blocks: Tensor) -> Fields:
    """As `Affine.encode`, for the codecs of `encodes`.

    Parameters that float16 cannot hold are the codec's own to encode; asking whether there are any waits for the GPU.
    """
    from .triton_codecs import encode_kernel

    if not blocks.numel():
        return codec.encode(blocks)
    x = hadamard(blocks.float()) if _rotates(codec) else blocks
    x = x if x.stride(3) == 1 else x.contiguous()
    n, heads, size, dim = x.shape
    fields = {
        name: torch.empty((n, *shape), dtype=dtype, device=x.device)
        for name, (shape, dtype) in codec.layout(heads, size, dim, x.dtype).items()
    }
    beyond = torch.zeros(1, dtype=torch.int32, device=x.device)
    width, parts, top = packed_width(dim, codec.bits), 8 // codec.bits, (1 << codec.bits) - 1
    if codec.axis == "channel":
        count, shared = codec.group, False
        rows, padded = count, 1 << (count - 1).bit_length()
        columns = min(64, _power(width), max(16, ENCODED // (parts * padded)))
        lanes = columns
    else:
        count = codec.channel_group(dim)
        shared = count == dim
        columns = width if shared else count
        lanes = _power(columns)
        rows = padded = max(1, ENCODED // (parts * lanes))
    with _on(x):
        encode_kernel[n * heads, -(-size // rows), -(-width // columns)](
            x,
            fields["codes"],
            fields["scale"],
            fields["zero"],
            beyond,
            heads,
            *x.stride()[:3],
            size,
            dim,
            codec.bits,
            width,
            rows,
            padded,
            columns,
            lanes,
            count,
            1 << max(0, 24 - (3 * top * top * count).bit_length()),
            1 if codec.axis == "channel" else 2,
            shared,
            **_OPTIONS,
        )
    return codec.encode(blocks) if beyond.item() else fields


def encodes(codec: Codec, blocks: Tensor) -> bool:
    """Whether `encode` can do these: groups of one token must not straddle the parts that share bytes."""
    if not isinstance(codec, Affine) or codec.bits not in (8, 4) or codec.group > MAX_GROUP or not _runs_on(blocks):
        return False
    if codec.axis == "channel":
        return blocks.shape[2] % codec.group == 0
    dim = blocks.shape[3]
    group, width = codec.channel_group(dim), packed_width(dim, codec.bits)
    return group == dim or (width * 8 // codec.bits == dim and width % group == 0)


def decodes(codec: Codec, fields: Fields) -> bool:
    """Whether `decode` can do these."""
    return isinstance(codec, Affine) and codec.bits in BITS and _runs_on(fields["codes"])


def _runs_on(x: Tensor) -> bool:
    if x.is_cuda:
        return installed() and _multiplies_bfloat16(x.device)
    return x.device.type == "cpu" and _interpreted() and installed()


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _in_halves(query: Tensor) -> int:
    """Whether to multiply by tensor cores; see ``triton_attention.py``."""
    return int(query.is_cuda)


def _on(x: Tensor) -> AbstractContextManager[object]:
    """Kernels start on the current GPU, which must be that of their tensors."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _served(segment: Segment) -> bool:
    return isinstance(segment, Sealed) and all(
        isinstance(codec, Affine) and codec.bits in BITS for codec in (segment.key, segment.value)
    )


def _rotates(codec: Codec) -> bool:
    return isinstance(codec, Affine) and codec.rotate == "hadamard"


def _attend(query: Tensor, part: Sealed, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """Attention to one run of blocks of ``query`` float32 ``[heads, queries, dim]``, scaled and rotated like the keys.

    The output comes rotated like the values.
    """
    from .triton_attention import attend_kernel

    assert isinstance(part.key, Affine)
    assert isinstance(part.value, Affine)
    heads, queries, _ = query.shape
    size = part.block_tokens
    sides = [_side(codec, dim) for codec, dim in ((part.key, part.dims[0]), (part.value, part.dims[1]))]
    channels = max(side.pieces * side.lanes for side in sides)  # wide heads leave a tile less shared memory
    most = TOKENS if channels <= 256 else 16
    tokens = min([_power(min(size, most)), *(_divisor(side.span) for side in sides if side.mode == _PER_CHANNEL)])
    rows = min(64 if channels <= 128 else 16, _power(queries))
    tiles_a_block = -(-size // tokens)
    start, stop = part.first // size * tiles_a_block, -(-part.stop // size) * tiles_a_block
    programs = heads * -(-queries // rows)
    splits = min(stop - start, max(1, -(-PROGRAMS * _multiprocessors(query.device) // programs)))
    each = -(-(stop - start) // splits)
    splits = -(-(stop - start) // each)

    output = query.new_empty((splits, heads, queries, part.dims[1]))
    logs = query.new_empty((splits, heads, queries))
    keys, values = _laid_out(part.keys), _laid_out(part.values)
    extra = query if part.extra is None else part.extra.float().contiguous()
    with _on(query):
        attend_kernel[splits, heads, -(-queries // rows)](
            query,
            *keys,
            *values,
            extra,
            output,
            logs,
            scale,
            softcap,
            part.first,
            part.stop,
            start,
            stop,
            each,
            queries,
            *(stride for fields in (keys, values) for field in fields[:2] for stride in field.stride()[:3]),
            *(tuple(side) for side in sides),
            size,
            rows,
            tokens,
            part.extra is not None,
            softcap != 0,
            _in_halves(query),
            **_OPTIONS,
        )
    if splits == 1:
        return output[0], logs[0]
    total = logs.logsumexp(dim=0)
    shares = (logs - torch.where(total.isfinite(), total, 0.0)).exp()
    return (output * shares[..., None]).sum(dim=0), total


@lru_cache(maxsize=256)
def _side(codec: Affine, dim: int) -> Side:
    """How the kernels read ``dim`` channels of a codec."""
    width = packed_width(dim, codec.bits)
    parts = 8 // codec.bits
    if codec.axis == "channel":
        mode = _PER_CHANNEL if _divisor(codec.group) >= 16 else _EACH
        return Side(dim, codec.bits, width, parts, width, _power(width), codec.group, 1, mode)
    group = codec.channel_group(dim)
    if group == dim:
        return Side(dim, codec.bits, width, parts, width, _power(width), 1, group, _PER_TOKEN)
    piece = math.gcd(width, group)
    if width * parts == dim and dim // piece <= MAX_PIECES:
        return Side(dim, codec.bits, width, dim // piece, piece, _power(piece), 1, group, _PER_TOKEN)
    return Side(dim, codec.bits, width, parts, width, _power(width), 1, group, _EACH)


def _laid_out(fields: Fields) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and zero, the last two alike, the channels of a token together."""
    codes, scale, zero = (
        field if field.stride(3) == 1 else field.contiguous()
        for field in (fields["codes"], fields["scale"], fields["zero"])
    )
    if scale.stride() != zero.stride():
        scale, zero = scale.contiguous(), zero.contiguous()
    return codes, scale, zero


def _power(number: int) -> int:
    """The power of two from 16 on, which matrix units want, that ``number`` fits in."""
    return max(16, 1 << (number - 1).bit_length())


def _divisor(number: int) -> int:
    """The largest power of two that divides ``number``."""
    return number & -number


@lru_cache(maxsize=16)
def _multiplies_bfloat16(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
