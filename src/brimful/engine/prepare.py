"""Everything before the first step: rows, labels, model files and tokens, each checked before the next one costs time.

Mistakes end here, with one line, before weights are loaded or a GPU is touched.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from brimful.core.callbacks import Callbacks
from brimful.core.errors import ModelError, OptionError, printable
from brimful.core.options import TrainOptions
from brimful.core.phases import Phases
from brimful.core.records import LabelSpace, Learning, Run, TargetScale, TrainedInputs
from brimful.data.batches.batch import Sampler
from brimful.data.labels.columns import Columns, describe_columns, find_columns
from brimful.data.labels.doubts import data_doubts, label_doubts
from brimful.data.labels.examples import (
    Examples,
    describe,
    draw,
    make_examples,
    num_empty_labels,
    split_examples,
)
from brimful.data.labels.label_columns import no_label_text
from brimful.data.labels.label_space import detect_labels, label_doubt
from brimful.data.labels.weights import weighted
from brimful.data.readers.file_format import FileFormat
from brimful.data.readers.in_memory import Tables
from brimful.data.readers.locations import find_splits
from brimful.data.readers.rows import Rows
from brimful.data.readers.sources import fitting, read_rows
from brimful.data.tokens.augment import load_transform
from brimful.data.tokens.encoder import OTHER_TOKENIZER, Encoder, Tokens, tokenize
from brimful.engine.learning import choose_learning, learning_of, steps_text
from brimful.engine.target_scale import choose_scale, scale_text
from brimful.models.hub.inspection import ModelFacts, inspect_model, load_tokenizer
from brimful.models.hub.label_alignment import Alignment, align_labels
from brimful.models.packed.packed_forward import has_token_types
from brimful.tasks.task import Task, make_task

#: Sequences to train on are cut here unless --max-length says otherwise or the model ends earlier.
DEFAULT_MAX_LENGTH = 512
#: Sequences that are only read are cut here, unless --max-length or training said otherwise or the model ends earlier.
MOST_READ = 8192


@dataclass(frozen=True, kw_only=True)
class Part:
    """Examples of training or of evaluation, tokenised."""

    examples: Examples
    tokens: Tokens
    targets_N: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything a run is made of; no choice is `auto` any more."""

    facts: ModelFacts
    alignment: Alignment
    tokenizer: Any
    encoder: Encoder
    task: Task
    training: Part
    evaluation: Part | None
    max_length: int
    order: Sampler
    num_steps: int
    num_batches: int | None
    learning: Learning
    target_scale: TargetScale | None
    data_fingerprint: str
    report: dict[str, Any]

    @property
    def space(self) -> LabelSpace:
        """Task and output names, in the model's order."""
        return self.alignment.space

    @property
    def inputs(self) -> TrainedInputs:
        """Columns and lengths that are trained on, to be saved with the model."""
        columns = self.training.examples.columns
        return TrainedInputs(
            text_column=columns.text,
            pair_column=columns.pair,
            label_columns=columns.labels,
            max_length=self.max_length,
        )


class Check(Protocol):
    """A check of what was read, before it is tokenised."""

    def __call__(self, *, space: LabelSpace, fingerprint: str, max_length: int, sha256: Mapping[str, str]) -> None: ...


def prepare(
    options: TrainOptions,
    callbacks: Callbacks,
    phases: Phases | None = None,
    check: Check | None = None,
    tables: Tables | None = None,
    before: Run | None = None,
) -> Prepared:
    """Reads, checks, splits and tokenises all that a run needs, and reports what was inferred.

    num_batches of the result: batches to consume, None where --max-steps counts applied steps instead.
    check: called with what was read, before it is tokenised; it may raise. tables: data in memory, by their names.
    before: the run that is gone on with, which keeps what was chosen.
    Raises: InputError for anything that cannot be done as asked.
    """
    facts = inspect_model(options.model, trust_remote_code=options.trust_remote_code, allow_pickle=options.allow_pickle)
    _check_no_second_adapter(options, facts)
    tokenizer = load_tokenizer(facts)
    max_length = longest_sequence(options.max_length, facts, options.model)
    encoder = make_encoder(tokenizer, facts, max_length)
    if options.transform is not None:
        load_transform(options.transform)
    callbacks.stage(f"reading {options.data}")
    space, training, evaluation, fingerprint, num_empty = _examples(options, callbacks, tables or {})
    alignment = align_labels(space, facts, label_map=options.label_map, new_head=options.new_head)
    sha256 = _hashes(options, facts)
    if check is not None:
        check(space=alignment.space, fingerprint=fingerprint, max_length=max_length, sha256=sha256)
    callbacks.note(f"head: {'new and untrained' if alignment.head == 'new' else 'kept'} ({alignment.reason})")
    order = Sampler(num_samples=len(training), batch_size=options.batch_size, seed=options.seed)
    learning = choose_learning(
        options,
        facts.config,
        batches_per_epoch=order.batches_per_epoch,
        num_outputs=alignment.space.num_outputs,
        kept=None if before is None else learning_of(before),
    )
    epochs = learning.num_train_epochs
    num_batches = None if epochs is None else math.ceil(epochs * order.batches_per_epoch)
    num_steps = options.max_steps or num_batches or 1
    if learning.num_warmup_steps > num_steps:
        said = f"the learning rate never reaches {learning.learning_rate:g}"
        callbacks.warning(f"the warm-up is longer than the run: {said}")
    callbacks.note(
        steps_text(
            options, learning, num_rows=order.num_samples, num_steps=num_steps, per_epoch=order.batches_per_epoch
        )
    )
    targets_N = _in_order(training, alignment.space)
    scale = choose_scale(options, alignment, facts, targets_N, before)
    if scale is not None:
        callbacks.note(scale_text(scale))
    weighing = (options.class_weights, options.label_smoothing_factor, training.weights)
    task = make_task(alignment.space, targets_N, *weighing, scale)
    if evaluation is not None:
        _check_metric(options, task)
    with (phases or Phases()).during("tokens"):
        training_part = _tokenized(training, alignment.space, encoder, options, callbacks, "training")
        evaluation_part = None
        if evaluation is not None:
            evaluation_part = _tokenized(evaluation, alignment.space, encoder, options, callbacks, "evaluation")
    report = _report(training_part, evaluation_part, max_length, num_empty, given=options.max_length is not None)
    report["sha256"] = sha256
    prepared = Prepared(
        facts=facts,
        alignment=alignment,
        tokenizer=tokenizer,
        encoder=encoder,
        task=task,
        training=training_part,
        evaluation=evaluation_part,
        max_length=max_length,
        order=order,
        num_steps=num_steps,
        num_batches=num_batches,
        learning=learning,
        target_scale=scale,
        data_fingerprint=fingerprint,
        report=report,
    )
    report["inputs"] = dataclasses.asdict(prepared.inputs) | {"label_columns": list(prepared.inputs.label_columns)}
    callbacks.data(report)
    return prepared


def _check_no_second_adapter(options: TrainOptions, facts: ModelFacts) -> None:
    if options.peft is not None and facts.adapter is not None:
        raise ModelError(
            f"{printable(options.model)} is an adapter itself, and --peft would put another on it",
            hint=f"begin with its model, {printable(facts.adapter.base)}, or train the first one with --merge",
        )


def _hashes(options: TrainOptions, facts: ModelFacts) -> dict[str, str]:
    """SHA-256 of the files that decide what is learned and can change."""
    files = {"model's config.json": facts.folder / "config.json"}
    if options.peft is not None or options.freeze is not None:  # checkpoints do not hold what is frozen
        files |= {f"model's {path.name}": path for path in facts.weight_files}
    if options.transform is not None:
        with suppress(TypeError):  # not written in Python
            files["file of --transform"] = Path(inspect.getsourcefile(load_transform(options.transform)) or "")
    return {name: _sha256(path) for name, path in files.items() if path.is_file()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_encoder(tokenizer: Any, facts: ModelFacts, max_length: int) -> Encoder:
    """The encoder of a model's texts.

    Raises: ModelError if the tokenizer frames every text with tokens that the model has no embeddings of.
    """
    with_types, num_embedded = has_token_types(facts.config), facts.num_embedded
    encoder = Encoder.from_tokenizer(tokenizer, max_length, with_types=with_types, num_embedded=num_embedded)
    for said in encoder.beyond_vocabulary(encoder.encode([""])).values():
        raise ModelError(f"{printable(facts.name)}: in every text, {said}", hint=OTHER_TOKENIZER)
    return encoder


def longest_sequence(asked: int | None, facts: ModelFacts, model: str) -> int:
    """The longest sequence to train on, in tokens: what was asked for, else the model's limit and at most 512.

    Raises: OptionError if more was asked for than the model has positions.
    """
    _check_length(asked, facts, model)
    return asked or min(DEFAULT_MAX_LENGTH, facts.max_positions or DEFAULT_MAX_LENGTH)


@dataclass(frozen=True, kw_only=True)
class Longest:
    """The longest sequence to read, in tokens, and its reason. asked: whether the user gave it."""

    tokens: int
    reason: str
    asked: bool = False


def longest_to_read(asked: int | None, facts: ModelFacts, model: str) -> Longest:
    """The longest sequence that a trained classifier reads: what was asked for, else what it was trained on, else the
    model's limit, so that answers are those of the whole text, as the pipeline's are; at most 8,192.

    Raises: OptionError if more was asked for than the model has positions.
    """
    _check_length(asked, facts, model)
    if asked is not None:
        return Longest(tokens=asked, reason="as asked for", asked=True)
    limit, inputs = facts.max_positions, facts.inputs
    if inputs is not None and (limit is None or inputs.max_length <= limit):
        return Longest(tokens=inputs.max_length, reason="the longest in training")
    if limit is not None and limit <= MOST_READ:
        return Longest(tokens=limit, reason="the model has no more positions")
    takes = "of any length" if limit is None else f"of up to {limit:,}"
    return Longest(tokens=MOST_READ, reason=f"the model takes texts {takes}, if asked to")


def _check_length(asked: int | None, facts: ModelFacts, model: str) -> None:
    limit = facts.max_positions
    if asked is not None and limit is not None and asked > limit:
        raise OptionError(
            f"--max-length is {asked}, and {model} has positions for {limit} tokens", hint=f"use at most {limit}"
        )


def _examples(
    options: TrainOptions, callbacks: Callbacks, tables: Tables
) -> tuple[LabelSpace, Examples, Examples | None, str, int]:
    """Label space, training and evaluation examples, fingerprint of both, and rows dropped as empty."""
    form, data, eval_data = FileFormat.of(options), options.data, options.eval_data
    if eval_data is None and data not in tables and (splits := find_splits(data)) is not None:
        data, eval_data = splits.training, splits.evaluation if options.eval_split else None
        held_out = f", {eval_data} to evaluate on" if eval_data else ""
        callbacks.note(f"splits: {data} to train on{held_out} (by their names; --eval-data names another)")
    rows = read_rows(data, form, tables)
    _tell_reading(rows, callbacks)
    columns = find_columns(
        rows,
        text=options.text_column,
        pair=options.pair_column,
        label=options.label_column,
        weight=options.weight_column,
    )
    report_columns(columns, callbacks)
    space = detect_labels(rows, columns, options.task)
    if (doubt := label_doubt(rows, columns, options.task, space)) is not None:
        callbacks.warning(doubt)
    shown = ", ".join(map(_shown_name, space.names[:8])) + (", ..." if len(space.names) > 8 else "")
    noun = "output" if space.task == "regression" else "label"
    callbacks.note(f"task: {space.task}, {len(space.names)} {noun}{'s' if len(space.names) > 1 else ''}: {shown}")
    for doubt in label_doubts(rows, columns, space):
        callbacks.warning(doubt)
    training, num_empty = make_examples(rows, columns, space, options.missing_labels)
    if options.missing_labels == "error" and (num_without := num_empty_labels(training)):
        callbacks.note(f"{no_label_text(num_without)}; --missing-labels drop leaves them out")
    training = weighted(training, callbacks.note)
    training = draw(training, options.limit, options.seed)
    fingerprint = rows.fingerprint
    evaluation: Examples | None = None
    if eval_data is not None:
        eval_form = None if eval_data in tables else fitting(form, eval_data)
        eval_rows = read_rows(eval_data, eval_form, tables)
        _tell_reading(eval_rows, callbacks)
        same = find_columns(eval_rows, text=columns.text, pair=columns.pair, label=",".join(columns.labels))
        same = dataclasses.replace(same, pair=columns.pair)  # one that is there by its name is not read in training
        evaluation, num_eval_empty = make_examples(eval_rows, same, space, options.missing_labels)
        num_empty += num_eval_empty
        fingerprint = f"{fingerprint}+{eval_rows.fingerprint}"
    elif options.eval_split > 0:
        training, evaluation = split_examples(training, options.eval_split, options.seed)
    for doubt in data_doubts(training, evaluation, space.names):
        callbacks.warning(doubt)
    return space, training, evaluation, fingerprint, num_empty


def _shown_name(name: str) -> str:
    """A label as it is listed: in quotation marks where its ends would not be seen."""
    return repr(name) if "," in name or name != name.strip() else name


def _tell_reading(rows: Rows, callbacks: Callbacks) -> None:
    """Says what was decided about the files of `rows`, and what is doubtful."""
    for warning in rows.warnings:
        callbacks.warning(warning)
    for note in rows.notes:
        callbacks.note(note)


def report_columns(columns: Columns, callbacks: Callbacks) -> None:
    """Says which columns are read, why these, and what of it may be a mistake."""
    for line in describe_columns(columns):
        callbacks.note(line)
    for doubt in columns.doubts:
        callbacks.warning(doubt)


def _tokenized(
    examples: Examples, space: LabelSpace, encoder: Encoder, options: TrainOptions, callbacks: Callbacks, name: str
) -> Part:
    callbacks.stage(f"tokenising {len(examples):,} rows for {name}")
    tokens = tokenize(
        encoder,
        examples.texts,
        examples.pairs,
        progress=lambda done: callbacks.count(done, len(examples)),
        place=examples.place,
        warn=callbacks.warning,
    )
    return Part(examples=examples, tokens=tokens, targets_N=_in_order(examples, space))


def _in_order(examples: Examples, space: LabelSpace) -> np.ndarray:
    """Targets in the model's output order; those of examples are in the order of their own label space."""
    targets, own = examples.targets, examples.space
    assert targets is not None
    assert own is not None
    if space.task == "regression":
        by_column = targets.reshape(len(examples), -1).astype(np.float32)
        return by_column[:, [own.names.index(name) for name in space.names]]
    place: np.ndarray = np.array(
        [space.values[label] for label in sorted(own.values, key=lambda label: own.values[label])]
    )
    if space.task == "single_label":
        classes: np.ndarray = place[targets]
        return classes
    moved = np.zeros((len(examples), space.num_outputs), dtype=np.uint8)
    for column, output in enumerate(place):  # --label-map may give two labels one output
        moved[:, output] = np.maximum(moved[:, output], targets[:, column])
    return moved


def _check_metric(options: TrainOptions, task: Task) -> None:
    """Check before anything is tokenised that --metric-for-best-model names a metric of this task."""
    if options.metric_for_best_model is None:
        return
    names = ["loss", *task.accumulator().names]
    if options.metric_for_best_model.removeprefix("eval_") not in names:
        raise OptionError(
            f"--metric-for-best-model {options.metric_for_best_model!r} is no metric of {task.space.task}",
            hint="one of " + ", ".join(names),
        )


def _report(training: Part, evaluation: Part | None, max_length: int, num_empty: int, *, given: bool) -> dict[str, Any]:
    """Summary of the data. given: whether the user chose max_length.

    `prepare` adds the SHA-256 of files that decide what is learned and can change.
    """
    lengths = training.tokens.lengths
    quantiles = {f"p{p}": int(np.percentile(lengths, p)) for p in (0, 5, 25, 50, 75, 95, 100)}
    read = [part.examples.rows for part in (training, evaluation) if part is not None]
    return {
        **describe(training.examples, evaluation.examples if evaluation else None, num_empty),
        "max_length": max_length,
        "max_length_given": given,
        "token_lengths": {"mean": round(float(lengths.mean()), 1), **quantiles},
        "truncated_share": training.tokens.num_truncated / len(lengths),
        "truncated_rows": training.tokens.num_truncated,
        "notes": list(dict.fromkeys(said for rows in read for said in (*rows.warnings, *rows.notes))),
    }
