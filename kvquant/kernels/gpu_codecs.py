"""Affine codes of blocks on a GPU, a launch each way (and some to rotate); `Affine` is what they are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from ..codecs import Codec, Fields, Layout
from ..codecs.affine import BITS, Affine
from ..codecs.base import to_dtype
from ..codecs.packing import planes
from ..codecs.rotation import hadamard, unrotate
from .gpu import on, power_of_two, runs_on
from .segments import rotates, together

ENCODED = 4096  # values of a tile that is encoded, about: they stay in registers
MAX_GROUP = 1024  # of those
DECODED = 2048  # bytes of a tile that is decoded, about: 16 a thread; with twice as many, registers spill


def decode(codec: Affine, fields: Fields, dim: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """As `kernels.decode`, for the codecs of `decodes`."""
    from .triton_codecs import decode_kernel

    codes, scale, zero = _laid_out(fields)
    blocks, heads, size, _ = codes.shape
    turns = rotates(codec)
    target = out
    if out is None or turns or out.stride(3) != 1:
        target = torch.empty((blocks, heads, size, dim), dtype=torch.float32 if turns else dtype, device=codes.device)
    assert target is not None
    if not target.numel():
        return target.to(dtype) if out is None else out
    span, group = (codec.group, 1) if codec.axis == "channel" else (1, codec.channel_group(dim))
    lanes = power_of_two(-(-dim // _parts(codec.bits)))
    rows = max(1, DECODED // lanes)
    with on(codes):
        decode_kernel[blocks * heads, -(-size // rows)](
            codes,
            scale,
            zero,
            target,
            heads,
            *codes.stride()[:3],
            *scale.stride()[:3],
            *target.stride()[:3],
            SIZE=size,
            DIM=dim,
            BITS=codec.bits,
            HIGH=planes(codec.bits)[1],
            SPAN=span,
            GROUP=group,
            ROWS=rows,
            LANES_PADDED=lanes,
            BOUNDED=target.dtype == torch.float16,
            num_warps=4,
            enable_fp_fusion=True,
        )
    decoded = to_dtype(unrotate(target), dtype) if turns else target
    return decoded if out is None or decoded is out else out.copy_(decoded)


def encode(codec: Affine, blocks: Tensor, out: Fields | None = None) -> Fields:
    """As `Affine.encode`, for the codecs of `encodes`. For ``out`` see `coding.encode`.

    Parameters that float16 cannot hold are the codec's own to encode; asking whether there are any waits for the GPU.
    """
    from .triton_codecs import encode_kernel

    if not blocks.numel():
        return codec.encode(blocks)
    x = hadamard(blocks.float()) if rotates(codec) else blocks
    x = x if x.stride(3) == 1 else x.contiguous()
    n, heads, size, dim = x.shape
    layout = codec.layout(heads, size, dim, x.dtype)
    if out is not None and _takes(out, layout):
        fields = out
    else:
        fields = {
            name: torch.empty((n, *shape), dtype=dtype, device=x.device) for name, (shape, dtype) in layout.items()
        }
    beyond = torch.zeros(1, dtype=torch.int32, device=x.device)
    parts, top = _parts(codec.bits), (1 << codec.bits) - 1
    lanes = -(-dim // parts)  # channels of a part
    if codec.axis == "channel":
        count, spread = codec.group, 1
        rows, rows_padded = count, 1 << (count - 1).bit_length()
        columns = columns_padded = min(64, power_of_two(lanes), max(8, ENCODED // (parts * rows_padded)))
    else:
        count = codec.channel_group(dim)
        spread = parts if count == dim else max(1, count // lanes)
        columns = lanes if spread > 1 or count == dim else count
        columns_padded = power_of_two(columns)
        rows = rows_padded = max(1, ENCODED // (parts * columns_padded))
    with on(x):
        encode_kernel[n * heads, -(-size // rows), -(-lanes // columns)](
            x,
            fields["codes"],
            fields["scale"],
            fields["zero"],
            beyond,
            heads,
            *x.stride()[:3],
            fields["codes"].stride(0),
            fields["scale"].stride(0),
            SIZE=size,
            DIM=dim,
            BITS=codec.bits,
            HIGH=planes(codec.bits)[1],
            FITTED=codec._fits,
            GROUPS=parts // spread,
            SPREAD=spread,
            ROWS=rows,
            ROWS_PADDED=rows_padded,
            WIDTH=columns,
            WIDTH_PADDED=columns_padded,
            COUNT=count,
            FINE=1 << max(0, 24 - (3 * top * top * count).bit_length()),
            PER_TOKEN=codec.axis == "token",
            num_warps=8,
            enable_fp_fusion=False,  # the same operations as `Affine`, one by one
        )
    return codec.encode(blocks) if beyond.item() else fields


def encodes(codec: Codec, blocks: Tensor) -> bool:
    """Whether `encode` can do these.

    Groups of a token must be whole parts of it, or lie within parts. Where ranges are searched for, groups are of
    powers of two, whose errors can be added up in the order of `Affine`.
    """
    if not isinstance(codec, Affine) or codec.bits not in BITS or not runs_on(blocks):
        return False
    size, dim = blocks.shape[2:]
    parts = _parts(codec.bits)
    lanes = -(-dim // parts)
    group = codec.group if codec.axis == "channel" else codec.channel_group(dim)
    if group > MAX_GROUP or (codec.bits < 4 and group & (group - 1)) or (planes(codec.bits)[1] and dim % parts):
        return False
    if codec.axis == "channel":
        return size % group == 0
    return group == dim or (lanes * parts == dim and (lanes % group == 0 or (group % lanes == 0 and dim % group == 0)))


def _parts(bits: int) -> int:
    """Parts of a token's channels that lie in the same bytes; see ``codecs/packing.py``."""
    low, high = planes(bits)
    return 8 // (high or low)


def decodes(codec: Codec, fields: Fields, dim: int) -> bool:
    """Whether `decode` can do these: codes in two planes come in whole parts."""
    if not isinstance(codec, Affine) or not runs_on(fields["codes"]):
        return False
    return not planes(codec.bits)[1] or dim % _parts(codec.bits) == 0


def _takes(out: Fields, layout: Layout) -> bool:
    """Whether `encode` can write there."""
    fitting = all(out[name].dtype == dtype and together(out[name]) for name, (_, dtype) in layout.items())
    return fitting and out["scale"].stride(0) == out["zero"].stride(0)


def _laid_out(fields: Fields) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and zero, the last two alike, the channels of a token together."""
    codes, scale, zero = (
        field if field.stride(3) == 1 else field.contiguous()
        for field in (fields["codes"], fields["scale"], fields["zero"])
    )
    if scale.stride() != zero.stride():
        scale, zero = scale.contiguous(), zero.contiguous()
    return codes, scale, zero
