"""Captured steps of models on padded rows against eager ones: bias of its own, end tokens, global attention, FFT."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForSequenceClassification

import brimful
from brimful.core.callbacks import Callbacks
from brimful.data.tokens.encoder import Tokens, offsets_of
from brimful.hardware.capture import capture
from brimful.kernels.layout import PaddedInputs, map_tensors, padded_inputs
from brimful.levers.precision import choose_precision
from brimful.models.packed.host_decisions import HostDecisions
from brimful.models.packed.host_reads import how_recorded
from brimful.models.packed.packed_forward import PaddedModel
from brimful.step.graphs.cache import GraphPool
from brimful.step.graphs.captured_forward import PaddedForward
from heads.tiny_heads import tiny_model
from tolerances import difference

pytestmark = pytest.mark.gpu

STEPS, END = 24, 2
TINY: dict[str, Any] = {"vocab_size": 999, "num_labels": 3, "pad_token_id": 0, "eos_token_id": END}
BERT_LIKE = TINY | {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "big_bird": partial(transformers.BigBirdConfig, **BERT_LIKE, classifier_dropout=0.0),
    "longformer": partial(
        transformers.LongformerConfig, **BERT_LIKE, attention_window=64, max_position_embeddings=200
    ),
    "longformer of short rows": partial(
        transformers.LongformerConfig, **BERT_LIKE, attention_window=256, max_position_embeddings=400
    ),
    "t5": partial(
        transformers.T5Config, **TINY, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
    "xlnet": partial(
        transformers.XLNetConfig, **TINY, d_model=64, n_layer=2, n_head=4, d_inner=128, dropout=0.0,
        summary_last_dropout=0.0,
    ),
    "fnet": partial(
        transformers.FNetConfig, **TINY, hidden_size=64, num_hidden_layers=2, intermediate_size=128,
        hidden_dropout_prob=0.0,
    ),
    "nystromformer": partial(transformers.NystromformerConfig, **BERT_LIKE, segment_means_seq_len=64),
    "ibert": partial(transformers.IBertConfig, **BERT_LIKE),
    "tapas": partial(transformers.TapasConfig, **BERT_LIKE, max_position_embeddings=128),
}  # fmt: skip


class Kept(Callbacks):
    """Keeps warnings."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def warning(self, text: str) -> None:
        self.lines.append(text)


def rows(number: int, ends: int = 1) -> list[dict[str, Any]]:
    random = np.random.default_rng(number)
    lengths = random.integers(ends + 1, 60, 8) if number % 2 else random.integers(ends + 1, 24, 8)
    made = [np.append(random.integers(5, 999, length - ends), [END] * ends) for length in lengths]
    return [{"input_ids": ids, "labels": int(random.integers(3))} for ids in made]


def trained(
    kind: str, execution: str, batches: list[list[dict[str, Any]]], precision: str = "fp32",
    learning_rate: float = 1e-3, jitter: float = 0.0, gradient_checkpointing: str = "none",
) -> tuple[Any, list[float], Kept, int]:  # fmt: skip
    """jitter: of routers that draw, how far below the best expert others are drawn."""
    torch.manual_seed(0)
    model: Any = (
        AutoModelForSequenceClassification.from_config(CONFIGS[kind]()) if kind in CONFIGS else tiny_model(kind)
    )
    model.config.pad_token_id = 0
    for module in model.modules():
        if hasattr(module, "router_jitter_noise"):
            module.router_jitter_noise = jitter
    kept, lengths = Kept(), [len(row["input_ids"]) for batch in batches for row in batch]
    step = brimful.Step(
        model, num_steps=3000, lengths=lengths * 40, batch_size=8, max_length=64, learning_rate=learning_rate,
        precision=precision, packing="off", execution=execution, gradient_checkpointing=gradient_checkpointing,
        callbacks=kept,
    )  # fmt: skip
    with brimful.Feed(step, batches) as feed:
        losses = [step.run(batch).read().loss for batch in feed]
    graphs = step._built.step.num_graphs
    return step.release(), losses, kept, graphs


@pytest.mark.parametrize("execution", ["captured", "compiled"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_captured_padded_steps_learn_what_eager_ones_do(kind: str, execution: str) -> None:
    if execution == "compiled" and kind.startswith(("longformer", "ibert")):
        pytest.skip("the host decides by numbers of the device within layers: captured, not compiled")
    batches = [rows(number % 6) for number in range(STEPS)]
    plain, expected, _, _ = trained(kind, "eager", batches)
    model, found, kept, graphs = trained(kind, execution, batches)
    assert kept.lines == []
    assert graphs > 0
    assert found == pytest.approx(expected, rel=2e-3)
    buffers = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("execution", ["eager", "captured"])
@pytest.mark.parametrize("kind", ["longformer", "longformer of short rows"])
def test_layers_that_are_computed_again_have_the_windows_of_their_rows(kind: str, execution: str) -> None:
    batches = [rows(number % 6) for number in range(STEPS)]
    _, expected, _, _ = trained(kind, "eager", batches)
    _, found, kept, graphs = trained(kind, execution, batches, gradient_checkpointing="full")
    assert kept.lines == []
    assert (graphs > 0) == (execution == "captured")
    assert found == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("kind", ["gpt_oss", "minimax", "qwen3_moe"])
def test_experts_in_bf16_are_captured(kind: str) -> None:
    """Those of all layers at once; in fp32 the host multiplies one after another."""
    batches = [[each | {"input_ids": each["input_ids"] % 150} for each in rows(number % 6)] for number in range(12)]
    _, expected, _, _ = trained(kind, "eager", batches, "bf16")
    _, found, kept, graphs = trained(kind, "captured", batches, "bf16")
    assert kept.lines == []
    assert graphs > 0
    assert found == pytest.approx(expected, rel=2e-2)


def test_random_numbers_of_a_model_are_drawn_at_each_replay() -> None:
    """Phi-MoE draws which experts a token has in training: the same batch has other losses, by weights that stay."""
    one = [each | {"input_ids": each["input_ids"] % 150} for each in rows(0)]
    _, found, kept, graphs = trained("phimoe", "captured", [one] * 12, "bf16", learning_rate=1e-30, jitter=1.0)
    assert kept.lines == []
    assert graphs > 0
    assert len(set(found[6:])) == 6


@pytest.mark.parametrize("execution", ["captured", "compiled"])
def test_rows_without_padding_are_captured(execution: str) -> None:
    """Their first pass runs eagerly, where transformers would leave the mask out."""
    random = np.random.default_rng(0)
    made = [{"input_ids": random.integers(5, 999, 32), "labels": int(random.integers(3))} for _ in range(8 * STEPS)]
    batches = [made[first : first + 8] for first in range(0, len(made), 8)]
    _, expected, _, _ = trained("nystromformer", "eager", batches)
    _, found, kept, graphs = trained("nystromformer", execution, batches)
    assert kept.lines == []
    assert graphs > 0
    assert found == pytest.approx(expected, rel=2e-3)


#: Types that run padded; grouped products of experts are for half precision.
PADDED = (
    *("bigbird_pegasus", "canine", "convbert", "fnet", "funnel", "ibert", "layoutlmv3", "lilt", "longformer", "mra"),
    *("mvp", "nystromformer", "qwen3_5_text", "t5gemma", "t5gemma2", "tapas", "xlnet", "yoso", "zamba", "zamba2"),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [*PADDED, "t5", "bart", "big_bird"])
def test_what_is_said_to_be_captured_is_and_gives_the_plain_results(kind: str, training: bool) -> None:
    """A graph of one batch's pass on another batch; a type that needs the host otherwise must say so before."""
    model = tiny_model(kind)
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0
    recording = how_recorded(model, 64, training=training, attention="eager")
    if recording.why_not is not None:
        pytest.skip(recording.why_not)
    model = model.cuda().train(training)
    end = getattr(model.config.get_text_config(), "eos_token_id", None)
    first, other = (padded_rows(seed, end if isinstance(end, int) else END) for seed in (0, 1))
    execution = PaddedModel(model, "eager")
    if recording.with_decisions:
        execution.decisions = HostDecisions(torch.device("cuda", 0))
    expected = computed(PaddedModel(model, "eager", plain=True), other, training)
    computed(execution, first, training)  # and warms up
    static, graph = map_tensors(first, torch.clone), torch.cuda.CUDAGraph()
    with capture(graph):
        found = computed(execution, static, training)
    for there, given in zip((static.ids_RL, static.mask_RL), (other.ids_RL, other.mask_RL), strict=True):
        there.copy_(given)
    graph.replay()
    for each, plain in zip(found, expected, strict=True):
        assert difference(each, plain) < 1e-3


def padded_rows(seed: int, end: int) -> PaddedInputs:
    random, lengths = np.random.default_rng(seed), [40, 9, 31, 22] if seed else [23, 40, 12, 35]
    ids = [np.append(random.integers(5, 90, length - 1), end) for length in lengths]
    return map_tensors(padded_inputs(ids, len(ids), 40, padding_id=0), torch.Tensor.cuda)


def computed(execution: PaddedModel, inputs: PaddedInputs, training: bool) -> list[torch.Tensor]:
    """Logits, and in training the gradient."""
    with torch.set_grad_enabled(training):
        logits = execution(inputs).logits
        if not training:
            return [logits]
        parameters = [parameter for parameter in execution.model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(logits.square().sum(), parameters, materialize_grads=True)
    return [logits.detach(), torch.cat([gradient.flatten() for gradient in gradients])]


def test_texts_with_other_decisions_are_answered_all_the_same() -> None:
    """Classification by graphs, of rows with one end token; those with two run again, eagerly, and it says so."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(CONFIGS["t5"]()).cuda().eval()
    kept, device = Kept(), torch.device("cuda", 0)

    def forward(recorder: GraphPool | None) -> PaddedForward:
        execution = PaddedModel(model)
        execution.decisions = HostDecisions(device)
        precision = choose_precision("fp32", device)
        return PaddedForward(
            execution, precision, budget=512, longest=64, padding_id=0, recorder=recorder, note=kept.warning
        )

    captured, eager = forward(GraphPool(device)), forward(None)
    for turn, ends in enumerate((1, 1, 1, 2, 1)):
        ids = [row["input_ids"] for row in rows(1 if ends == 2 else turn, ends)]  # a shape that was met
        tokens = Tokens(
            ids=np.concatenate(ids).astype(np.int32), offsets=offsets_of(np.array([len(each) for each in ids])),
            types=None, truncated=np.zeros(len(ids), np.bool_),
        )  # fmt: skip
        np.testing.assert_allclose(captured.submit(tokens).result(), eager.submit(tokens).result(), atol=1e-4)
        assert len(kept.lines) == (turn > 2)
    assert "what the model's code decides on the host is not the same" in kept.lines[0]


def test_a_batch_with_other_decisions_is_learned_all_the_same() -> None:
    """Every row has two end tokens where graphs were made for one: the step runs again, eagerly; where it happens again
    and again, graphs are given up, and it says so."""
    batches = [rows(number % 4) for number in range(12)] + [rows(1, ends=2)] + [rows(number % 4) for number in range(4)]
    _, expected, _, _ = trained("t5", "eager", batches)
    _, found, kept, graphs = trained("t5", "captured", batches)
    assert kept.lines == []
    assert graphs > 0
    assert found == pytest.approx(expected, rel=2e-3)
    batches = [rows(number % 2, ends=1 + number // 2 % 2) for number in range(48)]
    _, expected, _, _ = trained("t5", "eager", batches)
    _, found, kept, graphs = trained("t5", "captured", batches)
    assert (len(kept.lines), graphs) == (1, 0)
    assert "what the model's code decides on the host is not the same" in kept.lines[0]
    assert found == pytest.approx(expected, rel=2e-3)
