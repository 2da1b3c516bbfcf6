"""The promise of the library: however a batch is packed and split, its gradient is the plain padded batch's.

The plain batch is one Hugging Face forward with its own eager attention and one of torch's mean losses. Everything is
in fp64, and gradients are compared over all parameters together.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.core.records import LabelSpace
from brimful.data.batches.batch import Batch, Layout, PackedLayout, PaddedLayout, make_batch
from brimful.data.batches.packing import Budgets
from brimful.data.batches.padding import PaddedShapes
from brimful.levers.optimizer import Optimizer
from brimful.models.packed.packed_forward import (
    LayoutModel,
    PackedForm,
    PackedModel,
    PaddedModel,
    has_token_types,
)
from brimful.step.precision import Precision
from brimful.step.step import Step
from brimful.tasks.task import MultiLabel, Regression, SingleLabel, Task
from plain import gradient, padded, plain_loss
from tiny import FAMILIES, LONGEST, pair_types, sequences
from tolerances import STEP_FP64, STEP_GEMMA, STEP_PARTLY_FP32, difference

FP32 = Precision(value="fp32", device=torch.device("cpu"), reason="a test")


@dataclass(frozen=True)
class Case:
    """One effective batch: its sequences, targets and loss, and the shapes that it is squeezed into.

    room: tokens that a micro-batch may have above its longest sequence, which force from one to many of them.
    """

    lengths: tuple[int, ...]
    pairs: bool
    task: Task
    targets: np.ndarray
    room: int
    spare_slots: int
    seed: int
    weights: np.ndarray | None = None

    def batch(self, layout: Layout) -> Batch:
        ids = sequences(list(self.lengths), self.seed)
        types = pair_types(ids) if self.pairs else None
        given = (np.arange(len(ids)) + 100, ids, types, self.targets, self.task, layout)
        return make_batch(self.seed, *given, weights_N=self.weights)

    def packed(self) -> Batch:
        most = max(self.lengths) + self.room
        budgets = Budgets(tokens=tuple(sorted({max(1, most // 2), most})), fill=1.0)
        return self.batch(
            PackedLayout(
                budgets=budgets,
                num_slots=len(self.lengths) + self.spare_slots,
                max_length=LONGEST,
                padding_id=0,
                groups=True,
            )
        )

    def rows(self) -> Batch:
        return self.batch(
            PaddedLayout(
                shapes=PaddedShapes(
                    lengths=(4, 12, 20, LONGEST),
                    num_tokens=max(self.lengths) + self.room,
                    num_rows=len(self.lengths),
                ),
                max_length=LONGEST,
                padding_id=0,
            )
        )


def _label_space(task: str, number: int) -> LabelSpace:
    return LabelSpace(task=task, names=tuple(f"label {i}" for i in range(number)))  # type: ignore[arg-type]


@st.composite
def cases(draw: st.DrawFn, kind: str, longest: int = 30) -> Case:
    lengths = tuple(draw(st.lists(st.integers(1, longest), min_size=1, max_size=9)))
    seed = draw(st.integers(0, 2**16))
    random = np.random.default_rng(seed)
    weights = draw(st.none() | st.lists(st.sampled_from([0.2, 1.0, 7.0]), min_size=3, max_size=3))
    weights_C = None if weights is None else np.array(weights, dtype=np.float32)
    smoothing = draw(st.sampled_from([0.0, 0.1]))
    task: Task
    if kind == "single_label":
        task = SingleLabel(_label_space(kind, 3), weights_C, smoothing)
        targets = random.integers(0, 3, len(lengths))
    elif kind == "multi_label":
        task = MultiLabel(_label_space(kind, 3), weights_C, smoothing)
        targets = random.integers(0, 2, (len(lengths), 3)).astype(np.float32)
    else:
        outputs = int(kind[-1])
        task = Regression(_label_space("regression", outputs))
        targets = random.normal(0, 3, (len(lengths), outputs)).astype(np.float32)
    of_rows = random.choice([0.1, 1.0, 2.5, 40.0], len(lengths)).astype(np.float32) if draw(st.booleans()) else None
    return Case(
        weights=of_rows,
        lengths=lengths,
        pairs=draw(st.booleans()),
        task=task,
        targets=targets,
        room=draw(st.sampled_from([0, 1, 9, 40, 300])),
        spare_slots=draw(st.integers(0, 3)),
        seed=seed,
    )


@lru_cache
def models(family: str, num_outputs: int) -> tuple[Any, Any]:
    """The same tiny model in fp64 twice: for the plain way, and for ours."""
    model = FAMILIES[family].model(num_outputs).double().train()
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    return plain, model


def accumulated(execution: LayoutModel, case: Case, batch: Batch) -> tuple[float, torch.Tensor]:
    """Loss and gradient of one batch, accumulated micro-batch by micro-batch."""
    update = Optimizer(value="sgd").update(execution.model, torch.zeros(1), FP32, max_grad_norm=1.0)
    step = Step(execution, case.task, update, FP32, seed=0)
    rows = [step.accumulate(batch, index) for index in range(len(batch.micro_batches))]
    loss = sum(float(r.sum()) for r in rows) / float(batch.micro_batches[0].denominator)
    for micro, rows_S in zip(batch.micro_batches, rows, strict=True):
        assert not rows_S[~micro.valid_S].any()
    return loss, gradient(execution.model)


def plain_logits_BC(family: str, plain: Any, ids: list[np.ndarray], types: list[np.ndarray] | None) -> torch.Tensor:
    """Of one padded batch; of batches of one for families with windows, whose eager fp64 is NaN on padding.

    They mask with the lowest fp64 number and take the softmax in fp32, where a padding row beyond the window of any
    token is minus infinity throughout.
    """
    if "local_attention" in FAMILIES[family].settings or "sliding_window" in FAMILIES[family].settings:
        return torch.cat([plain(**padded([i], None, 0)).logits for i in ids])
    logits_BC: torch.Tensor = plain(**padded(ids, types, 0)).logits
    return logits_BC


def check(family: str, case: Case, batch: Batch, tolerance: float) -> None:
    plain, model = models(family, case.task.space.num_outputs)
    ids = sequences(list(case.lengths), case.seed)
    types = pair_types(ids) if case.pairs and has_token_types(plain.config) else None
    plain.zero_grad()
    expected = plain_loss(case.task, plain_logits_BC(family, plain, ids, types), case.targets, case.weights)
    expected.backward()
    known = FAMILIES[family]
    form = known.form
    packed = hasattr(batch.micro_batches[0].inputs, "segments")
    execution: LayoutModel = PackedModel(model, form) if packed else PaddedModel(model)
    loss, found = accumulated(execution, case, batch)
    assert loss == pytest.approx(expected.item(), rel=tolerance)
    assert difference(found, gradient(plain)) < tolerance


KINDS = ("single_label", "multi_label", "regression 1", "regression 2")


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=25)
def test_packed_bert(kind: str, data: st.DataObject) -> None:
    case = data.draw(cases(kind))
    check("bert", case, case.packed(), STEP_FP64)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=10)
def test_padded_bert(kind: str, data: st.DataObject) -> None:
    case = data.draw(cases(kind))
    check("bert", case, case.rows(), STEP_FP64)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "tolerance"),
    [
        ("llama", STEP_PARTLY_FP32),
        ("modernbert", STEP_PARTLY_FP32),
        ("modernbert-mean", STEP_PARTLY_FP32),
        ("gemma2", STEP_GEMMA),
        ("deberta", STEP_PARTLY_FP32),
    ],
)
@given(data=st.data(), kind=st.sampled_from(KINDS))
@settings(max_examples=8)
def test_packed_families(family: str, tolerance: float, data: st.DataObject, kind: str) -> None:
    case = data.draw(cases(kind, longest=LONGEST))
    check(family, case, case.packed(), tolerance)


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["gpt2", "distilbert", "deberta-v2", "deberta-v2-convolution", "mpnet"])
@given(data=st.data(), kind=st.sampled_from(KINDS))
@settings(max_examples=8)
def test_packed_families_that_keep_fp64(family: str, data: st.DataObject, kind: str) -> None:
    case = data.draw(cases(kind, longest=LONGEST))
    check(family, case, case.packed(), STEP_FP64)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "modernbert"])
@given(data=st.data(), kind=st.sampled_from(KINDS))
@settings(max_examples=5)
def test_padded_families(family: str, data: st.DataObject, kind: str) -> None:
    case = data.draw(cases(kind, longest=LONGEST))
    check(family, case, case.rows(), STEP_PARTLY_FP32)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@given(ends=st.lists(st.integers(0, 4), min_size=2, max_size=6), room=st.sampled_from([0, 10, 100]))
@settings(max_examples=15)
def test_texts_that_end_in_the_padding_token(family: str, ends: list[int], room: int) -> None:
    """Padding may be the end token too, as in most decoders: tokenizers may then put it at the end of each text.

    Hugging Face's heads look for the last token that is not padding, and read the one before it.
    """
    ids = [
        np.concatenate([s[:-1], np.zeros(n, dtype=np.int32)])
        for s, n in zip(sequences([4] * len(ends)), ends, strict=True)
    ]
    task = SingleLabel(_label_space("single_label", 3))
    targets = np.arange(len(ids)) % 3
    plain, model = models(family, 3)
    expected = plain_loss(task, plain(**padded(ids, None, 0)).logits, targets)
    expected.backward()
    layout = PackedLayout(
        budgets=Budgets(tokens=(8 + room,), fill=1.0), num_slots=8, max_length=LONGEST, padding_id=0, groups=True
    )
    batch = make_batch(0, np.arange(len(ids)), ids, None, targets, task, layout)
    case = Case(tuple(map(len, ids)), False, task, targets, 0, 0, 0)
    execution = PackedModel(model, PackedForm(pooling="last", first_position=0))
    loss, found = accumulated(execution, case, batch)
    assert loss == pytest.approx(expected.item(), rel=STEP_PARTLY_FP32)
    assert difference(found, gradient(plain)) < STEP_PARTLY_FP32


def test_cases_are_of_one_and_of_many_micro_batches() -> None:
    """Check the cases of the tests above."""
    task = SingleLabel(_label_space("single_label", 3))
    case = Case((30, 20, 10, 30, 1), False, task, np.zeros(5, dtype=np.int64), 0, 1, 0)
    assert len(case.packed().micro_batches) == 4
    assert len(case.rows().micro_batches) == 4
    whole = Case((30, 20, 10, 30, 1), False, task, np.zeros(5, dtype=np.int64), 300, 1, 0)
    assert len(whole.packed().micro_batches) == 1
