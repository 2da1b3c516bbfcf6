"""Models whose weights may be cut among processes."""

from __future__ import annotations

import pytest

from brimful.levers.sharding import Sharding
from levers.assemblies import assembly_of
from tiny import FAMILIES


@pytest.mark.parametrize(("family", "ok"), [("bert", True), ("llama", True), ("t5", False), ("bart", False)])
def test_weights_that_modules_share_are_not_cut(family: str, ok: bool) -> None:
    verdict = Sharding._of_weights(assembly_of(FAMILIES[family].model()))
    assert verdict.ok is ok
    assert ok or "modules share a weight" in verdict.because
