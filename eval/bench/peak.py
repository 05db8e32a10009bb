"""The most memory that a call takes beside what is there, whoever allocates it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

_PEAKS = 3  # calls of which the least peak is taken
_PEAK_SECONDS = 3.0
_SELF = Path("/proc/self")


def extra_peak(call: Callable[[], object]) -> int | None:
    """Bytes by which the process's memory was at most above that before ``call``; None where Linux does not tell.

    It is the peak of pages in use, set back before the call, so scratch of compiled kernels counts as torch's tensors
    do, and so do holes that an allocator cannot use again. What it keeps for later is given back first, or it would
    hide as much. Exact to some hundred KiB, as cores count by themselves; of several calls the least is the nearest.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
        (_SELF / "clear_refs").write_text("5")
    except (OSError, AttributeError, TypeError):  # another system, or C library
        return None
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before)


def least(measure: Callable[[], int | None]) -> int | None:
    """The least of several peaks, of fewer where they take long; None where they are."""
    began = time.monotonic()
    found: list[int] = []
    for _ in range(_PEAKS):
        if (peak := measure()) is None:
            break
        found.append(peak)
        if time.monotonic() - began > _PEAK_SECONDS:
            break
    return min(found, default=None)


def _status(name: str) -> int:
    """Bytes that the system tells of this process."""
    for line in (_SELF / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0
