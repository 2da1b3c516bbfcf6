"""A pytest plugin: transformers' own tests of its Trainer, with `brimful.Trainer` in its place.

BRIMFUL_SIDE: `brimful`, or `stock` for transformers' Trainer. BRIMFUL_MODEL: `classifier` puts a tiny BERT classifier
and rows of tokens in the place of the tests' own regression model of two numbers, which is none; `upstream` leaves it.
Appends a JSON line per test to BRIMFUL_TESTS_LOG: what became of it, and whose training step ran.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

#: Names that older tests import and newer versions of transformers lack: tests that use one fail on both sides.
_GONE = ("GlueDataset", "GlueDataTrainingArguments")
_steps = {"brimful": 0, "trainer": 0}
_log = Path(os.environ["BRIMFUL_TESTS_LOG"])


def pytest_collection(session: Any) -> None:
    transformers = sys.modules["transformers"]  # which upstream's conftest has loaded anew
    for name in _GONE:
        if not hasattr(transformers, name):
            setattr(transformers, name, None)
    if os.environ["BRIMFUL_SIDE"] == "brimful":
        _put_ours(transformers)


def _put_ours(transformers: Any) -> None:
    import brimful

    transformers.Trainer = brimful.Trainer
    for name, whose in (("_gradients", "brimful"), ("_by_trainer", "trainer")):
        setattr(brimful.Trainer, name, _counted(getattr(brimful.Trainer, name), whose))


def _counted(method: Any, whose: str) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        _steps[whose] += 1
        return method(*args, **kwargs)

    return call


def pytest_collection_modifyitems(items: list[Any]) -> None:
    if os.environ["BRIMFUL_MODEL"] != "classifier":
        return
    import stand_ins

    for module in {item.module for item in items}:
        stand_ins.put_in(module)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    _steps.update(brimful=0, trainer=0)
    return (yield)


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        said = report.longrepr
        reason = said[2] if isinstance(said, tuple) else getattr(getattr(said, "reprcrash", None), "message", None)
        record = {
            "test": report.nodeid,
            "when": report.when,
            "outcome": report.outcome,
            "reason": None if reason is None else str(reason)[:400],
            "steps": dict(_steps),
            "seconds": round(report.duration, 2),
        }
        with _log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")
