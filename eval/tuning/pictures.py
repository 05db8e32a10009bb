"""The pictures of a tuning: what each layer got and why, and what other budgets would give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MultipleLocator, PercentFormatter

from kvquant.tuner.footprint import ROLES

from ..look import COLORS, draw, drawable, dress, legend_below, new_figure, plain, png
from ..plot import Point as Labelled
from ..plot import label_points
from .explain import bits, losses_at, typical_width, widths
from .solution import Point, Solution, Trial

_BAR = 0.38  # of the room of a layer, for each of two
_MOST_TICKS = 16
_LOOKS = dict(zip(ROLES, ((COLORS[0], "o"), (COLORS[1], "s")), strict=True))
_LINES = ("-", "--")


def layers_picture(solution: Solution) -> bytes:
    """A PNG of bits by layer for keys and values, above what each layer loses by itself at two widths."""
    layers = sorted(solution.assignment.layers)
    figure = new_figure(8, 5.8)
    upper, lower = figure.subplots(2, 1, sharex=True)
    series = [*_bars(upper, solution, layers), *_losses(lower, solution, layers)]
    upper.set_ylabel("bits an element")
    dress(upper, f"{plain(solution.policy.name)}: what each layer got, {solution.ratio:.1%} of the bytes")
    if lower.lines:
        lower.set_yscale("log")
    lower.set_ylabel("KL, nats per token")
    lower.set_xlabel("layer")
    dress(lower, "Sensitivity: what a layer's keys or values would add to KL")
    lower.xaxis.set_major_locator(MultipleLocator(max(1, -(-len(layers) // _MOST_TICKS))))
    lower.xaxis.set_major_formatter(FuncFormatter(lambda at, _: _layer_at(layers, at)))
    lower.set_xlim(-0.7, len(layers) - 0.3)
    legend_below(figure, series)
    return png(figure)


def pareto_picture(solution: Solution, curve: Sequence[Point]) -> bytes:
    """A PNG of KL (log) against the share of the 16-bit bytes: predicted, measured, and on held-out text."""
    figure = new_figure(8, 5.2)
    axes = figure.add_subplot()
    series = [*_calibration(axes, solution, curve)]
    held_out = _held_out_points(solution)
    series += _on_held_out(axes, held_out)
    reached = [point.ratio for point in curve] + [solution.ratio]
    axes.set_xlim(0.94 * min(reached), 1.03 * max(reached))
    if axes.lines:
        axes.set_yscale("log")
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.set_xlabel("KV cache bytes at most, share of 16 bits an element")
    axes.set_ylabel("KL from the uncompressed cache, nats per token")
    dress(axes, f"{plain(solution.policy.name)}: {solution.goal}")
    legend_below(figure, series)
    draw(figure)  # fixes the layout, so that labels can be placed in pixels
    shown = [point for point in held_out if point.ratio <= axes.get_xlim()[1]]
    label_points(axes, shown, [(trial.ratio, trial.kl) for trial in _measured(solution)])
    return png(figure)


def _bars(axes: Axes, solution: Solution, layers: Sequence[int]) -> Iterator[tuple[Artist, str]]:
    for role, shift in zip(ROLES, (-_BAR / 2, _BAR / 2), strict=True):
        heights = [bits(solution.sensitivity, layer, role, solution.assignment.codec(layer, role)) for layer in layers]
        places = [index + shift for index in range(len(layers))]
        bars = axes.bar(places, heights, width=_BAR, color=_LOOKS[role][0])
        yield bars[0], f"bits of {role}s"


def _losses(axes: Axes, solution: Solution, layers: Sequence[int]) -> Iterator[tuple[Artist, str]]:
    for role in ROLES:
        color, marker = _LOOKS[role]
        for width, line in zip(_two_widths(solution, role), _LINES, strict=False):
            losses = losses_at(solution.sensitivity, role, width)
            shown = [(layers.index(layer), kl) for layer, kl in losses.items() if drawable(kl) and kl > 0]
            if shown:
                x, y = zip(*shown, strict=True)
                (drawn,) = axes.plot(x, y, color=color, marker=marker, markersize=4, linewidth=1.2, linestyle=line)
                yield drawn, f"{role}s at {width} bits"


def _calibration(axes: Axes, solution: Solution, curve: Sequence[Point]) -> Iterator[tuple[Artist, str]]:
    """What was predicted and measured on the text that the policy was tuned on."""
    predicted = [point for point in curve if point.kl > 0]
    if predicted:
        (line,) = axes.plot(
            [point.ratio for point in predicted], [point.kl for point in predicted], color=COLORS[0], linewidth=1.4
        )
        yield line, "best, predicted"
    if measured := _measured(solution):
        (dots,) = axes.plot(
            [trial.ratio for trial in measured],
            [trial.kl for trial in measured],
            linestyle="none",
            marker="o",
            markersize=5,
            markerfacecolor="white",
            color=COLORS[0],
        )
        yield dots, "tried, measured"
    chosen = solution.measured if solution.measured is not None else solution.predicted
    if chosen > 0:
        (star,) = axes.plot(solution.ratio, chosen, "*", markersize=15, color=COLORS[1], zorder=3)
        yield star, "chosen, " + ("predicted" if solution.measured is None else "measured")


def _measured(solution: Solution) -> list[Trial]:
    """What was tried, but for what lost nothing: that has no place on a log axis."""
    return [trial for trial in solution.trials if drawable(trial.kl) and trial.kl > 0]


def _held_out_points(solution: Solution) -> list[Labelled]:
    """Policies on held-out text; those that lose nothing have no place on a log axis."""
    return [
        Labelled(row.policy, row.context, row.kv_ratio_most, row.kl_mean, False)
        for row in solution.rows
        if row.status == "ok" and drawable(row.kl_mean) and row.kl_mean > 0 and drawable(row.kv_ratio_most)
    ]


def _on_held_out(axes: Axes, points: Sequence[Labelled]) -> Iterator[tuple[Artist, str]]:
    chosen, presets = points[:1], points[1:]
    for some, color, marker, name in (
        (chosen, COLORS[1], "D", "chosen, on held-out text"),
        (presets, COLORS[2], "s", "presets, on held-out text"),
    ):
        if some:
            (markers,) = axes.plot(
                [point.ratio for point in some],
                [point.kl for point in some],
                linestyle="none",
                marker=marker,
                markersize=7,
                color=color,
            )
            yield markers, name


def _two_widths(solution: Solution, role: str) -> list[int]:
    """The typical width of codes, and the least."""
    found = widths(solution.sensitivity, role)
    return list(dict.fromkeys((typical_width(solution.sensitivity, role), *found[:1])))


def _layer_at(layers: Sequence[int], at: float) -> str:
    return str(layers[int(at)]) if at == int(at) and 0 <= at < len(layers) else ""
