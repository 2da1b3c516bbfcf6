"""Dropout masks that our kernels draw belong to a token of the effective batch, however it is split and packed.

On the CPU by Triton's interpreter. The classifier's own dropout is torch's, and off here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from brimful.core.place import Place
from brimful.data.batches.batch import Arranged, Batch, Layout, PackedLayout, Sampler, Shares
from brimful.data.batches.packing import Budgets
from brimful.data.batches.padding import PaddedShapes
from brimful.data.batches.prefetch import Source
from brimful.data.tokens.encoder import Tokens
from brimful.hardware.ranks import ALONE, Ranks, joined
from brimful.kernels.attention.distance_bias import relative_attention_HTD
from brimful.kernels.attention.pattern import Pattern, RelativeBias
from brimful.kernels.attention.varlen import varlen_attention_HTD
from brimful.kernels.forward_context import ForwardContext
from brimful.kernels.layers.seeded_dropout import seeded_dropout
from brimful.kernels.layout import Inputs, PackedInputs
from brimful.levers.optimizer import Optimizer
from brimful.models.fusion import embedding_backend
from brimful.models.model_stats import embeddings_of, layers_of
from brimful.models.packed.packed_forward import ForwardOutputs, PackedForm, PackedModel, PaddedModel
from brimful.models.packed.recompute import recompute
from brimful.step.precision import Precision
from brimful.step.step import Step
from forked_ranks import Forked
from models.fusion.test_fusion import FEW, ONE_LAYER, WIDE, our_attention
from models.fusion.test_last_layer import compile_layers
from plain import gradient
from step.test_step import CPU, PADDED, TASK, execution_of, make_step
from tiny import FAMILIES, sequences
from tolerances import difference

__all__ = ["our_attention"]
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at inputs' gradients

LENGTHS = np.array([5, 12, 2, 6, 1, 4])
#: Channels of the attention whose masks are looked at: a key each.
HEADS, CHANNELS = 2, 16
ONE = replace(FEW, budgets=Budgets(tokens=(32,), fill=1.0), num_slots=6)
SEVERAL = replace(FEW, budgets=Budgets(tokens=(16,), fill=1.0), num_slots=6, max_length=16)


class Backwards(PackedLayout):
    """Sequences in the opposite order."""

    def arrange(self, ids: Sequence[np.ndarray], types: Sequence[np.ndarray] | None, shares: Shares = ()) -> Arranged:
        found = super().arrange(ids[::-1], types, shares)
        return [(inputs, [len(ids) - 1 - member for member in members]) for inputs, members in found]


BACKWARDS = Backwards(**vars(ONE))


def batch_of(layout: Layout, rank: int = 0, count: int = 1, number: int = 1) -> Batch:
    """One process's part of a batch, as training makes it. The second: its order is another than the data set's."""
    ids = sequences(LENGTHS.tolist())
    offsets = np.cumsum([0, *LENGTHS])
    tokens = Tokens(
        ids=np.concatenate(ids).astype(np.int32), offsets=offsets, types=None, truncated=np.zeros(len(ids), bool)
    )
    order = Sampler(num_samples=len(ids), batch_size=len(ids), seed=0)
    source = Source(tokens, np.arange(len(ids)) % 3, TASK, layout, order, part=(rank, count))
    (batch,) = source.batches(number, number + 1)
    return batch


def masks_of(batch: Batch) -> dict[int, list[Tensor]]:
    """Of each sample what is kept of hidden states (L, 8), and of attention's weights (H, L, L) without and with a bias
    by distance."""
    found = {}
    for micro in batch.micro_batches:
        inputs = micro.inputs
        assert isinstance(inputs, PackedInputs)
        context = ForwardContext(seed=torch.tensor(9), places_X=inputs.places_T)
        with context.layer(0).active():
            states_TH = seeded_dropout(torch.ones(inputs.num_tokens, 8), 0.5)
            weights = [attention_weights(inputs, bias) for bias in (False, True)]
        starts = inputs.segments.cu_seqlens_N.tolist()
        for slot, sample in enumerate(micro.samples.tolist()):
            of = slice(starts[slot], starts[slot + 1])
            found[sample] = [states_TH[of] != 0, *(each[:, of, : LENGTHS[sample]] != 0 for each in weights)]
    return found


def attention_weights(inputs: PackedInputs, bias: bool) -> Tensor:
    """(H, T, CHANNELS): of each query's keys, all alike before dropout."""
    nothing = torch.zeros(HEADS, inputs.num_tokens, CHANNELS)
    values = torch.nn.functional.one_hot(inputs.positions_T.clamp(max=CHANNELS - 1), CHANNELS).float()
    given = (nothing, nothing, values.expand(HEADS, -1, -1), inputs.segments)
    pattern = Pattern(scale=1.0, dropout=0.5)
    if not bias:
        return varlen_attention_HTD(*given, pattern)
    bucket_W = torch.zeros(2 * inputs.segments.max_length, dtype=torch.int64)
    relative = RelativeBias(bias_HR=torch.zeros(HEADS, 1), bucket_W=bucket_W)
    return relative_attention_HTD(*given, replace(pattern, relative=relative))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("layout", "count"),
    [(SEVERAL, 1), (BACKWARDS, 1), (ONE, 2), (SEVERAL, 2), (ONE, 4)],
    ids=["budget", "order", "2", "2 and budget", "4"],
)
def test_masks_are_those_of_the_whole_batch_in_one_row(layout: PackedLayout, count: int) -> None:
    expected = masks_of(batch_of(ONE))
    found: dict[int, list[Tensor]] = {}
    for rank in range(count):
        found |= masks_of(batch_of(layout, rank, count))
    assert found.keys() == expected.keys() == set(range(len(LENGTHS)))
    for sample, masks in expected.items():
        assert all(torch.equal(one, other) for one, other in zip(masks, found[sample], strict=True))


def test_sequences_and_heads_have_masks_of_their_own() -> None:
    masks = masks_of(batch_of(ONE))
    states = torch.cat([each[0] for each in masks.values()])
    assert len(states.unique(dim=0)) > 0.8 * len(states)  # of 256 that there are
    for one, other in ((masks[1], masks[5]), (masks[5], masks[3])):
        length = len(other[0])
        assert not torch.equal(one[1][:, :length, :length], other[1])
    assert not torch.equal(masks[1][1][0], masks[1][1][1])
    share = torch.cat([each[1].flatten() for each in masks.values()]).float().mean()
    assert 0.4 < float(share) < 0.6


def test_padded_rows_have_the_same_places() -> None:
    batches = [batch_of(layout, rank, 2) for layout in (ONE, PADDED) for rank in range(2)]
    found: list[dict[int, list[int]]] = [{}, {}]
    for index, batch in enumerate(batches):
        for micro in batch.micro_batches:
            inputs = micro.inputs
            for slot, sample in enumerate(micro.samples.tolist()):
                if isinstance(inputs, PackedInputs):
                    assert inputs.places_T is not None
                    places = inputs.places_T[inputs.segments.segment_T == slot]
                else:
                    assert inputs.places_RL is not None
                    places = inputs.places_RL[slot, : LENGTHS[sample]]
                found[index // 2][sample] = places.tolist()
    assert found[0] == found[1]
    assert sorted(place for places in found[0].values() for place in places) == list(range(LENGTHS.sum()))


def fused_step(ranks: Ranks = ALONE, seed: int = 0, checkpoint: Sequence[int] = ()) -> tuple[Step, Any]:
    """A step of two layers on fused kernels, the last one cut short to first tokens, and its model."""
    model = FAMILIES["bert"].model(dropout=0.3, **WIDE | {"num_hidden_layers": 2}).train()
    model.dropout.p = 0.0
    precision = Precision(value="fp32", device=CPU, reason="a test")
    update = Optimizer(value="sgd").update(model, torch.full((9,), 0.1), precision, max_grad_norm=1.0)
    execution: Any = execution_of(model)
    execution.last = compile_layers(model)
    embeddings: Any = embeddings_of(model)
    embeddings.compile(dynamic=True, backend=partial(embedding_backend, before_fused=True))
    recompute(list(layers_of(model) or ()), checkpoint)
    return Step(execution, TASK, update, precision, seed=seed, ranks=ranks), model


def learned(step: Step, model: Any, batch: Batch) -> Tensor:
    """Changes of the weights in one step of SGD."""
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert step.run(batch).read().applied
    changes = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    assert changes.any()
    return changes


@cache
def learned_of_one_row() -> Tensor:
    return learned(*fused_step(), batch_of(ONE))


@pytest.mark.thorough
def test_a_step_learns_the_same_of_several_rows_and_of_recomputed_layers(our_attention: None) -> None:
    batch = batch_of(Backwards(**vars(SEVERAL)))
    assert len(batch.micro_batches) > 1
    assert difference(learned(*fused_step(checkpoint=(0, 1)), batch), learned_of_one_row()) < 1e-5


def test_so_does_one_whose_layers_are_not_compiled(our_attention: None) -> None:
    """With all dropout by our kernel, and the last layer's of the tokens that the head reads."""
    found = []
    for layout in (ONE, Backwards(**vars(SEVERAL))):
        model = FAMILIES["bert"].model(dropout=0.3, **ONE_LAYER).train()
        model.dropout.p = 0.0
        step = make_step(model, optimizer=Optimizer(value="sgd"), schedule=torch.full((9,), 0.1))
        step.execution = PackedModel(model, PackedForm(pooling="first", first_position=0, short=True))
        step.seeded_dropout = True
        model.bert.embeddings.dropout.p = 0.0  # torch's
        found.append(learned(step, model, batch_of(layout)))
    assert difference(*found) < 1e-5


@pytest.mark.slow
def test_two_processes_learn_what_one_does(our_attention: None, tmp_path: Path) -> None:
    def work(place: Place) -> Tensor:
        torch.set_num_threads(1)
        with joined(place, CPU) as ranks:
            step, model = fused_step(ranks)
            found = learned(step, model, batch_of(ONE, ranks.rank, ranks.count))
            step.release()
            return found

    expected = learned_of_one_row()
    for found in Forked(tmp_path, 2, work).results():
        assert difference(found, expected) < 1e-5


class Watched(PaddedModel):
    """Tells what each pass is given."""

    def __init__(self, model: Any, look: Callable[[Inputs, ForwardContext], None]) -> None:
        super().__init__(model)
        self._look = look

    def __call__(self, inputs: Inputs, context: ForwardContext | None = None) -> ForwardOutputs:
        assert context is not None
        self._look(inputs, context)
        return super().__call__(inputs, context)


def test_the_seed_is_one_of_a_run_and_a_batch() -> None:
    """Of all its micro-batches, in all processes."""
    layout = replace(PADDED, shapes=PaddedShapes(lengths=(16,), num_tokens=48, num_rows=6))
    model, batch = FAMILIES["bert"].model().train(), batch_of(layout)
    seen: list[int] = []

    def look(_: Any, context: ForwardContext) -> None:
        assert context.seed is not None
        seen.append(int(context.seed))

    found: dict[tuple[int, int], set[int]] = {}
    for seed, rank in itertools.product((0, 1), (0, 1)):
        step = make_step(model, packed=False, seed=seed)
        step.ranks, step.execution = Ranks(Place(rank=rank, count=2, local_rank=rank)), Watched(model, look)
        for number, index in itertools.product((0, 1, 2, 0), (0, 1)):
            step.accumulate(replace(batch, number=number), index)
            found.setdefault((seed, number), set()).add(seen.pop())
    assert len(found) == 6
    assert all(len(seeds) == 1 for seeds in found.values())
    assert len(set[int]().union(*found.values())) == 6


@pytest.mark.slow
def test_a_pass_without_a_step_draws_the_masks_of_recomputed_layers_again(our_attention: None) -> None:
    """Our attention's seed and torch's dropout come of one generator there."""
    batch, found = batch_of(ONE), []
    for checkpoint in ((), (0, 1)):
        model = FAMILIES["bert"].model(dropout=0.3, **WIDE | {"num_hidden_layers": 2}).train()
        recompute(list(layers_of(model) or ()), checkpoint)
        torch.manual_seed(0)
        logits = execution_of(model)(batch.micro_batches[0].inputs).logits
        logits.square().sum().backward()
        found.append(gradient(model))
    assert torch.equal(*found)
