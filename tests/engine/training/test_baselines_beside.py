"""Baselines that a process makes beside a training."""

from __future__ import annotations

import dataclasses
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from brimful.core.callbacks import Callbacks
from brimful.core.evaluation import Baseline
from brimful.core.options.train import TrainOptions
from brimful.engine.prepare import Prepared, prepare
from brimful.engine.training.baselines import Baselines
from runs import single_label_rows, write_rows


@pytest.fixture
def made(model: Path, tmp_path: Path) -> tuple[Prepared, TrainOptions]:
    data = write_rows(tmp_path / "rows.jsonl", single_label_rows(60))
    options = TrainOptions(data=str(data), model=str(model), output=str(tmp_path / "run"), eval_split=0.3)
    return prepare(options, Callbacks()), options


def without_seconds(baselines: tuple[Baseline, ...]) -> list[Baseline]:
    return [dataclasses.replace(each, train_s=0.0) for each in baselines]


@pytest.mark.thorough
def test_a_process_makes_the_same_ones(made: tuple[Prepared, TrainOptions]) -> None:
    after = Baselines(*made, beside=False).result(Callbacks())
    with closing(Baselines(*made, beside=True)) as beside:
        beside.begin()
        assert without_seconds(beside.result(Callbacks())) == without_seconds(after)
    assert [each.name for each in after] == ["constant", "tfidf_linear"]


def test_where_the_process_was_ended_they_are_made_here(made: tuple[Prepared, TrainOptions]) -> None:
    with closing(Baselines(*made, beside=True)) as beside:
        beside.begin()
        linear = beside._linear
        assert linear is not None
        while linear._process is None:
            assert not linear.ended
        os.kill(linear._process.pid, signal.SIGKILL)
        assert [each.name for each in beside.result(Callbacks())] == ["constant", "tfidf_linear"]


def test_closing_ends_the_process(made: tuple[Prepared, TrainOptions]) -> None:
    with closing(Baselines(*made, beside=True)) as beside:
        beside.begin()
    assert beside._linear is not None
    process = beside._linear._process
    assert process is None or process.returncode is not None


def test_none_are_begun_without_being_wanted(made: tuple[Prepared, TrainOptions]) -> None:
    prepared, options = made
    beside = Baselines(prepared, dataclasses.replace(options, baselines=False), beside=True)
    beside.begin()
    assert beside._linear is None
    assert beside.result(Callbacks()) == ()
