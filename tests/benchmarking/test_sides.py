"""Both sides of a bench on one model: the same rows in the same order from the same weights, so the same losses."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer

from brimful.benchmarking import figures
from brimful.benchmarking.fixed_lengths import lengths_for
from brimful.benchmarking.our_side import measure_ours
from brimful.benchmarking.trainer_side import measure_trainers
from brimful.benchmarking.worker import failure, measure
from brimful.benchmarking.workload import best_rate, describe, make_work, useful_flops
from brimful.core.bench import Measured, Steps
from brimful.core.callbacks import Callbacks
from brimful.core.errors import InputError, OptionError
from brimful.core.options.bench import BenchOptions
from brimful.measurement.memory import PhaseMemory
from tiny_files import save_classifier, write_csv, write_reviews


class Heard(Callbacks):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)


STEPS = Steps(warm_up=2, repeats=2, block=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier without dropout, and rows of one label, of several, and of numbers."""
    path = tmp_path_factory.mktemp("bench")
    save_classifier(path / "model", ("bad", "good"), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    write_reviews(path / "reviews.csv", 36)
    rows = [(f"the film was long {i}", i % 2, (i // 2) % 2) for i in range(24)]
    write_csv(path / "several.csv", ("text", "good", "bad"), rows)
    write_csv(path / "numbers.csv", ("text", "price"), [(f"a film of {i} parts", 150.5 + 7 * i) for i in range(24)])
    return path


def options(folder: Path, data: str | None = "reviews.csv", **more: Any) -> BenchOptions:
    given = {"model": str(folder / "model"), "data": None if data is None else str(folder / data), "batch_size": 8}
    return BenchOptions(**{**given, "device": "cpu", **more})


def ours(asked: BenchOptions, **settings: Any) -> Measured:
    return measure_ours(make_work(asked, Callbacks(), **settings), STEPS, Callbacks(), lambda _: None)


def theirs(asked: BenchOptions, listener: Callbacks | None = None, **settings: Any) -> Measured:
    return measure_trainers(make_work(asked, Callbacks()), settings, STEPS, listener or Callbacks(), lambda _: None)


def test_a_limit_of_a_gpu_is_refused_on_a_cpu_before_any_row(folder: Path) -> None:
    plan = {"options": asdict(options(folder, memory_limit="8GB")), "row": None, "steps": None}
    with pytest.raises(OptionError, match="--memory-limit is 8GB: it is for GPUs, and this run is on a CPU"):
        measure(plan)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("data", ["reviews.csv", "several.csv", None])
def test_the_losses_of_both_sides_are_equal(folder: Path, data: str | None) -> None:
    labels = {"label_column": "good,bad"} if data == "several.csv" else {}
    shape = {"shape": "24x12"} if data is None else {}
    asked = options(folder, data, learning_rate=1e-2, **labels, **shape)
    one, other = ours(asked), theirs(asked)
    assert one.loss == pytest.approx(other.loss, rel=1e-4)
    assert one.loss != pytest.approx(ours(options(folder, data, **labels, **shape)).loss, rel=1e-3)  # it has learned
    assert one.flops_per_s is not None
    assert one.flops_per_s / one.samples_per_s == pytest.approx((other.flops_per_s or 0) / other.samples_per_s)
    assert one.tokens_per_s / one.samples_per_s == pytest.approx(other.tokens_per_s / other.samples_per_s)
    assert len(one.block_rates) == len(other.block_rates) == STEPS.repeats
    for each in (one, other):
        assert each.samples_per_s == pytest.approx(np.median(each.block_rates))
        assert each.step_s == pytest.approx(8 / each.samples_per_s)
        assert each.peak_bytes.resident
        parts = each.peak_bytes.components
        assert parts["optimizer_states"] >= 2 * parts["weights"] * 0.9
        assert (each.arithmetic, each.precision) == ("exact", "fp32")
        assert each.first_step_s


def test_both_sides_scale_targets_of_a_regression_as_train_does(folder: Path) -> None:
    asked = options(folder, "numbers.csv", new_head=True, learning_rate=1e-2, label_column="price", task="regression")
    one, other = ours(asked), theirs(asked)
    assert one.loss == pytest.approx(other.loss, rel=1e-4)
    assert one.loss is not None
    assert one.loss < 20  # of targets that average 231


def test_sequences_longer_than_the_model_reads_are_named_by_shape(folder: Path) -> None:
    with pytest.raises(OptionError, match=r"^--shape is 16x99999, and .* has positions for \d+ tokens") as caught:
        make_work(options(folder, None, shape="16x99999"), Callbacks())
    assert "--max-length" not in (caught.value.hint or "")


def test_the_rate_of_products_is_the_best_of_some() -> None:
    """And of more where others were busy meanwhile."""
    times, waited = [0, 0], [0]

    def read() -> dict[str, tuple[int, int]]:
        times[1] += waited[0]
        return {"1": (times[0], times[1])}

    rates: list[float] = []

    def rate() -> float:
        times[0] += 10
        rates.append(float(len(rates) % 3))
        return rates[-1]

    assert best_rate(rate, within_s=0.0, times=read) == (1.0, 0.0)
    assert len(rates) == 2
    waited[0] = 10
    assert best_rate(rate, within_s=0.002, times=read) == (2.0, 0.5)
    assert best_rate(lambda: 3.0, within_s=0.0, times=dict) == (3.0, None)


@pytest.mark.slow
def test_accumulation_of_trainer_is_said_and_its_loss_is_the_mean(folder: Path) -> None:
    asked, listener = options(folder), Heard()
    plain = theirs(asked)
    split = theirs(asked, listener, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert split.loss == pytest.approx(plain.loss, rel=0.05)
    assert "4.0 times the mean loss of its micro-batches" in listener.warnings[0]
    assert ours(asked, token_budget=40).loss == pytest.approx(plain.loss, rel=1e-3)


def test_trainer_pads_to_few_lengths_and_meets_each_before_its_timed_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [("long " * (1 + i // 2), ("bad", "good")[i % 2]) for i in range(48)]
    write_csv(folder / "lengths.csv", ("text", "label"), rows)
    asked, listener, seen = options(folder, "lengths.csv"), Heard(), list[int]()
    step = Trainer.training_step

    def watched(trainer: Trainer, model: Any, inputs: dict[str, Any], *more: Any) -> torch.Tensor:
        seen.append(inputs["input_ids"].shape[1])
        return step(trainer, model, inputs, *more)

    monkeypatch.setattr(Trainer, "training_step", watched)
    plain = theirs(asked)
    lengths = set(seen)
    seen.clear()
    padded = theirs(asked, listener, padded_lengths=2)
    met = seen[1:-5]  # between the first of six steps and the others
    assert len(lengths) > 2
    assert set(seen) == set(met) == {max(lengths), *met}
    assert sorted(met) == sorted([*set(met)] * 3)
    assert len(set(met)) == 2
    assert padded.loss == pytest.approx(plain.loss, rel=1e-5)
    assert listener.warnings == ["compiled for 2 lengths in 0 s, before its timed steps"]


def test_what_is_met_is_no_step_of_trainers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its memory nor its loss is noted."""
    rows = [("long " * (1 + i // 2), ("bad", "good")[i % 2]) for i in range(48)]
    write_csv(folder / "lengths.csv", ("text", "label"), rows)
    watched = list[int]()
    forward = PhaseMemory.forward

    def counted(phases: PhaseMemory, step: int) -> Any:
        watched.append(step)
        return forward(phases, step)

    monkeypatch.setattr(PhaseMemory, "forward", counted)
    steps, asked = Steps(warm_up=1, repeats=3, block=1), options(folder, "lengths.csv")
    found = [
        measure_trainers(make_work(asked, Callbacks()), settings, steps, Callbacks(), lambda _: None)
        for settings in ({}, {"padded_lengths": 2})
    ]
    assert watched == [0, 1, 0, 1]
    assert found[1].loss == pytest.approx(found[0].loss, rel=1e-5)


def test_losses_of_trainer_are_read_where_each_step_writes_them_to_the_same_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of CUDA graphs are."""
    expected, memory = theirs(options(folder)).loss, torch.zeros(())
    compute_loss = Trainer.compute_loss

    def written(trainer: Any, *arguments: Any, **others: Any) -> torch.Tensor:
        loss: torch.Tensor = compute_loss(trainer, *arguments, **others)
        memory.copy_(loss.detach())
        loss.data = memory
        return loss

    monkeypatch.setattr(Trainer, "compute_loss", written)
    assert theirs(options(folder)).loss == pytest.approx(expected, rel=1e-6)


def test_trainer_has_workers(folder: Path) -> None:
    fed = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
    asked = options(folder)
    assert theirs(asked, **fed).loss == pytest.approx(theirs(asked).loss, rel=1e-5)


@pytest.mark.parametrize(("most", "lengths"), [(1, (77,)), (2, (24, 77)), (9, (8, 16, 24, 77))])
def test_few_lengths_hold_all_batches_with_the_fewest_tokens(most: int, lengths: tuple[int, ...]) -> None:
    assert lengths_for([5, 14, 15, 16, 22, 77], most) == lengths


@pytest.mark.slow
def test_classes_of_arithmetic(folder: Path) -> None:
    asked = options(folder)
    assert theirs(asked, bf16=True).arithmetic == "rounding"
    assert theirs(asked, optim="adafactor").arithmetic == "training"
    assert ours(asked, precision="bf16").arithmetic == "rounding"
    assert ours(asked, precision="bf16", optimizer_state_dtype="bf16").arithmetic == "training"


@pytest.mark.thorough
def test_the_work_is_described(folder: Path) -> None:
    work = make_work(options(folder, None, shape="20x12"), Callbacks())
    found = describe(work)
    assert (found.rows, found.median_tokens, found.longest_tokens, found.device) == (16, 12, 12, "CPU")
    assert {"fp32", "bf16"} == set(found.rates)
    assert found.step_s
    assert (found.rows_left_out, found.rows_text) == (4, "16 rows (4 beyond whole batches are left out)")
    assert set(found.rates_waiting) <= set(found.rates)
    model, lengths = work.model(), work.lengths(range(2))
    assert useful_flops(model, lengths) == pytest.approx(2 * (useful_flops(model, lengths[:8]) or 0))
    with pytest.raises(InputError, match="there are 36 rows, and a batch has 64"):
        make_work(options(folder, batch_size=64), Callbacks())


def test_a_plan_that_cannot_be_done_has_its_reason(folder: Path) -> None:
    asked = {"model": str(folder / "model"), "data": str(folder / "reviews.csv"), "batch_size": 8, "device": "cpu"}
    row = {"side": "brimful", "name": "a", "settings": {"peft": "nothing"}, "base": None, "needs_gpu": None}
    with pytest.raises(InputError) as caught:
        measure({"options": asked, "row": row, "steps": {"warm_up": 1, "repeats": 1, "block": 1}})
    found = failure(caught.value)
    assert "names no method" in found["error"]
    assert (found["is_input"], found["out_of_memory"]) == (True, False)
    ran_out = failure(torch.OutOfMemoryError("CUDA out of memory.\nTried\x1b"))
    assert ran_out["error"] == "OutOfMemoryError: CUDA out of memory."
    assert (ran_out["is_input"], ran_out["out_of_memory"]) == (False, True)
    assert failure(RuntimeError())["error"] == "RuntimeError"


@pytest.mark.thorough
def test_the_process_of_a_row_ends_with_whoever_began_it(folder: Path, tmp_path: Path) -> None:
    asked = {"model": str(folder / "model"), "data": str(folder / "reviews.csv"), "batch_size": 8, "device": "cpu"}
    row = {"side": "brimful", "name": "a", "settings": {}, "base": None, "needs_gpu": None}
    (tmp_path / "plan.json").write_text(
        json.dumps({"options": asked, "row": row, "steps": {"warm_up": 1, "repeats": 1, "block": 10_000}})
    )
    command = [sys.executable, "-m", "brimful.benchmarking.worker", tmp_path / "plan.json", tmp_path / "result.json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline().startswith("STEP")
        process.stdin.close()
        process.stdout.read()
        assert process.wait(60) == 1
    assert not (tmp_path / "result.json").exists()


class Clock:
    """Time that moves on by a second each time that a block's edge is read, of which the fifth one comes late."""

    def __init__(self) -> None:
        self.edges = 0

    def perf_counter(self) -> float:
        self.edges += 1
        return self.edges + (0.5 if self.edges > 4 else 0.0)

    def monotonic(self) -> float:
        return float(self.edges)

    def process_time(self) -> float:
        return float(self.edges)


@pytest.mark.slow
@pytest.mark.parametrize("side", [ours, theirs])
def test_a_row_ends_with_the_blocks_that_there_is_time_for(
    side: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After four of six blocks, as the fifth would not end in time; of those the figures are. Its loss, which is of the
    last block, is of none."""
    steps = Steps(warm_up=2, repeats=6, block=2)
    asked, told = options(folder), list[int]()
    work = make_work(asked, Callbacks(), steps)
    monkeypatch.setattr(figures, "time", Clock())
    measure: Any = measure_ours if side is ours else partial(measure_trainers, work, {})
    arguments = (work, steps) if side is ours else (steps,)
    found = measure(*arguments, Callbacks(), told.append, until=5.9)
    assert found.block_rates == (16.0, 16.0, 16.0, 16 / 1.5)
    assert told[-1] == steps.warm_up + 4 * steps.block
    lengths = work.lengths(range(steps.warm_up, told[-1]))
    assert found.tokens_per_s == pytest.approx(16.0 * lengths.mean())
    assert found.fill is not None
    assert 0.5 < found.fill <= 1.0
    assert (found.samples_per_s, found.loss) == (16.0, None)


@pytest.mark.parametrize(("repeats", "until", "blocks"), [(6, 0.0, 3), (2, 0.0, 2), (6, None, 6), (3, 0.0, 3)])
def test_a_row_has_three_blocks_at_least(repeats: int, until: float | None, blocks: int) -> None:
    steps, found = Steps(warm_up=1, repeats=repeats, block=1), figures.Blocks(until=until)
    for _ in range(20):
        found.mark()
        if found.is_over(steps):
            break
    assert found.done(steps) == Steps(warm_up=1, repeats=blocks, block=1)


@pytest.mark.parametrize("side", ["brimful", "trainer"])
def test_a_process_ends_at_its_time_with_what_it_has(side: str, folder: Path) -> None:
    plan = {"options": asdict(options(folder)), "row": {"side": side, "name": "plain", "settings": {}}}
    plan |= {"steps": asdict(Steps(warm_up=1, repeats=5, block=1)), "until": time.monotonic()}
    found = measure(plan, folder)
    assert found["cut_short"]
    assert len(found["measured"]["block_rates"]) == 3
