"""Help and version: complete, on stdout, and without loading what takes seconds to load."""

from __future__ import annotations

import subprocess
import sys

import pytest

import brimful as package
from commands import Brimful

_LIGHT = """
import sys
{code}
heavy = {{"torch", "transformers", "pyarrow", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""
_COMMAND = """
from brimful.cli.commands import run
try:
    run({words!r})
except SystemExit as end:
    assert end.code == 0
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    "code",
    [
        "import brimful; brimful.TrainOptions; brimful.Profile; brimful.BrimfulError; dir(brimful)",
        *(
            _COMMAND.format(words=words)
            for words in (
                ["--help"],
                ["--version"],
                ["train", "--help"],
                ["classify", "-h"],
                ["profile", "-h"],
                ["bench", "-h"],
            )
        ),
    ],
    ids=["import", "help", "version", "train", "classify", "profile", "bench"],
)
def test_help_and_import_load_neither_torch_nor_transformers(code: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", _LIGHT.format(code=code)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (process.returncode, process.stderr) == (0, "")


def test_mistakes_in_words_are_told_before_anything_heavy_is_loaded() -> None:
    code = "from brimful.cli.commands import run\nassert run(['train', 'a.csv', '--modle', 'b']) == 2"
    process = subprocess.run(
        [sys.executable, "-c", _LIGHT.format(code=code)], capture_output=True, check=False, timeout=60
    )
    assert process.returncode == 0
    assert process.stderr.decode().splitlines() == [
        "error: brimful train has no option --modle",
        "hint: did you mean --model?",
    ]


def test_help_names_every_command(brimful: Brimful) -> None:
    said = brimful("--help")
    assert (said.code, said.err) == (0, "")
    for command in ("train", "classify", "profile", "bench", "demo"):
        assert f"\n  {command} " in said.out
    assert all(len(line) <= 80 for line in said.out.splitlines())


def test_no_words_at_all_are_a_mistake(brimful: Brimful) -> None:
    said = brimful()
    assert (said.code, said.out) == (2, "")
    assert said.err == brimful("--help").out


def test_version(brimful: Brimful) -> None:
    assert brimful("--version").out == f"{package.__version__}\n"


def test_the_module_is_the_command(brimful: Brimful) -> None:
    """`python -m brimful`, for those whose path lacks the script; with the command's exit codes."""
    for words in (["--version"], ["trian"]):
        process = subprocess.run(
            [sys.executable, "-m", "brimful", *words], capture_output=True, text=True, check=False, timeout=60
        )
        said = brimful(*words)
        assert (process.returncode, process.stdout, process.stderr) == (said.code, said.out, said.err)


@pytest.mark.parametrize(("word", "hint"), [("trian", "did you mean train?"), ("fly", "train, classify, evaluate")])
def test_a_command_that_there_is_not(word: str, hint: str, brimful: Brimful) -> None:
    said = brimful(word)
    assert said.code == 2
    assert said.err.splitlines()[0] == f"error: there is no command '{word}'"
    assert hint in said.err.splitlines()[1]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["train"], "brimful train needs DATA and --model and --output"),
        (["train", "a.csv", "--model", "m"], "brimful train needs --output"),
        (["train", "a.csv", "b.csv", "--model", "m", "--output", "o"], "does not know what to do with b.csv"),
        (["train", "a.csv", "--model"], "--model: expected one argument"),
        (["classify", "m"], "brimful classify needs INPUT"),
        (["train", "a.csv", "--model", "m", "--output", "o", "--new-head=maybe"], "--new-head"),
    ],
)
def test_words_that_are_missing_or_too_many(words: list[str], error: str, brimful: Brimful) -> None:
    said = brimful(*words)
    assert (said.code, said.out) == (2, "")
    first, second = said.err.splitlines()
    assert first.startswith("error: ")
    assert error in first
    assert second.startswith("hint: ")


def test_a_value_with_spaces_is_shown_in_quotes(brimful: Brimful) -> None:
    said = brimful("train", "a.csv", "--model", "m", "--output", "o", "--freeze", "layers", "0-5", "--seed", 3)
    assert "hint: quote values with spaces, and globs, as in --freeze 'layers 0-5'; brimful train" in said.err
    said = brimful("classify", "m", "a.csv", "b.csv")
    assert "hint: quote values with spaces, and globs; brimful classify" in said.err


def test_of_several_processes_one_says_what_is_wrong(brimful: Brimful, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --claim each is by itself."""
    words = ("train", "a.csv", "--model", "m", "--output", "o", "--peft", "lora", "--freeze", "embeddings")
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    said = brimful(*words)
    assert (said.code, said.out, said.err) == (2, "", "")
    assert "does not know" in brimful("classify", "m", "*.csv", "--claim", "more").err
    monkeypatch.setenv("RANK", "0")
    assert "--peft and --freeze are both given" in brimful(*words).err


def test_help_is_a_command_too(brimful: Brimful) -> None:
    assert brimful("help").out == brimful("--help").out != ""
    process = subprocess.run(
        [sys.executable, "-m", "brimful", "help", "train"], capture_output=True, text=True, timeout=60
    )
    assert (process.returncode, process.stdout.split(" DATA")[0]) == (0, "usage: brimful train")
