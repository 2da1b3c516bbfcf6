"""Runs of the command line whose processes update parts by our kernels, as they do on GPUs: how they end."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from brimful.engine import first_batch
from brimful.engine.training.checkpoint import checkpoint_path, load_checkpoint
from brimful.hardware.peers import peers_of
from brimful.hardware.ranks import Ranks
from brimful.kernels.attention.dispatch import triton_attention
from brimful.levers import data_parallel, execution, optimizer, sharding
from brimful.levers.lever import Assembly, Verdict
from brimful.models import fusion
from brimful.models.packed import packed_forward
from brimful.step.reduce import table_rows
from brimful.step.step import Step
from brimful.step.updates.fused_sharded import FusedShardedAdamW
from engine.training import test_sharded_training
from engine.training.test_several_processes import start, words
from file_peers import FilePeers
from runs import events, save_tiny_model, single_label_rows, write_rows

files = test_sharded_training.files  # a fixture

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Our kernels are chosen, and interpreted; the memory of others is files, and copied to unless it is refused."""
    for module in (optimizer, sharding):
        monkeypatch.setattr(module, "can_fuse", lambda *_: True)

    def find(ranks: Ranks, device: torch.device) -> tuple[FilePeers, str]:
        return FilePeers(ranks, tmp_path / f"memory of {os.getppid()} {ranks.spread(str(os.getpid()))}"), ""

    monkeypatch.setattr(optimizer, "peers_of", find)
    monkeypatch.setattr(data_parallel, "why_not_linked", lambda _: "")


def asked(files: Path, output: Path, *more: str) -> list[str]:
    found = words(files, output, "--lr-scheduler-type", "constant", *more)
    return found if "--eval-steps" in more else [*found, "--eval-split", "0"]


def processes(output: Path) -> str:
    levers = json.loads((output / "run.json").read_text())["recipe"]["levers"]
    return str(next(lever["reason"] for lever in levers if lever["name"] == "processes"))


@pytest.mark.thorough
@pytest.mark.parametrize("by", [("--no-peer-copies",), ()], ids=["sent", "copied"])
def test_the_best_model_is_whole(files: Path, tmp_path: Path, by: tuple[str, ...]) -> None:
    """It is not the last one: what others have updated since is put back, too."""
    ask = asked(
        files, tmp_path / "run", "--max-steps", "6", "--eval-steps", "2", "--metric-for-best-model", "loss", *by
    )
    ask[ask.index("1e-3")] = "10"  # worse and worse
    both = start(tmp_path / "logs", *ask)
    assert both.results() == [0, 0]
    step = int(both.said(0).split("the model after step ")[1].split()[0])
    assert step < 6
    best = load_checkpoint(checkpoint_path(tmp_path / "run" / "checkpoints", step)).state.weights
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(torch.equal(saved[name], weight) for name, weight in best.items())


@pytest.mark.thorough
def test_a_first_batch_that_differs_leads_to_a_slower_path_in_all(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is made anew for the slower path is moved to memory that others reach once, by all.
    real: Callable[..., first_batch.FirstBatch] = first_batch.compare
    calls: list[Any] = []

    def compare(*arguments: Any) -> first_batch.FirstBatch:
        calls.append(arguments)
        return replace(real(*arguments), passed=len(calls) > 1, reason="made up")

    monkeypatch.setattr(first_batch, "compare", compare)
    both = start(tmp_path / "logs", *asked(files, tmp_path / "run", "--max-steps", "2"))
    assert both.results() == [0, 0]
    assert "differs from the plain model on the first batch: made up" in both.said(0)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("where", "by"),
    [(0, ()), (1, ("--no-peer-copies",))],
    ids=["copied", "sent, the other"],
)
@pytest.mark.thorough
def test_what_was_done_before_memory_ran_out_is_saved(
    where: int, by: tuple[str, ...], files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process, whatever the size of micro-batches: all end alike, and the run can be gone on with."""
    real, passes = Step.backward, [0]

    def backward(step: Step, micro: Any) -> Any:
        passes[0] += step.is_shared
        if step.is_shared and step.ranks.rank == where and passes[0] >= 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(step, micro)

    ask = asked(files, tmp_path / "run", "--max-steps", "6", *by)
    with monkeypatch.context() as patch:
        patch.setattr(Step, "backward", backward)
        both = start(tmp_path / "logs", *ask)
        assert both.results() == [6, 6]
    done = len(events(tmp_path / "run", "step"))
    assert f"all is saved after step {done}" in both.said(0)
    assert 0 < done < 6
    assert start(tmp_path / "again", *ask, "--resume").results() == [0, 0]
    assert [each["step"] for each in events(tmp_path / "run", "step")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.thorough
def test_sums_after_a_failed_pass_have_its_memory(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a pass that failed in one process is free before this one takes part in sums that others wait for."""
    real, real_fill = Step.backward, FusedShardedAdamW._gather_bucket
    held, passes = list[weakref.ref[torch.Tensor]](), [0]

    def backward(step: Step, micro: Any) -> Any:
        passes[0] += step.is_shared and step.ranks.rank == 1
        if step.is_shared and passes[0] == 2:
            passes[0] += 1
            activations = torch.zeros(1000)
            held.append(weakref.ref(activations))
            (tmp_path / "ran out").touch()
            raise torch.OutOfMemoryError(f"CUDA out of memory beside {len(activations)}")
        return real(step, micro)

    def fill(update: FusedShardedAdamW, bucket: Any) -> None:
        if any(each() is not None for each in held):
            raise torch.OutOfMemoryError("CUDA out of memory for the sums")
        real_fill(update, bucket)

    monkeypatch.setattr(Step, "backward", backward)
    monkeypatch.setattr(FusedShardedAdamW, "_gather_bucket", fill)
    both = start(tmp_path / "logs", *asked(files, tmp_path / "run", "--max-steps", "4"))
    assert both.results() == [0, 0], both.said(0)
    assert (tmp_path / "ran out").exists()


@pytest.mark.thorough
def test_a_bucket_that_memory_ran_out_for_is_begun_again(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process, after all have met for it: they do not wait for one another a second time, and learn the same."""
    real, calls = FusedShardedAdamW._add_parts, [0]

    def add_parts(update: FusedShardedAdamW, *given: Any) -> None:
        calls[0] += update._sums.ranks.rank == 1
        if calls[0] == 2:
            calls[0] += 1
            (tmp_path / "ran out").touch()
            raise torch.OutOfMemoryError("CUDA out of memory")
        real(update, *given)

    ask = asked(files, tmp_path / "run", "--max-steps", "2")
    assert start(tmp_path / "logs", *ask).results() == [0, 0]
    monkeypatch.setattr(FusedShardedAdamW, "_add_parts", add_parts)
    ask[ask.index(str(tmp_path / "run"))] = str(tmp_path / "again")
    both = start(tmp_path / "logs again", *ask)
    assert both.results() == [0, 0], both.said(0)
    assert (tmp_path / "ran out").exists()
    losses = [[each["loss"] for each in events(tmp_path / name, "step")] for name in ("run", "again")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_copies_without_memory_of_others_are_refused_by_all(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "peers_of", peers_of)
    both = start(tmp_path / "logs", *asked(files, tmp_path / "run", "--max-steps", "4", "--peer-copies"))
    assert both.results() == [2, 2]
    assert "--peer-copies does not work here: GPUs do not reach one another's memory" in both.said(0)


@pytest.mark.thorough
@pytest.mark.parametrize("cut", ["states", "parameters"])
def test_gpus_that_turn_out_not_to_reach_one_another_send(
    cut: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They learn what others do, and the first process says it; it alone looks at what joins them."""
    monkeypatch.setattr(data_parallel, "_on_gpus", lambda _: True)
    ask = asked(files, tmp_path / "run", "--max-steps", "2", "--sharding", cut)
    monkeypatch.setattr(data_parallel, "why_not_linked", lambda _: "" if os.environ["RANK"] == "0" else "another host")
    assert start(tmp_path / "logs", *ask).results() == [0, 0]
    assert "by copies between the GPUs' memory" in processes(tmp_path / "run")
    monkeypatch.setattr(optimizer, "peers_of", peers_of)
    ask[ask.index(str(tmp_path / "run"))] = str(tmp_path / "sent")
    both = start(tmp_path / "logs of sent", *ask)
    assert both.results() == [0, 0]
    said = "warning: gradients and weights are sent by NCCL and not copied: GPUs do not reach one another's memory"
    assert said in both.said(0)
    assert "sent by NCCL and not copied" in processes(tmp_path / "sent")
    losses = [[each["loss"] for each in events(tmp_path / name, "step")] for name in ("run", "sent")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("more", "least", "reads"),
    [
        (("--no-peer-copies",), 0, False),
        ((), 99, False),  # no table has so many rows for each token
        (("--peer-copies",), 0, True),
        ((), 0, True),
    ],
    ids=["sent", "many tokens", "asked for", "by default"],
)
def test_rows_of_tables_are_read_in_all_or_in_none(
    more: tuple[str, ...], least: int, reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first process has it, and the recipe says it."""
    save_tiny_model(tmp_path / "model", family="mpt", dropout=0.0)
    write_rows(tmp_path / "rows.jsonl", single_label_rows(40))
    monkeypatch.setattr(data_parallel, "_on_gpus", lambda _: True)
    monkeypatch.setattr(table_rows, "_LEAST_BYTES", 0)
    monkeypatch.setattr(table_rows, "_ROWS_A_TOKEN", least)
    read = table_rows.TableRows.read

    def reading(self: Any, words: torch.Tensor) -> torch.Tensor:
        (tmp_path / f"read by {os.environ['RANK']}").touch()
        return read(self, words)

    monkeypatch.setattr(table_rows.TableRows, "read", reading)
    ask = asked(tmp_path, tmp_path / "run", "--max-steps", "3", "--sharding", "parameters", "--eval-steps", "2", *more)
    assert start(tmp_path / "logs", *ask).results() == [0, 0]
    assert {(tmp_path / f"read by {rank}").exists() for rank in range(2)} == {reads}
    assert ("rows of large tables of words are read where they are" in processes(tmp_path / "run")) == reads


@pytest.mark.thorough
def test_layers_in_parts_are_fused_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first process finds that they can be; they learn what plain ones do, computed again in the backward pass,
    with weights in host memory, and evaluated in between."""
    save_tiny_model(tmp_path / "model", dropout=0.0, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    write_rows(tmp_path / "rows.jsonl", single_label_rows(40))
    more = ("--gradient-checkpointing", "full", "--optimizer-offload", "--eval-steps", "1")
    ask = asked(tmp_path, tmp_path / "plain", "--max-steps", "2", "--sharding", "parameters", *more)
    assert start(tmp_path / "logs of plain", *ask).results() == [0, 0]
    record, fuse = execution.record_layers, fusion.fuse

    def record_layers(*given: Any) -> None:
        (tmp_path / f"recorded {os.environ['RANK']}").touch()
        record(*given)

    def cover(graph: Any) -> Any:
        found = fuse(graph)
        assert found is not None
        (tmp_path / f"covered {os.environ['RANK']}").touch()
        return found

    def ours(_: type, assembly: Assembly) -> Verdict:
        return Verdict(ok=assembly.ranks.leads, because="a test")

    monkeypatch.setattr(execution, "record_layers", record_layers)
    monkeypatch.setattr(fusion, "fuse", cover)
    monkeypatch.setattr(packed_forward, "choose_attention", lambda *_: triton_attention)
    monkeypatch.setattr(execution.ExecutionMode, "supports_fused", classmethod(ours))
    ask[ask.index(str(tmp_path / "plain"))] = str(tmp_path / "fused")
    ask += ["--execution", "fused"]
    assert start(tmp_path / "logs of fused", *ask).results() == [0, 0]
    recipe = json.loads((tmp_path / "fused" / "run.json").read_text())["recipe"]["levers"]
    mode = next(lever for lever in recipe if lever["name"] == "execution")
    assert mode["value"] == "fused"
    names = {file.name for file in tmp_path.iterdir()}
    assert {f"{what} {rank}" for what in ("recorded", "covered") for rank in (0, 1)} <= names
    losses = [[each["loss"] for each in events(tmp_path / name, "step")] for name in ("plain", "fused")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
