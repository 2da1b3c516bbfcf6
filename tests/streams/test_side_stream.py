"""Gradients of weights on a side stream, and memory that torch's FSDP copies weights out of on one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from brimful.kernels.side_stream import SideStream
from brimful.models import fsdp_hooks
from brimful.step.reduce import buckets, reduction
from brimful.step.reduce.layer_copies import WeightCopies
from brimful.step.reduce.reduction import Reduction
from pretend_gpu import GPU, PretendGpu
from streams.test_sums import Alike


def test_inputs_stay_until_they_are_read(gpu: PretendGpu) -> None:
    """Those of the oldest work go first; results wait for the end."""
    side = SideStream(GPU)
    for _ in range(2):
        found = list[torch.Tensor]()
        with side.active():
            for _ in range(10):
                given = torch.ones(8, device=GPU)
                found.append(side.run(lambda given=given: given * 2, (given,)))
                del given
                torch.ones(8, device=GPU)
        assert sum(each.sum() for each in found) == 160
        del found


class OnSide(torch.autograd.Function):
    """The sum of a parameter, whose gradient comes from a side stream."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, side: SideStream) -> torch.Tensor:
        ctx.size, ctx.side = x.shape, side
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.side.run(lambda: gradient.expand(ctx.size).contiguous(), (gradient,)), None


def test_sums_of_what_the_side_stream_computes(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 64)
    monkeypatch.setattr(reduction, "StreamClock", None)
    parameters = [torch.nn.Parameter(torch.ones(16, device=GPU)) for _ in range(3)]
    cut, side = buckets.cut_buckets([16] * 3, 2), SideStream(GPU)
    memory = torch.zeros(cut[-1].end, device=GPU)

    def fill(bucket: buckets.Bucket) -> None:
        for index, start in zip(bucket.members, bucket.starts, strict=True):
            gradient: Any = parameters[index].grad
            memory[start : start + 16].copy_(gradient)

    sums = Reduction(Alike(), parameters, cut, memory, fill, half=False, overlap=True, side_stream=side)
    for _ in range(2):
        sums.arm()
        with side.active():
            sum(OnSide.apply(p, side) for p in parameters).backward()
        sums.finish()
        assert memory.sum() == 96
        for parameter in parameters:
            parameter.grad = None


def test_weights_are_copied_out_before_others_arrive(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 copies whole weights out of where they arrive on a stream of its own, and has the event of it."""
    owner: Any = torch.nn.Linear(2, 2)
    own = torch.zeros(64, dtype=torch.uint8, device=GPU)
    memories: Any = [SimpleNamespace(own=own, all_R=[own], meet=lambda: None)]
    context = SimpleNamespace(device_handle=torch.cuda, all_gather_state=None)
    monkeypatch.setattr(fsdp_hooks, "_state_of", lambda _: SimpleNamespace(_comm_ctx=context))
    copies, copying = WeightCopies(owner, [owner], memories, Alike()), torch.cuda.Stream()
    for _ in range(3):
        arrived = copies.allocate((16,), dtype=torch.float32, device=GPU)
        arrived.fill_(1)
        copying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copying):
            arrived.clone()
            result = SimpleNamespace(all_gather_output=arrived)
            context.all_gather_state = SimpleNamespace(all_gather_result=result, event=copying.record_event())
