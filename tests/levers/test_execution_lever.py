"""The way steps and passes are launched, and why, in words that are true of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from brimful.core.errors import OptionError
from brimful.core.place import Place
from brimful.data.batches.padding import PaddedShapes
from brimful.hardware.ranks import Ranks
from brimful.levers import execution
from brimful.levers.execution import ExecutionMode, fused_error_of, fusible_of_step, saved_seconds
from brimful.levers.optimizer import Optimizer
from brimful.levers.parameter_efficient import TrainedPart
from brimful.levers.sharding import Sharding
from brimful.levers.tensor_parallel import TensorParallel
from brimful.levers.token_budget import TokenBudget
from brimful.models.packed.fusible import Fusible, fusible_of_pass
from brimful.models.packed.host_reads import Recording
from brimful.models.packed.packed_forward import PaddedModel
from brimful.step.updates.torch_update import TorchUpdate
from levers.assemblies import EQUIVALENCE, assembly_of
from models.packed.test_host_reads import longformer, t5
from tiny import FAMILIES


@pytest.mark.parametrize(
    ("device", "packed", "function", "said"),
    [
        ("cpu", True, "flash_attention", "graphs and fused kernels are for GPUs, and this runs on cpu"),
        ("cpu", False, "grouped_attention", "graphs and fused kernels are for GPUs, and this runs on cpu"),
        ("cuda", True, "grouped_attention", "attention works on groups of rows whose shapes change with every batch"),
    ],
)
def test_why_a_forward_pass_is_not_captured(device: str, packed: bool, function: str, said: str) -> None:
    settings: dict[str, Any] = {
        "training": False, "device": device, "function": function, "equivalence": replace(EQUIVALENCE, packed=packed),
    }  # fmt: skip
    model = FAMILIES["bert"].model()
    mode = ExecutionMode.choose(assembly_of(model, **settings))
    assert (mode.value, mode.reason) == ("eager", said)
    with pytest.raises(OptionError, match="--execution captured does not work here: " + said):
        ExecutionMode.choose(assembly_of(model, execution="captured", **settings))


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("num_tokens", "value"), [(1000, "captured"), (10**14, "compiled")])
@pytest.mark.parametrize("training", [False, True])
def test_padded_rows_are_captured(num_tokens: int, value: str, training: bool) -> None:
    padded = replace(EQUIVALENCE, packed=False)
    assembly = assembly_of(
        FAMILIES["bert"].model(), training=training, device="cuda", num_tokens=num_tokens, equivalence=padded
    )
    assembly.levers[Optimizer] = Optimizer(value="sgd")
    mode = ExecutionMode.choose(assembly)
    assert (mode.value, mode.fused) == (value, False)


@pytest.mark.parametrize(("asked", "value"), [("auto", "captured"), ("captured", "captured"), ("eager", "eager")])
def test_streamed_weights_are_captured_unless_asked_otherwise(asked: str, value: str) -> None:
    assembly = assembly_of(FAMILIES["bert"].model(), device="cuda", stream_weights="host", execution=asked)
    assembly.levers[Optimizer] = Optimizer(value="sgd")
    mode = ExecutionMode.choose(assembly)
    assert (mode.value, mode.streamed) == (value, value == "captured")


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "value"), [((32,), "compiled"), ((16, 32), "captured")])
def test_rows_of_several_lengths_take_longer_to_compile(
    lengths: tuple[int, ...], value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that 60 s would be saved of, where one length takes 40, and several 90."""
    model, padded = FAMILIES["bert"].model(), replace(EQUIVALENCE, packed=False)
    monkeypatch.setattr(execution, "fusible_of_pass", lambda *_, **__: None)  # it cannot be traced
    assembly = assembly_of(model, device="cuda", equivalence=padded)
    shapes = PaddedShapes(lengths=lengths, num_tokens=64, num_rows=4, call_tokens=0)
    assembly.levers[TokenBudget] = TokenBudget(value="64", reason="a test", tokens=64, token_bytes=0, shapes=shapes)
    saved_in_one = 300e-6 * model.config.num_hidden_layers
    assembly.num_tokens = round(60.0 / saved_in_one * int(assembly.batches(0)[0].sum()))
    assembly.levers[Optimizer] = Optimizer(value="sgd")
    assert ExecutionMode.choose(assembly).value == value


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("make", "value"), [(t5, "compiled"), (longformer, "captured")])
@pytest.mark.parametrize("training", [False, True])
def test_layers_are_compiled_where_the_host_is_needed_between_them_only(
    make: Callable[[], Any], value: str, training: bool
) -> None:
    """T5 counts end tokens in its head; layers of Longformer list tokens with global attention."""
    padded = replace(EQUIVALENCE, packed=False)
    assembly = assembly_of(make(), training=training, device="cuda", num_tokens=10**14, equivalence=padded)
    assembly.levers[Optimizer] = Optimizer(value="sgd")
    assembly.execution = PaddedModel(assembly.model)
    mode = ExecutionMode.choose(assembly)
    assert mode.value == value
    replace(mode, value="captured").apply(assembly)
    assert assembly.execution.decisions is not None


@pytest.mark.parametrize(
    ("num_tokens", "training", "said"),
    [
        (10**6, True, None),
        (1000, True, "batches that must not be split have 1 lengths in about 17 steps"),
        (10**6, False, "each text is a batch of its own length"),
    ],
)
def test_batches_that_are_not_split_are_captured_where_lengths_repeat(
    num_tokens: int, training: bool, said: str | None
) -> None:
    dependent = replace(EQUIVALENCE, packed=False, independent=False)
    assembly = assembly_of(
        FAMILIES["bert"].model(), training=training, device="cuda", num_tokens=num_tokens, equivalence=dependent
    )
    assembly.levers[Optimizer] = Optimizer(value="sgd")
    mode = ExecutionMode.choose(assembly)
    assert (mode.value, mode.reason) == ("eager", said) if said else mode.captured


@pytest.mark.parametrize(("num_tokens", "value"), [(1000, "captured"), (10**12, "compiled")])
@pytest.mark.parametrize("training", [False, True])
def test_layers_are_compiled_where_the_run_is_long_enough(num_tokens: int, value: str, training: bool) -> None:
    assembly = assembly_of(FAMILIES["bert"].model(), training=training, device="cuda", num_tokens=num_tokens)
    assembly.levers[Optimizer] = Optimizer(value="sgd")
    assert ExecutionMode.choose(assembly).value == value


@pytest.mark.parametrize(("share", "are_ours"), [(0.9, False), (1.1, True)])
def test_parts_of_padded_layers_are_ours_where_that_pays(share: float, are_ours: bool) -> None:
    """Of 70 us a layer and step, against 2.5 s."""
    model, padded = FAMILIES["bert"].model(), replace(EQUIVALENCE, packed=False)
    assembly = assembly_of(model, device="cuda", equivalence=padded)
    tokens = int(assembly.batches(0)[0].sum())
    assembly.num_tokens = round(share * 2.5 / (70e-6 * model.config.num_hidden_layers) * tokens)
    assembly.levers[Optimizer] = Optimizer(value="sgd")
    assembly.execution = PaddedModel(model)
    mode = ExecutionMode.choose(assembly)
    assert mode.value == "captured"
    mode.apply(assembly)
    assert all((layer._compiled_call_impl is not None) == are_ours for layer in model.bert.encoder.layer)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "share", "value"), [("bert", 0.9, "captured"), ("bert", 1.1, "compiled"), ("funnel", 1e6, "captured")]
)
def test_padded_layers_are_compiled_where_what_they_fuse_pays(
    kind: str, share: float, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against 40 s of one length. Funnel's are no faster, however long the run."""
    model = FAMILIES["bert"].model()
    assembly = assembly_of(model, device="cuda", equivalence=replace(EQUIVALENCE, packed=False))
    model.config.model_type = kind
    found = fusible_of_pass(model, 6, 24, Recording())
    assert found is not None
    monkeypatch.setattr(execution, "fusible_of_pass", lambda *_, **__: found)
    tokens = int(assembly.batches(0)[0].sum())
    assembly.num_tokens = round(share * 40.0 / (0.75 * found.seconds) * tokens)
    assembly.levers[Optimizer] = Optimizer(value="sgd")
    assembly.execution = PaddedModel(model)
    monkeypatch.setattr(execution, "_has_lengths", lambda _: False)
    monkeypatch.setattr(execution, "_SAVED", 0.0)
    assert ExecutionMode.choose(assembly).value == value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("independent", "num_tokens", "traced", "share"),
    [
        (True, 10**9, (3, 16), (3 * 16 + 1 * 40) / (3 * 16)),
        (False, 10**9, (4, 30), 1.0),
        (True, 1000, None, 0.0),
    ],
)
def test_the_largest_micro_batch_of_a_usual_batch_stands_for_it(
    independent: bool, num_tokens: int, traced: tuple[int, int] | None, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is traced where the run is too short to compile whatever it fuses."""
    seen: list[tuple[int, int]] = []

    def one(_: Any, rows: int, length: int, *__: Any, **___: Any) -> Fusible:
        seen.append((rows, length))
        return Fusible(seconds=1e-3, operators=100)

    monkeypatch.setattr(execution, "fusible_of_pass", one)
    monkeypatch.setattr(execution, "cut", lambda *_: [(3, 16, [0, 1, 3]), (1, 40, [2])])
    padded = replace(EQUIVALENCE, packed=False, independent=independent)
    assembly = assembly_of(FAMILIES["bert"].model(), device="cuda", equivalence=padded, num_tokens=num_tokens)
    shapes = PaddedShapes(lengths=(16, 40), num_tokens=64, num_rows=4)
    assembly.levers[TokenBudget] = TokenBudget(value="64", reason="a test", tokens=64, token_bytes=0, shapes=shapes)
    assembly.levers[Optimizer] = Optimizer(value="sgd")
    found = fusible_of_step(assembly)
    assert seen == ([] if traced is None else [traced])
    assert (found is None) == (traced is None)
    if found is not None:
        assert found == Fusible(seconds=pytest.approx(share * 1e-3), operators=100)


def test_weights_in_parts_are_not_compiled_and_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "fusible_of_pass", lambda *_, **__: pytest.fail("traced"))
    padded = replace(EQUIVALENCE, packed=False)
    assembly = assembly_of(FAMILIES["bert"].model(), device="cuda", equivalence=padded, num_tokens=10**12)
    assembly.levers[Optimizer] = Optimizer(value="sgd")
    monkeypatch.setattr(execution, "_in_parts", lambda _: True)
    assert fusible_of_step(assembly) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operators", "compile_s", "value"),
    [(200, 40, "compiled"), (300, 70, "compiled"), (400, 120, "compiled"), (500, 170, "captured")],
)
def test_layers_of_many_operators_take_longer_to_compile(
    operators: int, compile_s: int, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that 60 s would be saved of, and that is charged with half of what compiling takes, 40 s at the least."""
    model, padded = FAMILIES["bert"].model(), replace(EQUIVALENCE, packed=False)
    found = Fusible(seconds=1e-3, operators=operators)
    monkeypatch.setattr(execution, "fusible_of_pass", lambda *_, **__: found)
    monkeypatch.setattr(execution, "_has_lengths", lambda _: False)
    assembly = assembly_of(model, device="cuda", equivalence=padded)
    assembly.num_tokens = round(60.0 / (0.75 * found.seconds) * int(assembly.batches(0)[0].sum()))
    assembly.levers[Optimizer] = Optimizer(value="sgd")
    mode = ExecutionMode.choose(assembly)
    assert mode.value == value
    if value == "captured":
        assert mode.reason == f"one launch a step; compiling would save about 60 s of this run and take {compile_s} s"
    else:
        assert mode.reason.endswith(f": about {compile_s} s to compile in a first run here, 60 s saved in each")
    compiled = replace(mode, value="compiled")
    assert (mode.compile_seconds(assembly), compiled.compile_seconds(assembly)) == (
        compile_s if value == "compiled" else 0.0, compile_s
    )  # fmt: skip


@pytest.mark.parametrize(
    ("packed", "recorded", "fused", "seconds"),
    [(True, True, True, 0.0), (True, False, True, 10.0), (True, True, False, 10.0), (False, True, False, 40.0)],
)
def test_seconds_of_compiling_are_those_of_torchs_compiler(
    packed: bool, recorded: bool, fused: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of packed rows that our kernels cover are recorded; those of padded rows are compiled in any case. Nothing
    is traced for it where compiling is asked for."""
    monkeypatch.setattr(execution, "fusible_of_step", lambda _: pytest.fail("traced"))
    monkeypatch.setattr(execution, "_has_lengths", lambda _: False)
    equivalence = replace(EQUIVALENCE, packed=packed, recorded=recorded)
    assembly = assembly_of(FAMILIES["bert"].model(), device="cuda", equivalence=equivalence, execution="compiled")
    assert ExecutionMode(value="compiled", reason="asked for", fused=fused).compile_seconds(assembly) == seconds


@pytest.mark.parametrize(("recorded", "value"), [(False, "captured"), (True, "compiled")])
@pytest.mark.parametrize("training", [False, True])
def test_recorded_layers_pay_in_short_runs(recorded: bool, value: str, training: bool) -> None:
    """Three seconds that would be saved, where dynamo takes longer."""
    model = FAMILIES["bert"].model()
    equivalence = replace(EQUIVALENCE, recorded=recorded)
    assembly = assembly_of(model, device="cuda", training=training, equivalence=equivalence)
    assembly.num_tokens = 1
    assembly.num_tokens = round(3.0 / saved_seconds(assembly))
    assert ExecutionMode.choose(assembly).value == value


@pytest.mark.parametrize(("adapter", "value"), [(False, "compiled"), (True, "captured")])
def test_layers_with_adapters_take_longer_to_compile(
    adapter: bool, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that 30 s would be saved of: plain layers take 10 s, those with adapters 50. Frozen weights have no
    gradients, a third of the arithmetic."""
    monkeypatch.setattr(execution, "_SAVED_A_LAYER_S", 0.0)
    assembly = assembly_of(FAMILIES["llama"].model(), device="cuda", precision="bf16")
    assembly.levers[Optimizer], assembly.num_tokens = Optimizer(value="sgd"), 10**14
    whole_s = saved_seconds(assembly)
    assembly.levers[TrainedPart] = TrainedPart(value="lora", reason="a test", trained=1, adapter=adapter)
    assert saved_seconds(assembly) == pytest.approx(whole_s * (2 / 3 if adapter else 1))
    assembly.num_tokens = 1
    assembly.num_tokens = round(30.0 / saved_seconds(assembly))
    assert ExecutionMode.choose(assembly).value == value


@pytest.mark.parametrize(("family", "value"), [("bert", "compiled"), ("albert", "captured")])
def test_layers_are_fused_where_fp8_is_asked_for(family: str, value: str) -> None:
    """However short the run is; layers that are shared cannot be."""
    assembly = assembly_of(FAMILIES[family].model(), precision="fp8", device="cuda")
    assembly.levers[Optimizer] = Optimizer(value="sgd")
    assert ExecutionMode.choose(assembly).value == value


def test_the_gradient_is_captured_where_the_host_decides_on_the_update() -> None:
    model = FAMILIES["bert"].model()
    assembly = assembly_of(model, device="cuda")
    assembly.levers[Optimizer] = Optimizer(value="sgd")
    assembly.update = TorchUpdate(
        model, lambda _: torch.optim.Adafactor(model.parameters()), torch.ones(1), max_grad_norm=0.0, scaled=False
    )
    mode = ExecutionMode.choose(assembly)
    assert mode.captured


@pytest.mark.parametrize(
    ("share", "num_ranks", "value"), [(0.9, 1, "captured"), (1.1, 1, "compiled"), (1.1, 2, "captured")]
)
def test_layers_of_short_steps_are_compiled_where_their_number_pays(share: float, num_ranks: int, value: str) -> None:
    """Each layer saves as much in each step, in each of several processes that share the rows."""
    model = FAMILIES["bert"].model()
    assembly = assembly_of(model, device="cuda", function="triton_attention")
    saved_in_one = 120e-6 * model.config.num_hidden_layers
    tokens = sum(int(lengths.sum()) for lengths in assembly.batches(0)) / len(assembly.batches(0))
    assembly.num_tokens = round(share * 10.0 / saved_in_one * tokens)
    assembly.ranks = Ranks(Place(count=num_ranks))
    assembly.levers[Sharding] = Sharding(value="states", reason="a test", count=num_ranks)
    assembly.levers[Optimizer] = Optimizer(value="adamw_torch_fused", fused=True)
    assert ExecutionMode.choose(assembly).value == value


def in_parts(error: float | None, precision: str, num_tokens: int, **asked: Any) -> Any:
    """A decoder whose weights are in parts of two processes. error: of fused layers; None where none are covered."""
    found = assembly_of(FAMILIES["llama"].model(), device="cuda", precision=precision, num_tokens=num_tokens, **asked)
    found.ranks = Ranks(Place(count=2))
    found.levers[Sharding] = Sharding(value="parameters", reason="a test", count=2)
    found.levers[TensorParallel], found.levers[Optimizer] = None, Optimizer(value="sgd", sharding="parameters")
    found.facts[fused_error_of] = error
    return found


@pytest.mark.parametrize(
    ("error", "precision", "num_tokens", "value", "said"),
    [
        (0.4, "bf16", 10**14, "compiled", "layers on fused kernels, at 0.40 of their tolerance"),
        (0.4, "bf16", 1000, "captured", "one launch a step, what is sent among it"),
        (1.7, "bf16", 10**14, "captured", "fused layers are 1.7 times over their tolerance"),
        (None, "bf16", 10**14, "captured", "our kernels do not cover its layers"),
        (0.4, "fp8", 10**14, "captured", "in other than fp8"),
    ],
)
def test_layers_in_parts_are_fused_where_that_pays(
    error: float | None, precision: str, num_tokens: int, value: str, said: str
) -> None:
    assembly = partial(in_parts, error, precision, num_tokens)
    mode = ExecutionMode.choose(assembly())
    assert (mode.value, mode.compiled, mode.captured) == (value, value == "compiled", True)
    assert said in mode.reason
    assert ExecutionMode.choose(assembly(execution="eager")).value == "eager"
    for asked in ("fused", "compiled"):
        if error == 0.4 and precision == "bf16":
            assert ExecutionMode.choose(assembly(execution=asked)).value == asked
        else:
            with pytest.raises(OptionError, match=f"--execution {asked} does not work here: .*{said}"):
                ExecutionMode.choose(assembly(execution=asked))


@pytest.mark.parametrize(
    ("num_tokens", "value", "said"),
    [(10**14, "fused", "at 0.40 of their tolerance"), (1000, "eager", "weights in parts come from host memory")],
)
def test_no_graph_holds_weights_that_come_from_host_memory(num_tokens: int, value: str, said: str) -> None:
    mode = ExecutionMode.choose(in_parts(0.4, "bf16", num_tokens, optimizer_offload=True))
    assert (mode.value, mode.captured) == (value, False)
    assert said in mode.reason


@pytest.mark.parametrize("asked", ["fused", "compiled"])
def test_other_processes_fuse_layers_as_the_first_one_told_them(asked: str) -> None:
    """They have not compared them with plain ones themselves."""
    other = in_parts(None, "bf16", 10**14, execution=asked)
    other.ranks = Ranks(Place(rank=1, count=2))
    assert ExecutionMode.choose(other).value == asked
