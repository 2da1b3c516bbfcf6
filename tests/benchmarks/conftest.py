"""Modules that lie beside a benchmark's script. Several benchmarks have some of the same name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

Load = Callable[..., dict[str, ModuleType]]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """load(folder, *names) imports modules as the folder's script does; they are forgotten when the test is over."""
    before = set(sys.modules)

    def loaded(folder: str, *names: str) -> dict[str, ModuleType]:
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.syspath_prepend(str(BENCHMARKS / folder))
        return {name: importlib.import_module(name) for name in names}

    yield loaded
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(BENCHMARKS):
            del sys.modules[name]
