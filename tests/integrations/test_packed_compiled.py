"""A packed model whose layers are compiled onto fused kernels: the uncompiled one's loss and gradient, and when it is.

On the CPU by Triton's interpreter, in fp32.
"""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

import brimful
from brimful.integrations import packed_compiled
from brimful.kernels.attention.dispatch import Attention, relative_attention, triton_attention
from brimful.kernels.attention.pattern import Pattern
from brimful.levers import facts
from brimful.models.packed import packed_forward
from brimful.models.packed.layer_calls import compiled_modules, remove_calls
from plain import gradient, padded
from tiny import FAMILIES, sequences
from tolerances import MODEL_FP32, difference

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at inputs' gradients

#: Heads of 16 numbers: the smallest that our attention kernel takes.
WIDE = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}


@pytest.fixture(autouse=True)
def our_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels on the CPU too."""
    torch._dynamo.reset()

    def ours(device: torch.device, dtype: torch.dtype, pattern: Pattern, *_: Any) -> Attention:
        return triton_attention if pattern.relative is None else relative_attention

    for module in (packed_forward, facts):
        monkeypatch.setattr(module, "choose_attention", ours)


def bert(num_layers: int = 1, **settings: Any) -> Any:
    return FAMILIES["bert"].model(**WIDE, num_hidden_layers=num_layers, **settings).train()


def batch_of(model: Any, *lengths: int) -> dict[str, Tensor]:
    made = padded(sequences([*lengths]), None, model.config.pad_token_id)
    return made | {"labels": torch.arange(len(lengths)) % 3}


def step_of(model: Any, batch: dict[str, Tensor], seed: int = 5) -> tuple[Tensor, Tensor]:
    """The loss of a call, and the gradient of all parameters together."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), gradient(model)


def num_compiled(model: Any) -> int:
    return len(compiled_modules(model))


def assert_same_steps(ours: Any, plain: Any, *batches: dict[str, Tensor]) -> None:
    for batch in batches:
        (loss, found), (expected, wanted) = step_of(ours, batch), step_of(plain, batch)
        assert difference(loss, expected) < MODEL_FP32
        assert difference(found, wanted) < MODEL_FP32


@pytest.mark.parametrize("family", ["bert", "modernbert-mean"])
def test_loss_and_gradient_are_those_of_layers_as_they_are(family: str) -> None:
    """For any number of rows and tokens, by one form of each kind of layer."""
    model = bert(2) if family == "bert" else FAMILIES[family].model(**WIDE).train()
    plain = brimful.packed(copy.deepcopy(model), compiled=False)
    ours = brimful.packed(model, compiled=True)
    torch._dynamo.utils.counters.clear()
    assert_same_steps(ours, plain, batch_of(model, 5, 17, 2))
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert made == (2 if family == "bert" else 4)
    assert_same_steps(ours, plain, batch_of(model, 3, 30, 1, 9), batch_of(model, 7))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == made
    assert num_compiled(ours) > 1
    assert num_compiled(plain) == 0


def test_masks_are_of_torchs_generator() -> None:
    """Equal seeds give equal losses from the first call on: the comparison draws nothing."""
    model, losses = bert(dropout=0.3), []
    batch = batch_of(model, 5, 17, 2)
    for seed in (1, 1, 2):
        ours = brimful.packed(copy.deepcopy(model), compiled=True)
        torch.manual_seed(seed)
        losses.append([float(ours(**batch).loss.detach()) for _ in range(2)] + [float(torch.rand(()))])
        assert num_compiled(ours) == 2
    assert losses[0] == losses[1] != losses[2]
    assert losses[0][0] != losses[0][1]


def test_layers_that_are_recomputed() -> None:
    model = bert(2, dropout=0.2)
    ours = brimful.packed(model, compiled=True)
    batch = batch_of(model, 5, 17, 2)
    step_of(ours, batch)
    assert num_compiled(ours) == 3
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{name}_checkpointing_enable")()
    loss, found = step_of(ours, batch)
    getattr(model, f"{name}_checkpointing_disable")()
    again, expected = step_of(ours, batch)
    assert num_compiled(ours) == 2  # embeddings got a hook
    assert again == loss
    assert difference(found, expected) < MODEL_FP32


def test_calls_that_are_not_of_training_run_as_before() -> None:
    model = bert()
    plain = copy.deepcopy(model)
    ours = brimful.packed(model, compiled=True)
    batch = batch_of(model, 5, 17, 2)
    with torch.no_grad():
        ours(**batch)
    assert num_compiled(ours) == 0
    step_of(ours, batch)
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        expected = plain.eval()(**batch).logits
        assert difference(ours.eval()(**batch).logits, expected) < MODEL_FP32
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert difference(ours(**batch, output_hidden_states=True).logits, expected) < MODEL_FP32
    assert not torch._dynamo.utils.counters["stats"]
    assert_same_steps(ours.train(), plain.train(), batch)


def test_it_is_undone_and_copied() -> None:
    model = bert()
    batch = batch_of(model, 5, 17, 2)
    ours = brimful.packed(model, compiled=True)
    expected = step_of(ours, batch)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for twin in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert num_compiled(twin) == 0
        assert difference(step_of(twin, batch)[1], expected[1]) < MODEL_FP32
        assert num_compiled(twin) == 2
    assert brimful.packed(ours, compiled=True) is ours
    assert num_compiled(ours) == 2
    brimful.packed(ours, compiled=False)
    assert difference(step_of(ours, batch)[1], expected[1]) < MODEL_FP32
    assert num_compiled(ours) == 0
    brimful.packed(ours, compiled=True)
    step_of(ours, batch)
    ours.unpacked()
    assert all(module._compiled_call_impl is None for module in model.modules())
    assert difference(step_of(model, batch)[1], expected[1]) < MODEL_FP32


def test_replicas_run_their_own_modules() -> None:
    """As DataParallel makes them: modules are copies that share what is placed in them."""
    model = bert()
    ours = brimful.packed(model, compiled=True)
    batch = batch_of(model, 5, 17, 2)
    step_of(ours, batch)

    def replica(module: Any) -> Any:
        found = module._replicate_for_data_parallel()
        found._modules = {name: replica(child) for name, child in module._modules.items()}
        for name, parameter in module._parameters.items():
            setattr(found, name, None if parameter is None else torch.zeros_like(parameter))
        return found

    assert torch.equal(replica(ours)(**batch).logits, torch.zeros(3, 3))
    assert num_compiled(ours) == 2


def test_hooks_in_layers_are_called() -> None:
    """Whatever runs in layers besides: compiled ones would pass over it."""
    model, seen = bert(), list[int]()
    ours = brimful.packed(model, compiled=True)
    batch = batch_of(model, 5, 17, 2)
    step_of(ours, batch)
    hook = model.bert.encoder.layer[0].intermediate.register_forward_hook(lambda *_: seen.append(1))
    step_of(ours, batch)
    assert seen
    hook.remove()
    torch._dynamo.utils.counters.clear()
    step_of(ours, batch)
    assert num_compiled(ours) == 2
    assert len(seen) == 1


def test_other_modules_are_compiled_anew() -> None:
    model = bert()
    ours = brimful.packed(model, compiled=True)
    batch = batch_of(model, 5, 17, 2)
    step_of(ours, batch)
    model.bert.encoder.layer[0].output.dense = nn.Linear(48, 32)
    plain = copy.deepcopy(ours).unpacked()
    assert_same_steps(ours, plain, batch)
    assert num_compiled(ours) == 2


def test_auto_compiles_once_calls_have_taken_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    ours = brimful.packed(model)
    layers = vars(ours)["_brimful_packed"].layers
    batch = batch_of(model, 5, 17, 2)
    layers.spent(1e9)
    step_of(ours, batch)
    assert num_compiled(ours) == 0  # it runs on a CPU
    monkeypatch.setattr(layers, "_wanted", lambda model, device: type(layers)._wanted(layers, model, Cuda))
    layers._spent_s = 0.0
    for seconds, expected in ((packed_compiled.COMPILE_S - 1, 0), (1.0, 2)):
        layers.spent(seconds)
        assert layers.counts
        step_of(ours, batch)
        assert num_compiled(ours) == expected
    assert not layers.counts


class Cuda:
    """Stands for a GPU."""

    type = "cuda"


def test_layers_that_differ_run_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    plain = copy.deepcopy(model)
    batch = batch_of(model, 5, 17, 2)
    actual = packed_compiled._error_of_all
    monkeypatch.setattr(packed_compiled, "_error_of_all", lambda *both: actual(*both) + 0.5)
    ours = brimful.packed(model, compiled=True)
    with pytest.warns(UserWarning, match=r"a gradient that is off by 5\.0e-01; its layers run uncompiled"):
        step_of(ours, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_steps(ours, plain, batch)
    assert num_compiled(ours) == 0


def test_a_failure_to_compile_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(packed_compiled.PackedExecution, "compile", failing)
    model = bert()
    plain = copy.deepcopy(model)
    ours = brimful.packed(model, compiled=True)
    batch = batch_of(model, 5, 17, 2)
    with pytest.warns(UserWarning, match="ended in RuntimeError: no compiler; its layers run uncompiled"):
        step_of(ours, batch)
    assert_same_steps(ours, plain, batch)


def test_families_without_fused_kernels_run_as_they_are() -> None:
    model = FAMILIES["gpt2"].model().train()
    ours = brimful.packed(copy.deepcopy(model), compiled=True)
    batch = batch_of(model, 5, 17, 2)
    with pytest.warns(UserWarning, match="fused kernels do not cover its layers; its layers run uncompiled"):
        assert_same_steps(ours, model, batch)
    assert num_compiled(ours) == 0


def test_on_a_cpu_it_says_that_kernels_are_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = bert()
    ours = brimful.packed(copy.deepcopy(model), compiled=True)
    batch = batch_of(model, 5, 17, 2)
    with pytest.warns(UserWarning, match="fused kernels are for GPUs, and this runs on cpu; its layers run"):
        assert_same_steps(ours, model, batch)
    with pytest.raises(brimful.OptionError, match="compiled is 'yes'"):
        brimful.packed(model, compiled="yes")  # type: ignore[arg-type]


def test_what_is_compiled_by_its_owner_stays_so() -> None:
    model = bert()
    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(1)
        return graph

    model.bert.encoder.layer[0].compile(backend=backend)
    ours = brimful.packed(model, compiled=True)
    with pytest.warns(UserWarning, match="its modules are compiled already"):
        step_of(ours, batch_of(model, 5, 17, 2))
    remove_calls(model)
