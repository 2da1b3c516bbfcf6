"""The frame of a report: one HTML file that needs no network, no script and no font, and the parts that fill it.

A page is read on a phone, on paper and in the dark. Text is escaped on its way in; only `Markup` is taken as it is.
The record that a page was made of stands in it as JSON, in the element `record`, for programs.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import importlib.resources
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from brimful.core.errors import printable
from brimful.core.records import json_text

#: Longest text that a page repeats where it is not asked to show all of it.
_LONGEST = 1000
_CODE = re.compile(r"`([^`]+)`|(?<![\w-])(--[a-z][a-z-]*[a-z])")
#: The browser is told as well that nothing is to be fetched and nothing to be run.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Markup:
    """HTML that is ready: what the functions here return."""

    html: str


Content = str | Markup


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page under a heading of its own. One without parts is left out."""

    title: str
    parts: tuple[Markup, ...]


@dataclass(frozen=True)
class Fact:
    """A row of `facts`. A value of None is unknown, and the row is left out. note: smaller, under the value."""

    name: Content
    value: Content | None
    note: Content | None = None


@dataclass(frozen=True)
class Tile:
    """One key figure of `tiles`. A value of None is unknown, and the tile is left out."""

    name: str
    value: str | None
    note: str = ""


def page(
    *, kind: str, title: str, summary: Content, opening: Sequence[Markup], sections: Sequence[Section], record: Any
) -> str:
    """A whole document.

    kind: what is reported, a word or two above the title. summary: a sentence below it. opening: parts before the first
    heading: warnings, key figures. record: a dataclass of JSON's kinds, embedded.
    Raises: ValueError for a record with a number that JSON does not have.
    """
    style = importlib.resources.files("brimful.reports").joinpath("page.css").read_text(encoding="utf-8")
    body = [_html(part) for part in opening if part.html]
    body += [_section(section) for section in sections if any(part.html for part in section.parts)]
    return "\n".join([
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="color-scheme" content="light dark">', '<meta name="generator" content="brimful">',
        f"<title>{_html(title)}</title>", f"<style>\n{style}</style>", "</head>", "<body>",
        f'<header><p class="kind">{_html(kind)}</p><h1>{_html(title)}</h1><p>{_html(summary)}</p></header>',
        "<main>", *body, "</main>",
        "<footer><p>Made by brimful. The record behind this page stands in it as JSON, in the element"
        " <code>record</code>.</p></footer>",
        f'<script type="application/json" id="record">{_embedded(record)}</script>',
        "</body>", "</html>", "",
    ])  # fmt: skip


def tiles(figures: Sequence[Tile]) -> Markup:
    """Key figures side by side, as many in a row as fit."""
    known = [
        f"<div><dt>{_html(tile.name)}</dt><dd>{_html(tile.value)}{_small(tile.note)}</dd></div>"
        for tile in figures
        if tile.value is not None
    ]
    return Markup(f'<dl class="tiles">{"".join(known)}</dl>' if known else "")


def facts(rows: Sequence[Fact]) -> Markup:
    """Names and their values, one below the other."""
    known = [
        f'<tr><th scope="row">{_html(fact.name)}</th><td>{_html(fact.value)}{_small(fact.note)}</td></tr>'
        for fact in rows
        if fact.value is not None
    ]
    return Markup(f'<table class="facts"><tbody>{"".join(known)}</tbody></table>' if known else "")


def table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[Content]], *, numeric: Collection[int] = ()
) -> Markup:
    """A plain table; the first cell of a row is its heading. One that is too wide scrolls in itself.

    numeric: numbers of the columns that are set to the right.
    """
    if not rows:
        return Markup("")
    kinds = [' class="number"' if i in numeric else "" for i in range(len(columns))]
    head = "".join(f'<th scope="col"{k}>{_html(name)}</th>' for name, k in zip(columns, kinds, strict=True))
    body = "".join(_row(row, kinds) for row in rows)
    return Markup(
        f'<div class="scroll" role="region" tabindex="0" aria-label="{_html(caption)}"><table>'
        f"<caption>{_html(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(row: Sequence[Content], kinds: Sequence[str]) -> str:
    first, *others = [f"{kind}>{_html(cell)}" for cell, kind in zip(row, kinds, strict=True)]
    return f'<tr><th scope="row"{first}</th>{"".join(f"<td{cell}</td>" for cell in others)}</tr>'


def figure(chart: Markup, caption: Content, *details: Markup) -> Markup:
    """A chart with what it says in words. details: what can be unfolded below these, such as its numbers."""
    below = "".join(detail.html for detail in details)
    return Markup(f"<figure>{chart.html}<figcaption><p>{_html(caption)}</p>{below}</figcaption></figure>")


def side_by_side(*parts: Markup) -> Markup:
    """Parts beside one another where there is room, else below one another."""
    shown = "".join(f"<div>{part.html}</div>" for part in parts if part.html)
    return Markup(f'<div class="beside">{shown}</div>' if shown else "")


def folded(summary: str, *parts: Markup) -> Markup:
    """Parts that show when they are asked for."""
    shown = "".join(part.html for part in parts)
    return Markup(f"<details><summary>{_html(summary)}</summary>{shown}</details>" if shown else "")


def paragraph(text: Content) -> Markup:
    """A paragraph of prose."""
    return Markup(f"<p>{_html(text)}</p>")


def note(text: Content) -> Markup:
    """Something good to know, set apart."""
    return Markup(f'<p class="note">{_html(text)}</p>')


def warning(text: Content) -> Markup:
    """Something lost, skipped or fallen back on, which no reader should miss."""
    return Markup(f'<p class="warning" role="note"><strong>Warning</strong> {_html(text)}</p>')


def code(text: str) -> Markup:
    """A command, in full, which can be copied."""
    return Markup(f"<pre><code>{html.escape(printable(text, 100_000))}</code></pre>")


def prose(text: str) -> Markup:
    """Text with its --options, and what stands `between backticks`, set as code."""
    return Markup(_CODE.sub(lambda found: f"<code>{found[1] or found[2]}</code>", _escaped(text, 2000)))


def sentence(*pieces: Content) -> Markup:
    """Text and markup, one after the other."""
    return Markup("".join(_html(piece) for piece in pieces))


def isolated(text: str, limit: int = _LONGEST) -> Markup:
    """A name that the user gave, whose direction of writing does not carry over to what stands beside it."""
    return Markup(f"<bdi>{html.escape(printable(text, limit))}</bdi>")


def _html(content: Content | None) -> str:
    """Text escaped: neither markup, nor anything that a browser or an editor would obey."""
    if isinstance(content, Markup):
        return content.html
    return _escaped(content or "", _LONGEST)


def _escaped(text: str, limit: int) -> str:
    """Text with its numbers kept on one line with their per cent."""
    return html.escape(printable(text, limit)).replace(" %", "\u00a0%")


def _small(content: Content | None) -> str:
    return f" <small>{_html(content)}</small>" if content else ""


def _section(section: Section) -> str:
    parts = "\n".join(part.html for part in section.parts if part.html)
    return f"<section>\n<h2>{_html(section.title)}</h2>\n{parts}\n</section>"


def _embedded(record: Any) -> str:
    """JSON that cannot end the element it stands in: these three characters are in strings only."""
    text = json_text(dataclasses.asdict(record))
    return functools.reduce(lambda done, c: done.replace(c, f"\\u{ord(c):04x}"), "<>&", text)
