"""Write the page of a run, of an evaluation, of a classification or of a bench, from its folder alone."""

from __future__ import annotations

import os
from pathlib import Path

from brimful.core import atomic_files
from brimful.core.bench import read_bench
from brimful.core.classification import Classification
from brimful.core.errors import DataError, OptionError, printable
from brimful.core.evaluation import Evaluation
from brimful.core.manifest import MANIFEST, MANIFEST_SUFFIX, read_manifest
from brimful.core.record_kinds import kind_of
from brimful.core.records import from_json
from brimful.reports.bench_page import bench_page
from brimful.reports.classification_page import classification_page
from brimful.reports.evaluation_page import evaluation_page
from brimful.reports.run_page import run_page
from brimful.reports.run_record import read_record
from brimful.reports.svg import check_charts


def report(run: str | Path, output: str | Path | None = None) -> Path:
    """Write a page about a run, finished or under way, an evaluation, a classification or a bench; return its path.
    Loads no torch.

    run: folder of a run, of a bench or of an evaluation, or its JSON file; results of classify, a folder or a file; or
    what `--json` of evaluate, of classify or of bench printed.
    output: the page; default report.html in the folder, in one of results _report.html, which readers of it pass over.
    Raises: BrimfulError.
    """
    check_charts()
    given = Path(run).expanduser()
    results = _results(given)
    if results is None and not given.exists():
        read_record(given)  # says so
    name = "_report.html" if results is not None and given.is_dir() else "report.html"
    path = (given if given.is_dir() else given.parent) / name if output is None else Path(output)
    check_page(path)
    kind = kind_of(given) if given.is_file() and results is None else None
    if kind == "classification":
        results = from_json(Classification, given.read_text("utf-8"))
    bench = read_bench(given) if given.is_dir() or kind == "bench" else None
    if results is not None:
        page = classification_page(results)
    elif bench is not None:
        page = bench_page(bench)
    else:
        record = read_record(given)
        page = evaluation_page(record) if isinstance(record, Evaluation) else run_page(record)
    atomic_files.write_bytes(path, page.encode())
    return path


def _results(given: Path) -> Classification | None:
    """The record of results of classify, a folder or a file with a manifest; None for anything else.

    Raises: DataError for results that are not finished.
    """
    if given.is_dir() or given.name == MANIFEST:
        found = read_manifest(given / MANIFEST if given.is_dir() else given)
    else:
        parts = given.with_name(given.name + ".parts")  # while it is not finished
        found = read_manifest(given.with_name(given.name + MANIFEST_SUFFIX)) or read_manifest(parts / MANIFEST)
    if found is None:
        return None
    if found.record is None:
        hint = "finish it with the same command and --resume"
        raise DataError("the classification has not finished", file=str(given), hint=hint)
    return found.record


#: Bytes from the beginning of a page, and what is in them if it is one of ours.
_HEAD, _OURS = 4096, b'name="generator" content="brimful"'


def check_page(path: Path, name: str = "--output", *, made: Path | None = None) -> None:
    """Check that a page can be written, and replaces none but an earlier page of ours.

    name: the option that gave it. made: a folder that will be made before it is written. Raises: OptionError.
    """
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise OptionError(f"{name} {printable(path)} is no name of a page", hint="let it end in .html")
    is_made = made is not None and not made.exists() and path.parent.absolute() == made.absolute()
    if not is_made and not os.access(path.parent, os.W_OK | os.X_OK):
        raise OptionError(
            f"{name} {printable(path)}: {printable(path.parent)} is no folder that this user may write into",
            hint="give another folder, or make it first",
        )
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as page:
            if _OURS not in page.read(_HEAD):
                raise OptionError(
                    f"{name} {printable(path)} is there already, and is no page of brimful", hint="give another name"
                )
