"""Places of processes, as launchers tell them."""

from __future__ import annotations

import pytest

from brimful.core.errors import OptionError
from brimful.core.place import Place, find_address, find_local_count, find_place

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[3,5]",
    "SLURM_JOB_NODELIST": "cpu1,gpu[3,5]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}


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


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node7", "node7"),
        ("node7,node9", "node7"),
        ("node[001-003,007],gpu5", "node001"),
        ("gpu5,node[001-003,007]", "gpu5"),
        ("n[9]", "n9"),
        ("n[007,001-003]", "n007"),
        ("rack[1-2]n[01-04]", "rack1n01"),
        ("rack[1-2]n[01-04]-ib.cluster.org,x", "rack1n01-ib.cluster.org"),
        ("queue_1-dy-g5-2xlarge-[10-12]", "queue_1-dy-g5-2xlarge-10"),
        ("10.0.0.[4-5]", "10.0.0.4"),
    ],
)
def test_tasks_of_srun_meet_at_the_first_host(hosts: str, first: str) -> None:
    assert find_address(SRUN | {"SLURM_STEP_NODELIST": hosts})[0] == first


def test_hosts_of_the_step_come_before_those_of_the_job() -> None:
    assert find_address(SRUN)[0] == "gpu3"
    assert find_address(_without(SRUN, "SLURM_STEP_NODELIST"))[0] == "cpu1"
    old = _without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") | {"SLURM_NODELIST": "cpu[2-4]"}
    assert find_address(old)[0] == "cpu2"
    assert find_place(old) == Place(rank=1, count=2)


@pytest.mark.parametrize(
    "hosts", ["node[1-3", "node]", "node[]", "node[a-b]", "node[1-]", "node[1,]", ",node1", " ", "(null)", "n\n1"]
)
def test_a_list_that_is_none(hosts: str) -> None:
    with pytest.raises(OptionError, match=r"^SLURM_STEP_NODELIST=.* is not a list of hosts\n?") as caught:
        find_place(SRUN | {"SLURM_STEP_NODELIST": hosts})
    assert "\n" not in str(caught.value)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("export MASTER_ADDR (the first host) and MASTER_PORT")
    given = {"SLURM_STEP_NODELIST": hosts, "MASTER_ADDR": "node1"}
    assert find_place(SRUN | given) == Place(rank=1, count=2)


def test_no_list_at_all() -> None:
    with pytest.raises(OptionError, match="MASTER_ADDR does not say where"):
        find_place(_without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))


def test_ports_follow_from_job_and_step() -> None:
    """All processes have the same one; steps that may run at once on one host have others."""
    assert find_address(SRUN) == find_address(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "1"})
    ports = {_port(job, step) for job in range(7_000_000, 7_000_099) for step in range(100)}
    assert len(ports) == 9900
    assert len({_port(41, step) for step in range(9_973)}) == 9_973
    for job, step in ((1, 0), (2**32, 2**32 - 6), *((job, 0) for job in range(0, 10**6, 997))):
        assert 15_000 <= _port(job, step) < 25_000
    assert find_address(_without(SRUN, "SLURM_STEP_ID")) == find_address(SRUN)


@pytest.mark.parametrize("changed", [{"SLURM_JOB_ID": "12_3"}, {"SLURM_STEP_ID": "batch"}, {"SLURM_STEP_ID": "²"}])
def test_numbers_that_give_no_port(changed: dict[str, str]) -> None:
    with pytest.raises(OptionError, match=r"^SLURM_JOB_ID=.*, SLURM_STEP_ID=.* give no port") as caught:
        find_place(SRUN | changed)
    assert caught.value.hint is not None
    assert find_address(SRUN | changed | {"MASTER_PORT": "29500"}) == ("gpu3", "29500")


def test_what_is_exported_comes_first() -> None:
    both = {"MASTER_ADDR": "login", "MASTER_PORT": "4711"}
    host, port = find_address(SRUN)
    assert find_address(SRUN | both) == ("login", "4711")
    assert find_address(SRUN | {"MASTER_ADDR": "login"}) == ("login", port)
    assert find_address(SRUN | {"MASTER_PORT": "4711"}) == (host, "4711")
    assert find_address(SRUN | {"MASTER_ADDR": "", "MASTER_PORT": ""}) == (host, port)
    assert find_address(TORCHRUN) == ("10.0.0.1", "")
    assert find_address({}) == ("", "")


def test_only_numbers_of_srun_meet_where_it_says() -> None:
    """Processes with numbers of their own may be of several steps, which have several addresses."""
    copied = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert find_address(SRUN | copied) == find_address(SRUN)
    for other in (copied | {"WORLD_SIZE": "4"}, copied | {"RANK": "0"}):
        assert find_address(SRUN | other) == ("", "")
        with pytest.raises(OptionError, match="MASTER_ADDR does not say where"):
            find_place(SRUN | other)


def _port(job: int, step: int) -> int:
    return int(find_address(SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})[1])


def _without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


@pytest.mark.parametrize(
    ("told", "count"),
    [
        ({}, 1),
        ({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, 4),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1"}, 8),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}, 1),
    ],
)
def test_processes_of_this_machine_are_counted_where_a_launcher_says_so(told: dict[str, str], count: int) -> None:
    assert find_local_count(told) == count
