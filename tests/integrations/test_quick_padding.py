"""The quicker collator beside transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

from brimful.integrations.quick_padding import QuickPadding, quick_padding
from tiny_files import save_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    save_tokenizer(tmp_path)
    return PreTrainedTokenizerFast.from_pretrained(tmp_path)


def rows_of(label: Any, *, types: bool = True, masks: bool = True) -> list[dict[str, Any]]:
    made = []
    for length in np.random.default_rng(0).integers(1, 20, size=7).tolist():
        row: dict[str, Any] = {"input_ids": list(range(5, 5 + length))}
        row |= {"token_type_ids": [1] * length} if types else {}
        row |= {"attention_mask": [1] * length} if masks else {}
        made.append(row | label(length))
    return made


CASES: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "classes": (rows_of(lambda n: {"labels": n % 3}), True),
    "by another name": (rows_of(lambda n: {"label": n % 3}, types=False), True),
    "numbers": (rows_of(lambda n: {"label_ids": n / 3}), True),
    "multi-label": (rows_of(lambda n: {"labels": [0.0, float(n % 2)]}), True),
    "without labels": (rows_of(lambda n: {}), True),
    "without masks": (rows_of(lambda n: {"labels": 1}, masks=False), False),
    "arrays": ([{k: np.array(v) for k, v in row.items()} for row in rows_of(lambda n: {"labels": 1})], False),
    "another column": (rows_of(lambda n: {"labels": 1, "weights": 0.5}), False),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("side", "multiple"), [("right", None), ("right", 8), ("left", 8)])
def test_it_makes_the_same_batch(case: str, side: str, multiple: int | None, tokenizer: Any) -> None:
    tokenizer.padding_side = side
    plain = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)
    rows, is_quick = CASES[case]
    quick = quick_padding(plain)
    assert isinstance(quick, QuickPadding)
    assert (quick._padded(rows) is not None) == is_quick
    found, expected = quick(rows), plain(rows)
    assert type(found) is type(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value)
        assert found[name].dtype == value.dtype


def test_other_collators_are_left_alone(tokenizer: Any) -> None:
    class Own(DataCollatorWithPadding):  # type: ignore[misc]
        pass

    for collator in (Own(tokenizer), DataCollatorWithPadding(tokenizer, padding="max_length", max_length=8), list):
        assert quick_padding(collator) is collator
