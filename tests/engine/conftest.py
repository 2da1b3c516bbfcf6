"""One warm process, one tiny model and one file of rows for all tests of the loops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from runs import POISON, Runner, open_runner, save_tiny_model, single_label_rows, tiny_tokenizer, write_rows


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the session's models, rows and undisturbed runs."""
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="session")
def model(home: Path) -> Path:
    """A tiny BERT without a head, with dropout."""
    return save_tiny_model(home / "base", dropout=0.1)


@pytest.fixture(scope="session")
def rows(home: Path) -> Path:
    """60 rows of three labels: 54 to train on, in batches of 8 with a ragged last one, and 6 held out."""
    return write_rows(home / "rows.jsonl", single_label_rows(60))


@pytest.fixture(scope="session")
def poisoned(home: Path) -> tuple[Path, Path]:
    """A model that gives NaN for one word, which the equivalence check of packing does not try; and rows of which one
    has it."""
    poison = tiny_tokenizer().convert_tokens_to_ids(POISON)
    folder = save_tiny_model(home / "poisoned", dropout=0.1, eos_token_id=poison)
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][poison] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    rows = single_label_rows(60)
    rows[31]["text"] += f" {POISON}"
    return folder, write_rows(home / "poisoned.jsonl", rows)


@pytest.fixture(scope="session")
def runner(home: Path, model: Path, rows: Path) -> Iterator[Runner]:
    """Runs of the command line."""
    with open_runner(home) as runner:
        arguments = ["train", str(rows), "--model", str(model), "--output", str(home / "warm"), "--max-steps", "2"]
        ended = runner.warm([*arguments, "--max-length", "48", "--batch-size", "8"])
        assert ended.code == 0, ended.said
        yield runner
