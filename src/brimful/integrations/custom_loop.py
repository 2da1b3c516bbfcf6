"""The step of a training loop of your own: a model and an optimizer in memory, tokenised rows in, optimizer steps out.

optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
step = brimful.Step(model, optimizer, accumulation=4, max_grad_norm=1.0)  # without it, nothing is clipped
for batch in loader:                   # dictionaries, or padded tensors
    outcome = step(batch)              # every fourth call updates, with the gradient of all four batches
    if outcome.updated:
        scheduler.step()
step.release()
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from brimful.core.callbacks import Callbacks, PythonWarnings
from brimful.core.errors import OptionError, printable
from brimful.core.options.checks import ADAMW_ONLY
from brimful.core.options.train import TrainOptions
from brimful.core.records import FirstBatch, LabelSpace, Learning, Recipe, TaskName
from brimful.data.batches import prefetch
from brimful.data.batches.batch import Batch, Whole, make_batch
from brimful.data.tokens.encoder import Tokens, offsets_of
from brimful.engine import first_batch, plain_pass
from brimful.engine.assemble import Assembled, assemble
from brimful.engine.fitted_step import FittedStep
from brimful.engine.inference import evaluating, evaluation_forward, keep_modes, predict_logits
from brimful.engine.sequence_lengths import DEFAULT_MAX_LENGTH
from brimful.hardware.probe import choose_device
from brimful.integrations.expected_lengths import expected_batches
from brimful.integrations.left_padding import left_is_right
from brimful.integrations.module_hooks import COMPLETE, hooked_gradient, num_gradient_hooks
from brimful.integrations.rows import ReadRows, RowReader, Rows, joined, num_rows
from brimful.integrations.step_parts import (
    ClassWeights,
    StepOutcome,
    Unwrapped,
    asked_precision,
    class_weights_C,
    frozen_weights,
    readable_state,
    state_of,
    unwrapped_optimizer,
)
from brimful.levers.precision import choose_precision
from brimful.models.end_tokens import end_token_of
from brimful.models.fp32_outputs import answer_as_before
from brimful.models.half_experts import experts_as_before
from brimful.models.hub.inspection import max_positions, num_embedded
from brimful.models.model_stats import layers_of
from brimful.models.packed.layer_calls import remove_calls
from brimful.models.packed.packed_forward import has_token_types
from brimful.models.packed.recompute import keep_all
from brimful.step.precision import Precision
from brimful.step.recovery import OutOfMemoryLog
from brimful.step.state import StepState
from brimful.step.step import Pending
from brimful.tasks.task import make_task

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
        *ADAMW_ONLY,
        "late_clipping",
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
#: As in transformers' TrainingArguments.
_LEARNING_RATE = 5e-5
#: Steps that a loop with a schedule of its own is taken to have, by which compiling is judged.
_SOME_STEPS = 1000


class Step:
    """One optimizer step of an `AutoModelForSequenceClassification`, packed where the equivalence check allows it.

    optimizer: an optimizer of torch, whose groups' learning rates hold at each step, so that any schedule can set them;
    or a name of transformers' `optim`, with the learning rate and schedule that the options say. Gradients are clipped
    at `max_grad_norm`: by default at 1.0, and with an optimizer of your own not at all. accumulation: calls
    that make one update, whose gradient is that of their batches as one. num_steps: of the learning-rate schedule; with
    an optimizer of your own, about how many there will be. lengths: tokens of the sequences to come, by which token
    budgets and kernels are chosen; by default all lengths up to `max_length` are expected alike. class_weights: of the
    loss, (C,) in the order of the model's labels, or by their names; in multi-label of positives. callbacks: hears
    warnings; by default they are Python's. options: fields of TrainOptions that a step depends on (`OPTIONS`).

    model: it may be in peft's wrapper, which then is what is trained, or prepared by Accelerate for one process, whose
    mixed precision then holds. It is moved to the device, its weights are in fp32, and until `release` it belongs to
    the step: logits come from `predict`. A model in eval mode is put in train mode; in a model in train mode,
    submodules keep their modes. Weights may be frozen and released between calls, and the optimizer may get groups: the
    step is then assembled anew, with the states that there are.
    Before the first update its batch goes through the very step, and through the plain model; where they differ a
    slower path runs. first_batch: the comparison.
    longest: most tokens of a row.
    out_of_memory: each time that memory ran out, and the token budget that the step went on with.
    Raises: OptionError for an option that does not work here, and for a model with a loss or forward of its own.
    """

    def __init__(
        self,
        model: Any,
        optimizer: str | torch.optim.Optimizer | None = None,
        *,
        num_steps: int | None = None,
        accumulation: int = 1,
        lengths: Sequence[int] | np.ndarray | None = None,
        class_weights: ClassWeights | None = None,
        callbacks: Callbacks | None = None,
        **options: Any,
    ) -> None:
        if unknown := sorted(set(options) - set(OPTIONS)):
            raise OptionError(f"Step has no option {unknown[0]!r}", hint="the options are " + ", ".join(OPTIONS))
        if accumulation < 1:
            raise OptionError(f"accumulation is {accumulation}, and an update is made of one call at least")
        if isinstance(optimizer, str):
            options, optimizer = options | {"optim": optimizer}, None
        if optimizer is not None:  # a loop of one's own clips where it says so
            options = {"max_grad_norm": 0.0} | options
        if num_steps is None and optimizer is None:
            raise OptionError(
                "num_steps is missing, and the learning-rate schedule ends there",
                hint="pass num_steps=..., or an optimizer of torch and its scheduler",
            )
        self._callbacks, self._options = callbacks or PythonWarnings(), _options(options)
        self._num_steps = _SOME_STEPS if num_steps is None else num_steps
        self._accumulation, self._class_weights = accumulation, class_weights
        self._given = Unwrapped.of(model)
        try:
            self._begin(optimizer, lengths)
        except BaseException:
            self._given.restored()
            raise

    def _begin(self, optimizer: Any, lengths: Any) -> None:
        """Assemble all that runs."""
        precision_asked = asked_precision(self._options.precision, optimizer)
        asked = dataclasses.replace(self._options, precision=precision_asked)
        self._optimizer = self._owner(optimizer)
        self._most_rows = asked.batch_size
        self._options = dataclasses.replace(asked, batch_size=self._accumulation * asked.batch_size)
        model, config = self._given.model, self._given.model.config
        self._reader = _reader(model, asked)
        self.longest = self._reader.max_length
        self._attention = config._attn_implementation
        self._put_in_eval_mode = None if model.training else keep_modes(model)
        weights = class_weights_C(self._class_weights, self._reader.space)
        self._task = make_task(self._reader.space, np.zeros(0, dtype=np.int64), weights, asked.label_smoothing_factor)
        self._batches = expected_batches(lengths, self._options.batch_size, self.longest)
        device = choose_device(asked.device)
        precision = choose_precision(asked.precision, device)
        self._released, self._num_made, self._num_run = False, 0, 0
        self._once_trained = set[str]()  # names of weights, of which some are frozen now
        self._waiting: list[ReadRows] = []
        self.first_batch: FirstBatch | None = None
        log = OutOfMemoryLog(warn=self._callbacks.warning)
        self.out_of_memory, self._log = log.found, log
        self._take(self._assembled(self._options, precision, eager_attention=False))

    def _owner(self, optimizer: Any) -> Any:
        """The optimizer that updates, as of `Assembly`."""
        return unwrapped_optimizer(optimizer)

    def _assembled(self, options: TrainOptions, precision: Precision, eager_attention: bool) -> Assembled:
        if not any(parameter.requires_grad for parameter in self._given.model.parameters()):
            raise OptionError("all weights of the model are frozen", hint="set requires_grad of those to train")
        asked, longest = self._as_hooks_allow(options), self.longest
        return assemble(
            self._given.model.float(),
            asked,
            precision,
            self._callbacks,
            task=self._task,
            batches=self._batches,
            mean_length=float(np.concatenate(self._batches).mean()),
            max_length=longest,
            longest=longest,
            num_steps=self._num_steps,
            learning=Learning(
                learning_rate=asked.learning_rate or _LEARNING_RATE,
                num_train_epochs=None,
                num_warmup_steps=asked.warmup_steps or math.ceil((asked.warmup_ratio or 0.0) * self._num_steps),
            ),
            cache=False,  # what is in memory need not be what its configuration says
            eager_attention=eager_attention,
            optimizer=self._optimizer,
        )

    def _as_hooks_allow(self, options: TrainOptions) -> TrainOptions:
        """The options, with steps launched kernel by kernel where the owner has hooks on gradients.

        Raises: OptionError for hooks that are called within each of a batch's passes.
        """
        model = self._given.model
        if (name := hooked_gradient(model)) is None:
            return options
        calls_once = isinstance(self._optimizer, torch.optim.Optimizer) or self._optimizer == "elsewhere"
        if not calls_once or hooked_gradient(model, COMPLETE) is not None:
            raise OptionError(
                f"there is a hook on the gradient of {printable(name)}, and a step sums that of several passes",
                hint="with an optimizer of torch, hooks of register_hook are called once; brimful.packed takes any",
            )
        if choose_device(options.device).type == "cpu" or options.execution == "eager":
            return options
        said = f"there is a hook on the gradient of {printable(name)}, which no replayed step calls"
        self._callbacks.warning(f"{said}; steps are launched kernel by kernel")
        return dataclasses.replace(options, execution="eager")

    def _take(self, built: Assembled) -> None:
        """Run this from now on."""
        self._built, self._fitted = built, FittedStep(built, self._log)
        self._forward = evaluation_forward(built, most_rows=self._options.batch_size, note=self._callbacks.warning)
        self._forward.hear = self._log
        self._parameters = list(built.model.parameters())
        self._trained = self._what_trains()

    def _what_trains(self) -> tuple[list[Any], ...]:
        """Weights that are trained, hooks on their gradients, and weights of each group of the owner's optimizer."""
        owners = isinstance(self._optimizer, torch.optim.Optimizer)
        groups = [list(map(id, each["params"])) for each in (self._optimizer.param_groups if owners else ())]
        return [p.requires_grad for p in self._parameters], num_gradient_hooks(self._parameters), groups

    def _follow(self) -> None:
        """Assemble anew where weights were frozen or released since, or the owner's optimizer has other groups.

        States of the optimizer and numbers of steps stay, and the next batch is compared with the plain model again.
        """
        if self._what_trains() == self._trained:
            return
        self._callbacks.note("other weights are trained from now on: the step is assembled anew")
        step, precision, limit = self._built.step, self._built.precision, self._fitted.limit
        state = step.state()
        self._once_trained |= set(state.weights)
        kept = dict(self._optimizer.state) if isinstance(self._optimizer, torch.optim.Optimizer) else {}
        step.release()
        self._put_back()
        self._take(self._assembled(self._options, precision, eager_attention=False))
        if limit is not None:
            self._fitted.limit_to(limit)
        update = self._built.step.update
        self._built.step.load_state(dataclasses.replace(state, weights=update.weights(), groups=()))
        if kept:  # of weights that are frozen now, too
            self._optimizer.state.update(kept)
        self.first_batch = None

    @property
    def device(self) -> torch.device:
        """Device that it runs on."""
        return self._built.precision.device

    @property
    def recipe(self) -> Recipe:
        """All that was chosen, with reasons."""
        return self._built.recipe

    @property
    def packed(self) -> bool:
        """True if sequences run packed; the recipe has the reason."""
        return self._built.packing.packed

    @property
    def next_number(self) -> int:
        """Number of the next batch, after those that were run and those that `batch` made."""
        return max(self._num_made, self._num_run)

    def __call__(self, rows: Rows) -> StepOutcome:
        """Take one batch of the loop; every `accumulation`-th call is an optimizer step on all since the last one.

        rows: as of `batch`. Returns at once; reading the outcome waits for the device. Raises: as `batch` and `run`.
        """
        self._waiting.append(self._read(rows, self._most_rows))
        return self.flush() if len(self._waiting) == self._accumulation else StepOutcome(None)

    def flush(self) -> StepOutcome:
        """Make the optimizer step of the batches that wait for more, as at the end of an epoch; none if none do."""
        if not self._waiting:
            return StepOutcome(None)
        rows, self._waiting = joined(self._waiting), []
        self._num_made = self.next_number + 1
        return StepOutcome(self.run(self._made(rows, self._num_made - 1)))

    def batch(self, rows: Rows, *, number: int | None = None) -> Batch:
        """One effective batch, laid out in micro-batches, on the host.

        rows: dictionaries with `input_ids`, `labels` and, for models that have them, `token_type_ids`; or columns of
        these, padded, with their `attention_mask`; padding is on the left only where the model answers such rows as it
        does without padding. `weights` are what rows count as in the loss: 2 is two
        rows, 0 none; the loss is over their sum. number: of the batch, from which dropout is seeded; by
        default batches are numbered on from the last.
        Raises: OptionError for rows that the model or the step cannot take.
        """
        number = self.next_number if number is None else number
        self._num_made = number + 1
        return self._make(rows, number)

    def _make(self, rows: Rows, number: int) -> Batch:
        return self._made(self._read(rows, self._options.batch_size), number)

    def _read(self, rows: Rows, most: int) -> ReadRows:
        self._require_not_released()
        read = self._reader.read(rows)
        if not 0 < len(read) <= most:
            raise OptionError(f"a batch has {len(read)} rows, and batch_size is {most}")
        return read

    def _made(self, rows: ReadRows, number: int, whole: Whole | None = None) -> Batch:
        layout = self._fitted.layout
        given = (np.arange(len(rows)), rows.ids, rows.types, rows.targets_N, self._task, layout)
        return make_batch(number, *given, weights_N=rows.weights_N, whole=whole)

    def run(self, batch: Batch) -> Pending:
        """Run one optimizer step. Return at once; `read()` of the result waits for the outcome.

        Where memory runs out, the batch is run in smaller micro-batches, as are all that follow: callbacks hear it.
        Raises: MemoryFullError if it cannot be split any further; the weights are those of before. OptionError
        for packed rows that a head which looks for their end token would read elsewhere.
        """
        self._require_not_released()
        self._follow()
        if self.first_batch is None:
            self._compare(batch)
        if self.packed and batch.rows is not None:
            self._reader.require_last_ends(batch.rows.ids)
        pending = self._fitted.run(batch)
        self._num_run = max(self._num_run, batch.number + 1)
        return pending

    def _compare(self, batch: Batch) -> None:
        """Hold the step to the plain model on a batch, and go down to a slower one where they differ."""
        assert batch.rows is not None
        rows = plain_pass.Rows(ids=batch.rows.ids, types=batch.rows.types, targets_N=batch.rows.targets_N)
        before, states = self._built, list[StepState]()

        def make(options: TrainOptions, precision: Precision, eager: bool) -> Assembled:
            if not states:  # weights, and an optimizer's states that were loaded
                states.append(before.step.state())
            self._put_back()
            return self._assembled(options, precision, eager)

        built, self.first_batch = first_batch.checked(
            make, self._options, before.precision, rows, self._callbacks, made=before
        )
        if built is not before:
            self._take(built)
            built.step.load_state(states[0])

    def predict(self, rows: Rows) -> np.ndarray:
        """(N, C) fp32 logits of any number of rows, in their order, by the weights of now. Labels are not needed."""
        self._require_not_released()
        if not num_rows(rows):
            return np.zeros((0, self._reader.space.num_outputs), dtype=np.float32)
        ids, types = self._reader.sequences(rows)
        if self.packed:
            self._reader.require_last_ends(ids)
        tokens = Tokens(
            ids=np.concatenate(ids).astype(np.int32),
            offsets=offsets_of(np.array([len(each) for each in ids])),
            types=None if types is None else np.concatenate(types).astype(np.uint8),
            truncated=np.zeros(len(ids), dtype=np.bool_),
        )
        with evaluating(self._built.model), self._built.step.update.reading():
            return predict_logits(self._forward, tokens)

    def state(self) -> StepState:
        """Everything an exact continuation needs, of the tensors as they are: no copies."""
        self._require_not_released()
        self._require_none_waiting()
        state, run = self._built.step.state(), self._num_run
        weights = frozen_weights(self._built.model, self._once_trained) | dict(state.weights)
        return dataclasses.replace(state, weights=weights, counters=dataclasses.replace(state.counters, batches=run))

    def load_state(self, state: StepState) -> None:
        """Take up where `state` was taken."""
        self._waiting.clear()
        self._built.step.load_state(state)
        self._once_trained |= set(state.weights)
        for name, weight in frozen_weights(self._built.model, state.weights).items():
            weight.copy_(state.weights[name])
        self._num_made = self._num_run = state.counters.batches

    def state_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries of tensors and numbers, for `torch.save`: weights that are trained or were,
        buffers, the optimizer's states and groups, counters."""
        return readable_state(self.state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where `state_dict` was taken."""
        self.load_state(state_of(state))

    def _require_none_waiting(self) -> None:
        if self._waiting:
            raise OptionError(
                f"{len(self._waiting)} of {self._accumulation} batches of an update are waiting",
                hint="call flush(), or save after a call whose outcome says updated",
            )

    def _require_not_released(self) -> None:
        if self._released:
            raise OptionError("the step was released: it trains no more", hint="make another one of the model")

    def release(self) -> Any:
        """End training. Return the model: its weights are plain fp32 parameters, and its own forward works again.

        One that was given in eval mode is in eval mode again; modes of another one are as the loop has them. Again, it
        only returns the model.
        """
        if not self._released:
            self._built.step.release()
            self._put_back()
            if self._put_in_eval_mode is not None:
                self._put_in_eval_mode()
            self._released = True
        return self._given.restored()

    def _put_back(self) -> None:
        self._built.model.set_attn_implementation(self._attention)
        remove_calls(self._built.model)
        answer_as_before(self._built.model)
        experts_as_before(self._built.model)
        keep_all(list(layers_of(self._built.model) or ()))


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


def _options(options: Mapping[str, Any]) -> TrainOptions:
    return TrainOptions(data="", model="", output="", **options)


def _reader(model: Any, options: TrainOptions) -> RowReader:
    """A reader of a model's rows. Raises: OptionError for sequences longer than its positions."""
    config, limit = model.config, max_positions(model.config, model)
    if options.max_length is not None and limit is not None and options.max_length > limit:
        raise OptionError(
            f"max_length is {options.max_length}, and the model has positions for {limit} tokens",
            hint=f"use at most {limit}",
        )
    return RowReader(
        max_length=options.max_length or min(DEFAULT_MAX_LENGTH, limit or DEFAULT_MAX_LENGTH),
        vocab_size=num_embedded(model) or 1 << 31,  # a table that was made larger is, not its configuration
        padding_id=getattr(config.get_text_config(), "pad_token_id", None),
        with_types=has_token_types(config),
        types_are_words=getattr(config, "type_vocab_size", None) is None,
        space=_label_space(config, options),
        left_is_right=functools.partial(left_is_right, model),
        end_id=end_token_of(model),
    )


def _label_space(config: Any, options: TrainOptions) -> LabelSpace:
    """The outputs of a model as its own loss reads them, where `task` does not say otherwise."""
    default: TaskName = "regression" if config.num_labels == 1 else "single_label"
    task = options.task if options.task != "auto" else _PROBLEMS.get(config.problem_type or "", default)
    return LabelSpace(task=task, names=tuple(str(config.id2label[index]) for index in range(config.num_labels)))
