"""Memory that is a file's: the system writes it out and drops it where other memory is short."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from brimful.core.errors import OptionError, printable
from brimful.core.units import bytes_text

#: Bytes that a tensor starts at a multiple of.
_ALIGNMENT = 64


def unnamed_file(folder: Path | None, num_bytes: int) -> Tensor:
    """Bytes, all 0, of a file that has no name any more, mapped into memory. folder: None for the system's.

    The disk has room for them: a process that writes where it has none is killed. Raises: OSError.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix="brimful-weights-") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        file.truncate(num_bytes)
        return torch.from_file(file.name, shared=True, size=num_bytes, dtype=torch.uint8)


def weights_file(folder: Path, num_bytes: int) -> Tensor:
    """Bytes of an unnamed file for weights that are streamed. Raises: OptionError where it cannot be made."""
    try:
        return unnamed_file(folder, num_bytes)
    except OSError as error:
        where = printable(str(folder), 200)
        raise OptionError(
            f"--stream-weights disk: a file of {bytes_text(num_bytes)} cannot be made in {where}: {error}",
            hint="name another folder with --stream-folder",
        ) from error


class FileRoom:
    """Room for tensors, one after another, in an unnamed file that is there as long as one of them.

    num_bytes: of all, as `bytes_with` counts each.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._memory, self._used = weights_file(folder, num_bytes), 0

    @staticmethod
    def bytes_with(num_bytes: int) -> int:
        """Bytes that a tensor of so many takes."""
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def put(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of a tensor, in this dtype, in the file. Its version is its own: autograd holds a change of one tensor
        against all that share a version, as views of one memory do."""
        size = tensor.numel() * dtype.itemsize
        there = self._memory[self._used : self._used + size].view(dtype).view(tensor.shape)
        self._used += self.bytes_with(size)
        return there.copy_(tensor).data
