"""Meanings of labels, and the targets that rows get."""

from __future__ import annotations

import csv
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brimful.core.errors import DataError
from brimful.core.options.choices import TaskChoice
from brimful.core.options.evaluate import EvaluateOptions
from brimful.core.records import LabelSpace
from brimful.data.labels.columns import Columns
from brimful.data.labels.doubts import label_doubts
from brimful.data.labels.label_space import detect_labels, encode_labels, label_doubt, task_reason
from brimful.data.labels.missing import missing_words, without_words
from brimful.data.readers.column_types import tidy
from brimful.data.readers.rows import Rows
from brimful.data.readers.sources import read_rows
from brimful.engine.evaluation.truth import read_truth
from brimful.tasks.label_rows import dense

_WAYS = "leave such rows out, or name the label that is meant by --label-map"


def labelled(*values: Any, **more: list[Any]) -> tuple[Rows, Columns]:
    columns = {"label": list(values), **more} if values else more
    table = tidy(pa.table(columns))
    return Rows(table=table, name="rows.csv", files=("rows.csv",), starts=(0,)), Columns(
        text="text", pair=None, labels=tuple(columns), reasons={}
    )


def detected(*values: Any, task: TaskChoice = "auto", **more: list[Any]) -> LabelSpace:
    return detect_labels(*labelled(*values, **more), task)


def targets_of(*given: Any) -> npt.NDArray[Any]:
    return dense(encode_labels(*given))


def encoded(*values: Any, task: TaskChoice = "auto", **more: list[Any]) -> list[Any]:
    rows, columns = labelled(*values, **more)
    targets = targets_of(rows, columns, detect_labels(rows, columns, task))
    return list(targets.tolist())


def detection_refused(*values: Any, task: TaskChoice = "auto", **more: list[Any]) -> DataError:
    rows, columns = labelled(*values, **more)
    with pytest.raises(DataError) as caught:
        detect_labels(rows, columns, task)
    assert "\n" not in str(caught.value)
    return caught.value


def encoding_refused(space: LabelSpace, *values: Any, **more: list[Any]) -> DataError:
    rows, columns = labelled(*values, **more)
    with pytest.raises(DataError) as caught:
        encode_labels(rows, columns, space)
    assert "\n" not in str(caught.value)
    return caught.value


def space(task: Any, *names: str) -> LabelSpace:
    values = {} if task == "regression" else {name: i for i, name in enumerate(names)}
    return LabelSpace(task=task, names=names, values=values)


# One label a row


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["pos", "neg", "pos"], ["neg", "pos"]),
        (["10", "9", "-1"], ["-1", "9", "10"]),
        ([10, 9, 2], ["2", "9", "10"]),
        ([2.0, 1.0, 2.0], ["1", "2"]),
        (["1.0", "0.0"], ["0", "1"]),
        (["1.0", "x"], ["1.0", "x"]),
        (["007", "7"], ["007", "7"]),
        ([True, False], ["false", "true"]),
        (["True", "False"], ["False", "True"]),
        (["Food; drinks", "Music", "Art"], ["Art", "Food; drinks", "Music"]),
        (["a|b", "c|d", "a|d", "c|b", "a|c"], ["a|b", "a|c", "a|d", "c|b", "c|d"]),
        (["[x]", "y"], ["[x]", "y"]),
        (["tab\there", "\x1b[31m"], ["\x1b[31m", "tab\there"]),
        (list(range(50)), [str(i) for i in range(50)]),
    ],
)
def test_single_label(values: list[Any], names: list[str]) -> None:
    seen = detected(*values)
    assert (seen.task, list(seen.names)) == ("single_label", names)
    assert dict(seen.values) == {name: index for index, name in enumerate(names)}
    assert sorted(set(encoded(*values))) == list(range(len(names)))


def test_single_label_targets() -> None:
    rows, columns = labelled("b", "a", "b")
    targets = targets_of(rows, columns, space("single_label", "a", "b"))
    assert (targets.tolist(), targets.dtype) == ([1, 0, 1], np.int64)
    chosen = encode_labels(rows, columns, space("single_label", "a", "b"), np.array([2, 1]))
    assert chosen.tolist() == [1, 0]


def test_numbers_are_one_label_however_they_are_written() -> None:
    known = detected(0, 1, 1)
    for values in ([1, 0], [1.0, 0.0], ["1", "0"], ["1.0", "0.0"], ["1.00", "0.0"]):
        assert targets_of(*labelled(*values), known).tolist() == [1, 0]
    truth = detected(True, False)
    assert targets_of(*labelled("true", "false"), truth).tolist() == [1, 0]


def test_names_of_outputs_may_differ_from_values_in_the_data() -> None:
    mapped = LabelSpace(task="single_label", names=("POSITIVE", "NEGATIVE"), values={"pos": 0, "neg": 1, "bad": 1})
    assert targets_of(*labelled("neg", "pos", "bad"), mapped).tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "values", [["a", "b", None], ["a", "b", ""], ["a", "b", "  "], [1, 2, None], ["1", "2", "nan"]]
)
def test_missing_label(values: list[Any]) -> None:
    seen = detected(*values)
    assert (seen.task, seen.num_outputs) == ("single_label", 2)
    error = encoding_refused(seen, *values)
    assert str(error) == "rows.csv, row 3: column 'label' has no label"
    assert (error.row, error.hint) == (3, "give it one; --missing-labels drop leaves such rows out")


def test_nan_is_a_missing_label() -> None:
    assert detected(1.0, 2.0, float("nan")).names == ("1", "2")
    assert encoding_refused(space("single_label", "1", "2"), 1.0, float("nan")).row == 2


def test_unknown_label() -> None:
    error = encoding_refused(space("single_label", "neg", "pos"), "pos", "neutral", "other")
    assert str(error) == "rows.csv, row 2: column 'label' has an unknown label: 'neutral'"
    assert (error.file, error.row, error.value) == ("rows.csv", 2, "neutral")
    assert error.hint == f"the labels are neg, pos; {_WAYS}"


def test_unknown_label_is_escaped_and_the_known_ones_are_not_all_listed() -> None:
    known = space("single_label", "\x1b[31m", *[f"label{i}" for i in range(30)])
    error = encoding_refused(known, "evil\x1b[2J\nline")
    assert "\x1b" not in str(error)
    assert "\x1b" not in (error.hint or "")
    assert (error.hint or "").startswith("the labels are \\x1b[31m, label0")
    assert (error.hint or "").endswith(f"label18 and 11 more; {_WAYS}")


def test_places_of_chosen_rows() -> None:
    rows, columns = labelled("a", "b", "x")
    with pytest.raises(DataError, match="row 3"):
        encode_labels(rows, columns, space("single_label", "a", "b"), np.array([1, 2]))


def test_one_class() -> None:
    error = detection_refused("pos", "pos")
    assert str(error) == "rows.csv: column 'label' has one class only: 'pos'"
    assert error.hint == "a classifier needs two or more: is --label-column the right one?"


def test_no_values() -> None:
    for values in (["", None], [None, None], [float("nan"), None]):
        assert str(detection_refused(*values)) == "rows.csv: column 'label' has no values"


def test_no_label_column() -> None:
    rows, _ = labelled("a")
    with pytest.raises(DataError, match="there is no label column"):
        detect_labels(rows, Columns(text="text", pair=None, labels=(), reasons={}))


def test_neither_a_class_nor_a_number() -> None:
    error = detection_refused(*[f"text {i}" for i in range(1001)], *["again"] * 100)
    assert "column 'label' looks like neither a class nor a number: 1,002 distinct values in 1,101 rows" in str(error)
    assert error.value == "text 0"
    many = [f"class {i % 1200}" for i in range(2400)]
    assert detected(*many).num_outputs == 1200


def test_as_many_classes_as_rows_where_the_task_is_given() -> None:
    error = detection_refused(*[f"text {i}" for i in range(1500)], *["again"] * 100)
    assert "--task single_label takes each as a class" in str(error.hint)
    assert detected(*[f"text {i}" for i in range(1500)], task="single_label").num_outputs == 1500


@pytest.mark.parametrize(
    ("values", "task", "said"),
    [
        ([i % 60 for i in range(600)], "single_label", "60 whole numbers, 0 to 59: taken as classes"),
        ([1 + i % 77 for i in range(600)], "single_label", "77 whole numbers, 1 to 77: taken as classes"),
        ([18 + i % 60 for i in range(600)], "regression", "60 whole numbers, 18 to 77: taken as amounts"),
        ([2 * (i % 60) for i in range(600)], "regression", "60 whole numbers, 0 to 118: taken as amounts"),
        (list(range(80)), "regression", "80 whole numbers, 0 to 79: taken as amounts"),
        ([str(i % 60) for i in range(600)], "single_label", "taken as classes"),
        ([i % 50 for i in range(600)], "single_label", None),
        ([i / 2 for i in range(600)], "regression", None),
        ([1, 5, 3, 4, 2, 1], "single_label", None),
        ([18 + i % 50 for i in range(600)], "single_label", "50 whole numbers, 18 to 67: taken as classes"),
        ([str(25 * (i % 9)) for i in range(600)], "single_label", "and they may be amounts"),
        ([-1, 0, 1, 4, 9] * 9, "single_label", None),
    ],
)
def test_many_whole_numbers_are_a_guess_that_is_said(values: list[Any], task: str, said: str | None) -> None:
    found, (rows, columns) = detected(*values), labelled(*values)
    assert found.task == task
    doubt = label_doubt(rows, columns, "auto", found)
    assert (doubt is None) == (said is None)
    if said is not None and doubt is not None:
        assert said in doubt
        assert f"--task {'regression' if task == 'single_label' else 'single_label'} takes them as" in doubt
    for asked in ("single_label", "regression"):
        settled = detected(*values, task=asked)
        assert settled.task == asked
        assert label_doubt(rows, columns, asked, settled) is None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (["a", "b"], "one label a row"),
        (["True", "False"], "one label a row"),
        ([True, False], "one label a row"),
        (["0", "1", "2"], "3 whole numbers"),
        ([0.5, 1.0], "numbers with fractions"),
        ([["a"], ["a", "b"]], "lists of labels"),
        (["a|b", "a", "b"], "texts that hold several labels"),
    ],
)
def test_a_task_has_its_reason(values: list[Any], reason: str) -> None:
    assert task_reason(*labelled(*values), detected(*values)) == reason


@pytest.mark.parametrize(("b", "reason"), [([0, 1], "columns of 0 and 1"), ([2, 1], "columns of numbers")])
def test_a_task_of_several_columns_has_its_reason(b: list[int], reason: str) -> None:
    columns = {"a": [0, 1], "b": b}
    assert task_reason(*labelled(**columns), detected(**columns)) == reason


def test_words_for_a_missing_label() -> None:
    """Classes, with a warning, until they are taken for missing."""
    rows, columns = labelled("a", "NA", "b", "nan", "a", "NA", "none")
    (doubt,) = label_doubts(rows, columns, detect_labels(rows, columns))
    assert doubt.startswith("the labels 'NA' (2 rows), 'nan' (1 row) are classes of their own; ")
    assert "--missing-labels drop" in doubt
    without = without_words(rows, columns, missing_words(rows, columns))
    assert without.table["label"].to_pylist() == ["a", None, "b", None, "a", None, "none"]
    assert missing_words(without, columns) == missing_words(*labelled(1, 2)) == missing_words(*labelled(["NA"])) == {}


def test_types_that_no_label_has() -> None:
    for values in ([{"a": 1}], [[[1]]]):
        assert "cannot be a label" in str(detection_refused(*values))


# Several labels a row


@pytest.mark.parametrize(
    ("values", "names", "targets"),
    [
        ([["x", "y"], [], ["y"]], ["x", "y"], [[1, 1], [0, 0], [0, 1]]),
        ([[3, 10], [10], []], ["3", "10"], [[1, 1], [0, 1], [0, 0]]),
        ([[1.0], [2.0, 1.0]], ["1", "2"], [[1, 0], [1, 1]]),
        ([[0, 1, 1], [0, 0, 0]], ["0", "1", "2"], [[0, 1, 1], [0, 0, 0]]),
        ([[True, False], [True, True]], ["0", "1"], [[1, 0], [1, 1]]),
        (['["x", "y"]', "[]", " ['y'] "], ["x", "y"], [[1, 1], [0, 0], [0, 1]]),
        (["[0, 1]", "[1, 1]"], ["0", "1"], [[0, 1], [1, 1]]),
        (["x|y", "x", "y|z", "z", ""], ["x", "y", "z"], [[1, 1, 0], [1, 0, 0], [0, 1, 1], [0, 0, 1], [0, 0, 0]]),
        (["x; y", "x", "y"], ["x", "y"], [[1, 1], [1, 0], [0, 1]]),
    ],
)
def test_multi_label(values: list[Any], names: list[str], targets: list[list[int]]) -> None:
    seen = detected(*values)
    assert (seen.task, list(seen.names)) == ("multi_label", names)
    assert encoded(*values) == targets
    assert targets_of(*labelled(*values), seen).dtype == np.uint8


def test_multi_label_when_asked_for() -> None:
    seen = detected("x,y", "z", task="multi_label")
    assert (seen.task, seen.names) == ("multi_label", ("x", "y", "z"))
    assert encoded("x,y", "z", task="multi_label") == [[1, 1, 0], [0, 0, 1]]
    assert encoded("x", "z", task="multi_label") == [[1, 0], [0, 1]]


def test_multi_label_of_texts_in_other_combinations() -> None:
    known = space("multi_label", "x", "y", "a|b")
    assert targets_of(*labelled("y|x"), known).tolist() == [[1, 1, 0]]
    assert targets_of(*labelled("a|b", "x"), known).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert targets_of(*labelled('["y"]'), known).tolist() == [[0, 1, 0]]


def test_multi_label_of_columns() -> None:
    seen = detected(toxic=[0, 1], rude=[1, 1], calm=["True", "False"])
    assert (seen.task, seen.names) == ("multi_label", ("toxic", "rude", "calm"))
    assert encoded(toxic=[0, 1], rude=[1, 1], calm=["True", "False"]) == [[0, 1, 1], [1, 1, 0]]


def test_columns_are_put_in_the_order_of_the_outputs() -> None:
    known = space("multi_label", "b", "a")
    assert targets_of(*labelled(a=[1, 0], b=[0, 0]), known).tolist() == [[0, 1], [0, 0]]


def test_chosen_rows_of_lists() -> None:
    rows, columns = labelled(["x"], ["x", "y"], ["y"])
    known = space("multi_label", "x", "y")
    assert targets_of(rows, columns, known, np.array([1, 2])).tolist() == [[1, 1], [0, 1]]
    rows, columns = labelled(["x"], ["x", "z"])
    with pytest.raises(DataError, match=r"row 2: column 'label' has an unknown label: 'z'"):
        encode_labels(rows, columns, known, np.array([1]))


def test_missing_and_unknown_labels_of_sets() -> None:
    known = space("multi_label", "x", "y")
    assert encoding_refused(known, ["x"], None).row == 2
    assert "has a list with an empty label" in str(encoding_refused(known, ["x"], ["y", None]))
    assert encoding_refused(known, "x|y", None).row == 2
    for values in ([["x"], ["y", "z"]], ["x", "y|z"], ['["x"]', '["y", "z"]']):
        error = encoding_refused(known, *values)
        assert (error.row, error.value, error.hint) == (2, "z", f"the labels are x, y; {_WAYS}")


def test_flags_that_are_none() -> None:
    known = space("multi_label", "a", "b")
    error = encoding_refused(known, a=[0, 1], b=[0, 2])
    assert str(error) == "rows.csv, row 2: column 'b' says whether the row has this label, by 0 or 1: '2'"
    assert "column 'b' holds no finite number" in str(encoding_refused(known, a=["0", "1"], b=["", "1"]))
    assert "holds more than 0 and 1, for no and yes" in str(detection_refused(a=[0, 1], b=[0, 2], task="multi_label"))


def test_lists_of_amounts() -> None:
    assert "holds lists of amounts" in str(detection_refused([0.5, 0.1], [0.2]))
    assert "has no label in any row" in str(detection_refused([], []))


def test_tasks_that_do_not_fit_the_columns() -> None:
    assert "holds lists, which are no regression" in str(detection_refused([1], [2], task="regression"))
    assert detection_refused(a=[0, 1], b=[0, 1], task="single_label").hint == "use --task multi_label"
    for known in (space("multi_label", "a", "c"), space("single_label", "a", "b"), space("regression", "a")):
        error = encoding_refused(known, a=[0, 1], b=[0, 1])
        assert str(error) == f"rows.csv: the label columns do not fit the {known.num_outputs} outputs: 'a, b'"
    assert "holds lists" in str(encoding_refused(space("single_label", "a", "b"), ["a"]))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["spam", "Spam", "SPAM ", "ham"],
            "case or spaces only are labels of their own: 'SPAM ' and 'Spam' and 'spam'",
        ),
        (["caf\u00e9", "cafe\u0301"], "in Unicode form only"),
        (["caf\u00e9", "CAFE\u0301", "a b", "ab"], "in Unicode form, case or spaces only"),
        (["1", "01", "2"], "in the form of a number only are labels of their own: '01' and '1'"),
        (["x", "1.50", "+1.5", "15e-1"], "in the form of a number only"),
        (["1e5", "1E5", "x"], "in spelling only"),
        (["9007199254740993.0", "9007199254740992", "1" * 40, "1" * 39 + "2", "x"], None),
        (["1e999999999", "1e999999998", "x"], None),
        (["1.2.3", "1.2.03", "-", "+", "."], None),
    ],
)
def test_one_label_in_several_spellings(names: list[str], said: str | None) -> None:
    rows, columns = labelled(*names)
    doubts = label_doubts(rows, columns, detect_labels(rows, columns, "single_label"))
    assert (said is None and not doubts) or (said is not None and said in doubts[0])


# Numbers


@pytest.mark.parametrize(
    "values",
    [[0.5, 1.5], ["0.5", "1", "-2e3"], list(range(51)), [str(i) for i in range(51)], ["0.5", "nan"], ["1.5", ""]],
)
def test_regression(values: list[Any]) -> None:
    seen = detected(*values)
    assert (seen.task, seen.names, dict(seen.values)) == ("regression", ("label",), {})


def test_regression_targets() -> None:
    rows, columns = labelled("0.5", " 1 ", "-2e3")
    targets = targets_of(rows, columns, space("regression", "label"))
    assert (targets.tolist(), targets.dtype, targets.shape) == ([0.5, 1, -2000], np.float32, (3,))
    assert encoded(3, 4, task="regression") == [3, 4]
    assert encoded(True, False, task="regression") == [1, 0]


def test_regression_of_columns() -> None:
    assert detected(joy=[0.5, 1], fear=[1, 0]).task == "regression"
    assert encoded(joy=[0.5, 1], fear=["1", "0.25"]) == [[0.5, 1], [1, 0.25]]
    assert encoded(joy=[0, 1], fear=[1, 0], task="regression") == [[0, 1], [1, 0]]


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf", "1e39", "", None])
def test_targets_that_are_not_finite(bad: str | None) -> None:
    number = float(bad) if bad else None
    for values in (["0.5", bad], [0.5, number]):
        error = encoding_refused(space("regression", "label"), *values)
        assert str(error).startswith("rows.csv, row 2: column 'label' holds no finite number")
        is_missing = bad in ("nan", "", None)
        hint = "; --missing-labels drop leaves such rows out" if is_missing else " or remove it"
        assert error.hint == f"give the row a number{hint}"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            ["0.5", "1.2", "n/a", "2"] * 9,
            "'n/a' (first in rows.csv, row 3): taken as 4 classes (single_label);"
            " --task regression, with --missing-labels drop, takes them as amounts",
        ),
        (
            ["0.5", "1.2", *["2"] * 9, "two"],
            "'two' (first in rows.csv, row 12): taken as 4 classes (single_label);"
            " --task regression, once each row has a number, takes them as amounts",
        ),
        ([*map(str, range(3, 70)), "?"], "'?' (first in rows.csv, row 68): taken as 68 classes"),
        (["1", "2", "3", "4", "5", "n/a"] * 9, None),
        (["1.0", "beta", "gamma", "2.5"] * 9, None),
        (["0.5", "1.2", None] * 9, None),
    ],
)
def test_one_cell_that_makes_classes_of_numbers_is_said(values: list[Any], said: str | None) -> None:
    found, (rows, columns) = detected(*values), labelled(*values)
    doubt = label_doubt(rows, columns, "auto", found)
    assert (doubt is None) == (said is None)
    if said is not None and doubt is not None:
        assert said in doubt
        assert label_doubt(rows, columns, "single_label", found) is None


def test_one_cell_among_many_numbers_is_named() -> None:
    numbers = [f"{i}.5" for i in range(1200)]
    error = detection_refused(*numbers, "n/a")
    assert str(error) == "rows.csv, row 1201: column 'label' holds numbers, and here none: 'n/a'"
    assert error.hint == "give the row a number, or leave such rows out: --task regression --missing-labels drop"
    error = detection_refused(*numbers, "n/a", task="regression")
    assert str(error) == "rows.csv, row 1201: column 'label' holds no number: 'n/a'"
    assert error.hint == "give the row a number; in training, --missing-labels drop leaves such rows out"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1e9 + 0.5, 1e9 + 10.5] * 9, "by up to 10, and their standard deviation is 5: subtract 1000000006 from all"),
        (["100000000.5", "100000010.5"], "by up to 2.5, and their standard deviation is 5: subtract 100000005.5 from"),
        ([2**24 + 1.5, None, 1.5], None),
        ([0.1, 0.2, 1e30], None),
        ([1e9 + 0.5] * 3, None),
        ([0.1, None] * 3, None),
    ],
)
def test_numbers_that_fp32_is_coarse_for(values: list[Any], said: str | None) -> None:
    """A warning where they are trained on, and where a model is evaluated on them."""
    rows, columns = labelled(*values)
    space = detect_labels(rows, columns, "regression")
    options = EvaluateOptions(model="model", data="rows.csv")
    truth = read_truth(rows, columns.labels, space, options, np.ones(rows.num_rows, np.bool_))
    doubts = label_doubts(rows, columns, space)
    assert doubts == list(truth.doubts)
    assert (doubts == []) == (said is None)
    assert said is None or said in doubts[0]


def test_targets_that_are_no_numbers() -> None:
    error = encoding_refused(space("regression", "label"), "1", "two", "3")
    assert str(error) == "rows.csv, row 2: column 'label' holds no number: 'two'"
    assert detection_refused("1", "two", task="regression").row == 2
    assert detection_refused(a=["1", "2"], b=["1", "two"]).row == 2
    assert "not numbers" in str(encoding_refused(space("regression", "label"), [1]))


# The whole way


def test_labels_of_every_format_meet(tmp_path: Path) -> None:
    records = [{"text": "a", "label": "1"}, {"text": "b", "label": "0"}]
    with (tmp_path / "rows.csv").open("w", newline="") as out:
        writer = csv.DictWriter(out, ["text", "label"])
        writer.writeheader()
        writer.writerows(records)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**r, "label": int(r["label"])}) + "\n" for r in records))
    columns = Columns(text="text", pair=None, labels=("label",), reasons={})
    from_csv, from_json = (read_rows(str(tmp_path / name)) for name in ("rows.csv", "rows.jsonl"))
    known = detect_labels(from_csv, columns)
    assert known == detect_labels(from_json, columns)
    assert targets_of(from_json, columns, known).tolist() == targets_of(from_csv, columns, known).tolist() == [1, 0]


#: Never a number, nor a list of them.
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=5).map("l".__add__)


@given(st.lists(names, min_size=2, max_size=30).filter(lambda values: len(set(values)) > 1))
def test_single_labels_come_back(values: list[str]) -> None:
    rows, columns = labelled(*values)
    known = detect_labels(rows, columns, "single_label")
    assert [known.names[target] for target in targets_of(rows, columns, known)] == values


@given(st.lists(st.lists(names, max_size=4, unique=True), min_size=1, max_size=20).filter(any))
def test_lists_of_labels_come_back(values: list[list[str]]) -> None:
    for written in (values, [json.dumps(each) for each in values], [json.dumps(e, ensure_ascii=False) for e in values]):
        rows, columns = labelled(*written)
        known = detect_labels(rows, columns, "multi_label")
        targets = targets_of(rows, columns, known)
        assert [{known.names[i] for i in np.flatnonzero(row)} for row in targets] == [set(each) for each in values]


def test_decimals_are_compared_as_floats() -> None:
    assert encoded(Decimal("1.00"), Decimal("2.00"), Decimal("1.00")) == [0, 1, 0]
    assert encoded(Decimal("0.25"), Decimal("2.50")) == [0.25, 2.5]
    assert encoded([Decimal(1), Decimal(0)], [Decimal(0), Decimal(1)]) == [[1, 0], [0, 1]]
