"""Rows of the checkpointing benchmark that keep within a limit do so in --smoke, too."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType

import pytest

Load = Callable[..., dict[str, ModuleType]]

pytestmark = pytest.mark.filterwarnings("ignore:.* saves nothing on a CPU")


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("name", ["offload, two layers", "offload, four layers"])
def test_offload_within_a_limit_moves_some_layers(load: Load, name: str) -> None:
    run = load("checkpointing", "run")["run"]
    (row,) = (row for row in run.ROWS if row.key == f"brimful: {name}")
    found = run.measure({"smoke": True, "side": row.side, "settings": dict(row.settings)})
    assert found["samples_per_s"] > 0
    said = found["recipe"]["gradient_checkpointing"]
    assert re.search(r"of activations .*, of \d.* measured; those of layers? 1.* of 4 are in host memory", said), said
