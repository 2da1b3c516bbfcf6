"""Imports that transformers makes and a text classifier has no use for, put off until somebody calls what they bring.

transformers 5.17 imports scikit-learn for one function of assisted generation and scipy's optimizers for losses of
object detection, and reads the list of files of every package that is installed: a quarter of a start
(benchmarks/startup). Later versions put off the first and the last themselves.
"""

from __future__ import annotations

import builtins
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib import import_module
from types import SimpleNamespace
from typing import Any

#: By module: the functions that transformers takes from it as it is imported.
_FUNCTIONS = {"sklearn.metrics": {"roc_curve"}, "scipy.optimize": {"linear_sum_assignment"}}
#: Packages that several distributions bring.
_SHARED = frozenset({"flash_attn", "flash_attn_interface"})


@contextmanager
def put_off() -> Iterator[None]:
    """Within, what transformers' modules import of these functions is a stand-in, which imports the function when it is
    called. Every other import, whoever makes it, is the plain one."""
    plain = builtins.__import__

    def import_or_put_off(
        name: str, globals: Mapping[str, Any] | None = None, locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (), level: int = 0,
    ) -> Any:  # fmt: skip
        wanted = _FUNCTIONS.get(name)
        if wanted is None or level or not fromlist or not wanted.issuperset(fromlist) or name in sys.modules:
            return plain(name, globals, locals, fromlist, level)
        if not str((globals or {}).get("__name__")).startswith("transformers."):
            return plain(name, globals, locals, fromlist, level)
        return SimpleNamespace(**{function: _later(name, function) for function in fromlist})

    builtins.__import__ = import_or_put_off
    try:
        yield
    finally:
        builtins.__import__ = plain


def _later(module: str, name: str) -> Callable[..., Any]:
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name)(*args, **kwargs)

    return stand_in


@contextmanager
def found_by_name() -> Iterator[None]:
    """Within, `importlib.metadata.packages_distributions` reads no package's files before a name needs them."""
    plain = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = lambda: _Distributions(plain)
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = plain


class _Distributions(Mapping[str, list[str]]):
    """The distributions that bring each package, as `importlib.metadata.packages_distributions` has them.

    Most are called as their package is, and found by that name; for the rest every file of every distribution counts.
    """

    def __init__(self, find_all: Callable[[], Mapping[str, list[str]]]) -> None:
        self._find_all = find_all

    @cached_property
    def _all(self) -> Mapping[str, list[str]]:
        return self._find_all()

    def __getitem__(self, package: str) -> list[str]:
        if package.isidentifier() and package not in _SHARED and "_all" not in vars(self):
            with suppress(importlib.metadata.PackageNotFoundError):
                return [importlib.metadata.distribution(package).metadata["Name"]]
        return self._all[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)
