"""Our Trainer beside transformers': the same logs, metrics, files and losses, and its own step where ours is not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from transformers import DataCollatorWithPadding, EarlyStoppingCallback, PreTrainedTokenizerFast, TrainingArguments

import brimful
from brimful.integrations import trainer_data
from tiny import FAMILIES, pair_types, sequences
from tiny_files import save_tokenizer
from tolerances import difference

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # of transformers and peft
COUNT = 22


def dataset_of(count: int = COUNT, *, labels: str = "single_label", seed: int = 0, types: bool = False) -> Dataset:
    random = np.random.default_rng(seed)
    ids = sequences(random.integers(2, 30, size=count).tolist(), seed=seed)
    rows: dict[str, Any] = {"input_ids": [each.tolist() for each in ids]}
    rows["attention_mask"] = [[1] * len(each) for each in ids]
    if types:
        rows["token_type_ids"] = [each.tolist() for each in pair_types(ids)]
    rows["labels"] = random.integers(0, 3, size=count).tolist()
    if labels == "multi_label":
        rows["labels"] = random.integers(0, 2, size=(count, 3)).astype(float).tolist()
    if labels == "regression":
        rows["labels"] = random.normal(size=count).tolist()
    return Dataset.from_dict(rows)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    given = {
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "num_train_epochs": 1, "logging_steps": 1,
        "learning_rate": 1e-3, "eval_strategy": "epoch", "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "seed": 7, "warmup_steps": 2,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **given | changes)


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def trained(kind: type[Any], model: Any, folder: Path, tokenizer: Any, **changes: Any) -> Any:
    data = {name: changes.pop(name) for name in ("train_dataset", "callbacks", "data_collator") if name in changes}
    labels = changes.pop("labels", "single_label")
    given = {"train_dataset": dataset_of(labels=labels), "data_collator": DataCollatorWithPadding(tokenizer)} | data
    made = kind(
        model=copy.deepcopy(model),
        args=arguments(folder, **changes),
        eval_dataset=dataset_of(9, labels=labels, seed=1),
        compute_metrics=accuracy if labels == "single_label" else None,
        processing_class=tokenizer,
        **given,
    )
    made.train()
    return made


def assert_same_history(ours: Any, stock: Any, *, rel: float = 1e-4) -> None:
    """Log lines with the same keys and numbers, those of speed left out."""
    found, expected = ours.state.log_history, stock.state.log_history
    assert [list(line) for line in found] == [list(line) for line in expected]
    for line, other in zip(found, expected, strict=True):
        for name in line:
            if not name.endswith(("runtime", "per_second", "total_flos")):  # which counts padding
                assert line[name] == pytest.approx(other[name], rel=rel, abs=1e-6), name


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for n, p in model.named_parameters() if "key.bias" not in n])


def test_a_layer_at_two_places_is_trained(tmp_path: Path, tokenizer: Any) -> None:
    """The comparison of the first batch leaves the parameters of such a layer where they are."""
    model: Any = FAMILIES["bert"].model()
    model.bert.encoder.layer[1] = model.bert.encoder.layer[0]
    stock = trained(transformers.Trainer, model, tmp_path / "stock", tokenizer)
    ours = trained(brimful.Trainer, model, tmp_path / "ours", tokenizer)
    assert_same_history(ours, stock)
    assert difference(weights(ours.model), weights(stock.model)) < 1e-3
    before = dict(model.named_parameters())
    assert not any(torch.equal(p, before[name]) for name, p in ours.model.named_parameters() if "weight" in name)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "qwen3": ("qwen3", {"optim": "sgd", "learning_rate": 1e-2}),
    "multi-label": ("bert", {"labels": "multi_label"}),
    "label smoothing": ("modernbert", {"label_smoothing_factor": 0.1, "max_grad_norm": 0.0}),
    "by length, checkpointed": ("bert", {"train_sampling_strategy": "group_by_length", "gradient_checkpointing": True}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_it_logs_and_learns_what_transformers_trainer_does(case: str, tmp_path: Path, tokenizer: Any) -> None:
    family, changes = CASES[case]
    model = FAMILIES[family].model()
    stock = trained(transformers.Trainer, model, tmp_path / "stock", tokenizer, **changes)
    ours = trained(brimful.Trainer, model, tmp_path / "ours", tokenizer, **changes)
    assert ours.stock_reason is None
    assert_same_history(ours, stock)
    assert difference(weights(ours.model), weights(stock.model)) < 1e-3
    assert ours.model.config.problem_type == stock.model.config.problem_type
    assert ours.model.config._attn_implementation == "sdpa"
    assert [module.training for module in ours.model.modules()] == [module.training for module in stock.model.modules()]
    assert not ours.model.training  # as its last evaluation left it
    found, expected = (each.predict(dataset_of(9, labels=changes.get("labels", "single_label"), seed=1))
                       for each in (ours, stock))  # fmt: skip
    assert difference(found.predictions, expected.predictions) < 1e-3
    assert list(found.metrics) == list(expected.metrics)


def test_regression(tmp_path: Path, tokenizer: Any) -> None:
    model = FAMILIES["bert"].model(num_labels=1)
    runs = [
        trained(kind, model, tmp_path / kind.__module__, tokenizer, labels="regression")
        for kind in (brimful.Trainer, transformers.Trainer)
    ]
    assert runs[0].stock_reason is None
    assert_same_history(*runs)


def test_accumulation_is_that_of_one_batch(tmp_path: Path, tokenizer: Any) -> None:
    """4 x 2 is 8 x 1, the ragged end of an epoch too; logs are those of transformers at 8 x 1."""
    model = FAMILIES["bert"].model()
    stock = trained(transformers.Trainer, model, tmp_path / "8", tokenizer, per_device_train_batch_size=8)
    ours = trained(brimful.Trainer, model, tmp_path / "4", tokenizer, gradient_accumulation_steps=2)
    assert_same_history(ours, stock)


@pytest.mark.slow
def test_an_adapter(tmp_path: Path, tokenizer: Any) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    model = get_peft_model(FAMILIES["qwen3"].model(), LoraConfig(task_type="SEQ_CLS", r=4))
    runs = [
        trained(kind, model, tmp_path / kind.__module__, tokenizer) for kind in (brimful.Trainer, transformers.Trainer)
    ]
    assert runs[0].stock_reason is None
    assert_same_history(*runs)


@pytest.mark.slow
def test_a_packed_model_in_bf16(tmp_path: Path, tokenizer: Any) -> None:
    """Accelerate wraps the packed forward; both are there again afterwards."""
    model = brimful.packed(FAMILIES["bert"].model())
    ours = trained(brimful.Trainer, model, tmp_path, tokenizer, bf16=True, max_steps=2)
    assert ours.stock_reason is None
    assert hasattr(type(ours.model), "unpacked")
    assert np.isfinite(ours.evaluate()["eval_loss"])


class _Watch(transformers.TrainerCallback):  # type: ignore[misc]
    """Looks at gradients before the update, and runs the model between steps."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.losses: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.norms.append(float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        with torch.no_grad():
            self.losses.append(model.eval()(torch.tensor([[5, 6, 7]]), labels=torch.tensor([1])).loss.item())


def test_callbacks_see_gradients_and_a_model_that_runs(tmp_path: Path, tokenizer: Any) -> None:
    model, seen = FAMILIES["bert"].model(), []
    for kind in (brimful.Trainer, transformers.Trainer):
        seen.append(_Watch())
        trained(kind, model, tmp_path, tokenizer, callbacks=[seen[-1]])
    assert seen[0].norms == pytest.approx(seen[1].norms, rel=1e-4)
    assert seen[0].losses == pytest.approx(seen[1].losses, rel=1e-4)


@pytest.mark.slow
def test_it_resumes_bit_for_bit(tmp_path: Path, tokenizer: Any) -> None:
    """With dropout on; from a checkpoint whose files are those of transformers' Trainer."""
    model = FAMILIES["bert"].model(dropout=0.2)
    saving = {"save_strategy": "steps", "save_steps": 4, "gradient_accumulation_steps": 2}
    saving |= {"eval_strategy": "no", "num_train_epochs": 2}
    whole = trained(brimful.Trainer, model, tmp_path / "whole", tokenizer, **saving)
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    stock = trained(transformers.Trainer, model, tmp_path / "stock", tokenizer, **saving, max_steps=4)
    files = {path.name for path in (Path(stock.args.output_dir) / "checkpoint-4").iterdir()}
    assert {path.name for path in checkpoint.iterdir()} == files
    again = brimful.Trainer(
        model=FAMILIES["bert"].model(dropout=0.2, seed=5),
        args=arguments(tmp_path / "again", **saving),
        train_dataset=dataset_of(),
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    again.train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(weights(again.model), weights(whole.model))
    losses = [[line["loss"] for line in each.state.log_history if "loss" in line] for each in (whole, again)]
    assert losses[0] == losses[1]
    stock.train(resume_from_checkpoint=str(checkpoint))  # either class resumes the other's
    state = json.loads((checkpoint / "trainer_state.json").read_text("utf-8"))
    assert state["global_step"] == 4


def test_the_best_model_and_early_stopping(tmp_path: Path, tokenizer: Any) -> None:
    changes: dict[str, Any] = {
        "save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "accuracy",
        "num_train_epochs": 5, "learning_rate": 1e-2, "save_total_limit": 1,
    }  # fmt: skip
    runs = [
        trained(kind, FAMILIES["bert"].model(), tmp_path / kind.__module__, tokenizer, **changes,
                callbacks=[EarlyStoppingCallback(1)])
        for kind in (brimful.Trainer, transformers.Trainer)
    ]  # fmt: skip
    assert_same_history(*runs, rel=5e-3)
    ours, stock = runs
    assert ours.state.global_step == stock.state.global_step < 5 * 6
    assert Path(ours.state.best_model_checkpoint).name == Path(stock.state.best_model_checkpoint).name
    assert ours.evaluate()["eval_accuracy"] == ours.state.best_metric


class _OwnLoss(brimful.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (2 * outputs.loss, outputs) if return_outputs else 2 * outputs.loss


class _OwnStep(brimful.Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


class _OwnOptimizer(brimful.Trainer):
    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.5)
        return self.optimizer


def without_mask(rows: Any) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    return {"input_ids": ids, "labels": torch.tensor([row["labels"] for row in rows])}


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        (_OwnLoss, {}, "compute_loss is overridden"),
        (_OwnStep, {}, "training_step is overridden"),
        (
            brimful.Trainer,
            {"data_collator": without_mask},
            "no attention_mask.* returns one",
        ),
        (_OwnOptimizer, {}, None),
    ],
    ids=["loss", "step", "no mask", "optimizer"],
)
@pytest.mark.filterwarnings("ignore:We strongly recommend")
def test_overridden_methods_are_kept(
    kind: type[Any], changes: dict[str, Any], reason: str | None, tmp_path: Path, tokenizer: Any
) -> None:
    model = FAMILIES["bert"].model()
    if reason is not None:
        with pytest.warns(UserWarning, match=f"{reason}; transformers' own training step runs"):
            ours = trained(kind, model, tmp_path / "ours", tokenizer, **changes)
        assert ours.gradient_step is None
    else:
        ours = trained(kind, model, tmp_path / "ours", tokenizer, **changes)
        assert ours.stock_reason is None
    assert ours.state.global_step == 6


@pytest.mark.slow
@pytest.mark.parametrize(("family", "reason"), [("qwen3", None), ("gpt2", "reads padding on the left")])
@pytest.mark.filterwarnings("ignore:brimful.Trainer")
def test_padding_on_the_left(family: str, reason: str | None, tmp_path: Path, tokenizer: Any) -> None:
    """Ours where the model's answers do not depend on it, as with positions that are distances."""
    left = copy.deepcopy(tokenizer)
    left.padding_side = "left"
    model = FAMILIES[family].model()
    runs = [
        trained(kind, model, tmp_path, tokenizer, data_collator=DataCollatorWithPadding(left), optim="sgd",
                learning_rate=1e-2)
        for kind in (brimful.Trainer, transformers.Trainer)
    ]  # fmt: skip
    assert reason in runs[0].stock_reason if reason else runs[0].stock_reason is None
    assert_same_history(*runs)


class _Rows:
    """A dataset that does not say how long its rows are."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def test_rows_longer_than_any_before(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a dataset that does not say how long they are; the step is made again for them."""
    monkeypatch.setattr(trainer_data, "_LONGEST", 4)
    rows = [{"input_ids": [5] * (3 if index < 8 else 30), "labels": index % 3} for index in range(12)]
    runs = [
        trained(kind, FAMILIES["bert"].model(), tmp_path, tokenizer, train_dataset=_Rows(rows),
                train_sampling_strategy="sequential")
        for kind in (brimful.Trainer, transformers.Trainer)
    ]  # fmt: skip
    assert runs[0].stock_reason is None
    assert_same_history(*runs)


def test_bad_use_is_one_line(tmp_path: Path, tokenizer: Any) -> None:
    model = FAMILIES["bert"].model()
    with pytest.raises(brimful.OptionError, match="the model is wrapped in DataParallel already"):
        brimful.Trainer(model=torch.nn.DataParallel(model), args=arguments(tmp_path))
    with pytest.raises(brimful.OptionError, match="train_dataset is a generator without length"):
        brimful.Trainer(model=model, args=arguments(tmp_path), train_dataset=(row for row in [{}]))
    floats = dataset_of(labels="regression")
    with pytest.raises(brimful.OptionError, match="labels are floats, one a row, and the model has 3 classes"):
        trained(brimful.Trainer, model, tmp_path, tokenizer, train_dataset=floats)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("kind", "there"), [(brimful.Trainer, "cpu"), (_OwnStep, "meta")])
def test_the_number_of_items_waits_for_no_device(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, kind: type[Any], there: str
) -> None:
    """It stays on the host where our step runs, and is where transformers has it where Trainer's own may read it."""
    made = kind(
        model=FAMILIES["bert"].model(), args=arguments(tmp_path, eval_strategy="no"), train_dataset=dataset_of(),
        data_collator=DataCollatorWithPadding(tokenizer),
    )  # fmt: skip
    devices: list[torch.device] = []

    def counted(_: Any, iterator: Any, number: int, device: torch.device) -> tuple[list[Any], None]:
        devices.append(device)
        return [], None

    monkeypatch.setattr(transformers.Trainer, "get_batch_samples", counted)
    made.get_train_dataloader()
    made.get_batch_samples(iter(()), 1, torch.device("meta"))
    assert [device.type for device in devices] == [there]
