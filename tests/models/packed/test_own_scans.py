"""Scans of state-space layers in a pass: the plain model's numbers, and modules that end as they were."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from brimful.kernels.layout import PaddedInputs
from brimful.models.model_stats import layers_of
from brimful.models.packed import own_scans
from brimful.models.packed.host_decisions import HostDecisions
from brimful.models.packed.own_scans import OwnScans
from brimful.models.packed.packed_forward import PaddedModel
from brimful.models.packed.recompute import recompute
from heads.tiny_heads import tiny_model

#: transformers' chunk, as released.
CHUNK = 256
#: Our scans, and where their positions are.
SCANS = {"selective_scan": 2, "chunked_scan": 1, "gated_delta_rule": 1}


def rows(model: Any, length: int = 24) -> PaddedInputs:
    random = torch.Generator().manual_seed(0)
    ids_RL = torch.randint(5, model.config.vocab_size, (3, length), generator=random)
    mask_RL = torch.ones_like(ids_RL)
    mask_RL[1, 9:] = 0
    ids_RL *= mask_RL
    return PaddedInputs(ids_RL=ids_RL, mask_RL=mask_RL, types_RL=None)


def mixers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith(("MambaMixer", "GatedDeltaNet"))]


def model_of(kind: str) -> Any:
    model: Any = tiny_model(kind).train()
    model.config.pad_token_id = 0
    for each in mixers(model):
        if hasattr(each, "chunk_size"):
            each.chunk_size = CHUNK
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of each of our scans."""
    made = list[int]()

    def counted(scan: Any, place: int) -> Any:
        def scanned(*args: Any, **kwargs: Any) -> Any:
            made.append(args[0].shape[place])
            return scan(*args, **kwargs)

        return scanned

    for name, place in SCANS.items():
        monkeypatch.setattr(own_scans, name, counted(getattr(own_scans, name), place))
    return made


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        *(("jamba", 24), ("zamba", 24), ("zamba2", 24), ("zamba2", 100)),
        *(("qwen3_5_text", 24), ("qwen3_next", 24), ("qwen3_next", 100)),
    ],
)
@pytest.mark.parametrize("how", ["by itself", "recorded", "computed again"])
def test_the_gradient_of_the_plain_model(kind: str, length: int, how: str, calls: list[int]) -> None:
    """100 tokens are two chunks, of which one is filled up."""
    model = model_of(kind)
    plain, inputs = copy.deepcopy(model), rows(model, length)
    expected = PaddedModel(plain, "eager", plain=True)(inputs).logits
    expected.square().sum().backward()
    assert calls == []
    execution = PaddedModel(model, "eager")
    execution.decisions = HostDecisions() if how == "recorded" else None
    if how == "computed again":
        layers = list(layers_of(model))
        recompute(layers, range(len(layers)))
    found = execution(inputs).logits
    found.square().sum().backward()
    heads = 2 if kind == "zamba" else 1  # it scans each by itself
    assert calls == [length] * heads * len(mixers(model)) * (2 if how == "computed again" else 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for own, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (own.grad is None) is (theirs.grad is None)
        if own.grad is not None and theirs.grad is not None:
            assert (own.grad - theirs.grad).norm() <= 5e-5 * theirs.grad.norm() + 1e-7


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["zamba", "zamba2"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_within_layers_that_are_computed_again(kind: str, reentrant: bool, calls: list[int]) -> None:
    """By transformers' own switch, which checkpoints the Mamba layer of a hybrid layer, too."""
    model = model_of(kind)
    plain, inputs = copy.deepcopy(model), rows(model)
    PaddedModel(plain, "eager", plain=True)(inputs).logits.square().sum().backward()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    PaddedModel(model, "eager")(inputs).logits.square().sum().backward()
    assert len(calls) >= 2 * len(mixers(model))
    for own, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if own.grad is not None and theirs.grad is not None:
            assert (own.grad - theirs.grad).norm() <= 5e-5 * theirs.grad.norm() + 1e-7


def test_passes_that_overlap(calls: list[int]) -> None:
    """The first to end leaves the others their scans, and the last leaves none."""
    model = model_of("jamba")
    first, second = OwnScans(model).scanning(), OwnScans(model).scanning()
    inputs = {"input_ids": rows(model).ids_RL, "use_cache": False}
    first.__enter__()
    second.__enter__()
    model(**inputs)
    first.__exit__(None, None, None)
    model(**inputs)
    assert len(calls) == 2
    second.__exit__(None, None, None)
    model(**inputs)
    assert len(calls) == 2
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_that_is_made_within_a_pass(copied: Any, calls: list[int]) -> None:
    """Has its own forward and weights, and scans in its own passes."""
    model = model_of("jamba")
    with OwnScans(model).scanning():
        copied_model = copied(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    inputs = rows(copied_model)
    expected = copied_model(input_ids=inputs.ids_RL, attention_mask=inputs.mask_RL).logits
    assert calls == []
    assert expected.abs().max() > 0
    torch.testing.assert_close(PaddedModel(copied_model)(inputs).logits, expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1
    assert all("forward" not in vars(module) for module in copied_model.modules())


def test_a_wrapper_around_a_class_is_not_left_out(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    model, seen = model_of("jamba"), list[str]()
    [mixer] = mixers(model)
    forward = type(mixer).forward

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append("called")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(mixer), "forward", wrapper)
    PaddedModel(model)(rows(model))
    assert seen == ["called"]
    assert calls == []


def test_rows_that_are_too_long_for_kernels(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    monkeypatch.setattr(own_scans, "has_kernels", lambda _: True)
    for longest in (23, 24):
        monkeypatch.setattr(own_scans, "LONGEST", longest)
        model = model_of("jamba")
        PaddedModel(model)(rows(model, 24))
        assert calls == ([24] if longest == 24 else [])


def test_modules_end_as_they_were(calls: list[int]) -> None:
    model = model_of("zamba")
    before = [dict(vars(module)) for module in model.modules()]
    execution = PaddedModel(model)
    execution(rows(model))
    assert calls
    assert [list(vars(module)) for module in model.modules()] == [list(each) for each in before]
    mixers(model)[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        execution(rows(model))
    assert all("forward" not in vars(module) for module in model.modules())


def test_passes_without_a_gradient_scan_so_too(calls: list[int]) -> None:
    model = model_of("jamba").eval()
    with torch.no_grad():
        found = PaddedModel(model)(rows(model)).logits
        assert len(calls) == 1
        expected = PaddedModel(model, plain=True)(rows(model)).logits
    assert len(calls) == 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _as_compiled(model: Any) -> None:
    layer = model.base_model.layers[0]
    layer._compiled_call_impl = layer._call_impl


def _with_a_forward_of_its_own(model: Any) -> None:
    for mixer in mixers(model):
        mixer.forward = mixer.forward


def _with_a_hook_of_accelerate(model: Any) -> None:
    for mixer in mixers(model):
        mixer.conv1d._hf_hook = None


def _in_double_precision(model: Any) -> None:
    model.double()


@pytest.mark.parametrize("kind", ["zamba", "zamba2", "qwen3_5_text"])
@pytest.mark.parametrize(
    "change",
    [
        _as_compiled,
        _with_a_forward_of_its_own,
        _with_a_hook_of_accelerate,
        _in_double_precision,
    ],
    ids=lambda change: change.__name__.strip("_"),
)
def test_what_is_left_to_transformers(change: Any, kind: str, calls: list[int]) -> None:
    """A compiler has a scan of its own; what someone put in a forward's place stays; fp64 is transformers' mixture."""
    model = model_of(kind)
    change(model)
    found = PaddedModel(model)(rows(model)).logits
    assert calls == []
    assert torch.equal(found, PaddedModel(model, plain=True)(rows(model)).logits)


def test_layers_that_torch_compile_wraps(calls: list[int]) -> None:
    model = model_of("zamba2").eval()
    layers = model.base_model.layers
    with torch.no_grad():
        expected = PaddedModel(model, plain=True)(rows(model)).logits
        for place, layer in enumerate(layers):
            layers[place] = torch.compile(layer, backend="eager")
        found = PaddedModel(model)(rows(model)).logits
    assert calls == []
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_package_of_kernels_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_scans, "find_spec", lambda name: object() if name in ("mamba_ssm", "fla") else None)
    for kind in ("jamba", "zamba2", "qwen3_next"):
        assert OwnScans(model_of(kind))._calls == []


def test_models_without_a_scan_are_left_alone() -> None:
    for kind in ("bert", "llama"):
        assert OwnScans(tiny_model(kind))._calls == []


def _scan_of(kind: str, name: str) -> Any:
    return OwnScans(model_of(kind))._calls[0][1].__globals__[name]


def test_more_than_ours_does_is_transformers(calls: list[int]) -> None:
    """The last state, which a cache would keep. What neither scan has is left out by both."""
    scan = _scan_of("jamba", "mamba_selective_scan")
    u, dt, of_state = torch.randn(2, 6, 5), torch.rand(2, 6, 5), torch.randn(2, 3, 5)
    given = (u, dt, -torch.rand(6, 3), of_state, of_state)
    out, state = scan(*given, return_last_state=True)
    assert calls == []
    assert state.shape == (2, 6, 3)
    torch.testing.assert_close(scan(*given, return_dict=True), out, rtol=1e-5, atol=1e-6)
    assert calls == [5]


def test_a_chunked_scan_with_a_state_is_transformers(calls: list[int]) -> None:
    scan = _scan_of("zamba2", "mamba2_chunk_scan")
    x, dt, of_state = torch.randn(2, 5, 6, 4), torch.rand(2, 5, 6), torch.randn(2, 5, 1, 3)
    given, first = (x, dt, -torch.rand(6), of_state, of_state, 16), torch.randn(2, 6, 4, 3)
    begun, state = scan(*given, initial_states=first, return_final_states=True)
    assert calls == []
    assert state.shape == first.shape
    found = scan(*given, return_final_states=False, initial_states=None, position_ids=torch.arange(5))
    assert calls == [5]
    torch.testing.assert_close(found, scan(*given, return_final_states=True)[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, begun)
    with pytest.raises(ValueError, match="packed sequences"):
        scan(*given, seq_idx=torch.zeros(2, 5))


def test_a_delta_rule_with_a_state_is_transformers(calls: list[int]) -> None:
    rule = _scan_of("qwen3_next", "torch_chunk_gated_delta_rule")
    q, v, g, first = torch.randn(2, 5, 3, 4), torch.randn(2, 5, 6, 2), -torch.rand(2, 5, 6), torch.randn(2, 6, 4, 2)
    given = (q.repeat_interleave(2, dim=2), q.repeat_interleave(2, dim=2), v, g, torch.rand(2, 5, 6))
    begun, state = rule(*given, initial_state=first, output_final_state=True)
    assert calls == []
    assert state.shape == first.shape
    found, none = rule(*given, output_final_state=False, initial_state=None, cu_seqlens=None)
    assert calls == [5]
    assert none is None
    torch.testing.assert_close(found, rule(*given, output_final_state=True)[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, begun)
