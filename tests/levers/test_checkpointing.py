"""Layers that are recomputed: the same gradient bit for bit, fewer bytes kept, and what is refused."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_layers import GradientCheckpointingLayer

import brimful
from brimful.core.errors import OptionError
from brimful.core.options.train import TrainOptions
from brimful.kernels.layout import padded_inputs
from brimful.levers.activations import kept_ways, offloaded_layers
from brimful.levers.checkpointing import Checkpointing
from brimful.levers.lever import StepWork
from brimful.levers.token_budget import TokenBudget
from brimful.models.model_stats import layers_of
from brimful.models.packed import offload as offloading
from brimful.models.packed.activations import Activations, LayerActivations
from brimful.models.packed.check_inputs import one_layer_of_each_kind, packed_row, padded_rows
from brimful.models.packed.family_forms import has_form
from brimful.models.packed.offload import HostActivations, Moves, offload
from brimful.models.packed.packed_forward import PackedModel, PaddedModel
from brimful.models.packed.recompute import keep_all, recompute
from brimful.models.packed.ways import Way
from levers.assemblies import assembly_of
from runs import save_tiny_model, single_label_rows, write_rows
from tiny import FAMILIES, LONGEST
from tolerances import MODEL_FP32, difference

pytestmark = pytest.mark.filterwarnings("ignore:.* saves nothing on a CPU")

ASKED = ("none", "full", "selective", "offload")
DEEP = {"hidden_size": 32, "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", single_label_rows(48))


def weights_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "packing", "limit"),
    [
        ("bert", "auto", "700KB"),
        ("bert", "off", "700KB"),
        ("modernbert", "auto", "700KB"),
        ("deberta-v2", "auto", "900KB"),
        ("llama", "off", "700KB"),
    ],
)
def test_a_run_learns_the_same_bit_for_bit(
    family: str, packing: Any, limit: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout on."""
    monkeypatch.setattr("brimful.models.packed.offload.LEAST_BYTES", 1)
    model = save_tiny_model(tmp_path / "base", family=family, dropout=0.2, num_hidden_layers=4)
    found = []
    for asked in ASKED:
        run = brimful.train(
            data, model=model, output=tmp_path / asked, max_steps=4, batch_size=8, packing=packing, eval_split=0.0,
            device="cpu", gradient_checkpointing=asked, activation_memory=limit if asked == "selective" else None,
            execution="eager", token_budget=128,
        )  # fmt: skip
        lines = {lever.name: lever for lever in run.recipe.levers}
        if asked != "none":
            line = lines["gradient_checkpointing"]
            assert (line.value, line.arithmetic) == (asked, "exact")
            assert {"selective": "less kept", "offload": "layer 1 of 4"}.get(asked, "") in line.reason
        found.append(weights_of(tmp_path / asked))
    plain, *others = found
    for other in others:
        assert all(torch.equal(plain[name], other[name]) for name in plain)


#: Families whose own modules are told of a packed row.
TOLD = [name for name in FAMILIES if has_form(FAMILIES[name].configuration())]


@pytest.mark.slow
def test_a_layer_whose_call_is_a_checkpoint_itself_is_recomputed_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in transformers 5.17, where `__call__` of a layer is one around the call that knows its context."""
    outer = 0

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal outer
        plain = super(GradientCheckpointingLayer, layer).__call__
        if layer.gradient_checkpointing and layer.training:
            outer += 1
            return layer._gradient_checkpointing_func(partial(plain, **kwargs), *args)
        return plain(*args, **kwargs)

    monkeypatch.setattr(GradientCheckpointingLayer, "__call__", call, raising=False)
    monkeypatch.setattr("brimful.models.packed.offload.LEAST_BYTES", 1)
    model, found = save_tiny_model(tmp_path / "base", dropout=0.2, num_hidden_layers=4), []
    for asked in ("none", "full", "offload"):
        brimful.train(
            data, model=model, output=tmp_path / asked, max_steps=3, batch_size=8, eval_split=0.0, device="cpu",
            gradient_checkpointing=asked, baselines=False,
        )  # fmt: skip
        found.append(weights_of(tmp_path / asked))
    assert outer
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in other)


def test_a_copy_for_a_check_keeps_all_activations() -> None:
    """A GPU's streams, which move them, could not be copied."""
    model = FAMILIES["bert"].model(**DEEP)
    layers = layers_of(model)
    offload(layers, 2, torch.device("cpu"))
    small = layers_of(one_layer_of_each_kind(model))
    assert not any(layer.gradient_checkpointing or layer._gradient_checkpointing_func for layer in small)
    assert all(layer.gradient_checkpointing and layer._gradient_checkpointing_func for layer in layers)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "packed"), [*((name, True) for name in TOLD), ("xlm", False)])
def test_a_layer_is_recomputed_as_it_was_told(name: str, packed: bool) -> None:
    """With dropout on. By the backward pass what modules were told is forgotten, and a cache, as of XLM, is full."""
    family, draw = FAMILIES[name], np.random.default_rng(0)
    ids = family.ended([draw.integers(5, 40, length).astype(np.int32) for length in (30, 7, 18, 11)])
    gradients = []
    for number_of_recomputed in (0, 2):
        model = family.model(3, dropout=0.2).train()
        execution = PackedModel(model, family.form) if packed else PaddedModel(model)
        recompute(list(layers_of(model) or ()), range(number_of_recomputed))
        row = packed_row(ids, model.config, LONGEST) if packed else padded_rows(ids, model.config)
        torch.manual_seed(1)
        logits_SC = execution(row).logits[: len(ids)]
        logits_SC.logsumexp(1).sum().backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        gradients.append(torch.cat([gradient.flatten() for gradient in found]))
    assert difference(gradients[1], gradients[0]) < MODEL_FP32


class Kept:
    """A tensor that a backward pass was promised."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def kept_bytes(step: brimful.Step, rows: list[dict[str, Any]]) -> int:
    """Bytes kept between forward and backward pass, each storage counted once, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in step._built.model.parameters()}
    alive: weakref.WeakSet[Kept] = weakref.WeakSet()

    def pack(x: Tensor) -> Kept:
        kept = Kept(x.detach())  # an output that is kept would keep what keeps it
        alive.add(kept)
        return kept

    batch = step.batch(rows)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        loss_S = step._built.step.loss_rows_S(batch.arrived(0))
        gc.collect()
        storages = {kept.tensor.untyped_storage().data_ptr(): kept.tensor.untyped_storage().nbytes() for kept in alive}
        loss_S.sum().backward()
    return sum(num_bytes for place, num_bytes in storages.items() if place not in weights)


@pytest.mark.slow
def test_less_is_kept_and_release_undoes_it() -> None:
    draw = np.random.default_rng(0)
    rows = [{"input_ids": draw.integers(5, 40, 30), "labels": 0} for _ in range(8)]
    kept = {}
    for asked in ("none", "every-2", "full"):
        model = FAMILIES["bert"].model(**DEEP).train()
        step = brimful.Step(model, num_steps=2, batch_size=8, device="cpu", gradient_checkpointing=asked)
        kept[asked] = kept_bytes(step, rows)
        assert step.run(step.batch(rows)).read().applied
        released = step.release()
        assert not any(getattr(m, "gradient_checkpointing", False) for m in released.modules())
    assert kept["full"] < 0.6 * kept["none"]  # the rest is outside of layers
    assert kept["full"] < kept["every-2"] < kept["none"]
    limit = round(0.6 * kept["none"])
    model = FAMILIES["bert"].model(**DEEP).train()
    step = brimful.Step(
        model, num_steps=2, batch_size=8, device="cpu", gradient_checkpointing="selective", lengths=[30] * 8,
        activation_memory=str(limit), token_budget=256,
    )  # fmt: skip
    (line,) = [lever for lever in step.recipe.levers if lever.name == "gradient_checkpointing"]
    assert " again: layer" in line.reason
    assert kept["full"] < kept_bytes(step, rows) < limit


FREES = Activations(
    layers=tuple(LayerActivations(kept=kept, input=10, forward_s=s) for kept, s in ((100, 1), (90, 0.5), (100, 1))),
    outside=5, fixed=1000,
)  # fmt: skip


def test_what_frees_most_for_a_second_is_recomputed_first() -> None:
    """And of equal layers the first: when it is whole again, what later ones kept is gone."""
    again = Way.RECOMPUTED
    assert FREES.bytes(10) == 1000 + 10 * (5 + 30 + 290)
    assert kept_ways(FREES, 10, 4250) == ({}, 4250)
    assert kept_ways(FREES, 10, 4000) == ({1: again}, 1000 + 10 * (5 + 30 + 200))
    assert kept_ways(FREES, 10, 3000) == ({0: again, 1: again}, 1000 + 10 * (5 + 30 + 100))
    assert kept_ways(FREES, 10, 1) == ({0: again, 1: again}, 1000 + 10 * (5 + 30 + 100))  # the last one is whole first
    assert offloaded_layers(FREES, 10, None) == ((), 4250)  # three are on the device at once
    deep = Activations(layers=FREES.layers[:1] * 8, outside=0, fixed=0)
    assert offloaded_layers(deep, 1, None) == (tuple(range(5)), 330)
    assert offloaded_layers(deep, 1, 600) == ((0, 1, 2), 550)


def test_parts_of_layers_are_left_out_by_what_they_cost() -> None:
    """Activation functions of all layers first, then layers but for their last product, then that."""
    layer = LayerActivations(
        kept=160, input=10, forward_s=1.0, remade=40, remade_s=0.03, ending=10, ending_s=0.3
    )  # fmt: skip
    found = Activations(layers=(layer,) * 4, outside=0, fixed=0)
    assert found.bytes(1) == 680
    assert kept_ways(found, 1, 640) == ({0: Way.REMADE}, 640)
    assert kept_ways(found, 1, 560) == (dict.fromkeys(range(3), Way.REMADE), 560)  # the fourth is whole at its turn
    assert kept_ways(found, 1, 450)[0] == {0: Way.RECOMPUTED, 1: Way.REMADE, 2: Way.REMADE}
    assert kept_ways(found, 1, 420) == ({0: Way.RECOMPUTED, 1: Way.RECOMPUTED}, 380)  # and then the third may be whole
    assert kept_ways(found, 1, 230)[0] == dict.fromkeys(range(3), Way.RECOMPUTED)
    assert kept_ways(found, 1, 200)[0] == dict.fromkeys(range(3), Way.EMPTIED)


def test_activations_are_in_host_memory_and_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brimful.models.packed.offload.LEAST_BYTES", 1)
    model = FAMILIES["bert"].model(**DEEP, dropout=0.2).train()
    layers, gradients = layers_of(model), []
    assert layers is not None
    for moved in (0, 3):
        store = offload(layers, moved, torch.device("cpu"))
        torch.manual_seed(0)
        model.zero_grad()
        PaddedModel(model)(padded_inputs([np.arange(5, 40)] * 2, 2, 40, padding_id=0)).logits.sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert (store.num_bytes > 0) == (moved > 0)
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    before = store.num_bytes
    run = PaddedModel(model)
    stale = run(padded_inputs([np.arange(5, 40)] * 2, 2, 40, padding_id=0)).logits.sum()
    run(padded_inputs([np.arange(5, 40)] * 2, 2, 40, padding_id=0)).logits.sum().backward()
    assert store.num_bytes == before  # the same buffers again
    with pytest.raises(RuntimeError, match="another one has taken their place"):
        stale.backward()


@pytest.mark.parametrize(
    ("last", "moved", "most", "left_at", "back_at"),
    [
        (100, 6, 300, [2, 3, 4, 5, 6, 7], [6, 5, 4, 3, 2, 1]),
        (100, 3, 500, [5, 6, 7], [5, 4, 3]),
        (100, 1, 700, [7], [5]),
        (10, 3, 410, [4, 5, 6], [4, 3, 2]),  # one token of the last layer is read
        (10, 1, 610, [6], [4]),
    ],
)
def test_layers_leave_late_and_come_back_early(
    monkeypatch: pytest.MonkeyPatch, last: int, moved: int, most: int, left_at: list[int], back_at: list[int]
) -> None:
    """Of eight, as many as are not moved are there at a time, and three at the least: copies have all that time. What a
    layer kept goes when the one before it has been.

    last: size of the last layer, where others have 100. left_at: layers at whose call the first, second, ... leaves;
    back_at: those in whose backward pass the last, the one before it, ... comes back.
    """
    sizes = [100.0] * 7 + [last]
    here, held, turns, at = set[int](), list[float](), list[tuple[int, int]](), 0

    def leave(layer: offloading._Layer) -> None:
        here.remove(layer.number)
        turns.append((layer.number, at))

    def come_back(layer: offloading._Layer) -> None:
        if layer.number not in here:
            here.add(layer.number)
            turns.append((layer.number, at))

    monkeypatch.setattr(offloading._Layer, "leave", leave)
    monkeypatch.setattr(offloading._Layer, "come_back", come_back)
    store = HostActivations(torch.device("cpu"), Moves.of(sizes, moved))
    x = torch.ones(1, 4, requires_grad=True)
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(8))
    for at, layer in enumerate(layers):
        x = store.call(at, weakref.ref(layer), at < moved, layer, x)
        here.add(at)
        held.append(sum(sizes[each] for each in here))
    for at in reversed(range(8)):  # as gradients of layers' results come
        store._bring(store._layers, at)
        held.append(sum(sizes[each] for each in here))
        here.discard(at + 1)
    assert turns == [*enumerate(left_at), *zip(reversed(range(moved)), back_at, strict=True)]
    assert max(held) == most
    layers_of_it = tuple(LayerActivations(kept=size - 10, input=10, forward_s=1.0) for size in sizes)
    assert Activations(layers=layers_of_it, outside=0, fixed=0).bytes(1, offloaded=moved) == most


@pytest.mark.parametrize(("asked", "share"), [("full", 0.75), ("every-2", 0.25)])
def test_it_costs_the_layers_once_more(asked: str, share: float) -> None:
    """Operations that torch counts in a step, against seconds at an operation a second. Not the last layer: its turn
    comes first."""
    model = FAMILIES["bert"].model(**DEEP, intermediate_size=128).train()
    ids_RL = torch.full((4, 25), 7)
    found = []
    for numbers in ((), range(3) if asked == "full" else (1,)):
        recompute(list(layers_of(model) or ()), numbers)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids_RL).logits.sum().backward()
        found.append(counter.get_total_flops())
    keep_all(list(layers_of(model) or ()))
    lever = assembly_of(model, gradient_checkpointing=asked).lever(Checkpointing)
    work = StepWork.of(model, np.full(4, 25), flops_per_s=1.0, bytes_per_s=1.0)
    assert lever.again == share
    assert lever.cost(work).step_s == pytest.approx(found[1] - found[0], rel=0.2)  # attention's products are not in it


def test_a_micro_batch_may_be_larger_where_less_is_kept() -> None:
    found = [
        assembly_of(FAMILIES["bert"].model(**DEEP), gradient_checkpointing=asked).lever(TokenBudget).token_bytes
        for asked in ("none", "every-2", "full")
    ]
    assert found[0] > found[1] > found[2] > 0


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    with pytest.raises(OptionError, match="own code cannot recompute"):
        assembly_of(FAMILIES["albert"].model(), gradient_checkpointing="full").find(Checkpointing)


@pytest.mark.parametrize("asked", ["half", "every-0", "every-", "every-2.5", ""])
def test_what_cannot_be_meant_is_refused(asked: str) -> None:
    with pytest.raises(OptionError, match="gradient-checkpointing is"):
        TrainOptions(data="", model="", output="", gradient_checkpointing=asked)


def test_a_distance_beyond_the_depth_is_refused() -> None:
    with pytest.raises(OptionError, match="2 layers"):
        assembly_of(FAMILIES["bert"].model(), gradient_checkpointing="every-3").find(Checkpointing)


def test_limits_that_cannot_be_kept_are_refused() -> None:
    with pytest.raises(OptionError, match="--activation-memory is given, and --gradient-checkpointing is none"):
        TrainOptions(data="", model="", output="", activation_memory="1GB")
    model = FAMILIES["bert"].model(**DEEP)
    with pytest.raises(OptionError, match="a micro-batch of 64 tokens keeps"):
        assembly_of(
            model, gradient_checkpointing="selective", activation_memory="10KB", token_budget=64, lengths=(64,)
        ).find(Checkpointing)


def test_micro_batches_are_made_to_fit_a_limit() -> None:
    """Unless asked for: as many tokens as can be kept whole, or as fill the device with layers recomputed."""
    model, lengths = FAMILIES["bert"].model(**DEEP), (32,) * 64
    found = [
        assembly_of(model, gradient_checkpointing="selective", activation_memory=limit, lengths=lengths)
        for limit in ("1MB", "100MB")
    ]
    small, large = (each.lever(TokenBudget).tokens for each in found)
    assert small < large == 2048
    small, large = (each.lever(Checkpointing) for each in found)
    assert small.ways
    assert not large.ways


def test_as_little_as_can_be_is_kept_without_a_limit() -> None:
    """The last layer is whole when its turn comes, which is first: nothing is gained by computing it again."""
    model = FAMILIES["bert"].model(**DEEP)
    lever = assembly_of(model, gradient_checkpointing="selective", lengths=(32,) * 64).lever(Checkpointing)
    assert lever.ways == dict.fromkeys(range(3), Way.RECOMPUTED)
    assert "computed again: layers 1 to 3 of 4" in lever.reason


def test_layers_before_a_decoder_are_all_recomputed() -> None:
    """The decoder's turn comes first, and then the last encoder layer's is as any other's."""
    lever = assembly_of(FAMILIES["bart"].model(), packing="off", gradient_checkpointing="full").lever(Checkpointing)
    assert lever.ways == dict.fromkeys(range(2), Way.RECOMPUTED)
    assert "a decoder's, keep all" in lever.reason


def test_passes_over_memory_cost_time_too() -> None:
    ways = dict.fromkeys(range(3), Way.REMADE)
    lever = Checkpointing(value="selective", reason="", depth=4, ways=ways, again=0.05, freed=100)
    work = StepWork.of(FAMILIES["bert"].model(**DEEP), np.full(4, 25), flops_per_s=1.0, bytes_per_s=1.0)
    cost = lever.cost(work)
    assert cost.step_s == pytest.approx(0.05 * work.products_s(100) / 3)
    assert cost.step_bytes == -100


@pytest.mark.parametrize(("rate", "said"), [(None, False), (1e18, False), (1e3, True)])
def test_a_link_that_is_slower_than_the_layers_is_said(
    rate: float | None, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brimful.levers.checkpointing.host_link_bytes_per_s", lambda _: rate)
    told: list[str] = []
    assembly = assembly_of(FAMILIES["bert"].model(**DEEP), gradient_checkpointing="offload", lengths=(32,) * 8)
    assembly.warn = told.append
    assembly.lever(Checkpointing)
    assert any("times as long" in line for line in told) == said
