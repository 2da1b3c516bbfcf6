"""A tiny BERT classifier and its rows, in the place of the regression model of transformers' tests of its Trainer."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from transformers import BertConfig
from transformers import BertForSequenceClassification as Plain

_VOCABULARY, _LONGEST = 64, 10


class RegressionModelConfig(BertConfig):  # type: ignore[misc]
    """A configuration of one layer and one output, which takes what the regression model's takes."""

    def __init__(self, a: Any = 0, b: Any = 0, double_output: bool = False, random_torch: bool = True, **kwargs: Any):
        tiny = {
            "vocab_size": _VOCABULARY, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 16, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0, "num_labels": 1, "problem_type": "regression",
        }  # fmt: skip
        super().__init__(**tiny | kwargs)
        self.a, self.b, self.double_output, self.random_torch = a, b, double_output, random_torch


class BertForSequenceClassification(Plain):  # type: ignore[misc]
    """The same weights each time it is made; `a` and `b` are of its head. What is below the head is frozen.

    Tests train at a learning rate of 0.1, at which all of BERT would learn nothing that two runs could agree on.
    """

    config_class = RegressionModelConfig
    trains_all = False

    def __init__(self, config: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__(config)
            with torch.no_grad():
                self.base_model.requires_grad_(self.trains_all)
                self.classifier.weight.normal_()

    @property
    def a(self) -> Any:
        """A weight of the head."""
        return self.classifier.weight[0, 0]

    @property
    def b(self) -> Any:
        """The head's bias."""
        return self.classifier.bias[0]


def rows_of(plain: type[Any]) -> type[Any]:
    """The data set of the regression model, with its labels and rows of tokens of different lengths."""

    class RegressionDataset(plain):  # type: ignore[misc]
        def __getitem__(self, i: int) -> dict[str, Any]:
            row = super().__getitem__(i)
            if set(row) != {"input_x", "labels"}:
                return dict(row)
            random = np.random.default_rng(int(abs(row["input_x"]) * 1e6))
            length = int(random.integers(2, _LONGEST))
            ids, mask = np.zeros(_LONGEST, np.int64), np.zeros(_LONGEST, np.int64)
            ids[:length], mask[:length] = random.integers(1, _VOCABULARY, length), 1
            return {"input_ids": ids, "attention_mask": mask, **row}

    return RegressionDataset


_Checkpointed = type("BertForSequenceClassification", (BertForSequenceClassification,), {"trains_all": True})
_MODELS = {
    "RegressionModelConfig": RegressionModelConfig,
    "RegressionPreTrainedModel": BertForSequenceClassification,
    "RegressionPreTrainedModelWithGradientCheckpointing": _Checkpointed,
}


def put_in(module: ModuleType) -> None:
    """Have a module of tests use them."""
    for name, stand_in in _MODELS.items():
        if hasattr(module, name):
            setattr(module, name, stand_in)
    if hasattr(module, "RegressionDataset"):
        vars(module)["RegressionDataset"] = rows_of(vars(module)["RegressionDataset"])
