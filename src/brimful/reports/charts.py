"""Charts as SVG that stands in a page: points, shares, and numbers as they went on. Bars are in `bars`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from brimful.reports.svg import COLOURS, TYPE, WIDTH, axes_of, empty_figure, inlined, width_of
from brimful.reports.text_columns import told_apart


@dataclass(frozen=True)
class Point:
    """One point. label: beside it, short. strong: it stands out."""

    label: str
    x: float
    y: float
    strong: bool = False


def scatter(
    key: str,
    points: Sequence[Point],
    *,
    front: Sequence[int],
    axes_names: tuple[str, str],
    said: tuple[Callable[[float], str], Callable[[float], str]],
    alt: str,
) -> Markup:
    """Draw points with their labels, and a line of steps through those of the front. An axis whose values are close
    together does not begin at 0, and says so.

    front: numbers of points, from left to right. axes_names, said: of x and y. key, alt: as of `bar_chart`.
    """
    with empty_figure(key) as figure:
        axes = axes_of(figure, height=250, left=56, right=18, top=12, bottom=42)
        axes.grid(color=COLOURS["line"], linewidth=1)
        axes.set_axisbelow(True)
        xs, ys = [points[i].x for i in front], [points[i].y for i in front]
        axes.step(xs, ys, where="post", color=COLOURS["muted"], linewidth=1.2, dashes=(4, 3))
        for strong, marker in ((False, "s"), (True, "o")):
            chosen = [point for point in points if point.strong is strong]
            colour = COLOURS["strong" if strong else "bar"]
            where = ([point.x for point in chosen], [point.y for point in chosen])
            axes.scatter(*where, s=42, marker=marker, color=colour, linewidths=0, clip_on=False, zorder=3)
        spans = _span([point.x for point in points]), _span([point.y for point in points])
        axes.set_xlim(*spans[0])
        axes.set_ylim(*spans[1])
        names = [
            f"{name}, from {text(start)} on" if start else name
            for name, text, (start, _) in zip(axes_names, said, spans, strict=True)
        ]
        for axis, text in zip((axes.xaxis, axes.yaxis), said, strict=True):
            axis.get_major_locator().set_params(nbins=4)
            axis.set_major_formatter(lambda value, _, text=text: text(value))
        _widen(axes, said[1], below=said[0])
        _label(axes, points, front)
        axes.set_xlabel(names[0], color=COLOURS["muted"], labelpad=6)
        axes.set_ylabel(names[1], color=COLOURS["muted"], labelpad=6)
        axes.tick_params(labelcolor=COLOURS["muted"])
        return inlined(figure, key, alt)


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Ends of an axis: from 0 on, or where the least is more than half of the most, from a little below it."""
    least, most = min(values, default=0.0), max(values, default=0.0) or 1.0
    start = max(0.0, least - (most - least) / 4) if most / 2 < least < most else 0.0
    return start, most + 0.08 * (most - start)


#: Places of a label beside its point: where its corner is from there, and which corner.
_BESIDE = (
    ((6, 3), "left", "bottom"), ((6, -3), "left", "top"), ((-6, 3), "right", "bottom"), ((-6, -3), "right", "top"),
    ((0, 7), "center", "bottom"), ((0, -7), "center", "top"),
)  # fmt: skip
_LABEL_TYPE = 10


def _label(axes: Any, points: Sequence[Point], front: Sequence[int]) -> None:
    """Write labels beside points, those of the front first, each where it covers least of what is there."""
    place, size = axes.get_position(), axes.figure.get_size_inches() * 72
    bounds = (place.x0 * size[0], 0.0, size[0], size[1])
    at = [tuple(map(float, axes.transData.transform((point.x, point.y)))) for point in points]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in at]
    for number in sorted(range(len(points)), key=lambda i: (i not in front, i)):
        text = points[number].label
        tried = [(_box(at[number], text, *each), each) for each in _BESIDE]
        costs = [sum(_common(box, other) for other in taken) + 9 * _outside(box, bounds) for box, _ in tried]
        box, (offset, across, up) = tried[costs.index(min(costs))]
        taken.append(box)
        placed = {"textcoords": "offset points", "xytext": offset, "ha": across, "va": up, "annotation_clip": False}
        colour = COLOURS["ink" if number in front else "muted"]
        axes.annotate(text, (points[number].x, points[number].y), **placed, color=colour, fontsize=_LABEL_TYPE)


Box = tuple[float, float, float, float]


def _box(at: tuple[float, ...], text: str, offset: tuple[int, int], across: str, up: str) -> Box:
    width, height = width_of(text) * _LABEL_TYPE / TYPE, 1.1 * _LABEL_TYPE
    left = at[0] + offset[0] - {"left": 0.0, "center": width / 2, "right": width}[across]
    bottom = at[1] + offset[1] - {"bottom": 0.0, "top": height}[up]
    return left, bottom, left + width, bottom + height


def _common(one: Box, other: Box) -> float:
    """Area that is in both."""
    wide, high = min(one[2], other[2]) - max(one[0], other[0]), min(one[3], other[3]) - max(one[1], other[1])
    return wide * high if wide > 0 and high > 0 else 0.0


def _outside(box: Box, bounds: Box) -> float:
    """Area of a box that is outside of bounds."""
    return (box[2] - box[0]) * (box[3] - box[1]) - _common(box, bounds)


def histogram(key: str, counts: Sequence[int], *, edges: Mapping[int, str], axis: str, alt: str) -> Markup:
    """Draw the share of each class, left to right. All classes are equally wide.

    edges: what is written below the edge with that number, from 0, left of the first class, to len(counts).
    axis: what is classed. key, alt: as of `bar_chart`.
    """
    whole = sum(counts) or 1
    shares = [100 * count / whole for count in counts]
    with empty_figure(key) as figure:
        axes = axes_of(figure, height=150, left=40, right=12, top=8, bottom=42)
        axes.set(xlim=(0, len(counts)), ylim=(0, max(shares, default=0) * 1.02 or 1))
        axes.yaxis.get_major_locator().set_params(nbins=4)
        axes.yaxis.set_major_formatter("{x:g} %")
        axes.grid(axis="y", color=COLOURS["line"], linewidth=1)
        axes.set_axisbelow(True)
        axes.bar([i + 0.5 for i in range(len(counts))], shares, width=0.88, color=COLOURS["strong"], clip_on=False)
        axes.set_xticks(list(edges), list(edges.values()))
        axes.set_xlabel(axis, color=COLOURS["muted"], labelpad=6)
        axes.tick_params(labelcolor=COLOURS["muted"])
        return inlined(figure, key, alt)


def agreement(
    key: str,
    points: Sequence[tuple[float, float, int]],
    *,
    ends: tuple[float, float],
    axes_names: tuple[str, str],
    alt: str,
) -> Markup:
    """Draw pairs that should be equal as dots, larger where more is behind them, and the line on which they are.

    points: x, y and count of each. ends: of both axes. axes_names: of x and y. key, alt: as of `bar_chart`.
    """
    most = max((count for *_, count in points), default=1)
    with empty_figure(key) as figure:
        axes = axes_of(figure, height=220, left=48, right=12, top=8, bottom=42)
        axes.set(xlim=ends, ylim=ends)
        axes.grid(color=COLOURS["line"], linewidth=1)
        axes.set_axisbelow(True)
        axes.plot(ends, ends, color=COLOURS["muted"], linewidth=1, dashes=(4, 3))
        xs, ys, counts = zip(*points, strict=True) if points else ((), (), ())
        sizes = [16 + 144 * count / most for count in counts]
        axes.scatter(xs, ys, s=sizes, color=COLOURS["strong"], linewidths=0, clip_on=False, zorder=3)
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(nbins=5)
            axis.set_major_formatter(lambda value, _: f"{value:,g}")
        _widen(axes, "{:,g}".format, below="{:,g}".format)
        axes.set_xlabel(axes_names[0], color=COLOURS["muted"], labelpad=6)
        axes.set_ylabel(axes_names[1], color=COLOURS["muted"], labelpad=6)
        axes.tick_params(labelcolor=COLOURS["muted"])
        return inlined(figure, key, alt)


def curves(
    key: str,
    lines: Sequence[Sequence[tuple[float, float]]],
    *,
    axis: str,
    alt: str,
    said: Callable[[float], str] = "{:g}".format,
    from_zero: bool = False,
) -> Markup:
    """Draw numbers as they went on: the first as a line, others as lines with dots.

    lines: points of each, from left to right; the first is a square where it has one point. axis: what goes on to the
    right. said: a number of the axis at the left, in words. from_zero: whether that axis begins at 0. key, alt: as of
    `bar_chart`.
    """
    with empty_figure(key) as figure:
        axes = axes_of(figure, height=150, left=40, right=12, top=8, bottom=42)
        axes.grid(axis="y", color=COLOURS["line"], linewidth=1)
        axes.set_axisbelow(True)
        for place, points in enumerate(lines):
            xs, ys = zip(*points, strict=True) if points else ((), ())
            dotted = place > 0 or len(points) == 1
            marks = {"marker": "s" if place == 0 else "o", "markersize": 4, "markeredgewidth": 0} if dotted else {}
            axes.plot(xs, ys, color=COLOURS["strong" if place == 0 else "muted"], linewidth=1.6, **marks)
        if from_zero:
            axes.set_ylim(0, 1.08 * max((y for points in lines for _, y in points), default=1.0) or 1.0)
        _number_axes(axes, axis, said)
        return inlined(figure, key, alt)


#: Looks of lines over one another: colour and dashes. On paper all but `bar` are nearly black: dashes tell them apart.
_LOOKS: tuple[tuple[str, Any], ...] = (
    ("strong", "solid"),
    ("ink", (0, (4, 2))),
    ("bar", "solid"),
    ("muted", (0, (1, 1.5))),
    ("strong", (0, (6, 2, 1, 2))),
    ("bar", (0, (3, 1.5))),
)


#: Widest name of a line above them, in columns of a terminal.
_NAME = 20


def overlaid_curves(
    key: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    axis: str,
    alt: str,
    said: Callable[[float], str] = "{:g}".format,
) -> Markup:
    """Draw the same number of several runs over one another, each with its own line, named above them.

    lines: points of each by its name. axis, said, key, alt: as of `curves`.
    """
    names = told_apart(list(lines), _NAME)
    rows = -(-len(names) // 2)
    with empty_figure(key) as figure:
        axes = axes_of(figure, height=170, left=40, right=12, top=8 + 18 * rows, bottom=42)
        axes.grid(axis="y", color=COLOURS["line"], linewidth=1)
        axes.set_axisbelow(True)
        for place, (name, points) in enumerate(zip(names, lines.values(), strict=True)):
            colour, dashes = _LOOKS[place % len(_LOOKS)]
            marks = {"marker": "o", "markersize": 4, "markeredgewidth": 0} if len(points) == 1 else {}
            xs, ys = zip(*points, strict=True) if points else ((), ())
            # A name that begins with an underscore is no name to matplotlib.
            axes.plot(xs, ys, color=COLOURS[colour], linewidth=1.6, linestyle=dashes, label=f"\u200a{name}", **marks)
        _number_axes(axes, axis, said)
        above = {"loc": "lower left", "bbox_to_anchor": (0, 1.02), "borderaxespad": 0, "ncols": 2}
        axes.legend(**above, frameon=False, labelcolor=COLOURS["ink"], handlelength=1.8, borderpad=0.2)
        return inlined(figure, key, alt)


def _number_axes(axes: Any, axis: str, said: Callable[[float], str]) -> None:
    """Write whole numbers below, and at the left none below 0 where no line goes there."""
    if all(min(line.get_ydata(), default=0) >= 0 for line in axes.lines):
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    axes.xaxis.get_major_locator().set_params(nbins=5, integer=True, min_n_ticks=1)
    axes.yaxis.get_major_locator().set_params(nbins=4)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    at_left = _told_apart(axes.get_yticks(), said)
    axes.yaxis.set_major_formatter(lambda value, _: at_left(value))
    _widen(axes, at_left)
    axes.set_xlabel(axis, color=COLOURS["muted"], labelpad=6)
    axes.tick_params(labelcolor=COLOURS["muted"])


def _told_apart(numbers: Sequence[float], said: Callable[[float], str]) -> Callable[[float], str]:
    """`said`, or as many decimals as tell numbers in equal steps apart where it does not."""
    if len({said(number) for number in numbers}) == len(numbers):
        return said
    decimals = max(0, 1 - math.floor(math.log10(float(numbers[1] - numbers[0]))))
    return lambda number: f"{number:.{decimals}f}"


def _widen(axes: Any, said: Callable[[float], str], *, below: Callable[[float], str] | None = None) -> None:
    """Leave room for the numbers at the left. below: those below, where the axis at the left has a name beside it."""
    left, right = 14.0 + max((width_of(said(value)) for value in axes.get_yticks()), default=0), 12.0
    if below is not None:
        left, right = left + 18, max(right, 4 + max(width_of(below(value)) for value in axes.get_xticks()) / 2)
    place = axes.get_position()
    axes.set_position((left / WIDTH, place.y0, (WIDTH - left - right) / WIDTH, place.height))
