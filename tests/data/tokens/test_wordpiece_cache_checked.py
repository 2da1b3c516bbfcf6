"""Words looked up are compared with `tokenizers` on the user's own rows, and given up where they differ."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import brimful
import trained_tokenizers
from brimful.core.callbacks import Callbacks
from brimful.core.classification import Classification
from brimful.core.errors import Interrupted
from brimful.core.options.train import TrainOptions
from brimful.data.tokens import wordpiece_cache
from brimful.engine.classification import inputs, windows
from brimful.engine.prepare import prepare
from tiny import FAMILIES
from tiny_files import review, write_csv

WINDOW, ROWS = 256, 12 * 256
#: Rows with the word that is remembered wrongly. Of these only the second is compared: the first of its window.
WRONG = {300, 2 * WINDOW, *range(2 * WINDOW + 44, ROWS, 100)}


class Notes(Callbacks):
    """Keeps warnings; sends this process a signal when so many rows are done."""

    def __init__(self, stop_after: int = 1 << 60) -> None:
        self.warnings: list[str] = []
        self._stop_after = stop_after

    def warning(self, text: str) -> None:
        self.warnings.append(text)

    def count(self, done: int, total: int | None, share: float | None = None) -> None:
        if done >= self._stop_after:
            self._stop_after = 1 << 60
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier with MiniLM's tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = trained_tokenizers.minilm()
    found = FAMILIES["bert"].model(2, seed=0)
    found.resize_token_embeddings(len(tokenizer))
    found.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    texts = [review(bool(i % 2), i) + (" zebra" if i in WRONG else "") for i in range(ROWS)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_SEQUENCES", {"cpu": WINDOW})
    monkeypatch.setattr(inputs, "_SAMPLE_ROWS", WINDOW)


@pytest.fixture
def zebra_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = wordpiece_cache._Known.__missing__
    monkeypatch.setattr(
        wordpiece_cache._Known, "__missing__", lambda known, word: (7, 8, 9) if word == "zebra" else right(known, word)
    )


def run(model: Path, rows: Path, output: Path, callbacks: Callbacks, **options: Any) -> Classification:
    return brimful.classify(
        model, rows, output, device="cpu", precision="fp32", max_length=32, verify=8, callbacks=callbacks, **options
    )


def num_tokens(output: Path) -> list[int]:
    found: list[int] = pq.read_table(output)["num_tokens"].to_pylist()
    return found


def test_words_that_are_right_are_kept(model: Path, rows: Path, tmp_path: Path) -> None:
    notes = Notes()
    record = run(model, rows, tmp_path / "out.parquet", notes)
    assert (notes.warnings, record.fallback, record.counts.num_tokenizer_fallback) == ([], None, 0)


@pytest.mark.thorough
@pytest.mark.usefixtures("zebra_is_wrong")
def test_from_the_window_where_they_differ_on(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in a run that is resumed from the row on that it was in the one that was not stopped."""
    notes, stopped, resumed = Notes(), Notes(stop_after=3 * WINDOW), Notes()
    record = run(model, rows, tmp_path / "out.parquet", notes)
    [warned] = notes.warnings
    assert warned.startswith("words looked up give other token ids than `tokenizers` for 1 of 1 texts")
    assert (
        record.fallback == f"`tokenizers` made all ids of {ROWS - 2 * WINDOW:,} rows: words looked up had given others"
    )
    with pytest.raises(Interrupted):
        run(model, rows, tmp_path / "again.parquet", stopped)
    again = run(model, rows, tmp_path / "again.parquet", resumed, resume=True)
    assert 3 * WINDOW <= again.resumed_rows < ROWS
    assert (again.counts, again.fallback, resumed.warnings) == (record.counts, record.fallback, [])
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "out.parquet").read_bytes()

    monkeypatch.undo()
    run(model, rows, tmp_path / "right.parquet", Notes())
    found, right = num_tokens(tmp_path / "out.parquet"), num_tokens(tmp_path / "right.parquet")
    assert [row for row in range(ROWS) if found[row] != right[row]] == [300]


@pytest.mark.usefixtures("zebra_is_wrong")
def test_from_the_first_row_on_where_the_first_rows_differ(model: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["one", "a zebra", "two zebra"] * 10}), tmp_path / "rows.parquet")
    notes = Notes()
    record = run(model, tmp_path / "rows.parquet", tmp_path / "out.parquet", notes)
    assert record.counts.num_tokenizer_fallback == 30
    assert ["for 20 of 30 texts" in line for line in notes.warnings] == [True]
    assert num_tokens(tmp_path / "out.parquet") == [3, 4, 4] * 10


@pytest.mark.usefixtures("zebra_is_wrong")
def test_lists_of_texts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once, and holds for later calls."""
    calls, notes = (["a zebra", "the film"], ["the film", "the zebra"]), Notes()
    with brimful.Classifier(model, device="cpu", precision="fp32", callbacks=notes) as classifier:
        found = [classifier.logits(texts) for texts in calls]
    assert len(notes.warnings) == 1
    monkeypatch.undo()
    with brimful.Classifier(model, device="cpu", precision="fp32") as classifier:
        for texts, logits in zip(calls, found, strict=True):
            np.testing.assert_array_equal(classifier.logits(texts), logits)


def nli(folder: Path) -> Path:
    """The same with the labels of inference."""
    tokenizer, labels = trained_tokenizers.minilm(), ["contradiction", "neutral", "entailment"]
    found = FAMILIES["bert"].model(3, seed=0)
    found.resize_token_embeddings(len(tokenizer))
    found.config.id2label = dict(enumerate(labels))
    found.config.label2id = {label: number for number, label in enumerate(labels)}
    found.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("first", [True, False])
def test_zero_shot(tmp_path: Path, request: pytest.FixtureRequest, first: bool) -> None:
    """Pairs are not put together from ids if the first rows differ; if a later one does, words are given up."""
    model, labels = nli(tmp_path / "nli"), ["good", "bad"]
    texts = [f"the film {i}" + (" zebra" if i == (0 if first else WINDOW) else "") for i in range(2 * WINDOW)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "rows.parquet")

    def answers(output: str, callbacks: Notes) -> tuple[Classification, Any]:
        record = run(model, tmp_path / "rows.parquet", tmp_path / output, callbacks, labels=labels)
        with brimful.Classifier(model, device="cpu", precision="fp32", callbacks=callbacks) as classifier:
            return record, classifier(texts, labels=labels)

    _, expected = answers("right.parquet", Notes())
    request.getfixturevalue("zebra_is_wrong")
    notes = Notes()
    record, found = answers("out.parquet", notes)
    assert found == expected
    assert pq.read_table(tmp_path / "out.parquet") == pq.read_table(tmp_path / "right.parquet")
    assert record.counts.num_tokenizer_fallback == (0 if first else WINDOW)
    assert sum("words looked up" in line for line in notes.warnings) == (0 if first else 2)  # of the file, and the list


@pytest.mark.usefixtures("zebra_is_wrong")
def test_training(model: Path, tmp_path: Path) -> None:
    """All rows are those of `tokenizers`, whichever of them was compared."""
    data = write_csv(tmp_path / "rows.csv", ("text", "label"), ([f"a zebra {i}", str(i % 2)] for i in range(40)))
    notes = Notes()
    prepared = prepare(
        TrainOptions(model=str(model), data=str(data), output=str(tmp_path / "run"), eval_split=0.0, new_head=True),
        notes,
    )
    assert sum("words looked up" in line for line in notes.warnings) == 1
    assert not prepared.encoder.use_cache
    backend = trained_tokenizers.minilm()
    assert prepared.training.tokens.sequence(0).tolist() == backend("a zebra 0")["input_ids"]
