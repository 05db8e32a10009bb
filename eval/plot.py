"""The picture of a sweep: fidelity against bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import PercentFormatter
from matplotlib.transforms import Bbox

from .front import pareto_front
from .look import COLORS, MARKERS, draw, drawable, dress, legend_below, new_figure, plain, png
from .options import format_context
from .rows import Row

_MARKER_POINTS = 8

# Where a label may stand beside its marker, best first: offset in points, horizontal and vertical alignment.
_PLACES = (
    ((0, 8), "center", "bottom"),
    ((0, -8), "center", "top"),
    ((-8, 0), "right", "center"),
    ((8, 0), "left", "center"),
    ((8, 3), "left", "bottom"),
    ((8, -3), "left", "top"),
    ((-8, 3), "right", "bottom"),
    ((-8, -3), "right", "top"),
)


@dataclass(frozen=True)
class Point:
    """A row as the picture shows it: bytes as a share of 16 bits an element, KL in nats per token."""

    policy: str
    context: int
    ratio: float
    kl: float  # the axis's lower edge where it is exactly 0
    exact: bool


def fidelity_plot(rows: Sequence[Row]) -> bytes | None:
    """A PNG of KL (log) against the share of the 16-bit bytes, a series per context; None without rows to draw.

    A line of the series' colour is its Pareto front: the least KL to be had for at most so many bytes. A grey line
    joins a policy's contexts. Lossless rows (KL 0) have no place on a log axis: they stand near its lower edge,
    marked as exact.
    """
    points = _points(rows)
    if not points:
        return None
    figure = new_figure(8, 4.9)
    axes = figure.add_subplot()
    legend: list[tuple[Artist, str]] = []
    for index, context in enumerate(dict.fromkeys(point.context for point in points)):
        series = [point for point in points if point.context == context]
        color = COLORS[index % len(COLORS)]
        (markers,) = axes.plot(
            [point.ratio for point in series],
            [point.kl for point in series],
            linestyle="none",
            marker=MARKERS[index % len(MARKERS)],
            color=color,
            markersize=_MARKER_POINTS,
            zorder=3,
        )
        legend.append((markers, f"{format_context(context)} tokens"))
        front = pareto_front(series)
        axes.plot([p.ratio for p in front], [p.kl for p in front], color=color, linewidth=1.2, drawstyle="steps-post")
    how = f"{plain(rows[0].protocol)}, {plain(rows[0].dtype)}"
    _dress(axes, points, f"{plain(rows[0].model)}: fidelity against bytes ({how})")
    legend_below(figure, legend)
    draw(figure)  # fixes the layout, so that labels can be placed in pixels
    label_points(axes, points)
    return png(figure)


def _points(rows: Sequence[Row]) -> list[Point]:
    positive = [row.kl_mean for row in rows if drawable(row.kl_mean) and row.kl_mean > 0]
    floor = min(positive) / 10 if positive else 1e-6
    return [
        Point(row.policy, row.context, row.kv_ratio, max(row.kl_mean, floor), row.kl_mean <= 0)
        for row in rows
        if row.status == "ok" and drawable(row.kl_mean) and drawable(row.kv_ratio)
    ]


def _dress(axes: Axes, points: Sequence[Point], title: str) -> None:
    for policy in dict.fromkeys(point.policy for point in points):
        path = [point for point in points if point.policy == policy]
        axes.plot([p.ratio for p in path], [p.kl for p in path], color="#bbbbbb", linewidth=1, zorder=1)
    axes.set_yscale("log")
    axes.set_xlim(0, max(1.0, *(point.ratio for point in points)) * 1.04)
    axes.set_ylim(min(point.kl for point in points) / 2.5, max(point.kl for point in points) * 2.5)
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.set_xlabel("KV cache bytes, share of 16 bits an element")
    axes.set_ylabel("KL from the uncompressed cache, nats per token")
    dress(axes, title)


def label_points(axes: Axes, points: Sequence[Point], others: Sequence[tuple[float, float]] = ()) -> None:
    """Names each policy once, at its longest context, where it covers no marker and no other name if possible.

    ``others`` are places of more markers, in the axes' own numbers. The figure must have been drawn.
    """
    if not points:
        return
    pixels = axes.transData.transform([*((point.ratio, point.kl) for point in points), *others])
    half = _MARKER_POINTS / 2 * axes.figure.dpi / 72
    taken = [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in pixels]
    named = {point.policy: point for point in points}.values()
    for point in sorted(named, key=lambda point: -point.kl):  # from above, so that the first place is the upper one's
        label = axes.annotate(
            plain(point.policy) + (" (exact)" if point.exact else ""),
            (point.ratio, point.kl),
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=9,
            zorder=4,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )
        for place in (*_PLACES, _PLACES[0]):  # the first again if none is free
            offset, horizontal, vertical = place
            label.set(position=offset, horizontalalignment=horizontal, verticalalignment=vertical)
            box = label.get_window_extent()
            inside = axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1)
            if inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
