"""Memory that runs out: the same batch in smaller micro-batches, the same weights, nothing applied twice or lost."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from brimful.core.errors import MemoryFullError
from brimful.core.records import LabelSpace, OutOfMemory
from brimful.data.batches.batch import Batch, Layout, PackedLayout, PaddedLayout, Whole, make_batch
from brimful.data.batches.packing import Budgets
from brimful.data.batches.padding import PaddedShapes
from brimful.data.batches.shares import shares_of
from brimful.data.tokens.encoder import Tokens, offsets_of
from brimful.engine.assemble import Assembled
from brimful.engine.fitted_step import FittedStep
from brimful.engine.inference import evaluating, predict_logits
from brimful.levers.optimizer import Optimizer
from brimful.models.packed.packed_forward import PackedModel, PaddedModel
from brimful.step.forward import Forward, LayoutForward
from brimful.step.graphs import captured_step
from brimful.step.graphs.captured_forward import PackedForward
from brimful.step.precision import Precision
from brimful.step.step import Step, make_schedule
from brimful.tasks.task import SingleLabel
from failing_allocator import FailingAllocator, StepRecorder
from tiny import FAMILIES, sequences
from tolerances import MODEL_FP32, STEP_FP64, difference

CPU = torch.device("cpu")
PRECISION = Precision(value="fp32", device=CPU, reason="a test")
TASK = SingleLabel(LabelSpace(task="single_label", names=("a", "b", "c")), None, 0.0)
LONGEST = 13
#: Lengths of the sequences of each batch: shapes come again, so that they are captured.
LENGTHS = [[5, 13, 12, 9, 11, 10], [13, 5, 12, 9, 11, 10], [9, 13, 5, 12, 10, 11], [3, 13, 13, 11, 8, 11]]
EVALUATED = [3, 11, 8, 8, 1, 13, 5, 9, 9]
PACKED = PackedLayout(
    budgets=Budgets(tokens=(32, 64), fill=1.0), num_slots=6, max_length=LONGEST, padding_id=0, groups=True
)
PADDED = PaddedLayout(shapes=PaddedShapes(lengths=(8, 13), num_tokens=96, num_rows=6), max_length=LONGEST, padding_id=0)


#: As kernels of variable lengths want it: the same shapes for every batch.
FIXED = replace(PACKED, groups=False)


@dataclass
class Session:
    """A model that learns from four batches, is evaluated, and learns from one more.

    captured: by graphs. switch: batches from this number on are laid out with at most so many tokens.
    """

    layout: Layout = PACKED
    captured: bool = False
    optim: str = "adamw_torch"
    dropout: float = 0.1
    dtype: torch.dtype = torch.float32
    switch: tuple[int, int] | None = None
    found: list[OutOfMemory] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    allocator: FailingAllocator = field(default_factory=FailingAllocator)

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(_model(self.dropout)).train().to(self.dtype)
        packed = isinstance(self.layout, PackedLayout)
        form = FAMILIES["bert"].form
        execution = PackedModel(self.model, form, plain=self.captured) if packed else PaddedModel(self.model, "eager")
        schedule = make_schedule("linear", 2e-3, 5, 2)
        optimizer = Optimizer(value=self.optim, weight_decay=0.1)  # type: ignore[arg-type]
        self.update = optimizer.update(self.model, schedule, PRECISION, max_grad_norm=1.0)
        parts, recorder = (execution, TASK, self.update, PRECISION), StepRecorder(lambda: self.allocator, self.update)  # type: ignore[arg-type]
        if self.captured:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(captured_step, "GraphPool", lambda *_: recorder)
                self.step: Step = captured_step.CapturedStep(
                    *parts, seed=3, most_tokens=64, precompile=False, note=pytest.fail
                )
        else:
            self.step = Step(*parts, seed=3)
        built = Assembled(
            model=self.model,
            execution=execution,
            layout=self.layout,
            step=self.step,
            precision=PRECISION,
            recipe=None,  # type: ignore[arg-type]
            packing=None,  # type: ignore[arg-type]
            lengths=[np.array(lengths) for lengths in LENGTHS],
            longest=LONGEST,
        )
        self.fitted = FittedStep(built, self.found.append)
        self.forward = self._forward(execution, recorder)
        self.forward.hear, self.forward.where = self.found.append, "evaluation"

    def _forward(self, execution: Any, recorder: StepRecorder) -> Forward:
        if self.captured:
            return PackedForward(
                execution, PRECISION, budget=64, longest=LONGEST, padding_id=0, typical_length=None,
                recorder=recorder, fused=False, note=pytest.fail,
            )  # fmt: skip
        return LayoutForward(execution, self.layout, PRECISION, batch_tokens=64, most_rows=6)

    def batch(self, number: int) -> Batch:
        lengths = LENGTHS[number % 4]
        ids, targets = sequences(lengths, seed=number), np.arange(len(lengths)) % 3
        batch = make_batch(number, np.arange(len(lengths)), ids, None, targets, TASK, self.fitted.layout)
        return batch.sent(CPU) if self.captured else batch

    def run(self) -> Session:
        """All of it. Batches are made two ahead, as a feed makes them."""
        coming = [self.batch(0), self.batch(1)]
        with self.allocator:
            for number in range(5):
                with self.allocator.idle():
                    if self.switch is not None and number == self.switch[0]:
                        self.fitted.limit_to(self.switch[1])
                    coming.append(self.batch(number + 2))
                pending = self.fitted.run(coming.pop(0))
                with self.allocator.idle():
                    self.losses.append(pending.read().loss)
                if number == 3:
                    with evaluating(self.model):
                        self.logits_NC = np.concatenate([predict_logits(self.forward, _tokens()) for _ in range(2)])
        return self

    @property
    def weights(self) -> torch.Tensor:
        """All of the model's, in one."""
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    @property
    def state(self) -> torch.Tensor:
        """Weights and everything that the optimizer keeps, in one."""
        state = self.step.state()
        kept = [*state.weights.values(), *(t for each in state.optimizer.values() for t in each.tensors.values())]
        counters = torch.tensor([state.counters.applied, len(state.counters.used)])
        return torch.cat([*(tensor.detach().flatten().double() for tensor in kept), counters.double()])


@lru_cache
def _model(dropout: float) -> Any:
    return FAMILIES["bert"].model(dropout=dropout, num_hidden_layers=1)


def _fits(tensor: torch.Tensor, num_tokens: int) -> bool:
    """True unless it is a hidden state of more tokens than these."""
    return tensor.ndim != 3 or tensor.shape[-1] != 16 or tensor.numel() <= 16 * num_tokens


def _tokens() -> Tokens:
    ids = sequences(EVALUATED, seed=9)
    return Tokens(
        ids=np.concatenate(ids).astype(np.int32),
        offsets=offsets_of(np.array(EVALUATED)),
        types=None,
        truncated=np.zeros(len(ids), np.bool_),
    )


KINDS: dict[str, dict[str, Any]] = {
    "eager": {},
    "captured": {"captured": True, "layout": FIXED},
    "padded": {"layout": PADDED},
    "sgd": {"optim": "sgd"},
}
#: Points of each kind: 200 in all.
POINTS = {"eager": 60, "captured": 70, "padded": 40, "sgd": 30}


def _points(number: int, of: int) -> Iterator[int]:
    """`number` allocations spread over all, each at another place of its step."""
    return (1 + round(index * (of - 1) / (number - 1)) for index in range(number))


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_wherever_memory_runs_out_the_run_is_one_that_had_the_smaller_budget(kind: str) -> None:
    """Weights, states, losses, bit for bit: with dropout, so that masks are those of the smaller micro-batches too."""
    make = partial(Session, **KINDS[kind])
    whole = make().run()
    expected: dict[tuple[int, int] | None, Session] = {None: whole}
    where = set()
    for point in _points(POINTS[kind], whole.allocator.num_allocations):
        session = make(allocator=FailingAllocator([point])).run()
        assert len(session.allocator.failed) == len(session.found) == 1, session.allocator.failed
        found = session.found[0]
        assert (found.tokens_after < found.tokens_before) == (found.batch is None or session.fitted.limit is not None)
        where.add(found.where)
        limit = session.fitted.limit  # None where larger batches fitted before
        switch = None if found.batch is None or limit is None else (found.batch - 1, limit)
        if switch not in expected:
            expected[switch] = make(switch=switch).run()
        assert torch.equal(session.state, expected[switch].state), (point, session.allocator.failed)
        assert session.losses == expected[switch].losses
        assert difference(session.logits_NC, expected[switch].logits_NC) <= MODEL_FP32
    assert where == {"step", "evaluation"} | ({"capture"} if kind == "captured" else set())
    assert len(expected) > 3


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["eager", "captured"])
def test_another_split_learns_the_same(kind: str) -> None:
    """Without dropout, in fp64, and if memory runs out in the second attempt too."""
    make = partial(Session, **KINDS[kind], dropout=0.0, dtype=torch.float64)
    whole = make().run()
    number = whole.allocator.num_allocations
    for point in _points(4, number):
        session = make(allocator=FailingAllocator([point, point + 3])).run()
        assert difference(session.weights, whole.weights) <= STEP_FP64
        assert difference(session.logits_NC, whole.logits_NC) <= MODEL_FP32
        assert session.found


def test_one_row_is_the_smallest_there_is() -> None:
    """A batch that does not fit however it is split: one clear error, and weights as they were before."""
    session = Session(allocator=FailingAllocator(fits=lambda tensor: _fits(tensor, 15)))
    state = session.state
    with pytest.raises(MemoryFullError, match="the step of batch 1, and micro-batches of 16 tokens cannot") as caught:
        session.run()
    assert caught.value.resumable
    assert caught.value.hint is not None
    assert "--max-length" in caught.value.hint
    assert torch.equal(session.state, state)
    assert session.found == []


def test_a_batch_smaller_than_those_that_fitted_is_not_split() -> None:
    """A ragged last batch: what was freed is enough, and the budget of all others stays."""
    session = Session()
    few = make_batch(1, np.arange(2), sequences([5, 9]), None, np.arange(2), TASK, PACKED)
    session.fitted.run(session.batch(0))
    with (allocator := FailingAllocator([40])):
        session.fitted.run(few)
    (found,) = session.found
    assert len(allocator.failed) == 1
    assert (found.batch, found.tokens_before, found.tokens_after) == (2, 32, 32)
    assert session.fitted.layout == PACKED


def test_processes_split_a_batch_that_did_not_fit_alike() -> None:
    """Whatever part of an earlier batch each of them had, of which the largest micro-batch fits."""
    first, second = np.array([25, 4, 26, 15, 10, 18, 35, 38]), np.array([23, 30, 11, 12])
    layout = PaddedLayout(
        shapes=PaddedShapes(lengths=(16, 32, 64), num_tokens=96, num_rows=6), max_length=64, padding_id=0
    )
    sizes = []
    for rank in range(2):
        tries = list[int]()

        def part(number: int, lengths: np.ndarray, layout: Layout, rank: int = rank) -> Batch:
            shares = shares_of(lengths, 2)
            whole = Whole(denominator=1.0, num_samples=len(lengths), num_tokens=int(lengths.sum()),
                          shares=[lengths[rows] for rows in shares])  # fmt: skip
            mine = shares[rank]
            ids = [np.ones(length, dtype=np.int64) for length in lengths[mine]]
            return make_batch(number, mine, ids, None, np.zeros(len(mine), np.int64), TASK, layout, whole=whole)

        def work(batch: Batch, tries: list[int] = tries) -> Batch:
            tries.append(len(batch.micro_batches))
            if len(tries) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return batch

        step = SimpleNamespace(device=torch.device("cpu"), captures=False, abandon=lambda: True)
        built = SimpleNamespace(layout=layout, step=step, longest=40, lengths=[first, second], remedy=None)
        fitted = FittedStep(cast(Assembled, built), lambda _: None)
        for number, lengths in enumerate((first, second)):
            fitted.attempt(part(number, lengths, fitted.layout), work, where="step")
        sizes.append(tries)
    assert sizes[0] == sizes[1]


def test_as_many_halvings_as_it_takes_are_one_event() -> None:
    """Micro-batches of 26 tokens do not fit, and those of one row of 13 do."""
    session = Session(layout=PADDED, allocator=FailingAllocator(fits=lambda tensor: _fits(tensor, 13))).run()
    first, *others = ((found.where, found.batch, found.tokens_after) for found in session.found)
    assert (first, {found[:2] for found in others}) == (("step", 1, 13), {("evaluation", None)})
    expected = Session(layout=PADDED, switch=(0, session.fitted.limit or 0)).run()
    assert torch.equal(session.state, expected.state)


def test_where_no_graph_fits_steps_run_eagerly_on_the_batches_of_before() -> None:
    whole, session = Session(**KINDS["captured"]).run(), Session(**KINDS["captured"])
    session.step._graphs._recorder.refusal = "CUDA out of memory"  # type: ignore[attr-defined]
    session.run()
    assert session.found[-1].eager
    assert session.fitted.layout == session.layout
    assert not session.step.captures
    assert difference(session.weights, whole.weights) <= 1.0


def test_memory_that_runs_out_while_weights_change_is_the_end() -> None:
    """An update that may be half done is not done again."""
    session = Session()
    step = session.update._optimizers[0].step  # type: ignore[attr-defined]

    def fail() -> None:
        step()
        if session.update.committed:
            raise torch.OutOfMemoryError("CUDA out of memory")

    session.update._optimizers[0].step = fail  # type: ignore[attr-defined]
    with pytest.raises(MemoryFullError, match="while weights were being changed") as caught:
        session.run()
    assert not caught.value.resumable


@pytest.mark.parametrize("place", [0.3, 0.6, 0.9])
def test_a_batch_that_is_begun_again_is_counted_once(place: float) -> None:
    """Running means of BatchNorm, wherever memory runs out: rows that must stay together are tried once more."""

    def learned(*fail_at: int) -> tuple[dict[str, torch.Tensor], FailingAllocator]:
        session = Session(layout=replace(PADDED, split=False))
        session.model.classifier = torch.nn.Sequential(torch.nn.BatchNorm1d(16), session.model.classifier)
        with (allocator := FailingAllocator(fail_at)):
            session.fitted.run(session.batch(0))
        return dict(session.model.named_buffers()), allocator

    expected, whole = learned()
    found, allocator = learned(round(place * whole.num_allocations))
    assert len(allocator.failed) == 1
    assert found["classifier.0.num_batches_tracked"] == 1
    assert all(torch.equal(found[name], value) for name, value in expected.items())
