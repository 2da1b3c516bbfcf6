"""Wrong kernels and wrong training are refused in the precision that runs, also where its rounding hides them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForSequenceClassification

from brimful.models.packed import packed_forward
from brimful.models.packed.equivalence import Equivalence, check_equivalence
from brimful.models.packed.equivalence_cache import path_of
from tiny import FAMILIES, LONGEST
from wrong_attention import WRONG, Change, changed_pattern, gradient_lost

CPU = torch.device("cpu")
PRECISIONS = ["fp32", "bf16", "fp16"]


def check_here(model: Any, precision: str, max_length: int = LONGEST) -> Equivalence:
    return check_equivalence(model, max_length=max_length, device=CPU, precision=precision, cache=False)


def make_wrong(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    choose = packed_forward.choose_attention
    monkeypatch.setattr(packed_forward, "choose_attention", lambda *given: change(choose(*given)))


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, precision: str) -> None:
    """As initialised: scores are all alike, and half precision loses more than what is wrong."""
    change, family = WRONG[name]
    make_wrong(monkeypatch, change)
    found = check_here(FAMILIES[family].model(initializer_range=0.02), precision)
    assert not found.packed
    assert "kernel in" in found.reason
    assert " of run in fp32" in found.reason or " of run in bf16" in found.reason or " of run in fp16" in found.reason


@pytest.mark.thorough
def test_on_a_trained_model(minilm: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(str(minilm), num_labels=5, num_hidden_layers=1)
    assert check_here(model, "bf16", 48).packed
    changes = {"causal": changed_pattern(causal=True), "lost": gradient_lost("q", "k")}
    for name, change in changes.items():
        with pytest.MonkeyPatch.context() as patch:
            make_wrong(patch, change)
            assert not check_here(model, "bf16", 48).packed, name


@pytest.mark.thorough
@pytest.mark.parametrize("kernel_takes_fp32", [True, False])
def test_a_window_removed_from_a_wide_model(monkeypatch: pytest.MonkeyPatch, kernel_takes_fp32: bool) -> None:
    """Some kernels take half precision alone: there the dtype that runs must tell."""
    model = FAMILIES["modernbert"].model(
        hidden_size=256, intermediate_size=384, vocab_size=1000, local_attention=128, max_position_embeddings=512,
        initializer_range=0.02,
    )  # fmt: skip

    def half_only(attend: Any) -> Any:
        def run(q: Any, *given: Any) -> Any:
            if q.dtype == torch.float32:
                raise RuntimeError("half precision alone")
            return changed_pattern(window=None)(attend)(q, *given)

        return run

    make_wrong(monkeypatch, changed_pattern(window=None) if kernel_takes_fp32 else half_only)
    found = check_here(model, "bf16", 300)
    assert not found.packed
    assert ("in fp32" if kernel_takes_fp32 else "in bf16") in found.reason.partition("(")[2]


# --- training ---------------------------------------------------------------------------------------------------------


class Noise(torch.nn.Module):
    """Numbers that are no dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 0.1 * torch.randn(1)) if self.training else x


@pytest.mark.parametrize("draws", [False, True])
def test_batch_normalisation_mixes_rows_in_training(draws: bool) -> None:
    model = FAMILIES["bert"].model(dropout=0.1)
    before_head = [Noise()] if draws else []
    model.classifier = torch.nn.Sequential(*before_head, torch.nn.BatchNorm1d(16), model.classifier)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = check_here(model, "fp32")
    assert found.packed  # for reading it
    assert found.independent
    assert found.draws_in_training == draws
    training = found.for_training()
    assert not training.packed
    assert not training.independent
    assert "BatchNorm" in training.reason
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("layerdrop", [0.0, 0.1])
def test_layers_dropped_by_the_host(layerdrop: float) -> None:
    config = transformers.OPTConfig(
        vocab_size=99, hidden_size=16, word_embed_proj_dim=16, num_hidden_layers=2, num_attention_heads=4, ffn_dim=24,
        max_position_embeddings=80, pad_token_id=1, bos_token_id=2, eos_token_id=2, num_labels=3, layerdrop=layerdrop,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    state = torch.get_rng_state()
    found = check_here(model, "fp32")
    assert torch.equal(torch.get_rng_state(), state)
    assert found.packed  # for reading it
    assert found.draws_in_training == (layerdrop > 0)
    training = found.for_training()
    assert training.packed == (layerdrop == 0)
    assert training.independent
    assert layerdrop == 0 or "LayerDrop" in training.reason


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["bert", "modernbert", "deberta-v2", "mpnet", "gpt2", "distilbert"])
def test_dropout_is_no_reason(name: str) -> None:
    found = check_here(FAMILIES[name].model(dropout=0.3), "fp32")
    assert found.packed, found.reason
    assert not found.mixes_in_training
    assert not found.draws_in_training


class DropPath(torch.nn.Module):
    """Leaves out whole rows."""

    def __init__(self) -> None:
        super().__init__()
        self.drop_prob = 0.3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(len(x), *[1] * (x.ndim - 1)) >= self.drop_prob
        return x * kept if self.training else x


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DropPath, torch.nn.Dropout1d, torch.nn.AlphaDropout])
def test_dropout_of_whole_rows_is_one(kind: type[torch.nn.Module]) -> None:
    model = FAMILIES["bert"].model(dropout=0.3)
    model.bert.encoder.layer[0].output.dense = torch.nn.Sequential(model.bert.encoder.layer[0].output.dense, kind())
    found = check_here(model, "fp32")
    assert found.packed  # for reading it
    assert found.draws_in_training == (kind is not torch.nn.AlphaDropout)


# --- the cache --------------------------------------------------------------------------------------------------------


def test_nothing_is_kept_of_code_without_a_version() -> None:
    """A head of one's own may be another tomorrow, under the same name."""
    model = FAMILIES["bert"].model()
    assert path_of(model, LONGEST, CPU, "fp32", (None, None)) is not None
    model.classifier = torch.nn.Sequential(Noise(), model.classifier)
    assert path_of(model, LONGEST, CPU, "fp32", (None, None)) is None


def test_a_kept_result_is_for_these_weights_and_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(model: Any) -> Any:
        return path_of(model, LONGEST, CPU, "fp32", (None, None))

    def make() -> Any:
        return FAMILIES["bert"].model()

    assert kept(make()) == kept(make())
    other_weight, other_head, other_epsilon = make(), make(), make()
    with torch.no_grad():
        other_weight.bert.encoder.layer[1].output.dense.weight.mul_(1.5)
    other_head.classifier = torch.nn.Sequential(torch.nn.BatchNorm1d(16), other_head.classifier)
    other_epsilon.bert.encoder.layer[0].output.LayerNorm.eps = 1e-3
    found = {kept(model) for model in (make(), other_weight, other_head, other_epsilon)}
    assert len(found) == 4
    new_head = make()
    torch.nn.init.normal_(new_head.classifier.weight)
    assert kept(new_head) == kept(make())


class _Centred(torch.nn.Module):
    """A head whose rows influence one another, however long they are."""

    def forward(self, logits_NC: torch.Tensor) -> torch.Tensor:
        return logits_NC - logits_NC.mean(0)


def test_rows_of_one_length_may_share_a_batch_where_padding_alone_is_read() -> None:
    sizes: dict[str, Any] = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    fnet = transformers.FNetForSequenceClassification(
        transformers.FNetConfig(**sizes, max_position_embeddings=80, num_labels=3, initializer_range=0.5)
    )
    sizes = {"vocab_size": 99, "d_model": 16, "n_head": 4, "d_head": 4, "d_inner": 24, "pad_token_id": 0}
    funnel = transformers.FunnelForSequenceClassification(  # which does not take the shortest texts
        transformers.FunnelConfig(**sizes, block_sizes=[1, 1], num_decoder_layers=1, num_labels=3)
    )
    mixing = FAMILIES["bert"].model()
    mixing.classifier = torch.nn.Sequential(mixing.classifier, _Centred())
    found = [check_here(model, "fp32") for model in (fnet, funnel, mixing, FAMILIES["bert"].model())]
    assert [(each.independent, each.alike_independent) for each in found] == [
        *((False, True), (False, True), (False, False), (True, False))
    ]
