"""Places of processes, as launchers tell them."""

from __future__ import annotations

import pytest

from brimful.core.errors import OptionError
from brimful.core.place import Place, find_place

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1"}


def test_launchers_are_understood() -> None:
    assert find_place(TORCHRUN) == Place(rank=3, count=4, local_rank=1)
    srun = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "MASTER_ADDR": "node1"}
    assert find_place(srun) == Place(rank=1, count=2)
    assert find_place(srun | TORCHRUN).count == 4


@pytest.mark.parametrize("environment", [{}, {"RANK": "0"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}])
def test_one_process_by_itself(environment: dict[str, str]) -> None:
    """A batch script of SLURM among them, which knows how many tasks it may start."""
    assert find_place(environment) == Place()
    assert find_place(environment).leads


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "4"}, "makes no sense: RANK=4"),
        ({"WORLD_SIZE": "many"}, "makes no sense"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR does not say where"),
        ({"RANK": None}, "WORLD_SIZE is 4, and RANK is not set"),
    ],
)
def test_what_makes_no_sense_is_said(changed: dict[str, str | None], said: str) -> None:
    environment = {name: value for name, value in (TORCHRUN | changed).items() if value is not None}
    with pytest.raises(OptionError, match=said):
        find_place(environment)
