"""Gradients on their way to other processes while a backward pass goes on, on a GPU's streams."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from brimful.core.place import Place
from brimful.hardware.ranks import Ending, Ranks
from brimful.levers.optimizer import Optimizer
from brimful.step.precision import Precision
from brimful.step.reduce import buckets, reduction
from brimful.step.reduce.scattered import PeerParts
from pretend_gpu import GPU, PretendGpu
from streams.test_steps import course, step_of
from tiny import FAMILIES


class Alike(Ranks):
    """Two processes that have the same tensors. Collectives are work of the current stream, as NCCL's are."""

    def __init__(self) -> None:
        super().__init__(Place(rank=0, count=2))

    def sum(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.mul_(self.count)

    def any(self, flags: Sequence[bool]) -> list[bool]:
        return list(flags)

    def begin_sum(self, tensor: Tensor) -> Ending:
        self.sum([tensor])
        return lambda: None

    def begin_exchange(self, into: Tensor, given: Tensor) -> Ending:
        into.view(self.count, -1).copy_(given.view(self.count, -1)[self.rank])
        return lambda: None

    def begin_gather(self, into: Tensor, own: Tensor) -> Ending:
        into.view(self.count, -1)[1 - self.rank].copy_(own)
        return lambda: None

    def begin_scattered_sum(self, into: Tensor, given: Tensor) -> Ending:
        into.copy_(given.view(self.count, -1)[self.rank]).mul_(self.count)
        return lambda: None


@pytest.fixture(autouse=True)
def _several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 4000)
    monkeypatch.setattr(reduction, "StreamClock", None)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("sharding", "half"), [("none", False), ("none", True), ("states", False), ("gradients", False)]
)
def test_steps(gpu: PretendGpu, sharding: Any, half: bool) -> None:
    model = FAMILIES["bert"].model(num_hidden_layers=2, dropout=0.1).train().to(GPU)
    optimizer = dataclasses.replace(Optimizer(value="adamw_torch", weight_decay=0.1), sharding=sharding)
    course(step_of(model, optimizer=optimizer, ranks=Alike(), half_wire=half))


def test_parts_of_peers(gpu: PretendGpu) -> None:
    """Sums of parts by copies, and parts of weights that are put into others' memory, beside the backward pass."""
    parameters = [torch.nn.Parameter(torch.ones(900, device=GPU)) for _ in range(3)]
    cut = buckets.cut_buckets([900] * 3, 2)
    memories = [[torch.zeros(cut[-1].end, device=GPU) for _ in range(2)] for _ in range(2)]
    gradients, weights = (SimpleNamespace(own=own, all_R=[own, other], meet=lambda: None) for own, other in memories)

    def fill(bucket: buckets.Bucket) -> None:
        for index, start in zip(bucket.members, bucket.starts, strict=True):
            gradients.own[start : start + 900].copy_(parameters[index].grad)

    def add(bucket: buckets.Bucket, parts_R: list[Tensor], into: Tensor) -> None:
        into.copy_(parts_R[0]).add_(parts_R[1])

    given: Any = (fill, add, lambda _: torch.float32)
    sums = PeerParts(Alike(), parameters, cut, gradients, *given, overlap=True)
    for _ in range(2):
        sums.arm()
        sum((p * p).sum() for p in parameters).backward()
        sums.finish()
        for bucket in cut:
            weights.own[bucket.part].add_(sums.own.sum())
            sums.spread(weights, bucket)
        sums.wait_for_spread()
        for memory in weights.all_R:
            memory.add_(1)
        for parameter in parameters:
            parameter.grad = None


def test_gradients_that_our_kernels_cannot_read_are_copied(gpu: PretendGpu) -> None:
    """One that begins at an odd place, on the stream of sums, while the backward pass goes on."""
    model = torch.nn.Linear(8, 4).to(GPU)
    precision = Precision(value="fp32", device=GPU, reason="a test")
    optimizer = Optimizer(value="adamw_torch_fused", fused=True)
    update: Any = optimizer.update(model, torch.ones(3), precision, max_grad_norm=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.numel() + 1, device=GPU)[1:].view(parameter.shape)
    sums = torch.cuda.Stream()
    sums.wait_stream(gpu.main)
    with torch.cuda.stream(sums):
        update._addresses()
    torch.ones(9, device=GPU)
