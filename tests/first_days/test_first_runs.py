"""First trainings: what of them is kept with the model, and what is said of those that learned little."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from commands import Brimful, Files, Said, train_words
from tiny_files import review, write_csv

TEXTS = [review(bool(i % 2), i) for i in range(60)]


def trained(
    brimful: Brimful, files: Files, run: Path, names: Sequence[str], rows: Iterable[Sequence[object]], *more: object
) -> Said:
    """A run of three epochs in `run` on these rows, its file beside it."""
    data = write_csv(run.with_suffix(".csv"), names, rows)
    said = brimful(*train_words(data, files.base, run), "--num-train-epochs", 3, "--learning-rate", *more)
    assert said.code == 0, said.err
    return said


@pytest.mark.slow
def test_a_pair_model_keeps_what_it_was_trained_on(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    """Its longest sequence and its pairs, in use and on its card; short as the run was, it says how it went."""
    run, rows = tmp_path / "run", [(text, TEXTS[-i], ("no", "yes")[i % 2]) for i, text in enumerate(TEXTS)]
    said = trained(brimful, files, run, ("question", "answer", "label"), rows, 1e-3, "--max-length", 12)
    falling = "warning: the evaluation loss was still falling when training ended ("
    assert falling in said.err
    assert "try a higher --learning-rate or more epochs" in said.err
    assert "value    95 % interval      always no  TF-IDF, linear\n" in said.err, said.err
    card = (run / "model" / "README.md").read_text()
    assert "The text is in column `question`, its pair in `answer`, the label in `label`." in card
    assert "texts at 12 tokens, as in training" in card
    said = brimful("classify", run / "model", tmp_path / "run.csv", "--verify", 0)
    assert "60 (100.0 %) of 60 rows were longer than 12 tokens (the longest in training)" in said.err, said.err
    said = brimful("classify", run / "model", files.reviews, "--verify", 0)
    assert "the model was trained on pairs, 'question' with 'answer', and no second text is read here" in said.err


@pytest.mark.slow
def test_no_label_is_reached(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    """Each of them is true of a row in twelve."""
    labels = [str([name for name in "abcdefgh" if (7 * i + 5 * ord(name)) % 12 == 0]) for i in range(60)]
    said = trained(brimful, files, tmp_path / "run", ("text", "tags"), zip(TEXTS, labels, strict=True), 1e-2)
    warning = "warning: no label reached 0.5 in any row: answering nothing scores a label accuracy of 0."
    assert warning in said.err, said.err


def test_targets_are_far_off(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    rows = [(text, 150 + 1.5 * i) for i, text in enumerate(TEXTS)]
    said = trained(brimful, files, tmp_path / "run", ("text", "label"), rows, 1e-3, "--target-scaling", "off")
    assert "warning: worse than always answering the mean: targets average 1" in said.err, said.err
    assert "rescale the targets to a mean of 0 and a spread of 1" in said.err
