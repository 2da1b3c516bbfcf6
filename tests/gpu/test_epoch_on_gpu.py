"""Epochs of real text on a GPU: what a run compiles and captures, and that nothing is made anew once it is steady."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import brimful
from brimful.core.callbacks import Callbacks
from brimful.core.options.train import TrainOptions
from brimful.data.readers.packaged import bbc_news, minilm, tweets
from brimful.engine.assemble import build
from brimful.engine.compilations import CompilationWatch
from brimful.engine.prepare import prepare
from brimful.engine.profiling.timing import run_steps
from brimful.hardware.probe import choose_device
from brimful.levers.precision import choose_precision

pytestmark = pytest.mark.gpu

CORPORA = {"bbc": bbc_news, "tweets": tweets}


@pytest.fixture(scope="module", params=CORPORA)
def texts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("texts"), request.param)


@pytest.fixture(scope="module")
def articles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("articles"), "bbc")


def _write(folder: Path, corpus: str) -> Path:
    path = folder / f"{corpus}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in CORPORA[corpus]()), "utf-8")
    return path


@pytest.fixture(scope="module")
def without_dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM-L6, which all modes of execution then train alike."""
    folder = tmp_path_factory.mktemp("model") / "minilm"
    shutil.copytree(minilm(), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("execution", ["captured", "compiled"])
def test_a_steady_epoch_makes_nothing_anew(execution: Any, texts: Path) -> None:
    """All batches of an epoch, three times over: what is met the third time was captured the second time."""
    options = TrainOptions(
        data=str(texts), model=str(minilm()), output="", eval_split=0.0, precision="bf16", execution=execution
    )
    callbacks, precision = Callbacks(), choose_precision("bf16", choose_device("cuda"))
    prepared = prepare(options, callbacks)
    with precision.apply():
        built = build(options, prepared, precision, callbacks)
        epoch = range(prepared.order.batches_per_epoch)
        for _ in range(2):
            run_steps(built, epoch)
        graphs, reserved, watch = built.step.num_graphs, torch.cuda.memory_reserved(), CompilationWatch(built.step)
        watch.look(0)
        torch.cuda.reset_peak_memory_stats()
        run_steps(built, epoch)
    watch.look(1)
    assert watch.found.last_traced is None
    assert built.step.num_graphs == graphs > 1
    assert torch.cuda.memory_reserved() == torch.cuda.max_memory_reserved() == reserved


@pytest.mark.parametrize("execution", ["captured", "compiled"])
def test_evaluations_logs_and_checkpoints_make_nothing_anew(execution: str, articles: Path, tmp_path: Path) -> None:
    """Of three epochs, whose last batches are smaller ones."""
    run = brimful.train(
        articles, model=minilm(), output=tmp_path / "run", device="cuda", precision="bf16", execution=execution,
        num_train_epochs=3, eval_steps=20, save_steps=25, logging_steps=5,
    )  # fmt: skip
    found, budgets = run.compilations, str(run.recipe.value("token_budget")).split(", ")
    assert 1 < found.captured <= len(budgets) <= 12
    assert found.traced == 0  # layers are recorded


def test_first_losses_are_those_of_the_eager_step(articles: Path, without_dropout: Path, tmp_path: Path) -> None:
    found = {
        execution: _losses(articles, without_dropout, tmp_path / execution, execution)
        for execution in ("eager", "captured", "compiled")
    }
    for execution in ("captured", "compiled"):
        assert found[execution] == pytest.approx(found["eager"], rel=2e-2)
        assert found[execution][0] == pytest.approx(found["eager"][0], rel=2e-3)


def _losses(data: Path, model: Path, output: Path, execution: str) -> list[float]:
    """Of the first 20 steps."""
    brimful.train(
        data, model=model, output=output, device="cuda", precision="bf16", execution=execution, max_steps=20,
        logging_steps=1, learning_rate=5e-5,
    )  # fmt: skip
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["kind"] == "step"]
    assert len(losses) == 20
    return losses
