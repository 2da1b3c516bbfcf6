"""Updates of any number of rows, from wherever a run begins: ragged ends, batch samplers, resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from torch.utils.data import DataLoader

import brimful
from integrations.test_trainer import assert_same_history, dataset_of, tokenizer, trained
from tiny import FAMILIES

__all__ = ["tokenizer"]  # a fixture

QUICK: dict[str, Any] = {"eval_strategy": "no"}


class _Releases(transformers.TrainerCallback):  # type: ignore[misc]
    """Trains the embeddings from the last batch of the first epoch on: a step is made then, of two rows."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.bert.embeddings.requires_grad_(state.global_step >= 5)


def grown(kind: type[Any]) -> type[Any]:
    class Grown(kind):  # type: ignore[misc]
        """Reads batches of ever more rows."""

        def get_train_dataloader(self) -> Any:
            rows = list(range(18))
            return DataLoader(
                list(dataset_of()), batch_sampler=[rows[:2], rows[2:8], rows[8:]], collate_fn=self.data_collator
            )

    return Grown


def test_a_step_that_is_made_at_a_ragged_end_takes_whole_batches(tmp_path: Path, tokenizer: Any) -> None:
    runs = [
        trained(
            kind, FAMILIES["bert"].model(), tmp_path, tokenizer, callbacks=[_Releases()], num_train_epochs=2, **QUICK
        )
        for kind in (brimful.Trainer, transformers.Trainer)
    ]
    assert runs[0].stock_reason is None
    assert_same_history(*runs)


def test_batches_may_grow(tmp_path: Path, tokenizer: Any) -> None:
    runs = [
        trained(grown(kind), FAMILIES["bert"].model(), tmp_path, tokenizer, max_steps=3, **QUICK)
        for kind in (brimful.Trainer, transformers.Trainer)
    ]
    assert runs[0].stock_reason is None
    assert_same_history(*runs)
