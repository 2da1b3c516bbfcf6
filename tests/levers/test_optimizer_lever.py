"""Parameters that decay, and kernels that update them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    AutoModelForSequenceClassification,
    FunnelConfig,
    T5Config,
    Trainer,
    TrainingArguments,
    XLNetConfig,
)

from brimful.levers.checkpointing import Checkpointing
from brimful.levers.optimizer import Optimizer, decayed_names, parameter_groups
from brimful.levers.optimizer_names import without_effect
from brimful.levers.streaming import Streaming
from brimful.levers.token_budget import TokenBudget
from levers.assemblies import assembly_of
from tiny import FAMILIES


def by_trainer(model: Any) -> set[str]:
    return set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_decays_is_what_decays_in_trainer(family: str) -> None:
    model = FAMILIES[family].model()
    assert decayed_names(model) == by_trainer(model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    decayed, others = parameter_groups(model, decayed_names(model), 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == by_trainer(model) & set(trained)
    assert len(decayed["params"]) + len(others["params"]) == len(trained)


@pytest.mark.parametrize(
    "config",
    [
        T5Config(vocab_size=99, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4, pad_token_id=0),
        XLNetConfig(vocab_size=99, d_model=16, n_layer=1, n_head=4, d_inner=16),
        FunnelConfig(vocab_size=99, d_model=16, n_head=4, d_head=4, d_inner=16, block_sizes=[1]),
    ],
    ids=["t5", "xlnet", "funnel"],
)
def test_in_families_that_run_padded(config: Any) -> None:
    model = AutoModelForSequenceClassification.from_config(config)
    assert decayed_names(model) == by_trainer(model)


def test_relative_attention_biases_do_not_decay() -> None:
    """Tables by their shape, biases by their name."""
    model = FAMILIES["mpnet"].model()
    name = "mpnet.encoder.relative_attention_bias.weight"
    assert dict(model.named_parameters())[name].ndim == 2
    assert name not in decayed_names(model)


def test_the_recipe_names_the_kernels() -> None:
    model = FAMILIES["bert"].model()
    reasons = {"adamw_torch": "ours are for fp32 weights on a GPU", "sgd": "ours are of AdamW"}
    for optim, why in reasons.items():
        line = assembly_of(model, optim=optim).lever(Optimizer).line()
        assert line.value == optim
        assert line.reason == f"asked for; torch's fused kernels ({why}), fp32 weights and states"
    said = {
        "foreach=False": "torch's loop over weights; the host waits for each step's gradient",
        "foreach=True": "torch's foreach kernels; the host waits for each step's gradient",
        "fused=True": "torch's fused kernels",
    }
    for optim_args, kernels in said.items():
        line = assembly_of(model, optim="adamw_torch", optim_args=optim_args).lever(Optimizer).line()
        assert line.reason == f"asked for; {kernels}, fp32 weights and states"
        assert line.arithmetic == "exact"


def test_the_recipe_says_where_states_are_not_paged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brimful.levers.optimizer.check_installed", lambda _: None)
    monkeypatch.setattr(Optimizer, "apply", lambda *_: None)
    for optim, said in (("paged_adamw_8bit", True), ("adamw_8bit", False)):
        line = assembly_of(FAMILIES["bert"].model(), optim=optim).lever(Optimizer).line()
        assert ("; not paged on a CPU" in line.reason) == said


@pytest.mark.parametrize(
    ("asked", "count", "larger"),
    [
        ({"token_budget": 64, "packing": "auto"}, 2, "--token-budget"),
        ({"token_budget": 4096, "packing": "auto"}, None, ""),
        ({"per_device_batch_size": 1, "gradient_accumulation_steps": 4}, 4, "--per-device-batch-size"),
    ],
)
def test_updates_in_the_backward_pass_of_several_micro_batches_are_warned_of(
    asked: dict[str, Any], count: int | None, larger: str
) -> None:
    """Once: gradients are summed up then, and take what they would without."""
    warned: list[str] = []
    asked = {"packing": "off", "optimizer_in_backward": True, "max_grad_norm": 0.0, "optim": "adamw_torch"} | asked
    assembly = assembly_of(FAMILIES["bert"].model(), warn=warned.append, lengths=(30, 30, 30, 30), **asked)
    assembly.lever(TokenBudget)
    assembly.lever(Optimizer)
    expected = [
        f"--optimizer-in-backward has no effect on gradients' memory: a batch is {count} micro-batches, whose gradients"
        f" are summed up; raise {larger}, or lower --batch-size"
    ]
    assert warned == (expected if count else [])


@pytest.mark.parametrize(
    ("asked", "flag"),
    [
        ({"optimizer_offload": True}, "--optimizer-offload"),
        ({"stream_weights": "host"}, "--stream-weights host"),
        ({"gradient_checkpointing": "offload"}, "--gradient-checkpointing offload"),
        ({"stream_weights": "disk"}, None),
    ],
)
def test_levers_that_move_memory_to_the_host_are_warned_of_on_a_cpu(asked: dict[str, Any], flag: str | None) -> None:
    warned: list[str] = []
    assembly = assembly_of(FAMILIES["bert"].model(num_hidden_layers=3), warn=warned.append, **asked)
    assembly.recipe((Checkpointing, Streaming, Optimizer), "cpu")
    expected = f"{flag} saves nothing on a CPU, whose memory is the host's, and takes more of it: leave it out"
    assert warned == ([expected] if flag else [])


def test_the_recipe_says_the_schedule_of_an_optimizer_that_needs_none() -> None:
    pytest.importorskip("schedulefree")
    for asked, said in (({}, "constant_with_warmup"), ({"lr_scheduler_type": "cosine"}, "cosine")):
        assembly = assembly_of(FAMILIES["bert"].model(), optim="schedule_free_adamw", **asked)
        assert f"; learning rate {said}, and weights are averaged" in assembly.lever(Optimizer).line().reason


@pytest.mark.parametrize(
    "name", ["adafactor", "adagrad", "rmsprop", "sgd", "adamw_torch", "schedule_free_adamw", "schedule_free_sgd"]
)
def test_settings_without_effect_are_those_that_trainer_does_not_pass_on(name: str) -> None:
    if name.startswith("schedule_free"):
        pytest.importorskip("schedulefree")
    arguments = TrainingArguments(output_dir="", optim=name, use_cpu=True)
    _, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
    missing = {"betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_epsilon",)}
    assert without_effect(name) == tuple(each for key, of in missing.items() if key not in settings for each in of)


def test_a_setting_without_effect_is_said() -> None:
    said: list[str] = []
    assembly_of(FAMILIES["bert"].model(), optim="sgd", adam_beta1=0.5, warn=said.append).lever(Optimizer)
    assert said == ["--adam-beta1 has no effect on --optim sgd"]
