"""The work of each command: options and terminal to the text for stdout, or None. Importing it loads torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from brimful.api import run_classification, run_training, summary_json
from brimful.cli.demo import run_demo
from brimful.core.phases import Phases
from brimful.core.records import json_text, to_json
from brimful.engine.classification.gpu_process import GpuProcess
from brimful.engine.evaluation.run import run_evaluation
from brimful.engine.profiling.profile import profile
from brimful.engine.training.export import export as export_checkpoint
from brimful.reports.classification_text import classification_text, concerns
from brimful.reports.evaluation_text import evaluation_text
from brimful.reports.profile_text import profile_text
from brimful.reports.terminal import Terminal


def act(
    command: str, options: Any, terminal: Terminal, phases: Phases, processes: Sequence[GpuProcess] = ()
) -> str | None:
    """Do the work of a command. phases: of its process. processes: of GPUs beside the first, which have begun."""
    if command == "classify":
        answers = run_classification(options, terminal, sys.stdout, processes=processes)
        if options.quiet:
            for text in concerns(answers):
                terminal.warning(text)
        else:
            terminal.text(classification_text(answers, terminal.told))
        return to_json(answers) if options.json and options.output is not None else None
    if command == "evaluate":
        evaluation = run_evaluation(options, terminal, processes=processes)
        return to_json(evaluation) if options.json else evaluation_text(evaluation)
    if command == "export":
        folder = export_checkpoint(options, terminal)
        return json_text({"model": str(folder)}) if options.json else None
    if command == "profile":
        measured = profile(options, terminal)
        return to_json(measured) if options.json else profile_text(measured)
    run = run_demo(options, terminal) if command == "demo" else run_training(options, terminal, phases)
    return summary_json(run) if options.json else None
