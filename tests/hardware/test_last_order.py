"""The end of several processes, one of which is lost when the work of all is done: the others end well."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from brimful.core.errors import RanksError
from brimful.core.place import Place
from brimful.hardware.ranks import Ranks, joined
from forked_ranks import Forked

COUNT, LAST = 4, 9


@pytest.mark.sampled
@pytest.mark.parametrize(("gone", "after_s"), [(1, 1.0), (2, 0.0)])
def test_the_last_order_is_heard_without_one_that_is_gone(gone: int, after_s: float, tmp_path: Path) -> None:
    def work(place: Place) -> int:
        with joined(place, torch.device("cpu")) as ranks:
            ranks.any([True])  # all are connected
            if place.rank == gone:
                os.kill(os.getpid(), signal.SIGKILL)
            if place.leads:
                time.sleep(after_s)
                ranks.tell_last(LAST)
                return LAST
            return ranks.hear()[0]

    processes = Forked(tmp_path, COUNT, work)
    codes = {rank: processes.exit_code(rank) for rank in range(COUNT) if rank != gone}
    assert codes[0] == LAST
    assert set(codes.values()) <= {LAST, 0}  # 0: ended where it waited for the one that is gone


def go_on(ranks: Ranks) -> NoReturn:
    while True:
        ranks.tell(1) if ranks.leads else ranks.hear()


def test_without_a_last_order_all_fail(tmp_path: Path) -> None:
    def work(place: Place) -> int:
        with joined(place, torch.device("cpu")) as ranks:
            ranks.any([True])
            if place.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(RanksError, match="process 2 of 4"):
                go_on(ranks)
        return RanksError.exit_code

    processes = Forked(tmp_path, COUNT, work)
    codes = [processes.exit_code(rank) for rank in range(COUNT) if rank != 2]
    assert codes == [RanksError.exit_code] * (COUNT - 1)
