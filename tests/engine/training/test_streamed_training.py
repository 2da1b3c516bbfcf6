"""Training whose weights, gradients and states stream: the same bytes as without, refusals, and what reads weights."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import brimful
from brimful.core.errors import MemoryFullError, OptionError
from brimful.core.options.train import TrainOptions
from brimful.core.place import Place
from brimful.core.records import Run
from brimful.hardware.file_memory import FileRoom
from brimful.hardware.ranks import Ranks
from brimful.levers.optimizer import Optimizer
from brimful.levers.streaming import Streaming
from brimful.models.packed.streamed_layers import StreamedLayers
from brimful.step.updates.host_states import HostStates
from levers.assemblies import assembly_of
from levers.test_lever_pairs import course, made
from runs import save_tiny_model, single_label_rows, write_rows
from step.test_step import same, snapshot
from tiny import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore:.* saves nothing on a CPU")

CLIPPED = {"max_grad_norm": 0.1}


def train(folder: Path, name: str, **asked: Any) -> tuple[Run, str]:
    base, data = folder / "base", folder / "rows.jsonl"
    if not base.exists():
        save_tiny_model(base)
        write_rows(data, single_label_rows(60))
    run = brimful.train(
        data, model=base, output=folder / name, device="cpu", batch_size=8, max_steps=6, eval_steps=2,
        learning_rate=1e-3, metric_for_best_model="accuracy", baselines=False, **CLIPPED | asked,
    )  # fmt: skip
    (weights,) = (folder / name / "model").glob("*.safetensors")
    return run, hashlib.sha256(weights.read_bytes()).hexdigest()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "more",
    [{}, {"precision": "bf16", "freeze": "embeddings,layers 0-0"}, {"peft": "lora"}, {"packing": "off"}],
    ids=["whole", "frozen layers in bf16", "lora", "padded"],
)
def test_a_run_gives_the_same_bytes(more: dict[str, Any], tmp_path: Path) -> None:
    """With dropout, clipping, evaluations, checkpoints and the best model; its first batch is the plain model's."""
    expected, weights = train(tmp_path, "kept", optimizer_offload=True, **more)
    found, streamed = train(tmp_path, "streamed", stream_weights="host", **more)
    assert streamed == weights
    assert found.metrics == expected.metrics
    assert found.first_batch is not None
    assert found.first_batch.passed
    assert not found.first_batch.fallbacks
    assert found.packed is expected.packed


@pytest.mark.slow
def test_weights_in_a_file_and_an_update_within_the_backward_pass(tmp_path: Path) -> None:
    _, weights = train(tmp_path, "kept", optimizer_in_backward=True, max_grad_norm=0.0)
    files = tmp_path / "files"
    files.mkdir()
    found, streamed = train(
        tmp_path, "streamed", optimizer_in_backward=True, max_grad_norm=0.0, stream_weights="disk",
        stream_folder=str(files),
    )  # fmt: skip
    assert streamed == weights
    assert list(files.iterdir()) == []  # files have no name
    line = next(lever for lever in found.recipe.levers if lever.name == "streaming")
    assert str(files) in line.reason


@pytest.mark.slow
def test_a_resumed_run_that_first_changes_weights_within_an_evaluation(tmp_path: Path) -> None:
    """Those of a file, also in later steps, whose changes leave by the same memory."""
    asked: dict[str, Any] = {"stream_weights": "disk", "save_steps": 3, "save_total_limit": 9}
    _, weights = train(tmp_path, "run", **asked)
    for gone in [tmp_path / "run" / "model", *(tmp_path / "run" / "checkpoints").glob("step-0000000[4-6]")]:
        shutil.rmtree(gone)
    _, resumed = train(tmp_path, "run", resume=True, **asked)
    assert resumed == weights


def test_weights_outside_of_layers_are_in_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay on the device, in half precision too: those of a pooler and a head."""
    rooms: list[FileRoom] = []

    class Watched(FileRoom):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            rooms.append(self)

    monkeypatch.setattr("brimful.levers.streaming.FileRoom", Watched)
    _, assembly, _ = made(stream_weights="disk", weight_dtype="bf16", precision="bf16", **CLIPPED)
    (room,) = rooms
    filed = {room._memory.untyped_storage().data_ptr()}
    streamed = {id(p) for each in assembly.model.streamed_layers.parameters for p in each}
    outside = {name: p for name, p in assembly.model.named_parameters() if id(p) not in streamed}
    assert all(p.untyped_storage().data_ptr() not in filed for p in outside.values())
    assert outside["bert.pooler.dense.weight"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("asked", "where", "beside"),
    [("host", "in host memory", "in host memory"), ("disk", "in a file in ", "with their layers in the file")],
)
def test_the_place_of_gradients_and_states_is_said(asked: str, where: str, beside: str) -> None:
    _, assembly, _ = made(stream_weights=asked, **CLIPPED)
    place, _, more = assembly.lever(Streaming).reason.partition(", with their gradients and the optimizer's states; ")
    assert where in place
    assert "layers are computed again" in more
    assert beside in assembly.lever(Optimizer).reason


def test_weights_of_one_file_change_by_themselves(tmp_path: Path) -> None:
    """Layers do in the midst of a pass, which autograd must not take for a change of what others keep."""
    room = FileRoom(tmp_path, 2 * FileRoom.bytes_with(12))
    first, second = (torch.nn.Parameter(room.put(torch.ones(3), torch.float32)) for _ in range(2))
    kept = second.square().sum()
    with torch.no_grad():
        first.mul_(2)
    kept.backward()
    assert torch.equal(second.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize(
    ("files", "what"), [(0, "a file of .* cannot"), (1, "a file of .* for sums and states cannot")]
)
def test_a_disk_without_room(files: int, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said when the file is made: who writes to a page that the disk has no room for is killed."""
    room = iter(range(files))

    def fill(*_: int) -> None:
        if next(room, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fill)
    with pytest.raises(OptionError, match=f"--stream-weights disk: {what} be made in .*: .*No space left") as caught:
        made(stream_weights="disk", **CLIPPED)
    assert "--stream-folder" in str(caught.value.hint)


def test_what_is_loaded_takes_the_place_of_what_is_on_the_device() -> None:
    step, assembly, _ = made(stream_weights="host", **CLIPPED)
    course(step, assembly, stop=1)
    early = snapshot(step)
    expected = course(step, assembly, start=1)
    late = snapshot(step)
    step.load_state(early)
    assert course(step, assembly, start=1) == expected
    assert same(snapshot(step), late)


def test_layers_have_three_pieces_and_only_what_is_trained_goes_back() -> None:
    step, assembly, _ = made(stream_weights="host", freeze="embeddings,layers 0-1")
    streamed: StreamedLayers = assembly.model.streamed_layers
    homes = [[p.data_ptr() for p in each] for each in streamed.parameters]
    course(step, assembly, stop=2)
    assert [[p.data_ptr() for p in each] for each in streamed.parameters] == homes
    assert len(streamed.pieces) == 3
    assert streamed.is_due  # the last step's changes wait for the next turn, or for who reads the weights
    step.update.weights()
    assert not streamed.is_due
    trained = sum(p.nbytes for each in streamed.parameters for p in each if p.requires_grad)
    assert trained * 2 <= streamed.kept_bytes < 2.2 * trained + 256 * 100  # in two steps
    assert all(p.grad is None for each in streamed.parameters for p in each)


def test_a_step_that_fails_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that it has left in host memory are not added to."""
    step, assembly, _ = made(stream_weights="host", token_budget=64)
    expected = course(step, assembly, stop=2)
    again, assembly, _ = made(stream_weights="host", token_budget=64)
    accumulate, calls = again.accumulate, []

    def failing(*given: Any) -> torch.Tensor:
        calls.append(given)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("in the second micro-batch")
        return accumulate(*given)

    monkeypatch.setattr(again, "accumulate", failing)
    with pytest.raises(torch.OutOfMemoryError):
        course(again, assembly, stop=1)
    assert again.abandon()
    assert course(again, assembly, stop=2) == expected


def test_an_update_that_memory_runs_out_in_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the midst of a layer's turn: what is left of it waits, and nothing is updated twice."""
    step, assembly, _ = made(stream_weights="host", **CLIPPED)
    expected = course(step, assembly, stop=3)
    state = snapshot(step)
    again, assembly, _ = made(stream_weights="host", **CLIPPED)
    course(again, assembly, stop=1)
    fetch, calls = HostStates.fetch, []

    def failing(states: HostStates, number: int, **asked: Any) -> torch.Tensor:
        calls.append(number)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("in a layer's turn")
        return fetch(states, number, **asked)

    monkeypatch.setattr(HostStates, "fetch", failing)
    with pytest.raises(torch.OutOfMemoryError):
        course(again, assembly, start=1, stop=2)
    assert again.abandon()
    assert course(again, assembly, start=1, stop=3) == expected[1:]
    assert same(snapshot(again), state)


def test_a_bucket_that_is_updated_by_half_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be updated again, nor left so."""
    step, assembly, _ = made(stream_weights="host", **CLIPPED)
    course(step, assembly, stop=1)
    real, calls = torch._fused_adamw_, []

    def failing(*given: Any, **asked: Any) -> None:
        calls.append(given)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("between two groups of a bucket")
        real(*given, **asked)

    monkeypatch.setattr(torch, "_fused_adamw_", failing)
    with pytest.raises(MemoryFullError) as error:
        course(step, assembly, start=1, stop=2)
    assert not error.value.resumable
    assert not step.abandon()


def test_a_weight_comes_twice_a_step() -> None:
    """In the forward pass, where it is updated, and in the backward pass; the last layer's stays in between."""
    step, assembly, _ = made(stream_weights="host", **CLIPPED)
    streamed: StreamedLayers = assembly.model.streamed_layers
    course(step, assembly, stop=1)
    before = streamed.fetched_bytes
    course(step, assembly, start=1, stop=4)
    assert streamed.fetched_bytes - before <= 3 * 2 * streamed.num_bytes


def test_what_cannot_be_streamed_is_refused() -> None:
    for options, reason in (
        ({"ranks": Ranks(Place(count=2))}, "in one process"),
        ({"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])}, "the loop's own optimizer"),
    ):
        assembly = assembly_of(FAMILIES["bert"].model(), stream_weights="host")
        for name, value in options.items():
            setattr(assembly, name, value)
        with pytest.raises(OptionError, match=reason):
            assembly.find(Streaming)
    with pytest.raises(OptionError, match="--stream-folder is for --stream-weights disk") as caught:
        TrainOptions(data="", model="", output="", stream_folder=".")
    assert caught.value.hint == "add --stream-weights disk, or leave it out"
