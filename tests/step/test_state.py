"""States of which each process has a part: put together, whatever dimension they are cut along."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from brimful.step.state import Counters, ParameterState, Part, StepState, whole_of

COUNTERS = Counters(applied=3, scale=1.0, growth=0, used=("flat", "rows", "columns", "whole"))
WHOLE = {name: torch.arange(12.0).view(4, 3) + 100 * number for number, name in enumerate(COUNTERS.used)}


def parts() -> list[StepState]:
    """Of two processes: the numbers of one tensor cut in the midst of a row, of others by rows and by columns."""
    cuts = {
        "flat": [(WHOLE["flat"].view(-1)[:5], (0,)), (WHOLE["flat"].view(-1)[5:], (5,))],
        "rows": [(WHOLE["rows"][:3], (0, 0)), (WHOLE["rows"][3:], (3, 0))],
        "columns": [(WHOLE["columns"][:, 1:], (0, 1)), (WHOLE["columns"][:, :1], (0, 0))],
    }
    found = []
    for rank in range(2):
        own = {name: cut[rank] for name, cut in cuts.items()}
        tensors = {
            name: {"exp_avg": -part} | ({} if rank else {"step": torch.tensor(3.0)}) for name, (part, _) in own.items()
        }
        places = {name: Part(shape=(4, 3), starts=starts) for name, (_, starts) in own.items()}
        found.append(
            StepState(
                weights={name: part for name, (part, _) in own.items()} | ({} if rank else {"whole": WHOLE["whole"]}),
                buffers={} if rank else {"positions": torch.arange(3)},
                optimizer={name: ParameterState(tensors=kept) for name, kept in tensors.items()},
                counters=COUNTERS,
                parts={f"weights/{name}": place for name, place in places.items()}
                | {f"optimizer/{name}/exp_avg": place for name, place in places.items()},
            )
        )
    return found


def test_parts_make_the_whole() -> None:
    state = whole_of(parts())
    assert not state.parts
    assert state.weights.keys() == WHOLE.keys()
    assert all(torch.equal(state.weights[name], tensor) for name, tensor in WHOLE.items())
    for name in ("flat", "rows", "columns"):
        assert torch.equal(state.optimizer[name].tensors["exp_avg"], -WHOLE[name])
        assert float(state.optimizer[name].tensors["step"]) == 3.0
    assert state.buffers.keys() == {"positions"}


def test_what_is_missing_is_said() -> None:
    first, _ = parts()
    with pytest.raises(ValueError, match="parts of weights/flat are missing"):
        whole_of([first])


def test_what_lies_outside_is_said() -> None:
    first, second = parts()
    moved = replace(second, parts=second.parts | {"weights/rows": Part(shape=(4, 3), starts=(4, 0))})
    with pytest.raises(ValueError, match="parts of weights/rows are of several tensors"):
        whole_of([first, moved])


def test_memory_need_not_hold_all_at_once() -> None:
    state = whole_of(parts())
    assert state.weights["rows"] is not state.weights["rows"]  # put together when it is asked for
    assert state.shapes() == dict.fromkeys(WHOLE, (4, 3)) | {"positions": (3,)}
    assert "rows" in state.weights
    assert "none" not in state.weights
    assert state.num_bytes == sum(7 * each.nbytes for each in WHOLE.values()) // 4 + 3 * 4 + 3 * 8


def test_one_that_is_whole_is_left_alone() -> None:
    state = replace(parts()[0], parts={})
    assert whole_of([state]) is state
