"""Compile the Triton kernels for GPUs that are not here: ``python -m tests.compile_kernels 80 90``.

A driver that only says what GPU there is, and launches that end before the kernel would be loaded. Prints, for each
kernel, what a GPU would need to run it and the widest of its loads; and how many kernels many steps of a growing
text take.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvquant import get_codec
from kvquant.kernels import Dense, Sealed, gpu_attention, gpu_codecs


class Absent:
    """A driver without a GPU."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled(NamedTuple):
    """A kernel and, of each of its threads and programs, what it takes."""

    name: str
    registers: int
    spilled: int  # bytes
    shared: int
    multiplies: bool  # by tensor cores
    ptx: str
    hash: str


@contextmanager
def compiling(capability: int) -> Iterator[list[Compiled]]:
    """Kernels launched within are compiled, not run; they are found in the list."""
    found: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, warmup=True, **kwargs)
        found.append(_look_at(self.__name__, kernel))

    driver.set_active(Absent(capability))
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run


def _look_at(name: str, kernel: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert numbers, said
    ptx = kernel.asm["ptx"]
    multiplies = "mma" in ptx
    return Compiled(name, int(numbers[1]), int(numbers[2]), kernel.metadata.shared, multiplies, ptx, kernel.hash)


def compile_all(key: str, value: str, dim: int, dtype: torch.dtype, softcap: float = 0.0, queries: int = 4) -> None:
    """Launch all kernels for a pair of codecs and a head size."""
    both = get_codec(key, "key", 128), get_codec(value, "value", 128)
    blocks = torch.randn(3, 2, 128, dim, dtype=dtype)
    fields = [codec.encode(blocks) for codec in both]
    extra = torch.randn(3, 2, queries, 128) if softcap else None
    run = Sealed(*both, *fields, (dim, dim), 128, 4, 300, 0, extra)
    tail = Dense(blocks[0, :, :100], blocks[0, :, :100], causal=True)
    gpu_attention.attend_rows(
        torch.randn(1, 2, queries, dim, dtype=dtype), [[run, tail]], dim, scale=0.1, softcap=softcap
    )
    for codec, field in zip(both, fields, strict=True) if not softcap else ():
        gpu_codecs.decode(codec, field, dim, dtype)
        gpu_codecs.encode(codec, blocks)


def grow(tails: Sequence[int]) -> None:
    """Launch attention for a row whose tail has so many tokens, one step after another; it gains a block at last."""
    codec = get_codec("int4/channel/g64/none", "key", 128)
    room = torch.randn(2, max(tails), 64, dtype=torch.bfloat16)
    for count in tails:
        blocks = 2 if count < max(tails) else 3
        fields = codec.encode(torch.randn(blocks, 2, 128, 64))
        run = Sealed(codec, codec, fields, fields, (64, 64), 128, 4, 128 * blocks)
        tail = Dense(room[:, :count], room[:, :count], causal=True)
        gpu_attention.attend_rows(torch.randn(1, 2, 4, 64, dtype=torch.bfloat16), [[run, tail]], 64, scale=0.1)


CASES = [
    ("int4/channel/g64/none", "int4/token/g64/hadamard", 128, torch.bfloat16),
    ("int6/channel/g128/none", "int5/token/g64/hadamard", 64, torch.bfloat16),
    ("int8/token/g16/none", "int3/channel/g8/none", 80, torch.float32, 5.0),
]

if __name__ == "__main__":
    for capability in map(int, sys.argv[1:]):
        with compiling(capability) as kernels:
            for case in CASES:
                compile_all(*case)
        for kernel in kernels:
            print(capability, *kernel[:5], *sorted(set(re.findall(r"(?:ld\.global|cp\.async)[.\w]*", kernel.ptx))))
        with compiling(capability) as kernels:
            grow([1, 2, 15, 16, 17, 32, 100, 128, 129])
        print(capability, "growing", len({kernel.hash for kernel in kernels}))
