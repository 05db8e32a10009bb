"""Writes what `kvquant ppl` found to a folder, and the page that `kvquant report` makes of such folders.

``rows.json`` (what ``--json`` prints), ``rows.csv``, ``plot.png`` and a ``README.md`` for people.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from . import environment
from .errors import InputError, printable
from .files import is_report, prepare_folder, replace_file, to_json
from .markdown import provenance, rows_table
from .options import make_writable
from .plot import fidelity_plot
from .rows import COLUMNS, Row

_COMMAND = "kvquant ppl"
_NAMES = ("rows.json", "rows.csv", "plot.png", "README.md")
PAGE = "report.html"  # where a folder's page is, unless told otherwise
GENERATOR = '<meta name="generator" content="kvquant report">'  # by which an earlier page is known


@dataclass(frozen=True)
class Report:
    """A finished command: the line as typed, its rows, and what a reader needs to know beyond them.

    ``facts`` are shown as a list (text, BOS rule, …); ``policies`` maps a policy to its per-layer map, as text.
    ``versions`` and ``machine`` are of the process that ran the command.
    """

    command: str
    date: str
    rows: Sequence[Row]
    facts: Mapping[str, str]
    policies: Mapping[str, str]
    versions: Mapping[str, Any] = field(default_factory=environment.versions)
    machine: Mapping[str, Any] = field(default_factory=environment.machine)

    def document(self) -> dict[str, Any]:
        """What ``--json`` prints and ``rows.json`` holds."""
        return {
            "command": self.command,
            "date": self.date,
            "versions": dict(self.versions),
            "machine": dict(self.machine),
            "facts": dict(self.facts),
            "policies": dict(self.policies),
            "rows": [row.as_dict() for row in self.rows],
        }


class AnyRow(Protocol):
    """A row of any command."""

    def as_dict(self) -> dict[str, Any]:
        """The row with JSON's own types only."""


def document(command: str, rows: Sequence[AnyRow]) -> dict[str, Any]:
    """What ``--json`` of a command without a report prints."""
    return {
        "command": command,
        "versions": environment.versions(),
        "machine": environment.machine(),
        "rows": [row.as_dict() for row in rows],
    }


def prepare(folder: Path) -> None:
    """As `prepare_folder`, for a report."""
    prepare_folder(folder, _NAMES, _COMMAND)


def write(folder: Path, report: Report) -> None:
    """Writes the whole report. Raises `InputError` if the folder can't be written any more."""
    plot = fidelity_plot(report.rows)
    files = {
        "rows.json": to_json(report.document()).encode(),
        "rows.csv": _csv(report.rows).encode(errors="backslashreplace"),
        "README.md": _readme(report, plot is not None).encode(errors="backslashreplace"),
    }
    try:
        for name, data in files.items():
            replace_file(folder / name, data)
        # An earlier run's plot or page would not belong to these rows.
        if plot is None:
            (folder / "plot.png").unlink(missing_ok=True)
        else:
            replace_file(folder / "plot.png", plot)
        page = folder / PAGE
        if _is_page(page):
            for file in (page, *_pictures(page)):
                file.unlink()
    except OSError as error:
        raise InputError(f"--out: {folder}: {error.strerror or error}") from error


def prepare_page(path: Path) -> None:
    """Proves that a page and its pictures can be written to ``path`` and beside it, making its folder.

    Raises `InputError`, also where somebody's files rather than an earlier page would be replaced.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--out: {path}: not the name of a page; allowed: a file ending in .html")
    make_writable("--out", path.parent)
    if path.is_dir():
        raise InputError(f"--out: {path}: Is a directory; allowed: a file ending in .html")
    foreign = [path] if path.exists() else _pictures(path)
    if path.name == PAGE and not path.exists() and is_report(path.parent, _COMMAND):
        foreign = []  # pictures of a page that somebody deleted
    if foreign and not _is_page(path):
        raise InputError(
            f"--out: {foreign[0]}: not of an earlier `kvquant report` and would be replaced; "
            "allowed: another name, or that file gone"
        )


def write_page(path: Path, page: str, pictures: Mapping[str, bytes]) -> list[Path]:
    """Writes a page, and each picture (PNG) beside it under the page's name and its own; returns all paths.

    Pictures of an earlier page of this name go. Raises `InputError` if the folder can't be written any more.
    """
    files = {path: page.encode(errors="backslashreplace")}
    files |= {path.with_name(f"{path.stem}-{name}.png"): picture for name, picture in pictures.items()}
    try:
        for file, data in files.items():
            replace_file(file, data)
        for file in set(_pictures(path)) - set(files):
            file.unlink()
    except OSError as error:
        raise InputError(f"--out: {path}: {error.strerror or error}") from error
    return list(files)


def _pictures(path: Path) -> list[Path]:
    """The pictures that stand beside a page."""
    named = re.compile(re.escape(path.stem) + r"(-group\d+)?-(bytes|ppl|kl|positions-\d+|needles-\d+)\.png")
    return [file for file in path.parent.iterdir() if named.fullmatch(file.name)]


def _is_page(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return GENERATOR.encode() in file.read(1000)
    except OSError:
        return False


def _csv(rows: Sequence[Row]) -> str:
    """The rows with the interval's ends in two columns, ``…_low`` and ``…_high``."""
    interval = "ppl_delta_ci95"
    records = []
    for row in rows:
        values = row.as_dict()
        low, high = values[interval] or (None, None)
        values |= {f"{interval}_low": low, f"{interval}_high": high}
        records.append(values)
    columns = [part for name in COLUMNS for part in ([f"{name}_low", f"{name}_high"] if name == interval else [name])]
    # Nullable types keep whole numbers whole where a row has none.
    return pd.DataFrame(records, columns=columns).convert_dtypes().to_csv(index=False)


def _readme(report: Report, with_plot: bool) -> str:
    lines = [
        "# Perplexity sweep",
        "",
        "```sh",
        printable(report.command),
        "```",
        "",
        *(["![KL against bytes of the KV cache](plot.png)", ""] if with_plot else []),
        *rows_table(report.rows),
        "",
        "KL in nats per token from the uncompressed cache, on the same tokens. The interval is a paired bootstrap "
        "over tokens. Bytes are measured, everything counted, against 2 bytes an element of the full-attention "
        "layers. `kvquant report` makes a page with more plots of this folder.",
        "",
        *provenance(report.date, report.versions, report.machine, report.facts),
        "",
        "## Policies, layer by layer",
        "",
    ]
    for text in report.policies.values():
        lines += ["```", text.rstrip(), "```", ""]
    return "\n".join(lines)
