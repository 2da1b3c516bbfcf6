"""A text classifier as an estimator of scikit-learn.

    classifier = brimful.TextClassifier("bert-base-uncased", num_train_epochs=2)
    cross_val_score(classifier, texts, labels, cv=5)

It calls `brimful.train` and `brimful.Classifier`: nothing is learned or answered in another way.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import pyarrow as pa
from scipy.special import expit, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.validation import check_is_fitted

from brimful.api import train
from brimful.core.errors import ArgumentError
from brimful.core.options.train import TrainOptions
from brimful.core.records import Run
from brimful.drop_in.fitted_model import FitFolder, FittedModel
from brimful.drop_in.given_rows import (
    LABEL,
    PAIR,
    TEXT,
    WEIGHT,
    GivenLabels,
    GivenTexts,
    given_labels,
    given_texts,
    given_weights,
    without_classes,
)

#: Parameters that are not options of training by the same name.
_OWN = frozenset({"model", "output", "class_weight", "random_state", "verbose"})
#: Options of training that decide how answers are computed too.
_OF_ANSWERS = (*("precision", "device", "packing", "execution", "token_budget", "trust_remote_code", "allow_pickle"),)
#: Steps between checkpoints of a run that nobody can resume, as its folder is temporary.
_NEVER = 1 << 40


class TextClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A Hugging Face classifier, fine-tuned by `fit`, for scikit-learn's pipelines, searches and cross-validation.

    X: texts as a list, an array, a Series or a DataFrame of one column; pairs of texts as tuples or two columns.
    y: a class of each row, or a table of 0 and 1 with a column for each of several labels.

    model: a folder or a hub name. output: folder that each fit makes a new folder in (`fit-1`, `fit-2`, ...), a run as
    `brimful train` leaves it; by default it is temporary, and goes with the estimator. class_weight: `balanced` or
    weights by class, times `sample_weight`; with several labels, of the positives of each. Rows of a class of weight 0
    are not there. random_state: seed of sample order, new head and dropout; None draws it from NumPy's global stream,
    as scikit-learn does. eval_split: share of the rows to evaluate on after each epoch, for `metric_for_best_model` and
    `early_stopping_patience`. verbose: show progress. The others are the fields of TrainOptions of the same name, with
    the same defaults.

    After `fit`: classes_; run_, the record of the run; model_, with the model's folder as `path`.
    """

    def __init__(
        self,
        model: str | Path = "bert-base-uncased",
        *,
        output: str | Path | None = None,
        num_train_epochs: float | None = TrainOptions.num_train_epochs,
        max_steps: int | None = TrainOptions.max_steps,
        batch_size: int = TrainOptions.batch_size,
        per_device_batch_size: int | None = TrainOptions.per_device_batch_size,
        gradient_accumulation_steps: int | None = TrainOptions.gradient_accumulation_steps,
        learning_rate: float | None = TrainOptions.learning_rate,
        lr_scheduler_type: str = TrainOptions.lr_scheduler_type,
        warmup_steps: int | None = TrainOptions.warmup_steps,
        warmup_ratio: float | None = TrainOptions.warmup_ratio,
        optim: str = TrainOptions.optim,
        optim_args: str | None = TrainOptions.optim_args,
        adam_beta1: float = TrainOptions.adam_beta1,
        adam_beta2: float = TrainOptions.adam_beta2,
        adam_epsilon: float = TrainOptions.adam_epsilon,
        weight_decay: float = TrainOptions.weight_decay,
        max_grad_norm: float = TrainOptions.max_grad_norm,
        label_smoothing_factor: float = TrainOptions.label_smoothing_factor,
        class_weight: Any = None,
        max_length: int | None = TrainOptions.max_length,
        new_head: bool = TrainOptions.new_head,
        peft: str | None = TrainOptions.peft,
        lora_r: int | None = TrainOptions.lora_r,
        lora_alpha: float | None = TrainOptions.lora_alpha,
        lora_dropout: float | None = TrainOptions.lora_dropout,
        lora_target_modules: str | None = TrainOptions.lora_target_modules,
        lora_modules_to_save: str | None = TrainOptions.lora_modules_to_save,
        freeze: str | None = TrainOptions.freeze,
        eval_split: float = 0.0,
        metric_for_best_model: str | None = TrainOptions.metric_for_best_model,
        early_stopping_patience: int | None = TrainOptions.early_stopping_patience,
        precision: str = TrainOptions.precision,
        device: str = TrainOptions.device,
        packing: str = TrainOptions.packing,
        execution: str = TrainOptions.execution,
        token_budget: int | None = TrainOptions.token_budget,
        gradient_checkpointing: str = TrainOptions.gradient_checkpointing,
        deterministic: bool = TrainOptions.deterministic,
        activation_memory: str | None = TrainOptions.activation_memory,
        optimizer_in_backward: bool = TrainOptions.optimizer_in_backward,
        late_clipping: bool = TrainOptions.late_clipping,
        optimizer_offload: bool = TrainOptions.optimizer_offload,
        optimizer_state_dtype: str = TrainOptions.optimizer_state_dtype,
        weight_dtype: str = TrainOptions.weight_dtype,
        stream_weights: str = TrainOptions.stream_weights,
        stream_folder: str | None = TrainOptions.stream_folder,
        allocator: str = TrainOptions.allocator,
        memory_limit: str | None = TrainOptions.memory_limit,
        num_workers: int | None = TrainOptions.num_workers,
        prefetch: int | None = TrainOptions.prefetch,
        trust_remote_code: bool = TrainOptions.trust_remote_code,
        allow_pickle: bool = TrainOptions.allow_pickle,
        random_state: Any = TrainOptions.seed,
        verbose: bool = False,
    ) -> None:
        given = locals()
        for name in self._get_param_names():
            setattr(self, name, given[name])

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fine-tune the model on these rows; return the estimator.

        sample_weight: what each row counts as in the loss: one of weight 2 is two rows, one of weight 0 is not there.
        Raises: BrimfulError; ArgumentError, a ValueError, for rows and labels that cannot be used.
        """
        texts = given_texts(X)
        labels = given_labels(y, len(texts))
        folder = FitFolder(self.output)
        run = self._train(texts, labels, given_weights(sample_weight, len(texts)), folder)
        self.classes_, self.run_ = labels.classes_C, run
        self._outputs = np.array([run.labels.values[name] for name in labels.names])
        params = self.get_params(deep=False)
        given = {} if self.max_length is None else {"max_length": _plain(self.max_length)}
        answers = {name: params[name] for name in _OF_ANSWERS}
        answers["execution"] = "auto" if self.execution == "fused" else self.execution  # that is a way to train
        self.model_ = FittedModel(folder, answers | given)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """(N,) the likeliest class of each text; of several labels, (N, C) 1 where its probability is above 0.5."""
        found_NC = self.predict_proba(X)
        if self._is_single():
            chosen_N: np.ndarray = self.classes_[found_NC.argmax(axis=1)]
            return chosen_N
        return (found_NC > 0.5).astype(np.int64)

    def predict_proba(self, X: Any) -> np.ndarray:
        """(N, C) probabilities, in the order of `classes_`. Of several labels each by itself."""
        check_is_fitted(self, "classes_")
        logits_NC = self.model_.logits(given_texts(X))[:, self._outputs].astype(np.float64)
        found_NC: np.ndarray = softmax(logits_NC, axis=1) if self._is_single() else expit(logits_NC)
        return found_NC

    @property
    def partial_fit(self) -> NoReturn:
        """Nothing: a fine-tuning has a schedule and an end."""
        raise AttributeError(
            "TextClassifier has no partial_fit: learning rate and sample order are planned for all rows at once; hint:"
            " fit on all rows, or go on from a fitted model with TextClassifier(model=fitted.model_.path).fit(more, y)"
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.one_d_array = tags.input_tags.string = True
        tags.input_tags.two_d_array = False
        tags.classifier_tags.multi_label = True
        return tags

    def _is_single(self) -> bool:
        return bool(self.run_.labels.task == "single_label")

    def _train(self, texts: GivenTexts, labels: GivenLabels, weights: Any, folder: FitFolder) -> Run:
        weights_C = self._class_weights(labels)
        if isinstance(weights_C, np.ndarray) and labels.indices_N is not None and not weights_C.all():
            if self.label_smoothing_factor:
                raise ArgumentError(
                    "class_weight has a weight of 0, and labels are smoothed", hint="leave its rows out"
                )
            weights, weights_C = without_classes(weights, labels.indices_N, weights_C), weights_C + (weights_C == 0)
        table = texts.columns() | labels.columns() | ({} if weights is None else {WEIGHT: weights})
        options = {name: _plain(value) for name, value in self.get_params(deep=False).items() if name not in _OWN}
        if folder.is_temporary:
            options |= {"save_steps": _NEVER, "save_total_limit": 1}
        run = train(
            pa.table({name: pa.array(values) for name, values in table.items()}),
            model=self.model,
            output=folder.path,
            text_column=TEXT,
            pair_column="none" if texts.pairs is None else PAIR,
            label_column=LABEL if labels.indices_N is not None else list(labels.names),
            weight_column=None if weights is None else WEIGHT,
            task="single_label" if labels.indices_N is not None else "multi_label",
            class_weights=_by_name(weights_C, labels),
            seed=_seed(self.random_state),
            baselines=False,
            progress=bool(self.verbose),
            **options,
        )
        if folder.is_temporary:
            shutil.rmtree(folder.path / "checkpoints", ignore_errors=True)
        return run

    def _class_weights(self, labels: GivenLabels) -> str | np.ndarray | None:
        """`balanced`, or (C,) the weight of each class."""
        if self.class_weight is None or (isinstance(self.class_weight, str) and self.class_weight == "balanced"):
            return self.class_weight
        if not isinstance(self.class_weight, dict):
            said = f"class_weight is {self.class_weight!r}: it is None, 'balanced' or weights by class"
            raise ArgumentError(said, hint="class_weight={'spam': 3, 'ham': 1}")
        weights_C: np.ndarray = compute_class_weight(self.class_weight, classes=labels.classes_C, y=labels.classes_C)
        return weights_C


def _by_name(weights_C: str | np.ndarray | None, labels: GivenLabels) -> str | None:
    """Weights of classes by their names, as JSON."""
    if weights_C is None or isinstance(weights_C, str):
        return weights_C
    return json.dumps(dict(zip(labels.names, map(float, weights_C), strict=True)))


def _seed(random_state: Any) -> int:
    """A whole number as it is, else one that is drawn from the stream that was given."""
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))


def _plain(value: Any) -> Any:
    """A number of NumPy, as grids of parameters have them, as one of Python."""
    return value.item() if isinstance(value, np.generic) else value
