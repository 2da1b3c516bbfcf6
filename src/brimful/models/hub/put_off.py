"""Imports that transformers makes and a text classifier has no use for, put off until somebody calls what they bring.

transformers 5.17 imports scikit-learn for one function of assisted generation and scipy's optimizers for losses of
object detection, and reads the list of files of every package that is installed: two seconds of a start of six
(benchmarks/startup). Later versions put off the first and the last themselves.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

#: By module: the functions that transformers takes from it as it is imported.
_FUNCTIONS = {"sklearn.metrics": ("roc_curve",), "scipy.optimize": ("linear_sum_assignment",)}
#: Packages that several distributions bring.
_SHARED = frozenset({"flash_attn", "flash_attn_interface"})


@contextmanager
def put_off() -> Iterator[None]:
    """Within, stand-ins are imported for these functions, and packages are looked up by name.

    A stand-in imports the function when it is called. Afterwards every import is the plain one again.
    """
    stand_ins = [_Module(name) for name in _FUNCTIONS if name not in sys.modules and _is_installed(name)]
    plain = importlib.metadata.packages_distributions
    try:
        sys.modules.update({module.__name__: module for module in stand_ins})
        importlib.metadata.packages_distributions = lambda: _Distributions(plain)
        yield
    finally:
        importlib.metadata.packages_distributions = plain
        for module in stand_ins:
            module.make_way()


def _is_installed(name: str) -> bool:
    return find_spec(name.partition(".")[0]) is not None


class _Module(ModuleType):
    """A stand-in for a module with stand-ins for the functions asked of it; with any other name the module itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        for function in _FUNCTIONS[name]:
            setattr(self, function, _later(name, function))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by the import system, of what a module may lack
            raise AttributeError(name)
        self.make_way()
        return getattr(import_module(self.__name__), name)

    def make_way(self) -> None:
        """Let the next import find the module itself."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


def _later(module: str, name: str) -> Callable[..., Any]:
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name)(*args, **kwargs)

    return stand_in


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
        if package not in _SHARED and "_all" not in vars(self):
            with suppress(importlib.metadata.PackageNotFoundError):
                return [importlib.metadata.distribution(package).metadata["Name"]]
        return self._all[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)
