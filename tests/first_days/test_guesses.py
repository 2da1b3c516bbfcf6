"""Guesses about headers, columns, labels and splits: a line each with the flag that settles it, doubts as warnings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from commands import Brimful, Files, Said, train_words
from tiny_files import review, save_classifier, write_csv, write_reviews

TEXTS = [review(bool(i % 2), i) for i in range(60)]
LABELS = [("bad", "good")[i % 2] for i in range(60)]


def plan(brimful: Brimful, files: Files, data: Path, *more: object) -> Said:
    """A dry run of training on `data`."""
    return brimful(*train_words(data, files.base, data.parent / "run", "--dry-run", *more))


def columns(*values: Iterable[object]) -> Iterator[tuple[object, ...]]:
    """Rows of these columns."""
    return zip(*values, strict=False)


def reviews(path: Path, labels: Sequence[object]) -> Path:
    return write_csv(path, ("text", "label"), columns(TEXTS, labels))


def test_a_first_row_that_would_be_lost(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    """Its label occurs in no other row, and in classify it is said once."""
    data = write_csv(tmp_path / "rows.csv", ("the film was a story of two friends .", "rare"), columns(TEXTS, LABELS))
    said = brimful("classify", files.classifier, data, "--verify", 0, "-o", tmp_path / "out.csv")
    warning = "rows.csv: the first line looks like a row"
    assert said.err.count(warning) == 1, said.err
    line = next(line for line in said.err.splitlines() if warning in line)
    assert "--no-header or --column-names reads it as one, --header as names" in line
    assert len(line.replace(str(data), "")) < 220
    said = brimful("classify", files.classifier, data, "--verify", 0, "--no-header")
    assert len(said.out.splitlines()) == 61


def test_headers_are_not_doubted(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    for names in (("text", "label"), ("Review Text", "stars given"), ("body", "airline_sentiment")):
        data = write_csv(tmp_path / "rows.csv", names, columns(TEXTS, LABELS))
        assert "looks like a row" not in plan(brimful, files, data).err


def test_the_label_column_by_the_end_of_its_name(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    rows = columns(TEXTS, ["United", "Delta"] * 30, LABELS)
    data = write_csv(tmp_path / "rows.csv", ("tweet", "airline", "airline_sentiment"), rows)
    said = plan(brimful, files, data)
    line = "label: column 'airline_sentiment' (its name ends with 'sentiment'; --label-column names another)"
    assert line in said.err
    rows = columns([1, 2, 3, 4, 5] * 12, ["True", "False"] * 30, TEXTS)
    said = plan(brimful, files, write_csv(tmp_path / "rows.csv", ("overall", "verified", "reviewText"), rows))
    assert "label: column 'overall' (by name" in said.err


def test_a_weak_guess_of_the_label_column_is_a_warning(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    rows = columns(["yes", "no"] * 30, ["a", "b", "c"] * 20, TEXTS)
    said = plan(brimful, files, write_csv(tmp_path / "rows.csv", ("checked", "kind", "text"), rows))
    assert "warning: the label may be another column than 'checked'" in said.err
    assert "kind has 3; --label-column names it" in said.err


def test_a_pair_that_is_not_wanted(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = write_csv(tmp_path / "rows.csv", ("sentence1", "sentence2", "label"), columns(TEXTS, TEXTS, LABELS))
    said = plan(brimful, files, data).err
    assert (
        "pair: column 'sentence2' (the pair of 'sentence1' by name; --pair-column names another (none: single texts))"
        in said
    )
    assert said.count("\nLearns  'label' from 'sentence1' with 'sentence2': bad, good\n") == 1
    assert said.index("Learns") > said.index("How it runs")  # what was guessed is not out of sight when steps begin
    assert "pair: column" not in plan(brimful, files, data, "--pair-column", "none").err


def test_one_label_in_several_spellings(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    said = plan(brimful, files, reviews(tmp_path / "rows.csv", ["spam", "Spam", "SPAM ", "ham"] * 15)).err
    assert "differ in case or spaces only are labels of their own: 'SPAM ' and 'Spam' and 'spam'" in said


def test_lists_that_are_taken_for_classes(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    tags = ["red, blue", "red", "blue, green", "green", "red, green", "blue"] * 10
    data = reviews(tmp_path / "rows.csv", tags)
    said = plan(brimful, files, data).err
    assert "6 labels: blue, 'blue, green', green, red, 'red, blue', 'red, green'" in said
    assert "the 6 labels look like lists: --task multi_label cuts them at commas, and gives 3" in said
    assert "multi_label, 3 labels" in plan(brimful, files, data, "--task", "multi_label").err
    places = reviews(tmp_path / "rows.csv", ["Paris, France", "Rome, Italy", "Bern, Switzerland"] * 20)
    assert "look like lists" not in plan(brimful, files, places).err


@pytest.mark.slow
def test_decimal_commas_are_no_lists(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    numbers = reviews(tmp_path / "rows.csv", [f"{5 + n % 4},{n % 3}0" for n in range(60)])
    said = plan(brimful, files, numbers).err
    assert "the labels look like numbers with a decimal comma, and are taken for classes: --task regression" in said
    assert "look like lists" not in said
    said = plan(brimful, files, numbers, "--task", "regression").err
    assert "column 'label': commas in its numbers are read as decimal points" in said
    thousands = reviews(tmp_path / "more.csv", [f"{5 + n % 4},{n % 3}00" for n in range(60)])
    assert "holds no number: '5,000'" in plan(brimful, files, thousands, "--task", "regression").err


def test_a_label_that_no_row_is_evaluated_on(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    said = plan(
        brimful, files, reviews(tmp_path / "rows.csv", ["common"] * 58 + ["rare"] * 2), "--eval-split", 0.05
    ).err
    assert "warning: no evaluation row has the label 'rare' (2 to train on): metrics say nothing of it" in said
    rows = [*columns(TEXTS, LABELS), ("", "empty"), (" ", "empty")]
    said = plan(brimful, files, write_csv(tmp_path / "rows.csv", ("text", "label"), rows)).err
    assert "warning: no training row has the label 'empty': it cannot be learned" in said


def test_a_label_that_every_row_has(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    """Of several labels a row; among one label a row that is an error."""
    several = ("--task", "multi_label")
    said = plan(brimful, files, reviews(tmp_path / "rows.csv", [f"film|{label}" for label in LABELS]), *several).err
    assert "warning: every training row has the label 'film': what rows without it look like cannot be learned" in said
    data = reviews(tmp_path / "rows.csv", ["bad", *[f"film|{label}" for label in LABELS[1:]]])
    said = plan(brimful, files, data, *several).err
    assert "every training row" not in said


def test_equal_texts_with_different_labels(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    rows = [*columns(TEXTS, LABELS), (TEXTS[0], "good"), (TEXTS[0], "bad"), ("N/A", "good"), ("nan", "bad")]
    said = plan(brimful, files, write_csv(tmp_path / "rows.csv", ("text", "label"), rows), "--eval-split", 0).err
    assert "1 text has different labels in different rows (3 training rows); the first: rows 1 and 61, '" in said
    assert "warning: 2 rows have nothing but 'N/A', 'nan' in column 'text': a text like others" in said


def test_rows_to_evaluate_on_are_read_as_those_of_training(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    """A second text that training rows do not have is left out, and said."""
    data, metrics = reviews(tmp_path / "rows.csv", LABELS), list[object]()
    for names in (("text", "text_pair", "label"), ("text", "other", "label")):
        held_out = write_csv(tmp_path / f"{names[1]}.csv", names, columns(TEXTS, TEXTS[::-1], LABELS))
        words = train_words(data, files.base, tmp_path / names[1] / "run", "--eval-data", held_out, "--max-steps", 1)
        said = brimful(*words)
        assert said.code == 0
        assert ("'text_pair' of" in said.err) == (names[1] == "text_pair")
        metrics.append(json.loads((tmp_path / names[1] / "run" / "run.json").read_text())["metrics"])
    assert metrics[0] == metrics[1]


def test_every_class_has_one_row(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    said = plan(brimful, files, reviews(tmp_path / "rows.csv", [f"label {i}" for i in range(20)]))
    assert "20 rows are too few to hold out 0.1 of them: every class has one row" in said.err


def test_a_limit_that_leaves_too_few_rows_to_hold_out(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    said = plan(brimful, files, reviews(tmp_path / "rows.csv", LABELS), "--limit", 2)
    assert "2 rows are too few to hold out 0.1 of them" in said.err
    assert "hint: --limit 2 leaves few: raise it, or train on all of them by --eval-split 0" in said.err


def test_missing_labels(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [
        {"text": text, "tags": ["a", label] if i % 10 else None}
        for i, (text, label) in enumerate(columns(TEXTS, LABELS))
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = plan(brimful, files, data)
    assert (said.code, "row 1: column 'tags' has no label" in said.err) == (2, True)
    assert "write [] for no label; --missing-labels none takes it for that, drop leaves such rows out" in said.err
    assert "6 rows without a label were left out" in plan(brimful, files, data, "--missing-labels", "drop").err
    said = plan(brimful, files, data, "--missing-labels", "none")
    assert (said.code, "without a label" in said.err) == (0, False)
    data = reviews(tmp_path / "rows.csv", ["nan", "NULL", *LABELS[2:]])
    assert "the labels 'nan' (1 row), 'NULL' (1 row) are classes of their own" in plan(brimful, files, data).err
    said = plan(brimful, files, data, "--missing-labels", "drop").err
    assert "2 rows without a label were left out" in said
    assert "task: single_label, 2 labels: bad, good (one label a row; --task names another)" in said
    data = reviews(tmp_path / "rows.csv", ["", *LABELS[1:]])
    assert "give it one; --missing-labels drop" in plan(brimful, files, data).err
    assert "1 row without a label was left out" in plan(brimful, files, data, "--missing-labels", "drop").err


def test_a_bad_cell_among_numbers(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = reviews(tmp_path / "rows.csv", [f"{i % 7}.5" for i in range(len(TEXTS) - 1)] + ["n/a"])
    said = plan(brimful, files, data)
    assert "taken as 8 classes (single_label); --task regression, with --missing-labels drop, takes them" in said.err
    said = plan(brimful, files, data, "--task", "regression", "--missing-labels", "drop")
    assert (said.code, "1 row without a label was left out" in said.err) == (0, True)


@pytest.mark.slow
def test_empty_labels_among_several_are_counted(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = reviews(tmp_path / "rows.csv", ["bad|good", "", "  ", *LABELS[3:]])
    line = "2 rows have an empty label, and are taken for rows that no label is true of"
    assert f"{line}; --missing-labels drop leaves them out" in plan(brimful, files, data).err
    assert "2 rows without a label were left out" in plan(brimful, files, data, "--missing-labels", "drop").err
    several = save_classifier(tmp_path / "model", ["bad", "good"], problem_type="multi_label_classification")
    assert line in brimful("evaluate", several, data, "--verify", 0).err


def test_folders_of_splits(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    for split in ("train", "test"):
        for label in ("neg", "pos"):
            (tmp_path / "imdb" / split / label).mkdir(parents=True)
            for number in range(6):
                (tmp_path / "imdb" / split / label / f"{number}.txt").write_text(review(label == "pos", number))
    said = plan(brimful, files, tmp_path / "imdb").err
    assert f"splits: {tmp_path}/imdb/train to train on, {tmp_path}/imdb/test to evaluate on" in said
    assert "12 rows to train on, 12 to evaluate on" in said
    files_of = tmp_path / "files"
    files_of.mkdir()
    for name, count in (("train.csv", 20), ("valid.csv", 6), ("test.csv", 8)):
        write_reviews(files_of / name, count)
    assert "20 rows to train on, 6 to evaluate on" in plan(brimful, files, files_of).err
    said = brimful("classify", files.classifier, files_of)
    assert "the folder holds several splits: test, train, valid" in said.err


def test_rows_of_a_folder_to_evaluate_on_are_named(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    """The flag that the line on splits has, and a test without labels, as competitions have it."""
    data = tmp_path / "data"
    data.mkdir()
    for name, count in (("news_train.csv", 20), ("news_dev.csv", 6), ("news_test.csv", 8)):
        write_reviews(data / name, count)
    assert "20 rows to train on, 6 to evaluate on" in plan(brimful, files, data).err
    said = plan(brimful, files, data, "--eval-data", data / "news_test.csv").err
    assert f"splits: {data}/news_train.csv to train on (by its name)" in said
    assert "20 rows to train on, 8 to evaluate on" in said
    (data / "news_dev.csv").unlink()
    write_csv(data / "news_test.csv", ("id", "text"), columns(range(60), TEXTS))
    said = plan(brimful, files, data)
    assert said.code == 2
    assert "news_test.csv: has no labels, so nothing can be evaluated on it: there is no column 'label'" in said.err
    assert f"hint: train on {data}/news_train.csv without --eval-data" in said.err
    (data / "news_test.csv").write_text("a film,good\nanother film,bad\n")
    said = plan(brimful, files, data / "news_train.csv", "--eval-data", data / "news_test.csv").err
    assert "news_test.csv: is to be evaluated on, and lacks columns of the training rows: 'text', 'label'" in said
    assert "--label-column:" not in said


def test_a_few_rows_to_try_things_out(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = reviews(tmp_path / "rows.csv", LABELS)
    assert "18 rows to train on, 2 to evaluate on" in plan(brimful, files, data, "--limit", 20).err
    said = brimful("classify", files.classifier, data, "--limit", 7)
    assert [json.loads(line)["text"] for line in said.out.splitlines()] == TEXTS[:7]
    assert "Classified  7 texts" in said.err


def test_the_hint_of_a_label_map_guesses_nothing(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = reviews(tmp_path / "rows.csv", ["positive", "negative"] * 30)
    said = brimful(*train_words(data, files.classifier, tmp_path / "run")).err
    assert "--label-map negative=...,positive=... maps them to the head's" in said
