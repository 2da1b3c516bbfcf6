"""`brimful train`, whole: what it leaves behind, what it says, and what it learns, for each task and kind of model."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import brimful as package
from brimful.core.errors import BrimfulError, DataError, OptionError, OutputError
from brimful.core.records import Run, from_json
from commands import Brimful, Files, train_words
from tiny_files import review, save_classifier, write_csv, write_reviews


def record(folder: Path) -> Run:
    return from_json(Run, (folder / "run.json").read_text(encoding="utf-8"))


def config(folder: Path) -> Any:
    return transformers.AutoConfig.from_pretrained(folder / "model")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


# What is left behind


def test_the_run_folder(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    run = tmp_path / "deep" / "run"
    said = brimful(*train_words(files.reviews, files.base, run, "--max-length", 40))

    assert (said.code, said.out) == (0, "")
    assert {"model", "run.json", "events.jsonl", "checkpoints"} <= {path.name for path in run.iterdir()}
    assert not [path for path in run.rglob("*") if path.name.startswith((".tmp-", ".old-"))]
    kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert (kinds[0], kinds[-1]) == ("started", "finished")
    found = record(run)
    assert (found.status, found.steps, found.packed, found.labels.names) == ("finished", 5, True, ("bad", "good"))
    assert found.data["eval_rows"] == 4
    assert list(found.metrics)[:3] == ["loss", "accuracy", "f1_macro"]

    classifier = transformers.pipeline("text-classification", model=str(run / "model"), device="cpu")
    assert classifier("the film was good")[0]["label"] in ("bad", "good")
    assert (config(run).id2label, config(run).label2id) == ({0: "bad", 1: "good"}, {"bad": 0, "good": 1})
    assert config(run).problem_type == "single_label_classification"


def test_the_card_tells_data_metrics_and_the_exact_command(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    brimful(*train_words(files.reviews, files.base, tmp_path / "a b", "--weight_decay", "0.01", "--new-head"))
    found, card = record(tmp_path / "a b"), (tmp_path / "a b" / "model" / "README.md").read_text(encoding="utf-8")

    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-classification\n")
    assert found.data_fingerprint in card
    assert f"| accuracy | {found.metrics['accuracy']:.4f} |" in card
    (command,) = re.findall(r"^brimful train .*$", card, re.MULTILINE)
    assert command == found.command
    again = shlex.split(command.replace("a b", "again"))
    assert brimful(*again[1:]).code == 0
    assert record(tmp_path / "again").metrics == found.metrics
    for name, tensor in weights(tmp_path / "a b" / "model").items():
        assert torch.equal(tensor, weights(tmp_path / "again" / "model")[name])


def test_one_json_document(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    said = brimful(*train_words(files.reviews, files.base, tmp_path / "run", "--json"))
    found = json.loads(said.out)

    assert said.out.count("\n") == 1
    assert found["run"] == str(tmp_path / "run")
    assert found["model"] == str(tmp_path / "run" / "model")
    assert {"loss", "accuracy", "f1_macro"} <= found["metrics"].keys()
    assert (found["steps"], found["packed"]) == (5, True)
    assert all(found[name] > 0 for name in ("train_s", "samples_per_s", "tokens_per_s"))
    assert 0 <= found["input_wait_s"] <= found["train_s"]
    peak = found["peak_bytes"]
    assert peak["total"] == sum(peak["components"].values())
    assert peak["components"]["weights"] > 0
    if not torch.cuda.is_available():
        assert (peak["allocated"], peak["reserved"], peak["nvml"]) == (None, None, None)
        assert peak["total"] == peak["resident"]
    assert {"name", "value", "arithmetic", "reason", "source"} == found["recipe"]["levers"][0].keys()


def test_packed_or_the_reason_why_not(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    said = brimful(*train_words(files.reviews, files.base, tmp_path / "run", "--json", "--packing", "off"))
    found = json.loads(said.out)
    assert (found["packed"], found["packed_reason"]) == (False, "off: --packing off")


# What is said


def test_the_talk_in_a_pipe(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    said = brimful(*train_words(files.reviews, files.base, tmp_path / "run"))
    for line in (
        "  text: column 'text' (by name; --text-column names another)",
        "  label: column 'label' (by name; --label-column names another)",
        "  task: single_label, 2 labels: bad, good (one label a row; --task names another)",
        "  steps: 5, 8 rows each (36 rows, 1 epoch); learning rate 0.0002, linear, warm-up 1 step"
        " (chosen: --learning-rate by a width of 16)",
        "Data  36 rows to train on, 4 to evaluate on",
        f"Use it:  brimful classify {tmp_path}/run/model FILE",
    ):
        assert line in said.err.splitlines()
    assert "  head: new and untrained (its weights have no classifier.weight" in said.err
    assert "\x1b" not in said.err
    packing = next(line for line in said.err.splitlines() if line.startswith("  packing "))
    assert re.search(r"packed +exact +equal to the plain forward within .*, gradient within ", packing)


@pytest.mark.thorough
def test_the_talk_on_a_terminal_of_80_columns(files: Files, tmp_path: Path) -> None:
    """In a process of its own: the recipe fits, the bar is drawn and taken away, stdout has one document."""
    words = [str(word) for word in train_words(files.reviews, files.base, "run", "--logging-steps", 1, "--json")]
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"COLUMNS": "80", "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "brimful", *words],
        stdout=subprocess.PIPE,
        stderr=theirs,
        cwd=tmp_path,
        env=environment,
    ) as process:
        os.close(theirs)
        shown = b"".join(iter(lambda: _read(ours), b"")).decode()
        os.close(ours)
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["model"] == "run/model"
    assert process.returncode == 0
    assert re.search(r"step \d of 5  loss \d\.\d+  lr \d\.\de-\d\d  .* tokens/s  .* left", shown)
    assert "\u2501" in shown
    after_bars = [line.split("\r")[-1] for line in shown.replace("\r\n", "\n").splitlines()]
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in after_bars]
    assert [line for line in lines if len(line) > 80] == []
    assert "  exact: the same result as the plain model, up to the order of sums" in lines
    assert lines[-1] == "Use it:  brimful classify run/model FILE"


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # all have closed it
        return b""


def test_a_dry_run_writes_nothing(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    said = brimful(*train_words(files.reviews, files.base, tmp_path / "run", "--dry-run", "--json"))
    assert said.code == 0
    assert "How it runs  on" in said.err
    assert "this was a dry run" in said.err
    assert list(tmp_path.iterdir()) == []
    found = json.loads(said.out)
    assert (found["status"], found["steps"], found["metrics"], found["train_s"]) == ("planned", 0, {}, None)


def test_what_is_lost_is_said_and_counted(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    rows = [(review(bool(i % 2), i) * (1 + i // 30), i % 2) for i in range(40)] + [
        ("", 1),
        ("  ", 0),
        (review(False, 0), 0),
    ]
    data = write_csv(tmp_path / "d.csv", ["text", "label"], rows)
    said = brimful(*train_words(data, files.base, tmp_path / "run", "--max-length", 16, "--eval-data", data))
    found = record(tmp_path / "run").data
    assert (found["empty_rows"], found["duplicate_texts"], found["truncated_rows"]) == (4, 1, 10)
    assert "4 rows without text were left out" in said.err
    assert "1 training row repeats another's text" in said.err
    assert "41 evaluation rows are also trained on" in said.err
    assert "tokens in a row, cut at 16: median 13, 95 % of rows have at most 16, the longest 16" in said.err
    assert "10 rows (24.4 %) are longer than 16 tokens, and cut there" in said.err


def test_control_characters_are_escaped_wherever_they_could_be_obeyed(
    brimful: Brimful, files: Files, tmp_path: Path
) -> None:
    labels = ("\x1b[31m<b>red|`\x9b", "\u202edoor\n")
    data = write_reviews(tmp_path / "d.csv", labels=labels)
    said = brimful(*train_words(data, files.base, tmp_path / "run", "--json"))
    assert said.code == 0
    run = tmp_path / "run"
    for text in (
        *(said.out, said.err),
        *(
            path.read_text(encoding="utf-8")
            for path in (run / "model" / "README.md", run / "run.json", run / "events.jsonl")
        ),
    ):
        assert all(line.isprintable() for line in text.split("\n"))
    assert set(config(run).label2id) == set(labels)
    assert "`` \\x1b[31m<b>red|`\\x9b ``" in (run / "model" / "README.md").read_text(encoding="utf-8")


# What is asked for


def test_all_rows_are_trained_on_without_a_split(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    said = brimful(*train_words(files.reviews, files.base, tmp_path / "run", "--eval-split", 0))
    found = record(tmp_path / "run")
    assert (said.code, found.data["rows"], found.data["eval_rows"], found.metrics) == (0, 40, None, {})
    assert "Data  40 rows to train on, none to evaluate on" in said.err
    assert "nothing was held out" in (tmp_path / "run" / "model" / "README.md").read_text()


@pytest.mark.slow
def test_clipping_at_zero_is_none(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    def trained(norm: str) -> dict[str, torch.Tensor]:
        words = train_words(files.reviews, files.base, tmp_path / norm, "--optim", "sgd", "--learning-rate", 0.1)
        assert brimful(*words, "--max-grad-norm", norm).code == 0
        return weights(tmp_path / norm / "model")

    off, never, hard = trained("0"), trained("1e6"), trained("1e-3")
    assert all(torch.equal(off[name], never[name]) for name in off)
    assert not all(torch.equal(off[name], hard[name]) for name in off)


def test_dashes_and_underscores_say_the_same(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    words = ["--max_steps", 2, "--eval_split=0.25", "--label_column", "label", "--no_new_head", "--batch-size", 4]
    assert brimful(*train_words(files.reviews, files.base, tmp_path / "run", *words)).code == 0
    found = record(tmp_path / "run")
    assert (found.steps, found.data["eval_rows"], found.options["batch_size"]) == (2, 10, 4)


def test_a_warm_up_that_never_ends_is_said(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    said = brimful(*train_words(files.reviews, files.base, tmp_path / "run", "--warmup-steps", 100))
    assert "warning: the warm-up is longer than the run" in said.err


# Heads


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("names", "labels", "words", "said", "outputs"),
    [
        (("bad", "good"), ("bad", "good"), (), "kept (it has the labels of the data)", ("bad", "good")),
        (("good", "bad"), ("bad", "good"), (), "kept (it has the labels of the data)", ("good", "bad")),
        (("bad", "ok", "good"), ("bad", "good"), (), "and 1 more", ("bad", "ok", "good")),
        (("LABEL_0", "LABEL_1"), ("neg", "pos"), (), "LABEL_0=neg, LABEL_1=pos", ("neg", "pos")),
        (("N", "P"), ("neg", "pos"), ("--label-map", "neg=N,pos=P"), "mapped by --label-map", ("N", "P")),
        (("N", "P"), ("neg", "pos"), ("--new-head",), "new and untrained (asked for", ("neg", "pos")),
    ],
)
def test_heads(
    names: tuple[str, ...],
    labels: tuple[str, str],
    words: tuple[str, ...],
    said: str,
    outputs: tuple[str, ...],
    brimful: Brimful,
    tmp_path: Path,
) -> None:
    """Trained at a rate of almost nothing, a head that is kept is still what it was."""
    model, data = save_classifier(tmp_path / "m", names), write_reviews(tmp_path / "d.csv", labels=labels)
    found = brimful(*train_words(data, model, tmp_path / "run", "--learning-rate", 1e-12, *words))
    assert found.code == 0
    assert said in found.err
    assert tuple(config(tmp_path / "run").id2label.values()) == outputs
    before, after = weights(model)["classifier.weight"], weights(tmp_path / "run" / "model")["classifier.weight"]
    assert torch.allclose(before, after, atol=1e-6) == ("--new-head" not in words)


def test_a_label_map_in_a_file(brimful: Brimful, tmp_path: Path) -> None:
    model, data = save_classifier(tmp_path / "m", ["N", "P"]), write_reviews(tmp_path / "d.csv", labels=("a,b", "c=d"))
    (tmp_path / "map.json").write_text('{"a,b": "N", "c=d": "P"}')
    assert brimful(*train_words(data, model, tmp_path / "run", "--label-map", tmp_path / "map.json")).code == 0


# Tasks


@pytest.mark.slow
def test_it_learns(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = write_reviews(tmp_path / "d.csv", 200)
    words = train_words(data, files.base, tmp_path / "run", "--learning-rate", 3e-3, "--lr-scheduler-type", "constant")
    assert brimful(*words, "--num-train-epochs", 8).code == 0
    assert record(tmp_path / "run").metrics["accuracy"] == 1.0
    with package.Classifier(tmp_path / "run" / "model") as classifier:
        found = classifier(["the film was superb", "the film was awful"])
    assert [answer["label"] for answer in found] == ["good", "bad"]


def test_several_labels(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    rows = [(review(bool(i % 2), i), i % 2, i // 2 % 2, i // 3 % 2) for i in range(40)]
    data = write_csv(tmp_path / "d.csv", ["text", "a", "b", "c"], rows)
    words = ("--label-column", "a,b,c", "--class-weights", "balanced", "--label-smoothing-factor", 0.1)
    said = brimful(*train_words(data, files.base, tmp_path / "run", *words))
    assert said.code == 0
    assert "task: multi_label, 3 labels: a, b, c" in said.err
    assert config(tmp_path / "run").problem_type == "multi_label_classification"
    assert {"f1_micro", "f1_macro", "label_accuracy"} <= record(tmp_path / "run").metrics.keys()


def test_numbers(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    data = write_csv(tmp_path / "d.csv", ["text", "stars"], [(review(bool(i % 2), i), i / 7) for i in range(40)])
    said = brimful(*train_words(data, files.base, tmp_path / "run"))
    assert said.code == 0
    assert "task: regression, 1 output: stars" in said.err
    assert re.search(r"  stars: from \S+ to \S+, mean \S+", said.err)
    assert (config(tmp_path / "run").problem_type, config(tmp_path / "run").num_labels) == ("regression", 1)
    assert {"mse", "rmse", "mae"} <= record(tmp_path / "run").metrics.keys()


@pytest.mark.slow
def test_pairs(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    rows = [(review(bool(i % 2), i), review(True, i + 1), i % 2) for i in range(40)]
    data = write_csv(tmp_path / "d.csv", ["premise", "hypothesis", "label"], rows)
    said = brimful(*train_words(data, files.base, tmp_path / "run"))
    assert said.code == 0
    assert "pair: column 'hypothesis'" in said.err
    assert record(tmp_path / "run").data["token_lengths"]["p50"] == 25  # both texts, and three special tokens
    answers = brimful("classify", tmp_path / "run" / "model", data).out.splitlines()
    assert list(json.loads(answers[0]))[:5] == ["premise", "hypothesis", "label", "predicted_label", "score"]


# Models


def test_a_pickle_is_loaded_where_allowed(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m", ["bad", "good"])
    torch.save(weights(model), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    assert brimful(*train_words(files.reviews, model, tmp_path / "run")).code == 2
    said = brimful(*train_words(files.reviews, model, tmp_path / "run", "--allow-pickle"))
    assert said.code == 0
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_code_of_a_model_is_run_where_trusted(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m", ["bad", "good"])
    (model / "own_model.py").write_text(
        "from transformers import BertConfig, BertForSequenceClassification\n"
        "class OwnConfig(BertConfig):\n    model_type = 'own'\n"
        "class OwnModel(BertForSequenceClassification):\n    config_class = OwnConfig\n"
    )
    known = json.loads((model / "config.json").read_text())
    classes = {"AutoConfig": "own_model.OwnConfig", "AutoModelForSequenceClassification": "own_model.OwnModel"}
    (model / "config.json").write_text(json.dumps(known | {"model_type": "own", "auto_map": classes}))
    refused = brimful(*train_words(files.reviews, model, tmp_path / "run"))
    assert refused.code == 2
    assert "--trust-remote-code" in refused.err
    assert brimful(*train_words(files.reviews, model, tmp_path / "run", "--trust-remote-code")).code == 0


# From Python


def test_the_call_does_what_the_command_does(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    run = package.train(files.reviews, model=files.base, output=tmp_path / "call", batch_size=8, num_train_epochs=1)
    brimful(*train_words(files.reviews, files.base, tmp_path / "command"))
    assert isinstance(run, package.Run)
    assert run == record(tmp_path / "call")
    assert run.metrics == record(tmp_path / "command").metrics
    assert run.command == record(tmp_path / "command").command.replace("/command", "/call")


def test_the_call_is_silent(files: Files, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    package.train(files.reviews, model=files.base, output=tmp_path / "run", batch_size=8, max_steps=2)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("changes", "kind", "said", "hint"),
    [
        ({"learning_rte": 1e-4}, OptionError, "train has no option 'learning_rte'", "did you mean learning_rate?"),
        ({"zzz": 1}, OptionError, "train has no option 'zzz'", "the options are"),
        ({"batch_size": 1.5}, OptionError, "--batch-size is 1.5: it must be a whole number", "32"),
        ({"batch_size": True}, OptionError, "--batch-size is True", "32"),
        ({"max_steps": "3"}, OptionError, "--max-steps is '3'", ""),
        ({"label_column": 3}, OptionError, "--label-column is 3: it must be text", ""),
        ({"data": "none.csv"}, DataError, "no such file", ""),
        ({"output": "."}, OutputError, "is not empty", "new folder"),
        ({"output": "x" * 300}, OutputError, "too long", "--output"),
    ],
)
def test_mistakes_in_a_call(
    changes: dict[str, Any], kind: type[BrimfulError], said: str, hint: str, files: Files, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"data": files.reviews, "model": files.base, "output": tmp_path / "run", **changes}
    with pytest.raises(kind) as caught:
        package.train(**arguments)
    assert said in str(caught.value)
    assert hint in (caught.value.hint or "")
    assert not (tmp_path / "run").exists()


def test_no_gpu_when_one_was_asked_for(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    said = brimful(*train_words(files.reviews, files.base, tmp_path / "run", "--device", "cuda"))
    assert said.code == 2
    assert "--device cuda was asked for, and torch sees no GPU" in said.err
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_files_are_in_the_folder(brimful: Brimful, files: Files, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    words = train_words(files.reviews, files.base, tmp_path / "run", "--report-to", "tensorboard", "--logging-steps", 1)
    assert brimful(*words).code == 0
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1


def run_alone(*words: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "brimful", *(str(word) for word in words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, check=False, timeout=120, env=environment)


def test_a_mistake_in_a_process_of_its_own(files: Files, tmp_path: Path) -> None:
    """A name in bytes that are not UTF-8, which the libraries that save models cannot be told."""
    process = run_alone(*train_words(files.reviews, files.base, os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")))
    assert (process.returncode, process.stdout) == (2, b"")
    error, hint = process.stderr.decode().splitlines()
    assert error == f"error: --output is '{tmp_path}/caf\\udce9': it is not UTF-8"
    assert hint == "hint: use another name"
