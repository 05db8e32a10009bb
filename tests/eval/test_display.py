from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from kvquant_eval.display import print_rows, progress
from kvquant_eval.rows import Row
from kvquant_eval.walk import chunk_bounds

from .test_report import SKIPPED, row


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(("contexts", "chunk"), [([1000, 2048], 128), ([5], 128)])
def test_progress_counts_every_chunk_of_every_run(terminal: bool, contexts: list[int], chunk: int) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=terminal, color_system=None)
    with progress(console, "3 runs", 3 * chunk_bounds(contexts, chunk)) as tick:
        for start, end in chunk_bounds(contexts, chunk):
            for _ in range(3):
                tick(start, end)
    shares = [int(share) for share in re.findall(r"(\d+) %", stream.getvalue())]
    assert shares[-1] == 100
    assert shares == sorted(shares)
    assert "left" in stream.getvalue()


def shown(*rows: Row) -> str:
    stream = io.StringIO()
    print_rows(Console(file=stream, width=80), rows)
    return stream.getvalue()


def test_long_names_and_wide_numbers_fit() -> None:
    wide = row("shallow-fp16-deep-int4", ppl_delta_pct=-13.25, ppl_delta_ci95=(-14.25, -12.25), kl_mean=1.2345e-05)
    text = shown(wide, row("fp16", kl_mean=0.0, kl_p99=0.0, kv_ratio=1.12))
    assert max(map(len, text.splitlines())) <= 80
    for part in ("shallow-fp16-deep-int4", "-13.25%", "-14.25…-12.25", "1.2e-05", "97.50%", "112.0%"):
        assert part in text


def test_rows_without_numbers_are_a_sentence_and_markup_is_text() -> None:
    text = shown(SKIPPED, row("odd", ppl=None, ppl_delta_pct=None, ppl_delta_ci95=None, reason="[red]infinite[/red]"))
    assert "int8 at 9000: skipped: past a|limit" in text
    assert "odd at 2K: ok: [red]infinite[/red]" in text
    assert "–" in text
