"""Local files, offline metrics and arguments of each example script, and the lines that brimful changes in it."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("examples/pytorch/text-classification")
#: Rows of each split.
_ROWS = {"train": 480, "validation": 200, "test": 100}


@dataclass(frozen=True, kw_only=True)
class Work:
    """A script and how it is called. data: name of its files. metric: of those that it evaluates, compared by seeds.

    uses_trainer: whether it trains by transformers' Trainer, or by a loop of its own.
    """

    script: str
    data: str
    metric: str
    arguments: tuple[str, ...]
    uses_trainer: bool = True


_BY_TRAINER = (
    *("--do_train", "--do_eval", "--do_predict", "--report_to", "none", "--logging_steps", "5", "--use_cpu", "True"),
    *("--per_device_train_batch_size", "16", "--learning_rate", "1e-4", "--disable_tqdm", "True"),
)
WORKS = {
    # Rows padded to max_seq_length by the script, which is its default; plain defaults of Trainer.
    "glue": Work(
        script="run_glue.py",
        data="tweets",
        metric="eval_accuracy",
        arguments=(*_BY_TRAINER, "--max_seq_length", "64", "--num_train_epochs", "2", "--save_strategy", "no"),
    ),
    # Rows padded by batch; evaluated and saved during training; the best model at the end.
    "classification": Work(
        script="run_classification.py",
        data="bbc",
        metric="eval_accuracy",
        arguments=(
            *_BY_TRAINER,
            *("--max_seq_length", "64", "--pad_to_max_length", "False", "--num_train_epochs", "2"),
            *("--eval_strategy", "epoch", "--save_strategy", "epoch", "--load_best_model_at_end", "True"),
            *("--metric_for_best_model", "accuracy", "--text_column_names", "sentence"),
        ),
    ),
    "regression": Work(
        script="run_classification.py",
        data="lengths",
        metric="eval_mse",
        arguments=(
            *_BY_TRAINER,
            *("--max_seq_length", "64", "--pad_to_max_length", "False", "--num_train_epochs", "2"),
            *("--do_regression", "True", "--eval_strategy", "steps", "--eval_steps", "20", "--save_steps", "20"),
            *("--save_total_limit", "1", "--warmup_steps", "5", "--weight_decay", "0.01"),
        ),
    ),
    "no_trainer": Work(
        script="run_glue_no_trainer.py",
        data="tweets",
        metric="eval_accuracy",
        arguments=(
            *("--max_length", "64", "--per_device_train_batch_size", "16", "--learning_rate", "1e-4"),
            *("--num_train_epochs", "2", "--checkpointing_steps", "epoch"),
        ),
        uses_trainer=False,
    ),
}


def make_files(folder: Path, share: float = 1.0) -> None:
    """Write train, validation and test files of each data set: `sentence` and `label`, JSON lines.

    share: of the rows that there are otherwise.
    """
    from brimful.data.readers.packaged import bbc_news, tweets

    folder.mkdir(parents=True, exist_ok=True)
    texts = [{"text": " ".join(row["text"].split()), "label": row["label"]} for row in tweets()]
    lengths = [{"text": row["text"], "label": round(math.log(len(row["text"].split())), 3)} for row in texts]
    for name, rows in {"tweets": texts, "bbc": bbc_news(), "lengths": lengths}.items():
        counts = {split: round(share * count) for split, count in _ROWS.items()}
        rows = random.Random(0).sample(rows, sum(counts.values()))
        start = 0
        for split, count in counts.items():
            part = rows[start : start + count]
            start += count
            text = "".join(json.dumps({"sentence": row["text"], "label": row["label"]}) + "\n" for row in part)
            (folder / f"{name}-{split}.json").write_text(text, "utf-8")


#: `evaluate.load("accuracy")` finds the folder `accuracy` where it is called, and asks no hub.
_METRIC = """
import datasets
import evaluate
import numpy as np


class Metric(evaluate.Metric):
    def _info(self):
        numbers = datasets.Features(dict.fromkeys(("predictions", "references"), datasets.Value("{dtype}")))
        return evaluate.MetricInfo(description="{name}", citation="", inputs_description="", features=numbers)

    def _compute(self, predictions, references):
        found, expected = np.asarray(predictions), np.asarray(references)
        return {{"{name}": float({value})}}
"""
_METRICS = {
    "accuracy": ("int32", "(found == expected).mean()"),
    "mse": ("float32", "((found - expected) ** 2).mean()"),
}


def make_metrics(folder: Path) -> None:
    """Write the metrics that the scripts load by name."""
    for name, (dtype, value) in _METRICS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / f"{name}.py").write_text(_METRIC.format(name=name, dtype=dtype, value=value), "utf-8")


def changed(text: str, *, uses_trainer: bool) -> tuple[str, list[str]]:
    """Return a script with brimful in it, and its changed lines as of a diff.

    Raises: ValueError if a line that is to change is not there once.
    """
    lines = text.split("\n")
    if uses_trainer:
        at = _only(lines, r"^    Trainer,$")
        lines[at : at + 1] = []
        first = _only(lines, r"^import transformers$")
        lines.insert(first, "from brimful import Trainer")
        return "\n".join(lines), ["-    Trainer,", "+from brimful import Trainer"]
    start = _only(lines, r"^    model = AutoModelForSequenceClassification\.from_pretrained\($")
    end = lines.index("    )", start)
    lines.insert(end + 1, "    model = brimful.packed(model)")
    lines.insert(_only(lines, r"^import transformers$"), "import brimful")
    return "\n".join(lines), ["+import brimful", "+    model = brimful.packed(model)"]


def _only(lines: list[str], pattern: str) -> int:
    found = [number for number, line in enumerate(lines) if re.match(pattern, line)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} lines of the script are {pattern}")
    return found[0]
