"""A guard against measuring on a busy machine: what other programs take of its cores.

Threads of a parallel loop wait for the slowest at its end, so one core taken by somebody else halves the speed of all;
and whoever reads memory takes bandwidth. Nothing is refused: the numbers are marked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import psutil

from .rows import Result

BUSY = 0.1  # share of the machine's cores that others may take unremarked
_LOOK_SECONDS = 0.2  # the clocks of processes tick a hundred times a second
_STATES = ("user", "nice", "system", "irq", "softirq", "steal")  # waiting for disks is not work


@dataclass(frozen=True)
class Reading:
    """Clocks at one time: ``wall`` seconds, and processor seconds of the ``machine`` and of this process (``own``)."""

    wall: float
    machine: float
    own: float


def read_clocks() -> Reading:
    """The clocks now."""
    machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
    return Reading(
        time.monotonic(), sum(getattr(machine, state, 0.0) for state in _STATES), float(own.user + own.system)
    )


class LoadGuard:
    """Watches from `look` to the end of its context; ``say`` is told in a line, once, when others take much.

    ``note`` is that line afterwards, empty on a quiet machine.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.note = ""
        self._say = say

    def __enter__(self) -> LoadGuard:
        before = read_clocks()
        time.sleep(_LOOK_SECONDS)
        self._began = read_clocks()
        self._warn(before, self._began, "before the first run")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if kind is None:
            self._warn(self._began, read_clocks(), "during the runs")

    def marked(self, results: dict[str, Result]) -> dict[str, Result]:
        """Results with the warning, if any, in each detail."""
        return {name: result.noted(self.note) for name, result in results.items()}

    def _warn(self, start: Reading, stop: Reading, when: str) -> None:
        others = (stop.machine - start.machine - (stop.own - start.own)) / max(stop.wall - start.wall, 1e-9)
        cores = psutil.cpu_count() or 1
        if others <= BUSY * cores:
            return
        line = f"a busy machine: {when} other programs took {others:.1f} of its {cores} cores"
        if not self.note:
            self._say(f"kvquant: warning: {line}; times are too long")
        self.note = line
