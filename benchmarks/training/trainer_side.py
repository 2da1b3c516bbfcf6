"""Hugging Face Trainer as a user's own code has it: tokenised rows in a list, a padding collator, TrainingArguments.

Where each length of a batch is compiled apart (`settings.MODES`), torch's compiler may keep as many as there are.
"""

from __future__ import annotations

import bisect
import gc
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import turns
from chip import operations
from rounds import Rounds
from settings import BUCKETS
from shapes import max_length
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)
from works import Work, data_file, model_folder, read_rows


def measure(plan: dict[str, Any], inputs: Path) -> Iterator[dict[str, Any]]:
    """One row a setting of the plan: what each round took. A setting that fails has `error` instead.

    With `trial_s` in the plan, rounds that take about so many seconds together.
    """
    yield from measure_work(Work.parse(plan["work"]), plan, inputs)


def measure_work(work: Any, plan: dict[str, Any], inputs: Path) -> Iterator[dict[str, Any]]:
    """The same for a work of any table, which has a `size` and `texts`."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder(inputs, work))
    rows = read_rows(data_file(inputs, work))[: plan.get("limit")]
    names = sorted({row["label"] for row in rows})
    encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=max_length(plan["smoke"]))
    data = [
        {key: values[i] for key, values in encoded.items()} | {"labels": names.index(row["label"])}
        for i, row in enumerate(rows)
    ]
    for settings in plan["settings"]:
        try:
            found = train_rounds(work, settings, plan, inputs, data, tokenizer, len(names))
        except Exception as failure:
            if len(plan["settings"]) == 1 and "trial_s" not in plan:
                raise
            found = {"error": f"{type(failure).__name__}: {failure}"[:300]}
        turns.give()
        yield {"settings": settings, **found}
        gc.collect()
        torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class _Buckets(DataCollatorWithPadding):
    """Pads a batch to the next of a few lengths."""

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        longest = max(len(each["input_ids"]) for each in features)
        self.padding = "max_length"
        self.max_length = BUCKETS[min(bisect.bisect_left(BUCKETS, longest), len(BUCKETS) - 1)]
        return super().__call__(features)


class _Counting(Trainer):
    """Keeps the lengths of the rows of each step on the device, where they are read when all is over, and how many
    tokens they are with their padding.

    buckets, one_length: how batches are padded. step_arguments: what a step was called with, beside model and batch.
    """

    def __init__(self, *, buckets: bool, one_length: bool, **others: Any) -> None:
        super().__init__(**others)
        self.buckets, self.one_length = buckets, one_length
        self.lengths, self.computed = list[torch.Tensor](), list[int]()
        self.step_arguments: tuple[Any, ...] = ()

    def training_step(self, model: Any, inputs: dict[str, Any], *arguments: Any, **others: Any) -> Any:
        self.step_arguments = (*arguments, *others.values())
        self.lengths.append(inputs["attention_mask"].sum(1))
        self.computed.append(inputs["attention_mask"].numel())
        return super().training_step(model, inputs, *arguments, **others)


def train_rounds(
    work: Any,
    settings: dict[str, Any],
    plan: dict[str, Any],
    inputs: Path,
    data: list[dict[str, Any]],
    tokenizer: Any,
    num_labels: int,
) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    batch_size, workers = settings["batch_size"], settings["workers"]
    set_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        model_folder(inputs, work),
        num_labels=num_labels,
        dtype=torch.float32,
        attn_implementation=settings["attention"],
    )
    mode, padding = settings["compile"], settings["padding"]
    _fix_shapes(wanted=mode is not None and padding in ("buckets", "max_length"))
    half = settings.get("precision", "bf16") == "bf16"
    fast = {"bf16": half} if cuda else {"use_cpu": True}
    if cuda:
        fast["tf32"] = True
    if workers:
        fast |= {"dataloader_persistent_workers": True}
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=10**6,
        per_device_train_batch_size=batch_size,
        learning_rate=1e-5,
        optim=settings["optim"],
        torch_compile=mode is not None,
        torch_compile_mode=mode,
        train_sampling_strategy=settings["sampling"],
        label_names=["labels"],  # which it does not find by itself in a class that wraps another's head, as Qwen3.5's
        logging_nan_inf_filter=settings["nan_filter"],
        dataloader_num_workers=workers,
        dataloader_pin_memory=cuda,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        seed=0,
        **fast | settings.get("arguments", {}),
    )
    if cuda and mode == "max-autotune":
        _name_tf32_as_of_old()
    collator = (_Buckets if padding == "buckets" else DataCollatorWithPadding)(
        tokenizer,
        padding="max_length" if padding == "max_length" else "longest",
        max_length=max_length(plan["smoke"]),
        pad_to_multiple_of=8 if padding == "multiple of 8" else None,
    )
    clock = _clock(settings, plan, len(data))
    trainer = _Counting(
        model=model,
        args=arguments,
        train_dataset=data,
        data_collator=collator,
        processing_class=tokenizer,
        callbacks=[clock],
        buckets=padding == "buckets",
        one_length=padding == "max_length",
    )
    if mode is not None and _alone():
        clock.trainer = trainer
    trainer.train()
    lengths = [each.cpu().numpy() for each in trainer.lengths]
    found = []
    for each in clock.found:
        in_round = np.concatenate(lengths[each.first : each.end])
        found.append(
            {
                "steps": each.end - each.first,
                "seconds": each.seconds,
                "cpu_s": each.cpu_s,
                "samples": len(in_round),
                "tokens": int(in_round.sum()),
                "computed_tokens": sum(trainer.computed[each.first : each.end]),
                "operations": operations(model, in_round) if plan.get("operations", True) else None,
            }
        )
    return {
        "rounds": found,
        "rounds_left_out": clock.left_out,
        "shapes_not_met": clock.not_met,
        "warm_up_s": clock.warm_up_s,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "steps_per_round": statistics.median(each["steps"] for each in found),
    }


def _fix_shapes(*, wanted: bool) -> None:
    """Have torch compile each shape apart, as many as there are, or symbolic shapes where a second one comes."""
    torch._dynamo.config.automatic_dynamic_shapes = not wanted
    torch._dynamo.config.recompile_limit = 64 if wanted else 8


def _name_tf32_as_of_old() -> None:
    """Allow TF32 by torch's older name: what Trainer sets, its autotuner (torch 2.11) refuses to read."""
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("high")


def _alone() -> bool:
    """True if no other process makes the same steps: those of one training must all make as many."""
    return int(os.environ.get("WORLD_SIZE", "1")) == 1


def _clock(settings: dict[str, Any], plan: dict[str, Any], num_rows: int) -> Rounds:
    """The rounds of a plan. With group_by_length, whole cycles from long rows to short ones: Trainer sorts by length
    within 50 batches, or a quarter of the rows if that is less."""
    warm_up, steps = plan["warm_up"], plan["steps"]
    if settings["batch_size"] > 32:
        warm_up, steps = warm_up // 2, max(1, steps // 2)
    if settings["sampling"] == "group_by_length":
        cycle = max(1, min(50, num_rows // (4 * settings["batch_size"])))
        warm_up, steps = (cycle * -(-number // cycle) for number in (warm_up, steps))
    least_s = plan.get("trial_s", 0.0) / plan["rounds"]
    return Rounds(warm_up, steps, plan["rounds"], least_s=least_s, clean=_alone())
