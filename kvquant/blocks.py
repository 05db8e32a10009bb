"""A sealed block and its bytes. Data only: no codec, no device logic, nothing that executes on load.

Byte layout, little endian:

    "KVQB" | version u16 | header length u32 | xxh3-128 (16 bytes) | header | payload

The header is UTF-8 JSON (codec, shape, dtype, fields and sinks of each part, in payload order); the payload is
their raw bytes. The checksum covers the key the block was stored under, the header and the payload, so a flipped bit,
a torn write and another key's block all read as damage.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from .errors import FormatError

MAGIC = b"KVQB"
VERSION = 1
_PREFIX = struct.Struct("<4sHI16s")
_DTYPES = {
    "u8": torch.uint8,
    "i8": torch.int8,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class BlockKey:
    """Runtime handle of a block: the ``block``-th span of a ``sequence`` in one ``layer``."""

    sequence: int
    layer: int
    block: int

    def to_bytes(self) -> bytes:
        """Fixed-width bytes, for checksums and indexes."""
        return struct.pack("<QII", self.sequence, self.layer, self.block)


@dataclass(frozen=True)
class CompressedTensor:
    """Codes of one tensor ``[heads, tokens, dim]`` of ``dtype``, in the fields its ``codec`` defines.

    ``sinks`` are the sequence's first tokens as they were, ``[heads, count, dim]``, where the block holds them and
    the codec is lossy.
    """

    codec: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    fields: Mapping[str, Tensor]
    sinks: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        sinks = () if self.sinks is None else (self.sinks,)
        return sum(tensor.nbytes for tensor in (*self.fields.values(), *sinks))


@dataclass(frozen=True)
class KVBlock:
    """One sealed block of one layer, of which ``tokens`` from place ``first`` on are valid."""

    key: CompressedTensor
    value: CompressedTensor
    first: int
    tokens: int

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return self.key.nbytes + self.value.nbytes

    def to_bytes(self, key: bytes) -> bytes:
        """Serialise under ``key``; see the module docstring for the layout."""
        tensors: list[Tensor] = []
        header: dict[str, Any] = {"first": self.first, "tokens": self.tokens}
        for role, part in (("key", self.key), ("value", self.value)):
            header[role] = {
                "codec": part.codec,
                "shape": part.shape,
                "dtype": _DTYPE_NAMES[part.dtype],
                "fields": {name: _describe(field) for name, field in part.fields.items()},
                "sinks": None if part.sinks is None else _describe(part.sinks),
            }
            tensors += part.fields.values()
            if part.sinks is not None:
                tensors.append(part.sinks)
        head = json.dumps(header, separators=(",", ":")).encode()
        payload = b"".join(_raw_bytes(tensor) for tensor in tensors)
        return _PREFIX.pack(MAGIC, VERSION, len(head), _digest(key, head, payload)) + head + payload

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, key: bytes) -> KVBlock:
        """Read a block stored under ``key``; `FormatError` unless every byte is as it was written.

        Nothing is allocated before the checksum and the sizes have been verified.
        """
        header, payload = _verified(memoryview(data), key)
        try:
            reader = _Reader(payload)
            key_part, value_part = (reader.part(header[role]) for role in ("key", "value"))
            reader.finish()
            return cls(key_part, value_part, int(header["first"]), int(header["tokens"]))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise FormatError(f"block header does not describe its payload: {error}") from error


class _Reader:
    """Takes tensors off a payload in order."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._at = 0

    def take(self, dtype: str, shape: list[int]) -> Tensor:
        if any(not isinstance(size, int) or size < 0 for size in shape):
            raise ValueError(f"shape {shape}")
        size = math.prod(shape) * _DTYPES[dtype].itemsize
        if size > len(self._payload) - self._at:
            raise ValueError(f"a field of {size} bytes, {len(self._payload) - self._at} left")
        chunk = bytearray(self._payload[self._at : self._at + size])
        self._at += size
        if not size:
            return torch.empty(shape, dtype=_DTYPES[dtype])
        return torch.frombuffer(chunk, dtype=_DTYPES[dtype]).reshape(shape)

    def part(self, described: dict[str, Any]) -> CompressedTensor:
        heads, tokens, dim = (int(size) for size in described["shape"])
        return CompressedTensor(
            codec=str(described["codec"]),
            shape=(heads, tokens, dim),
            dtype=_DTYPES[described["dtype"]],
            fields={name: self.take(*field) for name, field in described["fields"].items()},
            sinks=self.take(*described["sinks"]) if described["sinks"] is not None else None,
        )

    def finish(self) -> None:
        if self._at != len(self._payload):
            raise ValueError(f"{len(self._payload) - self._at} bytes left over")


def _verified(view: memoryview, key: bytes) -> tuple[dict[str, Any], memoryview]:
    if len(view) < _PREFIX.size:
        raise FormatError(f"{len(view)} bytes are too short for a kvquant block")
    magic, version, head_size, digest = _PREFIX.unpack(view[: _PREFIX.size])
    if magic != MAGIC:
        raise FormatError("not a kvquant block")
    if version != VERSION:
        raise FormatError(f"block format version {version}; this release reads version {VERSION}")
    head, payload = view[_PREFIX.size : _PREFIX.size + head_size], view[_PREFIX.size + head_size :]
    if _digest(key, head, payload) != digest:
        raise FormatError("checksum mismatch: the block is damaged, cut short or another key's")
    try:
        header = json.loads(bytes(head))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"block header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise FormatError("block header is not a JSON object")
    return header, payload


def _digest(key: bytes, head: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    # Lengths go in too, so that no byte can move from one part to its neighbour unseen.
    checksum = xxhash.xxh3_128(struct.pack("<HQQ", VERSION, len(key), len(head)))
    for part in (key, head, payload):
        checksum.update(part)
    return checksum.digest()


def _describe(tensor: Tensor) -> tuple[str, list[int]]:
    return _DTYPE_NAMES[tensor.dtype], list(tensor.shape)


def _raw_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
