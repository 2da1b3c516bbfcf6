"""A package in wandb's place, for what the real one does only where a network or a service fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Told by a file beside it what to do: fail, hang or leave at a call; it writes down each call.
_SOURCE = """
import json, pathlib, sys, time

HERE = pathlib.Path(__file__).parent


def _call(name, **said):
    with open(HERE / "calls.jsonl", "a") as calls:
        calls.write(json.dumps({"call": name, **said}) + "\\n")
    print("chatter on stdout")
    plan = json.loads((HERE / "plan.json").read_text())
    if plan.get("at") == name:
        if plan["does"] == "fail":
            raise RuntimeError("the service\\nis away")
        if plan["does"] == "leave":
            sys.exit(0)
        time.sleep(3600)


class Run:
    id, url = "id-1", "https://tracker.invalid/id-1"
    summary = {}

    def define_metric(self, *names, **axis):
        pass

    def log(self, values):
        _call("log", values=values)

    def finish(self, exit_code):
        _call("finish", exit_code=exit_code, summary=Run.summary)


def init(**asked):
    _call("init", asked=asked)
    return Run()
"""


class Pretended:
    """The package in `folder`, which is on sys.path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "wandb"
        self._folder.mkdir()
        (self._folder / "__init__.py").write_text(_SOURCE, "utf-8")
        self.plan()

    def plan(self, does: str = "", at: str = "") -> None:
        """Have it fail, hang or leave at its next call of that name."""
        (self._folder / "plan.json").write_text(json.dumps({"does": does, "at": at}), "utf-8")

    def calls(self, name: str) -> list[dict[str, Any]]:
        """Calls of that name so far."""
        file = self._folder / "calls.jsonl"
        lines = file.read_text("utf-8").splitlines() if file.exists() else []
        return [call for line in lines if (call := json.loads(line))["call"] == name]

    def steps(self, value: str) -> list[int]:
        """Steps at which a value was logged."""
        return [call["values"]["step"] for call in self.calls("log") if value in call["values"]]
