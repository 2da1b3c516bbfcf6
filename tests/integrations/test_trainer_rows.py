"""Updates of any number of rows, from wherever a run begins: ragged ends, batch samplers, resumed runs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset

import brimful
from heads.tiny_heads import tiny_model
from integrations.test_trainer import _Rows, arguments, assert_same_history, dataset_of, tokenizer, trained, weights
from tiny import FAMILIES, VOCABULARY

__all__ = ["tokenizer"]  # a fixture

QUICK: dict[str, Any] = {"eval_strategy": "no"}


class _Releases(transformers.TrainerCallback):  # type: ignore[misc]
    """Trains the embeddings from the last batch of the first epoch on: a step is made then, of two rows."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.bert.embeddings.requires_grad_(state.global_step >= 5)


class _Stream(IterableDataset):  # type: ignore[misc]
    """Rows that come one after another."""

    def __iter__(self) -> Any:
        return iter(list(dataset_of()) * 2)


def uneven(kind: type[Any]) -> type[Any]:
    class Uneven(kind):  # type: ignore[misc]
        """Reads batches of two rows, of ten, of six."""

        def get_train_dataloader(self) -> Any:
            rows = list(range(18))
            return DataLoader(
                list(dataset_of()), batch_sampler=[rows[:2], rows[2:12], rows[12:]], collate_fn=self.data_collator
            )

    return Uneven


@pytest.mark.slow
def test_a_step_that_is_made_at_a_ragged_end_takes_whole_batches(tmp_path: Path, tokenizer: Any) -> None:
    runs = [
        trained(
            kind, FAMILIES["bert"].model(), tmp_path, tokenizer, callbacks=[_Releases()], num_train_epochs=2, **QUICK
        )
        for kind in (brimful.Trainer, transformers.Trainer)
    ]
    assert runs[0].stock_reason is None
    assert_same_history(*runs)


@pytest.mark.slow
def test_batches_may_grow(tmp_path: Path, tokenizer: Any) -> None:
    runs = [
        trained(uneven(kind), FAMILIES["bert"].model(), tmp_path, tokenizer, max_steps=3, **QUICK)
        for kind in (brimful.Trainer, transformers.Trainer)
    ]
    assert runs[0].stock_reason is None
    assert_same_history(*runs)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "a ragged end": (5, {}),
    "a ragged accumulation": (1, {"gradient_accumulation_steps": 4}),
    "rows of unknown lengths": (3, {"train_dataset": _Rows(list(dataset_of()))}),
    "a stream": (3, {"train_dataset": _Stream()}),
    "batches of any size": (2, {}),
}


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_one_that_was_not_interrupted(case: str, tmp_path: Path, tokenizer: Any) -> None:
    """Bit for bit with dropout on: micro-batches, and with them masks, depend on no update that a run began at."""
    step, changes = CASES[case]
    data = {"train_dataset": dataset_of()} | {name: changes[name] for name in changes if name == "train_dataset"}
    settings = {name: changes[name] for name in changes if name not in data} | QUICK
    settings |= {"max_steps": step + 4, "save_strategy": "steps", "save_steps": step}
    kind = uneven(brimful.Trainer) if case == "batches of any size" else brimful.Trainer
    whole = trained(kind, FAMILIES["bert"].model(dropout=0.2), tmp_path / "whole", tokenizer, **data, **settings)
    again = kind(
        model=FAMILIES["bert"].model(dropout=0.2, seed=5), args=arguments(tmp_path / "again", **settings),
        data_collator=whole.data_collator, **data,
    )  # fmt: skip
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert torch.equal(weights(again.model), weights(whole.model))
    losses = [[line["loss"] for line in each.state.log_history if "loss" in line] for each in (whole, again)]
    assert losses[0] == losses[1]


def test_rows_longer_than_the_configuration_says(tmp_path: Path, tokenizer: Any) -> None:
    """Of a model whose positions are angles: transformers trains them, and so does its own step here."""
    rows = [{"input_ids": [5 + index] * (100 if index == 9 else 7), "labels": index % 3} for index in range(12)]
    given: dict[str, Any] = {"train_dataset": rows, "train_sampling_strategy": "sequential"}
    stock = trained(transformers.Trainer, FAMILIES["qwen3"].model(), tmp_path, tokenizer, **QUICK | given)
    with pytest.warns(UserWarning, match="a row has 100 tokens, and max_position_embeddings of the model is 80"):
        ours = trained(brimful.Trainer, FAMILIES["qwen3"].model(), tmp_path, tokenizer, **QUICK | given)
    assert_same_history(ours, stock)


@pytest.mark.slow
def test_rows_that_go_on_after_their_end_token(tmp_path: Path, tokenizer: Any) -> None:
    """BART's head reads the last end token, which need not be the last token."""
    rows = [{"input_ids": [5 + n, 2, 7, 8] if n == 9 else [5 + n, 6, 7, 2], "labels": n % 3} for n in range(12)]
    given: dict[str, Any] = {"train_dataset": rows, "train_sampling_strategy": "sequential", "eval_strategy": "no"}
    model = _without_dropout(tiny_model("bart"))
    stock = trained(transformers.Trainer, model, tmp_path, tokenizer, **given)
    with pytest.warns(UserWarning, match=r"rows go on after their end token \(2\)"):
        ours = trained(brimful.Trainer, model, tmp_path, tokenizer, **given)
    assert_same_history(ours, stock)


@pytest.mark.parametrize("labels", [[0.2, 0.3, 0.5], [1, 0, 1], 1])
def test_the_loss_of_deberta_where_no_problem_type_is_set(labels: Any, tmp_path: Path, tokenizer: Any) -> None:
    """Of rows of labels it is soft cross entropy; the configuration stays as it was, by classes too."""
    rows = [{"input_ids": [5 + n, 6, 7], "labels": labels} for n in range(8)]
    model = _without_dropout(tiny_model("deberta-v2"))
    given: dict[str, Any] = {"train_dataset": rows, "eval_strategy": "no"}
    stock = trained(transformers.Trainer, model, tmp_path, tokenizer, **given)
    warned = pytest.warns(UserWarning, match="a loss of its own") if isinstance(labels, list) else nullcontext()
    with warned:
        ours = trained(brimful.Trainer, model, tmp_path, tokenizer, **given)
    assert (ours.stock_reason is None) == isinstance(labels, int)
    assert ours.model.config.problem_type is stock.model.config.problem_type is None
    assert_same_history(ours, stock)


def _without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for name in ("dropout", "attention_dropout", "activation_dropout", "classifier_dropout"):
        for module in model.modules():
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    return model


def test_labels_in_a_column_and_an_embedding_that_was_made_larger(tmp_path: Path, tokenizer: Any) -> None:
    """transformers' loss reads (N, 1) labels as (N,), and its model what its embedding has."""
    rows = [{"input_ids": [VOCABULARY + 3, 5, 6 + index], "labels": [index % 3]} for index in range(12)]
    runs = []
    for kind in (brimful.Trainer, transformers.Trainer):
        model = FAMILIES["bert"].model()
        torch.manual_seed(0)
        model.set_input_embeddings(torch.nn.Embedding(VOCABULARY + 9, 16, padding_idx=0))
        runs.append(trained(kind, model, tmp_path, tokenizer, train_dataset=rows, **QUICK))
    assert runs[0].stock_reason is None
    assert_same_history(*runs)


def test_labels_of_a_class_that_does_not_name_them(tmp_path: Path, tokenizer: Any) -> None:
    """transformers' own Trainer drops them there, unless it is told."""
    rows = [{"input_ids": [5 + n, 6, 7, 8], "labels": n % 3} for n in range(8)]
    model = _without_dropout(tiny_model("qwen3_5"))
    given: dict[str, Any] = {"train_dataset": rows, **QUICK}
    ours = trained(brimful.Trainer, model, tmp_path, tokenizer, **given)
    stock = trained(transformers.Trainer, model, tmp_path, tokenizer, label_names=["labels"], **given)
    assert ours.stock_reason is None
    assert_same_history(ours, stock)
