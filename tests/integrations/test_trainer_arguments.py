"""Arguments and overrides that are kept around our step, and those that have Trainer's own step run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_trainer import arguments, assert_same_history, dataset_of, tokenizer  # noqa: F401
from transformers import DataCollatorWithPadding

import brimful
from brimful.integrations.trainer_reasons import reason_of_trainer
from tiny import FAMILIES


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"neftune_noise_alpha": 5.0}, "NEFTune"),
        ({"torch_compile": True}, "torch_compile"),
        ({"torch_empty_cache_steps": 1}, "torch_empty_cache_steps"),
        ({"optim": "adalomo"}, "within the backward pass"),
        ({"bf16": True}, None),
        ({"optim": "adafactor", "group_by_length": True}, None),
    ],
    ids=["none", "neftune", "compile", "empty cache", "adalomo", "bf16", "adafactor"],
)
def test_reasons_of_arguments(changes: dict[str, Any], reason: str | None, tmp_path: Path, tokenizer: Any) -> None:  # noqa: F811
    by_length = {"train_sampling_strategy": "group_by_length"} if changes.pop("group_by_length", False) else {}
    made = brimful.Trainer(model=FAMILIES["bert"].model(), args=arguments(tmp_path, **changes, **by_length),
                           train_dataset=dataset_of(), eval_dataset=dataset_of(),
                           data_collator=DataCollatorWithPadding(tokenizer))  # fmt: skip
    found = reason_of_trainer(made, brimful.Trainer)
    assert found is None if reason is None else reason in str(found)


def kept(kind: type[Any]) -> type[Any]:
    class Own(kind):  # type: ignore[misc]
        """Logs a number of its own, and makes a schedule of its own."""

        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            super().log({**logs, "doubled": 2 * self.state.global_step}, *args, **kwargs)

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer or self.optimizer, 0.5)
            return self.lr_scheduler

    return Own


def test_logs_trackers_metrics_and_schedules_are_kept(tmp_path: Path, tokenizer: Any) -> None:  # noqa: F811
    pytest.importorskip("tensorboard")
    runs = []
    for kind in (transformers.Trainer, brimful.Trainer):
        folder = tmp_path / kind.__module__
        seen: list[torch.Size] = []

        def halved(logits: Any, labels: Any, seen: list[torch.Size] = seen) -> Any:
            seen.append(logits.shape)
            return logits.argmax(-1)

        own = kept(kind)(
            model=FAMILIES["bert"].model(), args=arguments(folder, report_to="tensorboard"),
            train_dataset=dataset_of(), eval_dataset=dataset_of(9, seed=1),
            data_collator=DataCollatorWithPadding(tokenizer), preprocess_logits_for_metrics=halved,
            compute_metrics=lambda found: {"mean": float(found.predictions.mean())},
        )  # fmt: skip
        own.train()
        runs.append(own)
        assert list(folder.rglob("events.out.tfevents*"))
        assert [shape[1] for shape in seen] == [3, 3]
    assert_same_history(runs[1], runs[0])
    assert runs[1].stock_reason is None
    assert all("doubled" in line for line in runs[1].state.log_history)


def test_class_weights_by_compute_loss_func_are_trainers_own(tmp_path: Path, tokenizer: Any) -> None:  # noqa: F811
    def weighted(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return torch.nn.functional.cross_entropy(outputs.logits, labels, torch.tensor([1.0, 2.0, 3.0]))

    given: dict[str, Any] = {"train_dataset": dataset_of(8), "compute_loss_func": weighted}
    runs = [
        kind(model=FAMILIES["bert"].model(), args=arguments(tmp_path, eval_strategy="no"),
             data_collator=DataCollatorWithPadding(tokenizer), **given)
        for kind in (brimful.Trainer, transformers.Trainer)
    ]  # fmt: skip
    with pytest.warns(UserWarning, match="compute_loss_func is given; transformers' own") as said:
        runs[0].train()
    assert len([each for each in said if "brimful" in str(each.message)]) == 1
    runs[1].train()
    assert_same_history(*runs, rel=1e-7)
