"""Fine-tune and run Hugging Face text classifiers with the GPU filled to the brim, without changing what they learn.

    import brimful

    run = brimful.train("reviews.csv", model="bert-base-uncased", output="run")
    print(run.metrics["accuracy"])

Importing loads neither torch nor transformers: each public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brimful.api import Classifier, bench, classify, evaluate, export, profile, train
    from brimful.comparison.compare import compare
    from brimful.core.bench import Bench
    from brimful.core.callbacks import FindingWarning
    from brimful.core.classification import Classification
    from brimful.core.comparison import Comparison
    from brimful.core.errors import (
        BrimfulError,
        CheckpointError,
        DataError,
        DeviceError,
        DiskFullError,
        InputError,
        Interrupted,
        ModelError,
        NonFiniteError,
        OptionError,
        OutputError,
    )
    from brimful.core.evaluation import Evaluation
    from brimful.core.options.bench import BenchOptions
    from brimful.core.options.classify import ClassifyOptions
    from brimful.core.options.evaluate import EvaluateOptions
    from brimful.core.options.train import TrainOptions
    from brimful.core.profile import Profile
    from brimful.core.records import Run
    from brimful.data.batches.batch import Batch
    from brimful.drop_in.estimator import TextClassifier
    from brimful.drop_in.pipelines import pipeline
    from brimful.integrations.custom_loop import Feed, Step
    from brimful.integrations.packed import packed
    from brimful.integrations.trainer import Trainer
    from brimful.reports.write import report

__version__ = "0.1.0"

_ERRORS = "brimful.core.errors"
_PUBLIC = {
    "Batch": "brimful.data.batches.batch",
    "Bench": "brimful.core.bench",
    "BenchOptions": "brimful.core.options.bench",
    "BrimfulError": _ERRORS,
    "CheckpointError": _ERRORS,
    "Classification": "brimful.core.classification",
    "Classifier": "brimful.api",
    "Comparison": "brimful.core.comparison",
    "ClassifyOptions": "brimful.core.options.classify",
    "DataError": _ERRORS,
    "DeviceError": _ERRORS,
    "DiskFullError": _ERRORS,
    "EvaluateOptions": "brimful.core.options.evaluate",
    "Evaluation": "brimful.core.evaluation",
    "Feed": "brimful.integrations.custom_loop",
    "FindingWarning": "brimful.core.callbacks",
    "InputError": _ERRORS,
    "Interrupted": _ERRORS,
    "ModelError": _ERRORS,
    "NonFiniteError": _ERRORS,
    "OptionError": _ERRORS,
    "OutputError": _ERRORS,
    "Profile": "brimful.core.profile",
    "Run": "brimful.core.records",
    "Step": "brimful.integrations.custom_loop",
    "TextClassifier": "brimful.drop_in.estimator",
    "TrainOptions": "brimful.core.options.train",
    "Trainer": "brimful.integrations.trainer",
    "bench": "brimful.api",
    "classify": "brimful.api",
    "compare": "brimful.comparison.compare",
    "evaluate": "brimful.api",
    "export": "brimful.api",
    "packed": "brimful.integrations.packed",
    "pipeline": "brimful.drop_in.pipelines",
    "profile": "brimful.api",
    "report": "brimful.reports.write",
    "train": "brimful.api",
}

__all__ = [
    "Batch",
    "Bench",
    "BenchOptions",
    "BrimfulError",
    "CheckpointError",
    "Classification",
    "Classifier",
    "ClassifyOptions",
    "Comparison",
    "DataError",
    "DeviceError",
    "DiskFullError",
    "EvaluateOptions",
    "Evaluation",
    "Feed",
    "FindingWarning",
    "InputError",
    "Interrupted",
    "ModelError",
    "NonFiniteError",
    "OptionError",
    "OutputError",
    "Profile",
    "Run",
    "Step",
    "TextClassifier",
    "TrainOptions",
    "Trainer",
    "bench",
    "classify",
    "compare",
    "evaluate",
    "export",
    "packed",
    "pipeline",
    "profile",
    "report",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'brimful' has no attribute {name!r}")
    state = random.getstate()  # from which rich draws as it is imported
    try:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    finally:
        random.setstate(state)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
