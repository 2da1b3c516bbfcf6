"""Words: docstrings open with a noun or a verb, use the field's terms, and name files that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import brimful as package

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Docstrings do not open with these.
OPENING = re.compile(r"(What|Which|Whether|How|Where|That)\b")
#: Home-made words, and the terms of the field to use.
BANNED = {
    r"\bwhereabouts\b": "resolve",
    r"\bintakes?\b": "inspection",
    r"\bchatter\b": "logging",
    r"\bbefall|\bbefell\b": "happen",
    r"\bkin\b": "wider types",
    r"\bproofs?\b|\bproved\b": "equivalence check",
    r"\bparity\b": "equivalence",
    r"\bplain twins?\b": "reference",
    r"\bfleet\b": "GPU workers",
    r"\banatomy of a\b": "model_stats, profile",
    r"\bspecimens?\b": "check inputs",
    r"\btally\b|\btallies\b": "counts",
    r"\bculprits?\b": "bad samples",
    r"\bhears what\b": "receives",
    r"\bas good as\b": "the same as",
    r"\bjournal\b": "write-ahead log",
    r"\bis trusted\b": "is verified",
}


def docstrings(source: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring of a file, those under fields included."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
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


@pytest.mark.parametrize("source", [*SOURCES, *TESTS], ids=named)
def test_docstrings_open_with_a_noun_or_a_verb(source: Path) -> None:
    assert not [f"{source}:{line}: {text[:60]}" for line, text in docstrings(source) if OPENING.match(text)]


@pytest.mark.parametrize("source", [*SOURCES, *TESTS, *TEXTS], ids=named)
def test_terms_are_those_of_the_field(source: Path) -> None:
    """In src also within identifiers; in tests those of docstrings."""
    text = source.read_text(encoding="utf-8")
    if source in TESTS:
        text = "\n".join(docstring for _, docstring in docstrings(source))
    elif source in SOURCES:
        text = text.replace("_", " ")
    found = [(word, term) for word, term in BANNED.items() if re.search(word, text, re.IGNORECASE)]
    assert not found, "the field's terms are on the right"


@pytest.mark.parametrize("source", SOURCES, ids=named)
def test_paths_that_are_named_exist(source: Path) -> None:
    named_paths = re.findall(r"(?<![\w./-])(?:benchmarks|docs|tests)/[\w./-]*\w", source.read_text(encoding="utf-8"))
    assert not [path for path in named_paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("name", package.__all__)
def test_public_names_have_docstrings(name: str) -> None:
    assert (getattr(package, name).__doc__ or "").strip()
