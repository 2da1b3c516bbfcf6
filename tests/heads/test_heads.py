"""A sample of the walk through all heads of transformers; `make heads` walks them all."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from run_heads import TABLE, reason
from tiny_heads import MODEL_TYPES
from walk import walk

#: At least one type of each outcome, and of each way to run packed.
SAMPLE = (*("bart", "canine", "fnet", "gpt2", "gpt_oss", "layoutlmv2", "modernbert", "mpnet", "perceiver", "t5"),)


def table() -> dict[str, tuple[str, str]]:
    """Verdict and reason of each model type in the reference."""
    lines = (line.split(" | ") for line in TABLE.read_text("utf-8").splitlines() if line.startswith("| "))
    cells = [[cell.strip("| ") for cell in line] for line in lines]
    return {model_type: (verdict, why) for model_type, verdict, why in cells[1:]}


@pytest.mark.sampled
@pytest.mark.parametrize("model_type", [name for name in SAMPLE if name in MODEL_TYPES])
@pytest.mark.filterwarnings("ignore")
def test_a_head_is_what_the_table_says(model_type: str, tmp_path: Path) -> None:
    found = walk(model_type, tmp_path)
    assert not found.failure
    assert (found.verdict, reason(dataclasses.asdict(found))) == table()[model_type]


def test_the_table_has_every_type() -> None:
    missing = set(MODEL_TYPES) - set(table())
    assert not missing, "make heads writes the table"
    assert set(SAMPLE) <= set(table())
