"""Memory that processes of a CPU share, in files: what `hardware.peers` has on GPUs."""

from __future__ import annotations

from pathlib import Path

import torch

from brimful.hardware.peers import PeerMemory
from brimful.hardware.ranks import Ranks


class FilePeers:
    """`Peers` whose memory is files in a folder that all processes see."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks, self._folder, self._number = ranks, folder, 0
        folder.mkdir(exist_ok=True)

    def zeros(self, size: int, dtype: torch.dtype) -> PeerMemory:
        """As `Peers` has it."""
        self._number += 1
        files = [self._folder / f"{self._number}-{rank}" for rank in range(self._ranks.count)]
        files[self._ranks.rank].write_bytes(bytes(size * dtype.itemsize))
        self._meet()
        parts = [torch.from_file(str(file), shared=True, size=size, dtype=dtype) for file in files]
        return PeerMemory(all_R=parts, own=parts[self._ranks.rank], meet=self._meet)

    def _meet(self) -> None:
        self._ranks.any([True])
