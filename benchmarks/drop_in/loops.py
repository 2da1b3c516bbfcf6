"""Loops that people have, each timed in rounds: Trainer, an Accelerate loop, and both with brimful inside.

    trainer, brimful_trainer      transformers' Trainer, and `brimful.Trainer` in its place
    accelerate, packed, step      an Accelerate loop, the same with `brimful.packed`, and with `brimful.Step`
    train                         `brimful train`, for the ratio to it

All take the same tokenised rows through the same collator, in batches of 32, bf16 on a GPU, fused AdamW.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
    set_seed,
)

BATCH = 32
_CUDA = torch.cuda.is_available()
#: Steps of the run that is begun and not finished: its length decides whether compiling pays, as in `brimful train`.
_RUN_STEPS = 10_000


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model's folder, tokenised rows with labels, and whether LoRA is trained."""

    folder: Path
    rows: list[dict[str, Any]]
    num_labels: int
    lora: bool

    def model(self) -> Any:
        """A fresh model in fp32, in train mode."""
        set_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(
            self.folder, num_labels=self.num_labels, dtype=torch.float32
        )
        if self.lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=8))
        return model.train()

    def tokenizer(self) -> Any:
        """The model's own."""
        return AutoTokenizer.from_pretrained(self.folder)


@dataclass
class Clock:
    """Times at the edges of rounds, when the device has done all that it was told, and the process's CPU seconds."""

    warm_up: int
    steps: int
    rounds: int
    began: float = field(default_factory=time.perf_counter)
    marks: list[float] = field(default_factory=list)
    cpu_marks: list[float] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Of the whole measurement."""
        return self.warm_up + self.rounds * self.steps

    def tick(self, number: int) -> None:
        """Step `number`, counted from 1, was launched."""
        if number >= self.warm_up and (number - self.warm_up) % self.steps == 0:
            if _CUDA:
                torch.cuda.synchronize()
            self.marks.append(time.perf_counter())
            self.cpu_marks.append(time.process_time())

    def found(self) -> dict[str, Any]:
        """Seconds of each round."""
        rounds = [
            {"seconds": end - start, "cpu_s": cpu_end - cpu_start, "samples": self.steps * BATCH}
            for start, end, cpu_start, cpu_end in zip(
                self.marks, self.marks[1:], self.cpu_marks, self.cpu_marks[1:], strict=False
            )
        ]
        peak = torch.cuda.max_memory_allocated() if _CUDA else None
        return {"rounds": rounds, "warm_up_s": self.marks[0] - self.began, "peak_allocated_bytes": peak}


class _Ticks(TrainerCallback):
    """Ticks a clock, and keeps how steps of ours ran."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.trainer, self.seen = clock, None, dict[str, Any]()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.clock.tick(state.global_step)
        step = getattr(self.trainer, "gradient_step", None)
        if step is not None and not self.seen:
            self.seen = _recipe(step)
        control.should_training_stop = state.global_step >= self.clock.num_steps


def trainer(task: Task, settings: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """transformers' Trainer."""
    from transformers import Trainer

    return _by_trainer(Trainer, task, settings, clock)


def brimful_trainer(task: Task, settings: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """`brimful.Trainer` in its place."""
    import brimful

    return _by_trainer(brimful.Trainer, task, settings, clock)


def _by_trainer(kind: type[Any], task: Task, settings: dict[str, Any], clock: Clock) -> dict[str, Any]:
    ticks, tokenizer = _Ticks(clock), task.tokenizer()
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            max_steps=_RUN_STEPS,
            per_device_train_batch_size=BATCH,
            dataloader_drop_last=True,
            learning_rate=1e-5,
            optim="adamw_torch_fused",
            logging_nan_inf_filter=settings["nan_filter"],
            dataloader_num_workers=settings["workers"],
            dataloader_persistent_workers=bool(settings["workers"]),
            dataloader_pin_memory=_CUDA,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_level="error",
            **({"bf16": True, "tf32": True} if _CUDA else {"use_cpu": True}),
        )
        made = kind(
            model=task.model(),
            args=arguments,
            train_dataset=task.rows,
            data_collator=_collator(tokenizer),
            callbacks=[ticks],
        )
        ticks.trainer = made
        made.train()
    return clock.found() | ticks.seen | {"stock_reason": getattr(made, "stock_reason", None)}


def _collator(tokenizer: Any) -> Any:
    return DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)


def _batches(task: Task, settings: dict[str, Any], prepare: Callable[[Any], Any], number: int) -> Iterator[Any]:
    """As many batches as a measurement takes, epoch after epoch."""
    workers = settings["workers"]
    loader = prepare(
        DataLoader(
            task.rows,  # type: ignore[arg-type]
            batch_size=BATCH,
            shuffle=True,
            drop_last=True,
            collate_fn=_collator(task.tokenizer()),
            num_workers=workers,
            persistent_workers=bool(workers),
            pin_memory=_CUDA,
        )
    )
    taken = 0
    while True:
        for batch in loader:
            yield batch
            taken += 1
            if taken == number:
                return


def _accelerated(
    task: Task, settings: dict[str, Any], clock: Clock, change: Callable[[Any], Any]
) -> tuple[dict[str, Any], Any]:
    from accelerate import Accelerator

    if _CUDA:
        torch.backends.cuda.matmul.allow_tf32 = True
    accelerator = Accelerator(cpu=not _CUDA, mixed_precision="bf16" if _CUDA else "no")
    model = change(task.model())
    optimizer, scheduler = _optimizer(model, clock)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for number, batch in enumerate(_batches(task, settings, accelerator.prepare, clock.num_steps), 1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        clock.tick(number)
    return clock.found(), accelerator.unwrap_model(model)


def accelerate(task: Task, settings: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """An Accelerate loop."""
    return _accelerated(task, settings, clock, lambda model: model)[0]


def packed(task: Task, settings: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """The same loop with `brimful.packed`, captured where `settings` say so."""
    import brimful

    found, model = _accelerated(task, settings, clock, functools.partial(brimful.packed, graphs=settings["graphs"]))
    inner = model.get_base_model() if task.lora else model
    behind = vars(inner)["_brimful_packed"]
    return found | {
        "packed_calls": behind.num_packed,
        "plain_calls": behind.num_plain,
        "captured_calls": behind.num_captured,
        "warnings": behind.reasons,
    }


def step(task: Task, settings: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """The same loop with `brimful.Step`, outcomes read two steps later."""
    import brimful

    model, flying = task.model(), list[Any]()
    lengths = [len(row["input_ids"]) for row in task.rows]
    asked: dict[str, Any] = {
        "batch_size": BATCH,
        "max_grad_norm": 1.0,
        "lengths": lengths,
        "precision": "bf16" if _CUDA else "fp32",
        "execution": settings["execution"],
    }
    scheduler = None
    if "optimizer" in settings:
        made = brimful.Step(model, settings["optimizer"], num_steps=_RUN_STEPS, learning_rate=1e-5, **asked)
    else:
        optimizer, scheduler = _optimizer(model, clock)
        made = brimful.Step(model, optimizer, num_steps=_RUN_STEPS, **asked)
    for number, batch in enumerate(_batches(task, settings, lambda loader: loader, clock.num_steps), 1):
        flying.append(made(batch))
        if scheduler is not None:
            scheduler.step()
        if len(flying) > 2:
            flying.pop(0).read()
        clock.tick(number)
    return clock.found() | _recipe(made)


def _optimizer(model: Any, clock: Clock) -> tuple[Any, Any]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    return optimizer, get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=clock.num_steps)


def _recipe(made: Any) -> dict[str, Any]:
    checked = made.first_batch
    return {
        "recipe": {lever.name: lever.value for lever in made.recipe.levers},
        "first_batch": None if checked is None else {"passed": checked.passed, "reason": checked.reason},
    }


SIDES: dict[str, Callable[[Task, dict[str, Any], Clock], dict[str, Any]]] = {
    "trainer": trainer,
    "brimful_trainer": brimful_trainer,
    "accelerate": accelerate,
    "packed": packed,
    "step": step,
}
