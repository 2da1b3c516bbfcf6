"""Batches that take turns in a few places on a GPU, while the host and the feed are ahead of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from brimful.data.batches.batch import Batch
from brimful.data.batches.prefetch import AHEAD, Feed
from gpu.test_captured_on_gpu import GPU, source

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ahead", [0, AHEAD])
def test_places_hold_what_was_sent(ahead: int) -> None:
    """Also where the feed before was left early."""
    batches, found = source(512), list[tuple[Batch, list[Tensor]]]()
    for leave in (7, 60):
        with Feed(batches, GPU, stop=60, ahead=ahead) as feed:
            for count, batch in enumerate(feed, 1):
                torch.cuda._sleep(2_000_000)  # about a millisecond, in which the next places are filled
                found.append((batch, [memory.clone() for memory in batch.memories]))
                if count == leave:
                    break
    assert len(found) == 67
    assert len({batch.num_bytes for batch, _ in found}) > 1  # places had to grow
    for batch, memories in found:
        assert len(batch.micro_batches) > 1
        for micro, memory in zip(batch.micro_batches, memories, strict=True):
            for sent, arrived in zip(micro.tensors, micro.over(memory).tensors, strict=True):
                assert torch.equal(arrived.cpu(), sent)
