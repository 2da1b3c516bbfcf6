"""Reports as pages: one HTML file that needs no network, script or font, rendered from `templates/` with jinja2.

A page extends `page.html.j2`, is filled with the macros of `parts.html.j2`, and reads on a phone, on paper and in the
dark. Every value is escaped and control characters are made visible; only `Markup` is taken as HTML.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from brimful.core.errors import printable
from brimful.core.records import json_text
from brimful.core.units import bytes_text, count_text, seconds_text, share_text
from brimful.reports.page_bounds import fitting_record

#: Characters of a value, of a sentence and of a command that a page shows.
_VALUE, _SENTENCE, _COMMAND = 1000, 2000, 100_000
#: Characters of a word from which it is broken where a line has no room for it.
_LONG_WORD = 16
_CODE = re.compile(r"`([^`]+)`|(?<![\w-])(--[a-z][a-z-]*[a-z])")
#: A name in quotes, escaped, with letters that are written from right to left.
_NAME = re.compile(r"&#39;((?:(?!&#39;)[^<])*[\u0590-\u08ff](?:(?!&#39;)[^<])*)&#39;")


def render(template: str, record: Any, *, whole: str = "the record that it was made from", **values: Any) -> str:
    """Render a page.

    record: a dataclass of JSON's kinds, given to the template as `record` and embedded in the element `record`.
    whole: where all of the record is, said where the page has a part of it.
    Raises: ValueError for a record with a number that JSON does not have.
    """
    embedded, is_whole = fitting_record(record)
    text = _in_script(json_text(embedded))
    shortened = None if is_whole else whole
    return (
        environment().get_template(template).render(record=record, embedded_record=text, shortened=shortened, **values)
    )


def environment() -> Environment:
    """Make the environment that all pages are rendered in: values are escaped, an unknown name is an error."""
    made = Environment(
        loader=PackageLoader("brimful.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"prose": _prose, "in_full": lambda text: escape(printable(text, _COMMAND))}
    made.tests |= {"long_worded": lambda text: any(len(word) > _LONG_WORD for word in str(text).split())}
    units = {"bytes": bytes_text, "count": count_text, "seconds": seconds_text, "share": share_text}
    made.filters |= {name: functools.partial(_unless_unknown, text) for name, text in units.items()}
    return made


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) else _readable(value, _VALUE)


def _unless_unknown(text: Callable[[Any], str], value: Any) -> str | None:
    return None if value is None else text(value)


def _readable(value: Any, limit: int) -> str:
    """Text without control characters; a number and its per cent stay on one line."""
    return printable(value, limit).replace(" %", "\N{NO-BREAK SPACE}%")


def _prose(text: str) -> Markup:
    """A sentence with its --options, and parts `between backticks`, set as code; names keep their direction."""
    escaped = str(escape(_readable(text, _SENTENCE)))
    coded = _CODE.sub(lambda found: f"<code>{found[1] or found[2]}</code>", escaped)
    return Markup(_NAME.sub(r"&#39;<bdi>\1</bdi>&#39;", coded))


def _in_script(text: str) -> Markup:
    """JSON that cannot end its element: `<`, `>` and `&` occur in strings only, and are escaped there."""
    return Markup(functools.reduce(lambda done, c: done.replace(c, f"\\u{ord(c):04x}"), "<>&", text))
