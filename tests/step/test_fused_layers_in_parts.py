"""Layers on our fused kernels, interpreted, whose weights two processes put together for each layer's turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

pytest.importorskip("triton")

from brimful.core.place import Place
from brimful.hardware.ranks import ALONE, Ranks, joined
from brimful.levers.compiled_layers import record_layers
from brimful.levers.optimizer import Optimizer
from brimful.models import fusion
from brimful.models.model_stats import layers_of
from brimful.models.packed.layer_calls import LayerCall
from brimful.models.packed.recompute import recompute
from brimful.models.tensor_plan import together
from brimful.step.precision import Precision
from brimful.step.step import Step
from brimful.step.updates.fully_sharded import FullyShardedUpdate
from forked_ranks import Forked
from models.fusion.test_fusion import our_attention, settings_of
from step.test_ranks import CPU, part_of, tasks
from step.test_step import PACKED, execution_of
from tiny import FAMILIES
from tolerances import difference

__all__ = ["our_attention"]


def learned(
    ranks: Ranks, family: str, *, fused: bool, recomputed: bool = False, num_layers: int = 2, dtype: str = "fp32",
    sent_as: torch.dtype = torch.float32,
) -> tuple[Any, Any, int]:  # fmt: skip
    """Losses and norms of two steps of SGD, the weights then, and how many graphs our kernels covered."""
    torch.set_num_threads(1)
    model = FAMILIES[family].model(3, **settings_of(family, num_layers=num_layers)).train()
    task, targets = tasks()["single_label"]
    precision, covered = Precision(value=dtype, device=CPU, reason="a test"), list[Any]()
    sharding = "parameters" if ranks.count > 1 else "none"
    optimizer = Optimizer(value="sgd", sharding=sharding, copies=sent_as != torch.float32)
    update = optimizer.update(model, torch.full((9,), 0.1), precision, max_grad_norm=1.0)
    execution = execution_of(model, family)
    layers = layers_of(model)
    assert layers is not None
    if recomputed:
        recompute(layers, range(num_layers - 1))
    whole, sent = list[tuple[bool, bool]](), set[tuple[int, torch.dtype]]()
    with pytest.MonkeyPatch.context() as patch:
        fuse = fusion.fuse
        patch.setattr(fusion, "fuse", lambda graph: covered.append(found := fuse(graph)) or found)
        if fused:
            record_layers(execution)
        backward = FullyShardedUpdate.backward

        def watched(update: FullyShardedUpdate, loss: torch.Tensor) -> None:
            first, last = ([p for p in layers[n].parameters() if p.ndim == 2] for n in (0, -1))
            whole.append(tuple(all(not isinstance(p, DTensor) for p in some) for some in (first, last)))  # type: ignore[arg-type]
            sent.update((p.ndim, p.dtype) for name, p in layers[-1].named_parameters() if not name.endswith("bias"))
            backward(update, loss)

        patch.setattr(FullyShardedUpdate, "backward", watched)
        step = Step(execution, task, update, precision, seed=0, ranks=ranks)
        step.meet()
        told = [step.run(part_of(number, ranks, task, targets, PACKED)).read() for number in (0, 1)]
    assert set(whole) == ({(False, True)} if ranks.count > 1 else set())  # the last layers' turn is the next one, too
    assert sent == ({(1, torch.float32), (2, sent_as)} if ranks.count > 1 else set())
    for layer in layers:
        call = layer._compiled_call_impl
        assert isinstance(call, LayerCall)
        assert (call.compiled is not None) == fused
    weights = torch.cat([together(p.detach()).flatten() for p in model.parameters()]).numpy()
    step.release()
    return [(each.loss, each.grad_norm) for each in told], weights, sum(each is not None for each in covered)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "recomputed", "num_layers"), [("llama", False, 6), ("llama", True, 3), ("bert", False, 2)]
)
def test_they_learn_what_plain_ones_of_one_process_do(
    family: str, recomputed: bool, num_layers: int, tmp_path: Path
) -> None:
    """Each layer's weights alone, and those of two and two."""

    def work(place: Place) -> Any:
        with joined(place, CPU) as ranks:
            return learned(ranks, family, fused=True, recomputed=recomputed, num_layers=num_layers)

    found = Forked(tmp_path, 2, work).results()
    told, weights, _ = learned(ALONE, family, fused=False, num_layers=num_layers)
    for each_told, _, covered in found:
        assert covered >= 1
        np.testing.assert_allclose(each_told, told, rtol=1e-4)
    assert difference(found[0][1], weights) < 1e-5


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "fused", "recomputed"), [("bert", True, False), ("llama", True, True), ("llama", False, False)]
)
@pytest.mark.thorough
def test_weights_are_sent_in_half_precision(family: str, fused: bool, recomputed: bool, tmp_path: Path) -> None:
    """As products read them, norms being whole in both processes: it changes no bit but by the order of sums."""
    found = []
    for sent_as in (torch.float32, torch.bfloat16):

        def work(place: Place, sent_as: torch.dtype = sent_as) -> Any:
            with joined(place, CPU) as ranks:
                return learned(
                    ranks, family, fused=fused, recomputed=recomputed, num_layers=3, dtype="bf16", sent_as=sent_as
                )

        found.append(Forked(tmp_path / str(sent_as), 2, work).results())
    for (told, weights, _), (expected, plain, _) in zip(*found, strict=True):
        np.testing.assert_allclose(told, expected, rtol=1e-6)
        assert difference(weights, plain) < 1e-6
