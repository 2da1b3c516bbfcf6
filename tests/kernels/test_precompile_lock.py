"""Kernels are compiled together, and torch's settings changed, by threads in any order: nobody waits for ever."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import pytest

pytest.importorskip("triton")

from brimful.hardware.process_settings import matmul_precision
from brimful.kernels.precompile import precompiled


def test_two_threads_in_other_orders_come_to_an_end() -> None:
    start, ended = threading.Barrier(2), []

    def run(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> None:
        start.wait()
        with outer, inner:
            ended.append(threading.get_ident())

    for _ in range(50):
        orders = [(matmul_precision("high"), precompiled()), (precompiled(), matmul_precision("high"))]
        threads = [threading.Thread(target=run, args=order, daemon=True) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(ended) == 100
