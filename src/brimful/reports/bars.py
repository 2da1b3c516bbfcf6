"""Horizontal bars with a name at the left and a value at the right, as SVG that stands in a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from markupsafe import Markup
from rich.cells import cell_len

from brimful.reports.svg import COLOURS, PARTS, WIDTH, axes_of, empty_figure, inlined, width_of
from brimful.reports.text_columns import fitted, told_apart

#: Widest line of a name beside a bar, in columns of a terminal, and most lines: what is cut stands in full in the
#: numbers below the chart.
_LINE, _MOST_LINES = 20, 3
#: Heights of a bar, of its place beside a name of one line, and of each line more.
_BAR, _PITCH, _MORE = 13, 22, 11
#: Height of a line of the legend.
_LEGEND = 18


@dataclass(frozen=True)
class Bar:
    """One bar. said: its value in words, at the right. strong: it stands out."""

    name: str
    value: float
    said: str
    strong: bool = False


@dataclass(frozen=True)
class Stack:
    """One bar of parts, at most six, in the same order in all bars. said: all of it in words."""

    name: str
    parts: Sequence[float]
    said: str


@dataclass(frozen=True)
class _Places:
    """Names in one or two lines, and where each stands, from the top."""

    names: Sequence[str]
    centres: Sequence[float]
    height: float


def bar_chart(
    key: str, bars: Sequence[Bar], *, alt: str, whole: float | None = None, legend: Mapping[str, bool] | None = None
) -> Markup:
    """Bars from left to right, one below the other, in their order.

    key: different for each chart of a page. alt: what the chart shows, for those who do not see it. whole: what the
    bars are parts of, drawn behind each. legend: names of bars that stand out, and of those that do not.
    """
    names = {name: COLOURS["strong" if strong else "bar"] for name, strong in (legend or {}).items()}
    with empty_figure(key) as figure:
        axes, places = _axes(figure, [bar.name for bar in bars], [bar.said for bar in bars], names)
        most = max([*(bar.value for bar in bars), whole or 0.0]) or 1.0
        axes.set_xlim(0, most)
        if whole:
            axes.barh(places.centres, [whole] * len(bars), height=_BAR, color=COLOURS["line"], clip_on=False)
        colours = [COLOURS["strong" if bar.strong else "bar"] for bar in bars]
        axes.barh(places.centres, [bar.value for bar in bars], height=_BAR, color=colours, clip_on=False)
        return inlined(figure, key, alt)


def stacked_bars(key: str, stacks: Sequence[Stack], *, parts: Sequence[str], alt: str) -> Markup:
    """Bars of parts from left to right, one below the other, with what each colour is above them.

    parts: names of the parts. key, alt: as of `bar_chart`.
    """
    colours = [COLOURS[name] for name in PARTS][: len(parts)]
    with empty_figure(key) as figure:
        names, said = [stack.name for stack in stacks], [stack.said for stack in stacks]
        axes, places = _axes(figure, names, said, dict(zip(parts, colours, strict=True)))
        axes.set_xlim(0, max((sum(stack.parts) for stack in stacks), default=0.0) or 1.0)
        begins = [0.0] * len(stacks)
        for number, colour in enumerate(colours):
            widths = [stack.parts[number] for stack in stacks]
            axes.barh(places.centres, widths, left=begins, height=_BAR, color=colour, clip_on=False)
            begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
        return inlined(figure, key, alt)


def _axes(figure: Any, names: Sequence[str], said: Sequence[str], legend: Mapping[str, str]) -> tuple[Any, _Places]:
    """Axes with names at the left, values in words at the right, and a legend of colours above them."""
    places = _placed(names)
    lines = [line for name in places.names for line in name.split("\n")]
    left, right = (10 + max(map(width_of, texts), default=0) for texts in (lines, said))
    top = 8 + _LEGEND * -(-len(legend) // 3) if legend else 2
    axes = axes_of(figure, height=places.height, left=left, right=right, top=top)
    axes.set(ylim=(places.height, 0), xticks=[])
    axes.set_yticks(places.centres, places.names, color=COLOURS["ink"], linespacing=1.0)
    for place, text in zip(places.centres, said, strict=True):
        at_right = {"xy": (1, place), "xycoords": ("axes fraction", "data"), "xytext": (right, 0)}
        placed = {"textcoords": "offset points", "ha": "right", "va": "center_baseline", "annotation_clip": False}
        axes.annotate(text, **at_right, **placed, color=COLOURS["muted"])
    whole = figure.get_size_inches()[1] * 72
    for number, (name, colour) in enumerate(legend.items()):
        x, y = 8 + number % 3 * (WIDTH - 8) / 3, whole - 12 - _LEGEND * (number // 3)
        where = {"xycoords": "figure points", "va": "center_baseline", "annotation_clip": False}
        axes.annotate("\N{BLACK SQUARE}", (x, y), **where, color=colour)
        axes.annotate(name, (x + 14, y), **where, color=COLOURS["ink"])
    return axes, places


def _placed(names: Sequence[str]) -> _Places:
    wrapped = [_wrapped(name) for name in told_apart(names, _MOST_LINES * _LINE - 2)]
    pitches = [_PITCH + _MORE * name.count("\n") for name in wrapped]
    ends = list(accumulate(pitches))
    centres = [end - pitch / 2 for end, pitch in zip(ends, pitches, strict=True)]
    return _Places(names=wrapped, centres=centres, height=float(sum(pitches)))


def _wrapped(name: str) -> str:
    """A name in as many lines as it needs, broken at spaces where lines have some."""
    lines = list[str]()
    while cell_len(name) > _LINE and len(lines) < _MOST_LINES - 1:
        fits = next(end for end in range(len(name), 0, -1) if cell_len(name[:end]) <= _LINE)
        space = name.rfind(" ", _LINE // 4, fits + 1)
        end = space if space > 0 else fits
        lines.append(name[:end].rstrip())
        name = name[end:].lstrip()
    return "\n".join([*lines, fitted(name, _LINE)])
