"""A run that was ended anywhere and resumed learns, tells and keeps what the one left alone did, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import brimful
from brimful.core.callbacks import Callbacks
from brimful.core.errors import Interrupted, OutputError
from brimful.engine.signals import StopSignals
from brimful.engine.training.checkpoint import load_checkpoint
from brimful.engine.training.loop import TrainingLoop
from brimful.engine.training.run_folder import RunFolder
from brimful.step.step import Step
from runs import (
    Ended,
    Runner,
    checkpoints,
    contents,
    events,
    learned,
    save_tiny_model,
    sha256,
    single_label_rows,
    write_rows,
)

pytestmark = pytest.mark.xdist_group("runs")  # one process makes what they share

BASE = ["--max-length", "48", "--batch-size", "8", "--num-train-epochs", "3", "--logging-steps", "1"]
BEST = "--metric-for-best-model loss --save-total-limit 2"
#: What is run, besides BASE. 54 rows to train on: 7 batches an epoch, the last of 6 rows; 21 steps.
VARIANTS = {
    "steps": f"--learning-rate 3e-3 --eval-steps 4 --save-steps 5 --token-budget 48 {BEST}",
    "epochs": "--learning-rate 1e-3 --lr-scheduler-type cosine --warmup-ratio 0.2 --weight-decay 0.1",
    "max steps": "--learning-rate 1e-3 --max-steps 17 --save-steps 3 --logging-steps 3",
    "patience": f"--learning-rate 5e-2 --eval-steps 2 --save-steps 3 {BEST} --early-stopping-patience 4",
    "padded": "--learning-rate 1e-3 --packing off --save-steps 5 --optim sgd",
    "transform": "--learning-rate 1e-3 --save-steps 4 --num-workers 1",
    "fp16": "--learning-rate 1e-3 --precision fp16 --save-steps 4",
    "not finite": "--learning-rate 1e-3 --save-steps 4",
}
#: Drops words. Slow where a test needs time to send a signal.
TRANSFORM = """
import os, time

def drop(text, rng):
    time.sleep(float(os.environ.get("SLOW_S", "0")))
    return " ".join(word for word in text.split() if rng.random() < 0.8) or text
"""
EXIT = {"kill": -9, "tear": -9, "term": 143, "int": 130}

Start = Callable[..., Ended]


@pytest.fixture(scope="session")
def steep(home: Path) -> Path:
    """A model whose first gradients do not fit fp16."""
    return save_tiny_model(home / "steep", initializer_range=1.0)


@pytest.fixture(scope="session")
def transform(home: Path) -> Path:
    path = home / "mine.py"
    path.write_text(TRANSFORM, "utf-8")
    return path


@pytest.fixture(scope="session")
def asked(
    model: Path, steep: Path, rows: Path, poisoned: tuple[Path, Path], transform: Path
) -> Callable[[str, Path], list[str]]:
    """The command line of a variant, for an output folder."""

    def make(variant: str, output: Path) -> list[str]:
        its_model, its_rows = {"not finite": poisoned, "fp16": (steep, rows)}.get(variant, (model, rows))
        more = ["--transform", f"{transform}:drop"] if variant == "transform" else []
        return [
            *("train", str(its_rows), "--model", str(its_model), "--output", str(output)),
            *(*BASE, *VARIANTS[variant].split(), *more),
        ]

    return make


@pytest.fixture(scope="session")
def undisturbed(home: Path, runner: Runner, asked: Callable[[str, Path], list[str]]) -> Callable[[str], Path]:
    """The folder of a variant's run that was left alone."""

    def run(variant: str) -> Path:
        folder = home / "undisturbed" / variant.replace(" ", "-")
        if not folder.exists():
            ended = runner(asked(variant, folder))
            assert ended.code == 0, ended.said
        return folder

    return run


@pytest.fixture
def start(runner: Runner, asked: Callable[[str, Path], list[str]], tmp_path: Path) -> Start:
    """start("steps", plan, "--resume") runs a variant in tmp_path/run."""

    def run(variant: str, plan: str = "", *more: str) -> Ended:
        return runner([*asked(variant, tmp_path / "run"), *more], plan)

    return run


def ended_by(plan: str, ended: Ended) -> None:
    assert ended.code == EXIT[plan.partition(":")[0]], ended.said


# --- ended anywhere -------------------------------------------------------------------------------------------------


def _more(*case: Any) -> Any:
    """A case of `make faults`: others end in the same places."""
    return pytest.param(*case, marks=pytest.mark.faults)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("variant", "plans"),
    [
        ("steps", ["kill:event:step:3"]),  # before the first checkpoint
        _more("steps", ["kill:event:step:9", "kill:event:step:9"]),  # in the middle of an epoch, and again
        _more("steps", ["int:event:step:4"]),  # where an evaluation is due
        ("steps", ["term:event:step:5", "term:event:step:1", "kill:event:step:1", "int:event:resumed:1"]),
        ("steps", ["term:event:step:7", "kill:event:evaluated:2", "tear:write:events.jsonl:12"]),
        ("steps", ["int:event:step:21"]),  # after the last step, before its evaluation
        ("steps", ["kill:event:finished:1"]),
        ("epochs", ["kill:event:step:10", "term:event:step:4"]),  # term: at the end of an epoch
        ("epochs", ["int:event:step:7", "kill:event:evaluated:1"]),  # both are due there
        ("max steps", ["term:event:step:2", "kill:event:step:2"]),  # into the third epoch
        _more("patience", ["kill:event:step:5", "term:event:evaluated:2"]),
        ("patience", ["int:event:step:6", "kill:event:evaluated:2", "kill:event:finished:1"]),
        ("padded", ["kill:event:step:8", "term:event:step:4"]),
        ("transform", ["term:event:step:6", "kill:event:step:6"]),
        _more("fp16", ["kill:event:overflow:1"]),
        ("fp16", ["term:event:overflow:1", "kill:event:step:7"]),
        ("not finite", ["kill:event:skipped:1", "term:event:skipped:1"]),
        _more("not finite", ["int:event:step:9", "kill:event:skipped:1"]),
    ],
)
def test_ended_and_resumed(
    variant: str, plans: list[str], start: Start, undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    for number, plan in enumerate(plans):
        ended_by(plan, start(variant, plan, *(["--resume"] if number else [])))
    ended = start(variant, "", "--resume")
    assert ended.code == 0, ended.said
    assert learned(tmp_path / "run") == learned(undisturbed(variant))
    kinds = [event["kind"] for event in events(tmp_path / "run")]
    assert kinds.count("started") == 1
    assert kinds.count("finished") == 1


def test_the_variants_have_what_they_are_for(undisturbed: Callable[[str], Path]) -> None:
    assert len(events(undisturbed("fp16"), "overflow")) >= 1
    assert learned(undisturbed("fp16"))["steps"] >= 15
    skipped = events(undisturbed("not finite"), "skipped")
    assert [event["what"] for event in skipped] == ["loss"] * 3  # once an epoch
    rows = undisturbed("not finite").parents[1] / "poisoned.jsonl"
    assert [event["rows"] for event in skipped] == [[[str(rows), 32]]] * 3
    assert learned(undisturbed("max steps"))["steps"] == 17
    assert learned(undisturbed("patience"))["steps"] < 21
    # Dropout is on: without it the same run ends elsewhere, or nothing here would show that its masks come back.
    assert json.loads((undisturbed("steps") / "model" / "config.json").read_text())["hidden_dropout_prob"] == 0.1


def test_the_best_checkpoint_is_kept_and_is_the_model(undisturbed: Callable[[str], Path]) -> None:
    folder = undisturbed("patience")
    by_step = {event["step"]: event["metrics"]["loss"] for event in events(folder, "evaluated")}
    best = min(by_step, key=lambda step: by_step[step])
    kept = checkpoints(folder)
    assert len(kept) == 3
    assert best == kept[0]
    weights = load_file(folder / "model" / "model.safetensors")
    saved = load_checkpoint(folder / "checkpoints" / f"step-{best:08d}").state.weights
    assert all(torch.equal(weights[name], saved[name]) for name in weights)
    assert learned(folder)["metrics"]["loss"] == by_step[best]


def test_rotation_keeps_as_many_as_asked(undisturbed: Callable[[str], Path]) -> None:
    assert checkpoints(undisturbed("max steps")) == [15, 17]
    assert checkpoints(undisturbed("epochs")) == [14, 21]


def test_stopped_in_the_middle_of_an_evaluation(
    start: Start, undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    for resume in ([], ["--resume"]):  # on resume the evaluation comes first, and is stopped again
        ended = start("epochs", "term:call:evaluate_rows:1", *resume)
        ended_by("term", ended)
        assert "stopped by a signal after step 7" in ended.said
        assert checkpoints(tmp_path / "run") == [7]
        assert events(tmp_path / "run", "evaluated") == []
    assert start("epochs", "", "--resume").code == 0
    assert learned(tmp_path / "run") == learned(undisturbed("epochs"))


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("wait_s", "passes", "step"), [(0.0, 10, 2), (60.0, 11, 3)])
def test_a_long_step_is_left_undone(
    wait_s: float, passes: int, step: int, model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, here the third one in its last micro-batch but one; the checkpoint is of the step before."""
    options: dict[str, Any] = {"model": model, "max_length": 48, "batch_size": 8, "token_budget": 48, "device": "cpu"}
    options |= {"num_train_epochs": 1, "learning_rate": 3e-3, "logging_steps": 1, "baselines": False}
    brimful.train(rows, output=tmp_path / "whole", **options)
    begun, accumulate = [0], Step.accumulate

    def told_to_stop(self: Step, *given: Any) -> torch.Tensor:
        begun[0] += self._between is not None  # of the comparison of the first batch it is
        if begun[0] == 10:
            signal.raise_signal(signal.SIGINT)
        return accumulate(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr("brimful.engine.training.loop._FINISH_S", wait_s)
        patch.setattr(Step, "accumulate", told_to_stop)
        with pytest.raises(Interrupted, match=f"after step {step};"):
            brimful.train(rows, output=tmp_path / "run", **options)
    assert begun[0] == passes
    brimful.train(rows, output=tmp_path / "run", resume=True, **options)
    assert learned(tmp_path / "run") == learned(tmp_path / "whole")


def test_a_second_ctrl_c_ends_at_once() -> None:
    """Raised in this thread: a signal sent to the process may reach another of its threads first."""
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # one more is not needed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "when", "code"), [(signal.SIGINT, '"started"', 130), _more(signal.SIGTERM, '"kind": "step"', 143)]
)
def test_a_real_process_group_told_to_stop(
    number: int,
    when: str,
    code: int,
    start: Start,
    asked: Callable[[str, Path], list[str]],
    undisturbed: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """As a terminal and a scheduler do it: the workers of a transform get the signal too, while they start or later."""
    process, log = real_process(asked("transform", tmp_path / "run"), tmp_path)
    try:
        wait_for(lambda: when in read(tmp_path / "run" / "events.jsonl"), process)
        os.killpg(process.pid, number)
        assert process.wait(60) == code, log.read_text()
        wait_for(lambda: not alive_in_group(process.pid))
    finally:
        end_group(process)
    assert "Traceback" not in log.read_text()
    said, hint = log.read_text().splitlines()[-2:]
    assert said.startswith("error: stopped by a signal after step ")
    assert hint == "hint: go on with the same command and --resume"
    assert start("transform", "", "--resume").code == 0
    assert learned(tmp_path / "run") == learned(undisturbed("transform"))


@pytest.mark.thorough
def test_workers_end_with_a_killed_run(asked: Callable[[str, Path], list[str]], tmp_path: Path) -> None:
    process, _ = real_process(asked("transform", tmp_path / "run"), tmp_path)
    try:
        wait_for(lambda: '"kind": "step"' in read(tmp_path / "run" / "events.jsonl"), process)
        process.kill()
        process.wait()
        wait_for(lambda: not alive_in_group(process.pid))
    finally:
        end_group(process)


def real_process(words: list[str], folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """The command line as a process group of its own, slow enough to be caught, and the file of what it says."""
    log = folder / "said.txt"
    slowly = os.environ | {"OMP_NUM_THREADS": "1", "SLOW_S": "0.03"}
    with log.open("w") as said:
        command = [sys.executable, "-m", "brimful", *words]
        return subprocess.Popen(command, stdout=said, stderr=said, env=slowly, start_new_session=True), log


def end_group(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None or alive_in_group(process.pid):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(
    happened: Callable[[], bool], process: subprocess.Popen[bytes] | None = None, limit_s: float = 240.0
) -> None:
    until = time.monotonic() + limit_s
    while not happened():
        assert process is None or process.poll() is None, "the process ended first"
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


def alive_in_group(group: int) -> list[int]:
    """Processes of a group that are not zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def read(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else ""


# --- what is damaged ------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.fixture(scope="session")
def killed(home: Path, runner: Runner, asked: Callable[[str, Path], list[str]]) -> Path:
    """A run of "max steps" that was killed after step 15's checkpoint; 12's is there too."""
    folder = home / "killed"
    ended_by("kill", runner(asked("max steps", folder), "kill:event:saving:6"))
    assert checkpoints(folder) == [12, 15]
    shutil.rmtree(folder / "checkpoints" / "step-00000016", ignore_errors=True)
    return folder


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("weights.safetensors", flip, "weights.safetensors is damaged"),
        ("optimizer.safetensors", cut, "optimizer.safetensors is truncated"),
        ("buffers.safetensors", Path.unlink, "buffers.safetensors is missing"),
        ("state.json", flip, "state.json is damaged"),
        ("manifest.json", cut, "manifest.json cannot be used"),
        ("manifest.json", Path.unlink, "step-00000015 is incomplete"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    file: str,
    damage: Callable[[Path], None],
    said: str,
    killed: Path,
    start: Start,
    undisturbed: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    shutil.copytree(killed, tmp_path / "run")
    damage(tmp_path / "run" / "checkpoints" / "step-00000015" / file)
    ended = start("max steps", "", "--resume")
    assert ended.code == 0, ended.said
    assert said in " ".join(ended.said.split())
    assert "going on after step 12" in ended.said
    assert learned(tmp_path / "run") == learned(undisturbed("max steps"))
    assert checkpoints(tmp_path / "run") == [15, 17]


def test_a_damaged_checkpoint_does_not_count_in_rotation(killed: Path, start: Start, tmp_path: Path) -> None:
    """12 is whole, 13 only looks so, 15 is new: of the two to keep, both must be whole."""
    shutil.copytree(killed, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000015")
    ended_by("term", start("max steps", "term:event:resumed:1", "--resume"))
    assert checkpoints(tmp_path / "run") == [12, 13]
    flip(tmp_path / "run" / "checkpoints" / "step-00000013" / "weights.safetensors")
    ended = start("max steps", "kill:event:saving:2", "--resume")
    ended_by("kill", ended)
    assert "going on after step 12" in ended.said
    assert checkpoints(tmp_path / "run") == [12, 13, 15]


def test_all_checkpoints_damaged(
    killed: Path, start: Start, undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(killed, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").glob("step-*/state.json"):
        cut(path)
    ended = start("max steps", "", "--resume")
    assert ended.code == 0, ended.said
    assert "starting from the beginning" in ended.said
    assert ended.said.count("passed over") == 2
    assert learned(tmp_path / "run") == learned(undisturbed("max steps"))


def test_the_best_checkpoint_damaged(undisturbed: Callable[[str], Path], start: Start, tmp_path: Path) -> None:
    shutil.copytree(undisturbed("patience"), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    best = checkpoints(tmp_path / "run")[0]
    flip(tmp_path / "run" / "checkpoints" / f"step-{best:08d}" / "weights.safetensors")
    ended = start("patience", "", "--resume")
    assert ended.code == 0
    assert "the best model is lost, the last one is kept" in ended.said
    [lost] = events(tmp_path / "run", "best_lost")
    assert lost["step"] == best


# --- what a folder may hold -----------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "plan", ["kill:replace:run.json:1", "tear:write:run.json:1", "kill:open:events.jsonl:1", "kill:mkdir:checkpoints:1"]
)
def test_a_folder_that_a_kill_left_at_the_very_beginning(
    plan: str, resume: bool, start: Start, undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    ended_by(plan, start("epochs", plan))
    recorded = (tmp_path / "run" / "run.json").exists()
    assert recorded is not ("run.json" in plan)
    ended = start("epochs", "", *(["--resume"] if resume else []))
    if recorded and not resume:
        assert ended.code == 2
        assert "already holds a run" in ended.said
        return
    assert ended.code == 0, ended.said
    assert ("starting from the beginning" in ended.said) == resume
    assert learned(tmp_path / "run") == learned(undisturbed("epochs"))
    assert not list((tmp_path / "run").glob(".tmp-*"))


@pytest.mark.parametrize("more", [[], ["--save-total-limit", "1"], ["--report-to", "tensorboard"]])
def test_resuming_a_finished_run_changes_nothing(
    more: list[str], start: Start, undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(undisturbed("epochs"), tmp_path / "run")
    before = contents(tmp_path / "run")
    ended = start("epochs", "", "--resume", "--json", *more)
    assert ended.code == 0, ended.said
    assert "had finished" in ended.said
    assert contents(tmp_path / "run") == before
    document = json.loads(ended.said.splitlines()[-1])
    assert document["status"] == "finished"
    assert document["metrics"] == learned(tmp_path / "run")["metrics"]
    assert document["run"] == str(tmp_path / "run")


def test_a_lost_model_is_made_again(start: Start, undisturbed: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(undisturbed("steps"), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    assert start("steps", "", "--resume").code == 0
    assert learned(tmp_path / "run") == learned(undisturbed("steps"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--seed", "43"], "--seed was 42, is 43"),
        (["--batch-size", "4"], "--batch-size was 8, is 4"),
        (["--learning-rate", "1e-4", "--seed", "43"], "--learning-rate was 0.001, is 0.0001; --seed was 42, is 43"),
        (["--max-length", "40"], "--max-length was 48, is 40"),
        (["--precision", "bf16"], "--precision was auto, is bf16"),
        (["--eval-split", "0.2"], "--eval-split was 0.1, is 0.2"),
    ],
)
def test_changed_options_are_refused(more: list[str], said: str, killed: Path, start: Start, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path / "run")
    before = contents(tmp_path / "run")
    ended = start("max steps", "", "--resume", *more)
    assert ended.code == 2
    assert f"cannot be resumed: {said}" in ended.said
    assert contents(tmp_path / "run") == before


def test_other_places_and_manners_are_not_changes(
    killed: Path, runner: Runner, model: Path, rows: Path, undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    """The same rows under another name, another limit, a record without hashes that earlier versions did not take:
    what is learned is the same."""
    shutil.copytree(killed, tmp_path / "moved")
    record = json.loads((tmp_path / "moved" / "run.json").read_text("utf-8"))
    del record["data"]["sha256"]["model's tokenizer"]
    (tmp_path / "moved" / "run.json").write_text(json.dumps(record), "utf-8")
    shutil.copy(rows, tmp_path / "copy.jsonl")
    words = ["train", str(tmp_path / "copy.jsonl"), "--model", str(model), "--output", str(tmp_path / "moved")]
    ended = runner([*words, *BASE, *VARIANTS["max steps"].split(), "--resume", "--save-total-limit", "1", "--json"])
    assert ended.code == 0, ended.said
    assert learned(tmp_path / "moved") == learned(undisturbed("max steps"))
    assert checkpoints(tmp_path / "moved") == [17]


@pytest.mark.sampled
@pytest.mark.parametrize("what", ["data", "labels", "transform", "model's config.json", "weights"])
def test_changed_files_are_refused(what: str, runner: Runner, model: Path, transform: Path, tmp_path: Path) -> None:
    base, rows, mine, output = (tmp_path / name for name in ("base", "rows.jsonl", "mine.py", "run"))
    shutil.copytree(model, base)
    shutil.copy(transform, mine)
    content = single_label_rows(60)
    write_rows(rows, content)
    words = [
        *("train", str(rows), "--model", str(base), "--output", str(output), *BASE, "--save-steps", "2"),
        *("--transform", f"{mine}:drop", "--num-workers", "1"),
    ]
    ended_by("kill", runner(words, "kill:event:step:4"))
    if what == "data":
        content[17]["text"] += " w9"
        write_rows(rows, content)
    elif what == "labels":
        write_rows(rows, [row | {"label": row["label"].replace("high", "a")} for row in content])
    elif what == "transform":
        mine.write_text(mine.read_text().replace("0.8", "0.7"))
    elif what == "weights":
        shutil.rmtree(base)
        save_tiny_model(base, hidden_size=32)
        shutil.copy(model / "config.json", base / "config.json")
    else:
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {"hidden_dropout_prob": 0.2}))
    before = contents(output)
    ended = runner([*words, "--resume"])
    assert ended.code == 2, ended.said
    said = {"data": "the data have changed", "labels": "the data have changed", "transform": "file of --transform has"}
    assert said.get(what, base.name if what == "weights" else what) in ended.said
    assert contents(output) == before


def test_a_model_of_another_shape_is_refused(killed: Path, model: Path, rows: Path, tmp_path: Path) -> None:
    """Whatever the record says: weights that do not fit are named, not half loaded."""
    base = save_tiny_model(tmp_path / "base", hidden_size=32)
    shutil.copytree(killed, tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    record = json.loads(path.read_text("utf-8"))
    record["options"]["model"] = str(base)
    record["data"]["sha256"]["model's config.json"] = sha256(base / "config.json")
    path.write_text(json.dumps(record), "utf-8")
    options = {"max_length": 48, "batch_size": 8, "learning_rate": 1e-3, "max_steps": 17, "save_steps": 3}
    with pytest.raises(OutputError, match="of the model is not what it is in the checkpoint"):
        brimful.train(rows, model=base, output=tmp_path / "run", resume=True, logging_steps=3, **options)


@pytest.mark.parametrize("changed", ["tokenizer.json", "added_tokens.json"])
def test_a_changed_tokenizer_is_refused(changed: str, killed: Path, model: Path, rows: Path, tmp_path: Path) -> None:
    """One with other numbers of two words, and one with a file more."""
    base = shutil.copytree(model, tmp_path / "base")
    shutil.copytree(killed, tmp_path / "run")
    if changed == "tokenizer.json":
        tokenizer = json.loads((base / changed).read_text("utf-8"))
        words = tokenizer["model"]["vocab"]
        words["w5"], words["w6"] = words["w6"], words["w5"]
        (base / changed).write_text(json.dumps(tokenizer), "utf-8")
    else:
        (base / changed).write_text("{}")
    path = tmp_path / "run" / "run.json"
    record = json.loads(path.read_text("utf-8"))
    record["options"]["model"] = str(base)
    path.write_text(json.dumps(record), "utf-8")
    options = {"max_length": 48, "batch_size": 8, "learning_rate": 1e-3, "max_steps": 17, "save_steps": 3}
    with pytest.raises(OutputError, match="cannot be resumed: the model's tokenizer has changed"):
        brimful.train(rows, model=base, output=tmp_path / "run", resume=True, logging_steps=3, **options)


@pytest.mark.slow
def test_a_changed_file_of_an_adapter_is_refused(model: Path, rows: Path, tmp_path: Path) -> None:
    """Also where the record has no hash of it: what is trained is no matter of rounding."""
    pytest.importorskip("peft")
    adapter, record = tmp_path / "adapter_config.json", tmp_path / "run" / "run.json"
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["query", "value"]}
    adapter.write_text(json.dumps(settings))
    options: dict[str, Any] = {"model": model, "output": tmp_path / "run", "batch_size": 8, "baselines": False}
    options |= {"peft": str(adapter), "lr_scheduler_type": "constant", "device": "cpu", "max_length": 48}
    brimful.train(rows, max_steps=1, **options)
    adapter.write_text(json.dumps(settings | {"lora_alpha": 64}))
    before = contents(tmp_path / "run")
    with pytest.raises(OutputError, match="cannot be resumed: the file of --peft has changed"):
        brimful.train(rows, max_steps=2, resume=True, **options)
    assert contents(tmp_path / "run") == before
    earlier = json.loads(record.read_text("utf-8"))
    del earlier["data"]["sha256"]["file of --peft"]
    record.write_text(json.dumps(earlier), "utf-8")
    with pytest.raises(OutputError, match=r"trained_weights was lora r=4 lora_alpha=8 .*, is lora r=4 lora_alpha=64 "):
        brimful.train(rows, max_steps=2, resume=True, **options)


def test_a_damaged_record_is_refused(killed: Path, start: Start, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path / "run")
    cut(tmp_path / "run" / "run.json")
    ended = start("max steps", "", "--resume")
    assert ended.code == 2
    assert "run.json is not the record of a run" in ended.said


@pytest.mark.parametrize("name", ["notes.txt", "model"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_other_things_is_refused(name: str, resume: bool, start: Start, tmp_path: Path) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    ended = start("epochs", "", *(["--resume"] if resume else []))
    assert ended.code == 2
    assert f"is not empty: it holds {name}" in ended.said
    assert [path.name for path in (tmp_path / "run").iterdir()] == [name]


# --- two processes --------------------------------------------------------------------------------------------------


def test_two_processes_in_one_folder(start: Start, killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path / "run")
    before = contents(tmp_path / "run")
    with RunFolder(tmp_path / "empty"):
        pass
    assert not (tmp_path / "empty").exists()  # a start that failed leaves nothing
    with RunFolder(tmp_path / "run"):
        ended = start("max steps", "", "--resume")
    assert ended.code == 2
    assert "another process is writing into" in ended.said
    assert contents(tmp_path / "run") == before


def test_a_run_that_another_process_made_meanwhile_is_not_overwritten(
    model: Path, rows: Path, start: Start, tmp_path: Path
) -> None:
    """It was not there when this one looked first, and it is finished, and its lock free, when this one begins."""

    class Slow(Callbacks):
        def data(self, report: object) -> None:
            assert start("epochs").code == 0

    with pytest.raises(OutputError, match="already holds a run"):
        brimful.train(rows, model=model, output=tmp_path / "run", callbacks=Slow())
    assert learned(tmp_path / "run")["status"] == "finished"


def test_a_longer_run_that_was_killed_at_once_goes_on(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patience had ended the shorter one; the record says by then how long the run is to be."""
    options: dict[str, Any] = {
        "model": model, "output": tmp_path / "run", "max_length": 48, "batch_size": 8, "learning_rate": 1e-6,
        "eval_steps": 2, "metric_for_best_model": "accuracy", "early_stopping_patience": 1, "baselines": False,
        "device": "cpu", "lr_scheduler_type": "constant", "token_budget": 96,
    }  # fmt: skip
    assert brimful.train(rows, num_train_epochs=2, **options).steps == 4

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_train", killed)
        with pytest.raises(KeyboardInterrupt):
            brimful.train(rows, num_train_epochs=4, resume=True, **options)
    assert brimful.train(rows, num_train_epochs=4, resume=True, **options).steps == 6
