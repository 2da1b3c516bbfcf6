"""Families whose attention has a bias by distance: told of a packed row, and as they were when they are not."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.kernels.attention.dispatch import relative_attention
from brimful.kernels.layout import PackedInputs, PackedShape, Segments, packed_inputs
from brimful.models.packed import packed_forward
from brimful.models.packed.equivalence import check_equivalence
from brimful.models.packed.family_forms import farthest_bucket
from brimful.models.packed.packed_forward import PackedForm, PackedModel, PaddedModel
from plain import gradient, padded
from tiny import FAMILIES, LONGEST, Family, sequences
from tolerances import MODEL_FP32, difference

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at inputs' gradients

FORMS = ["deberta", "deberta-v2", "deberta-v2-convolution", "mpnet"]
LENGTHS = [9, 30, 1, 4]


def packed(name: str, model: Any) -> PackedModel:
    family = FAMILIES[name]
    return PackedModel(model, PackedForm(pooling="first", first_position=family.first_position))


def row(lengths: list[int], tail: int = 0, longest: int = LONGEST) -> PackedInputs:
    shape = PackedShape(num_tokens=sum(lengths) + tail, num_slots=len(lengths), max_length=longest)
    return packed_inputs(sequences(lengths), shape, padding_id=1, groups=True)


@pytest.mark.parametrize("name", FORMS)
def test_a_model_is_as_it_was_between_packed_rows(name: str) -> None:
    """Padded, copied, printed and saved; and when a packed row failed on the way."""
    model = FAMILIES[name].model().eval()
    fresh = copy.deepcopy(model)
    run = packed(name, model)
    run(row(LENGTHS))
    with pytest.raises(IndexError):
        run(dataclasses.replace(row([3]), ids_T=torch.tensor([5, 6, 10**6])))
    batch = padded(sequences(LENGTHS), None, 1)
    assert torch.equal(PaddedModel(model, "eager").model(**batch).logits, fresh(**batch).logits)
    assert str(model) == str(fresh)
    assert list(model.state_dict()) == list(fresh.state_dict())
    copied = copy.deepcopy(model)
    assert torch.equal(copied(**batch).logits, fresh(**batch).logits)
    assert torch.equal(packed(name, copied)(row(LENGTHS)).logits, packed(name, fresh)(row(LENGTHS)).logits)


@pytest.mark.parametrize("max_length", [1, 7, 40, 700])
@pytest.mark.parametrize("buckets", [-1, 16, 256])
def test_buckets_are_the_family_s_own(buckets: int, max_length: int) -> None:
    model = FAMILIES["deberta-v2"].model(position_buckets=buckets, max_relative_positions=512)
    PackedModel(model, PackedForm(pooling="first", first_position=0))
    encoder = model.deberta.encoder
    found = encoder.buckets(max_length)
    span = 512 if buckets < 0 else buckets
    plain_LL = (encoder.get_rel_pos(torch.empty(1, max_length, 1))[0] + span).clamp(0, 2 * span - 1)
    place_L = torch.arange(max_length)
    distance_LL = place_L - place_L[:, None] + len(found.bucket_W) // 2
    assert torch.equal(found.bucket_W[distance_LL] + found.first, plain_LL)
    assert int(found.bucket_W.min()) >= 0
    assert int(found.bucket_W.max()) < found.last - found.first


class _Largest(TorchDispatchMode):
    """The most numbers that any tensor has that is made within."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else [out]:
            if isinstance(made, Tensor):
                self.numbers = max(self.numbers, made.numel())
        return out


@pytest.mark.parametrize("name", FORMS)
def test_nothing_is_made_of_every_pair_of_tokens(name: str) -> None:
    model = FAMILIES[name].model()
    inputs = row([8] * 250)
    run = packed(name, model)
    with _Largest() as largest:
        run(inputs).logits.sum().backward()
    assert largest.numbers < inputs.num_tokens**2 // 8


@pytest.mark.thorough
@pytest.mark.parametrize("name", FORMS)
def test_the_kernel_of_gpus_in_a_model(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In heads of 16 channels, which it takes; layers of two forms compiled, as they are on a GPU."""
    model = FAMILIES[name].model(hidden_size=32, num_attention_heads=2)
    plain = copy.deepcopy(model)
    inputs = row([9, 20, 1], tail=5, longest=24)
    expected = packed(name, plain)(inputs).logits
    expected.sum().backward()
    monkeypatch.setattr(packed_forward, "choose_attention", lambda *_: relative_attention)
    torch._dynamo.reset()
    for layer in model.base_model.encoder.layer if name in ("deberta-v2", "mpnet") else ():
        layer.compile(dynamic=True, backend="aot_eager", fullgraph=True)
    found = packed(name, model)(inputs).logits
    found.sum().backward()
    assert difference(found, expected) < MODEL_FP32
    assert difference(gradient(model), gradient(plain)) < MODEL_FP32


@pytest.mark.slow
def test_one_trace_serves_all_layers_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["deberta-v2"].model(hidden_size=32, num_attention_heads=2, num_hidden_layers=3)
    monkeypatch.setattr(packed_forward, "choose_attention", lambda *_: relative_attention)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    for layer in model.base_model.encoder.layer:
        layer.compile(dynamic=True, backend=counter, fullgraph=True)
    run = packed("deberta-v2", model)
    with torch.no_grad():
        for lengths in ([5, 3], [4, 7], [6, 2]):
            run(row(lengths, longest=8))
            run(row(lengths, tail=3, longest=8))
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("name", ["deberta-v2", "mpnet"])
@pytest.mark.parametrize("lost", ["bias", "far"])
def test_a_bias_that_is_forgotten_or_wrong_far_away_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, lost: str
) -> None:
    """Distances of 60 tokens and more, read wrongly, matter to texts of 200 tokens and not to those of 40."""
    plain_attend = packed_forward._attend

    def wrong(
        q: Tensor, k: Tensor, v: Tensor, segments: Segments, pattern: Any, plain: bool, watch: Any = None
    ) -> Tensor:
        relative = None
        if lost == "far":
            bucket_W = pattern.relative.bucket_W
            reach = len(bucket_W) // 2
            far_W = torch.arange(-reach, reach).abs() >= 60
            relative = dataclasses.replace(pattern.relative, bucket_W=bucket_W.masked_fill(far_W, 0))
        return plain_attend(q, k, v, segments, dataclasses.replace(pattern, relative=relative), plain, watch)

    model = FAMILIES[name].model(initializer_range=0.3, max_position_embeddings=300, position_buckets=128)
    monkeypatch.setattr(packed_forward, "_attend", wrong)
    for max_length in (40, 200):
        found = check_equivalence(
            model, max_length=max_length, device=torch.device("cpu"), precision="fp32", cache=False
        )
        assert found.packed is (lost == "far" and max_length == 40), found.reason


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("settings", "admitted"),
    [
        ({"pos_att_type": ["c2p"]}, True),
        ({"pos_att_type": "p2c"}, True),
        ({"pos_att_type": None}, True),
        ({"relative_attention": False, "position_biased_input": True}, True),
        ({"position_buckets": 8, "max_relative_positions": 40}, True),
        ({"share_att_key": True, "type_vocab_size": 2}, True),
        ({"conv_kernel_size": 5}, True),
        ({"conv_kernel_size": 3, "conv_groups": 2}, True),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_forms_of_deberta_v2(settings: dict[str, Any], admitted: bool, precision: str) -> None:
    base = FAMILIES["deberta-v2-convolution"].settings | {"conv_kernel_size": 0} | settings
    model = Family(config="DebertaV2Config", settings=base).model()
    found = check_equivalence(model, max_length=LONGEST, device=torch.device("cpu"), precision=precision, cache=False)
    assert found.packed is admitted, found.reason


def test_distances_that_the_check_has_to_reach() -> None:
    assert farthest_bucket(FAMILIES["mpnet"].model().config) == 128
    assert farthest_bucket(FAMILIES["deberta"].model().config) == 24
    assert farthest_bucket(FAMILIES["deberta-v2"].model().config) == 80
    assert farthest_bucket(FAMILIES["deberta-v2"].model(relative_attention=False).config) is None
    assert farthest_bucket(FAMILIES["bert"].model().config) is None
