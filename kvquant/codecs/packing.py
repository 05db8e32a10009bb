"""Bit order of packed codes; the only place that knows it.

Codes of 1, 2, 4 or 8 bits share bytes along the last dimension, ``per = 8 // bits`` to a byte. The dimension is cut
into ``per`` equal parts and byte ``c`` holds channel ``c`` of every part, part 0 in the lowest bits:

    int4, 8 channels:   byte 0 = ch0 | ch4 << 4    byte 1 = ch1 | ch5 << 4    …

so unpacking is a shift and a mask over contiguous memory, with no interleaving. Codes of 3 bits, eight in three
bytes, are their low two bits packed so, followed by their high bits packed so.
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_width(dim: int, bits: int) -> int:
    """Bytes that hold ``dim`` codes of ``bits`` bits (1, 2, 3, 4 or 8)."""
    if bits == 3:
        return packed_width(dim, 2) + packed_width(dim, 1)
    return -(-dim * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes ``[..., D]``, each below ``2**bits``, into uint8 ``[..., packed_width(D, bits)]``."""
    if bits == 3:
        return torch.cat((pack(codes & 3, 2), pack(codes >> 2, 1)), dim=-1)
    per = 8 // bits
    if per == 1:
        return codes
    width = packed_width(codes.shape[-1], bits)
    if codes.shape[-1] != width * per:
        codes = torch.nn.functional.pad(codes, (0, width * per - codes.shape[-1]))
    packed = codes[..., :width].clone()
    for part in range(1, per):
        packed |= codes[..., part * width : (part + 1) * width] << (bits * part)
    return packed


def unpack(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Inverse of :func:`pack`: uint8 ``[..., W]`` to uint8 codes ``[..., dim]``."""
    if bits == 3:
        low, high = torch.split(packed, [packed_width(dim, 2), packed_width(dim, 1)], dim=-1)
        return unpack(low, 2, dim) | unpack(high, 1, dim) << 2
    per = 8 // bits
    if per == 1:
        return packed
    width = packed.shape[-1]
    codes = packed.new_empty((*packed.shape[:-1], width * per))
    for part in range(per):
        target = codes[..., part * width : (part + 1) * width]
        torch.bitwise_right_shift(packed, bits * part, out=target)
        if part < per - 1:
            target &= (1 << bits) - 1
    return codes[..., :dim]
