"""Encoding and decoding of blocks: by the compiled library or on a GPU where they can, else by the codec's methods.

Codes are the same either way, bit for bit: content keys stand for them, whichever machine made them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..codecs import Codec, Fields
from ..codecs.affine import Affine
from . import gpu, gpu_codecs, native_codecs

CHUNK_ELEMENTS = 1 << 20  # codecs work on at most about this many values at once, to stay in the CPU's caches
GPU_CHUNK_ELEMENTS = 1 << 26  # or, on a GPU, in some of its memory


def encode(codec: Codec, blocks: Tensor, out: Fields | None = None) -> Fields:
    """See `Codec.encode`; ``blocks`` ``[n, heads, tokens, dim]`` may have any strides.

    Where they can be written into ``out``, fields as `Codec.layout` has them, each contiguous within a block, that is
    what is returned; else it holds nothing of use.
    """
    if isinstance(codec, Affine) and native_codecs.serves(codec, blocks):
        fields = native_codecs.encode(codec, blocks, out)
        if fields is not None:
            return fields
    if isinstance(codec, Affine) and gpu.serves(blocks) and gpu_codecs.encodes(codec, blocks):
        return gpu_codecs.encode(codec, blocks, out)
    most = GPU_CHUNK_ELEMENTS if blocks.is_cuda else CHUNK_ELEMENTS
    step = max(1, most // max(1, blocks[:1].numel()))
    encoded = [codec.encode(part.contiguous()) for part in torch.split(blocks, step)]
    return {name: torch.cat([part[name] for part in encoded]) for name in encoded[0]} if encoded[1:] else encoded[0]


def decode(codec: Codec, fields: Fields, dim: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """See `Codec.decode`; into ``out`` ``[n, heads, tokens, dim]`` of ``dtype``, in any strides, if it is given.

    The library undoes a rotation by additions, in the order in which they were made, where the codec's own method
    takes a matrix product: there the two differ by what float32 rounds, which the next rounding to 16 bits mostly
    hides. All else is equal bit for bit.
    """
    if isinstance(codec, Affine) and native_codecs.serves(codec, fields["codes"]):
        target = torch.empty((*fields["codes"].shape[:3], dim), dtype=dtype) if out is None else out
        if native_codecs.decode(codec, fields, target):
            return target
    if isinstance(codec, Affine) and gpu.serves(fields["codes"]) and gpu_codecs.decodes(codec, fields, dim):
        return gpu_codecs.decode(codec, fields, dim, dtype, out)
    decoded = codec.decode(fields, dim, dtype)
    return decoded if out is None else out.copy_(decoded)
