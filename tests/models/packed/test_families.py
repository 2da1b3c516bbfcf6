"""Families run packed: equal to their plain forward, admitted by the equivalence check, refused where something is
forgotten."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from brimful.kernels.attention.dispatch import Attention
from brimful.kernels.attention.pattern import Pattern
from brimful.kernels.layout import PackedShape, Segments, packed_inputs, padded_inputs
from brimful.models.packed import equivalence, equivalence_cache, packed_forward, tried_row
from brimful.models.packed.after_attention import after_attention
from brimful.models.packed.check_inputs import one_layer_of_each_kind
from brimful.models.packed.equivalence import Equivalence, check_equivalence
from brimful.models.packed.packed_forward import PackedModel, PaddedModel
from heads.tiny_heads import tiny_model
from plain import gradient, padded
from tiny import FAMILIES, LONGEST, VOCABULARY, Family, pair_types, sequences
from tolerances import MODEL_FP32, STEP_FP32_SOFTMAX, STEP_FP64, difference

CPU = torch.device("cpu")
LENGTHS = [5, 17, LONGEST, 1, 2, 31]
OWN_FORMS = (
    *("bart", "big_bird", "bloom", "eurobert", "falcon", "gpt_neo", "gptj", "luke", "mbart", "mobilebert", "mpt"),
    *("nemotron", "openai-gpt", "rembert", "roformer", "squeezebert", "t5", "umt5", "xlm"),
)


def check_here(model: Any, *, max_length: int = LONGEST, precision: str = "fp32", cache: bool = False) -> Equivalence:
    return check_equivalence(model, max_length=max_length, device=CPU, precision=precision, cache=cache)


# --- equality -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "deberta-v2"])
def test_no_padding_is_looked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is filled up; transformers would warn that there is no mask, and read the device for it."""
    looked = []
    monkeypatch.setattr(
        transformers.PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: looked.append(name)
    )
    model = FAMILIES[name].model()
    shape = PackedShape(num_tokens=12, num_slots=2, max_length=8)
    row = packed_inputs(sequences([5, 3]), shape, padding_id=0, groups=True)
    PackedModel(model, FAMILIES[name].form)(row)
    assert not looked
    model.base_model.warn_if_padding_and_no_attention_mask(row.ids_T[None], None)  # whoever calls it elsewhere
    assert looked == [name]


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAMILIES)
def test_texts_that_hold_the_padding_token(name: str) -> None:
    """Positions by the model's own rule: RoBERTa and MPNet leave such tokens out, in the middle and at the end."""
    plain = FAMILIES[name].model(initializer_range=0.3).eval()
    model, padding_id = copy.deepcopy(plain), plain.config.pad_token_id or 0
    plain.set_attn_implementation("eager")
    ids = sequences([12, 9, 20, 5])
    for sequence, places in zip(ids, ([4], [2, 3, 8], [0, 19], []), strict=True):
        sequence[places] = padding_id
    ids = FAMILIES[name].ended(ids)
    shape = PackedShape(num_tokens=64, num_slots=5, max_length=LONGEST)
    row = packed_inputs(ids, shape, padding_id=padding_id, types=pair_types(ids), groups=True)
    with torch.no_grad():
        types = pair_types(ids) if packed_forward.has_token_types(plain.config) else None
        expected = plain(**padded(ids, types, padding_id))
        found = PackedModel(model, FAMILIES[name].form)(row).logits[: len(ids)]
    assert difference(found, expected.logits) < MODEL_FP32


def test_texts_without_token_types() -> None:
    """As of a tokenizer that knows none: all are the first, also where our code stands for the model's."""
    models = {name: family.model(initializer_range=0.3).eval() for name, family in FAMILIES.items()}
    models = {name: model for name, model in models.items() if packed_forward.has_token_types(model.config)}
    assert {"bert", "mobilebert", "squeezebert"} <= models.keys()
    for name, model in models.items():
        ids, padding_id = FAMILIES[name].ended(sequences([12, 9, 5])), model.config.pad_token_id or 0
        shape = PackedShape(num_tokens=32, num_slots=4, max_length=LONGEST)
        with torch.no_grad():
            expected = model(**padded(ids, None, padding_id)).logits
            row = packed_inputs(ids, shape, padding_id=padding_id, groups=True)
            found = PackedModel(model, FAMILIES[name].form)(row).logits[: len(ids)]
        assert difference(found, expected) < MODEL_FP32, name


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "llama", "qwen3"])
def test_no_mask_is_made_of_positions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers looks at positions on the host to make one, which waits for all that the device has to do."""

    def waits(positions: Tensor) -> None:
        raise AssertionError(f"a mask is made of positions {tuple(positions.shape)}")

    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", waits)
    ids = FAMILIES[name].ended(sequences([12, 9]))
    row = packed_inputs(ids, PackedShape(num_tokens=32, num_slots=3, max_length=LONGEST), padding_id=0, groups=True)
    PackedModel(FAMILIES[name].model(), FAMILIES[name].form)(row).logits.sum().backward()


@pytest.mark.sampled
@pytest.mark.parametrize("spread", [0.02, 0.3], ids=["as initialised", "as trained"])
@pytest.mark.parametrize(
    ("name", "short"),
    [(name, False) for name in FAMILIES] + [(name, True) for name, family in FAMILIES.items() if family.short],
)
def test_packed_is_plain(name: str, short: bool, spread: float) -> None:
    compare_with_plain(FAMILIES[name].model(initializer_range=spread), FAMILIES[name], short, MODEL_FP32)


@pytest.mark.sampled
@pytest.mark.parametrize("name", OWN_FORMS)
def test_packed_is_plain_in_fp64(name: str) -> None:
    """Families whose own modules are told of a packed row."""
    family = FAMILIES[name]
    tolerance = STEP_FP32_SOFTMAX if family.partly_fp32 else STEP_FP64
    compare_with_plain(family.model(initializer_range=0.3).double(), family, family.short, tolerance)


def test_a_feed_forward_part_is_given_all_tokens_where_dropout_may_follow_it() -> None:
    """Phi-3's own is behind it, and would be drawn of zeros."""
    sizes = FAMILIES["llama"].settings | {"num_labels": 3, "resid_pdrop": 0.1}
    model = transformers.AutoModelForSequenceClassification.from_config(transformers.Phi3Config(**sizes))
    run = PackedModel(model, FAMILIES["llama"].form)
    assert (model.train() and run.left_out.parameters) == 0
    assert (model.eval() and run.left_out.parameters) > 0
    last = model.train().model.layers[-1]
    model.config.resid_pdrop = last.resid_attn_dropout.p = last.resid_mlp_dropout.p = 0.0
    assert run.left_out.parameters > 0


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "phimoe"])
def test_experts_are_given_all_tokens(kind: str) -> None:
    """The loss of their router is over all of them."""
    assert after_attention(tiny_model(kind)) is None


def compare_with_plain(plain: Any, family: Family, short: bool, tolerance: float) -> None:
    """Logits, and the gradient of all parameters, of a row longer than the model has positions."""
    model = copy.deepcopy(plain)
    plain.set_attn_implementation("eager")
    padding_id = plain.config.pad_token_id
    ids = family.ended(sequences(LENGTHS))
    types = pair_types(ids) if packed_forward.has_token_types(plain.config) else None
    shape = PackedShape(num_tokens=sum(LENGTHS) + LONGEST + 9, num_slots=len(ids) + 2, max_length=LONGEST)
    row = packed_inputs(ids, shape, padding_id=padding_id, types=types, groups=True)
    run = PackedModel(model, dataclasses.replace(family.form, short=short))
    expected_BC = plain(**padded(ids, types, padding_id)).logits
    found_SC = run(row).logits
    assert (run.left_out.parameters > 0) == short
    assert found_SC.shape == (len(ids) + 2, 3)
    assert torch.isfinite(found_SC).all()
    assert difference(found_SC[: len(ids)], expected_BC) < tolerance
    direction = torch.randn(expected_BC.shape, generator=torch.Generator().manual_seed(0))
    (expected_BC * direction).sum().backward()
    (found_SC[: len(ids)] * direction).sum().backward()
    assert difference(gradient(model), gradient(plain)) < tolerance


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "bf16") for name in FAMILIES), *((name, "fp32") for name in ("bert", "llama", "modernbert", "deberta"))],
)
def test_the_check_admits(name: str, precision: str) -> None:
    """All but the kernel is compared in fp32 whatever the precision is."""
    family = FAMILIES[name]
    found = check_here(family.model(initializer_range=0.02), precision=precision)
    assert found.packed, found.reason
    assert found.independent
    assert found.form == family.form
    assert found.kernel_error is not None


@pytest.mark.parametrize("name", ["bert", "llama", "modernbert-mean", "deberta", "deberta-v2", "mpnet"])
def test_both_ways_obey_train_and_eval(name: str) -> None:
    family = FAMILIES[name]
    model = family.model(dropout=0.3)
    ids = sequences([9, 4])
    shape = PackedShape(num_tokens=20, num_slots=2, max_length=LONGEST)
    run = PackedModel(model, family.form)
    row = packed_inputs(ids, shape, padding_id=0, groups=True)
    model.eval()
    assert torch.equal(run(row).logits, run(row).logits)
    model.train()
    assert not torch.equal(run(row).logits, run(row).logits)


class _ReadsItself(transformers.BertForSequenceClassification):
    """A head with a mode of its own, not only modules that have one."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        found = super().forward(*inputs, **named)
        found.logits = torch.nn.functional.dropout(found.logits, 0.5, self.training)
        return found


def test_a_head_that_reads_its_own_mode_obeys_train_and_eval() -> None:
    model = FAMILIES["bert"].model(num_labels=50)
    model.__class__ = _ReadsItself
    run = PackedModel(model.train(), FAMILIES["bert"].form)
    shape = PackedShape(num_tokens=20, num_slots=2, max_length=LONGEST)
    row = packed_inputs(sequences([9, 4]), shape, padding_id=0, groups=True)
    assert (run(row).logits == 0).any()
    model.eval()
    assert not (run(row).logits == 0).any()


# --- refusals -------------------------------------------------------------------------------------------------------


def wrapped(monkeypatch: pytest.MonkeyPatch, change: Callable[[Attention], Attention], *, kernel_only: bool) -> None:
    """`change` applied to the kernel that is chosen and, unless `kernel_only`, to the reference attention too."""
    choose, reference = packed_forward.choose_attention, packed_forward.reference_attention
    monkeypatch.setattr(packed_forward, "choose_attention", lambda *given: change(choose(*given)))
    if not kernel_only:
        monkeypatch.setattr(packed_forward, "reference_attention", change(reference))


def changed_pattern(**changes: Any) -> Callable[[Attention], Attention]:
    def change(attend: Attention) -> Attention:
        return lambda q, k, v, segments, pattern: attend(q, k, v, segments, dataclasses.replace(pattern, **changes))

    return change


@pytest.mark.sampled
@pytest.mark.parametrize("kernel_only", [False, True], ids=["everywhere", "in the kernel"])
@pytest.mark.parametrize(
    ("name", "forgotten"),
    [
        ("modernbert", {"window": None}),
        ("modernbert-mean", {"window": None}),
        ("modernbert", {"window": 8}),  # off by one
        ("mistral", {"window": None}),
        ("mistral", {"window": 15}),
        ("gemma2", {"softcap": None}),
        ("gemma2", {"window": None}),
        ("llama", {"causal": False}),
        ("bert", {"causal": True}),
        ("qwen3", {"scale": 0.51}),
    ],
)
def test_what_attention_forgets_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, forgotten: dict[str, Any], kernel_only: bool
) -> None:
    model = FAMILIES[name].model(initializer_range=0.3)  # as trained: scores of never trained weights are all alike
    wrapped(monkeypatch, changed_pattern(**forgotten), kernel_only=kernel_only)
    found = check_here(model)
    assert not found.packed
    assert found.independent
    assert ("kernel in fp32 is" if kernel_only else "packed logits differ from the plain ones by") in found.reason


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("kernel_only", [False, True], ids=["everywhere", "in the kernel"])
def test_a_window_matters_only_beyond_it(monkeypatch: pytest.MonkeyPatch, kernel_only: bool) -> None:
    """A window of 128 that is forgotten is right for 60 tokens, and wrong for 300."""
    model = FAMILIES["modernbert"].model(local_attention=128, max_position_embeddings=512)
    wrapped(monkeypatch, changed_pattern(window=None), kernel_only=kernel_only)
    assert check_here(model, max_length=60).packed
    assert not check_here(model, max_length=300).packed


def test_sequences_that_see_their_neighbours_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(attend: Attention) -> Attention:
        def see_all(q: Tensor, k: Tensor, v: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
            one = dataclasses.replace(segments, segment_T=torch.zeros_like(segments.segment_T))
            return execution_reference(q, k, v, one, pattern)

        return see_all

    execution_reference = packed_forward.reference_attention
    wrapped(monkeypatch, blind, kernel_only=False)
    for name in ("bert", "llama"):
        assert not check_here(FAMILIES[name].model()).packed


def _gradient_lost(tensor: str) -> Callable[[Attention], Attention]:
    def change(attend: Attention) -> Attention:
        def run(q: Tensor, k: Tensor, v: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
            given = {"q": q, "k": k, "v": v}
            given[tensor] = given[tensor].detach()
            return attend(given["q"], given["k"], given["v"], segments, pattern)

        return run

    return change


def _gradient_not_a_number(attend: Attention) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
        out_HTD = attend(q, k, v, segments, pattern)
        if out_HTD.requires_grad:
            out_HTD.register_hook(lambda gradient: gradient * float("nan"))
        return out_HTD

    return run


@pytest.mark.sampled
@pytest.mark.parametrize("kernel_only", [False, True], ids=["everywhere", "in the kernel"])
@pytest.mark.parametrize(
    "change",
    [_gradient_lost("q"), _gradient_lost("v"), _gradient_not_a_number],
    ids=["of queries lost", "of values lost", "not a number"],
)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_wrong_gradient_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Attention], Attention], kernel_only: bool
) -> None:
    model = FAMILIES[name].model()
    wrapped(monkeypatch, change, kernel_only=kernel_only)
    found = check_here(model)
    assert not found.packed
    assert ("packed gradient differs" if not kernel_only else "kernel in fp32") in found.reason


def test_a_sequence_that_fails_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_alone(attend: Attention) -> Attention:
        def run(q: Tensor, k: Tensor, v: Tensor, segments: Segments, pattern: Pattern) -> Tensor:
            alone = int((segments.cu_seqlens_N.diff()[:2] > 0).sum()) == 1
            return attend(q, k, v, segments, pattern) * (float("nan") if alone else 1.0)

        return run

    wrapped(monkeypatch, fails_alone, kernel_only=False)
    assert not check_here(FAMILIES["bert"].model()).packed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_head_of_zeros_hides_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A new head may begin at zero: all logits are then equal, and any pooling would do."""
    model = FAMILIES[name].model()
    head = model.score if name == "llama" else model.classifier
    torch.nn.init.zeros_(head.weight)
    found = check_here(model)
    assert found.packed
    assert found.pooling == FAMILIES[name].pooling
    assert not head.weight.any()
    wrapped(monkeypatch, changed_pattern(scale=1.0), kernel_only=False)
    assert not check_here(model).packed


_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 24, "max_position_embeddings": 80, "pad_token_id": 0}  # fmt: skip


_HYBRID = {"num_key_value_heads": 2, "head_dim": 4, "layer_types": ["linear_attention", "full_attention"],
           "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2,
           "linear_num_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 1}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("config", "settings", "independent", "reason"),
    [
        ("IBertConfig", {}, True, "attention of ibert cannot be told where sequences end"),
        ("DebertaConfig", {"talking_head": True}, True, "does not know heads that are mixed"),
        ("MPNetConfig", {}, True, "packed logits differ"),  # its padding is 1 whatever the configuration says
        ("FNetConfig", {}, False, "depends on the other rows of its batch, or on its padding"),
        ("ConvBertConfig", {"embedding_size": 8}, False, "depends on the other rows"),
        ("CanineConfig", {}, False, "canine does not take short sequences"),
        ("Qwen3NextConfig", _HYBRID, True, "layers of qwen3_next carry a state from token to token, across sequences"),
        ("FalconConfig", {"alibi": True}, True, "packed attention does not know falcon's alibi"),
        (
            "GptOssConfig",
            {"num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
            True,
            "packed attention does not know s_aux, which GptOssAttention gives it",
        ),
    ],
)
def test_refused_with_a_reason(config: str, settings: dict[str, Any], independent: bool, reason: str) -> None:
    model = Family(config=config, settings=_SMALL | settings).model()
    found = check_here(model)
    assert not found.packed
    assert found.independent is independent
    assert reason in found.reason
    assert "\n" not in found.reason


@pytest.mark.parametrize("scaled", [False, True])
def test_what_special_tokens_do_is_found(scaled: bool) -> None:
    """ESM scales embeddings by the share of <mask> in a row."""
    config = transformers.EsmConfig(
        **_SMALL | {"vocab_size": 1000, "pad_token_id": 1}, mask_token_id=32, token_dropout=scaled, num_labels=3,
        position_embedding_type="rotary", emb_layer_norm_before=False, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    found = check_here(transformers.EsmForSequenceClassification(config))
    assert found.packed is not scaled, found.reason
    assert found.independent


def test_keys_that_are_kept_of_a_row_are_found() -> None:
    """Doge keeps so many keys of a row that has more: of a packed row, and of a padded one."""
    config = transformers.DogeConfig(
        vocab_size=1000, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, keep_window_size=64, pad_token_id=0, num_labels=3, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    found = check_here(transformers.DogeForSequenceClassification(config), max_length=200)
    assert not found.packed
    assert not found.independent


def test_a_model_whose_layers_differ_by_number_is_tried_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["gpt2"].model(n_layer=3, scale_attn_by_inverse_layer_idx=True)
    assert len(one_layer_of_each_kind(model).transformer.h) == 3
    assert check_here(model).packed
    wrapped(monkeypatch, changed_pattern(scale=0.5), kernel_only=False)  # right for the first layer alone
    assert not check_here(model).packed


@pytest.mark.parametrize(
    ("name", "settings", "path", "kept"),
    [
        ("bert", {"num_hidden_layers": 6}, "bert.encoder.layer", 2),
        ("gpt2", {"n_layer": 6}, "transformer.h", 2),
        ("distilbert", {"n_layers": 6}, "distilbert.transformer.layer", 2),
        (
            "modernbert",
            {"num_hidden_layers": 7},
            "model.layers",
            5,
        ),  # full without a norm, windows, full with, one more
        ("gemma2", {"num_hidden_layers": 6}, "model.layers", 3),
        ("llama", {"num_hidden_layers": 5}, "model.layers", 2),
        ("llama", {"num_hidden_layers": 1}, "model.layers", 1),
    ],
)
def test_one_layer_of_each_kind_and_one_above(name: str, settings: dict[str, int], path: str, kept: int) -> None:
    model = FAMILIES[name].model(**settings)
    before = model.config.to_dict()
    small = one_layer_of_each_kind(model)
    assert len(small.get_submodule(path)) == kept
    assert small.config.num_hidden_layers == kept
    assert len(model.get_submodule(path)) == next(iter(settings.values()))
    assert model.config.to_dict() == before
    assert small.get_submodule(path)[0] is not model.get_submodule(path)[0]


@pytest.mark.parametrize("config", ["XLMConfig", "FlaubertConfig"])
def test_models_that_loop_by_a_number_of_their_own(config: str) -> None:
    """More layers than the check keeps."""
    sizes = {"vocab_size": VOCABULARY, "emb_dim": 16, "n_heads": 2, "n_layers": 4, "max_position_embeddings": 80}
    model = Family(config=config, settings={**sizes, "n_langs": 1, "pad_token_id": 0}).model()
    assert check_here(model).packed, check_here(model).reason


# --- encoder-decoders -----------------------------------------------------------------------------------------------


def test_encoder_decoders_run_padded_too_and_may_be_split() -> None:
    """They want one end token in each row, the rows that only fill a shape too."""
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=80,
        pad_token_id=0, bos_token_id=3, eos_token_id=4, decoder_start_token_id=4, num_labels=3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    ids = [np.append(sequence, 4) for sequence in sequences([6, 3])]
    rows = padded_inputs(ids, num_rows=4, length=9, padding_id=0)
    expected = model(**padded(ids, None, 0)).logits
    assert difference(PaddedModel(model)(rows).logits[:2], expected) < MODEL_FP32


# --- the equivalence check leaves things as they were, and remembers -------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["bert", "llama", "modernbert", "albert", "deberta-v2", "mpnet"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    model = FAMILIES[name].model(dropout=0.1).train()
    model.base_model.eval()
    for parameter in list(model.parameters())[:3]:
        parameter.requires_grad_(False)

    def state() -> list[Any]:
        config = copy.deepcopy(model.config.to_dict())
        flags = [(n, m.training) for n, m in model.named_modules()]
        trained = [(n, p.requires_grad, p.grad is None, id(p)) for n, p in model.named_parameters()]
        return [config, flags, trained, model.config._attn_implementation, str(model), torch.get_rng_state().tolist()]

    torch.manual_seed(3)
    before, weights = state(), copy.deepcopy(model.state_dict())
    assert check_here(model, precision="bf16").packed
    assert state() == before
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "brimful" / "equivalence"


def files(cache: Path) -> int:
    return len(list(cache.iterdir())) if cache.exists() else 0


def test_a_check_is_remembered(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["bert"].model()
    first = check_here(model, cache=True)
    assert first.packed
    assert files(cache) == 1
    monkeypatch.setattr(equivalence, "_check", lambda *_: 1 / 0)  # would be a refusal
    assert check_here(model, cache=True) == first
    other = FAMILIES["bert"].model()  # other names of labels: the same body
    other.config.id2label, other.config.label2id = {0: "x", 1: "y", 2: "z"}, {"x": 0, "y": 1, "z": 2}
    other.config._name_or_path = "elsewhere"
    assert check_here(other, cache=True) == first
    assert not check_here(FAMILIES["bert"].model(seed=5), cache=True).packed  # other weights are checked anew
    assert model.config._attn_implementation != packed_forward.PACKED


def test_refusals_are_remembered_and_accidents_are_not(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not check_here(Family(config="FNetConfig", settings=_SMALL).model(), cache=True).packed
    assert files(cache) == 1

    def fall(*_: Any) -> Any:
        raise RuntimeError("CUDA out of memory\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(tried_row.TriedRow, "kernel_error", fall)
        found = check_here(FAMILIES["bert"].model(), cache=True)
    assert not found.packed
    assert found.reason.startswith("bert could not be tried: RuntimeError: CUDA out of memory")
    assert "\n" not in found.reason
    assert files(cache) == 1
    assert check_here(FAMILIES["bert"].model(), cache=True).packed


def kept(model: Any) -> Path | None:
    return equivalence_cache.path_of(model, LONGEST, torch.device("cpu"), "fp32", (None, None))


@pytest.mark.slow
def test_what_a_check_depends_on(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(model: Any, max_length: int = LONGEST, precision: str = "fp32") -> None:
        check_here(model, max_length=max_length, precision=precision, cache=True)

    bert = FAMILIES["bert"].model()
    here(bert)
    here(bert, max_length=20)
    here(bert, precision="bf16")
    here(FAMILIES["bert"].model(hidden_act="relu"))
    here(FAMILIES["bert"].model(num_hidden_layers=3))
    here(FAMILIES["electra"].model())
    subclass: Any = type("Other", (type(bert),), {"__module__": "transformers_modules.somebody.abc123"})
    here(subclass(bert.config))
    assert files(cache) == 7
    places = [kept(bert)]
    for module, name in (
        (equivalence_cache, "_source"),
        (equivalence_cache.transformers, "__version__"),
        (equivalence_cache.torch, "__version__"),
    ):
        monkeypatch.setattr(module, name, (lambda: "0") if name == "_source" else "0")
        places.append(kept(bert))
    assert len(set(places)) == 4


@pytest.mark.sampled
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}", b"[1]", b'"x"', b'{"packed": true, "unknown": 1}'])
def test_a_torn_cache_is_checked_anew(cache: Path, content: bytes) -> None:
    model = FAMILIES["bert"].model()
    first = check_here(model, cache=True)
    [path] = cache.iterdir()
    path.write_bytes(content)
    assert check_here(model, cache=True) == first
    assert check_here(model, cache=True) == first


def test_nothing_is_kept_where_it_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["bert"].model()
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    assert check_here(model, cache=True).packed
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", _no_home)
    assert check_here(model, cache=True).packed


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_without_the_cache_nothing_is_written(cache: Path) -> None:
    assert check_here(FAMILIES["bert"].model(), cache=False).packed
    assert files(cache) == 0
