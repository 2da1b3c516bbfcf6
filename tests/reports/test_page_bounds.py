"""Bounds of pages in bytes: with many labels of long names, whatever these are made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brimful.core.classification import Classification
from brimful.core.evaluation import Evaluation
from brimful.core.records import LabelSpace
from brimful.reports.classification_page import classification_page
from brimful.reports.evaluation_page import evaluation_page
from brimful.reports.page_bounds import fitting_record, fitting_rows
from brimful.reports.run_page import run_page
from brimful.reports.run_record import RunReport, read_record
from classifications import changed
from pages import Page
from reports import test_run_page
from reports.test_run_page import record, write_run

NUMBER, MOST = 1000, 1_500_000
#: Names as long as a sentence, of what HTML writes in five bytes and JSON in six, and of letters of four bytes each.
NAMES = {"sentence": "a name as long as a sentence " * 3, "markup": "&<" * 400, "letters": "\N{GRINNING FACE}" * 600}


@pytest.fixture(scope="module", params=NAMES)
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunReport, Evaluation]:
    """A run and its evaluation, of 1,000 labels that differ in their first words."""
    names = tuple(f"{i} {NAMES[request.param]}" for i in range(NUMBER))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_run_page, "names_of", lambda number: names[:number])
        run, evaluation = record(NUMBER)
    report = read_record(write_run(tmp_path_factory.mktemp("bounds") / "run", run, evaluation))
    assert isinstance(report, RunReport)
    return report, evaluation


@pytest.mark.thorough
def test_the_page_of_a_run(records: tuple[RunReport, Evaluation]) -> None:
    page = checked(run_page(records[0]))
    cut = page.record["shortened"]
    for kept, lost in (
        (page.record["run"]["labels"]["names"], cut.get("run.labels.names", 0)),
        (page.record["run"]["data"]["labels"], cut.get("run.data.labels", 0)),
        (page.record["evaluation"]["by_label"], cut.get("evaluation.by_label", 0)),
    ):
        assert 0 < len(kept) == NUMBER - lost
    assert sum(cut.values()) > 0
    assert len(page.record["steps"]) == 40
    assert "all of it is in run.json and evaluation.json" in page.text
    assert ("those of all are in run.json" in page.text) == (len(records[0].run.labels.names[0]) > 200)


@pytest.mark.slow
@pytest.mark.sampled
def test_the_page_of_an_evaluation(records: tuple[RunReport, Evaluation]) -> None:
    page = checked(evaluation_page(records[1]))
    assert page.record["shortened"]
    assert "all of it is in evaluation.json" in page.text


@pytest.mark.slow
@pytest.mark.sampled
def test_the_page_of_a_classification(records: tuple[RunReport, Evaluation]) -> None:
    names = records[0].run.labels.names
    page = checked(classification_page(classified(names)))
    assert ("those of all are in the manifest" in page.text) == (len(names[0]) > 200)


def test_the_page_of_a_classification_by_many_labels() -> None:
    page = checked(classification_page(classified(tuple(f"label {i}" for i in range(30_000)))))
    assert page.record["shortened"]["counts.labels"] > 0
    assert "Numbers are of 1,000; those of all are in the manifest." in page.text


def classified(names: tuple[str, ...]) -> Classification:
    counts: Any = {"labels": dict.fromkeys(names, 10)}
    return changed(labels=LabelSpace(task="single_label", names=names), counts=counts)


def checked(document: str) -> Page:
    assert len(document.encode()) < MOST
    page = Page(document)
    page.check()
    return page


def test_a_record_that_fits_is_whole(tmp_path: Path) -> None:
    run, evaluation = record(5)
    report = read_record(write_run(tmp_path / "run", replace(run, command="brimful train " * 1000), evaluation))
    found, is_whole = fitting_record(report)
    assert is_whole
    assert "shortened" not in found
    assert found["run"]["command"] == "brimful train " * 1000


def test_rows_are_as_many_as_fit() -> None:
    rows = [(f"{i}", "1") for i in range(100)]
    assert fitting_rows(rows, 1_000_000) == rows
    assert 0 < len(few := fitting_rows(rows, 2000)) < 20
    assert few == rows[: len(few)]
    assert len(fitting_rows([("n" * 1000, "1")], 2000)[0][0]) == 200
