"""The bytes of a block: exact round trip, and nothing damaged or foreign is ever accepted."""

from __future__ import annotations

import json
import pickle
import struct
from dataclasses import replace

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant import BlockKey, CompressedTensor, FormatError, KVBlock, get_codec
from kvquant.testing import assert_same_fields

KEY = BlockKey(3, 2, 1).to_bytes()


def block(codec="int4", dtype=torch.float32, sinks=True, dim=16):
    parts = []
    for role in ("key", "value"):
        made = get_codec(codec, role)
        x = torch.randn(1, 2, 128, dim).to(dtype)
        fields = {name: field[0] for name, field in made.encode(x).items()}
        raw = torch.randn(2, 4, dim).to(dtype) if sinks else None
        parts.append(CompressedTensor(made.name, (2, 128, dim), dtype, fields, raw))
    return KVBlock(*parts, first=0, tokens=128)


@pytest.mark.parametrize("codec", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sinks", [True, False])
def test_round_trip_is_exact(codec, dtype, sinks):
    original = block(codec, dtype, sinks)
    data = original.to_bytes(KEY)
    again = KVBlock.from_bytes(data, KEY)
    assert again.to_bytes(KEY) == data
    assert (again.first, again.tokens) == (0, 128)
    for mine, theirs in ((again.key, original.key), (again.value, original.value)):
        assert (mine.codec, mine.shape, mine.dtype) == (theirs.codec, theirs.shape, theirs.dtype)
        assert_same_fields(dict(mine.fields), dict(theirs.fields))
        assert (mine.sinks is not None) == sinks
        assert not sinks or torch.equal(mine.sinks, theirs.sinks)


def test_reads_from_a_memoryview_and_owns_what_it_returns():
    data = bytearray(block().to_bytes(KEY))
    again = KVBlock.from_bytes(memoryview(data), KEY)
    codes = again.key.fields["codes"].clone()
    data[:] = bytes(len(data))
    assert torch.equal(again.key.fields["codes"], codes)


def test_serialises_views():
    original = block()
    fields = {name: field.transpose(0, 1).contiguous().transpose(0, 1) for name, field in original.key.fields.items()}
    twin = replace(original, key=replace(original.key, fields=fields))
    assert twin.to_bytes(KEY) == original.to_bytes(KEY)


def test_another_keys_block_is_refused():
    data = block().to_bytes(KEY)
    for other in (BlockKey(3, 2, 2), BlockKey(3, 1, 1), BlockKey(4, 2, 1)):
        with pytest.raises(FormatError, match="another key's"):
            KVBlock.from_bytes(data, other.to_bytes())


DATA = block(dim=8).to_bytes(KEY)


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, len(DATA) - 1), bit=st.integers(0, 7))
def test_every_flipped_bit_is_found(position, bit):
    damaged = bytearray(DATA)
    damaged[position] ^= 1 << bit
    with pytest.raises(FormatError):
        KVBlock.from_bytes(bytes(damaged), KEY)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(DATA) - 1), st.binary(max_size=9))
def test_every_truncation_and_extension_is_found(length, extra):
    with pytest.raises(FormatError):
        KVBlock.from_bytes(DATA[:length], KEY)
    if extra:
        with pytest.raises(FormatError):
            KVBlock.from_bytes(DATA + extra, KEY)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_refused(noise):
    with pytest.raises(FormatError):
        KVBlock.from_bytes(noise, KEY)


def forged(header, payload=b""):
    """A block whose checksum is right and whose header is whatever the attacker likes."""
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    checksum = xxhash.xxh3_128(struct.pack("<HQQ", 1, len(KEY), len(head)))
    for part in (KEY, head, payload):
        checksum.update(part)
    return struct.pack("<4sHI16s", b"KVQB", 1, len(head), checksum.digest()) + head + payload


PART = {"codec": "int4", "shape": [1, 8, 8], "dtype": "f32", "fields": {"codes": ["u8", [10**12]]}, "sinks": None}


@pytest.mark.parametrize(
    "header",
    [
        {"key": PART, "value": PART, "first": 0, "tokens": 8},
        {"key": {**PART, "fields": {"codes": ["u8", [-1]]}}, "value": PART, "first": 0, "tokens": 8},
        {"key": {**PART, "fields": {"codes": ["u8", [2**70]]}}, "value": PART, "first": 0, "tokens": 8},
        {"key": {**PART, "fields": {"codes": ["u8", 3]}}, "value": PART, "first": 0, "tokens": 8},
        {"key": {**PART, "fields": {"codes": ["object", [1]]}}, "value": PART, "first": 0, "tokens": 8},
        {"key": {**PART, "fields": None}, "value": PART, "first": 0, "tokens": 8},
        {"key": {**PART, "shape": [1, 2]}, "value": PART, "first": 0, "tokens": 8},
        {"key": PART},
        {},
        [],
        "text",
        b"\xff\xfe",
        b"[" * 100_000,
        pickle.dumps({"key": 1}),
    ],
)
def test_hostile_headers_are_refused_before_anything_is_allocated(header):
    with pytest.raises(FormatError) as caught:
        KVBlock.from_bytes(forged(header, b"1234"), KEY)
    assert "\n" not in str(caught.value)


def test_a_newer_version_says_so():
    data = bytearray(DATA)
    data[4] = 2
    with pytest.raises(FormatError, match="version 2; this release reads version 1"):
        KVBlock.from_bytes(bytes(data), KEY)
