"""Learning rate, epochs and warm-up: chosen where nobody asked, kept on resume, and left alone where asked for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from brimful.core.options.train import TrainOptions
from brimful.core.records import Learning
from brimful.engine.learning import choose_learning, epochs_between
from commands import call, train_words
from tiny_files import save_base, write_reviews


def chosen(*, width: int | None = 384, rows: int = 1000, labels: int = 2, **options: Any) -> Learning:
    asked = TrainOptions(data="", model="", output="", **options)
    config: Any = SimpleNamespace(hidden_size=width)
    config.get_text_config = lambda: config
    batches = -(-rows // asked.batch_size)
    return choose_learning(asked, config, batches_per_epoch=batches, num_outputs=labels)


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ({"width": 384}, 2e-4),
        ({"width": 768}, 1e-4),
        ({"width": 1024}, 2.8e-5),
        ({"width": 64}, 2e-4),
        ({"width": None}, 5e-5),
        ({"width": 768, "peft": "lora"}, 5e-4),
        ({"width": 768, "freeze": "all-but-head"}, 1e-3),
        ({"width": 768, "freeze": "embeddings"}, 1e-4),
        ({"width": 768, "optim": "paged_lion_8bit"}, 1e-5),
        ({"width": 384, "optim": "sgd"}, 5e-5),
    ],
)
def test_the_rate_follows_the_width_and_what_is_trained(given: dict[str, Any], rate: float) -> None:
    found = chosen(**given)
    assert found.learning_rate == pytest.approx(rate)
    assert found.reason is not None
    assert found.num_warmup_steps > 0


def test_few_rows_are_seen_more_often() -> None:
    epochs = {rows: chosen(rows=rows).num_train_epochs for rows in (1, 64, 1_000, 20_000, 10**7)}
    assert epochs[20_000] == epochs[10**7] == 3
    assert 40 >= (epochs[1] or 0) >= (epochs[64] or 0) > (epochs[1_000] or 0) > 3


def test_more_labels_take_more_steps() -> None:
    assert (chosen(labels=100).num_train_epochs or 0) > (chosen(labels=2).num_train_epochs or 0)
    assert chosen(labels=10**6).num_train_epochs == chosen(labels=10**5).num_train_epochs


def test_what_is_asked_for_is_kept() -> None:
    found = chosen(learning_rate=1e-5, num_train_epochs=2.5)
    assert found == Learning(learning_rate=1e-5, num_train_epochs=2.5, num_warmup_steps=0)
    assert chosen(learning_rate=1e-5).num_warmup_steps == 0
    assert chosen(warmup_steps=7).num_warmup_steps == 7
    assert chosen(warmup_steps=0).num_warmup_steps == 0
    assert chosen(warmup_ratio=0.5, num_train_epochs=1).num_warmup_steps == 16
    assert chosen(max_steps=50).num_train_epochs is None
    assert chosen(learning_rate="auto", num_train_epochs="auto") == chosen()


def test_many_chosen_epochs_are_not_all_evaluated() -> None:
    asked = TrainOptions(data="", model="", output="")
    assert epochs_between(asked, chosen(rows=64)) == 4
    assert epochs_between(asked, chosen(rows=20_000)) == 1
    asked = TrainOptions(data="", model="", output="", num_train_epochs=100)
    assert epochs_between(asked, chosen(num_train_epochs=100)) == 1


@pytest.mark.slow
def test_a_resumed_run_keeps_what_was_chosen(tmp_path: Path) -> None:
    """Also where the rule has changed since, as it would for another version; here the record is changed."""
    base, data = save_base(tmp_path / "base"), write_reviews(tmp_path / "rows.csv", 24)
    run = tmp_path / "run"
    words = ["train", data, "--model", base, "--output", run, "--batch-size", 8, "--max-length", 16, "--no-baselines"]
    first = call(*words, "--num-train-epochs", 2, "--learning-rate", "auto", "--save-steps", 3)
    assert first.code == 0, first.err
    assert "learning rate 0.0002, linear, warm-up 1 step (chosen: --learning-rate by a width of 16)" in first.err
    record = json.loads((run / "run.json").read_text())
    assert record["options"]["learning_rate"] is None
    assert record["learning"] == {
        "learning_rate": 2e-4,
        "num_train_epochs": 2.0,
        "num_warmup_steps": 1,
        "reason": "--learning-rate by a width of 16",
    }
    assert "| learning_rate | 0.0002 |" in (run / "model" / "README.md").read_text()
    record["learning"]["learning_rate"] = 1.5e-4
    (run / "run.json").write_text(json.dumps(record))
    assert "this run had finished" in call(*words, "--resume").err
    longer = call(*words, "--num-train-epochs", 3, "--resume")
    assert longer.code == 0, longer.err
    assert "learning rate 0.00015" in longer.err
    assert json.loads((run / "run.json").read_text())["learning"]["learning_rate"] == 1.5e-4
    refused = call(*words, "--num-train-epochs", 4, "--resume", "--learning-rate", 1e-3)
    assert (refused.code, "--learning-rate was 0.00015, is 0.001" in refused.err) == (2, True)
    same = call(*words, "--num-train-epochs", 3, "--resume", "--learning-rate", 1.5e-4)
    assert same.code == 0, same.err


def test_auto_on_the_command_line_and_in_a_file(tmp_path: Path) -> None:
    base, data = save_base(tmp_path / "base"), write_reviews(tmp_path / "rows.csv", 24)
    (tmp_path / "run.toml").write_text('learning_rate = "auto"\nnum_train_epochs = "auto"\n')
    words = train_words(data, base, tmp_path / "run", "--dry-run")
    said = call(*words[:6], "--dry-run", "--config", tmp_path / "run.toml")
    assert said.code == 0, said.err
    assert "--num-train-epochs at the most, of so few rows" in said.err
    refused = call(*words, "--batch-size", "auto")
    assert (refused.code, "--batch-size is 'auto'" in refused.err) == (2, True)
