"""--quiet: warnings and errors on stderr, and nothing else; stdout is as it is without."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

import pytest

from brimful.cli.flags import COMMANDS, parse_options
from brimful.core.evaluation import Evaluation
from brimful.core.records import LabelSpace, Recipe
from brimful.reports.terminal import Quiet, Terminal

#: Commands that talk while they work; `compare` has nothing to say but its table.
TALKING = [each for each in COMMANDS if each.name != "compare"]


@pytest.mark.parametrize("command", TALKING, ids=lambda each: each.name)
def test_every_command_has_it(command: Any) -> None:
    assert get_type_hints(command.options)["quiet"] is bool
    needed = {"model": "m", "output": "o", "data": "d", "run": "r"}
    asked = {field.name for field in dataclasses.fields(command.options) if field.default is dataclasses.MISSING}
    words = [word for name in asked - {"data", "run"} for word in (f"--{name}", needed[name])]
    positionals = [needed[name] for name in command.positionals if name in asked]
    words = [word for word in words if word.removeprefix("--") not in command.positionals]
    if command.name in ("classify", "evaluate"):
        words, positionals = [], ["m", "d"]
    assert parse_options(command.name, [*positionals, *words, "--quiet"]).quiet is True


def test_warnings_alone_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Quiet()
    terminal.stage("reading")
    terminal.note("task: single_label")
    terminal.recipe(Recipe(device="CPU", levers=()))
    terminal.count(1, 2)
    terminal.evaluated(3, {"loss": 1.0})
    terminal.text("a table")
    terminal.warning("a row was lost")
    lengths = {"p50": 1, "p95": 2, "p100": 3}
    terminal.data({"rows": 3, "token_lengths": lengths, "empty_rows": 1, "truncated_rows": 0})
    space = LabelSpace(task="single_label", names=("a", "b"))
    fields: dict[str, Any] = {"model": "m", "data": "d", "command": "", "labels": space, "num_rows": 3, "metrics": {}}
    terminal.evaluation(Evaluation(**fields, intervals=None, findings=("it learned nothing",)))
    terminal.finished(None, "run")  # type: ignore[arg-type]  # of the run nothing is said
    terminal.close()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "warning: a row was lost",
        "  1 row without text was left out",
        "warning: it learned nothing",
    ]


def test_nothing_of_a_terminal_is_forgotten() -> None:
    """Whatever a terminal says is said here, or silenced on purpose."""
    said = {name for name in vars(Terminal) if not name.startswith("_")}
    assert said - set(vars(Quiet)) == {"warning", "close", "evaluation"}
