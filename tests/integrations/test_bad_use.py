"""Bad use of the drop-ins ends in one line that says what is wrong, and a hint; the model is as it was."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

import brimful
from heads.tiny_heads import tiny_model
from tiny import FAMILIES

IDS = torch.tensor([[5, 6, 7], [8, 9, 0]])
BATCH = {"input_ids": IDS, "attention_mask": (IDS != 0).long(), "labels": torch.tensor([0, 2])}
WITHOUT_MASK = {name: BATCH[name] for name in ("input_ids", "labels")}


class DeepSpeedEngine(torch.nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module


class FullyShardedDataParallel(DeepSpeedEngine):
    pass


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return iter([{"input_ids": [5, 6], "attention_mask": [1, 1], "labels": 0}] * 8)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "DataParallel": torch.nn.DataParallel,
    "OptimizedModule": torch.compile,
    "DeepSpeedEngine": DeepSpeedEngine,
    "FullyShardedDataParallel": FullyShardedDataParallel,
}


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def step_of(model: Any, **changes: Any) -> Any:
    return brimful.Step(model, sgd(model), max_length=16, device="cpu", precision="fp32", **changes)


def trainer_of(model: Any, folder: Path, **changes: Any) -> Any:
    arguments = TrainingArguments(
        str(folder), report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
        max_steps=changes.pop("max_steps", -1), per_device_train_batch_size=2, num_train_epochs=1,
    )  # fmt: skip
    return brimful.Trainer(model=model, args=arguments, **changes)


def refused(message: str, use: Callable[[], Any]) -> None:
    with pytest.raises(brimful.OptionError, match=re.escape(message)) as found:
        use()
    assert "\n" not in str(found.value)
    assert found.value.hint


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_model_that_is_wrapped_already(kind: str, tmp_path: Path) -> None:
    model = FAMILIES["bert"].model()
    wrapped = WRAPPERS[kind](model)
    refused(f"the model is wrapped in {kind}", lambda: step_of(wrapped))
    refused(f"the model is wrapped in {kind} already", lambda: trainer_of(wrapped, tmp_path))
    refused(f"the model is wrapped in {kind} already", lambda: brimful.packed(wrapped))


@pytest.mark.slow
def test_a_packed_model_is_no_wrapped_one(tmp_path: Path) -> None:
    """A step and Trainer train it by their own step, and it is packed again afterwards."""
    model = brimful.packed(FAMILIES["bert"].model().train())
    assert brimful.packed(model) is model
    rows = [{"input_ids": [5, 6 + i], "attention_mask": [1, 1], "labels": i % 3} for i in range(4)]
    trainer = trainer_of(model, tmp_path, train_dataset=rows)
    trainer.train()
    assert trainer.stock_reason is None
    assert hasattr(model, "unpacked")
    step = step_of(model)
    step(BATCH)
    assert hasattr(step.release(), "unpacked")


def test_a_batch_without_rows() -> None:
    step = step_of(FAMILIES["bert"].model())
    for empty in ([], {name: column[:0] for name, column in BATCH.items()}):
        refused("a batch has no rows", lambda rows=empty: step(rows))
        refused("a batch has no rows", lambda rows=empty: step.batch(rows))
        assert step.predict(empty).shape == (0, 3)


def test_a_step_that_was_released() -> None:
    step = step_of(FAMILIES["bert"].model())
    batch = step.batch(BATCH)
    assert step.release() is step.release()
    for use in (lambda: step(BATCH), lambda: step.run(batch), lambda: step.predict(BATCH), step.state_dict):
        refused("the step was released: it trains no more", use)


@pytest.mark.slow
def test_a_batch_without_a_mask() -> None:
    model = FAMILIES["bert"].model()
    step = step_of(model)
    refused("rows end in padding tokens (0) and the batch has no attention_mask", lambda: step(WITHOUT_MASK))
    whole = {"input_ids": IDS[:1], "labels": BATCH["labels"][:1]}
    assert step(whole).updated  # no row ends early
    packed = brimful.packed(FAMILIES["bert"].model())
    with pytest.warns(UserWarning, match="padding tokens and no attention_mask; a tokenizer returns one"):
        packed(**WITHOUT_MASK)


@pytest.mark.filterwarnings("ignore:We strongly recommend")
def test_a_collator_that_returns_no_mask(tmp_path: Path) -> None:
    trainer = trainer_of(
        FAMILIES["bert"].model(), tmp_path, train_dataset=[{"input_ids": [5]}] * 2, max_steps=1,
        data_collator=lambda rows: dict(WITHOUT_MASK),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="returns no attention_mask, so padding is text; DataCollatorWithPadding"):
        trainer.train()


@pytest.mark.slow
def test_labels_that_are_floats_for_classes(tmp_path: Path) -> None:
    floats = BATCH | {"labels": torch.tensor([0.0, 2.0])}
    model = FAMILIES["bert"].model()
    refused("labels are not one integer a row", lambda: step_of(model)(floats))
    rows = [{"input_ids": [5, 6], "attention_mask": [1, 1], "labels": 1.0}] * 2
    message = "labels are floats, one a row, and the model has 3 classes"
    refused(message, lambda: trainer_of(FAMILIES["bert"].model(), tmp_path, train_dataset=rows).train())
    packed = brimful.packed(FAMILIES["bert"].model())
    refused(message, lambda: packed(**floats))
    with pytest.raises(ValueError, match="3 classes"):  # what the plain model raises, too
        packed(**floats)


@pytest.mark.slow
def test_rows_that_are_not_read_at_their_last_token() -> None:
    """BART's head reads the last end token, 2, of rows that hold as many of them; packed rows are read at their end."""
    ended, goes_on, twice = ({"input_ids": ids, "labels": 0} for ids in ([5, 6, 7, 2], [5, 2, 7, 8], [5, 2, 7, 2]))
    step = step_of(tiny_model("bart"))
    step([ended, ended])
    assert step.packed
    refused("row 0 goes on after its end token (2)", lambda: step([goes_on, ended]))
    refused("row 1 goes on after its end token (2)", lambda: step.predict([ended, goes_on]))
    refused("row 0 has 1 end tokens (2) and row 1 has 2", lambda: step([ended, twice]))
    refused("row 0 has no end token (2)", lambda: step([{"input_ids": [5, 6], "labels": 0}]))
    assert step([twice, twice]).updated
    assert step.predict([ended, twice]).shape == (2, 3)


def test_a_dataset_without_length(tmp_path: Path) -> None:
    model = FAMILIES["bert"].model()
    refused("train_dataset is a Stream without length", lambda: trainer_of(model, tmp_path, train_dataset=Stream()))
    trainer = trainer_of(model, tmp_path, train_dataset=Stream(), max_steps=2)
    trainer.train()
    assert trainer.stock_reason is None
    lengths = (len(row["input_ids"]) for row in Stream())
    refused("lengths is a generator", lambda: step_of(model, lengths=lengths))
    refused("lengths is a Stream", lambda: step_of(model, lengths=Stream()))


def test_what_is_no_batch() -> None:
    model = FAMILIES["bert"].model()
    step = step_of(model)
    refused("row 0 is a Tensor", lambda: step([IDS, BATCH["labels"]]))
    refused("row 0 has no input_ids", lambda: step([{"labels": 1}]))


def test_a_step_that_could_not_be_made_leaves_the_model_as_it_was() -> None:
    model = brimful.packed(FAMILIES["bert"].model())
    refused("lengths is a list", lambda: step_of(model, lengths=[]))
    assert hasattr(model, "unpacked")
