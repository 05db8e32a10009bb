"""Rows of all benches, and the way their numbers are taken: in turns, by medians."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median, quantiles
from typing import Any

Tick = Callable[[int, int], None]
DENSE = "best dense"
SDPA = "SDPA"
READ = "read bandwidth"  # takes turns with the subjects


@dataclass(frozen=True)
class BenchRow:
    """One subject against one baseline in one case (a number of tokens, mostly).

    Times in milliseconds, bytes in bytes; what a bench does not measure, or could not, is None. ``ratio`` is
    ``ms_median / baseline_ms_median``: below 1 is faster. ``bytes_moved`` are what has to be read of the history, and
    ``bandwidth_fraction`` how near that comes to the machine's read bandwidth. Each bench says what ``value`` is, and
    those of stores what they move.
    """

    bench: str
    case: int
    subject: str
    ms_median: float | None
    baseline: str
    baseline_ms_median: float | None
    ratio: float | None
    bytes_moved: int | None = None
    bandwidth_fraction: float | None = None
    peak_bytes: int | None = None
    value: float | None = None
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether nothing was found out of its subject."""
        return self.ms_median is None and self.value is None

    def as_dict(self) -> dict[str, Any]:
        """The row with JSON's own types only."""
        return asdict(self)


@dataclass(frozen=True)
class Case:
    """What holds for all rows of a case: whether the machine was busy (``loaded``), and how fast it read memory."""

    case: int
    loaded: bool
    read_gb_per_second: float | None = None
    read_by: str = ""
    cache_bytes: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What a bench found."""

    rows: list[BenchRow] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Take in what was found in other cases."""
        self.rows.extend(other.rows)
        self.cases.extend(other.cases)


@dataclass(frozen=True)
class Result:
    """What is known of a subject in a case; ``seconds`` of each of its runs, none if it failed (``detail`` says why).

    The other fields are those of `BenchRow`.
    """

    seconds: tuple[float, ...] = ()
    bytes_moved: int | None = None
    bandwidth_fraction: float | None = None
    peak_bytes: int | None = None
    value: float | None = None
    detail: str = ""

    @property
    def ms(self) -> float | None:
        """The median of its runs in milliseconds, to the nanosecond."""
        return round(1e3 * median(self.seconds), 6) if self.seconds else None

    @property
    def quartiles(self) -> tuple[float, float]:
        """Milliseconds between which the middle half of its runs took."""
        low, _, high = quantiles(self.seconds, n=4, method="inclusive") if len(self.seconds) > 1 else 3 * self.seconds
        return 1e3 * low, 1e3 * high

    def noted(self, *notes: str) -> Result:
        """The same with more to its detail."""
        return replace(self, detail="; ".join(note for note in (self.detail, *notes) if note))


def take_turns(
    subjects: Mapping[str, Callable[[], Sequence[float]]], repeats: int, tick: Tick = lambda start, end: None
) -> dict[str, list[float]]:
    """The seconds that each subject's calls took in ``repeats`` rounds, of which every other runs backwards.

    So nobody always comes first after the same neighbour. A subject returns the seconds of one or more runs.
    """
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(repeats):
        for name in reversed(seconds) if turn % 2 else seconds:
            seconds[name] += subjects[name]()
            tick(0, 1)
    return seconds


def best_of(results: Mapping[str, Result]) -> Result:
    """The fastest of several ways to do the same, told apart in its detail."""
    ranked = sorted(results, key=lambda name: median(results[name].seconds))
    others = [f"{name} {results[name].ms:.4g} ms" for name in ranked[1:]]
    return results[ranked[0]].noted(ranked[0] + (f" (slower: {', '.join(others)})" if others else ""))


def compare(bench: str, case: int, results: Mapping[str, Result], baselines: Sequence[str]) -> Iterator[BenchRow]:
    """A row for each subject and each baseline other than itself; baselines are subjects too."""
    for subject, result in results.items():
        for baseline in baselines:
            if subject == baseline:
                continue
            ms, baseline_ms = result.ms, results[baseline].ms
            yield BenchRow(
                bench=bench,
                case=case,
                subject=subject,
                ms_median=ms,
                baseline=baseline,
                baseline_ms_median=baseline_ms,
                ratio=None if ms is None or baseline_ms is None else ms / baseline_ms,
                bytes_moved=result.bytes_moved,
                bandwidth_fraction=result.bandwidth_fraction,
                peak_bytes=result.peak_bytes,
                value=result.value,
                detail=result.noted(_spread(result)).detail,
            )


def _spread(result: Result) -> str:
    runs = len(result.seconds)
    if runs < 2:
        return f"{runs} run" if runs else ""
    low, high = result.quartiles
    return f"median of {runs} runs, fastest {1e3 * min(result.seconds):.4g} ms, half within {low:.4g}–{high:.4g}"
