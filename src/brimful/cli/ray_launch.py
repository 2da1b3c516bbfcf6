"""Start a command as workers of Ray, on the machines of a cluster or on this one.

Ray places the processes and tells them their ranks; what they do is the command, in a process of its own in each
worker, as under torchrun. Workers of --claim are tasks that know nothing of one another.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from brimful.cli.launch import LIFELINE
from brimful.core.errors import DeviceError, OptionError, RanksError, first_line
from brimful.core.place import LAUNCHED

#: Times that Ray starts a task of --claim again whose worker is gone.
_RETRIES = 3
_CODE = re.compile(r"process (\d+) has ended with code (\d+)")


def launch_on_ray(words: Sequence[str], count: int, *, output: Path, on_gpu: bool, claims: bool) -> int:
    """Run `count` processes of `brimful WORDS`, with a GPU each unless on_gpu is False; return their exit code.

    output: of the command, beside which Ray keeps its files meanwhile. claims: whether they work by themselves.
    Raises: OptionError without Ray, DeviceError where the cluster cannot run them.
    """
    try:
        import ray
    except ImportError:
        said = "--launcher ray needs Ray, which is not installed"
        raise OptionError(said, hint="pip install 'brimful[ray]', or start the processes with torchrun") from None
    job = {"command": [sys.executable, "-m", "brimful", *words], "folder": str(Path.cwd())}
    if not ray.is_initialized():
        ray.init(log_to_driver=True, include_dashboard=False)
    try:
        needed = {"GPU": 1} if on_gpu else {"CPU": 1}
        _check_room(ray.cluster_resources(), needed, count)
        return _claim(job, count, on_gpu) if claims else _train(job, count, output, on_gpu)
    finally:
        ray.shutdown()


def _check_room(there: Mapping[str, float], needed: Mapping[str, int], count: int) -> None:
    """Check that the cluster has so many devices: Ray would wait for them without end."""
    for kind, each in needed.items():
        if there.get(kind, 0) < each * count:
            raise DeviceError(
                f"--num-processes is {count}, and the Ray cluster has {there.get(kind, 0):g} {kind}s",
                hint="lower it" if kind == "CPU" else "lower it, or use --device cpu",
            )


def _claim(job: dict[str, Any], count: int, on_gpu: bool) -> int:
    """Tasks that share files by claims: one that is lost is started again, and the others go on."""
    import ray

    task = ray.remote(num_cpus=0 if on_gpu else 1, num_gpus=int(on_gpu), max_retries=_RETRIES)(_run)
    tasks = [task.remote(job, {"RANK": "0", "WORLD_SIZE": "1"}) for _ in range(count)]
    codes = []
    for each in tasks:
        try:
            codes.append(ray.get(each))
        except ray.exceptions.RayError as error:
            print(f"a worker of Ray was lost: {first_line(error)}", file=sys.stderr)
            codes.append(RanksError.exit_code)
    return 0 if 0 in codes else int(codes[0])  # who ends well has seen all files done


def _train(job: dict[str, Any], count: int, output: Path, on_gpu: bool) -> int:
    """Workers of Ray Train that work together."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    beside, name = output.absolute().parent, f".ray-{uuid.uuid4().hex[:8]}"
    beside.mkdir(parents=True, exist_ok=True)
    trainer = TorchTrainer(
        _work,
        train_loop_config=job,
        scaling_config=ScalingConfig(num_workers=count, use_gpu=on_gpu),
        torch_config=TorchConfig(backend="gloo"),  # to agree on a port; the command makes its own group
        run_config=RunConfig(name=name, storage_path=str(beside), failure_config=FailureConfig(max_failures=0)),
    )
    try:
        trainer.fit()
    except Exception as error:
        failures = getattr(error, "worker_failures", {})
        said = " ".join(map(str, [*failures.values(), error, error.__cause__]))
        codes = {int(rank): int(code) for rank, code in _CODE.findall(said)}
        if not codes:
            print(f"Ray: {first_line(error)}", file=sys.stderr)
        own = [code for code in codes.values() if code != RanksError.exit_code]  # who is not the victim of another
        return own[0] if own else RanksError.exit_code
    finally:
        shutil.rmtree(beside / name, ignore_errors=True)
        with suppress(OSError):
            (beside / ".validate_storage_marker").unlink()
    return 0


def _work(job: dict[str, Any]) -> None:
    """One worker of Ray Train: agree with the others where to meet, then run the command."""
    import torch.distributed as dist
    from ray import train

    context = train.get_context()
    rank = context.get_world_rank()
    port = [_free_port() if rank == 0 else 0]
    dist.broadcast_object_list(port, src=0)
    dist.barrier()
    dist.destroy_process_group()
    place = {"RANK": rank, "WORLD_SIZE": context.get_world_size(), "LOCAL_RANK": context.get_local_rank()}
    place |= {"LOCAL_WORLD_SIZE": context.get_local_world_size()}
    code = _run(job, {name: str(value) for name, value in (place | {"MASTER_PORT": port[0]}).items()})
    if code:
        raise RuntimeError(f"process {rank} has ended with code {code}")


def _run(job: dict[str, Any], place: Mapping[str, str]) -> int:
    """Run the command in this worker; it ends with the worker."""
    lifeline, kept = os.pipe()
    environment = os.environ | dict(place) | {LAUNCHED: "1", LIFELINE: str(lifeline)}
    folder = job["folder"] if Path(job["folder"]).is_dir() else None
    try:
        ended = subprocess.run(job["command"], env=environment, cwd=folder, pass_fds=(lifeline,), check=False)
    finally:
        os.close(lifeline)
        os.close(kept)
    return ended.returncode if ended.returncode >= 0 else 128 - ended.returncode


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
