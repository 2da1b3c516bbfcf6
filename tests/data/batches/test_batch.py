"""Batches: an order without state, and layouts that lose nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from brimful.core.records import LabelSpace
from brimful.data.batches.batch import Layout, PackedLayout, PaddedLayout, Sampler, make_batch
from brimful.data.batches.packing import Budgets
from brimful.data.batches.padding import PaddedShapes
from brimful.kernels.layout import PackedInputs, PaddedInputs
from brimful.tasks.task import MultiLabel, SingleLabel
from tiny import pair_types, sequences

CPU = torch.device("cpu")
SINGLE = SingleLabel(LabelSpace(task="single_label", names=("a", "b", "c")))
PACKED = PackedLayout(
    budgets=Budgets(tokens=(32, 64, 96), fill=1.0), num_slots=20, max_length=30, padding_id=0, groups=False
)
SHAPES = PaddedShapes(lengths=(8, 16, 30), num_tokens=64, num_rows=20)
PADDED = PaddedLayout(shapes=SHAPES, max_length=30, padding_id=0)
AS_THEY_COME = PaddedLayout(shapes=dataclasses.replace(SHAPES, lengths=None), max_length=30, padding_id=0)
UNSPLIT = dataclasses.replace(PADDED, split=False)


# --- the order ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.integers(1, 40), st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_every_sample_once_an_epoch(num_samples: int, batch_size: int, seed: int, epoch: int) -> None:
    order = Sampler(num_samples=num_samples, batch_size=batch_size, seed=seed)
    first = epoch * order.batches_per_epoch
    batches = [order.samples(first + i) for i in range(order.batches_per_epoch)]
    assert sorted(np.concatenate(batches).tolist()) == list(range(num_samples))
    assert [len(b) for b in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert 0 < len(batches[-1]) <= batch_size
    assert {order.epoch(first + i) for i in range(order.batches_per_epoch)} == {epoch}


@given(st.integers(0, 2**32), st.lists(st.integers(0, 60), min_size=1, max_size=20))
def test_a_function_of_seed_epoch_and_position_alone(seed: int, numbers: list[int]) -> None:
    """Whatever was asked before, of this order or of another, and whatever torch and numpy have drawn."""
    order = Sampler(num_samples=37, batch_size=5, seed=seed)
    expected = [order.samples(n).tolist() for n in range(61)]
    np.random.seed(0)
    Sampler(num_samples=37, batch_size=5, seed=seed + 1).samples(3)
    fresh = Sampler(num_samples=37, batch_size=5, seed=seed)
    assert [fresh.samples(n).tolist() for n in numbers] == [expected[n] for n in numbers]


def test_a_batch_size_does_not_change_the_shuffle() -> None:
    orders = [Sampler(num_samples=20, batch_size=size, seed=1) for size in (3, 7)]
    flat = [np.concatenate([o.samples(i) for i in range(o.batches_per_epoch)]) for o in orders]
    assert np.array_equal(*flat)


def test_epochs_and_seeds_differ() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return Sampler(num_samples=100, batch_size=100, seed=seed).samples(epoch).tolist()

    assert len({tuple(first(seed, epoch)) for seed in (0, 1, 2**40) for epoch in (0, 1, 2)}) == 9


def test_a_batch_cannot_be_written_to() -> None:
    """It is a view of an order that is kept: who changed it would change a later batch."""
    samples = Sampler(num_samples=10, batch_size=4, seed=0).samples(0)
    with pytest.raises(ValueError, match="read-only"):
        samples.sort()


# --- layouts --------------------------------------------------------------------------------------------------------

LAYOUTS = {"packed": PACKED, "padded": PADDED, "as they come": AS_THEY_COME, "unsplit": UNSPLIT}
lengths_of_a_batch = st.lists(st.integers(1, 30), min_size=1, max_size=20)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@given(lengths=lengths_of_a_batch, with_types=st.booleans())
def test_layouts_hold_each_sequence_once(layout: Layout, lengths: list[int], with_types: bool) -> None:
    ids = sequences(lengths)
    types = pair_types(ids) if with_types else None
    found = layout.arrange(ids, types)
    assert sorted(i for _, members in found for i in members) == list(range(len(ids)))
    for inputs, members in found:
        assert 0 < len(members) <= inputs.num_slots
        for slot, member in enumerate(members):
            there, kinds = _slot(inputs, slot)
            assert there.tolist() == ids[member].tolist()
            assert (kinds is None) if types is None else (kinds.tolist() == types[member].tolist())


def test_rows_that_influence_one_another_stay_together() -> None:
    [(inputs, members)] = UNSPLIT.arrange(sequences([30, 3, 30, 9, 30]), None)
    assert (inputs.num_tokens, members) == (150, [0, 1, 2, 3, 4])


@given(lengths=lengths_of_a_batch)
def test_shapes_are_few_and_within_the_budget(lengths: list[int]) -> None:
    for inputs, _ in PACKED.arrange(sequences(lengths), None):
        assert isinstance(inputs, PackedInputs)
        assert inputs.num_tokens in PACKED.budgets.tokens
        assert inputs.num_slots == PACKED.num_slots == len(inputs.first_S)
    for inputs, members in PADDED.arrange(sequences(lengths), None):
        assert isinstance(inputs, PaddedInputs)
        assert inputs.num_tokens <= SHAPES.num_tokens
        rows, length = inputs.ids_RL.shape
        assert length in (8, 16, 30)
        assert rows == inputs.num_slots
        assert length == min(bucket for bucket in (8, 16, 30) if bucket >= max(lengths[i] for i in members))
    assert len(UNSPLIT.arrange(sequences(lengths), None)) == 1


FEW_ROWS = dataclasses.replace(PADDED, shapes=dataclasses.replace(SHAPES, num_rows=2))


@pytest.mark.parametrize(
    ("layout", "most"),
    [(PACKED, 96), (PADDED, 64), (AS_THEY_COME, 64), (UNSPLIT, 600), (FEW_ROWS, 60)],
    ids=["packed", "padded", "as they come", "unsplit", "few rows"],
)
@given(lengths=lengths_of_a_batch)
def test_the_most_tokens_of_a_micro_batch(layout: Layout, most: int, lengths: list[int]) -> None:
    lengths = lengths[:2] if layout is FEW_ROWS else lengths
    assert layout.most_tokens == most
    assert all(inputs.num_tokens <= most for inputs, _ in layout.arrange(sequences(lengths), None))


def _slot(inputs: Any, slot: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(inputs, PackedInputs):
        place = slice(int(inputs.first_S[slot]), int(inputs.last_S[slot]) + 1)
        return inputs.ids_T[place], None if inputs.types_T is None else inputs.types_T[place]
    used = inputs.mask_RL[slot].bool()
    return inputs.ids_RL[slot, used], None if inputs.types_RL is None else inputs.types_RL[slot, used]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@given(lengths=lengths_of_a_batch, seed=st.integers(0, 9))
def test_a_batch_carries_targets_and_samples_together(layout: Layout, lengths: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    samples = random.permutation(1000)[: len(lengths)]
    targets = random.integers(0, 3, len(lengths))
    batch = make_batch(7, samples, sequences(lengths), None, targets, SINGLE, layout)
    label = dict(zip(samples.tolist(), targets.tolist(), strict=True))
    assert (batch.number, batch.num_samples, batch.num_tokens) == (7, len(lengths), sum(lengths))
    assert sorted(batch.samples.tolist()) == sorted(samples.tolist())
    assert batch.num_computed == sum(micro.inputs.num_tokens for micro in batch.micro_batches)
    for micro in batch.micro_batches:
        assert float(micro.denominator) == len(lengths)
        valid = micro.valid_S.numpy()
        assert valid.tolist() == sorted(valid.tolist(), reverse=True)
        assert micro.targets_S[micro.valid_S].tolist() == [label[s] for s in micro.samples.tolist()]
        assert len(micro.targets_S) == len(valid)


def test_the_denominator_is_the_whole_batchs() -> None:
    weights = np.array([0.5, 3, 1], dtype=np.float32)
    single = SingleLabel(SINGLE.space, weights)
    many = MultiLabel(LabelSpace(task="multi_label", names=("a", "b", "c")))
    ids = sequences([30] * 9)
    targets = np.array([0, 1, 2, 1, 1, 0, 2, 2, 1])
    batch = make_batch(0, np.arange(9), ids, None, targets, single, PACKED)
    assert len(batch.micro_batches) > 1
    for micro in batch.micro_batches:
        assert micro.denominator.dtype == torch.float64
        assert float(micro.denominator) == 2 * 0.5 + 4 * 3 + 3 * 1
    batch = make_batch(0, np.arange(9), ids, None, np.eye(9, 3, dtype=np.float32), many, PADDED)
    assert all(float(micro.denominator) == 27 for micro in batch.micro_batches)


def test_map_reaches_every_tensor() -> None:
    ids = sequences([3, 20, 30, 30])
    batch = make_batch(0, np.arange(4), ids, pair_types(ids), np.zeros(4, dtype=np.int64), SINGLE, PACKED)
    for micro in batch.micro_batches:
        moved = micro.map(lambda t: t + 1)
        assert float(moved.denominator) == float(micro.denominator) + 1
        assert torch.equal(moved.inputs.ids_T, micro.inputs.ids_T + 1)
        assert torch.equal(moved.targets_S, micro.targets_S + 1)
        assert torch.equal(moved.valid_S, micro.valid_S + 1)
        assert moved.samples is micro.samples


GROUPED = dataclasses.replace(PACKED, groups=True)


@pytest.mark.sampled
@pytest.mark.parametrize("layout", [PACKED, GROUPED, PADDED, UNSPLIT], ids=["packed", "grouped", "padded", "unsplit"])
@given(lengths=lengths_of_a_batch, paired=st.booleans(), spare=st.sampled_from([None, 0, 4096]))
def test_what_was_sent_arrives(layout: Layout, lengths: list[int], paired: bool, spare: int | None) -> None:
    ids = sequences(lengths)
    targets = np.random.default_rng(1).random((len(ids), 3), dtype=np.float32)
    many = MultiLabel(LabelSpace(task="multi_label", names=("a", "b", "c")))
    batch = make_batch(0, np.arange(len(ids)), ids, pair_types(ids) if paired else None, targets, many, layout)
    place = None if spare is None else torch.full((batch.num_bytes + spare,), 255, dtype=torch.uint8)
    sent = batch.sent(CPU, place)
    for index, micro in enumerate(batch.micro_batches):
        assert batch.arrived(index) is micro
        arrived = sent.arrived(index)
        assert len(sent.memories[index]) == micro.num_bytes
        assert arrived.shape == micro.shape
        assert arrived.samples is micro.samples
        for copied, tensor in zip(arrived.tensors, micro.tensors, strict=True):
            assert torch.equal(copied, tensor)
            assert copied.dtype == tensor.dtype
            assert copied.data_ptr() % 16 == 0
            assert copied.is_contiguous()
        sent.memories[index].zero_()
        assert not any(tensor.any() for tensor in arrived.tensors)


def test_a_model_may_write_into_one_input() -> None:
    ids = sequences([3, 5])
    micro = (
        make_batch(0, np.arange(2), ids, None, np.zeros(2, dtype=np.int64), SINGLE, PADDED)
        .sent(torch.device("cpu"))
        .arrived(0)
    )
    assert isinstance(micro.inputs, PaddedInputs)
    table = torch.randn(int(micro.inputs.ids_RL.max()) + 1, 2, requires_grad=True)
    found = torch.nn.functional.embedding(micro.inputs.ids_RL, table)
    micro.inputs.mask_RL[:, 0] = 0
    found.sum().backward()
    assert table.grad is not None


def test_a_batch_is_written_to_one_piece_of_host_memory() -> None:
    [micro] = make_batch(0, np.arange(2), sequences([5, 3]), None, np.array([0, 1]), SINGLE, PACKED).micro_batches
    size = micro.num_bytes
    for memory in (
        torch.empty(size - 1, dtype=torch.uint8),
        torch.empty(2 * size, dtype=torch.uint8)[::2],
        torch.empty(size, dtype=torch.uint8, device="meta"),
    ):
        with pytest.raises(ValueError, match="do not go into"):
            micro.write(memory)
    with pytest.raises(ValueError, match="another device"):
        dataclasses.replace(micro, targets_S=micro.targets_S.to("meta")).write(torch.empty(size, dtype=torch.uint8))
