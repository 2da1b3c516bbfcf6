"""Learning rate, epochs and warm-up of a training, where nobody asked for others.

A table of model and data, which costs no step, is the same each time, and was measured (`benchmarks/defaults`):

    learning rate   5e-5 x (768 / width)^2, at most 2e-4: narrow models need larger steps. For all weights of a
                    model up to that width twice as much, for LoRA and its like 10 times, for a new head alone 20
                    times, for Lion a fifth; none but the first is measured
    epochs          3, and of few rows as many as make enough steps, more for more labels
    warm-up         a tenth of the steps

Whatever was asked for is kept as it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from brimful.core.errors import OptionError
from brimful.core.options.train import TrainOptions
from brimful.core.records import Learning, Run
from brimful.core.trained_part import FrozenParts
from brimful.core.units import count_text

#: Learning rate of a model as wide as BERT-base, its width, and the most of any.
_BASE_RATE, _BASE_WIDTH, _MOST_RATE = 5e-5, 768, 2e-4
#: Factors for all weights of models up to that width, for adapters and heads, and for optimizers whose steps are all of
#: one size. MPNet, 768 wide, learns as well or better by 1e-4 than by 5e-5, and not at all by 5e-4.
_OF_NARROW, _OF_ADAPTER, _OF_HEAD, _OF_LION = 2.0, 10.0, 20.0, 0.2
#: Optimizers that the table says nothing of.
_UNKNOWN = ("sgd", "schedule_free_sgd", "adafactor", "adagrad", "rmsprop")
#: Epochs of many rows, and of the fewest; steps that are enough, and those besides for each output.
_FEWEST_EPOCHS, _MOST_EPOCHS, _ENOUGH_STEPS, _STEPS_OF_OUTPUT = 3, 40, 150, 25
_MOST_OUTPUTS = 200
_WARMUP = 0.1
#: Most steps of a run: the learning rate of each is in memory.
_MOST_STEPS = 10_000_000
#: Evaluations and checkpoints of a run whose epochs were chosen.
_EVALUATIONS = 10


def choose_learning(
    options: TrainOptions, config: Any, *, batches_per_epoch: int, num_outputs: int, kept: Learning | None = None
) -> Learning:
    """Choose what `options` leave open. config: of the model. batches_per_epoch: of training rows. kept: of the run
    that is gone on with."""
    rate, epochs, reasons = options.learning_rate, options.num_train_epochs, []
    if kept is not None:
        rate, epochs = rate or kept.learning_rate, epochs or kept.num_train_epochs
        reasons += [] if kept.reason is None else [kept.reason]
    if rate is None:
        rate, reason = _rate(options, config)
        reasons.append(reason)
    if options.max_steps is None and epochs is None:
        enough = _ENOUGH_STEPS + _STEPS_OF_OUTPUT * min(num_outputs, _MOST_OUTPUTS)
        wanted = math.ceil(enough / batches_per_epoch)
        epochs = float(max(_FEWEST_EPOCHS, min(_MOST_EPOCHS, wanted)))
        reasons.append(f"--num-train-epochs {_why(wanted, enough, num_outputs)}")
    num_steps = options.max_steps or math.ceil((epochs or 0) * batches_per_epoch)
    return Learning(
        learning_rate=rate,
        num_train_epochs=None if options.max_steps else epochs,
        num_warmup_steps=_num_warmup_steps(options, num_steps, kept),
        reason="; ".join(reasons) or None,
    )


def _why(wanted: int, enough: int, num_outputs: int) -> str:
    """Reason of a number of epochs. wanted: those that make `enough` steps."""
    if wanted <= _FEWEST_EPOCHS:
        return "as for many rows"
    if wanted > _MOST_EPOCHS:
        return "at the most, of so few rows"
    outputs = f"{count_text(num_outputs)} {'output' if num_outputs == 1 else 'outputs'}"
    return f"for about {enough:,} steps, enough for {outputs}"


def _rate(options: TrainOptions, config: Any) -> tuple[float, str]:
    """Learning rate for a model and what is trained of it, with its reason."""
    width = getattr(config.get_text_config(), "hidden_size", None)
    rate = _BASE_RATE if not width else min(_MOST_RATE, _BASE_RATE * (_BASE_WIDTH / width) ** 2)
    reason = "--learning-rate " + ("by an unknown width" if not width else f"by a width of {width:,}")
    if options.optim.startswith(_UNKNOWN):
        return _BASE_RATE, f"--learning-rate as in transformers, since none is known for {options.optim}"
    by_lion = options.optim.removeprefix("paged_").startswith("lion")
    if by_lion:
        rate, reason = rate * _OF_LION, f"{reason} and Lion"
    if options.peft is not None:
        rate, reason = rate * _OF_ADAPTER, f"{reason} and an adapter"
    elif options.freeze is not None and FrozenParts.parse(options.freeze).all_but_head:
        rate, reason = rate * _OF_HEAD, f"{reason} and a head alone"
    elif width and width <= _BASE_WIDTH and not by_lion:
        rate = min(_MOST_RATE, rate * _OF_NARROW)
    return float(f"{rate:.1e}"), reason


def _num_warmup_steps(options: TrainOptions, num_steps: int, kept: Learning | None) -> int:
    ratio = options.warmup_ratio
    if ratio is None and options.warmup_steps is None:
        if kept is not None:
            return kept.num_warmup_steps
        ratio = _WARMUP if options.learning_rate is None else 0.0
    return options.warmup_steps or 0 if ratio is None else math.ceil(ratio * num_steps)


def epochs_between(options: TrainOptions, learning: Learning) -> int:
    """Epochs from one evaluation to the next: 1, unless many were chosen."""
    if options.num_train_epochs is not None or learning.num_train_epochs is None:
        return 1
    return math.ceil(learning.num_train_epochs / _EVALUATIONS)


def steps_text(options: TrainOptions, learning: Learning, *, num_rows: int, num_steps: int, per_epoch: int) -> str:
    """One line about the length of a run. num_rows, per_epoch: rows and batches of an epoch.

    Raises: OptionError for more steps than anyone has time for, whose schedule alone would fill the memory.
    """
    if num_steps > _MOST_STEPS:
        asked = "--max-steps" if options.max_steps else "--num-train-epochs"
        raise OptionError(
            f"{asked} asks for {num_steps:,} steps, and the most is {_MOST_STEPS:,}", hint=f"lower {asked}"
        )
    epochs, warmup = num_steps / per_epoch, learning.num_warmup_steps
    epochs_text = f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.3g}"
    return (
        f"steps: {num_steps:,}, {options.batch_size:,} rows each ({count_text(num_rows)} rows, "
        f"{epochs_text} {'epoch' if epochs == 1 else 'epochs'}); learning rate {learning.learning_rate:g}, "
        f"{options.lr_scheduler_type}"
        + (f", warm-up {warmup:,} {'step' if warmup == 1 else 'steps'}" if warmup else "")
        + (f" (chosen: {learning.reason})" if learning.reason else "")
    )


def learning_of(run: Run) -> Learning:
    """Learning rate and length of a run that is gone on with, of an earlier version too."""
    if run.learning is not None:
        return run.learning
    asked: Mapping[str, Any] = run.options
    epochs = None if asked.get("max_steps") else float(asked.get("num_train_epochs") or _FEWEST_EPOCHS)
    return Learning(learning_rate=float(asked["learning_rate"]), num_train_epochs=epochs, num_warmup_steps=0)


def resumed(options: TrainOptions, run: Run) -> TrainOptions:
    """Options with the steps of the run that is gone on with, where they name no length."""
    if options.max_steps is not None or options.num_train_epochs is not None:
        return options
    return dataclasses.replace(options, max_steps=run.options.get("max_steps"))
