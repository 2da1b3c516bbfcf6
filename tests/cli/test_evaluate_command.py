"""`brimful evaluate` and `brimful.evaluate`: a model on labelled rows, and answers that were given before."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import transformers
from safetensors.torch import load_file, save_file
from sklearn.metrics import accuracy_score, f1_score, r2_score, roc_auc_score

import brimful as package
from brimful.core.callbacks import Callbacks
from brimful.core.errors import DataError, Interrupted, OptionError
from brimful.core.evaluation import Evaluation
from brimful.core.records import from_json, to_json
from brimful.step.forward import Forward
from commands import Brimful, Files
from tiny_files import review, save_classifier, write_csv

FAST = ("--precision", "fp32", "--verify", "0", "--num-workers", "0")
PYTHON: dict[str, Any] = {"precision": "fp32", "verify": 0, "num_workers": 0}
TEXTS = [review(bool(number % 3), number) for number in range(60)]


def labelled(path: Path, labels: list[Any], name: str = "label") -> Path:
    return write_csv(path, ("text", name), zip(TEXTS, labels, strict=False))


def values(record: Evaluation) -> dict[str, float | None]:
    return {name: metric.value for name, metric in record.metrics.items()}


def pipeline_scores(model: Path) -> list[dict[str, float]]:
    pipe = transformers.pipeline("text-classification", model=str(model), device="cpu", top_k=None)
    return [{answer["label"]: answer["score"] for answer in row} for row in pipe(TEXTS)]


def test_metrics_are_those_of_the_pipelines_answers(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = labelled(tmp_path / "rows.csv", ["good" if number % 3 else "bad" for number in range(60)])
    said = brimful("evaluate", files.classifier, data, *FAST, "--json", "-o", tmp_path / "answers.parquet")
    assert said.code == 0, said.err
    record = from_json(Evaluation, said.out)
    assert json.loads(to_json(record)) == json.loads(said.out)
    scores = pipeline_scores(files.classifier)
    truth = ["good" if number % 3 else "bad" for number in range(60)]
    given = [max(row, key=lambda name: row[name]) for row in scores]
    assert values(record)["accuracy"] == pytest.approx(accuracy_score(truth, given))
    assert values(record)["f1_macro"] == pytest.approx(f1_score(truth, given, average="macro"))
    area = roc_auc_score([label == "good" for label in truth], [row["good"] for row in scores])
    assert values(record)["auc_macro"] == pytest.approx(area, abs=1e-6)
    answers = pq.read_table(tmp_path / "answers.parquet").to_pylist()
    assert [row["row"] for row in answers] == list(range(1, 61))
    assert [(row["truth"], row["label"]) for row in answers] == list(zip(truth, given, strict=True))
    assert [row["score"] for row in answers] == pytest.approx([max(row.values()) for row in scores], abs=1e-5)
    assert (record.num_rows, record.left_out, record.predictions) == (60, {}, str(tmp_path / "answers.parquet"))


def test_a_streamed_model_gives_the_same_answers(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = labelled(tmp_path / "rows.csv", ["good" if number % 3 else "bad" for number in range(60)])
    found = []
    for kept in ("none", "host"):
        said = brimful("evaluate", files.classifier, data, *FAST, "--json", "--stream-weights", kept)
        assert said.code == 0, said.err
        found.append(from_json(Evaluation, said.out))
    assert values(found[1]) == pytest.approx(values(found[0]))
    assert [lever.value for lever in found[1].recipe.levers if lever.name == "streaming"] == ["host"]


def test_the_text_shows_metrics_intervals_and_what_stands_out(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = labelled(tmp_path / "rows.csv", ["good"] * 55 + ["bad"] * 5)
    said = brimful("evaluate", files.classifier, data, *FAST)
    assert said.code == 0, said.err
    for part in ("Evaluated  60 rows", "95 % interval", "always good", "balanced accuracy", "By label", "Intervals: "):
        assert part in said.out
    assert "always answering 'good'" in said.out or "every row is predicted to be" in said.out


def test_rows_that_are_cut_are_counted_on_the_terminal(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    """As a warning, and as a note where the length was asked for; both are in the record."""
    data = labelled(tmp_path / "rows.csv", ["good"] * 30 + ["bad"] * 30)
    asked = brimful("evaluate", files.classifier, data, *FAST, "--max-length", "4", "--json")
    cut = "60 (100.0 %) of 60 rows were longer than 4 tokens (as asked for), and were cut (--max-length)"
    assert f"  {cut}\n" in asked.err
    assert cut in from_json(Evaluation, asked.out).notes
    limit = json.loads((files.classifier / "config.json").read_text("utf-8"))["max_position_embeddings"]
    long = write_csv(tmp_path / "long.csv", ("text", "label"), [("good " * 2 * limit, "good"), ("good", "good")])
    said = brimful("evaluate", files.classifier, long, *FAST)
    assert f"warning: 1 (50.0 %) of 2 rows was longer than {limit} tokens (" in said.err
    assert "were cut" not in brimful("evaluate", files.classifier, data, *FAST).err


def test_so_many_rows_drawn_by_a_seed(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = labelled(tmp_path / "rows.csv", ["good" if number % 3 else "bad" for number in range(60)])
    whole, some = tmp_path / "whole.parquet", tmp_path / "some.parquet"
    assert brimful("evaluate", files.classifier, data, *FAST, "-o", whole).code == 0
    said = brimful("evaluate", files.classifier, data, *FAST, "-o", some, "--limit", 20, "--seed", 3)
    assert said.code == 0, said.err
    assert "20 of 60 rows are used, drawn at random (--limit)" in said.err
    assert "Evaluated  20 rows" in said.out
    rows = {row["row"]: row for row in pq.read_table(whole).to_pylist()}
    drawn = pq.read_table(some).to_pylist()
    assert len(drawn) == 20
    assert max(row["row"] for row in drawn) > 20
    for row in drawn:
        expected = rows[row["row"]]
        assert (row["truth"], row["label"]) == (expected["truth"], expected["label"])
        assert row["score"] == pytest.approx(expected["score"], abs=1e-6)
    with pytest.raises(OptionError, match="--limit is for rows that a model answers"):
        package.evaluate(some, limit=3)


def test_rows_that_cannot_count_are_left_out_and_counted(files: Files, tmp_path: Path) -> None:
    rows = [(TEXTS[0], "good"), ("", "good"), (TEXTS[1], ""), (TEXTS[2], "bad"), (TEXTS[3], "fine")]
    data = write_csv(tmp_path / "rows.csv", ("text", "label"), rows)
    with pytest.raises(DataError, match=r"1 label of the data is unknown to .*'fine' \(1 row\)") as failed:
        package.evaluate(files.classifier, data, **PYTHON)
    assert failed.value.hint is not None
    assert "--label-map fine=" in failed.value.hint
    assert "--unknown-labels drop" in failed.value.hint
    with pytest.warns(UserWarning, match="left out"):
        record = package.evaluate(files.classifier, data, unknown_labels="drop", **PYTHON)
    assert record.num_rows == 2
    assert record.left_out == {"without text": 1, "without a label": 1, "with a label unknown to the model": 1}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("spelled", "options", "said"),
    [
        (("bad", "good"), {}, None),
        (("Bad", "GOOD"), {}, "without regard to case"),
        (("0", "1"), {}, "numbers of the model's outputs: 0 is 'bad', 1 is 'good'"),
        (("LABEL_0", "LABEL_1"), {}, "numbers of the model's outputs"),
        (("neg", "pos"), {"label_map": "neg=bad,pos=good"}, None),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_labels_spelled_otherwise_are_matched_and_said(
    spelled: tuple[str, str], options: dict[str, Any], said: str | None, files: Files, tmp_path: Path
) -> None:
    plain = package.evaluate(
        files.classifier, labelled(tmp_path / "a.csv", ["good" if n % 3 else "bad" for n in range(60)]), **PYTHON
    )
    data = labelled(tmp_path / "b.csv", [spelled[1] if number % 3 else spelled[0] for number in range(60)])
    record = package.evaluate(files.classifier, data, **options, **PYTHON)
    assert values(record) == values(plain)
    assert record.labels.names == ("bad", "good")
    noted = [note for note in record.notes if "labels are" in note]
    assert (noted == []) if said is None else (said in noted[0])


def test_outputs_without_names_take_labels_in_order_with_a_warning(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "model", ["LABEL_0", "LABEL_1"])
    data = labelled(tmp_path / "rows.csv", ["yes" if number % 3 else "no" for number in range(60)])
    with pytest.warns(UserWarning, match="sorted order: no is LABEL_0, yes is LABEL_1; --label-map settles it"):
        package.evaluate(model, data, **PYTHON)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_several_labels_in_lists_and_in_columns(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "model", ["a", "b", "c"], problem_type="multi_label_classification")
    flags = (np.random.default_rng(0).random((60, 3)) < 0.4).astype(int)
    texts = ["|".join(np.array(["a", "b", "c"])[row == 1]) for row in flags]
    columns = write_csv(
        tmp_path / "columns.csv", ("text", "a", "b", "c"), ((t, *row) for t, row in zip(TEXTS, flags, strict=True))
    )
    rows = [{"text": t, "tags": each.split("|") if each else []} for t, each in zip(TEXTS, texts, strict=True)]
    lists = tmp_path / "lists.jsonl"
    lists.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    by_column = package.evaluate(model, columns, label_column="a,b,c", **PYTHON)
    by_list = package.evaluate(model, lists, label_column="tags", output=tmp_path / "answers.jsonl", **PYTHON)
    assert values(by_column) == values(by_list)
    given = np.array([[row[name] >= 0.5 for name in "abc"] for row in pipeline_sigmoid(model)])
    assert values(by_list)["f1_micro"] == pytest.approx(f1_score(flags, given, average="micro"))
    first = json.loads((tmp_path / "answers.jsonl").read_text("utf-8").splitlines()[0])
    assert first["truth"] == rows[0]["tags"]
    some = package.evaluate(model, columns, label_column="a,c", **PYTHON)
    assert some.labels.names == ("a", "c")
    assert [each.support for each in some.by_label] == [flags[:, 0].sum(), flags[:, 2].sum()]


def test_outputs_that_are_not_finite(brimful: Brimful, tmp_path: Path) -> None:
    """A warning where some rows have such, an error where all have, and no file of answers then."""
    model = save_classifier(tmp_path / "model", ["bad", "good"])
    data, weights = labelled(tmp_path / "rows.csv", ["good", "bad"] * 30), model / "model.safetensors"
    tensors = load_file(weights)
    word = json.loads((model / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]["superb"]
    with_word = sum("superb" in text.split() for text in TEXTS)
    tensors["bert.embeddings.word_embeddings.weight"][word] = float("nan")
    save_file(tensors, weights, {"format": "pt"})
    said = brimful("evaluate", model, data, *FAST)
    assert said.code == 0
    assert f"warning: {with_word} rows are left out: the model's outputs are not finite there" in said.err
    tensors["classifier.bias"][0] = float("nan")
    save_file(tensors, weights, {"format": "pt"})
    said = brimful("evaluate", model, data, *FAST, "-o", tmp_path / "answers.csv")
    assert said.code == 2
    assert "its outputs are not finite for any of 60 rows" in said.err
    assert not list(tmp_path.glob("*answers.csv*"))


def pipeline_sigmoid(model: Path) -> list[dict[str, float]]:
    pipe = transformers.pipeline("text-classification", model=str(model), device="cpu", top_k=None)
    rows = pipe(TEXTS, function_to_apply="sigmoid")
    return [{answer["label"]: answer["score"] for answer in row} for row in rows]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_numbers_and_pairs(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "model", ["similarity"], problem_type="regression")
    numbers = [round(float(x), 3) for x in np.random.default_rng(0).normal(200, 3, 60)]
    data = write_csv(
        tmp_path / "pairs.csv", ("sentence1", "sentence2", "score"), zip(TEXTS, TEXTS[::-1], numbers, strict=True)
    )
    record = package.evaluate(model, data, output=tmp_path / "answers.csv", **PYTHON)
    with (tmp_path / "answers.csv").open(encoding="utf-8", newline="") as file:
        answers = list(csv.DictReader(file))
    found = [float(row["score"]) for row in answers]
    pipe = transformers.pipeline("text-classification", model=str(model), device="cpu", function_to_apply="none")
    pairs = [{"text": a, "text_pair": b} for a, b in zip(TEXTS, TEXTS[::-1], strict=True)]
    assert found == pytest.approx([row["score"] for row in pipe(pairs)], abs=1e-4)
    assert values(record)["r2"] == pytest.approx(r2_score(numbers, found), rel=1e-4)
    assert "rescale the targets" in record.findings[0]


@pytest.mark.filterwarnings("ignore:.*(rows|targets|rescale)")
def test_columns_of_numbers_go_to_the_outputs_of_their_names(tmp_path: Path) -> None:
    """Without regard to case; where they have other names, in the order given, with a warning."""
    model = save_classifier(tmp_path / "model", ["Price", "Size"], problem_type="regression")
    numbers = np.random.default_rng(0).normal(size=(60, 2)).round(3)

    def by_output(*names: str) -> list[dict[str, float | None]]:
        rows = [(text, *row) for text, row in zip(TEXTS, numbers[:, :: -1 if names[0] == "size" else 1], strict=True)]
        data = write_csv(tmp_path / f"{names[0]}.csv", ("text", *names), rows)
        record = package.evaluate(model, data, label_column=",".join(names), **PYTHON)
        return [{name: metric.value for name, metric in each.metrics.items()} for each in record.by_label]

    plain = by_output("Price", "Size")
    assert by_output("size", "price") == plain
    with pytest.warns(UserWarning, match="in the order given: 'cost' is 'Price', 'Price' is 'Size'"):
        assert by_output("cost", "Price") == plain


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "more"), [("out.csv", ()), ("out.jsonl", ("--logits",)), ("shards", ("--logits",))])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_answers_that_were_given_before(
    name: str, more: tuple[str, ...], brimful: Brimful, files: Files, tmp_path: Path
) -> None:
    data = labelled(tmp_path / "rows.csv", ["good" if number % 3 else "bad" for number in range(60)])
    said = brimful("classify", files.classifier, data, "-o", tmp_path / name, "--precision", "fp32", *more)
    assert said.code == 0, said.err
    direct = package.evaluate(files.classifier, data, **PYTHON)
    later = package.evaluate(tmp_path / name)
    assert values(later) == pytest.approx(values(direct), rel=1e-4)
    assert later.model == str(files.classifier)


def test_a_models_answers_are_not_taken_for_true_labels(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data, answers = write_csv(tmp_path / "rows.csv", ("text",), [(text,) for text in TEXTS]), tmp_path / "answers.csv"
    assert brimful("classify", files.classifier, data, "-o", answers, *FAST).code == 0
    said = brimful("evaluate", files.classifier, answers, *FAST)
    assert said.code == 2
    assert "column 'label' holds the answers of a model, which `classify` added: no true labels" in said.err
    assert brimful("evaluate", files.classifier, answers, *FAST, "--label-column", "label").code == 0
    given = labelled(tmp_path / "true.csv", ["good", "bad"] * 30)
    assert brimful("classify", files.classifier, given, "-o", answers, *FAST, "--overwrite").code == 0
    assert brimful("evaluate", files.classifier, answers, *FAST).code == 0


def test_no_file_is_replaced_without_a_word(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data, page = labelled(tmp_path / "true.csv", ["good", "bad"] * 30), tmp_path / "mine.html"
    for mine in (tmp_path / "mine.csv", page):
        mine.write_text("keep me")
    said = brimful("evaluate", files.classifier, data, *FAST, "-o", tmp_path / "mine.csv")
    assert (said.code, "mine.csv is there already" in said.err, "add --overwrite" in said.err) == (2, True, True)
    said = brimful("evaluate", files.classifier, data, *FAST, "--report", page)
    assert (said.code, "mine.html is there already, and is no page of brimful" in said.err) == (2, True)
    assert (tmp_path / "mine.csv").read_text() == page.read_text() == "keep me"
    page.unlink()
    for _ in range(2):  # a page of ours is
        words = ("-o", tmp_path / "mine.csv", "--overwrite", "--report", page)
        assert brimful("evaluate", files.classifier, data, *FAST, *words).code == 0
    assert (tmp_path / "mine.csv").read_text().startswith('"row"')


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("between", ["|", ","])
def test_several_labels_in_one_text_beside_answers(between: str, tmp_path: Path) -> None:
    """Without the record of the classification, the labels are those of the file: none has the separator in it."""
    rows = [("a", ["a"]), (f"a{between}c", ["a", "c"]), (f"b{between}c", ["c"]), ("b", ["b"]), ("b", [])]
    data = write_csv(tmp_path / "rows.csv", ("gold", "guess"), ((gold, json.dumps(guess)) for gold, guess in rows))
    record = package.evaluate(data, label_column="gold", prediction_column="guess")
    assert record.labels.names == ("a", "b", "c")
    assert (record.num_rows, values(record)["label_accuracy"]) == (5, pytest.approx(13 / 15))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_answers_of_anybody_with_their_columns_named(tmp_path: Path) -> None:
    rows = [("x", "x", 0.9), ("y", "x", 0.6), ("z", "z", 0.7), ("y", "y", 0.5), ("x", "", "")]
    data = write_csv(tmp_path / "rows.csv", ("gold", "guess", "sure"), rows)
    record = package.evaluate(data, label_column="gold", prediction_column="guess", score_column="sure")
    assert (record.num_rows, values(record)["accuracy"]) == (4, 0.75)
    assert record.left_out == {"without an answer": 1}
    assert values(record).get("auc_macro") is None
    assert any("--logits" in note for note in record.notes)
    with pytest.raises(DataError, match="no column with the true labels"):
        package.evaluate(write_csv(tmp_path / "b.csv", ("label", "score"), [("x", 0.5)]))
    with pytest.raises(DataError, match="holds no answers"):
        package.evaluate(write_csv(tmp_path / "c.csv", ("text", "topic"), [("a", "x"), ("b", "y")]))


def test_a_model_alone_and_wrong_options_are_one_line(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    alone = brimful("evaluate", files.classifier)
    assert (alone.code, alone.out) == (2, "")
    assert "is evaluated on rows, and none are given" in alone.err
    for words, part in (
        (("--prediction-column", "x"), "for answers that were given before"),
        (("-o", tmp_path / "x.html"), "is no name of a file of rows"),
        (("--label-column", "nothing"), "there is no such column"),
    ):
        said = brimful("evaluate", files.classifier, files.reviews, *words)
        assert said.code == 2
        assert part in said.err
    with pytest.raises(OptionError, match="labels go with a list of texts"):
        package.evaluate(files.classifier, files.reviews, labels="a,b")


class _Stopping(Callbacks):
    """Keeps stages, and sends Ctrl-C to this process with the first rows that are done, if it `counts`."""

    def __init__(self, *, counts: bool) -> None:
        self.stages: list[str] = []
        self._counts = counts

    def count(self, done: int, total: int | None, share: float | None = None) -> None:
        if self._counts:
            self._counts = False
            os.kill(os.getpid(), signal.SIGINT)

    def stage(self, text: str) -> None:
        self.stages.append(text)


@pytest.mark.parametrize(("window_bytes", "done"), [(1 << 20, {60}), (64, set(range(1, 60)))])
def test_ctrl_c_is_answered_in_every_window(
    window_bytes: int, done: set[int], files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last one, too, and a model's windows on a CPU are a few seconds' work."""
    monkeypatch.setattr("brimful.engine.classification.windows._FEWEST_BYTES", window_bytes)
    monkeypatch.setattr("brimful.engine.classification.windows._CPU_OPERATIONS", 1.0)
    data, callbacks = labelled(tmp_path / "rows.csv", ["good"] * 60), _Stopping(counts=True)
    with pytest.raises(Interrupted) as stopped:
        package.evaluate(files.classifier, data, device="cpu", callbacks=callbacks, **PYTHON)
    assert stopped.value.exit_code == 130
    assert int(str(stopped.value).split()[2]) in done
    assert callbacks.stages[-1] == "stopping"


def test_ctrl_c_leaves_the_window_that_is_computed(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callbacks, passes, run = _Stopping(counts=False), [], Forward._logits_SC

    def told_to_stop(forward: Forward, inputs: Any) -> Any:
        if callbacks.stages[-1] == "evaluating":
            passes.append(signal.raise_signal(signal.SIGINT))
        return run(forward, inputs)

    monkeypatch.setattr(Forward, "_logits_SC", told_to_stop)
    data, few = labelled(tmp_path / "rows.csv", ["good"] * 60), {"token_budget": 64, "device": "cpu"}
    with pytest.raises(Interrupted, match="stopped after 0 of 60 rows"):
        package.evaluate(files.classifier, data, callbacks=callbacks, **few, **PYTHON)
    assert len(passes) == 1
