"""What a person sees in the terminal: the table of rows, and progress."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .options import format_context
from .rows import Row

if TYPE_CHECKING:
    from .bench.rows import BenchRow, Outcome
    from .doctor import Diagnosis

# The attention's share of a forward grows with the past; at this many tokens it is taken to double the cost.
_DOUBLING_TOKENS = 8192
_NOTHING = "–"


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """One table per context, at most 80 columns wide; rows without numbers below it, with their reason."""
    for context in dict.fromkeys(row.context for row in rows):
        here = [row for row in rows if row.context == context]
        measured = [row for row in here if row.status == "ok"]
        if measured:
            first = measured[0]
            console.print(
                f"[bold]{format_context(context)} tokens[/bold], {first.tokens_scored} scored, "
                f"uncompressed PPL {_number(first.ppl_baseline, '.4f')}",
                highlight=False,
            )
            console.print(_table(measured))
        for row in here:
            if row.reason:
                text = f"{row.policy} at {format_context(context)}: {row.status}: {row.reason}"
                console.print(text, style=None if row.status == "ok" else "yellow", markup=False, highlight=False)
        console.print()


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("policy", no_wrap=True, overflow="ellipsis")
    for heading in ("ΔPPL", "95 % interval", "KL", "KL p99", "top-1", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        interval = row.ppl_delta_ci95
        table.add_row(
            Text(row.policy),
            _number(row.ppl_delta_pct, "+.2f", unit="%"),
            "–" if interval is None else f"{interval[0]:+.2f}…{interval[1]:+.2f}",
            _number(row.kl_mean, ".2g"),
            _number(row.kl_p99, ".2g"),
            _number(row.top1_agreement, ".2%"),
            _number(row.kv_ratio, ".1%"),
        )
    return table


def _number(value: float | None, form: str, unit: str = "") -> str:
    return _NOTHING if value is None else format(value, form) + unit


def print_bench(console: Console, outcome: Outcome) -> None:
    """A table per case, a line per subject, about 90 columns wide, of columns that have a number; failures below."""
    for case in outcome.cases:
        here = [row for row in outcome.rows if row.case == case.case]
        told = [f"[bold]{_case(here[0].bench, case.case)}[/bold]"]
        if case.read_gb_per_second is not None:
            told.append(f"read bandwidth {case.read_gb_per_second:.1f} GB/s")
        if case.loaded:
            told.append("[yellow]on a busy machine[/yellow]")
        console.print(", ".join(told), highlight=False)
        console.print(_bench_table([row for row in here if not row.failed]))
        for subject, detail in {row.subject: row.detail for row in here if row.failed}.items():
            console.print(f"{subject}: {detail}", style="yellow", markup=False, highlight=False, soft_wrap=True)
        console.print()


def _bench_table(rows: Sequence[BenchRow]) -> Table:
    baselines = {row.baseline: row.baseline_ms_median for row in rows}
    lines = {row.subject: row for row in rows}  # of a subject's rows all but the baseline are alike
    ratios = {(row.subject, row.baseline): row.ratio for row in rows}
    value = _VALUES[rows[0].bench]
    paired = len(baselines) == len(rows) > 1  # each subject has a baseline of its own
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("subject", overflow="fold")  # numbers are never cut off, long names go on in the next line
    columns: dict[str, list[str]] = {"ms": [_digits(row.ms_median) for row in lines.values()]}
    if paired:
        columns["ratio"] = [_number(row.ratio, ".3f") for row in rows]
    for baseline in () if paired else baselines:
        heading = "÷ " + re.sub("(?<=[a-z])(?=[A-Z])| ", "\n", baseline)
        columns[heading] = [_number(ratios.get((subject, baseline)), ".3f") for subject in lines]
    columns |= {
        "MiB\n" + ("read" if rows[0].bench not in _STORES else "moved"): [
            _mib(row.bytes_moved) for row in lines.values()
        ],
        "of read\nbandwidth": [_number(row.bandwidth_fraction, ".0%") for row in lines.values()],
        "peak\nMiB": [_mib(row.peak_bytes) for row in lines.values()],
        value[0]: [value[1](row.value) for row in lines.values()],
    }
    shown = {name: cells for name, cells in columns.items() if set(cells) != {_NOTHING}}
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    # A baseline that is no line of its own, since nothing else is compared with.
    for baseline in [name for name in baselines if name not in lines]:
        cells = [_digits(baselines[baseline]) if name == "ms" else _NOTHING for name in shown]
        table.add_row(Text(baseline), *cells)
    for index, subject in enumerate(lines):
        table.add_row(Text(subject), *(cells[index] for cells in shown.values()))
    return table


def _digits(value: float | None) -> str:
    """Four digits, or all before the point."""
    return _number(value, ".0f" if value is not None and abs(value) >= 1000 else ".4g")


def _mib(size: int | None) -> str:
    return _number(None if size is None else size / 2**20, ".1f")


_STORES = {"residency", "store", "offload"}  # benches that tell what is moved
_VALUES: dict[str, tuple[str, Callable[[float | None], str]]] = {  # what a bench calls its value, and how it writes it
    "attention": ("error", partial(_number, form=".1e")),
    "decode": ("ms for\nhistory", _digits),
    "peers": ("ms for\nhistory", _digits),
    "prefill": ("encoding", partial(_number, form=".2%")),
    "residency": ("hits", partial(_number, form=".2%")),
    "store": ("GB/s", partial(_number, form=".2f")),
    "offload": ("bytes ÷\nDynamic", partial(_number, form=".3f")),
}


def _case(bench: str, case: int) -> str:
    """What a bench calls a case."""
    match bench:
        case "residency":
            return f"Room for {case} layers"
        case "store":
            return f"Payloads of {case / 1024:.4g} KiB"
        case _:
            return f"{format_context(case)} tokens"


def print_diagnosis(console: Console, diagnosis: Diagnosis, means: Mapping[str, str]) -> None:
    """A line per run of layers with the same fate, what concerns the whole model, and by what it would be served."""
    for span, row in diagnosis.spans():
        codecs = f"key {row.key}, value {row.value}" if row.status == "compressed" else row.reason
        text = f"layer{'s' if '-' in span else ''} {span}: {row.kind}, {row.status}{': ' if codecs else ''}{codecs}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    for note in diagnosis.notes:
        console.print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)
    for device, words in means.items() if diagnosis.served else ():
        console.print(f"on {device}: {words}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(
    console: Console, title: str, forwards: Sequence[tuple[int, int]]
) -> Iterator[Callable[[int, int], None]]:
    """Progress with the time left; call what it yields with the bounds of each of ``forwards`` when it is done.

    A bar where ``console`` is a terminal, else a line each tenth of the way.
    """
    total = sum(_cost(start, end) for start, end in forwards)
    done = 0.0
    with stages(console) as tell:

        def tick(start: int, end: int) -> None:
            nonlocal done
            done += _cost(start, end)
            tell(title, done, total)

        tell(title, done, total)
        yield tick


@contextmanager
def stages(console: Console) -> Iterator[Callable[[str, float, float], None]]:
    """The same for work in stages; call what it yields with a stage's name, how much of it is done, and how much
    there is, which may change on the way."""
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("· left"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, speed_estimate_period=120) as bar:

        def tell(stage: str, done: float, total: float) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage)
            bar.update(tasks[stage], completed=done, total=total)

        yield tell


@dataclass
class _Told:
    """Of a stage: when it began, and the tenths of it that were told."""

    began: float = field(default_factory=time.monotonic)
    tenths: int = 0


def _lines(console: Console) -> Callable[[str, float, float], None]:
    told: dict[str, _Told] = {}

    def tell(stage: str, done: float, total: float) -> None:
        so_far = told.setdefault(stage, _Told())
        tenths = int(10 * done / total + 1e-9) if done else 0
        if tenths > so_far.tenths:
            so_far.tenths = tenths
            elapsed = time.monotonic() - so_far.began
            left = elapsed * max(0.0, total / done - 1)
            line = f"{stage}: {10 * tenths} %, {elapsed:.0f} s, {left:.0f} s left"
            console.print(line, markup=False, highlight=False)

    return tell


def _cost(start: int, end: int) -> float:
    return (end - start) * (1 + (start + end) / 2 / _DOUBLING_TOKENS)
