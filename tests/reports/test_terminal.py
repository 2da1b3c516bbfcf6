"""Terminal output: in a pipe, on a terminal of 80 columns, and while a live bar is drawn."""

from __future__ import annotations

import dataclasses
import os
import re
import sys

import pytest

from brimful.core.callbacks import Progress, StepsDone
from brimful.core.records import Lever, Recipe
from brimful.reports.eta import Pace
from brimful.reports.terminal import Terminal

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
PROGRESS = Progress(
    step=7,
    num_steps=1200,
    epoch=0.1,
    loss=0.51234,
    learning_rate=1.5e-5,
    grad_norm=1.0,
    tokens_per_s=123456.0,
    samples_per_s=3.0,
    left_s=3723.0,
)
LONG = (
    "sequences of similar length together, since there is no variable-length kernel for this precision on this device"
)
RECIPE = Recipe(
    device="CPU",
    levers=(
        Lever(name="packing", value="packed", arithmetic="exact", reason=LONG),
        Lever(name="token_budget", value="960, 1024", arithmetic="exact", reason="from the data's lengths"),
        Lever(name="precision", value="bf16", arithmetic="rounding", reason="asked for"),
    ),
)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """One of 80 columns."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [_COLOUR.sub("", line).split("\r")[-1].rstrip() for line in capsys.readouterr().err.splitlines()]


def test_a_recipe_in_a_pipe_is_a_line_a_lever(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().recipe(RECIPE)
    shown = lines(capsys)
    assert shown[1:5] == [
        "How it runs  on CPU",
        f"  packing       packed     exact     {LONG}",
        "  token_budget  960, 1024  exact     from the data's lengths",
        "  precision     bf16       rounding  asked for",
    ]
    assert [line.split(":")[0] for line in shown[5:7]] == ["  exact", "  rounding"]


def test_a_recipe_on_a_terminal_fits_it(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.recipe(RECIPE)
    terminal.close()
    shown = lines(capsys)
    assert shown[2:6] == [
        "  packing       packed     exact",
        "                sequences of similar length together, since there is no",
        "                variable-length kernel for this precision on this device",
        "  token_budget  960, 1024  exact",
    ]
    assert max(map(len, shown)) <= 80


def test_warnings_and_evaluations_stand_above_the_bar(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.progress(PROGRESS)
    terminal.warning("batch 7 skipped: its loss is not finite; samples: " + "a/long/name/of/a/file.jsonl row 17, " * 3)
    terminal.evaluated(7, {"loss": 1.0, "accuracy": 0.5, "f1_macro": 0.25, "f1_weighted": 0.25, "matthews": 0.125})
    terminal.progress(dataclasses.replace(PROGRESS, step=8))
    terminal.close()
    shown = lines(capsys)
    assert any(line.startswith("warning: batch 7 skipped: its loss is not finite") for line in shown)
    assert any(
        line.startswith("evaluation after step 7: loss 1.0000, accuracy 0.5000, f1_macro 0.2500") for line in shown
    )
    assert any("step 8 of 1,200  loss 0.5123  lr 1.5e-05  123,456 tokens/s  1 h 02 min left" in line for line in shown)
    assert max(map(len, shown)) <= 80


def test_rows_are_counted_and_the_count_goes_when_all_are_done(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.stage("tokenising 20,000 texts")
    terminal.count(8192, 20_000)
    assert any("8,192 of 20,000" in line for line in lines(capsys))
    terminal.count(20_000, 20_000)
    terminal.note("done")
    assert lines(capsys)[-1] == "  done"


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_a_pass_says_its_rate_and_what_is_left(capsys: pytest.CaptureFixture[str], seconds: list[float]) -> None:
    terminal = Terminal()
    terminal.stage("classifying")
    for done in range(0, 5000, 100):  # 100 rows a second, after a resume at 400,000
        seconds[0] = done / 100
        terminal.count(400_000 + done, 406_000)
    shown = lines(capsys)
    assert shown[1] == "401,000 of 406,000 rows  100 rows/s  50.0 s left"
    assert shown[4] == "404,000 of 406,000 rows  100 rows/s  20.0 s left"


def test_steps_are_told_of_where_no_line_is_logged(capsys: pytest.CaptureFixture[str], seconds: list[float]) -> None:
    terminal = Terminal()
    terminal.recipe(RECIPE)
    capsys.readouterr()
    for second in range(0, 45, 5):
        seconds[0] = float(second)
        loss, rate = (0.5, 2.0) if second >= 20 else (None, 0.04)
        terminal.stepped(StepsDone(done=second, num_steps=1200, loss=loss, steps_per_s=rate, left_s=3723.0))
    assert lines(capsys) == [
        "step 10 of 1,200  25 s a step  1 h 02 min left",
        "step 20 of 1,200  loss 0.5000  2 steps/s  1 h 02 min left",
        "step 30 of 1,200  loss 0.5000  2 steps/s  1 h 02 min left",
        "step 40 of 1,200  loss 0.5000  2 steps/s  1 h 02 min left",
    ]


def test_the_last_step_is_told_of_however_soon(capsys: pytest.CaptureFixture[str], seconds: list[float]) -> None:
    terminal = Terminal()
    terminal.recipe(RECIPE)
    capsys.readouterr()
    for step in range(1, 5):
        seconds[0] = 10.0 + step
        terminal.progress(dataclasses.replace(PROGRESS, step=step, num_steps=4, loss=0.5 / step))
    assert [line.partition("  lr")[0] for line in lines(capsys)] == [
        "step 1 of 4  loss 0.5000",
        "step 4 of 4  loss 0.1250",
    ]


def test_a_stream_of_unknown_length_says_what_it_can(capsys: pytest.CaptureFixture[str], seconds: list[float]) -> None:
    terminal = Terminal()
    terminal.stage("classifying")
    for second in range(0, 45, 5):
        seconds[0] = float(second)
        terminal.count(1000 * second, None, second / 400 if second < 30 else None)
    shown = lines(capsys)
    assert shown[1] == "10,000 rows  2.5 %  1,000 rows/s  6 min 30 s left"
    assert shown[3] == "30,000 rows  1,000 rows/s"


def test_a_rate_forgets_a_slow_start() -> None:
    pace = Pace()
    for second in range(200):
        pace.mark(float(second), max(0, second - 100) * 50, None)
        assert pace.rows_per_s is None or pace.rows_per_s > 0
    assert pace.rows_per_s == pytest.approx(50)
    assert pace.left_s is None


def test_a_bar_of_unknown_length_is_drawn(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.stage("classifying")
    terminal.count(8192, None)
    terminal.count(16384, None, 0.25)
    terminal.close()
    shown = lines(capsys)
    assert any("8,192 rows" in line for line in shown)
    assert any("16,384 rows  25.0 %" in line for line in shown)


def test_progress_in_a_pipe_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str], seconds: list[float]) -> None:
    terminal = Terminal()
    for step in range(100):
        seconds[0] = float(step)
        terminal.progress(dataclasses.replace(PROGRESS, step=step))
    shown = lines(capsys)
    assert [line.split()[1] for line in shown] == [str(step) for step in range(10, 100, 10)]


def test_text_of_the_user_is_never_markup_nor_control(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.note("[red]label[/red] \x1b[2J :smile: \u202e")
    terminal.warning("[bold]\x9b31m")
    terminal.stage("[/dim]\x07")
    assert lines(capsys) == [
        "  [red]label[/red] \\x1b[2J :smile: \\u202e",
        "warning: [bold]\\x9b31m",
        "[/dim]\\x07",
    ]


def test_wide_characters_keep_columns_in_line(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = {"p50": 3, "p95": 5, "p100": 9}
    Terminal().data({"rows": 3, "labels": {"标签": 1, "four": 2}, "token_lengths": lengths})
    assert lines(capsys)[2:4] == ["  标签          1", "  four          2"]


def test_many_labels_are_cut_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    report = {
        "rows": 1000,
        "eval_rows": None,
        "labels": {f"label {i}": i for i in range(35)},
        "token_lengths": {"p50": 3, "p95": 5, "p100": 9},
        "duplicate_texts": 1,
        "empty_rows": 2,
    }
    Terminal().data(report)
    shown = lines(capsys)
    assert shown[1] == "Data  1,000 rows to train on, none to evaluate on"
    assert "  label 19         19" in shown
    assert "  and 15 more labels" in shown
    assert shown[-2:] == ["  2 rows without text were left out", "  1 training row repeats another's text"]


def test_a_reader_of_stderr_that_leaves_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        terminal = Terminal()
        os.close(reading)
        for number in range(3):
            terminal.warning(f"warning {number}")
        print("and a word of others", file=stderr, flush=True)


def test_a_long_name_of_a_column_keeps_its_quotation_marks(capsys: pytest.CaptureFixture[str]) -> None:
    terminal, name = Terminal(), "How satisfied are you with the product, all things considered, from 1 to 10?"
    inputs = {"text_column": name, "pair_column": None, "label_columns": ("label",)}
    terminal.data({"rows": 3, "inputs": inputs, "token_lengths": {"p50": 3, "p95": 5, "p100": 9}})
    terminal.recipe(Recipe(device="CPU", levers=()))
    (line,) = [line for line in lines(capsys) if line.startswith("Learns")]
    assert line.count("'") == 4
    assert line.endswith("'")
