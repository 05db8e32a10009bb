"""Writes results to a folder: the one place in the project that does.

``rows.json`` (what ``--json`` prints), ``rows.csv``, ``plot.png`` and a ``README.md`` for people. Each file is
replaced as a whole, so a reader never meets half a file.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from .environment import machine, versions
from .errors import InputError
from .options import format_context
from .plot import fidelity_plot
from .rows import COLUMNS, Row

_NAMES = ("rows.json", "rows.csv", "plot.png", "README.md")
_HEADINGS = (
    *("policy", "context", "PPL", "ΔPPL %", "95 %", "KL mean", "KL p99"),
    *("top-1", "tokens", "bytes", "bits", "s"),
)


@dataclass(frozen=True)
class Report:
    """A finished command: the line as typed, its rows, and what a reader needs to know beyond them.

    ``facts`` are shown as a list (text, BOS rule, …); ``policies`` maps a policy to its per-layer map, as text.
    """

    command: str
    date: str
    rows: Sequence[Row]
    facts: Mapping[str, str]
    policies: Mapping[str, str]

    def document(self) -> dict[str, Any]:
        """What ``--json`` prints and ``rows.json`` holds."""
        return document(self.command, self.rows)


class AnyRow(Protocol):
    """A row of any command."""

    def as_dict(self) -> dict[str, Any]:
        """The row with JSON's own types only."""


def document(command: str, rows: Sequence[AnyRow]) -> dict[str, Any]:
    """What every command's ``--json`` prints."""
    return {
        "command": command,
        "versions": versions(),
        "machine": machine(),
        "rows": [row.as_dict() for row in rows],
    }


def to_json(document: Mapping[str, Any]) -> str:
    """Strict JSON: raises ValueError rather than writing NaN or Infinity."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def prepare(folder: Path) -> None:
    """Makes the folder and proves that it can be written, before hours are spent.

    Raises `InputError`, also where writing would replace somebody's files rather than an earlier report.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        foreign = [name for name in _NAMES if (folder / name).exists() and not _is_report(folder)]
    except OSError as error:
        raise InputError(f"--out: {folder}: {error.strerror or error}; allowed: a folder I can write to") from error
    if foreign:
        raise InputError(
            f"--out: {folder}: its {foreign[0]} is not an earlier report's and would be replaced; "
            "allowed: a new folder, or one with a report"
        )


def _is_report(folder: Path) -> bool:
    try:
        return str(json.loads((folder / "rows.json").read_bytes())["command"]).startswith("kvquant ")
    except (OSError, ValueError, TypeError, KeyError):
        return False


def write(folder: Path, report: Report) -> None:
    """Writes the whole report. Raises `InputError` if the folder can't be written any more."""
    contents = report.document()
    plot = fidelity_plot(report.rows)
    files = {
        "rows.json": to_json(contents).encode(),
        "rows.csv": _csv(report.rows).encode(),
        "README.md": _readme(report, contents, plot is not None).encode(),
    }
    try:
        for name, data in files.items():
            _replace(folder / name, data)
        if plot is not None:
            _replace(folder / "plot.png", plot)
        else:
            (folder / "plot.png").unlink(missing_ok=True)  # an earlier run's picture would not belong to these rows
    except OSError as error:
        raise InputError(f"--out: {folder}: {error.strerror or error}") from error


def _replace(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)  # mkstemp makes private files
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


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


def _readme(report: Report, document: Mapping[str, Any], with_plot: bool) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in document["versions"].items() if name != "commit")
    machine = document["machine"]
    lines = [
        "# Perplexity sweep",
        "",
        "```sh",
        report.command,
        "```",
        "",
        *(["![KL against bytes of the KV cache](plot.png)", ""] if with_plot else []),
        *_table(report.rows),
        "",
        "KL in nats per token from the uncompressed cache, on the same tokens. The interval is a paired bootstrap "
        "over tokens. Bytes are measured, everything counted, against 2 bytes an element of the full-attention "
        "layers.",
        "",
        f"- date: {report.date}",
        f"- commit: {document['versions']['commit'] or 'none (not a checkout)'}",
        f"- versions: {versions}",
        f"- machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['torch_threads']} torch threads, {machine['os']}",
        *(f"- {name}: {value}" for name, value in report.facts.items()),
        "",
        "## Policies, layer by layer",
        "",
    ]
    for text in report.policies.values():
        lines += ["```", text.rstrip(), "```", ""]
    return "\n".join(lines)


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [f"| {' | '.join(_HEADINGS)} |", f"|---|{'---:|' * (len(_HEADINGS) - 1)}"]
    for row in rows:
        context = format_context(row.context)
        if row.status != "ok":
            lines.append(
                f"| {row.policy} | {context} | {row.status}: {_cell(row.reason)} {'| ' * (len(_HEADINGS) - 3)}|"
            )
            continue
        interval = row.ppl_delta_ci95
        cells = [
            row.policy,
            context,
            _number(row.ppl, ".4f"),
            _number(row.ppl_delta_pct, "+.3f"),
            "–" if interval is None else f"{interval[0]:+.3f} … {interval[1]:+.3f}",
            _number(row.kl_mean, ".3g"),
            _number(row.kl_p99, ".3g"),
            _number(row.top1_agreement, ".2%"),
            str(row.tokens_scored),
            _number(row.kv_ratio, ".1%"),
            _number(row.bits_per_element, ".2f"),
            _number(row.seconds, ".1f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
