"""Chunks: the keys and values of a few tokens in all layers, as engines move them, to bytes and back.

    codec = ChunkCodec(PrecisionPolicy.load("int4"), layers=32)
    data = codec.encode(keys, values, b"name")       # [layers, heads, tokens, dim], uint8 [nbytes] comes back
    codec.decode(data, b"name", keys, values)        # into tensors of the same shape, in any strides

A chunk is cut into the policy's blocks, and each layer's are encoded by the codecs the policy has for it. What is left
of a chunk that is no multiple of ``block_tokens`` becomes a block of its own size, a multiple of 8 where codecs allow,
in which a group is no larger than the block.

Byte layout, little endian:

    "KVQC" | version u16 | dtype u16 | first layer, layers, heads, tokens, key dim, value dim, blocks: u32 each
    length u32 of each block | blocks (see `blocks`), layers in order, those of a layer in order

A block's checksum covers the name, this header, its layer and its number, so that one of another chunk, place, shape
or policy reads as damage, and so does a chunk that was cut short.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..blocks import KVBlock
from ..codecs import Codec
from ..compressor import BlockCompressor
from ..errors import CodecError, FormatError, PolicyError, shown
from ..policy import LayerPolicy, PrecisionPolicy

MAGIC = b"KVQC"
VERSION = 1
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_PREFIX = struct.Struct("<4sHH7I")
_ALIGNED = 8  # tokens of a block are a multiple of this, see PrecisionPolicy.block_tokens


@dataclass(frozen=True)
class ChunkShape:
    """What a chunk holds: ``tokens`` of ``layers`` layers from ``first_layer`` on."""

    layers: int
    heads: int
    tokens: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    first_layer: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its keys and values as they are."""
        width = self.heads * (self.key_dim + self.value_dim)
        return self.layers * self.tokens * width * self.dtype.itemsize

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, first_layer: int = 0) -> ChunkShape:
        """That of ``keys`` ``[layers, heads, tokens, dim]`` and ``values`` beside them. Raises `CodecError`."""
        if keys.dim() != 4 or values.dim() != 4 or not keys.numel() or not values.numel():
            given = f"keys {tuple(keys.shape)}, values {tuple(values.shape)}"
            raise CodecError(f"{given}; allowed: [layers, heads, tokens, dim], none of them 0")
        if keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype or keys.dtype not in DTYPES:
            raise CodecError(
                f"keys {keys.dtype} {tuple(keys.shape)}, values {values.dtype} {tuple(values.shape)}; "
                f"allowed: both of {', '.join(map(str, DTYPES))}, equal but for dim"
            )
        layers, heads, tokens, dim = keys.shape
        return cls(layers, heads, tokens, dim, values.shape[3], keys.dtype, first_layer)

    @classmethod
    def read(cls, data: Tensor | bytes) -> ChunkShape:
        """That of an encoded chunk, as its header says: nothing is verified. Raises `FormatError`."""
        return _unpacked(_view(data))[0]

    def to_bytes(self, blocks: int) -> bytes:
        """The header of a chunk in so many blocks."""
        numbers = (self.first_layer, self.layers, self.heads, self.tokens, self.key_dim, self.value_dim, blocks)
        return _PREFIX.pack(MAGIC, VERSION, DTYPES.index(self.dtype), *numbers)


class ChunkCodec:
    """Encodes and decodes chunks of a model, or a part of one, of ``layers`` layers. Holds no tokens; thread-safe.

    Raises `PolicyError`, also for what a policy asks for that cannot be done here.
    """

    def __init__(self, policy: PrecisionPolicy, layers: int) -> None:
        if policy.cold is not None:
            raise PolicyError(f"policy {shown(policy.name)}: cold: set; allowed: none, since a chunk is encoded once")
        self.policy, self.layers = policy, layers
        _compressors(policy, layers)  # raises for selectors that do not fit

    def size(self, shape: ChunkShape) -> int:
        """Bytes of a chunk of this shape that may begin a sequence, once encoded; any such has as many.

        More has only one whose values a codec's float16 parameters can't span, and which has float32 ones.
        """
        return _size(self.policy, self.layers, shape)

    def encode(self, keys: Tensor, values: Tensor, name: bytes, *, first: bool = True, first_layer: int = 0) -> Tensor:
        """``keys`` and ``values``, ``[layers, heads, tokens, dim]`` in any strides, as uint8 ``[nbytes]``.

        ``first``: they may begin a sequence, whose first ``sink_tokens`` are kept as they are beside their codes.
        Raises `CodecError`, also for values that are not finite in layers whose codec is lossy.
        """
        shape = ChunkShape.of(keys, values, first_layer)
        blocks: list[list[KVBlock]] = [[] for _ in range(shape.layers)]
        at = 0
        for size, count, rest in self._cuts(shape.tokens):
            stop = at + size * count + rest
            for compressor, rows in _alike(self._layers(size, shape)):
                k, v = keys[rows, :, at:stop], values[rows, :, at:stop]
                _check_finite(compressor.policy, k, v)
                start = 0 if first and not at else size
                for row, found in zip(rows, compressor.compress_rows(k, v, start), strict=True):
                    blocks[row] += found
            at = stop
        head = shape.to_bytes(sum(map(len, blocks)))
        parts = [
            block.to_bytes(_place(name, head, layer, number))
            for layer, those in enumerate(blocks)
            for number, block in enumerate(those)
        ]
        data = b"".join((head, struct.pack(f"<{len(parts)}I", *map(len, parts)), *parts))
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def decode(self, data: Tensor | bytes, name: bytes, keys: Tensor, values: Tensor, *, first_layer: int = 0) -> None:
        """What was encoded under ``name`` into ``keys`` and ``values``, ``[layers, heads, tokens, dim]``.

        Bytes beyond its end are ignored. Raises `FormatError`, and leaves them as they are, unless every byte is as
        it was written, by this policy, and it is a chunk of this very shape.
        """
        view, shape = _view(data), ChunkShape.of(keys, values, first_layer)
        found, count = _unpacked(view)
        if found != shape:
            raise FormatError(f"chunk: {found}; allowed: {shape}")
        cuts = self._cuts(shape.tokens)
        each = sum(whole + bool(rest) for _, whole, rest in cuts)
        if count != each * shape.layers:
            raise FormatError(f"chunk: {count} blocks; allowed: {each} in each of {shape.layers} layers")
        parts = _parts(view, count)
        head = bytes(view[: _PREFIX.size])
        ready = []
        at = number = 0
        for size, whole, rest in cuts:
            here, tokens = whole + bool(rest), size * whole + rest
            for compressor, rows in _alike(self._layers(size, shape)):
                blocks = [
                    compressor.from_bytes(parts[row * each + n], _place(name, head, row, n))
                    for row in rows
                    for n in range(number, number + here)
                ]
                _check_blocks(blocks, shape, size, [size] * whole + [rest] * bool(rest))
                k, v = (
                    x.view(shape.heads, len(rows), tokens, -1).transpose(0, 1) for x in compressor.decompress(*blocks)
                )
                ready.append((rows, at, k, v))
            at, number = at + tokens, number + here
        for rows, at, k, v in ready:
            for row, layer_keys, layer_values in zip(rows, k, v, strict=True):
                keys[row, :, at : at + k.shape[2]] = layer_keys
                values[row, :, at : at + v.shape[2]] = layer_values

    def _cuts(self, tokens: int) -> list[tuple[int, int, int]]:
        """How a chunk is cut: tokens of a block, blocks that are full, tokens in one that is not."""
        whole, rest = divmod(tokens, self.policy.block_tokens)
        cuts = [(self.policy.block_tokens, whole, 0)] if whole else []
        if rest:
            size = fitted(self.policy, rest).block_tokens
            cuts.append((size, rest // size, rest % size))
        return cuts

    def _layers(self, size: int, shape: ChunkShape) -> list[BlockCompressor]:
        """What encodes blocks of so many tokens in each of a chunk's layers."""
        last = shape.first_layer + shape.layers
        if last > self.layers:
            raise CodecError(f"layers {shape.first_layer} to {last - 1}; allowed: 0 to {self.layers - 1}")
        return _compressors(resized(self.policy, size), self.layers)[shape.first_layer : last]


@lru_cache(maxsize=64)
def fitted(policy: PrecisionPolicy, tokens: int) -> PrecisionPolicy:
    """The same policy with the smallest blocks that hold ``tokens``, if its own are larger."""
    for size in range(-(-tokens // _ALIGNED) * _ALIGNED, policy.block_tokens, _ALIGNED):
        try:
            return resized(policy, size)
        except PolicyError:
            continue  # a codec has no group that divides it
    return policy


@lru_cache(maxsize=64)
def resized(policy: PrecisionPolicy, size: int) -> PrecisionPolicy:
    """The same policy with blocks of ``size`` tokens, and groups along tokens no larger. Raises `PolicyError`."""
    if size == policy.block_tokens:
        return policy
    return PrecisionPolicy(
        name=policy.name,
        block_tokens=size,
        sink_tokens=min(policy.sink_tokens, size),
        default=_resized(policy.default, size),
        layers={selector.text: _resized(codecs, size) for selector, codecs in policy.layers},
    )


def _resized(codecs: LayerPolicy, size: int) -> dict[str, str]:
    names = ("latent", "rotary") if codecs.latent else ("key", "value")
    return {name: _regrouped(codec, size) for name, codec in zip(names, (codecs.key, codecs.value), strict=True)}


def _regrouped(codec: Codec, size: int) -> str:
    """The name of a codec whose groups along tokens, if it has any, divide ``size``."""
    kind, *options = codec.name.split("/")
    if len(options) != 3 or options[0] != "channel":
        return codec.name
    limit = min(int(options[1][1:]), size)
    group = max(divisor for divisor in range(1, limit + 1) if size % divisor == 0)
    return "/".join((kind, options[0], f"g{group}", options[2]))


@lru_cache(maxsize=64)
def _compressors(policy: PrecisionPolicy, layers: int) -> list[BlockCompressor]:
    return BlockCompressor.for_layers(policy, layers)


def _alike(compressors: Sequence[BlockCompressor]) -> list[tuple[BlockCompressor, list[int]]]:
    """Layers with the same codecs together: they are encoded in one call."""
    found: dict[LayerPolicy, tuple[BlockCompressor, list[int]]] = {}
    for row, compressor in enumerate(compressors):
        found.setdefault(compressor.policy, (compressor, []))[1].append(row)
    return list(found.values())


@lru_cache(maxsize=64)
def _size(policy: PrecisionPolicy, layers: int, shape: ChunkShape) -> int:
    keys, values = (
        torch.zeros(shape.layers, shape.heads, shape.tokens, dim, dtype=shape.dtype)
        for dim in (shape.key_dim, shape.value_dim)
    )
    return len(ChunkCodec(policy, layers).encode(keys, values, b"", first_layer=shape.first_layer))


def _check_finite(policy: LayerPolicy, k: Tensor, v: Tensor) -> None:
    for name, codec, x in (("keys", policy.key, k), ("values", policy.value, v)):
        if not codec.lossless and not bool(x.abs().amax().isfinite()):  # NaN is the largest; isfinite(x) takes longer
            raise CodecError(f"{name}: infinite or NaN; allowed with {codec.name}: finite values")


def _check_blocks(blocks: Sequence[KVBlock], shape: ChunkShape, size: int, tokens: Sequence[int]) -> None:
    """Raises `FormatError` for blocks, in order of layers, that are not of this shape; none is decoded until then."""
    for number, block in enumerate(blocks):
        sizes = (shape.heads, size, shape.key_dim), (shape.heads, size, shape.value_dim)
        fits = (block.key.shape, block.value.shape) == sizes and {block.key.dtype, block.value.dtype} == {shape.dtype}
        if not fits or block.first or block.tokens != tokens[number % len(tokens)]:
            raise FormatError(f"chunk: a block of {block.tokens} tokens, keys {block.key.shape}; allowed: {shape}")


def _view(data: Tensor | bytes) -> memoryview:
    return data.numpy().data.cast("B") if isinstance(data, Tensor) else memoryview(data)


def _unpacked(view: memoryview) -> tuple[ChunkShape, int]:
    if len(view) < _PREFIX.size:
        raise FormatError(f"{len(view)} bytes are too short for a kvquant chunk")
    magic, version, dtype, first, *sizes, count = _PREFIX.unpack(view[: _PREFIX.size])
    if magic != MAGIC or version != VERSION or dtype >= len(DTYPES):
        raise FormatError("not a kvquant chunk of this release")
    layers, heads, tokens, key_dim, value_dim = sizes
    return ChunkShape(layers, heads, tokens, key_dim, value_dim, DTYPES[dtype], first), count


def _parts(view: memoryview, count: int) -> list[memoryview]:
    """The blocks' bytes. Raises `FormatError` where there are fewer than the header says."""
    at = _PREFIX.size + 4 * count
    if at > len(view):
        raise FormatError(f"chunk: {len(view)} bytes are too short for {count} blocks")
    parts = []
    for size in struct.unpack(f"<{count}I", view[_PREFIX.size : at]):
        parts.append(view[at : at + size])
        at += size
    if at > len(view):
        raise FormatError(f"chunk: {len(view)} bytes; allowed: {at}")
    return parts


def _place(name: bytes, head: bytes, layer: int, number: int) -> bytes:
    """What a block's checksum covers beside its bytes."""
    return name + head + struct.pack("<II", layer, number)
