"""What the READMEs of results are made of."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import printable
from .options import format_context
from .rows import Row
from .table import columns


def rows_table(rows: Sequence[Row]) -> list[str]:
    """The lines of a table of rows; one without numbers tells its reason."""
    shown = columns(rows)
    lines = _head([column.heading for column in shown])
    for row in rows:
        if row.status != "ok":
            told = f"{row.status}: {cell(row.reason)}"
            lines.append(f"| {cell(row.policy)} | {format_context(row.context)} | {told} {'| ' * (len(shown) - 3)}|")
            continue
        lines.append(_line([column.cell(row) for column in shown]))
    return lines


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table of texts, the first column to the left and the others to the right."""
    return [*_head(headings), *map(_line, rows)]


def provenance(
    date: str, versions: Mapping[str, Any], machine: Mapping[str, Any], facts: Mapping[str, str]
) -> list[str]:
    """The lines of a list that tells how a result was made."""
    named = ", ".join(f"{name} {value}" for name, value in versions.items() if name != "commit")
    return [
        f"- date: {date}",
        f"- commit: {versions['commit'] or 'none (not a checkout)'}",
        f"- versions: {named}",
        f"- machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['torch_threads']} torch threads, {machine['os']}",
        *(f"- {name}: {html.escape(printable(value), quote=False)}" for name, value in facts.items()),
    ]


def cell(text: str) -> str:
    """A text as a cell of a table shows it."""
    return html.escape(printable(text), quote=False).replace("|", "\\|")


def _head(headings: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(headings)} |", f"|---|{'---:|' * (len(headings) - 1)}"]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(cell, cells))} |"
