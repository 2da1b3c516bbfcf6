"""Captured and compiled steps against the eager one, on a GPU, on sequences of real lengths."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, DebertaV2Config, MPNetConfig

from brimful.core.records import LabelSpace
from brimful.data.batches.batch import Batch, PackedLayout, Sampler
from brimful.data.batches.packing import Budgets, choose_budgets
from brimful.data.batches.prefetch import Feed, Source
from brimful.data.tokens.encoder import Tokens
from brimful.engine.inference import evaluating, predict_logits
from brimful.hardware.capture import capture
from brimful.levers.compiled_layers import compile_layers
from brimful.levers.optimizer import Optimizer
from brimful.levers.precision import choose_precision
from brimful.models.packed.packed_forward import PackedForm, PackedModel
from brimful.step.graphs.cache import GraphPool
from brimful.step.graphs.captured_forward import PackedForward
from brimful.step.graphs.captured_step import CapturedStep
from brimful.step.step import Step, make_schedule
from brimful.tasks.task import SingleLabel
from gpu.waits import no_waiting
from plain import padded
from tolerances import difference

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
STEPS = 40


def source(
    token_budget: int,
    batch_size: int = 16,
    budgets: Budgets | None = None,
    typical_length: int | None = None,
    *,
    weighted: bool = False,
) -> Source:
    """Rows of 3 to 120 tokens. typical_length: 60 chooses our attention, which fused layers are made around."""
    random = np.random.default_rng(0)
    lengths = random.integers(3, 120, size=300)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = Tokens(
        ids=random.integers(5, 900, size=offsets[-1]).astype(np.int32),
        offsets=offsets,
        types=None,
        truncated=np.zeros(300, dtype=np.bool_),
    )
    space = LabelSpace(task="single_label", names=("a", "b", "c"), values={"a": 0, "b": 1, "c": 2})
    order = Sampler(num_samples=300, batch_size=batch_size, seed=1)
    batches = [lengths[order.samples(number)] for number in range(100)]
    layout = PackedLayout(
        budgets=budgets or choose_budgets(batches, token_budget, 128),
        num_slots=batch_size,
        max_length=128,
        padding_id=0,
        groups=False,
        typical_length=typical_length,
    )
    targets = random.integers(0, 3, size=300)
    weights = random.choice([0.1, 1.0, 7.0], 300).astype(np.float32) if weighted else None
    return Source(tokens, targets, SingleLabel(space), layout, order, weights_N=weights)


#: Configuration and first position of families: attention of its own, with a bias by distance, with position tables.
CONFIGS: dict[str, tuple[Any, int]] = {
    "bert": (BertConfig, 0),
    "mpnet": (partial(MPNetConfig, pad_token_id=0), 1),
    "deberta-v2": (
        partial(
            DebertaV2Config, relative_attention=True, position_buckets=32, share_att_key=True,
            pos_att_type=["c2p", "p2c"], norm_rel_ebd="layer_norm", type_vocab_size=0, position_biased_input=False,
        ),
        0,
    ),
}  # fmt: skip


def make_step(
    kind: type[Step],
    *,
    dropout: float,
    compiled: bool = False,
    precision: str = "bf16",
    fused: bool = True,
    family: str = "bert",
    short: bool = False,
    our_update: bool = True,
    optim: Any = "adamw_torch_fused",
    note: Callable[[str], object] = pytest.fail,
    num_layers: int = 2,
) -> Step:
    torch.manual_seed(0)
    make_config, first_position = CONFIGS[family]
    config = make_config(
        vocab_size=1000,
        hidden_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        intermediate_size=256,
        num_labels=3,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = AutoModelForSequenceClassification.from_config(config).cuda().train()
    execution = PackedModel(model, PackedForm(pooling="first", first_position=first_position, short=short))
    if compiled:
        compile_layers(execution, fused=fused, note=pytest.fail)
    options: dict[str, Any] = {"seed": 3}
    if kind is CapturedStep:
        options |= {"most_tokens": 8192, "precompile": fused, "note": note}
    space = LabelSpace(task="single_label", names=("a", "b", "c"), values={"a": 0, "b": 1, "c": 2})
    chosen = choose_precision(precision, GPU)  # type: ignore[arg-type]
    update = Optimizer(value=optim, fused=our_update).update(
        model, make_schedule("linear", 1e-3, STEPS, 4), chosen, max_grad_norm=1.0
    )
    return kind(execution, SingleLabel(space), update, chosen, **options)


def outcomes(step: Step, batches: Source, number: int = STEPS) -> list[tuple[float, float]]:
    """Loss and norm of the gradient of each step."""
    with Feed(batches, GPU, stop=number) as feed:
        read = [step.run(batch).read() for batch in feed]
    return [(each.loss, each.grad_norm) for each in read]


def losses(step: Step, batches: Source, number: int = STEPS) -> list[float]:
    with Feed(batches, GPU, stop=number) as feed:
        return [step.run(batch).read().loss for batch in feed]


@pytest.mark.parametrize("token_budget", [8192, 256], ids=["whole", "pieces"])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_captured_is_the_eager_step(token_budget: int, compiled: bool) -> None:
    """In fp32, where nothing hides behind rounding: losses and gradient norms of each step, most of them replays."""
    expected = outcomes(make_step(Step, dropout=0.0, precision="fp32"), source(token_budget, typical_length=60))
    step = make_step(CapturedStep, dropout=0.0, compiled=compiled, precision="fp32")
    found = outcomes(step, source(token_budget, typical_length=60))
    assert isinstance(step, CapturedStep)
    assert step.num_graphs >= 2
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for one, other in zip(found[:20], expected[:20], strict=True):
        assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("token_budget", [8192, 256], ids=["whole", "pieces"])
def test_weights_of_rows_are_read_at_each_replay(token_budget: int) -> None:
    expected = outcomes(make_step(Step, dropout=0.0, precision="fp32"), source(token_budget, weighted=True))
    step = make_step(CapturedStep, dropout=0.0, precision="fp32")
    found = outcomes(step, source(token_budget, weighted=True))
    alike = outcomes(make_step(Step, dropout=0.0, precision="fp32"), source(token_budget), number=1)
    assert step.num_graphs >= 2
    assert expected[0] != pytest.approx(alike[0], rel=1e-2)
    for one, other in zip(found[:20], expected[:20], strict=True):
        assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_a_captured_gradient_is_the_plain_models(compiled: bool) -> None:
    """The gradient of a replayed step, as SGD applies it, against Hugging Face's own forward in fp32."""
    batches = source(8192, typical_length=60)
    batch = next(iter(batches.batches(0, 1)))
    sgd: dict[str, Any] = {"optim": "sgd", "our_update": False}
    step: Any = make_step(CapturedStep, dropout=0.0, compiled=compiled, precision="fp32", **sgd)
    with torch.no_grad():
        step.update.schedule.zero_()
    for _ in range(3):  # eagerly, captured, replayed
        step.run(batch.sent(GPU)).read()
    assert step.num_graphs == 1
    gradients = plain_gradients(step, batches, batch.samples)
    before = {name: tensor.clone() for name, tensor in step.state().weights.items()}
    with torch.no_grad():
        step.update.schedule.fill_(1.0)
    outcome = step.run(batch.sent(GPU)).read()
    after = step.state().weights
    found = torch.cat([(before[name] - after[name]).flatten() for name in gradients]).cpu()
    expected = torch.cat([gradient.flatten() for gradient in gradients.values()]).cpu()
    assert outcome.grad_norm == pytest.approx(float(expected.norm()), rel=1e-4)
    assert difference(found, expected / max(1.0, float(expected.norm()))) < 1e-4  # clipped at a norm of 1


def plain_gradients(step: Step, batches: Source, samples: np.ndarray) -> dict[str, torch.Tensor]:
    """Gradient of each parameter of the plain model with the weights of now, padded, with eager attention."""
    config = copy.deepcopy(step.execution.model.config)  # the model's own says how it runs
    plain = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    plain.load_state_dict({name: tensor.cpu() for name, tensor in step.state().weights.items()}, strict=False)
    inputs = padded([batches.tokens.sequence(sample) for sample in samples], None, 0)
    targets = torch.from_numpy(batches.targets_N[samples])
    torch.nn.functional.cross_entropy(plain(**inputs).logits, targets).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in plain.named_parameters()}


@pytest.mark.parametrize(
    ("family", "compiled"),
    [("bert", False), ("mpnet", False), ("mpnet", True), ("deberta-v2", False), ("deberta-v2", True)],
)
def test_captured_families_with_short_layers(family: str, compiled: bool) -> None:
    """Whole layers run eagerly, against short and fused ones that are captured."""
    expected = losses(make_step(Step, dropout=0.0, family=family), source(8192))
    step: Any = make_step(CapturedStep, dropout=0.0, family=family, compiled=compiled, short=family != "mpnet")
    assert losses(step, source(8192))[:20] == pytest.approx(expected[:20], rel=2e-2)
    assert step.num_graphs >= 2


@pytest.mark.parametrize(("typical_length", "traced"), [(30, 0), (700, 1)], ids=["our attention", "flash attention"])
def test_layers_are_traced_once_where_they_are_not_recorded(typical_length: int, traced: int) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    batches = source(8192, typical_length=typical_length)
    losses(make_step(CapturedStep, dropout=0.1, compiled=True, fused=typical_length == 30), batches)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == traced


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "fused"])
def test_an_update_that_the_host_decides_on_follows_captured_gradients(compiled: bool) -> None:
    def make(kind: type[Step], compiled: bool) -> Step:
        step = make_step(kind, dropout=0.0, compiled=compiled, our_update=False, optim="rmsprop", precision="fp32")
        assert not step.update.on_device
        return step

    expected = losses(make(Step, False), source(256, typical_length=60))
    step: Any = make(CapturedStep, compiled)
    assert losses(step, source(256, typical_length=60))[:20] == pytest.approx(expected[:20], rel=2e-3)
    assert step.num_graphs >= 1


@pytest.mark.parametrize("optim", ["adamw_torch_8bit", "adamw_torch_4bit"])
def test_steps_of_torchao_are_a_graph(optim: str) -> None:
    """Beside the step's own graphs; an eager step has none. torchao's kernels are compiled for each shape."""
    pytest.importorskip("torchao")
    batches = source(8192, typical_length=60)
    options: Any = {"dropout": 0.0, "our_update": False, "optim": optim, "precision": "fp32"}
    eager, captured = (make_step(kind, **options) for kind in (Step, CapturedStep))
    expected = losses(eager, batches)
    assert losses(captured, batches)[:20] == pytest.approx(expected[:20], rel=2e-3)
    assert len(captured.update._graphs) == 1  # type: ignore[attr-defined]
    assert eager.update._graphs is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("token_budget", [8192, 256], ids=["whole", "pieces"])
@pytest.mark.parametrize("optim", ["adafactor", "lion_32bit", "adamw_bnb_8bit"])
def test_what_decides_on_the_device_is_captured_with_its_update(optim: str, token_budget: int) -> None:
    """Steps are counted on the device, where a replay counts them too."""
    if optim != "adafactor":
        pytest.importorskip("bitsandbytes")
    batches = source(token_budget, typical_length=60)
    options: Any = {"dropout": 0.0, "our_update": False, "optim": optim, "precision": "fp32"}
    expected = losses(make_step(Step, **options), batches)
    step: Any = make_step(CapturedStep, **options)
    assert step.update.on_device
    assert losses(step, batches)[:20] == pytest.approx(expected[:20], rel=2e-3)
    assert step.num_graphs >= 1
    counts = {int(each.tensors["step"]) for each in step.state().optimizer.values() if "step" in each.tensors}
    assert counts == (set() if optim == "lion_32bit" else {STEPS})


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "fused"])
def test_dropout_repeats_and_differs(compiled: bool) -> None:
    batches = source(8192, typical_length=60)
    first = losses(make_step(CapturedStep, dropout=0.2, compiled=compiled), batches)
    again = losses(make_step(CapturedStep, dropout=0.2, compiled=compiled), batches)
    eager = losses(make_step(Step, dropout=0.2, compiled=compiled), batches)
    assert first == pytest.approx(again, rel=2e-2)
    assert first == pytest.approx(eager, rel=5e-2)  # the same masks: seeds reach the graphs
    step = make_step(CapturedStep, dropout=0.5)
    batch = next(iter(source(8192).batches(0, 1))).sent(GPU)
    other = Batch(**{**vars(batch), "number": 7})
    with torch.no_grad():
        step.update.schedule.zero_()
    found = [step.run(b).read().loss for b in (batch, batch, batch, other)]
    assert found[1] == found[2] != found[3]


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "fused"])
def test_nothing_waits_in_the_steady_state(compiled: bool) -> None:
    step: Any = make_step(CapturedStep, dropout=0.1, compiled=compiled)
    for _ in range(2):  # a shape is captured when it is met again
        losses(step, source(8192), 100)
    reserved, graphs, pending = torch.cuda.memory_reserved(), step.num_graphs, []
    with Feed(source(8192), GPU, stop=100) as feed:
        batches = iter(feed)
        first = next(batches)  # the feed has begun
        with no_waiting():
            for batch in chain([first], batches):
                pending.append(step.run(batch))
                if len(pending) > 2:
                    pending.pop(0)
    assert all(p.read().applied for p in pending)
    assert step.num_graphs == graphs
    assert torch.cuda.memory_reserved() == reserved


def test_a_non_finite_step_is_not_applied() -> None:
    step = make_step(CapturedStep, dropout=0.0)
    batches = list(source(8192).batches(0, 30))
    for batch in batches:
        step.run(batch.sent(GPU)).read()
    before = [p.detach().clone() for p in step.update.parameters]
    bad = batches[5].sent(GPU)
    slot = int(bad.micro_batches[0].inputs.first_S[3])  # type: ignore[union-attr]
    token = int(bad.micro_batches[0].inputs.ids_T[slot])  # type: ignore[union-attr]
    embedding = step.execution.model.base_model.embeddings.word_embeddings.weight
    saved = embedding.detach()[token].clone()
    with torch.no_grad():
        embedding[token] = float("nan")
    outcome = step.run(bad).read()
    assert not outcome.applied
    assert int(bad.micro_batches[0].samples[3]) in outcome.bad_samples
    assert len(outcome.bad_samples) < len(bad.samples)
    with torch.no_grad():
        embedding[token] = saved
    assert all(torch.equal(a, b) for a, b in zip(before, step.update.parameters, strict=True))
    assert step.run(batches[6].sent(GPU)).read().applied


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "fused"])
def test_graphs_of_many_shapes_share_the_memory_of_the_largest(compiled: bool) -> None:
    """Captured from the smallest to the largest, of which none would fit in what the one before took."""

    def pool_bytes(*budgets: int) -> int:
        step: Any = make_step(CapturedStep, dropout=0.1, compiled=compiled)
        for budget in budgets:
            batches = source(8192, batch_size=64, budgets=Budgets(tokens=(budget,), fill=1.0))
            batch = next(iter(batches.batches(0, 1))).sent(GPU)
            for _ in range(2):  # eagerly, and captured
                step.run(batch).read()
        assert step.num_graphs == len(budgets)
        segments = torch.cuda.memory_snapshot()
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == tuple(step.pool.handle))

    assert pool_bytes(*range(4800, 8001, 400)) < 1.5 * pool_bytes(8000)


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_graphs_are_freed_with_their_step(compiled: bool) -> None:
    """At once, not when Python looks for cycles: the next run wants their memory."""
    step: Any = make_step(CapturedStep, dropout=0.1, compiled=compiled)
    batch = next(iter(source(8192).batches(0, 1))).sent(GPU)
    for _ in range(3):
        step.run(batch).read()
    cache, update = weakref.ref(step._graphs), weakref.ref(step.update)
    gc.collect()
    gc.disable()
    try:
        del step, batch
        assert cache() is None
        assert update() is None
    finally:
        gc.enable()


def test_garbage_of_a_capture_waits_for_its_end() -> None:
    """A graph among it: freed within the capture, it would make it fail."""
    x, other, graph = torch.ones(8, device=GPU), torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with capture(other):
        x.mul(3)
    other.replay()
    with capture(graph):
        cycle: list[Any] = [other]
        cycle.append(cycle)
        del cycle, other
        y = x + 1
        made = [[] for _ in range(100_000)]  # so many that Python would look for garbage
    graph.replay()
    assert len(made) == 100_000
    assert gc.isenabled()
    assert y.tolist() == [2.0] * 8


def test_a_refused_capture_leaves_the_device_as_it_was() -> None:
    stream = torch.cuda.current_stream()
    torch.manual_seed(2)
    with pytest.raises((RuntimeError, torch.AcceleratorError)), capture(torch.cuda.CUDAGraph()):
        torch.rand(8, device=GPU).tolist()
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.initial_seed() == 2
    torch.manual_seed(1)
    expected = torch.rand(8, device=GPU).tolist()
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        drawn = torch.rand(8, device=GPU)
    torch.manual_seed(1)
    graph.replay()
    assert drawn.tolist() == expected
    assert gc.isenabled()


def test_a_refused_capture_leaves_the_allocator_as_it_was() -> None:
    """Memory that nothing uses goes back to the device, the refused pool's too, and a pool can be used again."""
    with pytest.raises((RuntimeError, torch.AcceleratorError)), capture(torch.cuda.CUDAGraph()):
        torch.ones(64 << 20, dtype=torch.uint8, device=GPU).tolist()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.empty(1 << 30, dtype=torch.uint8, device=GPU)
    assert torch.cuda.memory_reserved() == before + (1 << 30)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before
    pool = GraphPool(GPU)
    for _ in range(2):
        with pytest.raises((RuntimeError, torch.AcceleratorError)):
            pool.record(lambda: torch.rand(8, device=GPU).tolist())
        graph, made = pool.record(lambda: torch.full((8,), 3.0, device=GPU))
        graph.replay()
        assert made.tolist() == [3.0] * 8
    del graph, made, pool
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_a_model_that_looks_at_the_device_runs_eagerly(compiled: bool) -> None:
    expected = losses(make_step(Step, dropout=0.0), source(8192))
    notes: list[str] = []
    step: Any = make_step(CapturedStep, dropout=0.0, compiled=compiled, note=notes.append)
    layer = step.execution.model.base_model.encoder

    def look(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        assert float(arguments[0].detach().sum()) != 1e9

    layer.register_forward_pre_hook(look)
    found = losses(step, source(8192))
    assert len(notes) == 1
    assert step.num_graphs == 0
    assert found[:20] == pytest.approx(expected[:20], rel=2e-2)


def test_bf16_copies_are_the_masters_rounded() -> None:
    step = make_step(CapturedStep, dropout=0.1, compiled=True)
    losses(step, source(8192))
    masters = step.state().weights
    half_weights = {n: p for n, p in step.execution.model.named_parameters() if p.dtype == torch.bfloat16}
    assert len(half_weights) > 10
    assert all(torch.equal(p, masters[name].bfloat16()) for name, p in half_weights.items())


@pytest.mark.parametrize("token_budget", [8192, 256], ids=["whole", "pieces"])
def test_the_fused_update_is_torchs(token_budget: int) -> None:
    fused = make_step(CapturedStep, dropout=0.0)
    found = losses(fused, source(token_budget))
    plain = make_step(CapturedStep, dropout=0.0, our_update=False)
    expected = losses(plain, source(token_budget))
    assert found[:20] == pytest.approx(expected[:20], rel=2e-2)
    ours, theirs = (each.state().weights for each in (fused, plain))
    names = [n for n, weight in ours.items() if weight.is_floating_point() and "key.bias" not in n]
    one, two = (torch.cat([group[n].flatten() for n in names]) for group in (ours, theirs))
    assert (one - two).norm() < 2e-2 * two.norm()


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_evaluation_in_the_memory_of_the_steps(compiled: bool) -> None:
    """Captured between steps: logits are the eager pass's, and steps learn what they learn alone."""
    alone = losses(make_step(CapturedStep, dropout=0.1, compiled=compiled), source(8192))
    step: Any = make_step(CapturedStep, dropout=0.1, compiled=compiled)
    tokens, found = source(8192).tokens, []
    captured, eager = (
        PackedForward(
            step.execution,
            step.precision,
            budget=2048,
            longest=128,
            padding_id=0,
            typical_length=60,
            recorder=recorder,
            fused=False,
            note=pytest.fail,
        )
        for recorder in (step.pool, None)
    )
    with Feed(source(8192), GPU, stop=STEPS) as feed:
        for batch in feed:
            found.append(step.run(batch).read().loss)
            if batch.number % 8 == 7:
                with evaluating(step.execution.model):
                    ours, expected = (predict_logits(forward, tokens) for forward in (captured, eager))
                assert np.array_equal(ours, expected)
    assert len(captured._graphs) > 0
    assert found == pytest.approx(alone, rel=2e-2)


def test_side_streams_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = losses(make_step(CapturedStep, dropout=0.1, compiled=True), source(8192))
    monkeypatch.setattr("brimful.step.updates.fused_adamw.SideStream", lambda _: None)
    alone = losses(make_step(CapturedStep, dropout=0.1, compiled=True), source(8192))
    assert beside == pytest.approx(alone, rel=2e-2)  # atomic sums of embeddings differ in their last bits
