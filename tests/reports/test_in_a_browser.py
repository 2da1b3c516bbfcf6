"""Pages in headless Chromium (make browser): none is wider than a phone or says anything; in the dark they are dark."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benches import guide_bench
from brimful.comparison.compare import compare
from brimful.core.evaluation import Evaluation
from brimful.core.records import LabelSpace, Run, to_json
from brimful.reports.bench_page import bench_page
from brimful.reports.classification_page import classification_page
from brimful.reports.comparison_page import comparison_page
from brimful.reports.evaluation_page import evaluation_page
from brimful.reports.run_page import run_page
from brimful.reports.run_record import RunReport, read_record
from classifications import changed
from reports.test_run_page import names_of, record, write_run

pytestmark = pytest.mark.browser
#: Names that the browser has on PATH, where the variable CHROMIUM does not name it.
_NAMES = ("chromium", "chromium-browser", "google-chrome")
#: A phone, a desk, and a sheet of A4 within its margins: the page there has the rules of print.
WIDTHS = {"phone": 360, "desk": 1100, "print": 672}
#: Sheets that each page may take, with 5 labels and with 1,000; a drawing stands on one sheet as a whole.
SHEETS = {"run": (6, 9), "evaluation": (4, 7), "rows": (3, 4), "bench": (8, 8), "runs": (2, 2), "benches": (6, 6)}
#: A page around pages, each in a frame of one width, that says how wide their contents are.
FRAMES = """<!doctype html>{frames}<script>addEventListener("load", () => {{
document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {{
const page = frame.contentDocument, rows = [...page.querySelectorAll(".rows tbody tr")];
const boxes = [...page.querySelectorAll(".scroll:has(> .rows)")];
const look = frame.contentWindow.getComputedStyle(page.body);
return {{name: frame.name, paper: look.backgroundColor, ink: look.color,
width: page.documentElement.scrollWidth, charts: page.querySelectorAll("svg").length,
hidden: Math.max(0, ...boxes.map(box => box.scrollWidth - box.clientWidth)),
tallest: Math.max(0, ...rows.map(row => row.offsetHeight)),
strangers: page.querySelectorAll("script:not(#record), img, iframe, h1 b").length}};
}}));}});</script>"""


@pytest.mark.parametrize("number", [5, 1000])
def test_pages_fit_a_phone_a_desk_and_paper(number: int, tmp_path: Path) -> None:
    pages, frames = pages_of(tmp_path, number, label="L" * 120) | pages_of_long_words(tmp_path / ("f" * 120)), ""
    for name, page in pages.items():
        for medium, width in WIDTHS.items():
            file = tmp_path / f"{name}-{medium}.html"
            shown = page.replace("@media screen", "@media speech").replace("@media print", "@media screen")
            file.write_text(shown if medium == "print" else page, "utf-8")
            frames += f'<iframe src="{file.name}" name="{name} {medium}" width="{width}" style="border:0"></iframe>'
    (tmp_path / "frames.html").write_text(FRAMES.format(frames=frames), "utf-8")
    found = frames_in(tmp_path)
    expected = {f"{name} {medium}": width for name in pages for medium, width in WIDTHS.items()}
    assert {each["name"]: each["width"] for each in found} == expected, "a page is wider than its medium"
    assert all(each["charts"] for each in found)
    assert not any(each["hidden"] for each in found), "a long label hides the columns after it"
    assert not any(each["strangers"] for each in found), "markup of a label became an element"
    assert 0 < max(each["tallest"] for each in found) < 400, "texts stand in a narrow column"
    assert all(luminance(each["paper"]) == 1 and contrast(each) > 10 for each in found)
    if number == 5:
        found = frames_in(tmp_path, "--force-dark-mode")  # as who prefers dark pages has them
        assert all((luminance(each["paper"]) < 0.02) == (not each["name"].endswith("print")) for each in found)
        assert all(contrast(each) > 10 for each in found)


@pytest.mark.parametrize("number", [5, 1000])
def test_pages_print_without_gaps(number: int, tmp_path: Path) -> None:
    pages = pages_of(tmp_path, number)
    taken = {}
    for name, page in pages.items():
        (tmp_path / f"{name}.html").write_text(page, "utf-8")
        paper = tmp_path / f"{name}.pdf"
        link = (tmp_path / f"{name}.html").as_uri()
        done = browse(tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={paper}", link)
        taken[name] = len(re.findall(rb"/Type /Page\b", paper.read_bytes()))
        assert not console(done)
    most = {name: sheets[number > 5] for name, sheets in SHEETS.items()}
    assert taken.keys() == most.keys()
    assert all(1 < taken[name] <= most[name] for name in most), taken


def pages_of(folder: Path, number: int, label: str = "a label") -> dict[str, str]:
    """A page of every kind by its name, with so many labels, one with markup; label: the last one."""
    run, evaluation = with_texts(number, label)
    report = read_record(write_run(folder / "run", run, evaluation))
    assert isinstance(report, RunReport)
    write_run(folder / "another-run", replace(run, options={"seed": 1}), evaluation)
    bench = guide_bench("<b>a model</b>")
    for name in ("bench", "another-bench"):
        (folder / name).mkdir()
        (folder / name / "results.json").write_text(to_json(bench), "utf-8")
    names = (*names_of(number)[:-1], label)
    given = {"labels": {name: 1000 - i for i, name in enumerate(names)}}
    return {
        "run": run_page(report),
        "evaluation": evaluation_page(evaluation),
        "rows": classification_page(changed(labels=LabelSpace(task="single_label", names=names), counts=given)),
        "bench": bench_page(bench),
        "runs": comparison_page(compare(folder / "run", folder / "another-run")),
        "benches": comparison_page(compare(folder / "bench", folder / "another-bench")),
    }


def pages_of_long_words(folder: Path) -> dict[str, str]:
    """Pages of labels, and of folders, that no line of a table has room for."""
    folder.mkdir()
    pages = {}
    for number in (12, 20):
        run, evaluation = record(number)
        long = {name: f"{number}{'L' * 120}" for number, name in enumerate(names_of(number))}
        confusion = tuple(replace(e, truth=long[e.truth], label=long[e.label]) for e in evaluation.confusion)
        by_label = tuple(replace(each, name=long[each.name]) for each in evaluation.by_label)
        evaluation = replace(evaluation, confusion=confusion, by_label=by_label)
        report = read_record(write_run(folder / f"run{number}", run, evaluation))
        assert isinstance(report, RunReport)
        pages[f"{number} long labels"] = run_page(report)
    runs = (folder / "run12", folder / "run20")
    return pages | {"long folders": comparison_page(compare(*runs)), "eight": comparison_page(compare(*(4 * runs)))}


def with_texts(number: int, label: str) -> tuple[Run, Evaluation]:
    """A run with so many labels, and mistakes in texts of some lines, whose answer is `label`."""
    run, evaluation = record(number)
    mistakes = tuple(replace(each, text="a long text " * 25, label=label) for each in evaluation.mistakes)
    return run, replace(evaluation, mistakes=mistakes)


def frames_in(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Facts about the pages in frames.html, on whose console is nothing."""
    done = browse(folder, *words, "--virtual-time-budget=5000", "--dump-dom", (folder / "frames.html").as_uri())
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    assert not console(done)
    found: list[dict[str, Any]] = json.loads(title[1])
    return found


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)`, as WCAG has it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(frame: dict[str, Any]) -> float:
    """Contrast of a page's text, from 1 to 21."""
    low, high = sorted(luminance(frame[name]) for name in ("paper", "ink"))
    return (high + 0.05) / (low + 0.05)


def browse(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    found = os.environ.get("CHROMIUM") or next(filter(shutil.which, _NAMES), None)
    assert found is not None, "there is no Chromium on PATH: apt install chromium, or CHROMIUM=/path/to/chrome"
    command = [
        found, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
        "--hide-scrollbars", "--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}", *words,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def console(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines that pages said on the browser's console."""
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]
