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
from brimful.core.records import Run
from brimful.reports.bench_page import bench_page
from brimful.reports.classification_page import classification_page
from brimful.reports.comparison_page import comparison_page
from brimful.reports.evaluation_page import evaluation_page
from brimful.reports.run_page import run_page
from brimful.reports.run_record import RunReport, read_record
from classifications import RECORD
from reports.test_run_page import record, write_run

pytestmark = pytest.mark.browser
#: Names that the browser has on PATH, where the variable CHROMIUM does not name it.
_NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (360, 1100)
#: A page around pages, each in a frame of one width, that says how wide their contents are.
FRAMES = """<!doctype html>{frames}<script>addEventListener("load", () => {{
document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {{
const page = frame.contentDocument, rows = [...page.querySelectorAll(".rows tbody tr")];
const boxes = [...page.querySelectorAll(".scroll:has(> .rows)")];
return [page.documentElement.scrollWidth, page.querySelectorAll("svg").length,
Math.max(0, ...boxes.map(box => box.scrollWidth - box.clientWidth)),
Math.max(0, ...rows.map(row => row.offsetHeight))];
}}));}});</script>"""


def test_pages_fit_a_phone_and_a_desk(tmp_path: Path) -> None:
    run, evaluation = with_texts(5)
    mistakes = tuple(replace(each, label="L" * 120) for each in evaluation.mistakes)
    evaluation = replace(evaluation, mistakes=mistakes)
    report = read_record(write_run(tmp_path / "run", run, evaluation))
    assert isinstance(report, RunReport)
    write_run(tmp_path / "another-run", replace(run, options={"seed": 1}), evaluation)
    both = comparison_page(compare(tmp_path / "run", tmp_path / "another-run"))
    pages = {"run": run_page(report), "evaluation": evaluation_page(evaluation), "rows": classification_page(RECORD)}
    pages["bench"] = bench_page(guide_bench("<b>a model</b>"))
    pages["comparison"] = both
    frames = ""
    for name, page in pages.items():
        (tmp_path / f"{name}.html").write_text(page, "utf-8")
        frames += "".join(f'<iframe src="{name}.html" width="{width}" style="border:0"></iframe>' for width in WIDTHS)
    (tmp_path / "frames.html").write_text(FRAMES.format(frames=frames), "utf-8")
    done = browse(tmp_path, "--virtual-time-budget=5000", "--dump-dom", (tmp_path / "frames.html").as_uri())
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    found = json.loads(title[1])
    assert [width for width, *_ in found] == [*WIDTHS] * len(pages)
    assert all(charts for _, charts, *_ in found)
    assert not any(hidden for *_, hidden, _ in found), "a long label hides the columns after it"
    tallest = [height for *_, height in found]
    assert 0 < max(tallest) < 400, "texts stand in a narrow column"
    assert not console(done)


@pytest.mark.parametrize(("number", "most"), [(5, 6), (1000, 9)])
def test_pages_print_without_gaps(number: int, most: int, tmp_path: Path) -> None:
    run, evaluation = with_texts(number)
    report = read_record(write_run(tmp_path / "run", run, evaluation))
    assert isinstance(report, RunReport)
    (tmp_path / "page.html").write_text(run_page(report), "utf-8")
    paper = tmp_path / "page.pdf"
    done = browse(tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={paper}", (tmp_path / "page.html").as_uri())
    sheets = len(re.findall(rb"/Type /Page\b", paper.read_bytes()))
    assert 1 < sheets <= most
    assert not console(done)


def with_texts(number: int) -> tuple[Run, Evaluation]:
    """A run with so many labels, and mistakes in texts of some lines."""
    run, evaluation = record(number)
    mistakes = tuple(replace(each, text="a long text " * 25) for each in evaluation.mistakes)
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
