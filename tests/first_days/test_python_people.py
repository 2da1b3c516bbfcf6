"""Data in memory wherever a file is taken, results as what was given, and progress where a person watches."""

from __future__ import annotations

import io
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import datasets
import pandas
import polars
import pyarrow as pa
import pytest

import brimful
from brimful.core.callbacks import Callbacks
from brimful.core.errors import DataError, OptionError
from brimful.core.records import TrainedInputs, to_json
from brimful.given import is_notebook
from brimful.reports.terminal import Terminal
from commands import Files
from tiny_files import review, write_csv

TEXTS = [review(bool(i % 2), i) for i in range(40)]
LABELS = [("bad", "good")[i % 2] for i in range(40)]
COLUMNS = {"text": TEXTS, "label": LABELS}
ROWS = [{"text": text, "label": label} for text, label in zip(TEXTS, LABELS, strict=True)]
SHORT: dict[str, Any] = {"max_steps": 1, "batch_size": 8}

FORMS = {
    "pandas": pandas.DataFrame(COLUMNS),
    "polars": polars.DataFrame(COLUMNS),
    "lazy": polars.LazyFrame(COLUMNS),
    "datasets": datasets.Dataset.from_dict(COLUMNS),
    "arrow": pa.table(COLUMNS),
    "columns": COLUMNS,
    "rows": ROWS,
    "texts and labels": (TEXTS, LABELS),
}


@pytest.mark.slow
def test_all_forms_train_the_same_model(files: Files, tmp_path: Path) -> None:
    """Class ids of a Dataset are their names, as those of its files are."""
    runs = {
        name: brimful.train(data, model=files.base, output=tmp_path / name, **SHORT) for name, data in FORMS.items()
    }
    ids = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])})
    with_ids = datasets.Dataset.from_dict({"text": TEXTS, "label": [i % 2 for i in range(40)]}, features=ids)
    runs["ids"] = brimful.train(with_ids.select(range(40)), model=files.base, output=tmp_path / "ids", **SHORT)
    weights = {(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in runs}
    assert len(weights) == 1
    assert {run.data_fingerprint for run in runs.values()} == {runs["arrow"].data_fingerprint}
    assert runs["pandas"].options["data"] == "DataFrame"


def test_labels_beside_texts_and_splits(files: Files, tmp_path: Path) -> None:
    held_out = (TEXTS[:4], LABELS[:4])
    run = brimful.train(
        pandas.Series(TEXTS),
        labels=pandas.Series(LABELS),
        eval_data=held_out,
        model=files.base,
        output=tmp_path / "a",
        **SHORT,
    )
    assert (run.data["rows"], run.data["eval_rows"]) == (40, 4)
    card = (tmp_path / "a" / "model" / "README.md").read_text()
    assert "`brimful.train` in Python, on data in memory (`list of texts`" in card
    assert "brimful train " not in card
    parts = datasets.DatasetDict({"train": FORMS["datasets"], "test": FORMS["datasets"].select(range(6))})
    run = brimful.train(parts, model=files.base, output=tmp_path / "b", **SHORT)
    assert (run.data["rows"], run.data["eval_rows"]) == (40, 6)
    pairs = list(zip(TEXTS, TEXTS, strict=True))
    run = brimful.train(pairs, labels=LABELS, model=files.base, output=tmp_path / "c", **SHORT)
    assert run.data["inputs"]["pair_column"] == "text_pair"


@pytest.mark.slow
def test_answers_come_as_what_was_given(files: Files, tmp_path: Path) -> None:
    frame = pandas.DataFrame({"text": TEXTS, "n": range(40)}, index=[f"row {i}" for i in range(40)])
    found = brimful.classify(files.classifier, frame, verify=0)
    assert isinstance(found, pandas.DataFrame)
    assert list(found.index) == list(frame.index)
    assert list(found.columns[:3]) == ["text", "n", "label"]
    expected = found["label"].tolist()
    for name in ("polars", "datasets", "arrow"):
        answer = brimful.classify(files.classifier, FORMS[name], verify=0)
        assert type(answer) is type(FORMS[name])
        column = answer["predicted_label"]
        assert (column.to_pylist() if name == "arrow" else list(column)) == expected
    listed = brimful.classify(files.classifier, TEXTS, verify=0)
    assert [row["label"] for row in listed] == expected
    of_file = brimful.classify(files.classifier, files.reviews, frame="polars", verify=0)
    assert isinstance(of_file, polars.DataFrame)
    record = brimful.classify(files.classifier, frame, tmp_path / "out.parquet", verify=0)
    assert record.counts.num_rows == 40
    assert pandas.read_parquet(tmp_path / "out.parquet")["label"].tolist() == expected


def test_columns_of_pandas_stay_as_they_are(files: Files) -> None:
    """Types that Arrow has no equal of, and rows named twice; of a list of texts there is nothing to keep."""
    frame = pandas.DataFrame(
        {
            "text": TEXTS,
            "id": pandas.array([9007199254740993, None] * 20, dtype="Int64"),
            "flag": pandas.array([True, None] * 20, dtype="boolean"),
            "kind": pandas.Categorical(["x", None] * 20, categories=["y", "x", "z"], ordered=True),
            7: [[1], None] * 20,
        },
        index=[5] * 40,
    )
    own = frame.rename(columns=str)
    found = brimful.classify(files.classifier, frame, verify=0)
    pandas.testing.assert_frame_equal(found[list(own.columns)], own)
    assert list(found.columns[5:7]) == ["label", "score"]
    found = brimful.classify(files.classifier, frame, limit=3, verify=0)
    pandas.testing.assert_frame_equal(found[list(own.columns)], own.iloc[:3])
    listed = brimful.classify(files.classifier, TEXTS, frame="pandas", verify=0)
    named = brimful.classify(files.classifier, pandas.Series(TEXTS, index=range(7, 47)), frame="pandas", verify=0)
    assert listed["label"].tolist() == named["label"].tolist()
    assert (list(listed.index), list(named.index)) == (list(range(40)), list(range(7, 47)))
    assert list(named.columns[:2]) == ["text", "label"]


def test_answers_in_memory_are_evaluated_as_those_of_a_file(files: Files, tmp_path: Path) -> None:
    answers = brimful.classify(files.classifier, FORMS["pandas"], verify=0)
    answers.to_csv(tmp_path / "answers.csv", index=False)
    found, of_file = brimful.evaluate(answers), brimful.evaluate(tmp_path / "answers.csv")
    assert (found.metrics, found.num_rows) == (of_file.metrics, 40)
    assert (found.model, found.data, found.command) == ("DataFrame", "DataFrame", "brimful evaluate DataFrame")
    with pytest.raises(DataError, match=r"^DataFrame: holds no answers"):
        brimful.evaluate(FORMS["pandas"][["text"]])


@pytest.mark.slow
def test_pairs_are_classified_as_pairs_whatever_the_model_was_trained_on(files: Files, tmp_path: Path) -> None:
    """As --pair-column of the command line does. Of a table the model's training decides, and says so."""
    model = tmp_path / "model"
    shutil.copytree(files.classifier, model)
    trained = TrainedInputs(text_column="text", pair_column=None, label_columns=("label",), max_length=64)
    (model / "brimful.json").write_text(to_json(trained))
    pairs = list(zip(TEXTS[:4], TEXTS[4:8], strict=True))
    columns = [*zip(*pairs, strict=True)]
    rows = [{"text": first, "text_pair": second} for first, second in pairs]
    file = write_csv(tmp_path / "pairs.csv", ("first", "second"), pairs)
    named: dict[str, Any] = {"text_column": "first", "pair_column": "second", "header": True}
    with pytest.warns(UserWarning, match="trained on single texts, and pairs are given"):
        expected = brimful.classify(model, file, frame="list", verify=0, **named)
    frame = pandas.DataFrame({"text": columns[0], "text_pair": columns[1]})
    for given in (pairs, [list(pair) for pair in pairs], rows):
        with pytest.warns(UserWarning, match="trained on single texts, and pairs are given"):
            found = brimful.classify(model, given, frame="list", verify=0)
        assert [(row["score"], row["num_tokens"]) for row in found] == [
            (row["score"], row["num_tokens"]) for row in expected
        ]
    single = [row["score"] for row in brimful.classify(model, TEXTS[:4], verify=0)]
    assert [row["score"] for row in brimful.classify(model, pairs, verify=0, pair_column="none")] == single
    with pytest.warns(UserWarning, match="'text_pair' is not read: .* --pair-column text_pair reads pairs"):
        assert brimful.classify(model, frame, verify=0)["score"].tolist() == single
    [lone] = brimful.classify(model, [("a film", None)], verify=0, callbacks=Callbacks())
    assert lone["label"] is None


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "list of texts: has no rows"),
        ([1, 2], "list of texts, row 1: int is no text: '1'"),
        ([("a", "b", "c")], "list of texts, row 1: tuple of 3 is no pair of texts"),
        ([("a", "b"), "c"], "list of texts, row 2: str is no pair of texts: ''c''"),
        ([("a", "b"), ("c", 1)], "list of texts, row 2: int is no text"),
    ],
)
def test_what_is_no_list_of_texts_or_pairs(files: Files, data: Any, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        brimful.classify(files.classifier, data, verify=0)
    assert caught.value.hint


def test_a_frame_of_no_known_kind(files: Files) -> None:
    with pytest.raises(OptionError, match="frame is 'numpy'") as caught:
        brimful.classify(files.classifier, TEXTS, frame="numpy")  # type: ignore[arg-type]
    assert caught.value.hint == "it can be pandas, polars, datasets, arrow, list"


@pytest.mark.slow
def test_profile_and_evaluate_take_them_too(files: Files) -> None:
    assert brimful.profile(FORMS["pandas"], model=files.classifier, steps=1).steps == 1
    scored = [brimful.evaluate(files.classifier, FORMS[name], verify=0).metrics for name in ("pandas", "arrow")]
    assert scored[0] == scored[1]


@pytest.mark.parametrize(
    ("data", "labels", "said"),
    [
        (7, None, "data is int: it must be a file, a DataFrame"),
        (TEXTS, LABELS[:3], "40 texts have 3 labels"),
        ("reviews.csv", LABELS, "labels go with a list of texts"),
        ([1, 2], LABELS[:2], "list of texts, row 1: int is no text: '1'"),
        (pandas.DataFrame({"text": ["a", 1]}), None, "the DataFrame cannot be read"),
    ],
)
def test_what_is_no_data(files: Files, tmp_path: Path, data: Any, labels: Any, said: str) -> None:
    with pytest.raises((OptionError, DataError), match=said):
        brimful.train(data, labels=labels, model=files.base, output=tmp_path / "run")


def test_rows_of_data_in_memory_are_named_in_errors(files: Files, tmp_path: Path) -> None:
    rows = pandas.DataFrame({"text": TEXTS, "label": [*LABELS[:-1], None]})
    with pytest.raises(DataError, match="DataFrame, row 40: column 'label' has no label"):
        brimful.train(rows, model=files.base, output=tmp_path / "run")
    with pytest.raises(DataError, match="no such column: 'topic'"):
        brimful.train(rows, model=files.base, output=tmp_path / "run", label_column="topic")


def test_progress_is_shown_where_it_is_wanted(
    files: Files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    brimful.classify(files.classifier, TEXTS, verify=0)
    assert capsys.readouterr().err == ""
    brimful.classify(files.classifier, TEXTS, verify=0, progress=True)
    assert "Classified  40 texts" in capsys.readouterr().err
    assert not is_notebook()
    shell = types.SimpleNamespace(get_ipython=object)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "ipykernel", shell)
    assert is_notebook()
    monkeypatch.setattr("brimful.reports.terminal._NOTEBOOK_EVERY_S", 0.0)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    terminal = Terminal(in_notebook=True)
    terminal.count(1, 10)
    terminal.count(2, 10)
    terminal.warning("something")
    terminal.close()
    assert stream.getvalue().count("\r") >= 3
    assert "2 of 10 rows" in stream.getvalue()
    assert stream.getvalue().endswith("warning: something\n")
