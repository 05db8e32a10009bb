"""Bit order of packed codes; the only place that knows it.

Codes of 1, 2, 4 or 8 bits share bytes along the last dimension, ``per = 8 // bits`` to a byte. The dimension is cut
into ``per`` equal parts and byte ``c`` holds channel ``c`` of every part, part 0 in the lowest bits:

    int4, 8 channels:   byte 0 = ch0 | ch4 << 4    byte 1 = ch1 | ch5 << 4    …

so unpacking is a shift and a mask over contiguous memory, with no interleaving. Codes whose bits are no power of two
come in two planes: the low bits, as large a power as there is, packed so, followed by the high ones packed so. That is
2 + 1 bits for 3, 4 + 1 for 5 and 4 + 2 for 6.
"""

from __future__ import annotations

import torch
from torch import Tensor


def planes(bits: int) -> tuple[int, int]:
    """Bits of the low and of the high plane of ``bits``-bit codes (1 to 6, or 8); the latter 0 where there is none."""
    low = 1 << (bits.bit_length() - 1)
    return low, bits - low


def packed_width(dim: int, bits: int) -> int:
    """Bytes that hold ``dim`` codes of ``bits`` bits."""
    low, high = planes(bits)
    return -(-dim * low // 8) - (-dim * high // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes ``[..., D]``, each below ``2**bits``, into uint8 ``[..., packed_width(D, bits)]``."""
    low, high = planes(bits)
    if high:
        return torch.cat((pack(codes & ((1 << low) - 1), low), pack(codes >> low, high)), dim=-1)
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
    low, high = planes(bits)
    if high:
        lower, upper = torch.split(packed, [packed_width(dim, plane) for plane in (low, high)], dim=-1)
        return unpack(lower, low, dim) | unpack(upper, high, dim) << low
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
