"""Mistakes that are answered with what was meant, and labels that hold commas."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

import brimful as package
from brimful.core.errors import OptionError, did_you_mean
from brimful.reports.bars import Bar, bar_chart
from brimful.reports.terminal import _short_list
from commands import Brimful, Files, train_words
from tiny_files import review, save_classifier, write_csv


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--lr", "--learning-rate"),
        ("--epochs", "--num-train-epochs"),
        ("--fp16", "--precision fp16"),
        ("--tf32", "--precision tf32"),
        ("--torch-compile", "--execution compiled"),
        ("--max-lenght", "--max-length"),
        ("--sep", "--delimiter"),
    ],
)
def test_names_from_elsewhere(brimful: Brimful, given: str, meant: str) -> None:
    assert f"hint: did you mean {meant}?" in brimful("train", "data.csv", given, 3).err


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("--auto_find_batch_size", "micro-batches get smaller by themselves"),
        ("--dataloader-num-workers", "batches are made ahead of the step"),
        ("--group-by-length", "sequences are packed"),
        ("--per-device-eval-batch-size", "evaluation counts tokens"),
        ("--torch-empty-cache-steps", "is given back"),
        ("--use-liger-kernel", "fused kernels"),
    ],
)
def test_settings_of_transformers_that_are_always_so(brimful: Brimful, given: str, why: str) -> None:
    said = brimful("train", "data.csv", given, 3).err
    assert "hint: leave it out: " in said
    assert why in said


def test_names_from_elsewhere_in_python_and_files(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        package.train(files.reviews, model=files.base, output=tmp_path / "run", epochs=2)
    assert caught.value.hint == "did you mean num_train_epochs?"
    with pytest.raises(OptionError) as caught:
        package.train(files.reviews, model=files.base, output=tmp_path / "run", bf16=True)
    assert caught.value.hint == 'did you mean precision="bf16"?'
    (tmp_path / "run.toml").write_text("nested = 1\n")
    said = brimful("train", files.reviews, "--config", tmp_path / "run.toml").err
    assert "unknown key 'nested'" in said
    assert "did you mean" not in said
    assert did_you_mean("zzz", ["seed"]) is None


def test_rows_of_a_device_are_not_those_of_a_step() -> None:
    """A command that has both options is meant to tell them apart; others have the rows of a step alone."""
    given = "per_device_train_batch_size"
    assert did_you_mean(given, ["batch_size", "per_device_batch_size"]) == "did you mean per_device_batch_size?"
    assert did_you_mean(given, ["--batch-size"]) == "did you mean --batch-size?"


def test_numbers_that_make_sense(brimful: Brimful) -> None:
    words = ("train", "data.csv", "--model", "m", "--output", "o")
    assert "hint: as in --max-length 256" in brimful(*words, "--max-length", "abc").err
    assert "hint: as in --learning-rate 2e-5" in brimful(*words, "--learning-rate", "fast").err
    assert "hint: as in --max-length 256" in brimful(*words, "--max-length").err


def test_checkpointing_as_a_switch(brimful: Brimful) -> None:
    words = ("train", "data.csv", "--model", "m", "--output", "o", "--gradient-checkpointing")
    assert "hint: as in --gradient-checkpointing full" in brimful(*words).err
    assert "hint: full is transformers' gradient_checkpointing=true" in brimful(*words, "true").err
    for given, meant in ((True, "full"), (False, "none")):
        with pytest.raises(OptionError) as caught:
            package.train("data.csv", model="m", output="o", gradient_checkpointing=given)
        assert caught.value.hint == f"{meant} is transformers' gradient_checkpointing={given}"


def test_an_optimizer_of_transformers_alone(brimful: Brimful) -> None:
    said = brimful("train", "data.csv", "--model", "m", "--output", "o", "--optim", "galore_adamw_8bit").err
    assert "hint: it is in transformers alone; adafactor, adamw_8bit and --peft lora save memory, too" in said


def test_labels_with_commas(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    rows = [(review(bool(i % 2), i), ("sports, games", "other")[i % 2]) for i in range(24)]
    data = write_csv(tmp_path / "rows.csv", ("text", "label"), rows)
    for text in ("sports, games=3", '"sports, games"=3,other=1', '{"sports, games": 3}'):
        assert brimful(*train_words(data, files.base, tmp_path / "run", "--dry-run", "--class-weights", text)).code == 0
    said = brimful(*train_words(data, files.base, tmp_path / "run", "--dry-run", "--class-weights", "sport=3,other=1"))
    assert "'sport=3,other=1' is not a label of the data with a number" in said.err
    nli = save_classifier(tmp_path / "nli", ["contradiction", "entailment"])
    said = brimful("classify", nli, files.reviews, "--labels", '"sports, games",other', "--verify", 0)
    assert {json.loads(line)["predicted_label"] for line in said.out.splitlines()} <= {"sports, games", "other"}
    frame = package.classify(nli, files.reviews, frame="list", labels=["sports, games", "other"], verify=0)
    assert {row["predicted_label"] for row in frame} <= {"sports, games", "other"}


def test_plain_text_on_stdin(brimful: Brimful, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a good film\nanother one\n")))
    said = brimful("classify", files.classifier, "-")
    assert said.code == 2
    assert 'each line is one JSON object, as in {"text": "..."}; of plain lines make it by jq' in said.err


def test_what_is_said_of_the_optimizer_and_of_sizes(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    words = train_words(files.reviews, files.base, tmp_path / "run", "--dry-run")
    assert "the default; torch's fused kernels" in brimful(*words).err
    assert "asked for; torch's fused kernels" in brimful(*words, "--optim", "sgd").err
    assert _short_list("112, 704, 752, 1024") == "112 to 1024, 4 sizes"
    assert _short_list("1792, 2048") == "1792, 2048"


def test_bars_with_long_names_are_told_apart() -> None:
    names = ["COMPUTERS AND TECHNOLOGY: HARDWARE", "COMPUTERS AND TECHNOLOGY: SOFTWARE", "short"]
    chart = str(bar_chart("k", [Bar(name=name, value=1.0, said="1") for name in names], alt="a"))
    assert "HARDWARE" in chart
    assert "SOFTWARE" in chart
    assert min(float(x) for x in _starts(chart)) >= 0


def _starts(chart: str) -> list[float]:
    """Left ends of the names in a chart, by the width that a wide font gives them."""
    from xml.etree import ElementTree

    texts = [each for each in ElementTree.fromstring(chart).iter() if each.tag.endswith("text")]
    found = []
    for each in texts:
        style = each.get("style", "") + (each.get("text-anchor") or "")
        if "end" in style and (each.text or "").strip():
            at = each.get("x") or (each.get("transform") or "translate(0").split("(")[1].split()[0].split(",")[0]
            found.append(float(at) - 8.2 * len(each.text or ""))
    return found
