"""Libraries that are loaded beside Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_BESIDE = """
import os, sys, threading
from pathlib import Path
from brimful.hardware.driver import load_library
found = []
thread = threading.Thread(target=lambda: found.append(load_library(Path(sys.argv[1]))))
thread.start()
os.close(os.open(sys.argv[1], os.O_WRONLY))
thread.join()
sys.exit(found != [False])
"""


def test_python_runs_while_a_library_is_loaded(tmp_path: Path) -> None:
    """A pipe is opened by the loader once Python opens its other end; it is no library."""
    pipe = tmp_path / "pipe.so"
    os.mkfifo(pipe)
    assert subprocess.run([sys.executable, "-c", _BESIDE, str(pipe)], check=False, timeout=60).returncode == 0
