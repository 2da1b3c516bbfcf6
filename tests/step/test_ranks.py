"""Steps of several processes on parts of a batch: the gradient, loss and weights of one process on all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from brimful.core.place import Place
from brimful.data.batches.batch import Whole, make_batch
from brimful.data.batches.shares import share_of
from brimful.hardware.ranks import ALONE, Ranks, joined
from brimful.levers.optimizer import Optimizer
from brimful.step.precision import Precision
from brimful.step.step import Step
from brimful.tasks.task import MultiLabel, Regression, SingleLabel, Task
from forked_ranks import Forked
from step.test_exactness import _label_space
from step.test_step import PACKED, PADDED, execution_of
from tiny import FAMILIES, sequences
from tolerances import STEP_FP64, difference

CPU = torch.device("cpu")
WEIGHTS = np.array([1, 2, 0.5], dtype=np.float32)
#: The first batch has rows for one process alone: what others have no gradient of yet is used, too.
LENGTHS = [[9], [30, 4, 17, 8, 2, 39], [5, 5, 33], [12, 40, 3, 3, 21, 6]]


def tasks() -> dict[str, tuple[Task, np.ndarray]]:
    random = np.random.default_rng(0)
    return {
        "single_label": (SingleLabel(_label_space("single_label", 3), WEIGHTS, 0.1), random.integers(0, 3, (4, 6))),
        "multi_label": (
            MultiLabel(_label_space("multi_label", 3), WEIGHTS, 0.0),
            random.integers(0, 2, (4, 6, 3)).astype(np.float32),
        ),
        "regression": (Regression(_label_space("regression", 3)), random.normal(0, 3, (4, 6, 3)).astype(np.float32)),
    }


def trained(ranks: Ranks, kind: str, *, packed: bool = True) -> dict[str, Any]:
    """Four steps of SGD in fp64, whose weights then hold their gradients."""
    torch.set_num_threads(1)
    task, targets = tasks()[kind]
    model = FAMILIES["bert"].model(3).double().train()
    precision = Precision(value="fp32", device=CPU, reason="a test")
    update = Optimizer(value="sgd").update(model, torch.full((9,), 0.1), precision, max_grad_norm=1.0)
    step = Step(execution_of(model, packed=packed), task, update, precision, seed=0, ranks=ranks)
    outcomes = []
    for number, lengths in enumerate(LENGTHS):
        ids, rows = sequences(lengths, seed=number), np.arange(len(lengths))
        of_rows = np.array([0.5, 2, 1, 1, 3, 1], dtype=np.float32)[: len(lengths)]
        targets_N = targets[number][: len(lengths)]
        whole = Whole(
            denominator=task.denominator(targets_N, of_rows), num_samples=len(lengths), num_tokens=sum(lengths)
        )
        mine = share_of(np.array(lengths), ranks.rank, ranks.count)
        batch = make_batch(
            number, rows[mine], [ids[i] for i in mine], None, targets_N[mine], task, PACKED if packed else PADDED,
            weights_N=of_rows[mine], whole=whole if ranks.count > 1 else None,
        )  # fmt: skip
        outcomes.append(step.run(batch).read())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"weights": weights.numpy(), "told": [(o.loss, o.grad_norm, o.num_samples, o.num_tokens) for o in outcomes]}


@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_learn_what_one_does(count: int, tmp_path: Path) -> None:
    cases = [*((kind, True) for kind in tasks()), ("single_label", False)]

    def work(place: Place) -> list[dict[str, Any]]:
        with joined(place, CPU) as ranks:
            return [trained(ranks, kind, packed=packed) for kind, packed in cases]

    found = Forked(tmp_path, count, work).results()
    for number, (kind, packed) in enumerate(cases):
        expected = trained(ALONE, kind, packed=packed)
        for each in (rank[number] for rank in found):
            assert difference(each["weights"], expected["weights"]) < STEP_FP64
            np.testing.assert_allclose(each["told"], expected["told"], rtol=1e-9)
            assert np.array_equal(each["weights"], found[0][number]["weights"])


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_are_even_and_whole(count: int) -> None:
    random = np.random.default_rng(1)
    for number_of_rows in (1, 2, 7, 32, 256):
        lengths = random.integers(1, 200, number_of_rows)
        shares = [share_of(lengths, rank, count) for rank in range(count)]
        assert sorted(np.concatenate(shares).tolist()) == list(range(number_of_rows))
        assert all((np.diff(share) > 0).all() for share in shares)
        loads = [int(lengths[share].sum()) for share in shares]
        assert max(loads) <= max(lengths.sum() / count * 4 / 3, lengths.max())  # Graham's bound
