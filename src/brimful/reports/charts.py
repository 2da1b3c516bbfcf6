"""Charts as SVG that stands in a page: drawn by matplotlib, coloured and set in type by the page's style sheet."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup
from rich.cells import cell_len

from brimful.core.errors import InputError, printable
from brimful.reports.text_columns import fitted

#: A chart's width, its type's size, and the width of a character: in its own unit, about a pixel on a phone.
_WIDTH, _TYPE, _CHARACTER = 400, 12, 6.8
#: Width of a wide character: a capital, or one that a terminal gives two columns.
_WIDE = 9.5
#: Widest name beside a bar, in columns of a terminal: what is cut stands in full in the numbers below the chart.
_NAME = 20
_BAR_HEIGHT = 22

#: Colours that matplotlib is told, and what they are in the page: its variables, which differ in the dark and in print.
_COLOURS = {"ink": "#010203", "muted": "#020304", "line": "#030405", "bar": "#040506", "strong": "#050607"}
#: And of the parts of stacked bars, in their order.
_PARTS = {f"part-{number}": f"#0{number}0708" for number in range(1, 7)}
_COLOURS |= _PARTS
_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.unicode_minus": True,
    "font.size": _TYPE,
}


@dataclass(frozen=True)
class Bar:
    """One bar. said: its value in words, at the right. strong: it stands out."""

    name: str
    value: float
    said: str
    strong: bool = False


@dataclass(frozen=True)
class Point:
    """One point. label: beside it, short. strong: it stands out."""

    label: str
    x: float
    y: float
    strong: bool = False


@dataclass(frozen=True)
class Stack:
    """One bar of parts, at most six, in the same order in all bars. said: all of it in words."""

    name: str
    parts: Sequence[float]
    said: str


def check_charts() -> None:
    """Check that charts can be drawn. Raises: InputError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("a report as a page needs matplotlib for its charts", hint="pip install 'brimful[report]'")


def bar_chart(key: str, bars: Sequence[Bar], *, alt: str, whole: float | None = None) -> Markup:
    """Bars from left to right, one below the other, in their order.

    key: different for each chart of a page. alt: what the chart shows, for those who do not see it. whole: what the
    bars are parts of, drawn behind each.
    """
    names = _told_apart([bar.name for bar in bars])
    left, right = (10 + max(map(_width, texts), default=0) for texts in (names, [b.said for b in bars]))
    places = range(len(bars))
    with _matplotlib(key) as figure:
        axes = _axes(figure, height=_BAR_HEIGHT * len(bars), left=left, right=right)
        most = max([*(bar.value for bar in bars), whole or 0.0]) or 1.0
        axes.set(xlim=(0, most), ylim=(len(bars) - 0.5, -0.5), xticks=[])
        if whole:
            axes.barh(places, [whole] * len(bars), height=0.6, color=_COLOURS["line"], clip_on=False)
        colours = [_COLOURS["strong" if bar.strong else "bar"] for bar in bars]
        axes.barh(places, [bar.value for bar in bars], height=0.6, color=colours, clip_on=False)
        axes.set_yticks(places, names, color=_COLOURS["ink"])
        for place, bar in zip(places, bars, strict=True):
            at_right = {"xy": (1, place), "xycoords": ("axes fraction", "data"), "xytext": (right, 0)}
            placed = {"textcoords": "offset points", "ha": "right", "va": "center_baseline", "annotation_clip": False}
            axes.annotate(bar.said, **at_right, **placed, color=_COLOURS["muted"])
        return _inlined(figure, key, alt)


def stacked_bars(key: str, stacks: Sequence[Stack], *, parts: Sequence[str], alt: str) -> Markup:
    """Bars of parts from left to right, one below the other, with what each colour is above them.

    parts: names of the parts. key, alt: as of `bar_chart`.
    """
    names, rows = _told_apart([stack.name for stack in stacks]), -(-len(parts) // 3)
    left, right = (10 + max(map(_width, texts), default=0) for texts in (names, [s.said for s in stacks]))
    colours, places = [_COLOURS[name] for name in _PARTS][: len(parts)], range(len(stacks))
    with _matplotlib(key) as figure:
        axes = _axes(figure, height=_BAR_HEIGHT * len(stacks), left=left, right=right, top=8 + 18 * rows)
        most = max((sum(stack.parts) for stack in stacks), default=0.0) or 1.0
        axes.set(xlim=(0, most), ylim=(len(stacks) - 0.5, -0.5), xticks=[])
        begins = [0.0] * len(stacks)
        for number, colour in enumerate(colours):
            widths = [stack.parts[number] for stack in stacks]
            axes.barh(places, widths, left=begins, height=0.6, color=colour, clip_on=False)
            begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
        axes.set_yticks(places, names, color=_COLOURS["ink"])
        for place, stack in zip(places, stacks, strict=True):
            at_right = {"xy": (1, place), "xycoords": ("axes fraction", "data"), "xytext": (right, 0)}
            placed = {"textcoords": "offset points", "ha": "right", "va": "center_baseline", "annotation_clip": False}
            axes.annotate(stack.said, **at_right, **placed, color=_COLOURS["muted"])
        for number, (name, colour) in enumerate(zip(parts, colours, strict=True)):
            x, y = 8 + number % 3 * (_WIDTH - 8) / 3, 12 + 18 * (number // 3)
            where = {"xycoords": "figure points", "va": "center_baseline", "annotation_clip": False}
            top = figure.get_size_inches()[1] * 72 - y
            axes.annotate("\N{BLACK SQUARE}", (x, top), **where, color=colour)
            axes.annotate(name, (x + 14, top), **where, color=_COLOURS["ink"])
        return _inlined(figure, key, alt)


def scatter(
    key: str,
    points: Sequence[Point],
    *,
    front: Sequence[int],
    axes_names: tuple[str, str],
    said: tuple[Callable[[float], str], Callable[[float], str]],
    alt: str,
) -> Markup:
    """Draw points with their labels, and a line of steps through those of the front.

    front: numbers of points, from left to right. axes_names, said: of x and y. key, alt: as of `bar_chart`.
    """
    with _matplotlib(key) as figure:
        axes = _axes(figure, height=250, left=56, right=18, top=12, bottom=42)
        axes.grid(color=_COLOURS["line"], linewidth=1)
        axes.set_axisbelow(True)
        xs, ys = [points[i].x for i in front], [points[i].y for i in front]
        axes.step(xs, ys, where="post", color=_COLOURS["muted"], linewidth=1.2, dashes=(4, 3))
        for strong, marker in ((False, "s"), (True, "o")):
            chosen = [point for point in points if point.strong is strong]
            colour = _COLOURS["strong" if strong else "bar"]
            where = ([point.x for point in chosen], [point.y for point in chosen])
            axes.scatter(*where, s=42, marker=marker, color=colour, linewidths=0, clip_on=False, zorder=3)
        for point in points:
            placed = {"textcoords": "offset points", "xytext": (5, 4), "annotation_clip": False}
            axes.annotate(point.label, (point.x, point.y), **placed, color=_COLOURS["ink"], fontsize=10)
        axes.set_xlim(0, 1.08 * max((point.x for point in points), default=1.0) or 1.0)
        axes.set_ylim(0, 1.08 * max((point.y for point in points), default=1.0) or 1.0)
        for axis, text in zip((axes.xaxis, axes.yaxis), said, strict=True):
            axis.get_major_locator().set_params(nbins=4)
            axis.set_major_formatter(lambda value, _, text=text: text(value))
        axes.set_xlabel(axes_names[0], color=_COLOURS["muted"], labelpad=6)
        axes.set_ylabel(axes_names[1], color=_COLOURS["muted"], labelpad=6)
        axes.tick_params(labelcolor=_COLOURS["muted"])
        return _inlined(figure, key, alt)


def _told_apart(names: Sequence[str]) -> list[str]:
    """Names that fit beside a bar; those that would read alike keep their ends, too."""
    short = [fitted(name, _NAME) for name in names]
    if len(set(short)) == len(short):
        return short
    alike = {name for name in short if short.count(name) > 1}
    half = _NAME // 2
    ends = [f"{fitted(name, half).removesuffix('…')}…{printable(name)[-half + 1 :]}" for name in names]
    return [end if name in alike else name for name, end in zip(short, ends, strict=True)]


def _width(text: str) -> float:
    """Width of a text of the page's type, at most: capitals, m and w are wide."""
    return sum(_WIDE if c.isupper() or c in "mw@%_" or cell_len(c) > 1 else _CHARACTER for c in text)


def histogram(key: str, counts: Sequence[int], *, edges: Mapping[int, str], axis: str, alt: str) -> Markup:
    """Draw the share of each class, left to right. All classes are equally wide.

    edges: what is written below the edge with that number, from 0, left of the first class, to len(counts).
    axis: what is classed. key, alt: as of `bar_chart`.
    """
    whole = sum(counts) or 1
    shares = [100 * count / whole for count in counts]
    with _matplotlib(key) as figure:
        axes = _axes(figure, height=150, left=40, right=12, top=8, bottom=42)
        axes.set(xlim=(0, len(counts)), ylim=(0, max(shares, default=0) * 1.02 or 1))
        axes.yaxis.get_major_locator().set_params(nbins=4)
        axes.yaxis.set_major_formatter("{x:g} %")
        axes.grid(axis="y", color=_COLOURS["line"], linewidth=1)
        axes.set_axisbelow(True)
        axes.bar([i + 0.5 for i in range(len(counts))], shares, width=0.88, color=_COLOURS["strong"], clip_on=False)
        axes.set_xticks(list(edges), list(edges.values()))
        axes.set_xlabel(axis, color=_COLOURS["muted"], labelpad=6)
        axes.tick_params(labelcolor=_COLOURS["muted"])
        return _inlined(figure, key, alt)


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
    with _matplotlib(key) as figure:
        axes = _axes(figure, height=220, left=48, right=12, top=8, bottom=42)
        axes.set(xlim=ends, ylim=ends)
        axes.grid(color=_COLOURS["line"], linewidth=1)
        axes.set_axisbelow(True)
        axes.plot(ends, ends, color=_COLOURS["muted"], linewidth=1, dashes=(4, 3))
        xs, ys, counts = zip(*points, strict=True) if points else ((), (), ())
        sizes = [16 + 144 * count / most for count in counts]
        axes.scatter(xs, ys, s=sizes, color=_COLOURS["strong"], linewidths=0, clip_on=False, zorder=3)
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(nbins=5)
        axes.set_xlabel(axes_names[0], color=_COLOURS["muted"], labelpad=6)
        axes.set_ylabel(axes_names[1], color=_COLOURS["muted"], labelpad=6)
        axes.tick_params(labelcolor=_COLOURS["muted"])
        return _inlined(figure, key, alt)


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

    lines: points of each, from left to right. axis: what goes on to the right. said: a number of the axis at the left,
    in words. from_zero: whether that axis begins at 0. key, alt: as of `bar_chart`.
    """
    with _matplotlib(key) as figure:
        axes = _axes(figure, height=150, left=40, right=12, top=8, bottom=42)
        axes.grid(axis="y", color=_COLOURS["line"], linewidth=1)
        axes.set_axisbelow(True)
        for place, points in enumerate(lines):
            xs, ys = zip(*points, strict=True) if points else ((), ())
            dotted = place > 0 or len(points) == 1
            marks = {"marker": "o", "markersize": 4, "markeredgewidth": 0} if dotted else {}
            axes.plot(xs, ys, color=_COLOURS["strong" if place == 0 else "muted"], linewidth=1.6, **marks)
        if from_zero:
            axes.set_ylim(bottom=0)
        axes.xaxis.get_major_locator().set_params(nbins=5, integer=True)
        axes.yaxis.get_major_locator().set_params(nbins=4)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: said(value))
        _widen(axes, said)
        axes.set_xlabel(axis, color=_COLOURS["muted"], labelpad=6)
        axes.tick_params(labelcolor=_COLOURS["muted"])
        return _inlined(figure, key, alt)


#: Looks of lines over one another: colour and dashes. On paper all but `bar` are nearly black: dashes tell them apart.
_LOOKS: tuple[tuple[str, Any], ...] = (
    ("strong", "solid"),
    ("ink", (0, (4, 2))),
    ("bar", "solid"),
    ("muted", (0, (1, 1.5))),
    ("strong", (0, (6, 2, 1, 2))),
    ("bar", (0, (3, 1.5))),
)


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
    names = _told_apart(list(lines))
    rows = -(-len(names) // 2)
    with _matplotlib(key) as figure:
        axes = _axes(figure, height=170, left=40, right=12, top=8 + 18 * rows, bottom=42)
        axes.grid(axis="y", color=_COLOURS["line"], linewidth=1)
        axes.set_axisbelow(True)
        for place, (name, points) in enumerate(zip(names, lines.values(), strict=True)):
            colour, dashes = _LOOKS[place % len(_LOOKS)]
            marks = {"marker": "o", "markersize": 4, "markeredgewidth": 0} if len(points) == 1 else {}
            xs, ys = zip(*points, strict=True) if points else ((), ())
            # A name that begins with an underscore is no name to matplotlib.
            axes.plot(xs, ys, color=_COLOURS[colour], linewidth=1.6, linestyle=dashes, label=f"\u200a{name}", **marks)
        axes.xaxis.get_major_locator().set_params(nbins=5, integer=True)
        axes.yaxis.get_major_locator().set_params(nbins=4)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: said(value))
        _widen(axes, said)
        axes.set_xlabel(axis, color=_COLOURS["muted"], labelpad=6)
        axes.tick_params(labelcolor=_COLOURS["muted"])
        above = {"loc": "lower left", "bbox_to_anchor": (0, 1.02), "borderaxespad": 0, "ncols": 2}
        axes.legend(**above, frameon=False, labelcolor=_COLOURS["ink"], handlelength=1.8, borderpad=0.2)
        return _inlined(figure, key, alt)


def _widen(axes: Any, said: Callable[[float], str]) -> None:
    """Leave room for the numbers at the left."""
    left = 14 + max((_width(said(value)) for value in axes.get_yticks()), default=0)
    place = axes.get_position()
    axes.set_position((left / _WIDTH, place.y0, (_WIDTH - left - 12) / _WIDTH, place.height))


@contextlib.contextmanager
def _matplotlib(key: str) -> Iterator[Any]:
    """An empty figure of matplotlib at its own defaults, whatever the user's are: equal charts are equal bytes."""
    check_charts()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of glyphs that matplotlib's own font lacks: the page sets the type
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_SETTINGS, "svg.hashsalt": key})
        yield Figure(dpi=72)


def _axes(figure: Any, *, height: float, left: float, right: float, top: float = 2, bottom: float = 2) -> Any:
    """Axes without a frame, `height` high within these margins."""
    whole = height + top + bottom
    figure.set_size_inches(_WIDTH / 72, whole / 72)
    figure.patch.set_visible(False)
    place = (left / _WIDTH, bottom / whole, (_WIDTH - left - right) / _WIDTH, height / whole)
    axes = figure.add_axes(place, frameon=False)
    axes.tick_params(length=0, pad=6)
    return axes


def _inlined(figure: Any, key: str, alt: str) -> Markup:
    """matplotlib's document as an element: without size, fonts and ids that would clash, in the page's colours."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    root = ElementTree.fromstring(drawn.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.tail = element.text = None if element.tag != "text" else element.text
        _dress(element, key)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in ("style", "metadata"):
                parent.remove(child)
    root.attrib = {
        "xmlns": "http://www.w3.org/2000/svg",
        "class": "chart",
        "viewBox": root.attrib["viewBox"],
        "role": "img",
        "aria-label": printable(alt, 2000),
    }
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _dress(element: ElementTree.Element, key: str) -> None:
    """Adapt attributes to the page: ids of groups go, nothing refers to them; others are made unique by the key."""
    attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    if element.tag == "g":
        attributes.pop("id", None)
    for name, value in attributes.items():
        if name == "id":
            attributes[name] = f"{key}-{value}"
        elif name == "href":
            attributes[name] = value.replace("#", f"#{key}-")
        elif name == "style":
            attributes[name] = _style(value)
        elif name == "d":
            attributes[name] = " ".join(value.split())
        elif "url(#" in value:
            attributes[name] = value.replace("url(#", f"url(#{key}-")
    element.attrib = attributes


def _style(style: str) -> str:
    sized = re.sub(r"\bfont: [^;]*?([\d.]+px)[^;]*", r"font-size: \1", style)
    coloured = re.sub(r"\bfont-family: [^;]*(; )?", "", sized)
    for variable, colour in _COLOURS.items():
        coloured = coloured.replace(colour, f"var(--{variable})")
    return coloured
