"""The race detector itself: what is in no order is found, and each way to wait is taken for one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from pretend_gpu import GPU, PretendGpu, pretended

WAITS: dict[str, Callable[[Any, Any], None]] = {
    "nothing": lambda *_: None,
    "the other way": lambda one, other: one.wait_stream(other),
    "a stream": lambda one, other: other.wait_stream(one),
    "an event": lambda one, other: other.wait_event(one.record_event()),
    "the host for a stream": lambda one, _: one.synchronize(),
    "the host for an event": lambda one, _: one.record_event().synchronize(),
    "the host for all": lambda *_: torch.cuda.synchronize(),
}


def found(run: Callable[[PretendGpu], object]) -> list[str]:
    """Races in what `run` does."""
    with pretended() as gpu:
        run(gpu)
        return gpu.races.found


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("writes", [True, False], ids=["written", "read"])
def test_two_streams(wait: str, writes: bool) -> None:
    def run(gpu: PretendGpu) -> None:
        x, other = torch.zeros(8, device=GPU), torch.cuda.Stream()
        torch.cuda.synchronize()
        if writes:
            x[:6].add_(1)
        else:
            x[:6] + 1
        WAITS[wait](gpu.main, other)
        with torch.cuda.stream(other):
            x[6:].zero_()  # elsewhere
            x[2:].zero_()

    races = found(run)
    assert len(races) == (wait in ("nothing", "the other way"))
    assert all("stream 1 writes bytes 8 to 32" in race for race in races)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("into_host", [True, False])
def test_copies_of_the_host(into_host: bool, pinned: bool, waits: bool) -> None:
    """Only those of pinned memory go on beside the host, where they may."""

    def run(_: PretendGpu) -> None:
        here, host = torch.zeros(4, device=GPU), torch.zeros(4, pin_memory=pinned)
        if into_host:
            host.copy_(here, non_blocking=not waits)
        else:
            here.copy_(host, non_blocking=not waits)
        host.fill_(1)

    assert len(found(run)) == (pinned and not waits)


def _item(x: Tensor, host: Tensor) -> None:
    x.sum().item()
    host.numpy()


def _moved(x: Tensor, host: Tensor) -> None:
    x.cpu()
    host.numpy()


@pytest.mark.parametrize("read", [lambda _, host: host.numpy(), lambda _, host: host.tolist(), _item, _moved])
def test_numbers_on_the_host(read: Callable[[Tensor, Tensor], object]) -> None:
    """Whoever asks the device for a number waits for all before it."""

    def run(_: PretendGpu) -> None:
        x, host = torch.ones(4, device=GPU), torch.empty(4, pin_memory=True)
        host.copy_(x, non_blocking=True)
        read(x, host)

    assert len(found(run)) == (read not in (_item, _moved))


@pytest.mark.parametrize("kept", ["not", "recorded", "waited for", "alive"])
def test_memory_that_is_given_out_again(kept: str) -> None:
    def run(gpu: PretendGpu) -> None:
        x, other = torch.ones(4, device=GPU), torch.cuda.Stream()
        other.wait_stream(gpu.main)
        with torch.cuda.stream(other):
            x.sum()
        alive = x if kept == "alive" else None
        if kept == "recorded":
            x.record_stream(other)
        if kept == "waited for":
            gpu.main.wait_stream(other)
        del x
        torch.zeros(9, device=GPU)
        assert alive is None or alive.is_cuda

    assert len(found(run)) == (kept == "not")


def test_memory_of_one_stream_that_another_is_given() -> None:
    """A stream that is the first to use it comes after all that its own stream did with it before."""

    def run(gpu: PretendGpu, waits: bool = False) -> None:
        torch.ones(4, device=GPU)
        x, other = torch.empty(4, device=GPU), torch.cuda.Stream()
        if waits:
            other.wait_stream(gpu.main)
        with torch.cuda.stream(other):
            x.zero_()

    assert len(found(run)) == 1
    assert found(lambda gpu: run(gpu, waits=True)) == []


def _queue(read: Callable[[], object]) -> None:
    given: queue.Queue[int] = queue.Queue()
    thread = threading.Thread(target=lambda: (given.get(), read()))
    thread.start()
    torch.cuda.synchronize()
    given.put(1)
    thread.join()


def _future(read: Callable[[], object]) -> None:
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(read).result()


def _event(read: Callable[[], object]) -> None:
    done = threading.Event()
    thread = threading.Thread(target=lambda: (done.wait(), read()))
    thread.start()
    torch.cuda.synchronize()
    done.set()
    thread.join()


def _beside(read: Callable[[], object]) -> None:
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    torch.cuda.synchronize()


@pytest.mark.parametrize("tell", [_queue, _future, _event, _beside])
def test_threads(tell: Callable[[Callable[[], object]], None]) -> None:
    """A thread has seen what the one that told it something had."""

    def run(_: PretendGpu) -> None:
        x, host = torch.ones(4, device=GPU), torch.empty(4, pin_memory=True)
        host.copy_(x, non_blocking=True)
        tell(host.clone)

    assert len(found(run)) == (tell is _beside)


def test_what_is_computed_is_right() -> None:
    with pretended():
        layer = torch.nn.Linear(3, 2).to(GPU)
        x = torch.ones(4, 3, device=GPU)
        layer(x).sum().backward()
        gradient = layer.weight.grad
        assert gradient is not None
        assert gradient.device == GPU
        assert gradient.tolist() == [[4.0] * 3] * 2
        with pytest.raises(RuntimeError, match="same device"):
            layer(torch.ones(4, 3))
        with pytest.raises(TypeError, match="numpy"):
            gradient.numpy()
        with torch.inference_mode():
            assert layer(x).to("cpu").device.type == "cpu"
    assert gradient.device.type == "cpu"
