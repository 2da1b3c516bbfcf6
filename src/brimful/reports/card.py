"""The model card of a saved classifier: its data, metrics and training, and the command that made it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from brimful.core.errors import printable
from brimful.core.records import Run, TrainedInputs
from brimful.core.units import count_text, number_text, seconds_text, share_text

_SHOWN_OPTIONS = (
    "batch_size", "learning_rate", "num_train_epochs", "max_steps", "lr_scheduler_type", "warmup_steps",
    "warmup_ratio", "optim", "weight_decay", "max_grad_norm", "label_smoothing_factor", "class_weights",
    "weight_column", "seed",
)  # fmt: skip


def model_card(run: Run, inputs: TrainedInputs) -> str:
    """The card of a finished run, as Markdown with the metadata block that the Hub reads. inputs: those of training."""
    metadata = "---\nlibrary_name: transformers\npipeline_tag: text-classification\ntags:\n- brimful\n---"
    sections = [metadata, _head(run, inputs), _metrics(run), _data(run, inputs), _training(run), _again(run)]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(run: Run, inputs: TrainedInputs) -> str:
    names = ", ".join(_code(name) for name in run.labels.names)
    task = {"single_label": "one of", "multi_label": "any of", "regression": "the number"}[run.labels.task]
    text = '"' + r"\n".join(f"text {number}" for number, _ in enumerate(_joined(run), 1)) + '"'
    kind, asked = "A text classifier", text if _joined(run) else '"a text"'
    if inputs.pair_column is not None:
        kind, asked = "A classifier of pairs of texts", f'{{"text": {asked}, "text_pair": "its pair"}}'
    use = (
        "from transformers import pipeline\n\n"
        'classify = pipeline("text-classification", model="path/to/this/folder", truncation=True)\n'
        f"classify({asked})\n```\n\n`truncation=True` cuts"
    )
    if run.options.get("peft") and not run.options.get("merge"):
        use = (
            "from peft import AutoPeftModelForSequenceClassification\n\n"
            "model = AutoPeftModelForSequenceClassification.from_pretrained(\n"
            f'    "path/to/this/folder", num_labels={run.labels.num_outputs}\n)\n```\n\n'
            "An adapter of the peft library, for the model named in adapter_config.json. The tokenizer's\n"
            "`truncation=True` cuts"
        )
    base = Path(run.model).name if Path(run.model).is_absolute() else run.model  # a place of this machine is no name
    return (
        f"# {_text(base)}, fine-tuned\n\n{kind} that answers {task} {names}. Fine-tuned from"
        f" {_code(base)} with brimful {run.machine.versions.get('brimful', '')}.\n\n"
        f"```python\n{use} texts at {inputs.max_length:,} tokens, as in training; `brimful classify` does so by"
        " itself."
    )


def _metrics(run: Run) -> str:
    if not run.metrics:
        return "## Metrics\n\nTrained on every row: nothing was held out to measure on."
    rows = "\n".join(f"| {name} | {number_text(value)} |" for name, value in run.metrics.items())
    held_out = run.data.get("eval_rows")
    return f"## Metrics\n\nOn {count_text(held_out)} held-out rows:\n\n| metric | value |\n|---|---|\n{rows}"


def _data(run: Run, inputs: TrainedInputs) -> str:
    truncated = share_text(run.data.get("truncated_share"))
    pair = "" if inputs.pair_column is None else f", its pair in {_code(inputs.pair_column)}"
    labels = ", ".join(_code(name) for name in inputs.label_columns)
    text = f"in column {_code(inputs.text_column)}"
    if joined := _joined(run):
        named = ", ".join(map(_code, joined))
        text = f"in columns {named}, joined by line breaks (a blank one is left out)"
    return (
        f"## Data\n\nThe text is {text}{pair}, the label in {labels}."
        f" {count_text(run.data.get('rows'))} training rows, sequences of at most "
        f"{run.data.get('max_length')} tokens ({truncated} truncated). Fingerprint (SHA-256 of the rows):"
        f" `{run.data_fingerprint}`."
    )


def _training(run: Run) -> str:
    over = {"num_train_epochs"} if run.options.get("max_steps") else set()
    used = dict(run.options)
    if run.learning is not None:
        used |= dataclasses.asdict(run.learning)
        used |= {"warmup_steps": run.learning.num_warmup_steps or None, "warmup_ratio": None}
    asked = {name: used.get(name) for name in _SHOWN_OPTIONS if name not in over}
    options = "\n".join(f"| {name} | {_text(value)} |" for name, value in asked.items() if value is not None)
    levers = "\n".join(f"| {lever.name} | {_text(lever.value)} | {lever.arithmetic} |" for lever in run.recipe.levers)
    skipped = f", {run.skipped_steps} skipped as not finite" if run.skipped_steps else ""
    took = "" if run.train_s is None else f" in {seconds_text(run.train_s)}"
    done = f"{count_text(run.steps)} steps{skipped}{took} on {run.recipe.device}."
    table = f"| hyperparameter | value |\n|---|---|\n{options}"
    ran = f"| how it ran | value | arithmetic |\n|---|---|---|\n{levers}"
    return f"## Training\n\n{done}\n\n{table}\n\n{ran}"


def _joined(run: Run) -> Sequence[str]:
    """Columns whose texts are joined; none where the text is in one."""
    return tuple(run.data.get("joined_columns") or ())


def _again(run: Run) -> str:
    if in_memory := run.data.get("in_memory"):
        named = ", ".join(map(_code, in_memory))
        return f"## Made by\n\n`brimful.train` in Python, on data in memory ({named}), with the values above."
    command = printable(run.command, 100_000)
    fence = _fence(command, 3)
    return f"## Made by\n\n{fence}\n{command}\n{fence}"


def _text(value: object, limit: int = 200) -> str:
    """User text that can break neither the table nor the page."""
    text = printable(value, limit).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([|`*\[\]#])", r"\\\1", text)


def _code(value: object, limit: int = 200) -> str:
    """User text as it stands, between as many backticks as it needs."""
    text = printable(value, limit)
    fence = _fence(text, 1)
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"


def _fence(text: str, least: int) -> str:
    """More backticks than stand together anywhere in `text`."""
    return "`" * max(least, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
