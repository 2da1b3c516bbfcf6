"""The step that will run, held to the plain model on the first batch; and models whose training is another matter."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import brimful
from brimful.core.callbacks import Callbacks
from brimful.core.records import FirstBatch
from brimful.engine import first_batch, plain_pass
from brimful.engine.first_batch import compare
from brimful.engine.plain_pass import Rows
from brimful.levers import facts
from brimful.levers.execution import ExecutionMode
from brimful.levers.precision import choose_precision
from brimful.models.model_stats import layers_of
from brimful.models.packed import own_scans, packed_forward
from brimful.models.packed.equivalence import check_equivalence
from brimful.models.packed.narrow_windows import NarrowWindows
from brimful.models.packed.packed_forward import PackedModel, PaddedModel
from brimful.step.step import Probed, Step
from brimful.tasks.task import make_task
from failing_allocator import FailingAllocator
from heads.tiny_heads import tiny_model
from plain import gradient, padded, plain_loss
from runs import learned
from tiny import FAMILIES, sequences
from wrong_attention import WRONG

IDS = sequences([5, 9, 30, 12, 7])
CLASSES = np.array([0, 1, 2, 1, 0])
ROWS = [{"input_ids": ids, "labels": label} for ids, label in zip(IDS, CLASSES, strict=True)]


def make_step(model: Any, **options: Any) -> brimful.Step:
    given = {
        "batch_size": 8,
        "optim": "sgd",
        "learning_rate": 1.0,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
    }
    return brimful.Step(model, num_steps=4, device="cpu", **{"precision": "fp32"} | given | options)


@pytest.mark.parametrize(("kind", "lengths", "count"), [
    ("bert", [9] * 60, 56), ("bert", [600, 9], 1), ("longformer", [9] * 60, 4), ("longformer", [200] * 5, 2),
])  # fmt: skip
def test_fewer_rows_are_compared_where_the_plain_model_pads_each_to_its_window(
    kind: str, lengths: list[int], count: int
) -> None:
    """Of 512 tokens here. Where the step takes as many, four rows are not more than it can."""
    model = tiny_model(kind)
    for module in model.modules():
        if hasattr(module, "one_sided_attn_window_size"):
            module.one_sided_attn_window_size = 256
    rows = Rows(ids=sequences(lengths), types=None, targets_N=np.zeros(len(lengths)))
    assert len(rows.some("cpu", NarrowWindows(model).plain_length).ids) == count


def test_a_model_that_mixes_rows_in_training_is_padded_and_whole() -> None:
    """A BatchNorm head: its loss and gradient are those of the whole batch, not of parts and not of empty slots."""
    model = FAMILIES["bert"].model()
    model.classifier = torch.nn.Sequential(torch.nn.BatchNorm1d(16), model.classifier)
    plain = copy.deepcopy(model).train()
    step = make_step(model, token_budget=32)
    assert not step.packed
    (packing,) = (lever for lever in step.recipe.levers if lever.name == "packing")
    assert "BatchNorm" in packing.reason
    loss = plain_loss(make_task(step._task.space, CLASSES, None, 0.0), plain(**padded(IDS, None, 0)).logits, CLASSES)
    before = torch.cat([p.detach().flatten() for p in plain.parameters()])
    loss.backward()
    assert step.run(step.batch(ROWS)).read().loss == pytest.approx(loss.item(), rel=1e-5)
    after = torch.cat([p.detach().flatten() for p in step.release().parameters()])
    expected = gradient(plain)
    assert float((before - after - expected).norm() / expected.norm()) < 1e-5


# --- what is compared -------------------------------------------------------------------------------------------------

SIZES = {"max_length": 48, "batch_size": 8, "max_steps": 4, "learning_rate": 1e-3, "device": "cpu"}
SAMPLE = Rows(ids=IDS, types=None, targets_N=CLASSES)


class _Heard(Callbacks):
    def __init__(self) -> None:
        self.notes, self.warnings = list[str](), list[str]()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warning(self, text: str) -> None:
        self.warnings.append(text)


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"packing": "off"}, {"token_budget": 24}, {"precision": "bf16"}])
def test_the_first_batch_is_compared(model: Path, rows: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    heard = _Heard()
    run = brimful.train(rows, model=model, output=tmp_path / "run", callbacks=heard, **SIZES, **options)
    found = run.first_batch
    assert found is not None
    assert found.passed, found.reason
    assert found.fallbacks == ()
    assert found.num_rows == 8
    assert json.loads((tmp_path / "run/run.json").read_text())["first_batch"]["passed"] is True
    assert found.gradient_error is not None
    assert found.gradient_error < (0.05 if options.get("precision") else 1e-5)
    assert any("first batch: losses of 8 rows" in note for note in heard.notes)
    assert not any("first batch" in warning for warning in heard.warnings)


def test_what_takes_minutes_is_said_before(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that torch's compiler makes, once: while the first batch waits for them nothing else is said."""
    heard = _Heard()
    monkeypatch.setattr(heard, "stage", heard.notes.append)
    monkeypatch.setattr(ExecutionMode, "compile_seconds", lambda *_: 40.0)
    brimful.train(rows, model=model, output=tmp_path / "run", callbacks=heard, **SIZES)
    said = [each for each in heard.notes if each.startswith(("compiling layers: 40 s or more", "first batch: "))]
    assert [each.partition(":")[0] for each in said] == ["compiling layers", "first batch"]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:--token-budget 24 is raised:UserWarning")
@pytest.mark.parametrize("options", [{}, {"token_budget": 24}, {"optim": "sgd"}])
def test_the_comparison_changes_nothing(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Bit for bit, with dropout; and the process's random streams."""
    state = torch.get_rng_state()
    brimful.train(rows, model=model, output=tmp_path / "with", **SIZES, **options)
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(Step, "probe", lambda *_: pytest.fail("not called"))
    equal = FirstBatch(num_rows=0, num_tokens=0, precision="fp32", passed=True, loss_error=0.0, gradient_error=0.0)
    monkeypatch.setattr(first_batch, "compare", lambda *_: equal)
    brimful.train(rows, model=model, output=tmp_path / "without", **SIZES, **options)
    assert learned(tmp_path / "with") == learned(tmp_path / "without")


def test_both_passes_of_both_sides_have_full_products() -> None:
    """Also where another library has allowed TF32 in this process, as Trainer does to compile."""
    seen: list[str] = []

    def look(*_: Any) -> None:
        seen.append(torch.get_float32_matmul_precision())

    def hear(_: Any, __: Any, output: torch.Tensor) -> None:
        look()
        if output.requires_grad:
            output.register_hook(look)

    model = FAMILIES["bert"].model()
    step = make_step(model)
    model.classifier.register_forward_hook(hear)
    torch.set_float32_matmul_precision("high")
    try:
        assert compare(step._built, SAMPLE).passed
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len(seen) >= 4
    assert set(seen) == {"highest"}


def test_the_plain_model_scans_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of a step is transformers' own code, in scans, too."""
    step = make_step(tiny_model("jamba"))
    assert compare(step._built, SAMPLE).passed
    monkeypatch.setattr(own_scans, "selective_scan", lambda *_, **__: pytest.fail("of the step"))
    plain_pass.plain(step._built, SAMPLE, choose_precision("fp32", torch.device("cpu")))


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["deberta-v2", "mpnet", "modernbert", "llama", "gemma2", "gpt2"])
def test_families_pass(name: str) -> None:
    """Against eager attention on padded rows, though encoders stand ready to be told of packed ones."""
    step = make_step(FAMILIES[name].model(dropout=0.2))
    assert step.packed
    found = compare(step._built, SAMPLE)
    assert found.passed, found.reason
    assert all(parameter.grad is None for parameter in step._built.model.parameters())


# --- what is found ----------------------------------------------------------------------------------------------------


def test_a_step_that_fails_is_not_run(model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure on rows that the plain model computes does not end the run."""

    def failing(self: PackedModel, *given: Any) -> Any:
        if self.model.training:
            raise ValueError("no such row")
        return run(self, *given)

    run = PackedModel.__call__
    brimful.train(rows, model=model, output=tmp_path / "run", dry_run=True, **SIZES)  # the equivalence check passes
    monkeypatch.setattr(PackedModel, "__call__", failing)
    heard = _Heard()
    ended = brimful.train(rows, model=model, output=tmp_path / "run", callbacks=heard, **SIZES)
    assert (ended.status, ended.packed, ended.first_batch and ended.first_batch.passed) == ("finished", False, True)
    assert [said for said in heard.warnings if "ended in ValueError: no such row; the plain model" in said]


class _NoHalfBackward(torch.autograd.Function):
    """As an operation whose backward pass alone has no half precision: YOSO's multiplies fp32 by bf16 there."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.half = torch.is_autocast_enabled("cpu")
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if ctx.half:
            return gradient.float() @ torch.ones(gradient.shape[-1], gradient.shape[-1], dtype=torch.bfloat16)
        return gradient


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("where", ["model", "compiler", "backward pass"])
def test_a_model_without_half_precision_runs_in_another(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As FNet on a GPU, whose transform has none: `auto` widens and says so, bf16 that was asked for is refused."""

    def without_half(self: PaddedModel, given: dict[str, Any]) -> Any:
        if where == "backward pass":
            return _NoHalfBackward.apply(logits(self, given))
        kind = RuntimeError if where == "model" else torch._dynamo.exc.TorchRuntimeError
        if torch.is_autocast_enabled("cpu"):
            said = "Unsupported dtype BFloat16" if where == "model" else "\"some\" not implemented for 'BFloat16'"
            raise kind(f"in a fake call\n  {said}")
        return logits(self, given)

    logits, plain_choice = PaddedModel._logits, choose_precision
    monkeypatch.setattr(PaddedModel, "_logits", without_half)
    monkeypatch.setattr(
        "brimful.engine.training.train.choose_precision",
        lambda asked, device: plain_choice("bf16" if asked == "auto" else asked, device),
    )
    heard, options = _Heard(), SIZES | {"packing": "off"}
    run = brimful.train(rows, model=model, output=tmp_path / "run", callbacks=heard, **options, precision="auto")
    assert run.first_batch is not None
    assert (run.recipe.value("precision"), run.first_batch.passed) == ("fp32", True)
    [reason] = [lever.reason for lever in run.recipe.levers if lever.name == "precision"]
    assert reason == "the model's own code has no half precision here"
    [said] = [each for each in heard.warnings if "half precision" in each]
    assert said.startswith("bert of transformers cannot run in half precision: ")
    assert said.endswith("; fp32 runs")
    assert run.first_batch.fallbacks == (said,)
    with pytest.raises(brimful.ModelError, match="in half precision: ") as refused:
        brimful.train(rows, model=model, output=tmp_path / "asked", **options, precision="bf16")
    assert "--precision tf32" in str(refused.value.hint)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["blind to segments", "causal", "gradient of queries and keys lost"])
def test_a_wrong_step_is_not_run(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, precision: str
) -> None:
    """Admitted at load, and wrong from then on: the plain path runs, and learns what it learns anyway."""
    options = {**SIZES, "precision": precision}
    brimful.train(rows, model=model, output=tmp_path / "plain", packing="off", **options)
    admitted = check_equivalence
    choose, change = packed_forward.choose_attention, WRONG[name][0]

    def check(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(packed_forward, "choose_attention", choose)
        found = admitted(*given, **named)
        monkeypatch.setattr(packed_forward, "choose_attention", lambda *kernel: change(choose(*kernel)))
        return found

    monkeypatch.setattr(facts, "check_equivalence", check)
    heard = _Heard()
    run = brimful.train(rows, model=model, output=tmp_path / "run", callbacks=heard, **options)
    assert run.first_batch is not None
    assert run.first_batch.passed
    assert len(run.first_batch.fallbacks) == 1
    assert "the plain model on padded rows runs" in run.first_batch.fallbacks[0]
    assert run.packed_reason == "off: answers of faster ways were not those of the plain model"
    assert not run.packed
    assert run.first_batch.fallbacks[0] in heard.warnings


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda step: setattr(step.task, "smoothing", 0.3),
        lambda step: setattr(step, "backward", _twice(step.backward)),
    ],
    ids=["another loss", "twice the gradient"],
)
def test_a_wrong_loss_or_gradient_is_found(change: Callable[[Any], Any]) -> None:
    step = make_step(FAMILIES["bert"].model())
    inner = step._built.step
    assert compare(step._built, SAMPLE).passed
    plain_task = copy.copy(inner.task)
    change(inner)
    real = plain_pass._Plain
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            plain_pass, "_Plain", lambda model, precision, _, *more: real(model, precision, plain_task, *more)
        )
        assert compare(step._built, SAMPLE).passed is False


def test_a_gradient_that_is_wrong_by_a_hundredth_is_found() -> None:
    """All of it, in fp32: a hundred times what a step may differ by, and nothing that the losses show."""
    step = make_step(FAMILIES["bert"].model())
    inner = step._built.step
    backward = inner.backward

    def longer(micro: Any) -> Any:
        rows = backward(micro)
        for weight in inner.update.named.values():
            weight.grad.mul_(1.01)
        return rows

    inner.backward = longer  # type: ignore[method-assign]
    found = compare(step._built, SAMPLE)
    assert found.passed is False
    assert found.gradient_error == pytest.approx(0.01, rel=0.01)
    assert "the gradient is off by 1.0e-02" in str(found.reason)


@pytest.mark.parametrize("part", ["losses", "gradient"])
@pytest.mark.parametrize(
    ("precision", "error"),
    [("fp64", 5e-6), ("fp32", 5e-4), ("tf32", 0.05), ("fp16", 0.025), ("bf16", 0.05), ("fp8", 1.0)],
)
def test_five_times_what_a_precision_may_differ_by_is_too_much(precision: str, error: float, part: str) -> None:
    """A tenth of it passes. Where the plain model loses nothing in the precision, its tolerance alone decides."""
    random = torch.Generator().manual_seed(0)
    losses_N = torch.rand(8, generator=random).double()
    gradients = [torch.randn(3, 5, generator=random).double() for _ in range(4)]
    expected = Probed(losses_N=losses_N, gradients=gradients)

    def judged(error: float) -> FirstBatch:
        of_losses, of_gradient = (1.0 + error, 1.0) if part == "losses" else (1.0, 1.0 + error)
        ours = Probed(losses_N=losses_N * of_losses, gradients=[each * of_gradient for each in gradients])
        update = SimpleNamespace(named=dict.fromkeys("abcd"))
        plan = object() if precision == "fp8" else None
        value = SimpleNamespace(value="bf16" if precision == "fp8" else precision, plan=plan)
        made = SimpleNamespace(precision=value, step=SimpleNamespace(device=torch.device("cpu"), update=update))
        nothing = FirstBatch(num_rows=8, num_tokens=0, precision=precision)
        return first_batch._judged(nothing, cast(Any, made), ours, expected, expected)

    assert judged(error).passed is False
    assert part in str(judged(error).reason)
    assert judged(error / 10).passed is True


def _twice(backward: Any) -> Any:
    def run(micro: Any) -> Any:
        backward(micro)
        return backward(micro)

    return run


def test_a_model_that_is_not_finite_is_left_alone() -> None:
    model = FAMILIES["bert"].model()
    torch.nn.init.constant_(model.classifier.weight, float("nan"))
    found = compare(make_step(model)._built, SAMPLE)
    assert found.passed is None
    assert "not finite" in str(found.reason)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_lost_gradient_that_is_small_is_found(precision: str) -> None:
    """One parameter's of many, which the whole gradient hardly shows."""
    step = make_step(FAMILIES["bert"].model(num_hidden_layers=4), precision=precision)
    inner = step._built.step
    query = step._built.model.bert.encoder.layer[1].attention.self.query.weight
    assert compare(step._built, SAMPLE).passed
    backward = inner.backward

    def lose(micro: Any) -> Any:
        rows = backward(micro)
        query.grad.zero_()
        return rows

    inner.backward = lose  # type: ignore[method-assign]
    found = compare(step._built, SAMPLE)
    assert found.passed is False
    assert found.worst_parameter == "bert.encoder.layer.1.attention.self.query.weight"
    assert found.worst_error == pytest.approx(1.0)
    assert f"the gradient of {found.worst_parameter} is off by 1.0e+00" in str(found.reason)


def test_statistics_of_batches_are_as_before() -> None:
    model = FAMILIES["bert"].model()
    model.classifier = torch.nn.Sequential(torch.nn.BatchNorm1d(16), model.classifier)
    step = make_step(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = compare(step._built, SAMPLE)
    assert found.passed, found.reason
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_a_buffer_that_a_module_replaces_is_as_before() -> None:
    class Counting(torch.nn.Module):
        """Keeps how often it was called in a buffer that it makes anew."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return x

    model = FAMILIES["bert"].model()
    model.classifier = torch.nn.Sequential(counting := Counting(), model.classifier)
    step = make_step(model)
    before = counting.calls
    found = compare(step._built, SAMPLE)
    assert found.passed, found.reason
    assert counting.calls is before
    assert before == 0


def test_the_plain_model_keeps_inputs_of_layers_alone_and_is_left_as_it_was() -> None:
    """By torch's checkpointing: each layer is called twice, and the gradient is that of all activations kept."""
    step, calls = make_step(FAMILIES["bert"].model()), list[str]()
    made, layers = step._built, layers_of(step._built.model)
    assert layers is not None
    before = [dict(vars(layer)) for layer in layers]
    hooks = [layer.register_forward_pre_hook(lambda *_: calls.append("layer")) for layer in layers]
    found = plain_pass.plain(made, SAMPLE, made.precision)
    for hook in hooks:
        hook.remove()
    assert len(calls) in (len(layers), 2 * len(layers))  # by transformers' release, the hook is in what is recomputed
    assert [{name: vars(layer).get(name) for name in was} for layer, was in zip(layers, before, strict=True)] == before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_pass, "_recomputed_by_torch", lambda _: nullcontext())
        kept = plain_pass.plain(made, SAMPLE, made.precision)
    assert all(torch.equal(one, other) for one, other in zip(found.gradients, kept.gradients, strict=True))
    assert not any(gradient.is_cuda for gradient in found.gradients)


# --- memory that runs out ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"packing": "off", "precision": "bf16"}], ids=["packed", "padded in bf16"])
def test_wherever_memory_runs_out_fewer_rows_are_compared_and_nothing_is_changed(options: dict[str, Any]) -> None:
    """In the plain model, in what it loses, in the step and in the judgement: twenty points."""
    step = make_step(FAMILIES["bert"].model(dropout=0.1, num_hidden_layers=1), **options)
    built = step._built
    with (whole := FailingAllocator()):
        assert compare(built, SAMPLE).passed
    before = {name: weight.clone() for name, weight in built.step.tensors().items()}
    for point in np.linspace(1, whole.num_allocations, 10).astype(int).tolist():
        with (allocator := FailingAllocator([point])):
            found = compare(built, SAMPLE)
        assert len(allocator.failed) == 1
        assert (found.passed, found.num_rows, found.num_left_out) == (True, 2, 3), (point, allocator.failed, found)
        assert all(torch.equal(weight, before[name]) for name, weight in built.step.tensors().items())
        assert all(parameter.grad is None for parameter in built.model.parameters())
        assert int(built.step.update.applied) == 0
        assert not built.step.update.committed
    assert compare(built, SAMPLE).num_left_out == 0


def test_what_does_not_fit_at_all_is_not_compared_and_that_is_said(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(first_batch, "plain", full)
    heard = _Heard()
    run = brimful.train(rows, model=model, output=tmp_path / "run", callbacks=heard, **SIZES)
    found = run.first_batch
    assert found is not None
    assert (run.status, found.passed, found.num_rows, found.num_left_out) == ("finished", None, 1, 7)
    assert sum("memory does not suffice for one row" in said for said in heard.warnings) == 1
