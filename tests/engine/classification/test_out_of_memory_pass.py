"""Memory that runs out while a file is classified: the same answers, all of them; and a record of it."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import brimful
from brimful.core.callbacks import Callbacks
from brimful.core.errors import MemoryFullError
from brimful.core.options.classify import ClassifyOptions
from brimful.core.records import OutOfMemory
from brimful.data.tokens.encoder import Tokens
from brimful.engine.classification import gpu_worker, runner, windows
from brimful.engine.classification.gpu_workers import _Coming
from brimful.engine.classification.runner import check_model, make_runner
from brimful.engine.inference import Done
from brimful.levers.precision import choose_precision
from brimful.step.precision import Precision
from failing_allocator import FailingAllocator, in_passes
from same import SCORE
from tiny_files import review, save_classifier, write_csv

ROWS = 150


class Heard(Callbacks):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and texts of different lengths."""
    folder = tmp_path_factory.mktemp("pass")
    save_classifier(folder / "m", ["bad", "good"])
    texts = [[review(i % 2 == 0, i) + " the film" * (i % 7)] for i in range(ROWS)]
    write_csv(folder / "rows.csv", ["text"], texts)
    return folder


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three windows a file."""
    monkeypatch.setitem(windows._SEQUENCES, "cpu", 60)
    monkeypatch.setattr(windows, "_FEWEST_ROWS", 60)


def classify(files: Path, output: Path, allocator: FailingAllocator, **more: Any) -> tuple[pa.Table, Any, list[str]]:
    heard = Heard()
    asked = {"precision": "fp32", "device": "cpu", "token_budget": 512, "logits": True} | more
    with in_passes(allocator):
        record = brimful.classify(files / "m", files / "rows.csv", output=output, callbacks=heard, **asked)
    return pq.read_table(output), record, [said for said in heard.warnings if said.startswith("memory ran out")]


def same_answers(one: pa.Table, other: pa.Table) -> None:
    assert one.drop_columns(["score", "logits"]).equals(other.drop_columns(["score", "logits"]))
    assert np.allclose(one["score"], other["score"], atol=SCORE)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("packing", ["auto", "off"])
def test_wherever_it_runs_out_the_answers_are_the_same(packing: str, files: Path, tmp_path: Path) -> None:
    whole = FailingAllocator()
    classify(files, tmp_path / "first.parquet", FailingAllocator(), packing=packing)  # its check is kept
    expected, record, said = classify(files, tmp_path / "whole.parquet", whole, packing=packing)
    assert (record.out_of_memory, said) == ((), [])
    places = set()
    for number, point in enumerate(np.linspace(0.0, 1.0, 8)):
        at = max(1, round(point * whole.num_allocations))
        found, record, said = classify(files, tmp_path / f"{number}.parquet", FailingAllocator([at]), packing=packing)
        same_answers(found, expected)
        for each in record.out_of_memory:
            places.add(each.where)
            assert each.tokens_after < each.tokens_before
            manifest = json.loads((tmp_path / f"{number}.parquet.manifest.json").read_text())
            assert manifest["record"]["out_of_memory"] == [vars(each)]
        assert len(said) == len(record.out_of_memory) <= 1
    assert places == {"check", "classification"}


def test_what_was_written_is_kept_and_a_resumed_pass_has_the_smaller_budget(files: Path, tmp_path: Path) -> None:
    expected, record, _ = classify(files, tmp_path / "whole.parquet", (whole := FailingAllocator()), verify=0)
    full = {"from": 1 << 60}
    allocator = FailingAllocator(fits=lambda _: allocator.num_allocations < full["from"])
    point = round(0.25 * whole.num_allocations)
    allocator.fail_at, full["from"] = frozenset([point]), round(0.9 * whole.num_allocations) + point
    with pytest.raises(MemoryFullError, match="the answers of 60 rows are kept") as caught:
        classify(files, tmp_path / "out.parquet", allocator, verify=0)
    assert "--resume" in str(caught.value.hint)
    found, record, _ = classify(files, tmp_path / "out.parquet", FailingAllocator(), verify=0, resume=True)
    same_answers(found, expected)
    assert record.resumed_rows == 60
    assert record.counts.token_budget is not None
    assert record.counts.token_budget < 512


def test_a_classifier_in_memory_says_it(files: Path) -> None:
    heard = Heard()
    with brimful.Classifier(files / "m", device="cpu", precision="fp32", callbacks=heard) as classifier:
        texts = [review(True, number) for number in range(40)]
        expected = classifier.logits(texts)
        with (allocator := FailingAllocator([40])):
            found = classifier.logits(texts)
    assert allocator.failed
    assert np.allclose(found, expected, atol=SCORE)
    assert len([said for said in heard.warnings if "memory ran out" in said]) == 1


class _Connection:
    """One end of a worker's connection, in this process: the other end closes when it has an answer."""

    def __init__(self, window: Tokens) -> None:
        self._given, self._answered = [window], threading.Event()
        self.sent: list[Any] = []

    def recv(self) -> Tokens:
        if self._given:
            return self._given.pop()
        assert self._answered.wait(60)
        raise EOFError

    def send(self, message: Any) -> None:
        self.sent.append(message)
        self._answered.set()


def test_another_gpus_process_tells_it_with_its_logits(files: Path) -> None:
    options = ClassifyOptions(model=str(files / "m"), data="", device="cpu", precision="fp32")
    checked, heard = check_model(options), list[OutOfMemory]()
    tokens = checked.encoder.encode([review(True, number) for number in range(30)])
    runner = make_runner(
        *(checked, options, choose_precision("fp32", torch.device("cpu"))),
        sample=tokens,
        num_tokens=0,
        callbacks=Callbacks(),
        hear=heard.append,
    )
    connection = _Connection(tokens)
    with FailingAllocator([30]):
        gpu_worker._serve(connection, runner, heard)  # type: ignore[arg-type]
    (first,) = connection.sent
    assert [each.where for each in first.out_of_memory] == ["classification"]
    assert heard == []
    future: Future[Done] = Future()
    future.set_result(first)
    said: list[OutOfMemory] = []
    assert _Coming(future, lambda _: None, said.append).result().shape == (30, 2)
    assert tuple(said) == first.out_of_memory


@pytest.mark.parametrize(
    ("device", "precision", "asked", "said"),
    [
        ("cuda", "fp32", {}, "add --precision bf16 or --stream-weights host, whose answers are the same bytes"),
        ("cuda", "bf16", {}, "add --stream-weights host, whose answers are the same bytes"),
        ("cuda", "bf16", {"stream_weights": "host"}, None),
        ("cpu", "fp32", {}, None),
    ],
)
def test_levers_that_are_not_on_are_named(device: str, precision: str, asked: dict[str, Any], said: str | None) -> None:
    options = ClassifyOptions(data="", model="", **asked)
    there = Precision(value=precision, device=torch.device(device), reason="a test")  # type: ignore[arg-type]
    assert runner._more_room(options, there, "") == said
