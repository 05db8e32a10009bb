"""The picture of a sweep: fidelity against bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from matplotlib.transforms import Bbox

from .options import format_context
from .rows import Row

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # for all kinds of eyes
_MARKERS = "osD^vPX"
_MARKER_POINTS = 8

# Where a label may stand beside its marker, best first: offset in points, horizontal and vertical alignment.
_PLACES = (
    ((0, 8), "center", "bottom"),
    ((0, -8), "center", "top"),
    ((-8, 0), "right", "center"),
    ((8, 0), "left", "center"),
)


@dataclass(frozen=True)
class _Point:
    policy: str
    context: int
    ratio: float
    kl: float  # the axis's lower edge where it is exactly 0
    exact: bool


def fidelity_plot(rows: Sequence[Row]) -> bytes | None:
    """A PNG of KL (log) against the share of the 16-bit bytes, a series per context; None without rows to draw.

    Lossless rows (KL exactly 0) have no place on a log axis: they stand near its lower edge, marked as exact.
    """
    points = _points(rows)
    if not points:
        return None
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, context in enumerate(dict.fromkeys(point.context for point in points)):
        series = [point for point in points if point.context == context]
        axes.plot(
            [point.ratio for point in series],
            [point.kl for point in series],
            linestyle="none",
            marker=_MARKERS[index % len(_MARKERS)],
            color=_COLORS[index % len(_COLORS)],
            markersize=_MARKER_POINTS,
            zorder=3,
            label=f"{format_context(context)} tokens",
        )
    _dress(axes, points, f"{rows[0].model}: fidelity against bytes ({rows[0].protocol}, {rows[0].dtype})")
    canvas.draw()  # type: ignore[no-untyped-call]  # fixes the layout, so that labels can be placed in pixels
    _label(axes, points)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _points(rows: Sequence[Row]) -> list[_Point]:
    positive = [row.kl_mean for row in rows if row.kl_mean]
    floor = min(positive) / 10 if positive else 1e-6
    return [
        _Point(row.policy, row.context, row.kv_ratio, row.kl_mean or floor, not row.kl_mean)
        for row in rows
        if row.status == "ok" and row.kl_mean is not None and row.kv_ratio is not None
    ]


def _dress(axes: Axes, points: Sequence[_Point], title: str) -> None:
    for policy in dict.fromkeys(point.policy for point in points):
        path = [point for point in points if point.policy == policy]
        axes.plot([p.ratio for p in path], [p.kl for p in path], color="#bbbbbb", linewidth=1, zorder=2)
    axes.set_yscale("log")
    axes.set_xlim(0, max(1.0, *(point.ratio for point in points)) * 1.04)
    axes.set_ylim(min(point.kl for point in points) / 2.5, max(point.kl for point in points) * 2.5)
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.set_xlabel("KV cache bytes, share of 16 bits an element")
    axes.set_ylabel("KL from the uncompressed cache, nats per token")
    axes.set_title(title, loc="left")
    axes.grid(True, color="#e4e4e4", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")


def _label(axes: Axes, points: Sequence[_Point]) -> None:
    """Names each policy once, at its longest context, where it covers no marker and no other name if possible."""
    pixels = axes.transData.transform([(point.ratio, point.kl) for point in points])
    half = _MARKER_POINTS / 2 * axes.figure.dpi / 72
    taken = [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in pixels]
    for point in {point.policy: point for point in points}.values():
        label = axes.annotate(
            f"{point.policy} (exact)" if point.exact else point.policy,
            (point.ratio, point.kl),
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=9,
            zorder=4,
        )
        for place in (*_PLACES, _PLACES[0]):  # the first again if none is free
            offset, horizontal, vertical = place
            label.set(position=offset, horizontalalignment=horizontal, verticalalignment=vertical)
            box = label.get_window_extent()
            inside = axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1)
            if inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
