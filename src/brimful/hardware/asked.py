"""Requests of processes that work together: all are given the same, or their sums and answers are of no request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from brimful.core.errors import OptionError, listed, printable
from brimful.core.options.checks import flag
from brimful.hardware.probe import versions

#: Options that are no part of the work, those that each machine may have its own of, and names of what is compared by
#: its content, or seen by all under names of their own.
_OF_EACH = frozenset(
    {"data", "eval_data", "model", "output", "stream_folder", "offload_folder", "device", "gpus", "launcher"}
    | {"num_processes", "num_workers", "memory_limit", "allocator", "hang_timeout", "quiet", "json", "report"}
    | {"report_to", "push_to_hub", "trace", "overwrite", "baselines"}
)
#: Most differences in one line.
_MOST = 4


def asked_of(options: Any, device: torch.device) -> dict[str, str]:
    """Return by displayed name what a process was given that the others must be given too."""
    given = {flag(name): str(value) for name, value in vars(options).items() if name not in _OF_EACH}
    return {**given, "--device": device.type, **versions()}


def check_same(asked: Sequence[Mapping[str, str]]) -> None:
    """Check that all processes were given the same, in their order. Raises: OptionError naming what differs."""
    for rank, own in enumerate(asked):
        names = [name for name in {**asked[0], **own} if own.get(name) != asked[0].get(name)]
        if names:
            apart = [f"{name} is {_shown(own.get(name))}, and {_shown(asked[0].get(name))} there" for name in names]
            raise OptionError(
                f"process {rank} was not given the same as process 0: {listed(apart, _MOST)}",
                hint="start all processes with the same command and versions",
            )


def _shown(value: str | None) -> str:
    return "not given" if value in (None, "None") else printable(value, 80)
