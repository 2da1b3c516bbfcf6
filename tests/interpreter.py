"""Triton's interpreter, without what it does over and over for nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

from triton.runtime import interpreter

_prepared: set[str] = set()


def _call(function: Any, *arguments: Any, **named: Any) -> Any:
    """A device function. The language is replaced at a module's first call, not looked through at every one."""
    if function.fn.__module__ not in _prepared:
        interpreter._patch_lang(function.fn)
        _prepared.add(function.fn.__module__)
    return function.rewrite()(*arguments, **named)


def make_quick() -> None:
    """Kernels take a third less time, and give the same bits."""
    interpreter.InterpretedFunction.__call__ = _call
    # Sums and products of integers are computed again in 64 bits for an assertion that is never made.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
