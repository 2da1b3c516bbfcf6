"""The frame: whole, escaped, and without anything that a browser would fetch or run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from brimful.reports.classification_page import classification_page
from brimful.reports.page import environment, render
from classifications import RECORD
from pages import Page

HOSTILE = "</script><script>alert('x')</script><!-- & \"quoted\" \x1b[31m \x00 \u202e \ud800 \u2028 ]]>"


ENVIRONMENT = environment()
PARTS: Any = ENVIRONMENT.get_template("parts.html.j2").module
PAGE = """{% extends "page.html.j2" %}{% from "parts.html.j2" import section %}
{% block kind %}{{ text }}{% endblock %}{% block title %}{{ text }}{% endblock %}
{% block summary %}{{ text }}{% endblock %}{% block content %}
{% call section(text) %}{{ part }}{% endcall %}{% call section("left out") %} {% endcall %}{% endblock %}"""


def whole(part: object) -> Page:
    found = Page(ENVIRONMENT.from_string(PAGE).render(text=HOSTILE, part=part, embedded_record=Markup("{}")))
    found.check()
    return found


def test_every_part_shows_hostile_text_as_text() -> None:
    said = HOSTILE
    drawn = {"drawing": Markup("<svg role='img' aria-label='a'></svg>"), "caption": said, "title": said}
    parts = [
        PARTS.tiles([(said, said, said)]),
        PARTS.facts([(said, said, said), (said, PARTS.user_text(said), None)]),
        PARTS.table(said, (said, said), [(said, said)]),
        PARTS.figure(drawn | {"columns": (said, said), "rows": [(said, said)]}),
        PARTS.side_by_side([PARTS.note(said), PARTS.warning(said)]),
        PARTS.code(said),
    ]
    found = whole(Markup("").join(parts))
    shown = "</script><script>alert('x')</script><!-- & \"quoted\" \\x1b[31m \\x00 \\u202e \\ud800 \\u2028 ]]>"
    assert found.text.count(shown) == 5 + 3 + 5 + 5 + 6 + 3
    assert not any(c in found.document for c in "\x00\x1b\u202e\u2028")


def test_cells_with_a_word_that_no_line_has_room_for_are_marked() -> None:
    """On paper such a word is broken; a number never is."""
    word = "w" * 17
    table = whole(PARTS.table("a", ("", word, "b"), [("c", f"two {word}", "of so many short words")]))
    assert [each.get("class") for each in table.all("td")] == ["long", None]
    assert [each.get("class") for each in table.all("th")] == [None, "long", None, None]
    numbers = whole(PARTS.table("a", ("", word), [("c", word)], True))
    assert [each.get("class") for each in numbers.all("td")] == ["number"]


def test_names_in_a_sentence_keep_their_direction() -> None:
    """Two of them beside one another would swap places, and their quotes."""
    found = whole(PARTS.warning("never predicted: 'left', 'שלום', 'عربي 12' <b>, it's --new-head"))
    assert (
        "&#39;left&#39;, &#39;<bdi>שלום</bdi>&#39;, &#39;<bdi>عربي 12</bdi>&#39; &lt;b&gt;, it&#39;s" in found.document
    )


def test_the_record_can_be_read_back_and_cannot_end_its_element() -> None:
    hostile = dataclasses.replace(RECORD, model=HOSTILE + "<!--<script>")
    document = classification_page(hostile)
    found = Page(document)
    assert found.record["model"] == hostile.model
    assert document.count("</script") == 1
    assert "<!--" not in document.removeprefix("<!doctype html>")


def test_a_name_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'headline' is undefined"):
        render("classification.html.j2", RECORD, source="a")


def test_what_is_unknown_is_left_out() -> None:
    assert not PARTS.facts([("a", None, None)]).strip()
    assert not PARTS.tiles([("a", None, None)]).strip()
    assert not PARTS.table("a", ("a",), []).strip()
    assert not PARTS.figure(None).strip()
    assert not PARTS.side_by_side(["", Markup(" ")]).strip()
    assert not PARTS.folded("a", Markup("")).strip()
    found = whole(PARTS.facts([("known", "1", None), ("unknown", None, "a note")]))
    assert "known" in found.text
    assert "unknown" not in found.text
    assert "left out" not in found.text


def test_options_in_prose_are_code() -> None:
    assert "too long (<code>--max-length</code>), see <code>error</code>; a--b &lt;b&gt;" in PARTS.note(
        "too long (--max-length), see `error`; a--b <b>"
    )


def test_a_page_says_that_nothing_may_be_fetched() -> None:
    policy = next(meta for meta in whole("").all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"
