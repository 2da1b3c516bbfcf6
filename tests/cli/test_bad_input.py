"""Mistakes of a user: each is one line that says what and where, one with a hint, exit code 2, and nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from commands import Brimful, Files, train_words
from tiny_files import review, write_csv, write_reviews

_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


@dataclass(frozen=True, kw_only=True)
class OutputPath:
    """The place of one mistake: a folder of its own, and the session's files."""

    folder: Path
    files: Files

    def file(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def model(self, name: str = "model") -> Path:
        """A copy of the classifier, to be broken."""
        return Path(shutil.copytree(self.files.classifier, self.folder / name))

    def reviews(self, **changes: list[object]) -> Path:
        """A CSV of reviews, columns of which are replaced or added."""
        columns: dict[str, list[object]] = {
            "text": [review(bool(i % 2), i) for i in range(24)],
            "label": [("bad", "good")[i % 2] for i in range(24)],
        }
        columns |= changes
        return write_csv(self.folder / "changed.csv", list(columns), zip(*columns.values(), strict=True))


Words = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """words: what is added to a good command. data, model: what stands in place of the good ones.

    said, hint: what the two lines must have in them.
    """

    name: str
    said: tuple[str, ...]
    hint: str
    data: Callable[[OutputPath], object] = lambda place: place.files.reviews
    model: Callable[[OutputPath], object] = lambda place: place.files.base
    words: Callable[[OutputPath], Words] = lambda place: ()


def more(*words: object) -> Callable[[OutputPath], Words]:
    return lambda place: words


def broken_model(change: Callable[[Path], object]) -> Callable[[OutputPath], object]:
    def make(place: OutputPath) -> Path:
        folder = place.model()
        change(folder)
        return folder

    return make


def edited(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def as_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(2)}, folder / "pytorch_model.bin")


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def corrupt(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:8] + b"\xff" * 50 + path.read_bytes()[58:])


def another_run(place: OutputPath) -> Words:
    folder = place.folder / "taken"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    return ("--output", folder)


def foreign_folder(place: OutputPath) -> Words:
    folder = place.folder / "taken"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    return ("--output", folder)


def unknown_in_eval(place: OutputPath) -> Words:
    return ("--eval-data", write_reviews(place.folder / "eval.csv", 8, labels=("bad", "excellent")))


def eval_without_label(place: OutputPath) -> Words:
    return ("--eval-data", write_csv(place.folder / "eval.csv", ["text"], [["the film"]]))


MISTAKES = [
    # Rows and columns
    Mistake(
        name="no such file", data=lambda p: p.folder / "reveiws.csv", said=("no such file", "reveiws.csv"), hint="name"
    ),
    Mistake(
        name="a name misspelt",
        data=lambda p: p.files.reviews.with_name("review.csv"),
        said=("no such file",),
        hint="did you mean",
    ),
    Mistake(
        name="column misspelt",
        words=more("--text-column", "txt"),
        said=("reviews.csv", "--text-column", "no such column", "'txt'"),
        hint="did you mean 'text'? columns: text, label",
    ),
    Mistake(
        name="label column that is not there",
        words=more("--label-column", "stars"),
        said=("reviews.csv", "--label-column", "no such column", "'stars'"),
        hint="columns: text, label",
    ),
    Mistake(
        name="text column of numbers",
        data=lambda p: p.file("n.jsonl", '{"t": 1, "label": "a"}\n{"t": 2, "label": "b"}\n'),
        words=more("--text-column", "t"),
        said=("n.jsonl", "--text-column t", "not text"),
        hint="columns: t, label",
    ),
    Mistake(
        name="no text column",
        data=lambda p: p.file("n.jsonl", '{"x": 1, "label": 0}\n{"x": 2, "label": 1}\n'),
        said=("n.jsonl", "no column holds text"),
        hint="--text-column",
    ),
    Mistake(
        name="no label column",
        data=lambda p: write_csv(p.folder / "t.csv", ["text"], [["one film"], ["two films"]]),
        said=("t.csv", "no column can be the label"),
        hint="--label-column",
    ),
    Mistake(
        name="unknown label in the evaluation",
        words=unknown_in_eval,
        said=("eval.csv", "row 2", "unknown label", "'excellent'"),
        hint="the labels are bad, good",
    ),
    Mistake(
        name="evaluation without labels",
        words=eval_without_label,
        said=("eval.csv", "has no labels, so nothing can be evaluated on it", "'label'"),
        hint="without --eval-data",
    ),
    Mistake(
        name="one class only",
        data=lambda p: p.reviews(label=["good"] * 24),
        said=("changed.csv", "'label' has one class only", "'good'"),
        hint="two or more",
    ),
    Mistake(
        name="label that is neither class nor number",
        data=lambda p: write_csv(
            p.folder / "l.csv", ["text", "label"], [[f"film {i}", f"opinion {i}"] for i in range(1200)]
        ),
        said=("l.csv", "'label'", "neither a class nor a number", "1,200 distinct values"),
        hint="--label-column",
    ),
    Mistake(
        name="a row without a label",
        data=lambda p: p.reviews(label=["good", "bad", ""] * 8),
        said=("changed.csv", "row 3", "'label' has no label"),
        hint="--missing-labels drop",
    ),
    Mistake(
        name="NaN among regression targets",
        data=lambda p: p.reviews(label=[0.5, 1.5, "nan", 2.5] * 6),
        said=("changed.csv", "row 3", "'label' holds no finite number", "'nan'"),
        hint="give the row a number",
    ),
    Mistake(
        name="words among regression targets",
        data=lambda p: p.reviews(label=[0.5, 1.5, "two", 2.5] * 6),
        words=more("--task", "regression"),
        said=("changed.csv", "row 3", "holds no number", "'two'"),
        hint="--label-column",
    ),
    Mistake(
        name="too few rows to hold out",
        data=lambda p: write_reviews(p.folder / "few.csv", 2),
        said=("few.csv", "too few to hold out"),
        hint="--eval-split 0",
    ),
    Mistake(
        name="rows without any text",
        data=lambda p: p.reviews(text=[" "] * 24, label=["a", "b"] * 12),
        words=more("--text-column", "text"),
        said=("changed.csv", "'text' has no text in any of 24 rows"),
        hint="--text-column",
    ),
    # Files
    Mistake(name="empty file", data=lambda p: p.file("e.csv", ""), said=("e.csv", "is empty"), hint="rows"),
    Mistake(
        name="only a header",
        data=lambda p: p.file("h.csv", "text,label\n"),
        said=("h.csv", "header and no rows"),
        hint="rows",
    ),
    Mistake(
        name="not UTF-8",
        data=lambda p: p.file("u.csv", b"text,label\ngood,a\ncaf\xe9,b\n"),
        words=more("--encoding", "utf-8"),
        said=("u.csv", "row 2", "not UTF-8", "caf\\xe9"),
        hint="--encoding windows-1252",
    ),
    Mistake(
        name="binary file",
        data=lambda p: p.file("b.csv", b"\x7fELF\x00\x00\x01text,label"),
        said=("b.csv", "not text", "NUL byte"),
        hint="name",
    ),
    Mistake(
        name="workbook",
        data=lambda p: p.file("x.csv", b"PK\x03\x04rest"),
        said=("x.csv", "Excel"),
        hint="let its name end in .xlsx",
    ),
    Mistake(
        name="unknown kind of file", data=lambda p: p.file("x.docx", b"PK\x03\x04rest"), said=("x.docx",), hint="CSV"
    ),
    Mistake(
        name="broken JSON line",
        data=lambda p: p.file("j.jsonl", '{"text": "a", "label": 0}\n{"text": "b", \n'),
        said=("j.jsonl", "row 2", "not JSON", '{"text": "b",'),
        hint='each line is one JSON object, as in {"text": "..."}',
    ),
    Mistake(
        name="broken JSON",
        data=lambda p: p.file("j.json", '[{"text": "a", "label": 0},'),
        said=("j.json", "not JSON"),
        hint="array",
    ),
    Mistake(
        name="JSON nested beyond measure",
        data=lambda p: p.file("j.json", "[" * 100_000),
        said=("j.json", "nested too deeply"),
        hint="array",
    ),
    Mistake(
        name="ragged CSV",
        data=lambda p: p.file("r.csv", "text,label\na,0\nb,1\nc,d,1\n"),
        said=("r.csv", "row 3", "3 columns, the header has 2", "'c,d,1'"),
        hint="quotation marks",
    ),
    Mistake(
        name="column twice",
        data=lambda p: p.file("c.csv", "text,text,label\na,b,0\n"),
        said=("c.csv", "column twice", "'text'"),
        hint="rename",
    ),
    Mistake(
        name="LFS pointer for data",
        data=lambda p: p.file("p.csv", _POINTER),
        said=("p.csv", "git-lfs pointer"),
        hint="git lfs pull",
    ),
    Mistake(
        name="damaged Parquet",
        data=lambda p: p.file("d.parquet", b"PAR1 and then nothing"),
        said=("d.parquet", "no whole parquet"),
        hint="again",
    ),
    Mistake(
        name="no header of JSON",
        data=lambda p: p.file("j.jsonl", '{"text": "a", "label": 0}\n'),
        words=more("--no-header"),
        said=("--no-header is for CSV, TSV and Excel files",),
        hint="leave it out",
    ),
    Mistake(
        name="too many names",
        words=more("--column-names", "text,label,source"),
        said=("reviews.csv", "row 1", "--column-names has 3 names", "2 columns"),
        hint="delimiter ','",
    ),
    Mistake(name="empty folder", data=lambda p: p.folder, said=("holds no data",), hint="CSV"),
    # Models
    Mistake(name="no such model", model=lambda p: p.folder / "modle", said=("no folder", "modle"), hint="folder"),
    Mistake(
        name="no such model on the hub", model=lambda p: "nobody/nothing", said=("nobody/nothing",), hint="network"
    ),
    Mistake(name="folder that is no model", model=lambda p: p.folder, said=("no config.json",), hint="config.json"),
    Mistake(
        name="no tokenizer", model=broken_model(without_tokenizer), said=("no tokenizer files",), hint="tokenizer.json"
    ),
    Mistake(name="truncated weights", model=broken_model(cut), said=("model.safetensors is truncated",), hint="again"),
    Mistake(name="corrupt weights", model=broken_model(corrupt), said=("model.safetensors is corrupt",), hint="again"),
    Mistake(
        name="LFS pointer for weights",
        model=broken_model(lambda f: (f / "model.safetensors").write_text(_POINTER)),
        said=("model.safetensors is a git-lfs pointer",),
        hint="git lfs pull",
    ),
    Mistake(
        name="no weights",
        model=broken_model(lambda f: (f / "model.safetensors").unlink()),
        said=("no weights",),
        hint="again",
    ),
    Mistake(
        name="pickled weights",
        model=broken_model(as_pickle),
        said=("pickle", "pytorch_model.bin"),
        hint="--allow-pickle",
    ),
    Mistake(
        name="remote code",
        model=broken_model(
            lambda f: edited(
                f,
                model_type="zen",
                auto_map={"AutoConfig": "zen.Config", "AutoModelForSequenceClassification": "zen.Model"},
            )
        ),
        said=("Python code that comes with",),
        hint="--trust-remote-code",
    ),
    Mistake(
        name="unknown model type",
        model=broken_model(lambda f: edited(f, model_type="bret")),
        said=("'bret'",),
        hint="bert",
    ),
    Mistake(
        name="no config",
        model=broken_model(lambda f: (f / "config.json").write_text("{")),
        said=("config.json is not JSON",),
        hint="again",
    ),
    Mistake(
        name="labels of another head",
        data=lambda p: p.reviews(label=["yes", "no"] * 12),
        model=lambda p: p.files.classifier,
        said=("labels of the data are not those of", "'no', 'yes' against 'bad', 'good'"),
        hint="--new-head",
    ),
    Mistake(
        name="label map to nowhere",
        model=lambda p: p.files.classifier,
        words=more("--label-map", "bad=worse,good=good"),
        said=("--label-map", "'worse'", "no label of the model"),
        hint="'bad', 'good'",
    ),
    # Options
    Mistake(
        name="longer than the positions",
        words=more("--max-length", 81),
        said=("--max-length is 81", "80 tokens"),
        hint="at most 80",
    ),
    Mistake(
        name="no room for text",
        words=more("--max-length", 2),
        said=("--max-length is 2", "special tokens"),
        hint="use at least",
    ),
    Mistake(name="batch of zero", words=more("--batch-size", 0), said=("--batch-size is 0",), hint="32"),
    Mistake(name="batch below zero", words=more("--batch-size", -3), said=("--batch-size is -3",), hint="32"),
    Mistake(
        name="batch that is no number",
        words=more("--batch-size", "many"),
        said=("--batch-size is 'many'", "whole number"),
        hint="8",
    ),
    Mistake(
        name="no epochs", words=more("--num-train-epochs", 0), said=("--num-train-epochs is 0",), hint="leave it out"
    ),
    Mistake(
        name="epochs without end",
        words=more("--num-train-epochs", 1e12),
        said=("--num-train-epochs", "steps"),
        hint="lower",
    ),
    Mistake(
        name="rate that is no number",
        words=more("--learning-rate", "nan"),
        said=("--learning-rate is nan",),
        hint="leave it out",
    ),
    Mistake(name="seed beyond 64 bits", words=more("--seed", 10**30), said=("--seed",), hint="42"),
    Mistake(
        name="unknown metric", words=more("--metric-for-best-model", "f1"), said=("'f1'", "no metric"), hint="f1_macro"
    ),
    Mistake(
        name="unknown class in weights", words=more("--class-weights", "ugly=3"), said=("'ugly=3'",), hint="bad, good"
    ),
    Mistake(
        name="no transform",
        words=more("--transform", "nowhere.py:noisy"),
        said=("nowhere.py:noisy",),
        hint="file.py:function",
    ),
    Mistake(name="unknown option", words=more("--learning-rte", 1), said=("--learning-rte",), hint="--learning-rate"),
    Mistake(name="unknown choice", words=more("--precision", "fp4"), said=("--precision is 'fp4'",), hint="auto"),
    # Output and device
    Mistake(name="folder of another run", words=another_run, said=("taken", "already holds a run"), hint="--resume"),
    Mistake(name="folder of something else", words=foreign_folder, said=("taken", "thesis.tex"), hint="new folder"),
    Mistake(
        name="output is a file", words=lambda p: ("--output", p.file("out", "")), said=("out is a file",), hint="folder"
    ),
    Mistake(
        name="full disk",
        words=more("--save-total-limit", 10**10),
        said=("needs about", "free"),
        hint="--save-total-limit",
    ),
    Mistake(
        name="a tracker that there is not",
        words=more("--report-to", "tensorboard,wanb"),
        said=("--report-to", "no tracker 'wanb'"),
        hint="wandb",
    ),
    Mistake(
        name="tensorboard in a taken folder",
        words=lambda p: (*foreign_folder(p), "--report-to", "tensorboard"),
        said=("thesis.tex",),
        hint="new folder",
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "-"))
def test_a_mistake_is_two_lines_and_changes_nothing(
    mistake: Mistake, brimful: Brimful, files: Files, tmp_path: Path
) -> None:
    place = OutputPath(folder=tmp_path, files=files)
    words = train_words(mistake.data(place), mistake.model(place), tmp_path / "run", *mistake.words(place))
    before = sorted(tmp_path.rglob("*"))

    said = brimful(*words)

    assert said.code == 2
    assert said.out == ""
    assert_one_error(said.err, mistake.said, mistake.hint)
    assert sorted(tmp_path.rglob("*")) == before


def assert_one_error(err: str, words: tuple[str, ...], hint: str) -> None:
    """Check that stderr ends in one error and one hint with these words in them, and has no other, and no traceback."""
    *talk, error, last = err.splitlines()
    assert error.startswith("error: ")
    assert last.startswith("hint: ")
    for word in words:
        assert word in error
    assert hint in last
    assert not any(line.startswith(("error:", "hint:", "Traceback")) for line in talk)
    assert err.isprintable() or set(err) - set("\n") == {c for c in err if c.isprintable()}
