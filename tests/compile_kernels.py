"""Compile the Triton kernels for GPUs that are not here: ``python -m tests.compile_kernels 80 90``.

A driver that only says what GPU there is, and launches that end before the kernel would be loaded.
"""

from __future__ import annotations

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvquant import get_codec
from kvquant.kernels import Sealed, gpu


class Absent:
    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, device):
        return 0


def compile_for(capability, codecs):
    """All kernels for pairs of codecs, a head size each; returns names and PTX."""
    found = []
    run = JITFunction.run

    def compile_only(self, *args, warmup, **kwargs):
        found.append((self.__name__, run(self, *args, warmup=True, **kwargs).asm["ptx"]))

    driver.set_active(Absent(capability))
    gpu._in_halves = lambda query: 1
    JITFunction.run = compile_only
    for key, value, dim, dtype, softcap in codecs:
        both = get_codec(key, "key", 128), get_codec(value, "value", 128)
        blocks = torch.randn(3, 2, 128, dim, dtype=dtype)
        fields = [codec.encode(blocks) for codec in both]
        extra = torch.randn(3, 2, 4, 128) if softcap else None
        run_ = Sealed(*both, *fields, (dim, dim), 128, 4, 300, 0, extra)
        gpu.attend(torch.randn(2, 4, dim), [run_], dim, scale=0.1, softcap=softcap)
        for codec, field in zip(both, fields, strict=True):
            gpu.decode(codec, field, dim, dtype)
            if codec.bits > 2:
                gpu.encode(codec, blocks)
    JITFunction.run = run
    return found


CODECS = [
    ("int4/channel/g64/none", "int4/token/g64/none", 128, torch.bfloat16, 0.0),
    ("int8/channel/g32/hadamard", "int8/token/g64/none", 80, torch.float16, 5.0),
    ("int4/token/g16/none", "int2/channel/g8/none", 64, torch.float32, 0.0),
]

if __name__ == "__main__":
    for capability in map(int, sys.argv[1:]):
        for name, ptx in compile_for(capability, CODECS):
            print(capability, name, len(ptx), "mma" in ptx)
