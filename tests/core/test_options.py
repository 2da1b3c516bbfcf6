"""Options: defaults, what is refused, what differs from an earlier run."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from brimful.core.command_line import command_of, launched
from brimful.core.errors import OptionError
from brimful.core.options.checks import flag
from brimful.core.options.profile import NOT_OF_A_STEP, ProfileOptions, flags_of
from brimful.core.options.train import CHOICE_OF_ROWS, NOT_PART_OF_THE_RUN, TrainOptions, differences


def options(**changes: Any) -> TrainOptions:
    return TrainOptions(**{"data": "d.csv", "model": "m", "output": "out", **changes})


def test_the_defaults_are_allowed_and_are_those_of_transformers() -> None:
    made = options()
    assert (made.learning_rate, made.num_train_epochs, made.weight_decay, made.max_grad_norm) == (None, None, 0.0, 1.0)
    assert (made.adam_beta1, made.adam_beta2, made.adam_epsilon, made.seed) == (0.9, 0.999, 1e-8, 42)


def test_the_guide_names_every_option_that_may_differ_on_resume() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "resume.md").read_text("utf-8")
    table = guide.partition("## What may differ")[2]
    named = set(re.findall(r"`(--[a-z-]+)`", table))
    free = NOT_PART_OF_THE_RUN | CHOICE_OF_ROWS | {"precision", "model", "target_scaling", "eval_steps"}
    assert named - {"--resume"} == {flag(name) for name in free - {"data", "resume"}}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lion", "lion_32bit or lion_8bit"),
        ("schedule-free", "schedule_free_adamw, schedule_free_radam or schedule_free_sgd"),
        ("adafacto", "adafactor"),
        ("adamw_hf", "adamw_torch"),
    ],
)
def test_a_choice_that_is_meant_is_named(given: str, meant: str) -> None:
    with pytest.raises(OptionError, match=f"--optim is '{given}': it must be one of") as caught:
        options(optim=given)
    assert caught.value.hint == f"did you mean {meant}?"
    with pytest.raises(OptionError) as caught:
        options(optim="x")
    assert caught.value.hint == "the default is adamw_torch_fused"


@pytest.mark.parametrize("given", ["momentum", "momentum=0.9,", "momentum=", "=0.9", "momentum=0.9,nesterov", "a=b=c"])
def test_settings_of_an_optimizer_have_names_and_values(given: str) -> None:
    with pytest.raises(OptionError, match="which is no name=value") as caught:
        options(optim="sgd", optim_args=given)
    assert "momentum=0.9,nesterov=True" in (caught.value.hint or "")
    assert options(optim="sgd", optim_args="momentum=0.9, nesterov = True").optim_args


def test_options_want_names_and_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        TrainOptions("d.csv", "m", "out")  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        options().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "name",
    [
        *("batch_size", "num_train_epochs", "learning_rate", "save_total_limit", "logging_steps", "max_steps"),
        *("eval_steps", "save_steps", "max_length", "token_budget", "num_workers", "adam_epsilon"),
        "early_stopping_patience",
    ],
)
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_what_must_be_above_zero(name: str, value: float) -> None:
    with pytest.raises(OptionError, match=f"{flag(name)} is {value}: it must be"):
        options(**{name: value, "metric_for_best_model": "loss"})
    assert getattr(options(**{name: 1, "metric_for_best_model": "loss"}), name) == 1


@pytest.mark.parametrize("name", ["weight_decay", "max_grad_norm", "warmup_steps", "seed"])
@pytest.mark.parametrize("value", [-1, math.inf, math.nan])
def test_what_must_not_be_below_zero(name: str, value: float) -> None:
    with pytest.raises(OptionError, match=f"{flag(name)} is {value}"):
        options(**{name: value})
    assert getattr(options(**{name: 0}), name) == 0


@pytest.mark.parametrize("name", ["adam_beta1", "adam_beta2", "label_smoothing_factor", "eval_split"])
@pytest.mark.parametrize("value", [-0.1, 1, math.nan])
def test_shares_below_one(name: str, value: float) -> None:
    with pytest.raises(OptionError, match=f"{flag(name)} is {value}"):
        options(**{name: value})
    assert getattr(options(**{name: 0}), name) == 0


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_warm_up_as_a_share(value: float) -> None:
    with pytest.raises(OptionError, match="--warmup-ratio"):
        options(warmup_ratio=value)
    assert options(warmup_ratio=1).warmup_ratio == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"warmup_ratio": 0.1, "warmup_steps": 0}, "--warmup-ratio and --warmup-steps are both given"),
        ({"early_stopping_patience": 3}, "--early-stopping-patience needs a metric"),
        ({"metric_for_best_model": "loss", "eval_split": 0}, "--metric-for-best-model needs rows to evaluate on"),
        ({"eval_steps": 2, "eval_split": 0}, "--eval-steps needs rows to evaluate on"),
    ],
)
def test_options_that_contradict_each_other(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words) as raised:
        options(**changes)
    assert raised.value.hint


def test_options_that_go_together() -> None:
    options(metric_for_best_model="loss", eval_split=0, eval_data="e.csv", early_stopping_patience=1)


def test_a_flag_is_its_field_with_dashes() -> None:
    assert flag("batch_size") == "--batch-size"
    assert flag("seed") == "--seed"


def test_what_is_not_part_of_the_run_are_fields() -> None:
    assert {field.name for field in dataclasses.fields(TrainOptions)} >= NOT_PART_OF_THE_RUN


def test_every_field_has_a_default_but_three() -> None:
    required = [field.name for field in dataclasses.fields(TrainOptions) if field.default is dataclasses.MISSING]
    assert required == ["data", "model", "output"]


def stored(made: TrainOptions) -> dict[str, object]:
    return dict(json.loads(json.dumps(dataclasses.asdict(made))))


def test_equal_options_have_no_differences_after_json() -> None:
    made = options(learning_rate=0.1 + 0.2, max_steps=7)
    assert differences(stored(made), made) == []


def test_differences_are_named_in_the_order_of_the_fields() -> None:
    before = stored(options(seed=1, max_steps=5))
    now = options(seed=2, max_steps=None, batch_size=8)
    assert differences(before, now) == [
        "--batch-size was 32, is 8",
        "--seed was 1, is 2",
    ]


def test_how_a_run_is_started_and_shown_may_differ() -> None:
    now = options(
        output="elsewhere",
        resume=True,
        dry_run=True,
        json=True,
        report_to="tensorboard",
        num_workers=3,
        save_total_limit=9,
    )
    assert differences(stored(options()), now) == []


def test_an_option_that_the_earlier_version_did_not_have_was_at_its_default() -> None:
    before = stored(options())
    del before["seed"]
    assert differences(before, options()) == []
    assert differences(before, options(seed=1)) == ["--seed was 42, is 1"]


def test_a_profile_takes_the_options_of_a_training_that_a_step_depends_on() -> None:
    training = {field.name for field in dataclasses.fields(TrainOptions)}
    assert training >= NOT_OF_A_STEP
    assert {field.name for field in flags_of(ProfileOptions)} == training - NOT_OF_A_STEP | {"steps", "trace"}
    assert {field.name for field in flags_of(TrainOptions)} == training
    with pytest.raises(OptionError, match="--batch-size is 0"):
        ProfileOptions(data="d.csv", model="m", batch_size=0)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"optimizer_in_backward": True}, "before the norm of the whole gradient is known, and --max-grad-norm is 1"),
        ({"late_clipping": True}, "--late-clipping is for --optimizer-in-backward"),
        ({"optimizer_offload": True, "optim": "adafactor"}, "--optimizer-offload is for AdamW"),
        ({"weight_dtype": "bf16", "optim": "sgd"}, "--weight-dtype is for AdamW, and --optim is sgd"),
    ],
)
def test_updates_that_cannot_be_are_refused_with_the_reason(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said) as error:
        options(**asked)
    assert error.value.hint
    assert options(optimizer_in_backward=True, max_grad_norm=0.0).optimizer_in_backward
    assert options(optimizer_in_backward=True, late_clipping=True).late_clipping


@pytest.mark.parametrize(
    ("asked", "schedule"),
    [
        ({}, "linear"),
        ({"optim": "sgd"}, "linear"),
        ({"optim": "schedule_free_adamw"}, "constant_with_warmup"),
        ({"optim": "schedule_free_sgd", "lr_scheduler_type": "auto"}, "constant_with_warmup"),
        ({"optim": "schedule_free_radam", "lr_scheduler_type": "linear"}, "linear"),
    ],
)
def test_optimizers_without_a_schedule_have_none_unless_asked(asked: dict[str, Any], schedule: str) -> None:
    options = TrainOptions(data="", model="", output="", **asked)
    assert options.lr_scheduler_type == schedule
    assert TrainOptions(**dataclasses.asdict(options)) == options


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({}, ""),
        ({"optim": "schedule_free_adamw"}, " --optim schedule_free_adamw"),
        ({"lr_scheduler_type": "cosine"}, " --lr-scheduler-type cosine"),
        (
            {"optim": "schedule_free_radam", "lr_scheduler_type": "linear"},
            " --lr-scheduler-type linear --optim schedule_free_radam",
        ),
    ],
)
def test_the_command_line_has_what_is_not_chosen_without_it(asked: dict[str, Any], shown: str) -> None:
    options = TrainOptions(data="d", model="m", output="o", **asked)
    assert command_of("train", options) == f"brimful train d --model m --output o{shown}"


@pytest.mark.parametrize(
    ("count", "local", "shown"),
    [(1, 1, ""), (2, 2, "torchrun --nproc-per-node 2 -m "), (8, 4, ""), (8, 1, ""), (2, 0, "")],
)
def test_a_command_of_several_processes_is_torchruns(count: int, local: int, shown: str) -> None:
    assert launched("brimful train d", count, local) == f"{shown}brimful train d"
