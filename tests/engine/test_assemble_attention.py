"""The attention kernel that was measured goes to the equivalence check and with every batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from brimful.core.callbacks import Callbacks
from brimful.core.options.train import TrainOptions
from brimful.data.batches.batch import PackedLayout
from brimful.engine import assemble as building
from brimful.engine.prepare import prepare
from brimful.levers import facts
from brimful.levers.facts import Measured
from brimful.levers.precision import choose_precision
from brimful.models.packed.equivalence import check_equivalence
from tiny_files import review, save_classifier, write_csv


@pytest.mark.parametrize("packing", ["auto", "off"])
def test_the_measured_kernel_is_checked_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: Any) -> None:
    """Nothing is measured for rows that are not packed."""
    checked: list[str | None] = []

    def seen(model: Any, **given: Any) -> Any:
        checked.append(given["attention"])
        return check_equivalence(model, **given)

    monkeypatch.setattr(facts, "check_equivalence", seen)
    monkeypatch.setattr(facts, "measure_attention", lambda *_: Measured(fastest="flash_attention", said="1 ms"))
    model = save_classifier(tmp_path / "model", ["bad", "good"])
    rows = ([review(bool(i % 2), i), str(i % 2)] for i in range(24))
    data = write_csv(tmp_path / "rows.csv", ("text", "label"), rows)
    options = TrainOptions(
        model=str(model), data=str(data), output=str(tmp_path / "run"), new_head=True, packing=packing, eval_split=0.0
    )
    precision = choose_precision("fp32", torch.device("cpu"))
    built = building.build(options, prepare(options, Callbacks()), precision, Callbacks())
    expected = "flash_attention" if packing == "auto" else None
    assert checked == [expected]
    if packing == "auto":
        assert isinstance(built.layout, PackedLayout)
        assert built.layout.attention == expected
        assert "; 1 ms" in next(lever.reason for lever in built.recipe.levers if lever.name == "attention")
