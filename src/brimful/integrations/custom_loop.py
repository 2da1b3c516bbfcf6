"""The step of a training loop of your own: a model in memory and tokenised rows in, one optimizer step out.

step = brimful.Step(model, num_steps=300, batch_size=32, learning_rate=2e-5)
with brimful.Feed(step, batches) as feed:
    for batch in feed:
        outcome = step.run(batch).read()
step.release()
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from brimful.core.callbacks import Callbacks
from brimful.core.errors import OptionError
from brimful.core.options import TrainOptions
from brimful.core.records import LabelSpace, TaskName
from brimful.data.batches import prefetch
from brimful.data.batches.batch import Batch, make_batch
from brimful.data.tokens.encoder import Tokens, offsets_of
from brimful.engine.assemble import assemble
from brimful.engine.fitted_step import FittedStep
from brimful.engine.inference import evaluating, evaluation_forward, keep_modes, predict_logits
from brimful.engine.prepare import DEFAULT_MAX_LENGTH
from brimful.hardware.probe import choose_device
from brimful.levers.precision import choose_precision
from brimful.models.hub.adapters import unwrapped
from brimful.models.hub.inspection import max_positions
from brimful.models.model_stats import layers_of
from brimful.models.packed.layer_calls import remove_calls
from brimful.models.packed.packed_forward import has_token_types
from brimful.models.packed.recompute import keep_all
from brimful.step.recovery import OutOfMemoryLog
from brimful.step.state import StepState
from brimful.step.step import Pending
from brimful.tasks.task import make_task

#: Tokenised rows: a dictionary each, with `input_ids`, or columns of them such as padded tensors.
Rows = Sequence[Mapping[str, Any]] | Mapping[str, Any]

#: Fields of TrainOptions that a step depends on.
OPTIONS = (
    *("task", "max_length", "batch_size", "learning_rate", "warmup_steps", "warmup_ratio", "lr_scheduler_type"),
    *(
        "optim",
        "optim_args",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "label_smoothing_factor",
    ),
    *("seed", "precision", "device", "packing", "token_budget", "execution"),
    "gradient_checkpointing",
    "activation_memory",
)
_PROBLEMS: dict[str, TaskName] = {
    "regression": "regression",
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
}
#: Batches that token budgets are chosen by.
_MOST_BATCHES = 2000
_FEW_LENGTHS = 64


class Step:
    """One optimizer step of an `AutoModelForSequenceClassification`, packed where the equivalence check allows it.

    A model may be in peft's wrapper: then its adapter is trained.

    num_steps: of the learning-rate schedule. lengths: tokens of the sequences to come, by which token budgets and
    kernels are chosen; by default all lengths up to `max_length` are expected alike. callbacks: hears warnings.
    options: fields of TrainOptions that a step depends on (`OPTIONS`).

    The model is moved to the device, its weights are in fp32, and until `release` it belongs to the step: logits come
    from `predict`. A model in eval mode is put in train mode; in a model in train mode, submodules keep their modes.
    out_of_memory: each time that memory ran out, and the token budget that the step went on with.
    Raises: OptionError for an option that does not work here.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_steps: int,
        lengths: Sequence[int] | np.ndarray | None = None,
        callbacks: Callbacks | None = None,
        **options: Any,
    ) -> None:
        if unknown := sorted(set(options) - set(OPTIONS)):
            raise OptionError(f"Step has no option {unknown[0]!r}", hint="the options are " + ", ".join(OPTIONS))
        self._given, model = model, unwrapped(model)
        self._options = asked = TrainOptions(data="", model="", output="", **options)
        callbacks = callbacks or Callbacks()
        precision = choose_precision(asked.precision, choose_device(asked.device))
        limit = max_positions(model.config, model)
        if asked.max_length is not None and limit is not None and asked.max_length > limit:
            raise OptionError(f"max_length is {asked.max_length}, and the model has positions for {limit} tokens")
        self._max_length = asked.max_length or min(DEFAULT_MAX_LENGTH, limit or DEFAULT_MAX_LENGTH)
        self._vocab_size = getattr(model.config.get_text_config(), "vocab_size", None) or 1 << 31
        self._with_types = has_token_types(model.config)
        self._before = (model.config._attn_implementation, keep_modes(model))
        space = _label_space(model.config, asked)
        self._task = make_task(space, np.zeros(0, dtype=np.int64), None, asked.label_smoothing_factor)
        batches = _expected_batches(lengths, asked.batch_size, self._max_length)
        built = assemble(
            model.float(),
            asked,
            precision,
            callbacks,
            task=self._task,
            batches=batches,
            mean_length=float(np.concatenate(batches).mean()),
            max_length=self._max_length,
            longest=self._max_length,
            num_steps=num_steps,
            num_warmup_steps=asked.warmup_steps or math.ceil((asked.warmup_ratio or 0.0) * num_steps),
            cache=False,  # what is in memory need not be what its configuration says
        )
        self._built, self._num_made, self._num_run = built, 0, 0
        log = OutOfMemoryLog(warn=callbacks.warning)
        self.out_of_memory, self._fitted = log.found, FittedStep(built, log)
        self._forward = evaluation_forward(built, most_rows=asked.batch_size, note=callbacks.warning)
        self._forward.hear = log
        self.device, self.recipe = precision.device, built.recipe

    @property
    def packed(self) -> bool:
        """True if sequences run packed; the recipe has the reason."""
        return self._built.packing.packed

    @property
    def next_number(self) -> int:
        """Number of the next batch, after those that were run and those that `batch` made."""
        return max(self._num_made, self._num_run)

    def batch(self, rows: Rows, *, number: int | None = None) -> Batch:
        """One effective batch, laid out in micro-batches, on the host.

        rows: dictionaries with `input_ids`, `labels` and, for models that have them, `token_type_ids`; or columns of
        these, padded on the right, with their `attention_mask`. number: of the batch, from which dropout is seeded; by
        default batches are numbered on from the last.
        Raises: OptionError for rows that the model or the step cannot take.
        """
        number = self.next_number if number is None else number
        self._num_made = number + 1
        return self._make(rows, number)

    def _make(self, rows: Rows, number: int) -> Batch:
        each = _each_row(rows)
        if not 0 < len(each) <= self._options.batch_size:
            raise OptionError(f"a batch has {len(each)} rows, and batch_size is {self._options.batch_size}")
        ids, types = self._sequences(each)
        layout = self._fitted.layout
        return make_batch(number, np.arange(len(each)), ids, types, self._targets(each), self._task, layout)

    def run(self, batch: Batch) -> Pending:
        """Run one optimizer step. Return at once; `read()` of the result waits for the outcome.

        Where memory runs out, the batch is run in smaller micro-batches, as are all that follow: callbacks hear it.
        Raises: MemoryFullError if it cannot be split any further; the weights are those of before.
        """
        pending = self._fitted.run(batch)
        self._num_run = max(self._num_run, batch.number + 1)
        return pending

    def predict(self, rows: Rows) -> np.ndarray:
        """(N, C) fp32 logits of any number of rows, in their order, by the weights of now. Labels are not needed."""
        ids, types = self._sequences(_each_row(rows))
        tokens = Tokens(
            ids=np.concatenate(ids).astype(np.int32),
            offsets=offsets_of(np.array([len(each) for each in ids])),
            types=None if types is None else np.concatenate(types).astype(np.uint8),
            truncated=np.zeros(len(ids), dtype=np.bool_),
        )
        with evaluating(self._built.model), self._built.step.update.reading():
            return predict_logits(self._forward, tokens)

    def state(self) -> StepState:
        """Everything an exact continuation needs."""
        state = self._built.step.state()
        return dataclasses.replace(state, counters=dataclasses.replace(state.counters, batches=self._num_run))

    def load_state(self, state: StepState) -> None:
        """Take up where `state` was taken."""
        self._built.step.load_state(state)
        self._num_made = self._num_run = state.counters.batches

    def release(self) -> Any:
        """End training. Return the model: its weights are plain fp32 parameters, and its own forward works again."""
        attention, restore_modes = self._before
        self._built.step.release()
        self._built.model.set_attn_implementation(attention)
        remove_calls(self._built.model)
        keep_all(list(layers_of(self._built.model) or ()))
        restore_modes()
        return self._given

    def _sequences(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """Token ids of each row without padding, and token types if the model has any and they are given."""
        ids, types = [], []
        for number, row in enumerate(rows):
            found = _array(row["input_ids"])
            mask = np.ones(len(found), np.bool_) if row.get("attention_mask") is None else _array(row["attention_mask"])
            length = int(mask.astype(bool).sum())
            if not mask[:length].all():
                raise OptionError(f"attention_mask of row {number} is not ones, then zeros", hint="pad on the right")
            if not 0 < length <= self._max_length:
                raise OptionError(
                    f"row {number} has {length} tokens, and max_length is {self._max_length}",
                    hint="truncate when you tokenise",
                )
            ids.append(found[:length])
            if not 0 <= ids[-1].min() <= ids[-1].max() < self._vocab_size:
                raise OptionError(
                    f"row {number} has a token outside of the model's vocabulary of {self._vocab_size}",
                    hint="use the model's own tokenizer",
                )
            if self._with_types and row.get("token_type_ids") is not None:
                types.append(_array(row["token_type_ids"])[:length])
        if types and len(types) != len(ids):
            raise OptionError("some rows have token_type_ids, and some have none", hint="give them all, or none")
        if self._with_types and not types:
            types = [np.zeros_like(each) for each in ids]
        return ids, types if self._with_types else None

    def _targets(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """(N,) int64 classes, or (N, C) fp32."""
        if missing := [number for number, row in enumerate(rows) if "labels" not in row and "label" not in row]:
            raise OptionError(f"row {missing[0]} has no labels")
        labels = np.stack([_array(row.get("labels", row.get("label"))) for row in rows])
        space = self._task.space
        if space.task == "single_label":
            if labels.ndim > 1 or not np.issubdtype(labels.dtype, np.integer):
                raise OptionError("labels are not one integer a row", hint='is it task="multi_label" or "regression"?')
            if not 0 <= labels.min() <= labels.max() < space.num_outputs:
                raise OptionError(f"labels are {labels.min()} to {labels.max()}, and there are {space.num_outputs}")
            return labels.astype(np.int64)
        labels = labels.reshape(len(rows), -1).astype(np.float32)
        if labels.shape[1] != space.num_outputs:
            raise OptionError(f"each row has {labels.shape[1]} labels, and the model has {space.num_outputs} outputs")
        return labels


class Feed(prefetch.Feed):
    """Batches of a step made ahead in a thread, and copied to the device while it works.

    A context manager to iterate over; a batch is on the device until the next one is asked for. batches: the rows of
    each, as `Step.batch` takes them. start: number of the first one, from which dropout is seeded; by default the next
    number of the step when the feed is entered, so that each epoch has masks of its own.
    """

    def __init__(self, step: Step, batches: Iterable[Rows], *, start: int | None = None) -> None:
        super().__init__(_Made(step, batches), step.device)
        self._step, self._start = step, start

    def __enter__(self) -> Feed:
        self._range = (self._step.next_number if self._start is None else self._start, None)
        super().__enter__()
        return self


@dataclasses.dataclass(frozen=True)
class _Made:
    step: Step
    rows: Iterable[Rows]

    def batches(self, start: int, stop: int | None) -> Iterator[Batch]:
        for number, rows in enumerate(self.rows, start):
            yield self.step._make(rows, number)


def _each_row(rows: Rows) -> Sequence[Mapping[str, Any]]:
    """A dictionary for each row."""
    if not isinstance(rows, Mapping):
        return rows
    columns = {
        name: list(_array(values)) if isinstance(values, Tensor) else values
        for name, values in rows.items()
        if values is not None
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def _label_space(config: Any, options: TrainOptions) -> LabelSpace:
    """The outputs of a model as its own loss reads them, where `task` does not say otherwise."""
    default: TaskName = "regression" if config.num_labels == 1 else "single_label"
    task = options.task if options.task != "auto" else _PROBLEMS.get(config.problem_type or "", default)
    return LabelSpace(task=task, names=tuple(str(config.id2label[index]) for index in range(config.num_labels)))


def _expected_batches(lengths: Sequence[int] | np.ndarray | None, size: int, longest: int) -> list[np.ndarray]:
    """Lengths of the sequences of batches like those to come."""
    if lengths is None:
        each = np.linspace(1, longest, min(_FEW_LENGTHS, longest)).astype(np.int64)
        return [np.full(size, length) for length in each]
    known = np.random.default_rng(0).permutation(np.minimum(np.asarray(lengths, dtype=np.int64), longest))
    return [known[start : start + size] for start in range(0, min(len(known), _MOST_BATCHES * size), size)]
