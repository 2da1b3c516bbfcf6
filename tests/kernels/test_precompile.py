"""Kernels compiled together: which are met, by whom, and what becomes of the hook."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton import knobs

from brimful.kernels import precompile
from brimful.kernels.precompile import precompiled


class Function:
    """A stand-in for a kernel: notes what it is asked to compile, and whether that is loaded."""

    def __init__(self, *, broken: bool = False) -> None:
        self.asked: list[str] = []
        self.loaded, self._broken = 0, broken

    def preload(self, specialization: str) -> Function:
        self.asked.append(specialization)
        if self._broken:
            raise RuntimeError("no such instruction")
        return self

    @property
    def run(self) -> None:
        self.loaded += 1


def launch(
    function: Function, specialization: str = "one", module: str = "brimful.kernels.layers.dropout_add_layernorm"
) -> Any:
    """The hook that Triton calls before it compiles: True prevents it."""
    hook = knobs.runtime.jit_cache_hook
    if hook is None:
        return None
    fn = SimpleNamespace(module=module, name="kernel", jit_function=function)
    return hook(key=specialization, fn=fn, compile={"specialization_data": specialization}, is_manual_warmup=False)


def test_each_is_compiled_once_at_the_end() -> None:
    function, broken = Function(), Function(broken=True)
    with precompiled():
        assert [launch(function), launch(function), launch(function, "two")] == [True] * 3
        assert launch(broken, "three")
        assert function.asked == []
    assert sorted(function.asked) == ["one", "two"]
    assert (function.loaded, broken.asked) == (2, ["three"])
    assert launch(function) is None


def test_what_is_waited_for_later_is_compiled_by_then() -> None:
    function = Function()
    with precompiled(wait=False) as compiling:
        assert launch(function)
    compiling.wait()
    assert function.asked == ["one"]


def test_what_is_cancelled_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "num_cores", lambda: 1)
    first, second, going_on = Function(), Function(), threading.Event()
    monkeypatch.setattr(first, "preload", lambda _: going_on.wait())
    with precompiled(wait=False) as compiling:
        launch(first)
        launch(second, "two")
    compiling.cancel()
    going_on.set()
    assert second.asked == []


def test_a_kernel_of_someone_elses_ends_it() -> None:
    ours, others, reached = Function(), Function(), []
    with precompiled():
        launch(ours)
        launch(others, module="a_model_of_the_users")
        reached.append(True)
    assert (ours.asked, others.asked, reached) == (["one"], [], [])
    assert knobs.runtime.jit_cache_hook is None


def test_errors_within_are_of_no_use_either() -> None:
    function = Function()
    with precompiled():
        launch(function)
        raise ValueError("a result was not finite")
    assert function.asked == ["one"]
    assert knobs.runtime.jit_cache_hook is None


def test_other_threads_launch_as_ever() -> None:
    found: list[Any] = []
    with precompiled():
        thread = threading.Thread(target=lambda: found.append(launch(Function())))
        thread.start()
        thread.join()
    assert found == [None]


def test_a_hook_of_the_users_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **what: told.append(what["key"]))
    with precompiled():
        launch(Function(), "ours")
        thread = threading.Thread(target=lambda: launch(Function(), "another's"))
        thread.start()
        thread.join()
    launch(Function(), "later")
    assert told == ["another's", "later"]


def test_backward_passes_stay_in_the_thread() -> None:
    threads: list[int] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: threads.append(threading.get_ident()))
    with precompiled():
        (x * 2).sum().backward()
    assert threads == [threading.get_ident()]
