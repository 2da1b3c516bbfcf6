"""Our Trainer in two processes: the gradient of all their rows as one batch, and one step for both in every update."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from test_trainer import dataset_of, tokenizer, weights  # noqa: F401
from transformers import DataCollatorWithPadding, TrainingArguments

import brimful
from brimful.core.place import Place
from forked_ranks import Forked
from tiny import FAMILIES
from tolerances import difference


def trained(kind: type[Any], folder: Path, collator: Any, data: Dataset, dropout: float = 0.0, **changes: Any) -> Any:
    given = {
        "per_device_train_batch_size": 4, "num_train_epochs": 1, "logging_steps": 1, "learning_rate": 1e-2,
        "optim": "sgd", "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "max_grad_norm": 0.0,
    }  # fmt: skip
    made = kind(
        model=FAMILIES["bert"].model(dropout=dropout),
        args=TrainingArguments(output_dir=str(folder), **given | changes),
        train_dataset=data,
        data_collator=collator,
    )
    made.train()
    return made


def found(made: Any, said: Any = ()) -> dict[str, Any]:
    losses = [line["loss"] for line in made.state.log_history if "loss" in line]
    return {
        "weights": weights(made.model),
        "losses": losses,
        "reason": getattr(made, "stock_reason", None),
        "said": [str(each.message) for each in said if "brimful" in str(each.message)],
    }


def in_two(folder: Path, work: Any) -> list[dict[str, Any]]:
    def forked(place: Place) -> Any:
        from accelerate.state import AcceleratorState

        torch.set_num_threads(1)
        AcceleratorState._reset_state(reset_partial_state=True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            return found(work(place), said)

    return Forked(folder, 2, forked).results()


@pytest.mark.slow
def test_two_processes_are_one_batch(tmp_path: Path, tokenizer: Any) -> None:  # noqa: F811
    """2 processes x 2 micro-batches x 4 rows are 16."""
    data, collator = dataset_of(32, seed=3), DataCollatorWithPadding(tokenizer)
    ours = in_two(
        tmp_path / "ranks",
        lambda _: trained(brimful.Trainer, tmp_path, collator, data, gradient_accumulation_steps=2),
    )
    stock = trained(transformers.Trainer, tmp_path, collator, data, per_device_train_batch_size=16)
    assert [each["reason"] for each in ours] == [None, None]
    assert torch.equal(ours[0]["weights"], ours[1]["weights"])
    assert difference(ours[0]["weights"], weights(stock.model)) < 1e-5
    assert ours[0]["losses"] == pytest.approx(found(stock)["losses"], rel=1e-3)


@pytest.mark.slow
def test_masks_of_dropout_are_each_process_own(tmp_path: Path, tokenizer: Any) -> None:  # noqa: F811
    """All rows are one: were masks the same, the loss would be that of one process."""
    data, collator = dataset_of(1, seed=3).select([0] * 16), DataCollatorWithPadding(tokenizer)
    two = in_two(tmp_path / "ranks", lambda _: trained(brimful.Trainer, tmp_path, collator, data, dropout=0.5))
    one = trained(brimful.Trainer, tmp_path, collator, data, dropout=0.5, max_steps=1)
    assert two[0]["losses"][0] != pytest.approx(found(one)["losses"][0], rel=1e-3)


@pytest.mark.slow
def test_one_process_that_cannot_takes_all_with_it(tmp_path: Path, tokenizer: Any) -> None:  # noqa: F811
    """In the second update, batches of one process have no mask: both take Trainer's own step, and none waits."""
    data, padded = dataset_of(32, seed=3), DataCollatorWithPadding(tokenizer)

    def work(place: Place) -> Any:
        calls = []

        def collate(rows: Any) -> Any:
            calls.append(1)
            batch = padded(rows)
            if place.rank == 1 and len(calls) > 2:
                del batch["attention_mask"]
            return batch

        return trained(brimful.Trainer, tmp_path, collate, data)

    ours = in_two(tmp_path / "ranks", work)
    assert "no attention_mask" in ours[1]["reason"]
    assert ours[0]["reason"] == "another process's rows ask for it"
    assert [len(each["said"]) for each in ours] == [1, 1]
    assert difference(ours[0]["weights"], ours[1]["weights"]) == 0
