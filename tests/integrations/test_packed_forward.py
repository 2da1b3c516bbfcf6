"""A model that computes packed behind its own forward: losses, gradients and outputs of the plain one, in any loop."""

from __future__ import annotations

import copy
import functools
import io
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoModelForSequenceClassification

import brimful
from plain import gradient, padded
from tiny import FAMILIES, pair_types, sequences
from tolerances import MODEL_FP32, difference

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own calls

LENGTHS = [7, 20, 3, 30, 11]
LABELS: dict[str, Tensor] = {
    "single_label_classification": torch.tensor([0, 1, 2, 1, 0]),
    "multi_label_classification": torch.eye(3)[[0, 1, 2, 1, 0]],
    "regression": torch.linspace(-1, 1, 15).view(5, 3),
}


def batch_of(model: Any, labels: Tensor | None = None, *, with_types: bool = False) -> dict[str, Tensor]:
    ids = sequences(LENGTHS)
    made = padded(ids, pair_types(ids) if with_types else None, model.config.pad_token_id)
    return made | ({} if labels is None else {"labels": labels})


def on_the_left(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same rows with their padding in front."""
    length = batch["input_ids"].shape[1]
    index = (torch.arange(length) + batch["attention_mask"].sum(1, keepdim=True)) % length
    names = ("input_ids", "attention_mask", "token_type_ids")
    return {name: value.gather(1, index) if name in names else value for name, value in batch.items()}


def assert_same(model: Any, batch: dict[str, Any], *, packed: bool = True) -> None:
    """Loss, logits and gradient of a packed copy are those of the plain model."""
    ours = brimful.packed(copy.deepcopy(model))
    before = counts(ours)
    plain, found = model(**batch), ours(**batch)
    assert type(found) is type(plain)
    assert difference(found.logits, plain.logits) < MODEL_FP32
    if "labels" in batch:
        assert difference(found.loss, plain.loss) < MODEL_FP32
        plain.loss.backward()
        found.loss.backward()
        assert difference(gradient(ours), gradient(model)) < MODEL_FP32
    assert (counts(ours)[0] > before[0]) == packed


def counts(model: Any) -> tuple[int, int]:
    behind = vars(model)["_brimful_packed"]
    return behind.num_packed, behind.num_plain


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["bert", "modernbert-mean", "qwen3"])
@pytest.mark.parametrize("problem", LABELS)
def test_loss_and_gradient_are_those_of_the_plain_model(family: str, problem: str) -> None:
    model = FAMILIES[family].model(problem_type=problem).train()
    assert_same(model, batch_of(model, LABELS[problem], with_types=family == "bert"))


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["roberta", "eurobert", "gpt2", "deberta"])
def test_other_heads_and_positions(family: str) -> None:
    """Positions that skip padding, logits that are means of tokens', types that are words, a bias by distance."""
    model = FAMILIES[family].model().train()
    assert_same(model, batch_of(model, LABELS["single_label_classification"]))


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "modernbert-mean"])
def test_padding_on_the_left(family: str) -> None:
    """Learned positions are of columns there, as the plain forward has them."""
    model = FAMILIES[family].model().train()
    assert_same(model, on_the_left(batch_of(model, LABELS["single_label_classification"])))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "roberta", "qwen3"])
def test_positions_that_are_given(family: str) -> None:
    model = FAMILIES[family].model().train()
    batch = batch_of(model, LABELS["single_label_classification"])
    length = batch["input_ids"].shape[1]
    assert_same(model, batch | {"position_ids": (torch.arange(length) * 2 % 50 + 2)[None]})


@pytest.mark.slow
def test_calls_whose_answer_no_packed_row_gives_run_plain() -> None:
    model = FAMILIES["bert"].model().train()
    batch = batch_of(model, LABELS["single_label_classification"])
    cases: list[tuple[str, dict[str, Any]]] = [
        ("reads the first column", on_the_left(batch)),
        ("leaves out tokens between others", batch | {"attention_mask": batch["attention_mask"].clone()}),
        ("a call gives output_attentions", batch | {"output_attentions": True}),
        ("no attention_mask", {name: batch[name] for name in ("input_ids", "labels")}),
    ]
    cases[1][1]["attention_mask"][1, 3] = 0
    for reason, case in cases:
        with pytest.warns(UserWarning, match=f"{reason}.*; the model's own forward runs"):
            assert_same(model, case, packed=False)
    ours = brimful.packed(copy.deepcopy(model))
    with pytest.warns(UserWarning, match="a call gives output_hidden_states"):
        ours(**batch, output_hidden_states=True)
    ours(**batch, output_hidden_states=True)
    ours(**batch)
    assert counts(ours) == (1, 2)


def test_outputs_take_the_forms_of_transformers() -> None:
    model = brimful.packed(FAMILIES["bert"].model()).eval()
    batch = batch_of(model)
    with torch.no_grad():
        found, pair = model(**batch), model(**batch, return_dict=False)
        labelled = model(batch["input_ids"], batch["attention_mask"], labels=torch.zeros(5, dtype=torch.long))
    assert found.loss is None
    assert set(found.keys()) == {"logits"}
    assert isinstance(pair, tuple)
    assert torch.equal(pair[0], found[0])
    assert torch.equal(labelled[1], found.logits)
    assert counts(model) == (3, 0)
    with torch.inference_mode():
        assert torch.equal(model(**batch).logits, found.logits)


def test_dropout_draws_from_the_users_stream() -> None:
    model = brimful.packed(FAMILIES["bert"].model(dropout=0.3)).train()
    batch, found = batch_of(model), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(model(**batch).logits)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_it_is_undone() -> None:
    model = FAMILIES["bert"].model()
    cls, names = type(model), set(vars(model))
    ours = brimful.packed(model)
    assert ours is model
    assert isinstance(ours, cls)
    assert brimful.packed(ours) is ours
    batch = batch_of(model)
    expected = ours(**batch).logits
    attention = model.config._attn_implementation
    assert ours.unpacked() is model
    assert type(model) is cls
    assert set(vars(model)) == names
    assert model.config._attn_implementation == attention == "sdpa"
    assert all(module._compiled_call_impl is None for module in model.modules())
    assert difference(model(**batch).logits, expected) < MODEL_FP32


@pytest.mark.slow
def test_copies_and_files(tmp_path: Path) -> None:
    model = brimful.packed(FAMILIES["bert"].model()).eval()
    batch = batch_of(model)
    expected = model(**batch).logits
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.classifier.bias += 1
    assert difference(twin(**batch).logits, expected + 1) < MODEL_FP32
    assert torch.equal(model(**batch).logits, expected)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(loaded) is type(model)._plain
    assert loaded.config.architectures == ["BertForSequenceClassification"]
    assert difference(loaded.eval()(**batch).logits, expected) < MODEL_FP32
    assert list(model.state_dict()) == list(loaded.state_dict())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(**batch).logits, expected)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("first", ["packed", "peft"])
def test_adapters(first: str) -> None:
    from peft import LoraConfig, get_peft_model

    model = FAMILIES["qwen3"].model()
    config = LoraConfig(task_type="SEQ_CLS", r=4, target_modules="all-linear", exclude_modules=["score"])
    torch.manual_seed(3)
    plain = get_peft_model(copy.deepcopy(model), config).train()
    torch.manual_seed(3)
    if first == "packed":
        ours = get_peft_model(brimful.packed(model), config).train()
    else:
        ours = brimful.packed(get_peft_model(model, config)).train()
    batch = batch_of(model, LABELS["single_label_classification"])
    ours(**batch)  # before the adapter differs from nothing
    for each in (plain, ours):
        for name, parameter in each.named_parameters():
            if "lora_B" in name:
                parameter.data.fill_(0.05)
        each.zero_grad()
        each(**batch).loss.backward()
    assert difference(gradient(ours), gradient(plain)) < MODEL_FP32
    assert counts(ours.get_base_model()) == (2, 0)
    ours.unpacked()
    assert difference(ours(**batch).loss, plain(**batch).loss) < MODEL_FP32


@pytest.mark.slow
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_an_accelerate_loop(mixed_precision: str) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from torch.utils.data import DataLoader

    model = FAMILIES["bert"].model().train()
    batch = batch_of(model, LABELS["single_label_classification"])
    rows = [{name: value[row] for name, value in batch.items()} for row in range(4)]
    losses = []
    for each in (copy.deepcopy(model), brimful.packed(copy.deepcopy(model))):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each, optimizer, loader = accelerator.prepare(each, optimizer, DataLoader(rows, batch_size=2))
        losses.append([])
        for _ in range(2):
            for batch in loader:
                loss = each(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(loss.item())
    assert counts(accelerator.unwrap_model(each)) == (4, 0)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if mixed_precision == "no" else 2e-2)


def test_layers_that_are_recomputed() -> None:
    """Gradients through checkpointed layers, with their dropout drawn again."""
    model = FAMILIES["bert"].model(dropout=0.2).train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    ours = brimful.packed(model)
    batch, found = batch_of(model, LABELS["single_label_classification"]), []
    for checkpointed in (False, True):
        if checkpointed:
            enable()
        torch.manual_seed(5)
        ours(**batch).loss.backward()
        found.append(gradient(ours))
    assert difference(found[1], found[0]) < MODEL_FP32
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ours.eval()(**batch, output_attentions=True).attentions is not None


@pytest.mark.slow
def test_a_compiled_model_calls_it() -> None:
    model = brimful.packed(FAMILIES["bert"].model()).eval()
    batch = batch_of(model)
    with torch.no_grad():
        expected = model(**batch).logits
        assert torch.equal(torch.compile(model)(**batch).logits, expected)
    assert counts(model) == (2, 0)


def test_models_that_cannot_run_packed_say_so_once() -> None:
    model = FAMILIES["t5"].model().train()
    with pytest.warns(UserWarning, match="looks for end tokens"):
        ours = brimful.packed(copy.deepcopy(model))
    ids = FAMILIES["t5"].ended(sequences(LENGTHS))
    batch = padded(ids, None, 0) | {"labels": LABELS["single_label_classification"]}
    for _ in range(2):
        assert torch.equal(ours(**batch).loss, model(**batch).loss)


def test_what_cannot_be_packed() -> None:
    model = FAMILIES["bert"].model()
    with pytest.raises(brimful.OptionError, match="wrapped in DataParallel already"):
        brimful.packed(torch.nn.DataParallel(model))
    with pytest.raises(brimful.OptionError, match="wrapped in OptimizedModule already"):
        brimful.packed(torch.compile(model))
    with pytest.raises(brimful.ModelError, match="Linear is not a transformers sequence classifier"):
        brimful.packed(torch.nn.Linear(1, 1))
    model.forward = model.forward
    with pytest.raises(brimful.OptionError, match="forward was replaced already"):
        brimful.packed(model)


@pytest.mark.sampled
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("between", ["packed", "plain"])
def test_calls_between_a_checkpointed_call_and_its_backward_pass(between: str, reentrant: bool) -> None:
    """They change nothing of what is recomputed, and the model's attention is its own after each call."""
    model = FAMILIES["bert"].model().train()
    ours, other = brimful.packed(copy.deepcopy(model)), batch_of(model)
    if between == "plain":
        other["attention_mask"][1, 2] = 0
    for each in (model, ours):
        enable = getattr(each, "activation_checkpointing_enable", None) or each.gradient_checkpointing_enable
        enable({"use_reentrant": reentrant})
        each.enable_input_require_grads()
        loss = each(**batch_of(model, LABELS["single_label_classification"])).loss
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            each(**other)
        assert each.config._attn_implementation == "sdpa"
        loss.backward()
        assert each.config._attn_implementation == "sdpa"
    assert difference(gradient(ours), gradient(model)) < MODEL_FP32
    assert counts(ours)[0] > 0


def test_calls_of_several_threads() -> None:
    model = FAMILIES["bert"].model().eval()
    ours = brimful.packed(copy.deepcopy(model))
    batches = [padded(sequences(lengths, seed=7), None, 0) for lengths in ([5, 9], [30], [12, 3, 8], [20, 20])]
    with torch.no_grad():
        expected = [model(**batch).logits for batch in batches]

    def answer(number: int) -> float:
        with torch.no_grad():
            return difference(ours(**batches[number % 4]).logits, expected[number % 4])

    with ThreadPoolExecutor(4) as threads:
        assert max(threads.map(answer, range(40))) < MODEL_FP32


def test_hooks_see_what_they_see_in_the_plain_model() -> None:
    """Those of inner modules, once they are there; one of the model itself changes nothing."""
    model = FAMILIES["bert"].model().train()
    ours, seen = brimful.packed(model), []
    ours.register_forward_hook(lambda *_: None)
    ours(**batch_of(model))
    hook = ours.base_model.register_forward_hook(lambda module, given, found: seen.append(found[0].shape))
    with pytest.warns(UserWarning, match=r"there is a hook on its modules \(<lambda>\), which would see a packed row"):
        ours(**batch_of(model))
    assert seen == [(5, 30, 16)]
    hook.remove()
    ours(**batch_of(model))
    assert counts(ours) == (2, 1)
    everywhere = register_module_forward_hook(lambda module, given, found: seen.append(module))
    try:
        ours(**batch_of(model))
    finally:
        everywhere.remove()
    assert ours.base_model in seen
    assert counts(ours) == (2, 2)


def with_squares(model: Any) -> None:
    model.loss_function = lambda labels=None, pooled_logits=None, **_: pooled_logits.square().sum()


def with_means(model: Any) -> None:
    model.config.classifier_pooling = "mean"


def with_eager_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "change"), [("llama", with_squares), ("modernbert", with_means), ("bert", with_eager_attention)]
)
def test_what_the_owner_sets_between_calls_holds(family: str, change: Any) -> None:
    model = FAMILIES[family].model().eval()
    batch = batch_of(model, LABELS["single_label_classification"])
    ours = brimful.packed(copy.deepcopy(model))
    before = ours(**batch).loss
    for each in (model, ours):
        change(each)
    found, expected = ours(**batch), model(**batch)
    assert difference(found.logits, expected.logits) < MODEL_FP32
    assert difference(found.loss, expected.loss) < MODEL_FP32
    assert (difference(before, expected.loss) > 1e-3) == (family != "bert")
    assert ours.config._attn_implementation == model.config._attn_implementation
    assert counts(ours) == (2, 0)
    execution = vars(ours)["_brimful_packed"]._execution
    ours.number_of_step = 3  # of a loop, which sets it in each
    ours(**batch)
    assert vars(ours)["_brimful_packed"]._execution is execution


class _Logits(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=ids_BL, attention_mask=mask_BL).logits
        return found


def traced(model: Any, ids_BL: Tensor, mask_BL: Tensor) -> Any:
    return torch.jit.trace(_Logits(model), (ids_BL, mask_BL), check_trace=False)


def exported(model: Any, ids_BL: Tensor, mask_BL: Tensor) -> Any:
    return torch.export.export(_Logits(model), (ids_BL, mask_BL)).module()


def gradients(model: Any, ids_BL: Tensor, mask_BL: Tensor) -> Any:
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def first_logit(weights: Any, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        given = {"input_ids": ids_BL, "attention_mask": mask_BL}
        return torch.func.functional_call(model, weights, (), given).logits[0, 0]

    return lambda *given: torch.func.grad(first_logit)(weights, *given)["classifier.weight"]


@pytest.mark.sampled
@pytest.mark.parametrize("made", [traced, exported, gradients])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:", "ignore:brimful.packed")
def test_what_is_made_of_a_call_holds_for_others(made: Any) -> None:
    """Traces, exports and transforms see the model's own forward: a packed row is of one example's shape."""
    model = FAMILIES["bert"].model().eval()
    batch = batch_of(model)
    example = (batch["input_ids"], batch["attention_mask"])
    other = (example[0].flip(0), example[1].flip(0))
    ours = brimful.packed(copy.deepcopy(model))
    found, expected = made(ours, *example)(*other), made(model, *example)(*other)
    assert difference(found, expected) < MODEL_FP32
    assert counts(ours)[0] == 0
    assert difference(ours(**batch).logits, model(**batch).logits) < MODEL_FP32
    assert counts(ours)[0] == 1


def test_an_inner_forward_that_is_replaced_is_checked_again() -> None:
    model = FAMILIES["bert"].model().train()
    ours = brimful.packed(copy.deepcopy(model))
    ours(**batch_of(model))
    for each in (ours, model):
        pooler = each.base_model.pooler
        pooler.forward = functools.partial(_mixed, type(pooler).forward, pooler)
    with pytest.warns(UserWarning, match="the model's own forward runs"):
        found = ours(**batch_of(model))
    assert difference(found.logits, model(**batch_of(model)).logits) < MODEL_FP32


def _mixed(forward: Any, module: Any, states: Tensor) -> Tensor:
    """Half of the row before, as a mix-up of rows has it."""
    found: Tensor = forward(module, states)
    return 0.5 * found + 0.5 * found.roll(1, 0)


def test_a_body_without_a_head_is_refused() -> None:
    with pytest.raises(brimful.OptionError, match="BertModel has no head that gives classes"):
        brimful.packed(FAMILIES["bert"].model().bert)
