"""Pages in headless Chromium, where there is one: nothing is wider than a phone, and nothing is said on the console."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from brimful.reports.classification_page import classification_page
from brimful.reports.evaluation_page import evaluation_page
from brimful.reports.run_page import run_page
from brimful.reports.run_record import RunReport, read_record
from classifications import RECORD
from reports.test_run_page import record, write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (360, 1100)
#: A page around pages, each in a frame of one width, that says how wide their contents are.
FRAMES = """<!doctype html>{frames}<script>addEventListener("load", () => {{
document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {{
const page = frame.contentDocument; return [page.documentElement.scrollWidth, page.querySelectorAll("svg").length];
}}));}});</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_pages_fit_a_phone_and_a_desk(tmp_path: Path) -> None:
    run, evaluation = record(5)
    report = read_record(write_run(tmp_path / "run", run, evaluation))
    assert isinstance(report, RunReport)
    pages = {"run": run_page(report), "evaluation": evaluation_page(evaluation), "rows": classification_page(RECORD)}
    frames = ""
    for name, page in pages.items():
        (tmp_path / f"{name}.html").write_text(page, "utf-8")
        frames += "".join(f'<iframe src="{name}.html" width="{width}" style="border:0"></iframe>' for width in WIDTHS)
    (tmp_path / "frames.html").write_text(FRAMES.format(frames=frames), "utf-8")
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
        "--hide-scrollbars",
        "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000",
        "--dump-dom", (tmp_path / "frames.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    found = json.loads(title[1])
    assert [width for width, _ in found] == [*WIDTHS] * 3
    assert all(charts for _, charts in found)
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
