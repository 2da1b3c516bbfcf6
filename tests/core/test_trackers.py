"""Names of trackers: what is asked for, what is refused, and in which words."""

from __future__ import annotations

import importlib.util

import pytest

from brimful.core.errors import OptionError
from brimful.core.options.report import ReportOptions
from brimful.core.options.train import TrainOptions
from brimful.core.trackers import TRACKERS, check_trackers, tracker_names


def test_names_are_taken_apart_once_each() -> None:
    assert tracker_names("none") == ()
    assert tracker_names("tensorboard") == ("tensorboard",)
    assert tracker_names("wandb, mlflow,wandb") == ("wandb", "mlflow")


@pytest.mark.parametrize(
    ("given", "hint"),
    [("wanb", "did you mean wandb"), ("none,wandb", "alone"), ("", "none, or one"), ("wandb,,mlflow", "none, or one")],
)
def test_other_names_are_refused_with_the_options(given: str, hint: str) -> None:
    for make in (
        lambda: TrainOptions(data="d.csv", model="m", output="out", report_to=given),
        lambda: ReportOptions(run="run", report_to=given),
    ):
        with pytest.raises(OptionError, match="there is no tracker") as caught:
            make()
        assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("name", TRACKERS)
def test_one_that_is_not_installed_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    check_trackers("none")
    with pytest.raises(OptionError, match=f"--report-to {name} needs {name}, which is not installed") as caught:
        check_trackers(name)
    assert caught.value.hint == f"pip install 'brimful[{name}]'"
