"""Shared by the benchmarks: a raw log that a later call continues, a budget of seconds, a process per measurement.

A script is called again until nothing is left. What its raw log has is not measured again, and what a killed call wrote
by half is dropped. Each measurement is the script itself with `--one PLAN`, in a process group that ends with it; what
it found are the lines that begin with `ROW `.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import turns
from provenance import commit_here, host_here

_POLL_S = 0.05
#: Of what a process said, in its error.
_LAST_LINES, _LAST_CHARACTERS = 16, 3000


class Nvml:
    """The first GPU that may be used, as the driver sees it, read from here to disturb nothing that is measured."""

    def __init__(self, *, wanted: bool = True) -> None:
        self._handle: Any = None
        self.driver: str | None = None
        self.uuid: str | None = None
        self.gpu = "CPU"
        if not wanted:
            return
        with contextlib.suppress(Exception):  # no driver, or none that answers: all is unknown
            import pynvml

            pynvml.nvmlInit()
            first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
            by = pynvml.nvmlDeviceGetHandleByIndex if first.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
            self._handle = by(int(first) if first.isdigit() else first)
            self.driver = str(pynvml.nvmlSystemGetDriverVersion())
            self.gpu = str(pynvml.nvmlDeviceGetName(self._handle))
            self.uuid = str(pynvml.nvmlDeviceGetUUID(self._handle))

    def used_bytes(self) -> int | None:
        """All that is used on the GPU."""
        if self._handle is None:
            return None
        import pynvml

        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)


class Session:
    """One call of a script: its raw log, its clock, and what has been measured by it and by earlier ones.

    arguments: as of `parser_of`, and what else the script knows. gpu: False to leave the GPU alone.
    """

    def __init__(self, arguments: argparse.Namespace, script: str, *, gpu: bool = True) -> None:
        self.arguments, self._script = arguments, script
        self.call = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
        self.nvml = Nvml(wanted=gpu)
        self.host, self.commit = host_here(self.nvml.uuid), commit_here()
        self._writing, self._stopped = threading.Lock(), threading.Event()
        self._environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        if not gpu:
            self._environment["CUDA_VISIBLE_DEVICES"] = ""
        arguments.output.mkdir(parents=True, exist_ok=True)
        self.log: Path = arguments.output / "raw.jsonl"
        self.records: list[dict[str, Any]] = []
        if self.log.exists():
            text = self.log.read_text("utf-8")
            whole = text[: text.rfind("\n") + 1]
            self.records = [json.loads(line) for line in whole.splitlines()]
            if whole != text:  # a call was killed as it wrote: what it wrote is measured again
                self.log.write_text(whole, "utf-8")
        self.deadline = None if arguments.budget_s is None else time.monotonic() + arguments.budget_s

    def known(self, kind: str, *, here: bool = False, **wanted: Any) -> list[dict[str, Any]]:
        """Records of this kind, GPU and mode with these values, oldest first. With --again only this call's.

        here: of this very machine alone.
        """
        arguments = self.arguments
        wanted |= {"host": self.host} if here else {}
        wanted |= {"kind": kind, "gpu": self.nvml.gpu, "smoke": arguments.smoke}
        if arguments.again:
            wanted["call"] = self.call
        return [r for r in self.records if all(r.get(key) == value for key, value in wanted.items())]

    def fits(self, seconds: float) -> bool:
        """True if this much time is left."""
        return self.deadline is None or time.monotonic() + seconds <= self.deadline

    def last_wall_s(self, kind: str, **wanted: Any) -> float | None:
        """Seconds that a measurement took when it last went well, None if it never did."""
        wanted |= {"kind": kind, "ok": True}
        found = [r["wall_s"] for r in self.records if all(r.get(key) == value for key, value in wanted.items())]
        return float(found[-1]) if found else None

    def add(self, **record: Any) -> dict[str, Any]:
        """Appends to the raw log."""
        facts = {"gpu": self.nvml.gpu, "host": self.host, "commit": self.commit, "smoke": self.arguments.smoke}
        record = {"call": self.call, **facts, **record}
        with self._writing, self.log.open("a", encoding="utf-8") as log:
            self.records.append(record)
            log.write(json.dumps(record) + "\n")
        return record

    @contextlib.contextmanager
    def lanes(self, number: int) -> Iterator[ThreadPoolExecutor]:
        """Threads that wait for so many processes at a time. An interruption ends these, and begins no more."""
        with ThreadPoolExecutor(number) as pool:
            try:
                yield pool
            except BaseException:
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
                raise

    def child(self, plan: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Runs one plan in a process of its own: its `found` rows, `wall_s`, `nvml_bytes`, `ok`; `error` with its last
        words if not, and whether it was `timed_out`. `nvml_bytes` is unknown where processes share the GPU."""
        arguments = self.arguments
        if self.deadline is not None:
            timeout_s = min(timeout_s, self.deadline - time.monotonic())
        command = [sys.executable, self._script, "--one", json.dumps(plan), "--output", str(arguments.output)]
        command += ["--inputs", str(arguments.inputs)]
        command += ["--tokenizer", arguments.tokenizer] if arguments.tokenizer else []
        before = peak = self.nvml.used_bytes()
        began, error, timed_out = time.monotonic(), None, False
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            environment = os.environ | self._environment
            process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)
            try:
                while process.poll() is None:
                    time.sleep(_POLL_S)
                    if peak is not None:
                        peak = max(peak, self.nvml.used_bytes() or 0)
                    if time.monotonic() - began > timeout_s or self._stopped.is_set():
                        error, timed_out = f"not done after {timeout_s:.0f} s", True
                        break
            finally:  # its own group: loader workers and compilers end with it
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            out.seek(0)
            err.seek(0)
            found = [json.loads(line[4:]) for line in out if line.startswith("ROW ")]
            said = _without_folders("\n".join(err.read().strip().splitlines()[-_LAST_LINES:])[-_LAST_CHARACTERS:])
            if error is not None:
                error += f": {said}" if said else ""
            elif process.returncode != 0 or not found:
                error = said or f"exit code {process.returncode}"
        return {
            "found": found,
            "ok": error is None,
            "error": error,
            "timed_out": timed_out,
            "wall_s": round(time.monotonic() - began, 1),
            "nvml_bytes": None if peak is None or before is None or turns.shared() else peak - before,
        }


def _without_folders(said: str) -> str:
    """A message without the folders that packages and this checkout have on this machine."""
    for folder in (sysconfig.get_path("purelib"), str(Path(__file__).parents[1])):
        said = said.replace(f"{folder}/", "")
    return said


def parser_of(description: str, works: Iterable[str], *, timeout_s: float) -> argparse.ArgumentParser:
    """The options that all benchmarks have. works: the names of all rows, those that are measured unless told."""
    names = list(works)
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder of raw.jsonl, results.json, table.md")
    add("--rows", nargs="+", default=names, metavar="WORK", help=f"of {', '.join(names)}")
    add("--budget-s", type=float, help="begin nothing that would not be done after so many seconds")
    add("--tokenizer", help="folder of a BERT tokenizer; default: that of the packaged MiniLM-L6")
    add("--timeout-s", type=float, default=timeout_s, help="most seconds of one process")
    add("--inputs", type=Path, help="folder for models and texts; default: in the temporary folder")
    add("--again", action="store_true", help="measure what is in the raw log already, too")
    add("--dry-run", action="store_true", help="print what would be measured, and expected seconds")
    add("--smoke", action="store_true", help="tiny shapes, short runs: to test this script on a CPU")
    add("--one", help=argparse.SUPPRESS)
    return parser


def default_inputs(name: str, *, smoke: bool) -> Path:
    """Default folder of a benchmark's models and texts."""
    return Path(tempfile.gettempdir()) / f"brimful-benchmark-{name}{'-smoke' if smoke else ''}"


def script_of(benchmark: str) -> Any:
    """The module of another benchmark's script, whose models and rows a benchmark takes."""
    file = Path(__file__).parent / benchmark / "run.py"
    spec = importlib.util.spec_from_file_location(f"{benchmark}_run", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def print_rows(found: Iterable[dict[str, Any]]) -> None:
    """Print found rows for `Session.child` to read, each as soon as it is known."""
    for row in found:
        print("ROW " + json.dumps(row), flush=True)


def versions_here(*packages: str) -> dict[str, str | None]:
    """Of what decides speed, and of these packages where they are installed."""
    from importlib import metadata

    import torch

    import brimful
    from brimful.hardware.probe import probe

    versions = {**probe().versions, "brimful": brimful.__version__, "cuda": torch.version.cuda}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def write_texts(folder: Path, texts: dict[str, str]) -> None:
    """Writes files whole, or not at all."""
    for name, text in texts.items():
        temporary = folder / f"{name}.tmp"
        temporary.write_text(text + "\n", "utf-8")
        temporary.replace(folder / name)


def say(text: str) -> None:
    """To whoever watches: stdout is for tables."""
    print(text, file=sys.stderr, flush=True)
