"""Going on: more epochs on a finished run, models of checkpoints, options that change nothing learned."""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from brimful.engine.training.baselines import Baselines
from commands import Brimful, Files, train_words
from tiny_files import review, write_csv, write_reviews


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
def test_more_epochs_on_a_finished_run(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    """At a constant learning rate the model is that of a run that was as long from the beginning."""
    words = [*train_words(files.reviews, files.base, tmp_path / "run"), "--lr-scheduler-type", "constant"]
    assert brimful(*words).code == 0
    again = brimful(*words, "--resume")
    assert (again.code, "this run had finished; nothing was changed" in again.err) == (0, True)
    words[words.index("--num-train-epochs") + 1] = 3
    said = brimful(*words, "--resume", "--logging-steps", 3, "--execution", "eager")
    assert said.code == 0, said.err
    assert "the run has 15 steps now, 5 before: the learning rate stays what it is" in said.err
    words[words.index("--output") + 1] = tmp_path / "whole"
    assert brimful(*words).code == 0
    assert weights(tmp_path / "run" / "model") == weights(tmp_path / "whole" / "model")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["status"], record["steps"]) == ("finished", 15)


@pytest.mark.parametrize("flag", ["--dry-run", "--eval-split=0"])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('no such word')", "reviews.csv row 1: the transform failed with ValueError: no such word"),
        ("return 7", "reviews.csv row 1: the transform gave int, not a text"),
        ("return '' if '0' in (1 / 0) else text", "the transform failed with ZeroDivisionError"),
    ],
)
def test_a_transform_is_tried_before_a_folder_is_made(
    brimful: Brimful, files: Files, tmp_path: Path, flag: str, body: str, said: str
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(f"def noisy(text, random):\n    {body}\n")
    refused = brimful(*train_words(files.reviews, files.base, tmp_path / "run", "--transform", f"{mine}:noisy", flag))
    assert refused.code == 2
    assert said in refused.err.replace(", row", " row"), refused.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("more", [(), ("--resume",)])
def test_a_transform_that_fails_later_leaves_the_folder_free(
    brimful: Brimful, files: Files, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Of a row that is not among the first, before anything is saved: once it is mended, the same command begins."""
    rows = [(review(bool(i % 2), i) + " long" * (i == 30), "ab"[i % 2]) for i in range(40)]
    data, mine = write_csv(tmp_path / "rows.csv", ("text", "label"), rows), tmp_path / "mine.py"
    mine.write_text("def noisy(text, random):\n    return 7 if text.endswith('long') else text\n")
    words = train_words(data, files.base, tmp_path / "run", "--transform", f"{mine}:noisy", "--num-workers", 1)
    words = [*words, "--eval-split", 0]
    refused = brimful(*words)
    assert (refused.code, "the transform gave int, not a text" in refused.err) == (2, True), refused.err
    mine.write_text("def noisy(text, random):\n    return text\n")
    mended = brimful(*words, *more)
    assert mended.code == 0, mended.err
    events = [json.loads(line)["kind"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert events.count("started") == 1


def test_a_signal_when_all_steps_are_done_says_that_the_run_ends(
    brimful: Brimful, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Baselines.result

    def struck(*given: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return made(*given)

    monkeypatch.setattr(Baselines, "result", struck)
    said = brimful(*train_words(files.reviews, files.base, tmp_path / "run", "--max-steps", 1))
    assert said.code == 0
    assert "told to stop: all steps are done, and the run ends once its model is saved; Ctrl-C leaves" in said.err
    assert (tmp_path / "run" / "model").is_dir()


def test_fewer_steps_than_a_finished_run_has(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    words = [*train_words(files.reviews, files.base, tmp_path / "run", "--max-steps", 4), "--save-steps", 2]
    assert brimful(*words).code == 0
    words[words.index("--max-steps") + 1] = 3
    said = brimful(*words, "--resume")
    assert said.code == 0
    assert "this run had finished: it has 4 steps, and 3 are asked for; nothing was changed; brimful export" in said.err
    assert f"{tmp_path}/run --step N makes a model of step 2\n" in said.err
    assert brimful("export", tmp_path / "run", "--step", 2).code == 0


def test_a_longer_schedule_is_said(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    words = train_words(files.reviews, files.base, tmp_path / "run", "--max-steps", 2)
    assert brimful(*words).code == 0
    said = brimful(*words[:-1], 4, "--resume")
    assert said.code == 0, said.err
    assert (
        "4 steps now, 2 before: from here on the learning rate is that of the linear schedule over 4 steps" in said.err
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--seed", 1), "--seed was 42, is 1"),
        (("--learning-rate", 1e-3), "--learning-rate was 0.0002, is 0.001"),
        (("--max-length", 8), "--max-length was 64, is 8"),
    ],
)
def test_what_blocks_a_resume_is_said_before_tokenising(
    brimful: Brimful, files: Files, tmp_path: Path, more: tuple[object, ...], said: str
) -> None:
    words = train_words(files.reviews, files.base, tmp_path / "run", "--max-steps", 1)
    assert brimful(*words).code == 0
    refused = brimful(*words, "--resume", *more)
    assert refused.code == 2
    assert said in refused.err.replace("was 80", "was 64"), refused.err
    assert "tokenising" not in refused.err


def test_other_data_block_a_resume_before_tokenising(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = write_reviews(tmp_path / "rows.csv", 24)
    words = train_words(data, files.base, tmp_path / "run", "--max-steps", 1)
    assert brimful(*words).code == 0
    write_csv(data, ("text", "label"), [("a film", "good"), ("a bad film", "bad")] * 12)
    refused = brimful(*words, "--resume")
    assert (refused.code, "the data have changed" in refused.err, "tokenising" in refused.err) == (2, True, False)


def test_options_that_change_nothing_learned(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    """Guesses and choices may be named, and what decides nothing given; what leads to other rows is refused."""
    run, held_out = tmp_path / "run", write_reviews(tmp_path / "held-out.csv", 8)
    words = (*train_words(files.reviews, files.base, run, "--max-steps", 1), "--eval-data", held_out)
    assert brimful(*words).code == 0
    record = (run / "run.json").read_text()
    harmless: tuple[object, ...] = ("--save-steps", 2, "--eval-steps", 2, "--logging-steps", 1, "--token-budget", 512)
    harmless += ("--task", "single_label", "--text-column", "text", "--label-column", "label", "--pair-column", "none")
    harmless += ("--precision", "fp32", "--device", "cpu", "--eval-split", 0.2, "--limit", 5000)
    harmless += ("--missing-labels", "drop", "--target-scaling", "off")
    harmless += ("--model", files.base.parent / ".." / files.base.parent.name / files.base.name)
    said = brimful(*words, "--resume", *harmless)
    assert (said.code, "nothing was changed" in said.err) == (0, True), said.err
    assert "had finished; nothing" in said.err
    other = write_reviews(tmp_path / "other.csv", 12)
    for more, why in {
        ("--limit", 20): "--limit was None, is 20",
        ("--limit", 20, "--text-column", "text"): "--text-column was None, is text; --limit was None, is 20",
        ("--precision", "bf16"): "--precision was auto, is bf16",
        ("--eval-data", other): "the evaluation rows have changed",
    }.items():
        refused = brimful(*words, "--resume", *more)
        assert (refused.code, f"cannot be resumed: {why}\n" in refused.err) == (2, True), refused.err
    earlier = json.loads(record)
    del earlier["data"]["sha256"]["choice of rows"]
    (run / "run.json").write_text(json.dumps(earlier))
    assert brimful(*words, "--resume").code == 0
    assert "--limit was None, is 5000" in brimful(*words, "--resume", "--limit", 5000).err


def test_targets_that_are_scaled_and_a_precision_that_is_chosen_block_a_resume(
    brimful: Brimful, files: Files, tmp_path: Path
) -> None:
    """`auto` means what it chose in the run, for good."""
    data = write_csv(tmp_path / "rows.csv", ("text", "label"), [(f"a film {i}", 190 + i / 2) for i in range(24)])
    words = train_words(data, files.base, tmp_path / "run", "--max-steps", 1, "--precision", "bf16")
    assert brimful(*words).code == 0
    assert "--target-scaling was auto, is off" in brimful(*words, "--resume", "--target-scaling", "off").err
    assert "--precision was bf16, is auto" in brimful(*words[:-2], "--resume", "--device", "cpu").err


@pytest.mark.slow
def test_a_model_of_a_checkpoint(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    """The last checkpoint of a run is its model; an earlier one is another, which classify and transformers load."""
    run = tmp_path / "run"
    words = train_words(files.reviews, files.base, run, "--max-steps", 4, "--save-steps", 2, "--save-total-limit", 9)
    assert brimful(*words).code == 0
    said = brimful("export", run)
    assert said.code == 0, said.err
    assert weights(run / "model-step-4") == weights(run / "model")
    said = brimful("export", run, "--step", 2, "-o", tmp_path / "early", "--json")
    assert json.loads(said.out) == {"model": str(tmp_path / "early")}
    assert weights(tmp_path / "early") != weights(run / "model")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "early").config.id2label == {
        0: "bad",
        1: "good",
    }
    (tmp_path / "early" / "notes.txt").write_text("mine")
    again = ("export", run, "--step", 4, "-o", tmp_path / "early")
    assert "early is there already" in brimful(*again).err
    assert "is the run's own model" in brimful("export", run, "-o", run / "model", "--overwrite").err
    assert (tmp_path / "early" / "notes.txt").exists()
    assert brimful("classify", tmp_path / "early", files.reviews, "--verify", 0).code == 0
    assert brimful(*again, "--overwrite").code == 0
    assert weights(tmp_path / "early") == weights(run / "model")
    assert "hint: it has 2, 4" in brimful("export", run, "--step", 3).err
    for file in (run / "checkpoints").glob("step-*2/*.safetensors"):
        file.write_bytes(file.read_bytes()[:-10])
    said = brimful("export", run, "--step", 2, "-o", tmp_path / "damaged")
    assert (said.code, "hint: there are those of steps 4" in said.err) == (5, True), said.err
    assert "holds no run" in brimful("export", tmp_path / "early").err


def test_workers_without_a_transform_have_no_effect_and_say_so(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    words = train_words(files.reviews, files.base, tmp_path / "run", "--dry-run")
    assert "warning: --num-workers has no effect without --transform" in brimful(*words, "--num-workers", 2).err
    assert "--num-workers" not in brimful(*words).err


def test_a_transform_is_named_before_training(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def same(text, random):\n    return text\n")
    words = train_words(files.reviews, files.base, tmp_path / "run", "--dry-run")
    said = brimful(*words, "--transform", f"{tmp_path / 'mine.py'}:same")
    assert "mine.py:same is applied to each text in each epoch" in said.err
