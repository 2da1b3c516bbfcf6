"""Models whose weights may be cut among processes."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from brimful.core.options.choices import ShardingChoice
from brimful.core.place import Place
from brimful.hardware.ranks import Ranks
from brimful.levers import token_budget
from brimful.levers.sharding import OF_WEIGHTS, Sharding
from levers.assemblies import assembly_of
from tiny import FAMILIES


@pytest.mark.parametrize(("family", "ok"), [("bert", True), ("llama", True), ("t5", False), ("bart", False)])
def test_weights_that_modules_share_are_not_cut(family: str, ok: bool) -> None:
    verdict = Sharding._of_weights(assembly_of(FAMILIES[family].model()))
    assert verdict.ok is ok
    assert ok or "modules share a weight" in verdict.because


@pytest.mark.parametrize(
    ("checkpointing", "ok"), [("full", True), ("every-2", False), ("selective", False), ("offload", False)]
)
def test_weights_of_layers_that_are_treated_unlike_are_not_cut(checkpointing: str, ok: bool) -> None:
    verdict = Sharding._of_weights(assembly_of(FAMILIES["bert"].model(), gradient_checkpointing=checkpointing))
    assert verdict.ok is ok
    assert ok or f"--gradient-checkpointing {checkpointing} is for whole weights" in verdict.because


@pytest.mark.parametrize("sharding", [name for name in get_args(ShardingChoice) if name != "auto"])
def test_micro_batches_leave_room_for_what_each_way_keeps(sharding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; the more it keeps, the fewer tokens."""
    model = FAMILIES["llama"].model(hidden_size=64, intermediate_size=128)
    whole = 20 * sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(token_budget, "device_free_bytes", lambda _: 8 * whole // 5)

    def tokens(sharding: str, **asked: Any) -> int:
        assembly = assembly_of(model, device="cuda", num_tokens=10**6, **asked)
        assembly.ranks = Ranks(Place(count=2))
        assembly.levers[Sharding] = Sharding(value=sharding, reason="asked for", count=2)
        return token_budget._largest(assembly)

    assert tokens(sharding) >= tokens("none") > token_budget.TILE
    if sharding in OF_WEIGHTS:
        assert tokens(sharding, optimizer_offload=True) >= tokens(sharding) > tokens("none")


def test_streamed_weights_leave_their_room_to_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than half of the memory: states are elsewhere, and each micro-batch brings all weights anew."""
    model = FAMILIES["bert"].model(hidden_size=64, intermediate_size=128, num_hidden_layers=8)
    monkeypatch.setattr(token_budget, "device_free_bytes", lambda _: 10**7)

    def bytes_of(**asked: Any) -> int:
        assembly = assembly_of(model, device="cuda", num_tokens=10**6, **asked)
        token_bytes = token_budget.bytes_a_token(assembly)
        assert token_bytes is not None
        return token_budget._largest(assembly) * token_bytes

    assert bytes_of(gradient_checkpointing="full") < 10**7 / 2
    assert 0.8 * 10**7 < bytes_of(stream_weights="host") < 0.9 * 10**7
