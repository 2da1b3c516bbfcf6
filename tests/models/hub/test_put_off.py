"""Imports that are put off: what stands in for a function, and that every later import is the plain one."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

from brimful.models.hub.put_off import _Distributions

_STAND_INS = """
import json, sys
from brimful.models.hub.put_off import put_off
with put_off():
    from scipy.optimize import linear_sum_assignment
    from sklearn.metrics import roc_curve
    spared = [name in sys.modules for name in ("sklearn", "scipy")]
    import transformers.generation.candidate_generator
    from transformers.loss import loss_for_object_detection as detection
    from transformers.utils import is_scipy_available, is_sklearn_available
    spared += [name in sys.modules for name in ("sklearn", "scipy")]
    found = [is_scipy_available(), is_sklearn_available()]
import scipy.optimize, sklearn.metrics
cost = [[4, 1], [2, 3]]
asked = [detection.linear_sum_assignment(cost)[1].tolist(), linear_sum_assignment(cost)[1].tolist()]
asked.append([each.tolist() for each in roc_curve([0, 1], [0.1, 0.9])])
plain = scipy.optimize.linear_sum_assignment(cost)[1].tolist()
asked_plain = [plain, plain, [each.tolist() for each in sklearn.metrics.roc_curve([0, 1], [0.1, 0.9])]]
print(json.dumps([spared, found, str(asked) == str(asked_plain), sklearn.metrics.roc_curve is roc_curve]))
"""

_ANOTHER_NAME = """
import json, sys
from brimful.models.hub.put_off import put_off
with put_off():
    import sklearn.metrics as early
    from sklearn.metrics import accuracy_score
    import scipy.stats  # takes more of scipy.optimize than is put off
import sklearn.metrics
print(json.dumps([accuracy_score is sklearn.metrics.accuracy_score, early.f1_score is sklearn.metrics.f1_score]))
"""


def _said_by(code: str) -> list[object]:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return list(json.loads(done.stdout))


def test_functions_are_imported_when_they_are_called() -> None:
    spared, found, equal, same = _said_by(_STAND_INS)
    assert spared == [False] * 4
    assert found == [True, True]  # transformers says what is installed
    assert equal
    assert not same


def test_another_name_imports_the_module_itself() -> None:
    assert _said_by(_ANOTHER_NAME) == [True, True]


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
    assert dict(found) == dict(plain)
    assert len(looked) == 1


def test_nothing_is_put_off_that_is_imported_already() -> None:
    code = """
import sklearn.metrics, scipy.optimize, importlib.metadata, json, sys
find_all = importlib.metadata.packages_distributions
before = [sys.modules[name] for name in ("sklearn.metrics", "scipy.optimize")]
from brimful.models.hub.put_off import put_off
with put_off():
    within = [sys.modules[name] for name in ("sklearn.metrics", "scipy.optimize")]
print(json.dumps([within == before, importlib.metadata.packages_distributions is find_all]))
"""
    assert _said_by(code) == [True, True]
