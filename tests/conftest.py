"""Everything offline, quiet, on one thread, with a cache folder of its own, and to be stopped by Ctrl-C."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false", "TORCH_CPP_LOG_LEVEL": "ERROR"}
# Models are tiny: two threads wait for one another, ten times as long on a busy machine; in processes of tests, too.
os.environ["OMP_NUM_THREADS"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells leave it to what they start in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
_cache = tempfile.TemporaryDirectory(prefix="brimful-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name

import torch  # noqa: E402  (what is imported reads the environment)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU, step by step
import transformers  # noqa: E402
from hypothesis import HealthCheck, Phase, settings  # noqa: E402

from forked_ranks import Forked  # noqa: E402

transformers.logging.set_verbosity_error()

#: Of so many cases of a test that is marked sampled, one runs, and of so many tests that are marked slow.
_ONE_OF, _ONE_OF_SLOW = 12, 3

# Equal examples in every run: what is found once is found always. `--hypothesis-profile=search` looks further.
settings.register_profile(
    "brimful", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=50
)
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=1000)
settings.register_profile("mutants", settings.get_profile("brimful"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("brimful")

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    import interpreter

    interpreter.make_quick()


@pytest.fixture(scope="module", autouse=True)
def _imported_is_no_garbage() -> None:
    """Leave what has been imported by now out of all collections: each would look at a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """A fork that is stopped, or learns on, would hold pipes that others wait for the end of."""
    yield
    Forked.end_all()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run all cases, as make thorough does")


def pytest_configure(config: pytest.Config) -> None:
    """Decide whether all cases run: where --thorough, files, tests or words of their names were given, or those that
    failed run again. Workers of xdist are given the same words, and decide alike."""
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.option.keyword
    config.option.thorough = bool(config.option.thorough or named or getattr(config.option, "lf", False))
    turn = os.environ.setdefault("BRIMFUL_TESTS_TURN", str(_turn(config.rootpath)))  # which workers inherit
    config.option.turn = int(turn)


def _turn(root: Path) -> int:
    """Return which part of the slow tests runs at this commit; the first one where git does not know it."""
    with contextlib.suppress(OSError):
        asked = ["git", "-C", str(root), "rev-parse", "HEAD"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return int(done.stdout, 16) % _ONE_OF_SLOW
    return 0


def pytest_report_header(config: pytest.Config) -> str:
    if config.option.thorough:
        return ""
    slow = f"part {config.option.turn + 1} of {_ONE_OF_SLOW} of slow tests, by commit"
    return f"1 in {_ONE_OF} of sampled cases, {slow}: make thorough runs all"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked thorough, and all but one of `_ONE_OF` cases of those marked sampled, counted from their
    last: later ones tend to ask for more. Of those marked slow one part runs, by commit."""
    if config.option.thorough:
        return
    seen: Counter[str] = Counter()
    left_out, num_slow = set[str](), 0
    for item in reversed(items):
        test = item.nodeid.partition("[")[0]
        if any(map(item.get_closest_marker, ("gpu", "faults", "scripts", "browser"))):
            continue
        if item.get_closest_marker("thorough") or (item.get_closest_marker("sampled") and seen[test] % _ONE_OF):
            left_out.add(item.nodeid)
        elif item.get_closest_marker("slow"):
            num_slow += 1
            if num_slow % _ONE_OF_SLOW != config.option.turn:
                left_out.add(item.nodeid)
        seen[test] += 1
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_unconfigure() -> None:
    gc.unfreeze()
    _cache.cleanup()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """disk("8m") is a real, empty disk of that size."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("needs to be allowed to mount")
        return folder

    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", "-l", str(folder)], check=True)
