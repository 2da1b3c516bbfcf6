"""The frame: whole, escaped, and without anything that a browser would fetch or run."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.reports.page import (
    Fact,
    Markup,
    Section,
    Tile,
    code,
    facts,
    figure,
    folded,
    isolated,
    note,
    page,
    paragraph,
    prose,
    sentence,
    side_by_side,
    table,
    tiles,
    warning,
)
from pages import Page

HOSTILE = "</script><script>alert('x')</script><!-- & \"quoted\" \x1b[31m \x00 \u202e \ud800 \u2028 ]]>"


@dataclass(frozen=True)
class Record:
    name: str
    number: float | None = None


def whole(*parts: Markup, record: Record | None = None) -> Page:
    sections = (Section(title=HOSTILE, parts=parts), Section(title="left out", parts=(Markup(""),)))
    found = Page(
        page(kind=HOSTILE, title=HOSTILE, summary=HOSTILE, opening=(), sections=sections, record=record or Record("x"))
    )
    found.check()
    return found


def test_every_part_shows_hostile_text_as_text() -> None:
    said = HOSTILE
    found = whole(
        tiles([Tile(said, said, said)]),
        facts([Fact(said, said, said)]),
        table(said, (said, said), [(said, isolated(said))], numeric={1}),
        figure(Markup("<svg role='img' aria-label='a'></svg>"), said, folded(said, paragraph(said))),
        side_by_side(note(said), warning(said)),
        paragraph(sentence(said, prose(said))),
        code(said),
    )
    shown = "</script><script>alert('x')</script><!-- & \"quoted\" \\x1b[31m \\x00 \\u202e \\ud800 \\u2028 ]]>"
    assert found.text.count(shown) == 24
    assert not any(c in found.document for c in "\x00\x1b\u202e\u2028")


def test_the_record_can_be_read_back_and_cannot_end_its_element() -> None:
    record = Record(HOSTILE + "<!--<script>")
    found = whole(paragraph("a"), record=record)
    assert found.record == {"name": record.name, "number": None}
    assert found.document.count("</script") == 1
    assert "<!--" not in found.document.removeprefix("<!doctype html>")


def test_what_is_unknown_is_left_out() -> None:
    assert facts([Fact("a", None)]).html == ""
    assert tiles([Tile("a", None)]).html == ""
    assert table("a", ("a",), []).html == ""
    assert side_by_side(Markup("")).html == ""
    assert folded("a", Markup("")).html == ""
    found = whole(facts([Fact("known", "1"), Fact("unknown", None)]))
    assert "unknown" not in found.text
    assert "left out" not in found.text


def test_options_in_prose_are_code() -> None:
    assert prose("too long (--max-length), see `error`; a--b <b>").html == (
        "too long (<code>--max-length</code>), see <code>error</code>; a--b &lt;b&gt;"
    )


def test_a_page_says_that_nothing_may_be_fetched() -> None:
    policy = next(meta for meta in whole().all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"
