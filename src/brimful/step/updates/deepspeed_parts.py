"""One process's parts of weights and moments in DeepSpeed's optimizer (ZeRO-3), in memory or in files of a disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from brimful.core.atomic_files import FULL, free_bytes, lock_folder, path_text
from brimful.core.errors import DiskFullError, OptionError, OutputError, first_line
from brimful.core.units import bytes_text
from brimful.hardware.file_memory import unnamed_file
from brimful.step.state import ParameterState, Part
from brimful.step.updates.own_state import Own

_MOMENTS = ("exp_avg", "exp_avg_sq")
_PREFIX = "brimful-states-"
#: Seconds after which a folder without a lock is no longer being made.
_MAKING_S = 60.0


class SwapFolder:
    """A folder of one process's own in `folder`, for files that DeepSpeed leaves. Removes those of processes that were
    killed. num_bytes: to have room for, of all processes of this host. Raises: OptionError."""

    def __init__(self, folder: Path, num_bytes: int = 0) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_left(folder)
            made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=folder)).absolute()
            lock = lock_folder(made)
            self.path = made.rename(made.with_name(made.name[1:]))  # others would take it for one that was left before
        except (OSError, OutputError) as error:
            raise OptionError(
                f"--offload-folder: no folder can be made in {path_text(folder)}: {first_line(error)}",
                hint="name a folder of an NVMe disk that may be written to, and locked",
            ) from error
        self._remove = weakref.finalize(self, _remove, self.path, lock)
        if (free := free_bytes(folder)) is not None and free < num_bytes:
            self.remove()
            raise OptionError(
                f"--offload-folder: {path_text(folder)} has {bytes_text(free)} free, and what is kept there, with a"
                f" checkpoint, takes {bytes_text(num_bytes)}",
                hint="free some space, or name a folder of another disk",
            )

    def remove(self) -> None:
        """Remove it with all that is in it, and those of processes that were killed meanwhile."""
        self._remove()


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        os.close(lock)
    _remove_left(path.parent)


def _remove_left(folder: Path) -> None:
    """Remove folders whose processes are gone: nobody has the lock."""
    for old in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError, OutputError):
            lock = lock_folder(old)
            shutil.rmtree(old, ignore_errors=True)
            os.close(lock)
    for made in folder.glob(f".{_PREFIX}*"):  # by a process that was killed before it had the lock
        with suppress(OSError):
            if time.time() - made.stat().st_mtime > _MAKING_S:
                shutil.rmtree(made, ignore_errors=True)


class _Place(NamedTuple):
    """A parameter's part in the flat tensor of its group. start: of the part in the whole flat parameter."""

    name: str
    shape: tuple[int, ...]
    at: slice
    start: int


class OwnParts:
    """Parts that a process has of the weights of `optimizer`, which is DeepSpeed's, and of their moments.

    named: trained parameters. kind: of the optimizer within. folder: of this process on a disk that has what memory has
    no room for.
    """

    def __init__(
        self, optimizer: Any, named: Mapping[str, Any], *, rank: int, kind: Literal["adamw", "sgd"], folder: Path | None
    ) -> None:
        self._optimizer, self._keys, self._folder = optimizer, _MOMENTS if kind == "adamw" else (), folder
        self._groups: list[list[_Place]] = [[] for _ in optimizer.fp16_groups]
        for name, parameter in named.items():
            group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = rank * size
            own = min(size, max(0, parameter.ds_numel - start))  # zeros are behind the last one's
            if own:
                self._groups[group].append(_Place(name, tuple(parameter.ds_shape), slice(offset, offset + own), start))

    def saved(self, *, started: bool) -> Iterator[Own]:
        """Return each parameter's part with its moments; those on a disk are copied to a file of it that has no name,
        as memory may not hold them. started: whether there are moments. Raises: DiskFullError, OutputError."""
        keys = self._keys if started else ()
        for number, places in enumerate(self._groups):
            with self._in_memory(number) as (flat, moments):
                tensors = [flat, *(moments[key] for key in keys)]
                kept = self._kept(tensors) if self._is_swapped(number) else tensors
            for place in places:
                weight, *own = (tensor[place.at] for tensor in kept)
                part = Part(shape=place.shape, starts=(place.start,))
                yield Own(place.name, weight, part, dict(zip(keys, own, strict=True)))

    def load(
        self, weights: Mapping[str, Tensor], states: Mapping[str, ParameterState], parameters: Mapping[str, Any]
    ) -> None:
        """Take parts of whole weights and states up, and have `parameters` be what the weights are."""
        steps = [float(state.tensors["step"]) for state in states.values() if "step" in state.tensors]
        for number, places in enumerate(self._groups):
            with self._in_memory(number, changed=True) as (flat, moments):
                if self._keys:
                    moments.setdefault("step", torch.tensor(0.0)).fill_(max(steps, default=0.0))
                for key in self._keys:
                    moments[key] = moments[key] if key in moments else torch.zeros_like(flat)
                for place in places:
                    kept = states[place.name].tensors if place.name in states else {}
                    own = _cut(weights[place.name], place)
                    flat[place.at] = own
                    parameters[place.name].ds_tensor[: len(own)] = own
                    for key in self._keys:
                        moments[key][place.at] = _cut(kept[key], place) if key in kept else 0.0

    def _is_swapped(self, number: int) -> bool:
        return bool(self._optimizer._swappable_optimizer_subgroup(number))

    @contextmanager
    def _in_memory(self, number: int, *, changed: bool = False) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Have a group's flat weights and its moments in memory; if they are `changed`, they go back to their files."""
        optimizer = self._optimizer
        flat = optimizer.fp32_partitioned_groups_flat[number]
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)
        if not self._is_swapped(number):
            yield flat.detach(), optimizer.optimizer.state[flat]
            return
        optimizer._optimizer_states_and_gradient_swap_in(number)
        try:
            yield flat.detach(), optimizer.optimizer.state[flat]
        except BaseException:
            optimizer._release_swap_buffers(number)
            raise
        if changed:
            optimizer._optimizer_states_and_gradient_swap_out(number)
        else:
            optimizer._release_swap_buffers(number)

    def _kept(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies in a file without a name."""
        assert self._folder is not None
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        try:
            memory = unnamed_file(self._folder, num_bytes).view(tensors[0].dtype)
        except OSError as error:
            said = f"no file of {bytes_text(num_bytes)} for a checkpoint can be made in {path_text(self._folder)}"
            kind = DiskFullError if error.errno in FULL else OutputError
            raise kind(f"{said}: {error.strerror}", hint="free some space, then go on with --resume") from error
        copies = list(memory.split([tensor.numel() for tensor in tensors]))
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        return copies


def _cut(whole: Tensor, place: _Place) -> Tensor:
    return whole.flatten()[place.start : place.start + place.at.stop - place.at.start]
