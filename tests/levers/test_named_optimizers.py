"""Optimizers by transformers' names: the steps of a plain loop with Trainer's own, resumed bit for bit, and refused."""

from __future__ import annotations

import copy
import importlib.util
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer

import brimful
from brimful.core.errors import Interrupted, OptionError
from brimful.core.options.choices import OptimizerChoice
from brimful.engine.inference import evaluate_rows
from brimful.engine.training import evaluations
from brimful.engine.training.checkpoint import load_checkpoint
from brimful.levers import optimizer_names
from brimful.levers.optimizer import Optimizer
from brimful.levers.optimizer_names import OPTIMIZERS, WITH_32_BITS, make_optimizers
from brimful.step.precision import Precision
from brimful.step.step import Step, make_schedule
from brimful.step.updates.lion import Lion
from runs import save_tiny_model, single_label_rows, write_rows
from step.test_step import CPU, ROWS, STEPS, TASK, execution_of, plain_run, same, snapshot, weights
from tiny import FAMILIES
from tolerances import PAIR_OF_LEVERS, RUN_LOSS_FP32, RUN_WEIGHTS_FP32, difference

#: bitsandbytes' own word about its paged ones, which the recipe has.
UNPAGED = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
#: Names whose steps can be compared number by number: all states in 32 bits. Those of Lion are signs, which rounding
#: turns: tests/step/updates/test_on_device.py.
IN_32_BITS = [name for name in OPTIMIZERS if "8bit" not in name and "4bit" not in name and "lion" not in name]
RATE = 2e-3


def installed(name: str) -> Any:
    package = OPTIMIZERS[name].package
    missing = package is not None and importlib.util.find_spec(package) is None
    return pytest.param(name, marks=[UNPAGED, pytest.mark.skipif(missing, reason=f"without {package}")])


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """torchao compiles its update for each shape, which takes a minute on a CPU."""
    with torch.compiler.set_stance("force_eager"):
        yield


def make_step(name: str, model: Any, optim_args: str | None = None) -> Step:
    precision = Precision(value="fp32", device=CPU, reason="a test")
    lever = Optimizer(value=name, optim_args=optim_args)  # type: ignore[arg-type]
    update = lever.update(model, make_schedule("linear", RATE, STEPS, 3), precision, max_grad_norm=0.05)
    return Step(execution_of(model), TASK, update, precision, seed=0)


def by_trainer(name: str, model: nn.Module, optim_args: str | None = None) -> torch.optim.Optimizer:
    arguments: Any = SimpleNamespace(
        optim=name, optim_args=optim_args, learning_rate=RATE, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8,
        weight_decay=0.0, warmup_steps=0,
    )  # fmt: skip
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
    made: torch.optim.Optimizer = kind([{"params": list(model.parameters()), "weight_decay": 0.0}], **settings)
    if hasattr(made, "train"):
        made.train()
    return made


@pytest.mark.slow
@pytest.mark.parametrize("asked", [*(installed(name) for name in IN_32_BITS), "rmsprop alpha=0.9", "sgd momentum=0.9"])
def test_ten_steps_are_those_of_trainers_optimizer(asked: str) -> None:
    name, _, given = asked.partition(" ")
    optim_args = given or None
    model = FAMILIES["bert"].model(initializer_range=0.02)
    plain = copy.deepcopy(model)
    expected = plain_run(plain, by_trainer(name, plain, optim_args), 0.05)
    step = make_step(name, model, optim_args)
    outcomes = [step.run(ROWS.batch(number)).read() for number in range(STEPS)]
    assert [o.loss for o in outcomes] == pytest.approx(expected, rel=RUN_LOSS_FP32)
    assert difference(learned(model), learned(plain)) < RUN_WEIGHTS_FP32


def learned(model: nn.Module) -> torch.Tensor:
    """All weights but biases of keys, whose gradients are zero but for rounding, which Adafactor scales up to one."""
    weights = (p.detach().cpu() for name, p in model.named_parameters() if not name.endswith("key.bias"))
    return torch.cat([weight.flatten() for weight in weights])


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", [installed(name) for name in OPTIMIZERS])
def test_a_continued_run_is_bit_equal(name: str) -> None:
    """Averages of weights, numbers by group and states of 8 bits among it, and evaluation in between."""
    wide = {"hidden_size": 64, "intermediate_size": 128}  # small tensors keep 32 bits
    through = make_step(name, FAMILIES["bert"].model(**wide))
    whole = [through.run(ROWS.batch(number)).read() for number in range(STEPS)]
    stopped = make_step(name, FAMILIES["bert"].model(**wide))
    for number in range(4):
        stopped.run(ROWS.batch(number))
    saved = snapshot(stopped)
    resumed = make_step(name, FAMILIES["bert"].model(3, **wide))
    resumed.load_state(saved)
    found = []
    for number in range(4, STEPS):
        with resumed.update.reading():
            pass
        found.append(resumed.run(ROWS.batch(number)).read())
    assert found == whole[4:]
    assert same(snapshot(resumed), snapshot(through))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", [installed(name) for name in OPTIMIZERS if name != "adafactor"])
def test_states_have_the_bytes_that_costs_are_counted_by(name: str) -> None:
    model = FAMILIES["bert"].model(hidden_size=64, intermediate_size=128)
    step = make_step(name, model)
    step.run(ROWS.batch(0))
    weight = model.bert.encoder.layer[0].intermediate.dense.weight
    states = next(each.state[weight] for each in step.update._optimizers if each.state.get(weight))
    kept = [t for key, t in states.items() if isinstance(t, torch.Tensor) and t.numel() >= weight.numel()]
    found = sum(t.codes.nbytes if hasattr(t, "codes") else t.nbytes for t in kept)
    assert found == OPTIMIZERS[name].state_bytes * weight.numel()


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", [installed(name) for name in WITH_32_BITS if "lion" not in name])
def test_states_in_fewer_bits_learn_what_32_do(name: str) -> None:
    found = []
    for each in (name, WITH_32_BITS[name]):
        model = FAMILIES["bert"].model(hidden_size=64, intermediate_size=128, initializer_range=0.02)
        step = make_step(each, model)
        losses = [step.run(ROWS.batch(number)).read().loss for number in range(STEPS)]
        found.append((losses, learned(model)))
    (losses, weights), (expected, others) = found
    begun = learned(FAMILIES["bert"].model(hidden_size=64, intermediate_size=128, initializer_range=0.02))
    assert losses == pytest.approx(expected, rel=PAIR_OF_LEVERS["training"][0])
    most = 0.75 if "4bit" in name else 0.25  # of the way from where both began
    assert 0 < difference(weights - begun, others - begun) < most


def test_embeddings_keep_32_bits() -> None:
    pytest.importorskip("bitsandbytes")
    model = FAMILIES["bert"].model(hidden_size=64, intermediate_size=128)
    step = make_step("adamw_8bit", model)
    step.run(ROWS.batch(0))
    state = step.state().optimizer
    assert {t.dtype for t in state["bert.embeddings.word_embeddings.weight"].tensors.values()} == {torch.float32}
    kept = state["bert.encoder.layer.0.intermediate.dense.weight"].tensors
    assert kept["state1"].dtype == kept["state2"].dtype == torch.uint8


def test_what_is_judged_without_a_schedule_is_an_average() -> None:
    pytest.importorskip("schedulefree")
    model = FAMILIES["bert"].model()
    step = make_step("schedule_free_adamw", model)
    for number in range(3):
        step.run(ROWS.batch(number))
    trained = weights(model)
    with step.update.reading():
        judged = weights(model)
        assert difference(judged, trained) > 0
    assert torch.equal(weights(model), trained)
    step.release()
    assert difference(weights(model), judged) < RUN_WEIGHTS_FP32


def test_a_checkpoint_without_a_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the weights that are trained, also where a run is stopped while averages of them are evaluated; a model
    made of it has the averages."""
    pytest.importorskip("schedulefree")
    data = write_rows(tmp_path / "rows.jsonl", single_label_rows(48))
    asked: dict[str, Any] = {
        "model": save_tiny_model(tmp_path / "base"), "batch_size": 8, "optim": "schedule_free_adamw", "device": "cpu",
        "learning_rate": RATE, "max_steps": 4, "eval_steps": 2,
    }  # fmt: skip
    brimful.train(data, output=tmp_path / "run", **asked)
    folders = brimful.export(tmp_path / "run"), tmp_path / "run" / "model"
    exported, saved = (load_file(folder / "model.safetensors") for folder in folders)
    assert max(difference(exported[name], saved[name]) for name in saved) < RUN_WEIGHTS_FP32

    def told(*given: Any, **named: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return evaluate_rows(*given, **named)

    monkeypatch.setattr(evaluations, "evaluate_rows", told)
    with pytest.raises(Interrupted):
        brimful.train(data, output=tmp_path / "stopped", **asked)
    state = load_checkpoint(tmp_path / "stopped" / "checkpoints" / "step-00000002").state
    assert [group["train_mode"] for group in state.groups] == [True, True]


def test_every_name_is_trainers_and_has_its_facts() -> None:
    from transformers.training_args import OptimizerNames

    names = set(get_args(OptimizerChoice))
    assert names <= {each.value for each in OptimizerNames}
    assert names == {*OPTIMIZERS, "adamw_torch", "adamw_torch_fused", "sgd"}
    assert set(WITH_32_BITS) | set(WITH_32_BITS.values()) <= names


def test_the_guide_names_the_package_of_each() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guides" / "memory.md").read_text("utf-8")
    table = text.partition("| package, besides torch |\n")[2].partition("\n\n")[0]
    lines = [[re.findall(r"`(\w+)`", cell) for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]
    found = {name: package[0] if package else None for names, package in lines for name in names}
    assert found == {
        name: OPTIMIZERS[name].package if name in OPTIMIZERS else None for name in get_args(OptimizerChoice)
    }


def test_a_run_by_the_command_line_and_its_record(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", single_label_rows(48))
    model = save_tiny_model(tmp_path / "base")
    run = brimful.train(
        data, model=model, output=tmp_path / "run", max_steps=3, batch_size=8, optim="adafactor", device="cpu",
        eval_split=0.2,
    )  # fmt: skip
    (line,) = [each for each in run.recipe.levers if each.name == "optimizer"]
    assert (line.value, line.arithmetic) == ("adafactor", "training")
    assert "1804.04235" in line.source


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_names.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(OptionError, match="needs the package bitsandbytes"):
        brimful.train("x.csv", model="x", output="y", optim="adamw_8bit", device="cpu")


def test_lion_in_32_bits_is_ours_and_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_names.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    optimizer_names.check_installed("lion_32bit")
    model = FAMILIES["bert"].model()
    lever = Optimizer(value="lion_32bit", beta1=0.8, beta2=0.9, weight_decay=0.1)
    precision = Precision(value="fp32", device=CPU, reason="a test")
    update: Any = lever.update(model, make_schedule("linear", RATE, STEPS, 3), precision, max_grad_norm=0.05)
    (ours,) = update._optimizers
    assert isinstance(ours, Lion)
    assert ours._betas == (0.8, 0.9)
    assert [group["weight_decay"] for group in ours.param_groups] == [0.1, 0.0]
    assert update.on_device
    with pytest.raises(OptionError, match="--optim lion_32bit does not take alpha, which --optim-args has"):
        make_step("lion_32bit", FAMILIES["bert"].model(), "alpha=1")


def test_settings_that_it_does_not_take_are_refused() -> None:
    groups = [{"params": list(FAMILIES["bert"].model().parameters())}]
    asked = {"weight_decay": 0.0, "learning_rate": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
    with pytest.raises(OptionError, match="--optim rmsprop with --optim-args alpha=much does not work"):
        make_optimizers("rmsprop", groups, [], asked | {"optim_args": "alpha=much"})
    for name, given in (("sgd", "momntum=0.9"), ("adafactor", "scale_parameter=False,warm=1")):
        with pytest.raises(OptionError, match=f"--optim {name} does not take (momntum|warm)"):  # transformers would
            make_optimizers(name, groups, [], asked | {"optim_args": given, "warmup_steps": 0})
    assert make_optimizers("sgd", groups, [], asked | {"optim_args": "momentum=0.0", "warmup_steps": 0})
    with pytest.raises(OptionError, match="maximize in --optim-args has no effect: transformers does not pass it on"):
        make_optimizers("sgd", groups, [], asked | {"optim_args": "momentum=0.5,maximize=True", "warmup_steps": 0})
    for given in ("scale_parameter=True", "relative_step=True"):  # which transformers sets itself
        with pytest.raises(OptionError, match="has no effect: transformers does not pass it on to --optim adafactor"):
            make_optimizers("adafactor", groups, [], asked | {"optim_args": given, "warmup_steps": 0})
    for given, option in (("momentum=0.9, lr=5", "--learning-rate"), ("weight_decay=5", "--weight-decay")):
        with pytest.raises(OptionError, match="in --optim-args has no effect") as caught:
            brimful.train("x.csv", model="x", output="y", optim="sgd", optim_args=given, device="cpu")
        assert caught.value.hint == f"it is an option of its own: {option}"


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", [{"foreach": False}, {"foreach": True}, {"fused": False}, {"fused": True}], ids=str)
def test_each_kind_of_adamw_learns_as_torchs_own(kernels: dict[str, bool]) -> None:
    ((name, value),) = kernels.items()
    model = FAMILIES["bert"].model(initializer_range=0.02)
    plain = copy.deepcopy(model)
    expected = plain_run(plain, torch.optim.AdamW(plain.parameters(), lr=RATE, weight_decay=0.0, **kernels), 0.05)
    step = make_step("adamw_torch", model, f"{name}={value}")
    made = [update_class(each) for each in step.update._optimizers]
    assert made == [("AdamW", kernels.get("foreach", False), kernels.get("fused", False))]
    outcomes = [step.run(ROWS.batch(number)).read() for number in range(4)]
    saved = snapshot(step)
    outcomes += [step.run(ROWS.batch(number)).read() for number in range(4, STEPS)]
    assert [o.loss for o in outcomes] == pytest.approx(expected, rel=RUN_LOSS_FP32)
    assert difference(weights(model), weights(plain)) < RUN_WEIGHTS_FP32
    resumed = make_step("adamw_torch", FAMILIES["bert"].model(3), f"{name}={value}")
    resumed.load_state(saved)
    assert [resumed.run(ROWS.batch(number)).read() for number in range(4, STEPS)] == outcomes[4:]
    assert same(snapshot(resumed), snapshot(step))


def update_class(optimizer: torch.optim.Optimizer) -> tuple[str, bool, bool]:
    """Its name, and whether it is a foreach or a fused one."""
    (settings,) = {(group["foreach"], group["fused"]) for group in optimizer.param_groups}
    return (type(optimizer).__name__, *settings)


@pytest.mark.parametrize(
    ("optim", "given", "why"),
    [
        ("adamw_torch", {"optim_args": "amsgrad=True"}, "takes only foreach and fused, each True or False"),
        ("adamw_torch", {"optim_args": "foreach=2"}, "takes only foreach and fused, each True or False"),
        ("adamw_torch", {"optim_args": "foreach=True,foreach=False"}, "takes only foreach and fused"),
        ("adamw_torch", {"optim_args": "foreach=True, fused=True"}, "takes one of the two"),
        ("adamw_torch_fused", {"optim_args": "foreach=True"}, "takes only fused=True"),
        ("adamw_torch", {"optim_args": "fused=False", "optimizer_offload": True}, "--optimizer-offload updates a part"),
    ],
)
def test_kinds_of_adamw_that_there_are_not(optim: str, given: dict[str, Any], why: str) -> None:
    with pytest.raises(OptionError, match=why) as caught:
        brimful.train("x.csv", model="x", output="y", optim=optim, device="cpu", **given)
    assert caught.value.hint
