"""When torch's libraries are loaded before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from brimful.engine.process_start import _has_choice


def _write(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "has_choice"),
    [
        ((), False),
        (("libcuda.so.1", "libnvidia-ml.so.1"), False),  # the driver's folder, which containers name
        (("libcuda.so.1", "libnvJitLink.so.13"), True),  # a toolkit's
        (("libtorch_cpu.so",), True),  # another torch
    ],
)
def test_a_choice_of_libraries_is_left_to_torch(
    names: tuple[str, ...], has_choice: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = _write(tmp_path / "site" / "torch" / "lib", "libtorch_cpu.so", "libtorch_python.so").parent
    _write(tmp_path / "site" / "nvidia" / "cu13" / "lib", "libnvJitLink.so.13")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path / 'missing'}:{_write(tmp_path / 'named', *names)}")
    assert _has_choice(torch) is has_choice


_ONCE = """
import json, sys
from brimful.models.hub.model_names import import_model_names
import_model_names()
from transformers import models
from transformers.utils import import_utils
folders = import_utils.create_import_structure_from_path.cache_info().misses
own = import_utils.define_import_structure(models.__file__)
again = import_utils.create_import_structure_from_path.cache_info().misses - folders
plain = import_utils._LazyModule(models.__name__, models.__file__, own)
skip = {"__file__", "__spec__", "__path__", "__builtins__", "__cached__", "__doc__", "__loader__", "_objects"}
kinds = {name: value for name, value in vars(plain).items() if name not in skip}
wrong = [name for name, value in kinds.items() if not _same(vars(models).get(name), value)]
print(json.dumps([folders, again, wrong, "torch" in sys.modules, models.bert.BertConfig.model_type]))
"""


@pytest.mark.thorough
def test_names_of_models_are_found_once_and_are_the_same() -> None:
    """The package of models is what it is without us: every class is where it was, and wants what it wanted."""
    code = "def _same(a, b): return (set(a) == set(b) if isinstance(b, list) else a == b)\n" + _ONCE
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    folders, again, wrong, loads_torch, kind = json.loads(done.stdout)
    assert folders <= again
    assert not wrong
    assert not loads_torch
    assert kind == "bert"
