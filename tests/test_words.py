"""Words: docstrings open with a noun or a verb, use the field's terms, and name files that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import brimful as package

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Docstrings do not open with these.
OPENING = re.compile(r"(What|Which|Whether|How|Where|That)\b")
#: Home-made words, as whole words, and the terms of the field to use.
BANNED = {
    r"whereabouts": "resolve",
    r"intakes?": "inspection",
    r"chatter": "logging",
    r"befall\w*|befell": "happen",
    r"kin": "wider types",
    r"proofs?|proved": "equivalence check",
    r"parity": "equivalence",
    r"plain twins?": "reference",
    r"fleet": "GPU workers",
    r"anatomy of a": "model_stats, profile",
    r"specimens?": "check inputs",
    r"tally|tallies": "counts",
    r"culprits?": "bad samples",
    r"hears what": "receives",
    r"as good as": "the same as",
    r"journal": "write-ahead log",
    r"is trusted": "is verified",
}


@cache
def read(source: Path) -> str:
    return source.read_text(encoding="utf-8")


@cache
def docstrings(source: Path) -> list[tuple[int, str]]:
    return list(_docstrings(source))


def _docstrings(source: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring of a file, those under fields included."""
    within: list[ast.AST] = [ast.parse(read(source))]
    while within:  # blocks alone: expressions hold no docstrings
        node = within.pop()
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, ())
            within.extend(inner if isinstance(inner, list) else ())
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for place, statement in enumerate(body):
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
                continue
            text = statement.value.value
            after_field = place > 0 and isinstance(body[place - 1], ast.AnnAssign)
            if isinstance(text, str) and ((documented and place == 0) or after_field):
                yield statement.lineno, text


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_docstrings_open_with_a_noun_or_a_verb() -> None:
    quoted = re.compile(rf"[\"']\s*{OPENING.pattern}")
    assert not [
        f"{named(source)}:{line}: {text[:60]}"
        for source in [*SOURCES, *TESTS]
        if quoted.search(read(source))
        for line, text in docstrings(source)
        if OPENING.match(text)
    ]


def test_terms_are_those_of_the_field() -> None:
    """In src also within identifiers; in tests those of docstrings."""
    banned = re.compile(rf"\b(?:{'|'.join(BANNED)})\b")
    found = [
        (named(source), match[0])
        for source in [*SOURCES, *TESTS, *TEXTS]
        if banned.search(read(source).replace("_", " ").lower())  # before its docstrings are looked for
        for match in banned.finditer(words_of(source).lower())
    ]
    assert not found, "the field's terms are in BANNED"


def words_of(source: Path) -> str:
    if source in TESTS:
        return "\n".join(docstring for _, docstring in docstrings(source))
    return read(source).replace("_", " ") if source in SOURCES else read(source)


def test_paths_that_are_named_exist() -> None:
    path = re.compile(r"(?<![\w./-])(?:benchmarks|docs|tests)/[\w./-]*\w")
    assert not [
        (named(source), found)
        for source in SOURCES
        for found in path.findall(read(source))
        if not (ROOT / found).exists()
    ]


def test_public_names_have_docstrings() -> None:
    assert not [name for name in package.__all__ if not (getattr(package, name).__doc__ or "").strip()]
