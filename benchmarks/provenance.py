"""Commit, host and GPU of a measurement: what every line of a raw log carries."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]


def commit_here() -> str | None:
    """Return the checkout's commit, `+` behind it where files differ from it; None outside a repository.

    BRIMFUL_COMMIT says it where the repository's own folder did not come along.
    """
    if told := os.environ.get("BRIMFUL_COMMIT"):
        return told
    try:
        commit = _git("rev-parse", "--short=7", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks/**/*.py")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(_ROOT), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def host_here(gpu_uuid: str | None = None) -> dict[str, Any]:
    """Return the machine's CPU, cores, kernel, and a short id: the same machine with the same GPU has the same."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    facts = {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "kernel": platform.release()}
    return {"id": hashlib.sha256(repr((platform.node(), gpu_uuid, facts)).encode()).hexdigest()[:8], **facts}
