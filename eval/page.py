"""The page of `kvquant report`: one HTML file that loads nothing, from reports read back."""

from __future__ import annotations

import html
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .curves import kl_plot, needle_plot, policies, position_plot, ppl_plot
from .errors import printable
from .look import shortened
from .options import format_context
from .plot import fidelity_plot
from .report import GENERATOR, Report
from .results import Group, group
from .rows import Row
from .table import columns

_NOT_RECORDED = "not recorded"
_LONGEST_NAME = 100

_ALTERNATIVES = {
    "bytes": "Plot of KL, log scale, against the share of 16-bit bytes; the table holds its numbers.",
    "ppl": "Plot of ΔPPL with 95 % intervals against context, a line per policy; the table holds its numbers.",
    "kl": "Plot of KL, log scale, against context, a line per policy; the table holds its numbers.",
    "positions": "Plot of loss and KL by position, a line per policy; the folded table holds its numbers.",
    "needles": "Map of needles, policies by depth; the folded table holds its numbers.",
}

_POSITIONS = ("policy", "context", "positions", "loss", "Δ loss", "KL")
_DEPTHS = ("policy", "context", "depth", "log p", "uncompressed", "exact", "uncompressed")

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #fff; --line: #d5dae0; --shade: #f3f5f7;
  --warn: #9a3412; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #a3abb4; --paper: #14171b; --line: #373e47;
  --shade: #20252b; --warn: #fdba74; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 .5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
h3 { font-size: 1.05rem; margin: 1.5rem 0 .5rem; }
p, li, dd { max-width: 48rem; }
.soft, figcaption, dt { color: var(--soft); }
.warn { color: var(--warn); font-weight: 600; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); white-space: normal;
  min-width: 7rem; max-width: 12rem; overflow-wrap: anywhere; font-weight: 600; }
thead th, thead th:first-child { background: var(--shade); font-weight: 600; white-space: nowrap; }
tbody { border-top: 1px solid var(--line); }
@media (min-width: 40rem) { th:first-child { min-width: 11rem; } }
td.told { text-align: left; white-space: normal; min-width: 18rem; }
.plots { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.plots .wide { grid-column: 1 / -1; }
figure { margin: 0; min-width: 0; }
figure div { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: .5rem; }
img { display: block; width: 100%; max-width: 60rem; height: auto; margin: auto; }
.wide img { min-width: 34rem; }
pre { overflow-x: auto; background: var(--shade); padding: .6rem .8rem; border-radius: 6px; font-size: .8125rem;
  overflow-wrap: normal; }
.typed { white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: .5rem 0; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .2rem 1rem; margin: 0; }
dd { margin: 0; }
@media (max-width: 40rem) { dl { grid-template-columns: minmax(0, 1fr); } dd { margin-bottom: .5rem; } }
"""

_READING = """
<h2>How to read this</h2>
<ul>
<li><b>KL</b> is the mean divergence of the policy's next-token distribution from the uncompressed cache's, on the same
tokens, in nats per token. It is the figure to trust: it is 0 only where nothing changed, and no gain makes up for a
loss.</li>
<li><b>ΔPPL</b> is how much perplexity rose, in percent, with a 95 % interval from a paired bootstrap over tokens. An
interval that holds 0 tells of no difference that these tokens could show. Perplexity may even fall while the
distribution is damaged.</li>
<li><b>Bytes</b> are measured, everything counted (scales, offsets, sinks, tokens not yet sealed), as a share of 2
bytes per element of the full-attention layers, whatever the model runs in; <b>bits</b> are the same per element.
Tokens that stay raw weigh more in short contexts.</li>
<li>The <b>Pareto front</b> is the least KL to be had for at most so many bytes. A policy above it is beaten by another
in both.</li>
<li><b>Contexts score different tokens</b> of the text, some harder than others. Compare policies at one context;
across contexts compare their differences from the uncompressed cache, never perplexities.</li>
<li>The <b>noise floor</b> is the KL that arithmetic alone makes: that of an uncompressed cache fed in other chunks.
What lies near it is exact for all that can be told.</li>
<li><b>Needles</b> are facts planted at some depth of the context and asked for at its end: the log-probability of the
answer in nats per token, and how often every token of it was the most likely one.</li>
</ul>
"""


def render(reports: Mapping[str, Report]) -> tuple[str, dict[str, bytes]]:
    """The page of the reports (by their folder's name), and its pictures (PNG) by name."""
    groups = group(reports)
    pictures: dict[str, bytes] = {}
    sections = []
    for index, one in enumerate(groups, 1):
        drawn = _draw(one)
        heading = f"<h2>{_text(one.model)}</h2>\n" if len(groups) > 1 else ""
        sections.append(heading + _section(one, drawn, [reports[folder] for folder in one.folders]))
        prefix = f"group{index}-" if len(groups) > 1 else ""
        pictures |= {prefix + name: picture for name, (picture, _) in drawn.items()}
    models = ", ".join(dict.fromkeys(_text(one.model) for one in groups))
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        GENERATOR,
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">",
        f"<title>KV-cache compression: {models}</title>",
        f"<style>{_STYLE}</style></head><body><main>",
        f"<h1>KV-cache compression: {models}</h1>",
        *sections,
        _READING,
        *(_provenance(folder, report) for folder, report in reports.items()),
        "</main></body></html>",
    ]
    return "\n".join(parts) + "\n", pictures


def _draw(one: Group) -> dict[str, tuple[bytes, str]]:
    """The group's pictures with their captions, by name, without those there is no data for."""
    rows = [row for row in one.rows if row.status == "ok"]
    names = policies(rows)
    at = {context: [row for row in rows if row.context == context] for context in sorted({r.context for r in rows})}
    drawn = {
        "bytes": (fidelity_plot(rows), "Lower left is better. Coloured lines: the Pareto front of each context."),
        "ppl": (ppl_plot(rows), "Perplexity above the uncompressed cache's; policies side by side at each context."),
        "kl": (kl_plot(rows), "Mean KL, log scale."),
    }
    for context, here in at.items():
        caption = f"At {format_context(context)}, by position: loss less the uncompressed cache's, above; KL, below."
        drawn[f"positions-{context}"] = position_plot(here, names), caption
    for context, here in at.items():
        caption = (
            f"At {format_context(context)}, by depth: answers told exactly, and log-probability (also the colour)."
        )
        drawn[f"needles-{context}"] = needle_plot(here), caption
    return {name: (picture, caption) for name, (picture, caption) in drawn.items() if picture is not None}


def _section(one: Group, drawn: Mapping[str, tuple[bytes, str]], reports: Sequence[Report]) -> str:
    dates = ", ".join(dict.fromkeys(_text(report.date) or _NOT_RECORDED for report in reports))
    text = re.sub(r",? SHA-256 `\w+`", "", one.text)  # is among the facts
    bad = [row for row in one.rows if row.status != "ok"]
    maps = dict.fromkeys(text for report in reports for text in report.policies.values())
    parts = [
        f'<p class="soft">Text: {_marked(text) or _NOT_RECORDED}.<br>Measured: {_text(one.protocol)}, '
        f"{_text(one.dtype)}.<br>Date: {dates}.<br>From: {_text(', '.join(one.folders))}.</p>",
        f'<p class="warn">{len(bad)} of {len(one.rows)} rows failed or were skipped.</p>' if bad else "",
        *(
            f'<p class="warn">{_text(report.facts["unfinished"])} of {_text(folder)}: the sweep was not finished.</p>'
            for folder, report in zip(one.folders, reports, strict=True)
            if "unfinished" in report.facts
        ),
        _rows(one.rows),
        '<p class="soft">KL in nats per token from the uncompressed cache, on the same tokens. Of needles, the '
        "uncompressed cache's own number is in brackets.</p>"
        if any(row.needle_logprob is not None for row in one.rows)
        else '<p class="soft">KL in nats per token from the uncompressed cache, on the same tokens.</p>',
        '<p class="warn">Contexts with RoPE scaling lie beyond what the model was made for: positions are scaled, for '
        "the uncompressed cache too.</p>"
        if any(row.rope_scaling for row in one.rows)
        else "",
        "<h3>In pictures</h3>" if drawn else "",
        f'<div class="plots">{"".join(_figure(name, *pair) for name, pair in drawn.items())}</div>',
        _nested(one.rows),
        "<h3>Policies, layer by layer</h3>",
        *(f"<pre>{_lines(text)}</pre>" for text in maps),
        "" if maps else f"<p>{_NOT_RECORDED.capitalize()}.</p>",
    ]
    return "\n".join(part for part in parts if part)


def _rows(rows: Sequence[Row]) -> str:
    """The table of rows, a body per context; a row without numbers holds its reason instead."""
    shown = columns(rows)
    bodies = []
    for context in dict.fromkeys(row.context for row in rows):
        lines = []
        for row in (row for row in rows if row.context == context):
            head = f'<th scope="row">{_text(shortened(row.policy, _LONGEST_NAME))}</th>'
            told = row.reason if row.status == "ok" else f"{row.status}: {row.reason or 'no reason given'}"
            if row.status == "ok":
                cells = [
                    f"<td{_flag(column.needs == 'rope_scaling' and row.rope_scaling)}>{_text(column.cell(row))}</td>"
                    for column in shown[1:]
                ]
                lines.append(f"<tr>{head}{''.join(cells)}</tr>")
                head = '<th scope="row"></th>'
            if told:
                span = f'<td colspan="{len(shown) - 2}" class="told warn">{_text(told)}</td>'
                lines.append(f"<tr>{head}<td>{format_context(context)}</td>{span}</tr>")
        bodies.append(f"<tbody>{''.join(lines)}</tbody>")
    return _scrolling((column.heading for column in shown), bodies)


def _nested(rows: Sequence[Row]) -> str:
    """The numbers by position and by depth, folded away: the pictures show them."""
    parts = []
    positions = [
        (
            *(row.policy, format_context(row.context), f"{bucket.first}–{bucket.stop - 1}"),
            *(f"{bucket.nll:.4f}", f"{bucket.nll - bucket.nll_baseline:+.5f}", f"{bucket.kl:.3g}"),
        )
        for row in rows
        for bucket in row.by_position
    ]
    if positions:
        parts.append(_folded("The numbers by position", _POSITIONS, positions))
    depths = [
        (
            *(row.policy, format_context(row.context), f"{needle.depth:.0%}"),
            *(f"{needle.logprob:.3f}", f"{needle.logprob_baseline:.3f}"),
            *(f"{needle.exact:.1%}", f"{needle.exact_baseline:.1%}"),
        )
        for row in rows
        for needle in row.by_depth
    ]
    if depths:
        parts.append(_folded("The numbers by depth of the needle", _DEPTHS, depths))
    return "".join(parts)


def _folded(summary: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (
        f'<tr><th scope="row">{_text(row[0])}</th>{"".join(f"<td>{_text(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return f"<details><summary>{summary}</summary>{_scrolling(headings, ['<tbody>', *lines, '</tbody>'])}</details>"


def _scrolling(headings: Iterable[str], bodies: Iterable[str]) -> str:
    """A table in a box that scrolls sideways, also by keyboard."""
    heads = "".join(f'<th scope="col">{_text(heading)}</th>' for heading in headings)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="table">'
        f"<table><thead><tr>{heads}</tr></thead>{''.join(bodies)}</table></div>"
    )


def _figure(name: str, picture: bytes, caption: str) -> str:
    source = f"data:image/png;base64,{b64encode(picture).decode()}"
    wide = ' class="wide"' if name == "bytes" else ""
    alternative = f"{_ALTERNATIVES[name.split('-')[0]]} {caption}"
    return (
        f'<figure{wide}><div><img src="{source}" alt="{_text(alternative)}"></div>'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _provenance(folder: str, report: Report) -> str:
    commit = report.versions.get("commit", _NOT_RECORDED) or "none (not a checkout)"
    versions = {name: value for name, value in report.versions.items() if name != "commit"}
    facts = {"date": report.date, "commit": commit, "versions": _listed(versions), "machine": _listed(report.machine)}
    items = (
        f"<dt>{_text(name)}</dt><dd>{_marked(value) or _NOT_RECORDED}</dd>"
        for name, value in [*facts.items(), *report.facts.items()]
    )
    missing = "" if report.facts else f"<dt>facts</dt><dd>{_NOT_RECORDED}</dd>"
    return (
        f"<h2>How {_text(folder)} was made</h2>\n"
        f'<pre class="typed">{_text(report.command)}</pre>\n<dl>{"".join(items)}{missing}</dl>'
    )


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def _flag(flagged: object) -> str:
    return ' class="warn"' if flagged else ""


def _text(text: str) -> str:
    """Text as HTML, in element or attribute."""
    return html.escape(printable(str(text)))


def _lines(text: str) -> str:
    return "\n".join(_text(line) for line in text.rstrip().splitlines())


def _marked(text: str) -> str:
    """A fact as HTML, with its ``code`` and *emphasis*: facts are written for a README."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", _text(text))
    return re.sub(r"\*(\w+)\*", r"<em>\1</em>", marked)
