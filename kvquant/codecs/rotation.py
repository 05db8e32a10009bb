"""Hadamard rotation over the head dimension, which spreads an outlier channel over its neighbours.

A head size that is no power of two is cut into descending powers of two (80 = 64 + 16, 15 = 8 + 4 + 2 + 1) and
each piece is rotated by itself, so the rotation stays orthogonal and costs no extra codes. Method: QuaRot
(Ashkboos et al., 2024), without random signs.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def segments(dim: int) -> list[int]:
    """The descending powers of two that add up to ``dim``."""
    return [1 << bit for bit in range(dim.bit_length() - 1, -1, -1) if dim >> bit & 1]


def hadamard(x: Tensor) -> Tensor:
    """Rotate float ``[..., D]`` along its last dimension; orthonormal and its own inverse.

    A butterfly of additions rather than a matrix product, whose rounding may depend on the batch: codes must not.
    """
    dim = x.shape[-1]
    columns = x.reshape(x.numel() // dim, dim).t().contiguous()  # [D, rows]: additions then run over whole rows
    pieces = [_butterfly(piece) for piece in torch.split(columns, segments(dim))]
    rotated = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return rotated.t().reshape(x.shape)


def unrotate(x: Tensor) -> Tensor:
    """Undo :func:`hadamard` on float32 ``[..., D]`` by one matrix product, several times faster."""
    return torch.matmul(x.contiguous(), matrix(x.shape[-1], x.device))  # strides may decide how it rounds


def _butterfly(columns: Tensor) -> Tensor:
    size, rows = columns.shape
    half = size // 2
    while half:
        pairs = columns.reshape(size // (2 * half), 2, half, rows)
        columns = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), dim=1)
        half //= 2
    return torch.mul(columns.reshape(size, rows), size**-0.5)


@lru_cache(maxsize=64)
def matrix(dim: int, device: torch.device) -> Tensor:
    """What rows are multiplied by to rotate them, or to undo it; float32."""
    return hadamard(torch.eye(dim)).to(device)
