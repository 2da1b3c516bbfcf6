"""Updates of Trainer's own AdamW within our step, beside stock Trainer: on a CPU by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from transformers import TrainingArguments

pytest.importorskip("triton")

import brimful
from brimful.step.updates import given_adamw
from integrations.test_trainer import (
    _OwnOptimizer,
    _Watch,
    assert_same_history,
    dataset_of,
    tokenizer,
    trained,
    weights,
)
from tiny import FAMILIES
from tolerances import difference

__all__ = ["tokenizer"]  # a fixture

CHANGES: dict[str, Any] = {"weight_decay": 0.1, "eval_strategy": "no", "optim": "adamw_torch_fused"}


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels run here, too."""
    monkeypatch.setattr(given_adamw, "can_fuse", lambda model: True)


class _Steps(transformers.TrainerCallback):  # type: ignore[misc]
    """Record whether updates were the step's, after each step."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.found: list[bool] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
        assert "zero_grad" not in vars(model)
        step = getattr(self.trainer, "gradient_step", None)
        self.found.append(step is not None and step.update is not None)


class _Told(brimful.Trainer):
    """Its `_Steps` knows it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, _Steps):
                callback.trainer = self


def both(tmp_path: Path, tokenizer: Any, callbacks: Any = list, **changes: Any) -> tuple[Any, Any, list[bool]]:
    """Ours, the stock Trainer, and whether updates were the step's."""
    model, steps = FAMILIES["bert"].model(), _Steps()
    given = CHANGES | changes
    ours = trained(_Told, model, tmp_path / "ours", tokenizer, callbacks=[steps, *callbacks()], **given)
    stock = trained(transformers.Trainer, model, tmp_path / "stock", tokenizer, callbacks=[*callbacks()], **given)
    assert ours.stock_reason is None
    return ours, stock, steps.found


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes", [{}, {"max_grad_norm": 0.0, "optim": "adamw_torch"}], ids=["clipped", "not clipped"]
)
def test_it_logs_and_learns_what_transformers_trainer_does(changes: Any, tmp_path: Path, tokenizer: Any) -> None:
    ours, stock, within = both(tmp_path, tokenizer, **changes)
    assert within == [True] * 6
    assert_same_history(ours, stock)
    assert difference(weights(ours.model), weights(stock.model)) < 1e-3
    found, expected = ours.optimizer.state_dict(), stock.optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert state.keys() == found["state"][number].keys()
        assert all(found["state"][number][name].dtype == value.dtype for name, value in state.items())
        assert torch.equal(found["state"][number]["step"], state["step"])
        assert torch.allclose(found["state"][number]["exp_avg_sq"], state["exp_avg_sq"], rtol=1e-2, atol=1e-9)
    ours.train()  # once more, from states that it has left
    stock.train()
    assert_same_history(ours, stock, rel=1e-3)


@pytest.mark.slow
def test_accumulation_is_that_of_one_batch(tmp_path: Path, tokenizer: Any) -> None:
    model, steps = FAMILIES["bert"].model(), _Steps()
    stock = trained(transformers.Trainer, model, tmp_path / "8", tokenizer, per_device_train_batch_size=8, **CHANGES)
    ours = trained(_Told, model, tmp_path / "4", tokenizer, gradient_accumulation_steps=2, callbacks=[steps], **CHANGES)
    assert steps.found == [True] * 3
    assert_same_history(ours, stock)


@pytest.mark.thorough
def test_it_resumes_bit_for_bit_and_either_class_resumes_the_others(tmp_path: Path, tokenizer: Any) -> None:
    model = FAMILIES["bert"].model(dropout=0.2)
    saving: dict[str, Any] = CHANGES | {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    whole = trained(brimful.Trainer, model, tmp_path / "whole", tokenizer, **saving)
    again = []
    for kind in (brimful.Trainer, transformers.Trainer):
        made = kind(
            model=FAMILIES["bert"].model(dropout=0.2, seed=5),
            args=TrainingArguments(**{**whole.args.to_dict(), "output_dir": str(tmp_path / kind.__module__)}),
            train_dataset=dataset_of(),
            data_collator=whole.data_collator,
        )
        made.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
        again.append(made)
    assert torch.equal(weights(again[0].model), weights(whole.model))
    losses = [[line["loss"] for line in each.state.log_history if "loss" in line] for each in (whole, again[0])]
    assert losses[0] == losses[1]
    assert again[1].state.global_step == 6
    counts = [state["step"].item() for state in again[1].optimizer.state_dict()["state"].values()]
    assert set(counts) == {6.0}
    theirs = tmp_path / transformers.Trainer.__module__ / "checkpoint-6"
    again[0].args.max_steps = 8
    again[0].train(resume_from_checkpoint=str(theirs))
    assert {state["step"].item() for state in again[0].optimizer.state_dict()["state"].values()} == {8.0}


class _Decays(transformers.TrainerCallback):  # type: ignore[misc]
    """Changes what the optimizer's groups say, by which a step was made."""

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if state.global_step == 2:
            optimizer.param_groups[0]["weight_decay"] = 0.5
        if state.global_step == 4:
            optimizer.param_groups[1]["lr"] *= 10


@pytest.mark.slow
def test_changed_groups_are_followed(tmp_path: Path, tokenizer: Any) -> None:
    ours, stock, within = both(tmp_path, tokenizer, lambda: [_Decays()])
    assert within == [True, True, False, False, False, False]
    assert_same_history(ours, stock)
    assert difference(weights(ours.model), weights(stock.model)) < 1e-3


def test_who_sees_gradients_has_them(tmp_path: Path, tokenizer: Any) -> None:
    seen: list[_Watch] = []

    def watch() -> list[_Watch]:
        seen.append(_Watch())
        return seen[-1:]

    ours, stock, within = both(tmp_path, tokenizer, watch)
    assert not any(within)
    assert seen[0].norms == pytest.approx(seen[1].norms, rel=1e-4)
    assert_same_history(ours, stock)


@pytest.mark.filterwarnings("ignore:We strongly recommend")
def test_an_optimizer_of_the_users_updates_by_itself(tmp_path: Path, tokenizer: Any) -> None:
    steps = _Steps()
    kind = type("_Told", (_Told, _OwnOptimizer), {})
    ours = trained(kind, FAMILIES["bert"].model(), tmp_path, tokenizer, callbacks=[steps], **CHANGES)
    assert ours.stock_reason is None
    assert isinstance(ours.optimizer.optimizer, torch.optim.SGD)
    assert not any(steps.found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of the interpreter
def test_a_step_that_is_not_finite_is_left_out_and_said(tmp_path: Path, tokenizer: Any) -> None:
    rows = dataset_of(labels="regression").to_dict()
    rows["labels"][9] = 1e30  # its square is infinite
    steps = _Steps()
    with pytest.warns(UserWarning, match="updates left out, as their loss or gradient was not finite: 1, up to step 3"):
        ours = trained(
            _Told, FAMILIES["bert"].model(num_labels=1), tmp_path, tokenizer, train_dataset=Dataset.from_dict(rows),
            labels="regression", callbacks=[steps], train_sampling_strategy="sequential", **CHANGES,
        )  # fmt: skip
    assert steps.found == [True] * 6
    assert weights(ours.model).isfinite().all()
    assert {state["step"].item() for state in ours.optimizer.state_dict()["state"].values()} == {5.0}
