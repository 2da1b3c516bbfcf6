"""Imports that are put off: what stands in for a function, and that every other import is the plain one."""

from __future__ import annotations

import builtins
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from brimful.models.hub.put_off import _Distributions, found_by_name, put_off

_STAND_INS = """
import json, sys
from brimful.models.hub.put_off import put_off
with put_off():
    import transformers.generation.candidate_generator
    from transformers.loss import loss_for_object_detection as detection
    from transformers.utils import is_scipy_available, is_sklearn_available
    spared = [name in sys.modules for name in ("sklearn", "scipy")]
    found = [is_scipy_available(), is_sklearn_available()]
import scipy.optimize, sklearn.metrics
cost = [[4, 1], [2, 3]]
plain = scipy.optimize.linear_sum_assignment(cost)[1].tolist()
stand_in = detection.linear_sum_assignment
same = stand_in is scipy.optimize.linear_sum_assignment
print(json.dumps([spared, found, stand_in(cost)[1].tolist() == plain, same]))
"""

#: What others import within.
_OTHERS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from brimful.models.hub.put_off import put_off
with put_off():
    import sklearn.metrics
    from sklearn.metrics.pairwise import cosine_similarity
    from scipy.optimize import linear_sum_assignment
    import scipy.optimize.elementwise
    import importlib.util, scipy.stats, transformers.neighbour as neighbour
    specs = [importlib.util.find_spec(name) is not None for name in ("scipy.optimize", "sklearn.metrics.pairwise")]
import scipy.optimize
same = linear_sum_assignment is scipy.optimize.linear_sum_assignment is neighbour.linear_sum_assignment
print(json.dumps([specs, same, callable(sklearn.metrics.f1_score), callable(neighbour.minimize)]))
"""


def _said_by(code: str, *words: str) -> list[object]:
    done = subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True, text=True)
    return list(json.loads(done.stdout))


@pytest.mark.slow
def test_functions_are_imported_when_they_are_called() -> None:
    spared, found, equal, same = _said_by(_STAND_INS)
    assert spared == [False] * 2
    assert found == [True, True]  # transformers says what is installed
    assert equal
    assert not same


@pytest.mark.slow
def test_others_import_the_modules_themselves(tmp_path: Path) -> None:
    """Submodules, stars and other names among them, transformers' own once a module is there, or where it asks more."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").touch()
    neighbour = "from scipy.optimize import *\nfrom scipy.optimize import linear_sum_assignment, minimize\n"
    (tmp_path / "transformers" / "neighbour.py").write_text(neighbour, "utf-8")
    assert _said_by(_OTHERS, str(tmp_path)) == [[True, True], True, True, True]


def test_both_end_with_their_block() -> None:
    plain, find_all = builtins.__import__, importlib.metadata.packages_distributions
    with put_off(), found_by_name():
        assert builtins.__import__ is not plain
        assert isinstance(importlib.metadata.packages_distributions(), _Distributions)
    with pytest.raises(KeyError), put_off(), found_by_name():
        {}["an error"]
    assert builtins.__import__ is plain
    assert importlib.metadata.packages_distributions is find_all


def test_distributions_are_found_by_name_and_else_among_all() -> None:
    looked = []

    def find_all() -> dict[str, list[str]]:
        looked.append(True)
        return dict(importlib.metadata.packages_distributions())

    plain, found = importlib.metadata.packages_distributions(), _Distributions(find_all)
    assert found["torch"] == plain["torch"]
    assert not looked
    assert found["PIL"] == plain["PIL"]
    assert found.get("flash_attn", []) == plain.get("flash_attn", [])
    assert found.get("no_such_package") is None
    assert "" not in found
    assert "pytest-xdist" not in found
    assert dict(found) == dict(plain)
    assert len(looked) == 1
