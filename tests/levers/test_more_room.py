"""Levers that are named where memory does not suffice: those that are not on, in order, and the first that fits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from brimful.core.options.train import TrainOptions
from brimful.levers import more_room
from brimful.levers.more_room import device_bytes, first_that_fits, remedies
from levers.assemblies import assembly_of
from tiny import FAMILIES


def said(on_gpu: bool = True, num_ranks: int = 1, num_gpus: int = 1, **asked: Any) -> list[str]:
    options = TrainOptions(data="", model="", output="", **asked)
    return [one.said for one in remedies(options, on_gpu=on_gpu, num_ranks=num_ranks, num_gpus=num_gpus)]


ALL = [
    *("--gradient-checkpointing full", "--optimizer-offload", "--stream-weights host"),
    *("--optimizer-state-dtype 8bit", "--peft lora"),
]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ALL),
        ({"gradient_checkpointing": "offload"}, [ALL[1], *ALL[3:]]),  # streaming computes layers again itself
        ({"optimizer_offload": True}, [ALL[0], *ALL[2:]]),
        ({"stream_weights": "host"}, ALL[3:]),
        ({"optim": "sgd"}, [ALL[0], ALL[4]]),
        ({"peft": "rslora"}, ALL[:4]),
        ({"optimizer_state_dtype": "8bit"}, [*ALL[:3], ALL[4]]),
        ({"num_gpus": 2}, [*ALL[:3], "--gpus all --sharding parameters", *ALL[3:]]),
        ({"num_ranks": 2}, [*ALL[:2], "--sharding parameters", *ALL[3:]]),
        ({"num_ranks": 2, "sharding": "parameters"}, [*ALL[:2], *ALL[3:]]),
        ({"on_gpu": False, "precision": "fp32"}, [ALL[0], *ALL[3:]]),
        ({"precision": "fp32"}, [*ALL[:3], "--precision bf16", *ALL[3:]]),
        ({"batch_size": 1, "max_grad_norm": 0.0}, [*ALL[:3], "--optimizer-in-backward", *ALL[3:]]),
        ({"batch_size": 1}, [*ALL[:3], "--optimizer-in-backward --late-clipping", *ALL[3:]]),
    ],
    ids=str,
)
def test_those_that_are_not_on_are_named(asked: dict[str, Any], expected: list[str]) -> None:
    """Those that learn the same first."""
    assert said(**asked) == expected


def test_the_first_that_fits_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assembly = assembly_of(FAMILIES["bert"].model(num_hidden_layers=6), batch_size=1)
    options: Any = assembly.options
    every = remedies(options, on_gpu=True)
    needed = {one.said: device_bytes(assembly, dataclasses.replace(options, **one.sets), 64) or 0 for one in every}
    now = device_bytes(assembly, options, 64) or 0
    assert needed["--stream-weights host"] < needed["--optimizer-offload"] < now
    assert needed["--optimizer-state-dtype 8bit"] < now
    assert needed["--peft lora"] < needed["--optimizer-offload"]
    for name in ("--optimizer-offload", "--stream-weights host"):
        monkeypatch.setattr(more_room, "room_bytes", lambda _, name=name: needed[name] / more_room._MOST + 1)
        found = first_that_fits(assembly, [one for one in every if "checkpointing" not in one.said])
        assert found is not None
        assert found.said == name
    monkeypatch.setattr(more_room, "room_bytes", lambda _: 2 * now)  # so that counted bytes do not explain it
    assert first_that_fits(assembly, every) is None
    monkeypatch.setattr(more_room, "room_bytes", lambda _: None)
    assert first_that_fits(assembly, every) is None


def test_the_hint_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["bert"].model()
    assembly = assembly_of(model)
    assert more_room.more_room(assembly, in_a_step=True) == (
        "lower --max-length; the same is learned with --gradient-checkpointing full; something else with"
        " --optimizer-state-dtype 8bit or --peft lora"
    )
    monkeypatch.setattr(more_room, "first_that_fits", lambda _, found: found[0])
    assert more_room.more_room(assembly, in_a_step=False) == (
        "add --gradient-checkpointing full, with which it should fit; something else with"
        " --optimizer-state-dtype 8bit or --peft lora"
    )
    assembly.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # of a loop, which has no such options
    assert more_room.more_room(assembly, in_a_step=True) is None
