"""Memory of the first batch's comparison: weights wide a layer at a time, and gradients that leave as they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import brimful
from brimful.engine import plain_pass
from brimful.engine.first_batch import compare
from brimful.levers.precision import choose_precision
from brimful.models.model_stats import layers_of
from engine.training.test_first_batch import SAMPLE
from engine.training.test_first_batch import make_step as with_sgd
from tiny import FAMILIES
from tolerances import difference

pytestmark = pytest.mark.filterwarnings("ignore:.* (saves nothing on a CPU|has no effect on gradients)")

SMALL = {"optim": "adamw_torch", "precision": "bf16", "weight_dtype": "bf16", "optimizer_state_dtype": "8bit"}


def make_step(model: Any, **options: Any) -> brimful.Step:
    return with_sgd(model, **SMALL | options)


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([each.detach().float().flatten() for each in tensors])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_weights_in_half_precision_are_wide_in_their_turn(family: str) -> None:
    """The gradient is that of the same numbers in fp32, to the bit of sums."""
    model = FAMILIES[family].model(num_hidden_layers=3)
    step = make_step(model)
    made, wide = step._built, list[int]()
    halves = [p for p in made.model.parameters() if p.dtype == torch.bfloat16]
    layers = layers_of(made.model)
    assert layers is not None
    for layer in layers:
        layer.register_forward_hook(lambda *_: wide.append(sum(p.dtype == torch.float32 for p in halves)))
    found = plain_pass.plain(made, SAMPLE, choose_precision("fp32", torch.device("cpu")))
    assert {p.dtype for p in halves} == {torch.bfloat16}
    assert all(p.grad is None for p in made.model.parameters())
    most = max(sum(id(p) in {id(h) for h in halves} for p in layer.parameters()) for layer in layers)
    assert wide
    assert max(wide) <= most
    for parameter in halves:
        parameter.data = parameter.data.float()
    expected = plain_pass.plain(made, SAMPLE, choose_precision("fp32", torch.device("cpu")))
    assert torch.equal(found.losses_N, expected.losses_N)
    assert difference(flat(found.gradients), flat(expected.gradients)) < 1e-6


@pytest.mark.sampled
@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": "full"}, {"stream_weights": "host"}])
def test_gradients_of_an_update_in_the_backward_pass_leave(
    settings: dict[str, Any],
) -> None:
    step = make_step(FAMILIES["bert"].model(), optimizer_in_backward=True, **settings)
    update, most = step._built.step.update, list[int]()
    counted: Callable[[Any], None] = lambda _: most.append(  # noqa: E731
        sum(p.grad is not None for p in update.parameters)
    )
    hooks = [parameter.register_post_accumulate_grad_hook(counted) for parameter in update.parameters]
    found = compare(step._built, SAMPLE)
    for hook in hooks:
        hook.remove()  # a step by our optimizers takes none
    assert found.passed, found.reason
    layer = update.model.bert.encoder.layer[0]
    assert max(most) <= len(list(layer.parameters())) + (6 if settings.get("stream_weights") else 0)
    assert step.run(step.batch([{"input_ids": [3, 5, 7], "labels": 1}])).read().applied


def test_passes_of_the_plain_model_are_of_half_as_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, real = list[int](), plain_pass._plain_losses

    def heard(form: Any, weights: Any, rows: Any, members: Any, *more: Any) -> Any:
        sizes.append(len(members) * max(len(rows.ids[i]) for i in members))
        return real(form, weights, rows, members, *more)

    monkeypatch.setattr(plain_pass, "_plain_losses", heard)
    step = make_step(FAMILIES["bert"].model(), token_budget=80)
    assert compare(step._built, SAMPLE).passed
    assert max(sizes) <= 40
    assert len(sizes) > 2


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer_offload": True},
        {"optimizer_state_dtype": "8bit"},
        {"weight_dtype": "bf16", "precision": "bf16"},
        {"optimizer_in_backward": True},
        {"optimizer_in_backward": True, "stream_weights": "host"},
    ],
)
def test_the_comparison_leaves_no_gradient_to_the_first_update(settings: dict[str, Any]) -> None:
    """The gradient's norm is the same of a batch in one piece and in two, which are added up."""
    rows = [{"input_ids": list(range(3, 43)), "labels": i % 2} for i in range(4)]
    found = []
    for budget in (200, 80):
        model = FAMILIES["bert"].model()
        step = with_sgd(model, optim="adamw_torch", max_grad_norm=0.0, token_budget=budget, **settings)
        batch = step.batch(rows)
        assert len(batch.micro_batches) == (1 if budget == 200 else 2)
        found.append(step.run(batch).read().grad_norm)
        assert step.first_batch is not None
        assert step.first_batch.passed
    assert found[0] == pytest.approx(found[1], rel=1e-2 if "weight_dtype" in settings else 1e-5)


def test_large_gradients_are_added_up_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with room for them; over all passes the same bits, and none is left in the model."""
    step = make_step(FAMILIES["bert"].model(), token_budget=80, weight_dtype="fp32", optimizer_state_dtype="fp32")
    made, found, at_once = step._built, list[Any](), list[int]()
    real = plain_pass._take

    def counted(taken: Any, name: str, gradient: torch.Tensor) -> None:
        at_once.append(1)
        real(taken, name, gradient)

    monkeypatch.setattr(plain_pass, "_take", counted)
    for stay in (False, True):
        monkeypatch.setattr(plain_pass, "_may_stay", lambda *_, stay=stay: stay)
        at_once.clear()
        found.append((plain_pass.plain(made, SAMPLE, choose_precision("fp32", torch.device("cpu"))), len(at_once)))
        assert all(p.grad is None for p in made.model.parameters())
    (leaving, often), (staying, once) = found
    assert once < often
    assert torch.equal(leaving.losses_N, staying.losses_N)
    assert all(torch.equal(one, other) for one, other in zip(leaving.gradients, staying.gradients, strict=True))
