"""Tables of words in parts of several processes: rows and gradients of a table that is whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from brimful.core.place import Place
from brimful.hardware.ranks import Ranks, joined
from brimful.models.tensor_plan import local
from brimful.step.reduce import table_rows
from brimful.step.reduce.table_rows import TableRows
from file_peers import FilePeers
from forked_ranks import Forked

CPU = torch.device("cpu")


def cut(
    ranks: Ranks, memory: Path, num_rows: int, padding: int | None = None
) -> tuple[nn.Embedding, TableRows, Tensor]:
    """A table of which each process has rows, what looks words up in it, and the same table whole."""
    torch.manual_seed(0)
    table = nn.Embedding(num_rows, 4, padding_idx=padding).double()
    whole = table.weight.detach().clone().requires_grad_()
    mesh = init_device_mesh("cpu", (ranks.count,))
    table.weight = nn.Parameter(distribute_tensor(table.weight.detach(), mesh, [Shard(0)]))
    return table, TableRows(table, FilePeers(ranks, memory), ranks), whole


def each(folder: Path, count: int, work: Callable[[Ranks], Any]) -> list[Any]:
    def joins(place: Place) -> Any:
        with joined(place, CPU) as ranks:
            return work(ranks)

    return Forked(folder / "logs", count, joins).results()


def test_rows_and_their_gradients_are_those_of_the_whole_table(tmp_path: Path) -> None:
    """Of processes with fewer rows than others, or none; of two passes before an update. Padding has no gradient."""
    sizes = [(2, None), (4, 2), (7, 0)]

    def work(ranks: Ranks) -> list[tuple[bool, float]]:
        found = []
        for num_rows, padding in sizes:
            table, rows, whole = cut(ranks, tmp_path / str(num_rows), num_rows, padding)
            for seed in range(2):
                words = torch.randint(0, num_rows, (ranks.count, 1, 7), generator=torch.Generator().manual_seed(seed))
                counts = torch.arange(1.0, 8)[None, :, None]
                looked = rows(words[ranks.rank])
                (looked * counts).sum().backward()
                for own in words:
                    (F.embedding(own, whole, padding_idx=padding) * counts).sum().backward()
                same = torch.equal(looked, F.embedding(words[ranks.rank], whole))
            gradient: Any = table.weight.grad
            assert whole.grad is not None
            found.append((same, float((gradient.full_tensor() - whole.grad).abs().max())))
        return found

    assert each(tmp_path, 3, work) == [[(True, 0.0)] * len(sizes)] * 3


def test_what_a_late_process_reads_is_not_written_over(tmp_path: Path) -> None:
    """Two calls, whose backward passes follow one another."""

    def work(ranks: Ranks) -> float:
        table, rows, whole = cut(ranks, tmp_path / "memory", 10)
        rows._make_room(6)
        if ranks.rank == 1:
            [room], met = rows._rooms, [0]

            def late() -> None:
                room.words.meet()
                met[0] += 1
                time.sleep(0.3 * (met[0] == 1))

            rows._rooms[0] = replace(room, words=replace(room.words, meet=late))
        first, second = torch.tensor([1, 2, 3, 7, 8, 9]), torch.tensor([0, 4, 5, 6, 6, 1])
        (rows(first) + 10 * rows(second)).sum().mul(ranks.rank + 1).backward()
        ((F.embedding(first, whole) + 10 * F.embedding(second, whole)) * 3).sum().backward()
        assert table.weight.grad is not None
        assert whole.grad is not None
        return float((local(table.weight.grad) - whole.grad[ranks.rank * 5 :][:5]).abs().max())

    assert each(tmp_path, 2, work) == [0.0, 0.0]


def test_memory_of_passes_before_stays(tmp_path: Path) -> None:
    """A graph that was captured with it is replayed. Passes of other shapes than the others' are not finite."""

    def work(ranks: Ranks) -> tuple[list[int], bool]:
        table, rows, _ = cut(ranks, tmp_path / "memory", 10)
        for count in (3, 6, 7, 2, 20):
            rows(torch.arange(count) * 9 % 10).sum().backward()
        assert table.weight.grad is not None
        assert local(table.weight.grad).isfinite().all()
        sizes = [len(room.words.own) - 1 for room in rows._rooms]
        rows(torch.arange(2 + ranks.rank) * 9 % 10).sum().backward()
        return sizes, bool(local(table.weight.grad).isfinite().all())

    assert each(tmp_path, 2, work) == [([table_rows._ROOM * count for count in (3, 7, 20)], False)] * 2
