"""What all pictures share: colours for all kinds of eyes, names as plain text, legends that cover nothing."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from .errors import printable

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vPX<>*h"  # as many as do not share a divisor with the colours
_LINES = ("-", "--", ":", "-.")
_LONGEST_NAME = 40
_LEGEND_POINTS = 9
_LARGEST = 1e30
_COLOURS_IN_FILE = 128  # a third of the bytes of one with all shades of the letters' edges


def style(index: int) -> dict[str, Any]:
    """Colour, marker and line of the series ``index``; no two of the first 77 are alike."""
    return {
        "color": COLORS[index % len(COLORS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": _LINES[index // len(COLORS) % len(_LINES)],
    }


def drawable(value: float | None) -> TypeGuard[float]:
    """Whether there is a number that an axis can show: a broken policy's perplexity may be as large as floats go."""
    return value is not None and abs(value) < _LARGEST


def shortened(name: str, longest: int) -> str:
    """A name of at most ``longest`` characters: what is too much goes from its middle."""
    head = longest * 2 // 3
    return name if len(name) <= longest else f"{name[:head]}…{name[head + 1 - longest :]}"


def plain(name: str) -> str:
    """A name as a picture shows it: short, and without the meaning ``$`` has to matplotlib."""
    return shortened(printable(name), _LONGEST_NAME).replace("$", r"\$")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that needs no display."""
    return Figure(figsize=(width, height), dpi=160, layout="constrained")


def draw(figure: Figure) -> FigureCanvasAgg:
    """Lays the figure out and paints it."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    return canvas


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    canvas = draw(figure)
    shades = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")  # type: ignore[no-untyped-call]
    shades.quantize(_COLOURS_IN_FILE, dither=Image.Dither.NONE).save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def dress(axes: Axes, title: str = "") -> None:
    """A title, a light grid, and no frame where nothing is read off."""
    if title:
        axes.set_title(title, loc="left", fontsize=10.5)
    axes.grid(True, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend_below(figure: Figure, series: Sequence[tuple[Artist, str]]) -> None:
    """A legend of handles and names under the axes, by which the figure grows; none of nothing."""
    if not series:
        return
    names = [name for _, name in series]
    longest = max(map(len, names))
    columns = max(1, min(len(names), 4, int(figure.get_figwidth() / (0.65 + 0.075 * longest))))
    figure.set_figheight(figure.get_figheight() + 0.15 + 0.19 * -(-len(names) // columns))
    figure.legend(
        [handle for handle, _ in series],
        names,
        loc="outside lower left",
        ncols=columns,
        fontsize=_LEGEND_POINTS,
        frameon=False,
        handlelength=2.6,
        columnspacing=1.2,
    )
