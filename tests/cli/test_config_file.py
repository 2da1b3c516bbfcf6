"""--config: a TOML or YAML file says what flags say, and flags override it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from brimful.cli.flags import parse_options
from brimful.core.errors import OptionError
from brimful.core.options.train import TrainOptions

WORDS = ["d.csv", "--model", "m", "--output", "o"]


def options(**changes: Any) -> TrainOptions:
    return TrainOptions(**{"data": "d.csv", "model": "m", "output": "o", **changes})


def put(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


TOML = 'batch_size = 16\nlearning-rate = 2e-5\nnew_head = true\nprecision = "fp32"\nnum_train_epochs = 2\n'
YAML = "batch_size: 16\nlearning-rate: 2e-5\nnew_head: true\nprecision: fp32\nnum_train_epochs: 2\nmax_steps: null\n"


@pytest.mark.parametrize(("name", "text"), [("c.toml", TOML), ("c.yaml", YAML), ("c.yml", YAML), ("c.TOML", TOML)])
def test_a_file_says_what_flags_say(name: str, text: str, tmp_path: Path) -> None:
    expected = options(batch_size=16, learning_rate=2e-5, new_head=True, precision="fp32", num_train_epochs=2.0)
    file = put(tmp_path, name, text)
    assert parse_options("train", [*WORDS, "--config", file]) == expected
    assert parse_options("train", ["--config=" + file, *WORDS]) == expected
    flags = ["--batch-size", "16", "--learning_rate=2e-5", "--new-head", "--precision", "fp32", "--num_train_epochs=2"]
    assert parse_options("train", [*WORDS, *flags]) == expected


def test_flags_override_the_file_wherever_they_stand(tmp_path: Path) -> None:
    file = put(tmp_path, "c.toml", "batch_size = 16\nnew_head = true\nseed = 7\n")
    for words in (
        ["--config", file, "--batch-size", "4", "--no-new-head"],
        ["--batch_size=4", "--no_new_head", "--config", file],
    ):
        assert parse_options("train", [*WORDS, *words]) == options(batch_size=4, seed=7)


def test_the_file_may_say_everything(tmp_path: Path) -> None:
    file = put(tmp_path, "c.yaml", "data: d.csv\nmodel: m\noutput: o\n")
    assert parse_options("train", ["--config", file]) == options()
    assert parse_options("train", ["--seed", "3", "--config", file]) == options(seed=3)
    assert parse_options("train", ["--config", file, "other.csv"]) == options(data="other.csv")


def test_every_option_can_stand_in_a_file(tmp_path: Path) -> None:
    """A file's values arrive, for each field, as its default or as text where the default is nothing."""
    given = {
        field.name: field.default
        for field in dataclasses.fields(TrainOptions)
        if field.default is not dataclasses.MISSING and field.default is not None
    }
    file = put(tmp_path, "c.yaml", yaml.safe_dump({**given, "data": "d.csv", "model": "m", "output": "o"}))
    assert parse_options("train", ["--config", file]) == options()


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("learning_rate: 5e-4", {"learning_rate": 5e-4}),  # text, to YAML 1.1
        ("packing: off", {"packing": "off"}),  # false, to YAML 1.1
        ("label_column: 1", {"label_column": "1"}),
        ("eval_split: 0", {"eval_split": 0}),
        ('batch_size: "8"', {"batch_size": 8}),
        ('new_head: "true"', {"new_head": True}),
        ("task:", {}),
        ("\ufeffseed: 3", {"seed": 3}),
    ],
)
def test_what_yaml_makes_of_values_is_put_right(text: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert parse_options("train", [*WORDS, "--config", put(tmp_path, "c.yaml", text)]) == options(**changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "said", "hint"),
    [
        ("c.toml", "batch_sise = 3", "unknown key 'batch_sise'", "did you mean batch_size?"),
        ("c.yaml", "lerning-rate: 3", "unknown key 'lerning-rate'", "did you mean learning_rate?"),
        ("c.yaml", "3: 4", "unknown key '3'", "the keys are the names of the flags"),
        ("c.yaml", "batch-size: 3\nbatch_size: 4", "batch_size twice", "leave one of them out"),
        ("c.yaml", "label_map: {a: b}", "label_map must be one value, and is a table", "pos=POSITIVE"),
        ("c.yaml", "label_column: [a, b]", "label_column must be one value, and is a list", '"a,b"'),
        ("c.toml", "[train]\nseed = 3", "unknown key 'train'", ""),
        ("c.toml", "seed = ", "is not valid TOML", "key = value"),
        ("c.yaml", "seed: [", "is not valid YAML", "key: value"),
        ("c.yaml", "[" * 5000, "is not valid YAML", ""),
        ("c.yaml", "? [a]\n: 3", "is not valid YAML", ""),
        ("c.yaml", "just words", "holds no keys", "key: value"),
        ("c.yaml", "batch_size: many", "--batch-size is 'many': it must be a whole number", "--batch-size 8"),
        ("c.yaml", "batch_size: 1.5", "--batch-size is 1.5: it must be a whole number", "32"),
        ("c.yaml", "batch_size: true", "--batch-size is True: it must be a whole number", "32"),
        ("c.yaml", "new_head: 1", "--new-head is 1: it must be True or False", ""),
        ("c.yaml", "text_column: yes", "--text-column is True: it must be text", ""),
        ("c.yaml", "precision: fp4", "--precision is 'fp4'", "auto"),
        ("c.yaml", "batch_size: 0", "--batch-size is 0", "32"),
        ("c.yaml", 'seed: "\\e[31m"', "--seed is '\\x1b[31m'", ""),
        ("c.yaml", '"\\e[31m": 3', "unknown key '\\x1b[31m'", ""),
        ("c.yaml", 'text_column: "a\\0b"', "--text-column is 'a\\x00b': it has a NUL in it", "remove"),
    ],
)
def test_mistakes_in_a_file(name: str, text: str, said: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        parse_options("train", [*WORDS, "--config", put(tmp_path, name, text)])
    assert said in str(caught.value)
    assert caught.value.hint
    assert hint in caught.value.hint
    assert (str(caught.value) + caught.value.hint).isprintable()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for file, said in (("none.toml", "No such file"), ("binary.toml", "is not UTF-8"), (".", "directory")):
        with pytest.raises(OptionError, match=said):
            parse_options("train", [*WORDS, "--config", str(tmp_path / file)])
    with pytest.raises(OptionError, match="--config"):
        parse_options("train", [*WORDS, "--config"])


def test_classify_takes_a_file_too(tmp_path: Path) -> None:
    file = put(tmp_path, "c.toml", 'threshold = 0.3\noutput = "a.csv"\n')
    asked = parse_options("classify", ["m", "d.csv", "--config", file, "--output", "b.csv"])
    assert (asked.threshold, asked.output) == (0.3, "b.csv")
    with pytest.raises(OptionError, match="unknown key 'seed'"):
        parse_options("classify", ["m", "d.csv", "--config", put(tmp_path, "d.toml", "seed = 3")])
    with pytest.raises(OptionError, match="unknown key 'batch_size'") as caught:
        parse_options("classify", ["m", "d.csv", "--config", put(tmp_path, "d.toml", "batch_size = 3")])
    assert caught.value.hint == "the keys are the names of the flags, as in text_column"
