"""What a table of rows shows a reader, whatever it is written in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .options import format_context
from .rows import Row

NOTHING = "–"
_MANY_DIGITS = 1e7


@dataclass(frozen=True)
class Column:
    """A heading, the text of its cell, and the field without which (in all rows) the column is left out."""

    heading: str
    cell: Callable[[Row], str]
    needs: str | None = None


def number(value: float | None, form: str) -> str:
    """A number in the format ``form``, or in few digits where that would take many; a dash for None."""
    if value is None:
        return NOTHING
    return format(value, form if abs(value) < _MANY_DIGITS else ".3g")


def _interval(row: Row) -> str:
    interval = row.ppl_delta_ci95
    return NOTHING if interval is None else " … ".join(number(end, "+.3f") for end in interval)


def _beside(value: float | None, baseline: float | None, form: str) -> str:
    """A value with the uncompressed cache's in brackets."""
    return f"{number(value, form)} ({number(baseline, form)})"


# What every row has, and what the optional columns add; the first two say which row it is.
_COLUMNS = (
    Column("policy", lambda row: row.policy),
    Column("context", lambda row: format_context(row.context)),
    Column("RoPE", lambda row: row.rope_scaling or NOTHING, "rope_scaling"),
    Column("PPL", lambda row: number(row.ppl, ".4f")),
    Column("ΔPPL %", lambda row: number(row.ppl_delta_pct, "+.3f")),
    Column("95 %", _interval),
    Column("KL mean", lambda row: number(row.kl_mean, ".3g")),
    Column("KL p99", lambda row: number(row.kl_p99, ".3g")),
    Column("top-1", lambda row: number(row.top1_agreement, ".2%")),
    Column("tokens", lambda row: str(row.tokens_scored)),
    Column("bytes", lambda row: number(row.kv_ratio, ".1%")),
    Column("bits", lambda row: number(row.bits_per_element, ".2f")),
    Column("s", lambda row: number(row.seconds, ".1f")),
    Column("compressing, s", lambda row: number(row.compress_seconds, ".1f"), "compress_seconds"),
    Column("KL floor", lambda row: number(row.kl_floor, ".2g"), "kl_floor"),
    Column(
        "needles, log p", lambda row: _beside(row.needle_logprob, row.needle_logprob_baseline, ".3f"), "needle_logprob"
    ),
    Column("needles, exact", lambda row: _beside(row.needle_exact, row.needle_exact_baseline, ".0%"), "needle_exact"),
)


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns that say something about these rows, policy and context first."""
    return [
        column
        for column in _COLUMNS
        if column.needs is None or any(getattr(row, column.needs) not in (None, "") for row in rows)
    ]
