"""The work of each command: options and terminal to the text for stdout, or None. Importing it loads torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from brimful.api import run_classification, run_training, summary_json
from brimful.cli.demo import run_demo
from brimful.core.options import ClassifyOptions, DemoOptions, ProfileOptions, TrainOptions
from brimful.core.records import to_json
from brimful.engine.profiling.profile import profile
from brimful.reports.classification_text import classification_text
from brimful.reports.profile_text import profile_text
from brimful.reports.terminal import Terminal


def _train(options: TrainOptions, terminal: Terminal) -> str | None:
    run = run_training(options, terminal)
    return summary_json(run) if options.json else None


def _classify(options: ClassifyOptions, terminal: Terminal) -> str | None:
    record = run_classification(options, terminal, sys.stdout)
    terminal.text(classification_text(record))
    return to_json(record) if options.json and options.output is not None else None


def _profile(options: ProfileOptions, terminal: Terminal) -> str:
    record = profile(options, terminal)
    return to_json(record) if options.json else profile_text(record)


def _demo(options: DemoOptions, terminal: Terminal) -> str | None:
    run = run_demo(options, terminal)
    return summary_json(run) if options.json else None


ACTIONS: Mapping[str, Callable[[Any, Terminal], str | None]] = {
    "train": _train,
    "classify": _classify,
    "profile": _profile,
    "demo": _demo,
}
