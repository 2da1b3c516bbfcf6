"""This process's place among those that train together, as launchers tell it in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from brimful.core.errors import OptionError, printable

#: Variables for the rank, the number of ranks and the rank on this machine. torchrun, accelerate launch, Ray Train and
#: `brimful --gpus` set the first three; srun the others, for the tasks of one step.
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
#: Variables for the hosts of a step, the best first: the others may be those of the whole job.
_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
#: The first host of SLURM's compressed list, where brackets hold numbers and ranges of them: `rack[1-2]n[01-04],gpu5`.
_FIRST_HOST = re.compile(r"((?:[\w.-]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+)(?:,.*)?", re.ASCII)
_FIRST_NUMBER = re.compile(r"\[(\d+)[^\]]*\]", re.ASCII)
#: Ports of SLURM's steps: below torchrun's 29500, and those that Linux gives to connections (from 32768). Their number
#: is a prime, so that 100 for each job use all of them.
_FIRST_PORT, _NUM_PORTS = 15_000, 9_973
_HINT = "export MASTER_ADDR (the first host) and MASTER_PORT, or start them with torchrun"


#: Variable that is set where `--launcher` has started this process.
LAUNCHED = "BRIMFUL_LAUNCHED"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Process number `rank` of `count`, and number `local_rank` of those on this machine. The first one leads."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @property
    def leads(self) -> bool:
        """True for the process that reads, decides and writes for all."""
        return self.rank == 0


def find_place(environment: Mapping[str, str] = os.environ) -> Place:
    """Return the place that a launcher gave this process; the only one where none did.

    srun's variables count where it started several tasks: a batch script that runs alone is a process by itself.
    Raises: OptionError for numbers that make no sense, and where several processes have no address to meet at.
    """
    for names in (_TORCH, _SLURM):
        if names[0] in environment and names[1] in environment:
            place = _read(environment, names)
            if place.count > 1 and not find_address(environment)[0]:
                said = f"{names[1]} is {place.count}, and MASTER_ADDR does not say where the processes meet"
                raise OptionError(said, hint=_HINT)
            return place
    if environment.get("WORLD_SIZE", "1") != "1":
        said = f"WORLD_SIZE is {printable(environment['WORLD_SIZE'], 20)}, and RANK is not set"
        raise OptionError(said, hint="export the RANK of each process, or unset WORLD_SIZE for one alone")
    return Place()


def find_address(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return the host and the port where the processes meet; "" for what nothing says.

    MASTER_ADDR and MASTER_PORT come first. Tasks of srun meet at the first host of their step, where the first task is,
    at a port that follows from job and step. Raises: OptionError for variables of SLURM that make no sense.
    """
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if _numbered_by_srun(environment):
        host = host or _first_host(environment)
        port = port or _port_of_step(environment)
    return host, port


def _numbered_by_srun(environment: Mapping[str, str]) -> bool:
    """True unless processes have other numbers than srun's: those may be of several steps, or started by hand."""
    for own, srun in zip(_TORCH[:2], _SLURM[:2], strict=True):
        if srun not in environment or environment.get(own, environment[srun]) != environment[srun]:
            return False
    return True


def _first_host(environment: Mapping[str, str]) -> str:
    name = next((name for name in _HOSTS if environment.get(name)), None)
    if name is None:
        return ""
    if not (found := _FIRST_HOST.fullmatch(environment[name])):
        raise OptionError(f"{name}={printable(environment[name], 60)} is not a list of hosts", hint=_HINT)
    return _FIRST_NUMBER.sub(r"\1", found[1])


def _port_of_step(environment: Mapping[str, str]) -> str:
    """Steps of a job have ports of their own, and so have the first 100 steps of up to 99 jobs in a row."""
    job, step = environment.get("SLURM_JOB_ID"), environment.get("SLURM_STEP_ID", "0")
    if job is None:
        return ""
    if not all(number.isascii() and number.isdigit() for number in (job, step)):
        said = f"SLURM_JOB_ID={printable(job, 20)}, SLURM_STEP_ID={printable(step, 20)} give no port to meet at"
        raise OptionError(said, hint=_HINT)
    return str(_FIRST_PORT + (100 * int(job) + int(step)) % _NUM_PORTS)


def check_tensor_parallel(place: Place, size: int) -> None:
    """Check that all processes can have a model's weights together, so many of them each. Raises: OptionError."""
    if place.count % size:
        said = f"--tensor-parallel {size} needs a multiple of {size} processes, and there are {place.count}"
        if place.count == 1:
            said = f"--tensor-parallel {size} needs {size} processes, and there is one"
        raise OptionError(said, hint=f"start them with --gpus {size}, or torchrun --nproc-per-node {size}")


def check_launched(launcher: str) -> None:
    """Check that a launcher which options name has started this process. Raises: OptionError."""
    if launcher != "none" and LAUNCHED not in os.environ:
        hint = "start the script itself on the cluster, with torchrun or by ray job submit, and leave launcher out"
        raise OptionError(f"--launcher {launcher} is of the command line: a script is one process", hint=hint)


def find_local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of this process on its machine, for those that work by themselves; 0 without a launcher."""
    given = next((environment[names[2]] for names in (_TORCH, _SLURM) if names[2] in environment), "0")
    return int(given) if given.isascii() and given.isdigit() else 0


def find_local_count(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many processes the launcher has started on this machine, as far as it says; 1 where it does not.

    srun says it of a step on one machine.
    """
    one_machine = _numbered_by_srun(environment) and environment.get("SLURM_STEP_NUM_NODES") == "1"
    given = environment.get("LOCAL_WORLD_SIZE", environment.get(_SLURM[1], "1") if one_machine else "1")
    return int(given) if given.isascii() and given.isdigit() else 1


def _read(environment: Mapping[str, str], names: tuple[str, str, str]) -> Place:
    given = {name: environment.get(name, "0") for name in names}
    try:
        rank, count, local_rank = (int(given[name]) for name in names)
    except ValueError:
        rank, count, local_rank = -1, 0, 0
    if not 0 <= rank < count or local_rank < 0:
        said = ", ".join(f"{name}={printable(value, 20)}" for name, value in given.items())
        raise OptionError(f"the launcher's environment makes no sense: {said}", hint="unset these, or use torchrun")
    return Place(rank=rank, count=count, local_rank=local_rank)
