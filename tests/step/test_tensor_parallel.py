"""Steps of processes that have one model's weights together: the gradient, loss and weights of one process with all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from brimful.core.errors import OptionError
from brimful.core.place import Place
from brimful.data.batches.batch import Whole, make_batch
from brimful.data.batches.shares import shares_of
from brimful.hardware.ranks import ALONE, Ranks, joined
from brimful.levers.optimizer import Optimizer
from brimful.models.packed.cut_check import CutCheck
from brimful.models.packed.packed_forward import PackedModel, PaddedModel
from brimful.models.tensor_plan import TensorPlan
from brimful.step.precision import Precision
from brimful.step.step import Step
from brimful.step.updates.tensor_parallel import TensorParallelUpdate
from brimful.step.updates.update import Update
from forked_ranks import Forked
from step.test_ranks import LENGTHS, tasks
from step.test_step import PACKED, PADDED
from tiny import FAMILIES, Family, sequences
from tolerances import STEP_FP64, difference

CPU = torch.device("cpu")
#: Biases in products that are cut by their inputs, and dropout between layers.
STARCODER = Family(config="Starcoder2Config", settings=FAMILIES["llama"].settings, pooling="last")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of as many steps as there are batches. tokens: most of a micro-batch. frozen: embeddings are not trained.

    The last batch of a run has fewer rows than the one before; the first has rows for one group alone.
    """

    family: str
    packed: bool = True
    adamw: bool = True
    tokens: int | None = None
    frozen: bool = False
    dropout: float = 0.0

    def model(self) -> Any:
        """In fp64, on training."""
        family = STARCODER if self.family == "starcoder2" else FAMILIES[self.family]
        model = family.model(3).train().double()
        for module in model.modules():
            if hasattr(module, "residual_dropout"):
                module.residual_dropout = self.dropout
        if self.frozen:
            model.get_input_embeddings().requires_grad_(False)
        return model


CASES = [
    Case(family="llama", adamw=False),
    Case(family="llama", packed=False, tokens=48),
    Case(family="llama", frozen=True, tokens=48),
    Case(family="qwen2"),  # biases of what is cut by its outputs
    Case(family="qwen3", tokens=48),  # norms of heads, in several micro-batches
    Case(family="starcoder2", dropout=0.2, packed=False),
]


def trained(ranks: Ranks, case: Case) -> dict[str, Any]:
    """Weights after the steps, put together in the process that leads, and what each step told."""
    torch.set_num_threads(1)
    task, targets = tasks()["single_label"]
    model = case.model()
    execution = PackedModel(model, FAMILIES["llama"].form) if case.packed else PaddedModel(model, "eager")
    precision = Precision(value="fp32", device=CPU, reason="a test")
    lever = Optimizer(value="adamw_torch" if case.adamw else "sgd", epsilon=1e-3, weight_decay=0.1)
    schedule = torch.full((9,), 0.01 if case.adamw else 0.1)
    if ranks.count == 1:
        update: Update = lever.update(model, schedule, precision, max_grad_norm=1.0)
    else:
        plan = TensorPlan.of(model)
        assert plan is not None
        given = lever.settings(model, precision, max_grad_norm=1.0)
        update = TensorParallelUpdate(model, schedule, plan=plan, device=CPU, **given)
    step = Step(execution, task, update, precision, seed=0, ranks=ranks)
    layout = PACKED if case.packed else PADDED
    layout = layout if case.tokens is None else layout.limited(case.tokens, 40)
    outcomes = []
    for number, lengths in enumerate(LENGTHS):
        ids, rows = sequences(lengths, seed=number), np.arange(len(lengths))
        of_rows = np.array([0.5, 2, 1, 1, 3, 1], dtype=np.float32)[: len(lengths)]
        targets_N, shares = targets[number][: len(lengths)], shares_of(np.array(lengths), ranks.data_count)
        whole = Whole(
            denominator=task.denominator(targets_N, of_rows), num_samples=len(lengths), num_tokens=sum(lengths),
            shares=[np.array(lengths)[rows] for rows in shares],
        )  # fmt: skip
        mine = shares[ranks.data_rank]
        batch = make_batch(
            number, rows[mine], [ids[i] for i in mine], None, targets_N[mine], task, layout,
            weights_N=of_rows[mine], whole=whole if ranks.data_count > 1 else None,
        )  # fmt: skip
        outcomes.append(step.run(batch).read())
    kept = update.kept().optimizer_states
    step.release()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy() if ranks.leads else None
    if ranks.leads:  # a plain model again
        execution(batch.arrived(0).inputs)
    return {"weights": weights, "states": kept, "told": [(o.loss, o.grad_norm, o.num_samples) for o in outcomes]}


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("count", [4, 2])
def test_processes_with_weights_together_learn_what_one_does(count: int, tmp_path: Path) -> None:
    """Of a group of two, and of two groups that share the rows; with weights of classes and of rows."""
    cases = CASES if count == 2 else [case for case in CASES if case.tokens and case.packed]

    def work(place: Place) -> list[dict[str, Any]]:
        with joined(place, CPU, tensor_parallel=2) as ranks:
            return [trained(ranks, case) for case in cases]

    found = Forked(tmp_path, count, work).results()
    for number, case in enumerate(cases):
        expected = trained(ALONE, case)
        assert difference(found[0][number]["weights"], expected["weights"]) < STEP_FP64, case
        for each in (rank[number] for rank in found):
            np.testing.assert_allclose(each["told"], expected["told"], rtol=1e-9)
            assert each["told"] == found[0][number]["told"]
            assert each["states"] < 0.6 * expected["states"] or not case.adamw


@pytest.mark.slow
def test_cut_layers_are_compared_with_whole_ones(tmp_path: Path) -> None:
    """A plan that leaves out sums of gradients, or cuts what is norms' to see whole, is found in all processes."""

    def refusal(ranks: Ranks, family: str, **other: str) -> str:
        model = FAMILIES[family].model(3)
        model._tp_plan = {name: style for name, style in {**model._tp_plan, **other}.items() if style}
        try:
            CutCheck(model, FAMILIES[family].form, max_length=32, device=CPU)(ranks)
        except OptionError as error:
            return str(error)
        return ""

    def work(place: Place) -> list[str]:
        torch.set_num_threads(1)
        norm, narrow = {"model.layers.*.self_attn.q_norm": ""}, {"model.layers.*.mlp.down_proj": "colwise"}
        with joined(place, CPU, tensor_parallel=2) as ranks:
            return [refusal(ranks, "qwen3"), refusal(ranks, "qwen3", **norm), refusal(ranks, "llama", **narrow)]

    for right, wrong, narrow in Forked(tmp_path, 2, work).results():
        assert right == ""
        assert "qwen3 computes something else, by an error of" in wrong
        assert "llama does not run: " in narrow


def test_plans_say_who_cannot_carry_them_out() -> None:
    assert TensorPlan.of(FAMILIES["bert"].model(3)) is None
    model = FAMILIES["llama"].model(3)
    plan = TensorPlan.of(model)
    assert plan is not None
    assert plan.why_not(model, 2) is None
    assert plan.why_not(model, 4) == "num_key_value_heads is 2, which 4 processes cannot share"
    assert plan.is_cut("model.layers.1.mlp.up_proj.weight")
    assert not plan.is_cut("model.norm.weight")
    narrow = FAMILIES["llama"].model(3, intermediate_size=23)
    assert "mlp.gate_proj is 23 wide, which 2 processes cannot share" in str(plan.why_not(narrow, 2))
    experts = TensorPlan(styles={"model.layers.0.mlp.experts": "moe_tp_experts"})
    assert "parts of kind moe_tp_experts" in str(experts.why_not(model, 2))
