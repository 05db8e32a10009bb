"""``python tests/smoke.py``: whether the kvquant that is installed has its compiled library, and it works. Seconds.

For wheels: the test suite would do without a library that is missing.
"""

from __future__ import annotations

from pathlib import Path

import torch

from kvquant import PrecisionPolicy, get_codec
from kvquant.attention import reference
from kvquant.kernels import Dense, Sealed, loading, means, native, native_codecs, serving
from kvquant.testing import assert_same_fields, relative_rms


def smoke() -> None:
    """Encode, decode and attend with every instruction set of this machine. Raises AssertionError."""
    assert not loading.missing(), loading.missing()
    PrecisionPolicy.load("int4")
    codecs = get_codec("int8", "key", 64), get_codec("int4", "value", 64)
    blocks, tail, query = torch.randn(3, 2, 64, 64), torch.randn(2, 5, 64), torch.randn(2, 4, 64)
    fields = [codec.encode(blocks) for codec in codecs]
    segments = [Sealed(*codecs, *fields, (64, 64), 64, 0, 3 * 64, 0, None), Dense(tail, tail, causal=True)]
    expected, _ = reference.attend(query, segments, 64, scale=0.125)
    assert serving(query, segments, 64).startswith("compiled")
    for level in range(loading.isa() + 1):
        for codec, field in zip(codecs, fields, strict=True):
            assert_same_fields(native_codecs.encode(codec, blocks, level=level) or {}, field)
            decoded = torch.empty_like(blocks)
            assert native_codecs.decode(codec, field, decoded, level)
            assert relative_rms(decoded, codec.decode(field, 64, torch.float32)) < 1e-6
        output, _ = native.attend(query, segments, 64, scale=0.125, level=level)
        assert relative_rms(output, expected) < 1e-3
    maps = Path("/proc/self/maps")  # on Linux
    runtimes = {word for word in maps.read_text().split() if "libgomp" in word} if maps.exists() else ()
    assert len(runtimes) <= 1, f"threads of its own beside torch's: {runtimes}"


if __name__ == "__main__":
    smoke()
    print(means()["cpu"])
