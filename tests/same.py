"""Comparison of answers with those of transformers' pipeline."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from brimful.tasks.answers import Form
from brimful.tasks.zero_shot import ZeroShotForm

#: Largest difference of a score from the pipeline's, in fp32.
SCORE = 1e-5


def same_objects(found: Any, expected: Any) -> None:
    """The same lists, dictionaries, order of keys and texts; numbers within SCORE, relative where they are above 1."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same_objects(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=SCORE, abs=SCORE)
    else:
        assert found == expected


def types_of(form: Form, num_outputs: int = 0) -> pa.Schema:
    """Columns that a form's answers have, whatever the rows. num_outputs: of a regression."""
    label, score, raw = pa.large_string(), pa.float64(), pa.list_(pa.float32())
    if form.numeric:
        columns = {"score": score if num_outputs == 1 else pa.list_(score)}
    else:
        columns = {
            "label": pa.list_(label) if form.listed else label,
            "score": pa.list_(score) if form.listed else score,
        }
    if form.top_k is not None:
        columns["scores"] = pa.list_(pa.struct({"label": label, "score": score}))
    if form.logits:
        columns["logits"] = pa.list_(raw) if isinstance(form, ZeroShotForm) else raw
    return pa.schema(columns)
