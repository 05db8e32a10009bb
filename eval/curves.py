"""The pictures of a sweep over context, position and depth: a series per policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator

from .look import drawable, dress, legend_below, new_figure, plain, png, style
from .options import format_context
from .rows import Bucket, Needle, Row

_WIDTH = 5.6  # inches: two beside each other on a screen, one on a telephone, with letters that can be read
_MOST_TICKS = 7
_MOST_DEPTHS = 11  # whose numbers have room beside each other
_FLOOR = "arithmetic's noise floor"
_LINEAR_PERCENT = 10.0  # larger losses would press all others flat on a linear axis
_DODGE = 0.04  # between two policies at the same context, of the room to the next

Series = list[tuple[Artist, str]]


def policies(rows: Iterable[Row]) -> list[str]:
    """The rows' policies, each once, in their order."""
    return list(dict.fromkeys(row.policy for row in rows))


def ppl_plot(rows: Sequence[Row]) -> bytes | None:
    """A PNG of ΔPPL with its 95 % interval against context (log2); None without rows to draw."""
    names = policies(rows)
    measured = [row for row in rows if drawable(row.ppl_delta_pct)]
    if not measured:
        return None
    figure, axes, place = _context_axes(measured, len(names))
    legend: Series = []
    for index, name in enumerate(names):
        look = style(index)
        series = sorted((row for row in measured if row.policy == name), key=lambda row: row.context)
        x = [place(row, index) for row in series]
        (line,) = axes.plot(x, [row.ppl_delta_pct or 0.0 for row in series], markersize=5, linewidth=1.2, **look)
        legend.append((line, plain(name)))
        for where, row in zip(x, series, strict=True):
            if row.ppl_delta_ci95 is not None and all(map(drawable, row.ppl_delta_ci95)):
                axes.vlines(where, *row.ppl_delta_ci95, color=look["color"], linewidth=1.2, alpha=0.7)
    axes.axhline(0, color="black", linewidth=0.8, zorder=1)
    if max(abs(row.ppl_delta_pct or 0.0) for row in measured) > _LINEAR_PERCENT:
        axes.set_yscale("symlog", linthresh=1)
    axes.set_ylabel("ΔPPL, %")
    dress(axes, "Perplexity against context, 95 % intervals")
    legend_below(figure, legend)
    return png(figure)


def kl_plot(rows: Sequence[Row]) -> bytes | None:
    """A PNG of KL (log) against context (log2), and of what arithmetic alone makes; None without a KL above 0.

    Policies whose every KL is 0 are named as exact, for a log axis has no place for them.
    """
    names = policies(rows)
    measured = [row for row in rows if drawable(row.kl_mean)]
    if not any(row.kl_mean for row in measured):
        return None
    figure, axes, place = _context_axes(measured, len(names))
    legend: Series = []
    for index, name in enumerate(names):
        series = sorted((row for row in measured if row.policy == name), key=lambda row: row.context)
        legend.append(_log_line(axes, index, name, [(place(row, index), row.kl_mean or 0.0) for row in series]))
    floors = {row.context: row.kl_floor for row in sorted(measured, key=lambda row: row.context) if row.kl_floor}
    if floors:
        legend.append(_floor_line(axes, [math.log2(context) for context in floors], list(floors.values())))
    axes.set_yscale("log")
    axes.set_ylabel("KL, nats per token")
    dress(axes, "KL from the uncompressed cache against context")
    legend_below(figure, legend)
    return png(figure)


def position_plot(rows: Sequence[Row], names: Sequence[str]) -> bytes | None:
    """A PNG of loss above the uncompressed cache's, and of KL (log), by position; None without buckets.

    The rows are of one context; ``names`` are all policies there are, so that each looks the same in every picture.
    """
    buckets = {row.policy: sorted(row.by_position, key=lambda bucket: bucket.first) for row in rows if row.by_position}
    if not buckets:
        return None
    figure = new_figure(_WIDTH, 5.2)
    upper, lower = figure.subplots(2, 1, sharex=True)
    place = _position_axis(lower, [bucket for series in buckets.values() for bucket in series])
    legend: Series = []
    for name, series in buckets.items():
        index = names.index(name)
        x = [place(bucket) for bucket in series]
        losses = [bucket.nll - bucket.nll_baseline for bucket in series]
        upper.plot(x, losses, markersize=4, linewidth=1.2, **style(index))
        legend.append(_log_line(lower, index, name, [(at, b.kl) for at, b in zip(x, series, strict=True)]))
    floors = [row.kl_floor for row in rows if row.kl_floor]
    if floors:
        edges = [place(bucket) for series in buckets.values() for bucket in series]
        legend.append(_floor_line(lower, [min(edges), max(edges)], [floors[0]] * 2))
    upper.axhline(0, color="black", linewidth=0.8, zorder=1)
    lower.set_yscale("log")
    upper.set_ylabel("Δ loss, nats per token")
    lower.set_ylabel("KL, nats per token")
    dress(upper, f"By position, {format_context(rows[0].context)} tokens")
    dress(lower)
    legend_below(figure, legend)
    return png(figure)


def needle_plot(rows: Sequence[Row]) -> bytes | None:
    """A PNG map of one context's needles: policies by depth; log-probability as colour, both numbers as text."""
    found = {row.policy: row.by_depth for row in rows if row.by_depth}
    if not found:
        return None
    depths = sorted({needle.depth for needles in found.values() for needle in needles})
    longest = next(iter(sorted(found.values(), key=len, reverse=True)))
    reference = [Needle(n.depth, n.logprob_baseline, 0.0, n.exact_baseline, 0.0) for n in longest]
    series: dict[str, Sequence[Needle]] = {"uncompressed": reference}
    lines = series | {plain(name): needles for name, needles in found.items()}
    cells = np.full((len(lines), len(depths)), np.nan)
    figure = new_figure(_WIDTH, 1.5 + 0.42 * len(lines))
    axes = figure.add_subplot()
    for line, needles in enumerate(lines.values()):
        for needle in needles:
            cells[line, depths.index(needle.depth)] = needle.logprob
    image = axes.imshow(cells, cmap="cividis", aspect="auto")
    middle = (np.nanmin(cells) + np.nanmax(cells)) / 2
    for line, needles in enumerate(lines.values() if len(depths) <= _MOST_DEPTHS else ()):
        for needle in needles:
            axes.text(
                depths.index(needle.depth),
                line,
                f"{needle.exact:.0%}\n{needle.logprob:.2f}",
                color="black" if needle.logprob >= middle else "white",
                fontsize=max(4.0, min(7.5, 60 / len(depths))),
                horizontalalignment="center",
                verticalalignment="center",
            )
    told = range(0, len(depths), -(-len(depths) // _MOST_DEPTHS))
    axes.set_xticks(told, [f"{depths[place]:.0%}" for place in told], fontsize=8)
    axes.set_yticks(range(len(lines)), list(lines), fontsize=8)
    axes.set_xlabel("depth of the needle, share of the context")
    axes.set_title(f"Needles, {format_context(rows[0].context)} tokens", loc="left", fontsize=10.5)
    figure.colorbar(image, ax=axes, label="log p, nats per token")
    return png(figure)


def _log_line(axes: Axes, index: int, name: str, points: Sequence[tuple[float, float]]) -> tuple[Artist, str]:
    """A policy's line on a log axis, without its points that are 0, and its entry in the legend."""
    positive = [(x, y) for x, y in points if y > 0]
    if points and not positive:
        return Line2D([], [], linestyle="none"), f"{plain(name)} (exact)"
    (line,) = axes.plot(
        [x for x, _ in positive], [y for _, y in positive], markersize=5, linewidth=1.2, **style(index)
    )
    return line, plain(name)


def _floor_line(axes: Axes, x: Sequence[float], y: Sequence[float]) -> tuple[Artist, str]:
    (line,) = axes.plot(x, y, color="#777777", linewidth=2.5, alpha=0.6, marker="_", markersize=14, zorder=1)
    return line, _FLOOR


def _context_axes(rows: Sequence[Row], policies: int) -> tuple[Figure, Axes, Callable[[Row, int], float]]:
    """A figure and its axes, whose x is the log2 of the context in tokens, ticked where rows are.

    Third comes where a row of the policy of some index stands: beside those of the other policies at its context.
    """
    figure = new_figure(_WIDTH, 3.6)
    axes = figure.add_subplot()
    contexts = sorted({row.context for row in rows})
    places = [math.log2(context) for context in contexts]
    gap = min((b - a for a, b in pairwise(places)), default=3.0)  # octaves; a single context has more room
    step = gap * min(_DODGE, 0.6 / policies)
    margin = step * policies / 2 + 0.1 * gap
    axes.set_xlim(places[0] - margin, places[-1] + margin)
    ticks = places[:1]
    for place in places[1:]:  # as many as have room for their names
        if place - ticks[-1] >= (places[-1] - places[0]) / _MOST_TICKS:
            ticks.append(place)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_context(round(2**x))))
    axes.set_xlabel("context, tokens")
    return figure, axes, lambda row, index: math.log2(row.context) + (index - (policies - 1) / 2) * step


def _position_axis(axes: Axes, buckets: Sequence[Bucket]) -> Callable[[Bucket], float]:
    """Makes x the position in tokens, log2 where the buckets span octaves; returns where a bucket's middle stands."""
    first, stop = max(1, min(bucket.first for bucket in buckets)), max(bucket.stop for bucket in buckets)
    axes.set_xlabel("position, tokens")
    if stop > 8 * first:
        axes.xaxis.set_major_locator(MultipleLocator(max(1, math.ceil(math.log2(stop / first) / _MOST_TICKS))))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _position(2**x)))
        return lambda bucket: math.log2(max(1, bucket.first) * max(1, bucket.stop)) / 2
    spacing = 2.0 ** math.ceil(math.log2(max(1, stop - first) / (_MOST_TICKS - 1)))
    axes.xaxis.set_major_locator(MultipleLocator(spacing))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _position(x)))
    return lambda bucket: (bucket.first + bucket.stop) / 2


def _position(tokens: float) -> str:
    return f"{tokens / 1024:g}K" if tokens >= 1024 else f"{tokens:g}"
