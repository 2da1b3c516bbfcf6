"""Rows: the guide's table in the guide's settings, Trainer's counterpart of ours, and mistakes in words."""

from __future__ import annotations

from typing import Any

import pytest

import brimful
from benches import figures, recipe
from brimful.benchmarking.choosing import recommended
from brimful.benchmarking.rows import (
    PLAIN,
    apart,
    check_rows,
    in_turns,
    recommended_of,
    rows_of,
    same_rows,
    trainers_settings,
)
from brimful.core.bench import BenchRow, Measured, Row, frontier
from brimful.core.options.bench import BenchOptions
from brimful.reports.guide_claims import CLAIMS, claim_of


def asked(rows: str = "default", **more: Any) -> BenchOptions:
    return BenchOptions(model="m", rows=rows, **more)


def test_the_guides_nine_rows_have_the_guides_settings() -> None:
    rows = rows_of(asked("guide", batch_size=4), longest=512, on_gpu=True)
    theirs = {row.name: dict(row.settings) for row in rows if row.side == "trainer"}
    assert list(theirs) == list(CLAIMS)
    one = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    lean = {**one, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    assert theirs["plain"] == {}
    assert theirs["accumulation"] == one
    assert theirs["accumulation, checkpointing"] == lean
    assert theirs["fp16"] == {"fp16": True}
    assert theirs["all, Adafactor"] == {**lean, "fp16": True, "optim": "adafactor"}
    assert theirs["all, 8-bit Adam"] == {**lean, "fp16": True, "optim": "adamw_bnb_8bit"}
    ours = {row.name: row for row in rows if row.side == "brimful"}
    assert ours["split in four"].settings == {"precision": "bf16", "token_budget": 512, "execution": "captured"}
    keys = {row.key for row in rows}
    assert all(row.base in keys for row in rows if row != PLAIN)


def test_every_set_of_rows_is_accepted_by_train() -> None:
    for name in ("default", "best", "guide", "levers", "lean"):
        check_rows(asked(name))
        rows = rows_of(asked(name), longest=128, on_gpu=False)
        assert rows[0] == PLAIN
        assert len({row.key for row in rows}) == len(rows)
        halves = {"fp16", "tf32"}
        asked_for = [{str(name if value is True else value) for name, value in row.settings.items()} for row in rows]
        assert {row.needs_gpu for row, words in zip(rows, asked_for, strict=True) if halves & words} <= halves


def test_rows_that_need_a_gpu_say_what_for() -> None:
    rows = {row.key: row.needs_gpu for row in rows_of(asked("guide"), longest=128, on_gpu=False)}
    assert rows["trainer: fp16"] == rows["brimful: fp16"] == rows["trainer: all, Adafactor"] == "fp16"
    assert rows["brimful: bf16, compiled"] == "compiled steps"
    assert rows["brimful: states offloaded"] == "states in host memory"
    assert rows["brimful: bf16"] is rows["trainer: accumulation"] is None
    rows = {row.key: row.needs_gpu for row in rows_of(asked("best"), longest=128, on_gpu=False)}
    assert rows["trainer: bf16, CUDA graphs"] == rows["trainer: bf16, compiled"] == "compiled steps"


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        ({"precision": "bf16"}, {"bf16": True}),
        ({"precision": "fp32", "optim": "adafactor"}, {"optim": "adafactor"}),
        ({"execution": "compiled", "precision": "tf32"}, {"torch_compile": True, "tf32": True}),
        ({"execution": "compiled"}, {"torch_compile": True, "tf32": False}),  # Trainer's compiler turns it on
        ({"per_device_batch_size": 2}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
        ({"max_grad_norm": 0.0}, {"max_grad_norm": 0.0}),
        ({"precision": "fp8"}, None),
        ({"gradient_checkpointing": "every-2"}, None),
        ({"optimizer_offload": True}, None),
        ({"token_budget": 64}, None),
    ],
)
def test_trainers_counterpart(settings: dict[str, Any], theirs: dict[str, Any] | None) -> None:
    assert trainers_settings(settings, 8) == theirs


def test_both_sides_have_rows_whenever_time_is_over() -> None:
    rows = rows_of(BenchOptions(model="m", rows="guide"), longest=512, on_gpu=True)
    turns = in_turns(rows)
    assert turns[0] == PLAIN
    assert sorted(row.key for row in turns) == sorted(row.key for row in rows)
    theirs = [row for row in rows if row.side == "trainer"]
    sides = [row.side for row in turns[: 2 * len(theirs)]]
    assert sides == ["trainer", "brimful"] * len(theirs)
    for side in ("trainer", "brimful"):
        assert [row for row in turns if row.side == side] == [row for row in rows if row.side == side]


def test_rows_that_the_user_names() -> None:
    rows = rows_of(asked("optim=adafactor+max_grad_norm=0,token-budget=64"), longest=64, on_gpu=True)
    assert [row.key for row in rows] == [
        "trainer: plain", "trainer: bf16", "brimful: bf16", "trainer: optim=adafactor+max_grad_norm=0",
        "brimful: optim=adafactor+max_grad_norm=0", "brimful: token-budget=64",
    ]  # fmt: skip
    assert [row.base for row in rows[3:]] == ["trainer: bf16", "brimful: bf16", "brimful: bf16"]  # of its precision
    assert rows[3].settings == {"bf16": True, "optim": "adafactor", "max_grad_norm": 0.0}
    assert rows[4].settings == {
        "precision": "bf16", "optim": "adafactor", "max_grad_norm": 0.0, "execution": "captured"
    }  # fmt: skip
    assert rows_of(asked("weight_dtype=bf16"), longest=64, on_gpu=False)[-1].settings["precision"] == "bf16"
    split = rows_of(asked("per_device_batch_size=2", batch_size=4), longest=64, on_gpu=False)
    assert split[-2].settings == {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    assert split[-1].settings == {"precision": "fp32", "per_device_batch_size": 2, "gradient_accumulation_steps": 2}


def test_rows_of_the_same_settings_are_one() -> None:
    given: Any = {"longest": 128, "on_gpu": False}
    assert [row.key for row in rows_of(asked("precision=fp32"), **given)] == ["trainer: plain", "brimful: plain"]
    assert same_rows(asked("levers,default,optim=sgd"), **given) == {
        "brimful: fp32": "brimful: plain",
        "brimful: fp32, accumulation": "brimful: accumulation",
        "brimful: fp32, checkpointing": "brimful: checkpointing",
    }
    rows = rows_of(asked("default,optim=sgd"), **given)
    assert rows[-1].base == "brimful: fp32"  # where its plain row is that one
    assert not same_rows(asked("guide,lean"), **given)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_rows_of_one_name_with_other_settings_are_told_apart(on_gpu: bool) -> None:
    """All of two sets are there, each compared with the row of its own set."""
    given: Any = {"longest": 128, "on_gpu": on_gpu}
    both = {row.key: row for row in rows_of(asked("guide,levers"), **given)}
    alone = [rows_of(asked(name), **given) for name in ("guide", "levers")]
    assert {row.identity for row in both.values()} == {row.identity for rows in alone for row in rows}
    assert (both["brimful: checkpointing"].settings["precision"], both["brimful: checkpointing"].base) == (
        "bf16", "brimful: bf16",
    )  # fmt: skip
    lever = both["brimful: checkpointing, fp32"]
    assert (lever.settings["precision"], lever.base) == ("fp32", "brimful: fp32")
    named = {row.key: row for row in rows_of(asked("levers,precision=fp16+optim=sgd"), **given)}
    plain = named["brimful: bf16" if on_gpu else "brimful: plain"]
    assert named["brimful: precision=fp16+optim=sgd"].base == plain.key
    assert plain.settings["precision"] == ("bf16" if on_gpu else "fp32")
    rows = [Row(side="brimful", name="a", settings={"precision": "fp32", "optim": each}) for each in "xyz"]
    assert [row.name for row in apart([], rows)] == ["a", "a, fp32", "a, fp32 (2)"]


@pytest.mark.parametrize(
    ("given", "said", "hint"),
    [
        ({"rows": "fast"}, "it is no set of rows", "default, best, guide, levers, lean"),
        ({"rows": "bset"}, "it is no set of rows", "did you mean best?"),
        ({"rows": "precision=bf16+"}, "a lever is missing beside +", "precision=bf16+optim=adafactor"),
        ({"rows": "presicion=bf16"}, "which is no lever", "did you mean precision?"),
        ({"rows": "precision=bf16+precision=fp32"}, "has precision twice", "name each lever once"),
        ({"rows": "learning_rate=1"}, "which is no lever", "the levers are"),
        ({"rows": "token_budget=many"}, "it must be a whole number", "token_budget=8"),
        (
            {"rows": "per_device_batch_size=5"},
            "per_device_batch_size=5, which does not divide --batch-size 32",
            "per_device_batch_size=8",
        ),
        ({"rows": "precision=fp13"}, "--rows has 'precision=fp13': precision is 'fp13'", ""),
        ({"rows": "optimizer_in_backward=yes"}, "it must be true or false", "=true"),
        (
            {"rows": "optimizer_in_backward=true"},
            "'optimizer_in_backward=true': optimizer_in_backward updates",
            " late_clipping",
        ),
        ({"shape": "512"}, "it must be rows x tokens", "512x512"),
        ({"shape": "8x2"}, "sequences of 2 tokens", "at least 3"),
        ({"shape": "8x8", "data": "a.csv"}, "--shape and DATA are both given", ""),
        ({"budget_s": -1.0}, "--budget-s is -1.0", ""),
        ({"output": ""}, "--output is empty", ""),
    ],
)
def test_mistakes_are_one_line(given: dict[str, Any], said: str, hint: str) -> None:
    with pytest.raises(brimful.OptionError) as caught:
        check_rows(BenchOptions(model="m", **given))
    assert said in str(caught.value)
    assert hint in (caught.value.hint or "")


def rows_with(*given: tuple[str, Measured | None]) -> list[BenchRow]:
    return [
        BenchRow(row=Row(side="brimful", name=name), status="measured" if found else "failed", measured=found)
        for name, found in given
    ]


def test_the_recommended_row_is_the_fastest_that_fits_and_changes_no_arithmetic() -> None:
    exact, bf16 = recipe(("precision", "fp32", "exact")), recipe(("precision", "bf16", "rounding"))
    small = recipe(("precision", "bf16", "rounding"), ("optimizer", "bf16 states", "training"))
    fp16 = recipe(("precision", "fp16", "rounding"))
    rows = rows_with(
        ("slow", figures(10, 4, recipe=exact)),
        ("large", figures(90, 40, recipe=exact)),
        ("bf16", figures(70, 8, recipe=bf16)),
        ("fp16", figures(95, 8, recipe=fp16)),
        ("8 bits", figures(99, 2, recipe=small)),
        ("broken", None),
    )
    rows.append(BenchRow(row=PLAIN, status="measured", measured=figures(500, 1)))
    unclipped = Row(side="brimful", name="unclipped", settings={"max_grad_norm": 0.0})
    rows.append(BenchRow(row=unclipped, status="measured", measured=figures(400, 1, recipe=exact)))
    fp8 = Row(side="brimful", name="fp8", settings={"precision": "fp8"})  # which ran in bf16
    rows.append(BenchRow(row=fp8, status="measured", measured=figures(91, 8, recipe=bf16, precision="bf16")))

    def name(**given: Any) -> str | None:
        found = recommended(rows, **{"memory_limit": None, "on_gpu": True, **given})
        return None if found is None else found.name

    assert name() == "large"
    assert name(memory_limit="20GiB") == "bf16"
    assert name(memory_limit="20GiB", on_gpu=False) == "slow"
    assert name(memory_limit="1GiB") is None
    again = recommended_of(rows[2].row)
    assert (again.key, again.base) == ("brimful: recommended", "brimful: bf16")


def test_the_front_has_the_rows_that_no_other_beats() -> None:
    assert frontier([(4, 10), (2, 5), (3, 12), (5, 12), (1, 1), (2, 4), (3, 12)]) == [4, 1, 2]
    assert frontier([]) == []


def test_claims_are_of_the_guides_figures() -> None:
    rows = {row.key: row for row in rows_of(asked("guide"), longest=128, on_gpu=True)}
    for name, claim in CLAIMS.items():
        if name != "plain":
            found = claim_of(rows[f"trainer: {name}"], rows["trainer: plain"])
            assert found == (claim.samples_per_s / 8.86, claim.megabytes / 14949)
    speed, memory = claim_of(rows["brimful: fp16"], rows["brimful: fp32"]) or (0, 0)
    assert round(speed, 2) == 2.10
    assert round(memory, 2) == 0.93
    assert claim_of(rows["brimful: selective"], rows["brimful: bf16"]) is None


def test_claims_are_of_settings_whatever_a_row_is_called() -> None:
    def row(side: Any, **settings: Any) -> Row:
        return Row(side=side, name="Adafactor", settings=settings)

    plain, half = row("brimful", precision="fp32", execution="captured"), row("brimful", precision="bf16")
    adafactor = claim_of(row("trainer", optim="adafactor"), PLAIN)
    assert adafactor is not None
    assert claim_of(row("brimful", precision="fp32", optim="adafactor"), plain) == adafactor
    assert claim_of(row("brimful", precision="bf16", optim="adafactor"), half) == adafactor
    assert claim_of(row("brimful", precision="bf16", optim="adafactor"), plain) is None
    assert claim_of(row("brimful", precision="fp32", optim="lion_32bit"), plain) is None
    split = claim_of(row("brimful", precision="bf16", token_budget=128), half)
    assert split == claim_of(row("brimful", per_device_batch_size=1, gradient_accumulation_steps=4), plain)
    assert split == (7.75 / 8.86, 8681 / 14949)
