"""A page as a reader finds it: parsed strictly, so that what a browser would mend is a failure here."""

from __future__ import annotations

import itertools
import json
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

_VOID = {"meta", "link", "br", "hr", "img", "input"}
#: Attributes that make a browser fetch or run something.
_FETCHES = {"src", "srcset", "data", "action", "formaction", "poster", "background", "ping", "manifest"}


class Page(HTMLParser):
    """Elements, attributes and text of a document.

    text: all that can be read. charts: the SVGs, parsed as XML. record: what is embedded.
    """

    def __init__(self, document: str) -> None:
        super().__init__(convert_charrefs=True)
        self.document = document
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.script = ""
        self.style = ""
        self._open: list[str] = []
        document.encode()  # UTF-8 can hold it
        self.feed(document)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute stands twice: {attrs}"
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["script"]:
            self.script += data
        elif self._open[-1:] == ["style"]:
            self.style += data
        else:
            self.text += data.replace("\N{NO-BREAK SPACE}", " ")

    @property
    def record(self) -> Any:
        return json.loads(self.script)

    @property
    def charts(self) -> list[ElementTree.Element]:
        starts = [i for i in range(len(self.document)) if self.document.startswith("<svg", i)]
        return [ElementTree.fromstring(self.document[i : self.document.index("</svg>", i) + 6]) for i in starts]

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def check(self) -> None:
        """Check that it is self-contained, runs nothing, and can be read by everyone."""
        scripts = self.all("script")
        assert [script.get("type") for script in scripts] == ["application/json"]
        assert "url(" not in self.style
        assert "@import" not in self.style
        ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]
        assert len(set(ids)) == len(ids)
        for tag, attributes in self.elements:
            assert tag not in {"iframe", "object", "embed", "base", "link", "img", "form", "foreignobject"}
            for name, value in attributes.items():
                assert name not in _FETCHES
                assert not name.startswith("on"), f"{tag} would run {value}"
                assert name != "href" or (value or "").startswith("#")
                assert name == "xmlns" or "//" not in (value or "") or name in {"aria-label"}
        assert self.all("html") == [{"lang": "en"}]
        assert all(cell.get("scope") in {"row", "col"} for cell in self.all("th"))
        assert all(chart.get("role") == "img" and chart.get("aria-label") for chart in self.all("svg"))
        headings = [int(tag[1]) for tag, _ in self.elements if tag in {"h1", "h2", "h3", "h4"}]
        assert headings[0] == 1
        assert headings.count(1) == 1
        assert all(later <= before + 1 for before, later in itertools.pairwise(headings))
