"""Pages in headless Chromium (make browser): nothing is wider than a phone, and nothing is said on the console."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

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
return {{name: frame.name, width: page.documentElement.scrollWidth, charts: page.querySelectorAll("svg").length,
hidden: Math.max(0, ...boxes.map(box => box.scrollWidth - box.clientWidth)),
tallest: Math.max(0, ...rows.map(row => row.offsetHeight)),
strangers: page.querySelectorAll("script:not(#record), img, iframe, h1 b").length}};
}}));}});</script>"""


@pytest.mark.parametrize("number", [5, 1000])
def test_pages_fit_a_phone_a_desk_and_paper(number: int, tmp_path: Path) -> None:
    pages, frames = pages_of(tmp_path, number, label="L" * 120), ""
    for name, page in pages.items():
        for medium, width in WIDTHS.items():
            file = tmp_path / f"{name}-{medium}.html"
            shown = page.replace("@media screen", "@media speech").replace("@media print", "@media screen")
            file.write_text(shown if medium == "print" else page, "utf-8")
            frames += f'<iframe src="{file.name}" name="{name} {medium}" width="{width}" style="border:0"></iframe>'
    (tmp_path / "frames.html").write_text(FRAMES.format(frames=frames), "utf-8")
    done = browse(tmp_path, "--virtual-time-budget=5000", "--dump-dom", (tmp_path / "frames.html").as_uri())
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    found = json.loads(title[1])
    expected = {f"{name} {medium}": width for name in pages for medium, width in WIDTHS.items()}
    assert {each["name"]: each["width"] for each in found} == expected, "a page is wider than its medium"
    assert all(each["charts"] for each in found)
    assert not any(each["hidden"] for each in found), "a long label hides the columns after it"
    assert not any(each["strangers"] for each in found), "markup of a label became an element"
    assert 0 < max(each["tallest"] for each in found) < 400, "texts stand in a narrow column"
    assert not console(done)


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


def with_texts(number: int, label: str) -> tuple[Run, Evaluation]:
    """A run with so many labels, and mistakes in texts of some lines, whose answer is `label`."""
    run, evaluation = record(number)
    mistakes = tuple(replace(each, text="a long text " * 25, label=label) for each in evaluation.mistakes)
    return run, replace(evaluation, mistakes=mistakes)


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
