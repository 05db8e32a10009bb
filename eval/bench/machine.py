"""What a machine can do at best: how fast it reads memory, and how much it keeps in caches.

Attention of one new token reads all of its history and does two multiplications with each number, so it takes at
least bytes over bandwidth: of a key and a value channel, 4 bytes a token in bfloat16, 1.1 as int4. A result says how
near it comes to that. It is measured on more data than caches hold, from which reads are several times as fast: no
history of a whole model fits there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import torch
from torch import Tensor

from ..errors import InputError
from ..memory import in_words
from .rows import Case

_CPUS = Path("/sys/devices/system/cpu")
_CACHE_FILES = ("level", "shared_cpu_list", "size")
_FALLBACK = 32 << 20
_CACHES_READ = 8  # times the caches: what is left of the buffer there from the last time hardly counts
_READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": torch.amax,
    "sum": torch.sum,
    "norm": torch.linalg.vector_norm,
    "dot product": lambda x: torch.dot(x, x),
}


def cache_bytes() -> int:
    """Bytes of all last-level caches that the cores of this process have; 32 MiB where the system does not tell."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    found: dict[tuple[int, str], int] = {}  # by level, and the cores that share it
    for core in affinity(0) if affinity else ():
        for folder in (_CPUS / f"cpu{core}" / "cache").glob("index*"):
            try:
                level, shared, size = ((folder / name).read_text().strip() for name in _CACHE_FILES)
                found[int(level), shared] = int(size.removesuffix("K")) << 10
            except (OSError, ValueError):
                continue
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or _FALLBACK


@dataclass(frozen=True)
class Reader:
    """Reads memory that no cache holds, with all of torch's threads, as fast as anything at hand does."""

    name: str
    buffer: Tensor

    @classmethod
    def fastest(cls) -> Reader:
        """The best of torch's own reductions over a buffer of float32, each of which has to read it once.

        A kernel that fetches ahead more cleverly may read faster still: then a fraction of this bandwidth is above 1.
        """
        buffer = torch.ones(_CACHES_READ * cache_bytes() // 4)
        readers = [cls(name, buffer) for name in _READERS]
        return min(readers, key=lambda reader: median(reader.run()[0] for _ in range(3)))

    def run(self) -> list[float]:
        """The seconds of one reading."""
        began = time.perf_counter()
        _READERS[self.name](self.buffer)
        return [time.perf_counter() - began]

    def bandwidth(self, seconds: list[float]) -> float:
        """Bytes a second, by the median of ``seconds`` of several readings."""
        return self.buffer.nbytes / median(seconds)

    def case(self, tokens: int, seconds: list[float], loaded: bool) -> Case:
        """What a bench tells of a case in whose turns the readings were."""
        speed = f"{self.bandwidth(seconds) / 1e9:.4g}"
        return Case(tokens, loaded, float(speed), self.name, cache_bytes())


def check_memory(option: str, given: str, needed: int) -> None:
    """`InputError` where ``needed`` bytes are not free."""
    free = psutil.virtual_memory().available
    if needed > free:
        raise InputError(
            f"{option}: {given} needs about {in_words(needed)} of memory, {in_words(free)} are free; "
            "allowed: fewer tokens, or fewer policies at a time"
        )
