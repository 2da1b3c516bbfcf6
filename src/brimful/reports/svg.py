"""A figure of matplotlib as SVG that stands in a page, coloured and set in type by the page's style sheet."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import re
import warnings
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup
from rich.cells import cell_len

from brimful.core.errors import InputError, first_line, printable

#: A chart's width, its type's size, and the width of a character: in its own unit, about a pixel on a phone.
WIDTH, TYPE, _CHARACTER = 400, 12, 6.8
#: Width of a wide character: a capital, a sign as wide, or one that a terminal gives two columns.
_WIDE, _WIDE_SIGNS = 10.1, frozenset("mw@%_<>+=~^#&×")

#: Colours that matplotlib is told, and what they are in the page: its variables, which differ in the dark and in print.
COLOURS = {"ink": "#010203", "muted": "#020304", "line": "#030405", "bar": "#040506", "strong": "#050607"}
#: And of the parts of stacked bars, in their order.
PARTS = {f"part-{number}": f"#0{number}0708" for number in range(1, 7)}
COLOURS |= PARTS
_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.unicode_minus": True,
    "font.size": TYPE,
}


def check_charts() -> None:
    """Check that charts can be drawn. Raises: InputError if matplotlib is not installed, or cannot be imported."""
    needs = "a report as a page needs matplotlib for its charts"
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(needs, hint="pip install 'brimful[report]'")
    try:
        importlib.import_module("matplotlib.figure")
    except Exception as error:  # that of another library, such as numpy of another version
        said = f"{needs}, which is installed and cannot be imported ({first_line(error)})"
        raise InputError(said, hint="install it again: pip install --force-reinstall 'brimful[report]'") from error


def width_of(text: str) -> float:
    """Width of a text of the page's type, at most: capitals, m and w are wide."""
    return sum(_WIDE if c.isupper() or c in _WIDE_SIGNS or cell_len(c) > 1 else _CHARACTER for c in text)


@contextlib.contextmanager
def empty_figure(key: str) -> Iterator[Any]:
    """An empty figure of matplotlib at its own defaults, whatever the user's are: equal charts are equal bytes."""
    check_charts()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of glyphs that matplotlib's own font lacks: the page sets the type
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_SETTINGS, "svg.hashsalt": key})
        yield Figure(dpi=72)


def axes_of(figure: Any, *, height: float, left: float, right: float, top: float = 2, bottom: float = 2) -> Any:
    """Axes without a frame, `height` high within these margins."""
    whole = height + top + bottom
    figure.set_size_inches(WIDTH / 72, whole / 72)
    figure.patch.set_visible(False)
    place = (left / WIDTH, bottom / whole, (WIDTH - left - right) / WIDTH, height / whole)
    axes = figure.add_axes(place, frameon=False)
    axes.tick_params(length=0, pad=6)
    return axes


def inlined(figure: Any, key: str, alt: str) -> Markup:
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
    for variable, colour in COLOURS.items():
        coloured = coloured.replace(colour, f"var(--{variable})")
    return coloured
