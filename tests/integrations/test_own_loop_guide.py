"""The guide to a loop of one's own: each of its three loops runs as it is written, and they learn the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tiny_files import review, save_classifier
from tolerances import difference

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "own-loop.md"


@pytest.mark.slow
def test_its_loops_learn_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from accelerate.state import AcceleratorState

    text = GUIDE.read_text(encoding="utf-8")
    plain, packed, step = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[:3]
    packed += plain[plain.index("loader = DataLoader") :]  # everything below stays as it was
    name = save_classifier(tmp_path / "model", ["bad", "good"])
    given = {"texts": [review(bool(i % 2), i) for i in range(48)], "labels": [i % 2 for i in range(48)]}
    losses, weights, logits = [], [], []
    for number, code in enumerate((plain, packed, step)):
        AcceleratorState._reset_state(reset_partial_state=True)
        names: dict[str, Any] = {**given, "name": str(name), "output": tmp_path / str(number)}
        exec(compile(code, f"{GUIDE}:{number}", "exec"), names)
        losses.append([float(line.split()[1]) for line in capsys.readouterr().out.splitlines()])
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / str(number))
        weights.append(torch.cat([p.detach().flatten() for n, p in model.named_parameters() if "key.bias" not in n]))
        logits.append(torch.as_tensor(names["logits"]))
        if number == 1:
            assert vars(names["model"])["_brimful_packed"].num_plain == 0
    for other in (1, 2):
        assert losses[other] == pytest.approx(losses[0], rel=1e-4)
        assert difference(weights[other], weights[0]) < 1e-4
        assert difference(logits[other], logits[0]) < 1e-3
    AcceleratorState._reset_state(reset_partial_state=True)


def test_changed_lines_are_marked() -> None:
    """A line that a stage has and the loop has not is marked, and no other."""
    plain, *stages = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text("utf-8"), re.DOTALL | re.MULTILINE)[:3]
    known = {line.strip() for line in plain.splitlines()}
    for stage in stages:
        for line in filter(str.strip, stage.splitlines()):
            assert line.endswith("  # changed") == (line.strip() not in known), line
