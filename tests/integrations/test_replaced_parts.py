"""A loss or a forward of the owner's own is run, or refused, and never replaced by transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import brimful
from brimful.integrations.replaced_parts import replaced_part
from integrations.test_trainer import assert_same_history, tokenizer, trained
from tiny import FAMILIES

__all__ = ["tokenizer"]  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # of transformers and peft


def weighted(logits: Any, labels: Any) -> Any:
    return torch.nn.functional.cross_entropy(logits, labels, torch.tensor([1.0, 5.0, 10.0]))


def own_loss(pooled_logits: Any = None, labels: Any = None, **_: Any) -> Any:
    return weighted(pooled_logits, labels)


def own_forward(self: Any, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **_: Any) -> Any:
    found = transformers.BertForSequenceClassification.forward(self, input_ids, attention_mask)
    found.loss = None if labels is None else weighted(found.logits, labels)
    return found


def with_loss() -> Any:
    model = FAMILIES["qwen3"].model()
    model.loss_function = own_loss
    return model


def with_forward() -> Any:
    model = FAMILIES["bert"].model()
    model.forward = MethodType(own_forward, model)
    return model


def of_a_class(**attributes: Any) -> Any:
    """A model of a subclass that has the name of its base."""
    model = FAMILIES["bert"].model()
    model.__class__ = type("BertForSequenceClassification", (type(model),), attributes)
    return model


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(FAMILIES["bert"].model(), LoraConfig(task_type="SEQ_CLS", r=4))


def prepared(model: Any) -> Any:
    """The model as Accelerate has it for bf16: with a forward around its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    made = Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    assert "forward" in vars(made)
    return made


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "loss": (with_loss, "the model's loss_function was replaced"),
    "forward": (with_forward, "the model's forward was replaced"),
    "class": (
        lambda: of_a_class(forward=own_forward),
        "BertForSequenceClassification has a forward of its own",
    ),
}


@pytest.mark.parametrize("case", ["loss", "class"])
def test_trainers_own_step_runs_them(case: str, tmp_path: Path, tokenizer: Any) -> None:
    make, reason = CASES[case]
    with pytest.warns(UserWarning, match=f"{reason}; transformers' own training step runs") as said:
        ours = trained(brimful.Trainer, make(), tmp_path, tokenizer, max_steps=2)
    assert len([each for each in said if "brimful" in str(each.message)]) == 1
    stock = trained(transformers.Trainer, make(), tmp_path, tokenizer, max_steps=2)
    assert_same_history(ours, stock, rel=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_a_step_refuses_them(case: str) -> None:
    make, reason = CASES[case]
    model = make()
    before = dict(vars(model))
    with pytest.raises(brimful.OptionError, match=f"{reason}, and a step runs those of transformers"):
        brimful.Step(model, torch.optim.SGD(model.parameters()), device="cpu")
    assert vars(model) == before


def test_wrappers_of_others_are_not_the_owners() -> None:
    for make in (FAMILIES["bert"].model, of_a_class, adapted, lambda: brimful.packed(FAMILIES["bert"].model())):
        assert replaced_part(make()) is None
        assert replaced_part(prepared(make())) is None
    assert replaced_part(prepared(with_forward())) == "the model's forward was replaced"
    AcceleratorState._reset_state(reset_partial_state=True)


def with_another_row(module: Any, inputs: Any, output: Any) -> Any:
    """Add to each row the one before: of a packed row it would be another."""
    return (output[0] + output[0].roll(1, 0), *output[1:]) if isinstance(output, tuple) else output + output.roll(1, 0)


def hook(model: Any) -> None:
    model.bert.encoder.layer[0].register_forward_hook(with_another_row)


def replace_inner(model: Any) -> None:
    layer = model.bert.encoder.layer[0]
    plain = layer.forward
    layer.forward = lambda *args, **kwargs: with_another_row(layer, args, plain(*args, **kwargs))


def replace_forward(model: Any) -> None:
    model.forward = MethodType(own_forward, model)


class _Changes(transformers.TrainerCallback):  # type: ignore[misc]
    """Changes the model after the second update; `within`: between the micro-batches of the third."""

    def __init__(self, change: Callable[[Any], Any], *, within: bool = False) -> None:
        self.change, self.event = change, "on_substep_end" if within else "on_step_end"

    def on_event(self, event: str, state: Any, model: Any) -> None:
        if event == self.event and state.global_step == 2:
            self.change(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.on_event("on_step_end", state, model)

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.on_event("on_substep_end", state, model)


CHANGES: dict[Callable[[Any], None], str] = {
    hook: r"there is a hook on its modules \(with_another_row\)",
    replace_inner: "the forward of bert.encoder.layer.0 was replaced",
    replace_forward: "the model's forward was replaced",
}


@pytest.mark.sampled
@pytest.mark.parametrize("change", CHANGES)
def test_those_that_come_between_updates(change: Callable[[Any], None], tmp_path: Path, tokenizer: Any) -> None:
    model, given = FAMILIES["bert"].model(), {"max_steps": 3, "eval_strategy": "no"}
    with pytest.warns(UserWarning, match=f"{CHANGES[change]}.*; transformers' own training step runs"):
        ours = trained(brimful.Trainer, model, tmp_path, tokenizer, callbacks=[_Changes(change)], **given)
    stock = trained(transformers.Trainer, model, tmp_path, tokenizer, callbacks=[_Changes(change)], **given)
    assert_same_history(ours, stock)
    untouched = trained(transformers.Trainer, model, tmp_path, tokenizer, **given)
    losses = [each.state.log_history[2]["loss"] for each in (stock, untouched)]
    assert abs(losses[0] - losses[1]) > 1e-3  # which is seen


def attend_eagerly(model: Any) -> None:
    model.set_attn_implementation("eager")


def pool_by_means(model: Any) -> None:
    model.config.classifier_pooling = "mean"


def cut_gradients(model: Any) -> None:
    model.head.dense.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("change", [attend_eagerly, pool_by_means, cut_gradients])
def test_changes_that_our_step_follows(change: Callable[[Any], None], tmp_path: Path, tokenizer: Any) -> None:
    """Of the attention, which is the model's between steps; of its configuration; and hooks on whole gradients."""
    model, given = FAMILIES["modernbert"].model(), {"max_steps": 4, "eval_strategy": "no"}
    runs = [
        trained(kind, model, tmp_path, tokenizer, callbacks=[_Changes(change)], **given)
        for kind in (brimful.Trainer, transformers.Trainer)
    ]
    assert runs[0].stock_reason is None
    assert_same_history(*runs)
    attentions = [each.model.config._attn_implementation for each in runs]
    assert attentions[0] == attentions[1] == ("eager" if change is attend_eagerly else "sdpa")


def test_a_hook_that_comes_between_micro_batches(tmp_path: Path, tokenizer: Any) -> None:
    rows: list[int] = []

    def counted(model: Any) -> None:
        layer = model.bert.encoder.layer[0]
        layer.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))

    with pytest.warns(UserWarning, match="there is a hook"):
        trained(brimful.Trainer, FAMILIES["bert"].model(), tmp_path, tokenizer, max_steps=3, eval_strategy="no",
                gradient_accumulation_steps=2, callbacks=[_Changes(counted, within=True)])  # fmt: skip
    assert rows == [4, 2]
