"""Everything before the first step: rows, labels, model files and tokens, each checked before the next one costs time.

Mistakes end here, with one line, before weights are loaded or a GPU is touched.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from brimful.core.callbacks import Callbacks
from brimful.core.errors import ModelError, OptionError, printable
from brimful.core.options.train import TrainOptions
from brimful.core.phases import Phases
from brimful.core.records import (
    ADAPTER_FILE,
    CHOSEN_ROWS,
    TOKENIZER,
    LabelSpace,
    Learning,
    Run,
    TargetScale,
    TrainedInputs,
)
from brimful.data.batches.batch import Sampler
from brimful.data.labels.columns import text_parts
from brimful.data.labels.examples import (
    Examples,
    describe,
)
from brimful.data.readers.in_memory import Tables
from brimful.data.tokens.augment import Transform, load_transform, try_transform
from brimful.data.tokens.encoder import OTHER_TOKENIZER, Encoder, Tokens, tokenize
from brimful.engine.learning import choose_learning, learning_of, steps_text
from brimful.engine.read_examples import ReadExamples, read_examples
from brimful.engine.sequence_lengths import longest_sequence
from brimful.engine.target_scale import choose_scale, scale_text, spread_doubt
from brimful.models.hub.adapters import config_file
from brimful.models.hub.inspection import ModelFacts, inspect_model, load_tokenizer, tokenizer_files
from brimful.models.hub.label_alignment import Alignment, align_labels
from brimful.models.packed.packed_forward import has_token_types
from brimful.tasks.label_rows import LabelRows, Targets
from brimful.tasks.task import Task, make_task

#: Rows that a transform is tried on before anything is made.
_TRIED_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Part:
    """Examples of training or of evaluation, tokenised."""

    examples: Examples
    tokens: Tokens
    targets_N: Targets


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
    transform = _transform(options, callbacks)
    callbacks.stage(f"reading {options.data}")
    read = read_examples(options, callbacks, tables or {})
    alignment = align_labels(read.space, facts, label_map=options.label_map, new_head=options.new_head)
    sha256 = _hashes(options, facts) | {CHOSEN_ROWS: _sha256_of_rows(read)}
    if check is not None:
        check(space=alignment.space, fingerprint=read.fingerprint, max_length=max_length, sha256=sha256)
    _try_transform(transform, encoder, options.seed, read.training)
    callbacks.note(f"head: {'new and untrained' if alignment.head == 'new' else 'kept'} ({alignment.reason})")
    order = Sampler(num_samples=len(read.training), batch_size=options.batch_size, seed=options.seed)
    length = _run_length(options, facts, alignment, order, before, callbacks)
    task, scale = _task(options, facts, alignment, read, before, callbacks)
    training, evaluation = _parts(read, alignment.space, encoder, phases or Phases(), callbacks)
    report = _report(training, evaluation, max_length, read.num_empty, given=options.max_length is not None)
    in_memory = [name for name in (options.data, options.eval_data) if name in (tables or {})]
    report |= {"sha256": sha256, "in_memory": in_memory}
    prepared = Prepared(
        facts=facts,
        alignment=alignment,
        tokenizer=tokenizer,
        encoder=encoder,
        task=task,
        training=training,
        evaluation=evaluation,
        max_length=max_length,
        order=order,
        num_steps=length.num_steps,
        num_batches=length.num_batches,
        learning=length.learning,
        target_scale=scale,
        data_fingerprint=read.fingerprint,
        report=report,
    )
    report["inputs"] = dataclasses.asdict(prepared.inputs) | {"label_columns": list(prepared.inputs.label_columns)}
    callbacks.data(report)
    return prepared


def _transform(options: TrainOptions, callbacks: Callbacks) -> Transform | None:
    """Return the function of --transform, None without one. Raises: OptionError if it cannot be loaded."""
    if options.transform is not None:
        found = load_transform(options.transform)
        callbacks.note(f"transform: {printable(options.transform)} is applied to each text in each epoch")
        return found
    if options.num_workers is not None:
        callbacks.warning(
            "--num-workers has no effect without --transform: batches are made ahead of the step (--prefetch)"
        )
    return None


def _try_transform(transform: Transform | None, encoder: Encoder, seed: int, examples: Examples) -> None:
    """Call a transform, if there is one, for the first rows. Raises: DataError for the first one that it fails for."""
    if transform is None:
        return
    first = examples.filter(np.arange(len(examples)) < _TRIED_ROWS)
    pairs = None if first.pairs is None else first.pairs.to_pylist()
    try_transform(transform, encoder, seed, first.texts.to_pylist(), pairs, first.place)


def _task(
    options: TrainOptions, facts: ModelFacts, alignment: Alignment, read: ReadExamples, before: Run | None,
    callbacks: Callbacks,
) -> tuple[Task, TargetScale | None]:  # fmt: skip
    """The task of the rows that were read, and the unit of its targets, said where one was chosen."""
    targets_N = _in_order(read.training, alignment.space)
    scale = choose_scale(options, alignment, facts, targets_N, before)
    if scale is not None:
        callbacks.note(scale_text(scale))
    if (doubt := spread_doubt(alignment.space, targets_N)) is not None:
        callbacks.warning(doubt)
    weighing = (options.class_weights, options.label_smoothing_factor, read.training.weights)
    task = make_task(alignment.space, targets_N, *weighing, scale)
    if read.evaluation is not None:
        _check_metric(options, task)
    return task, scale


@dataclass(frozen=True, kw_only=True)
class _RunLength:
    """Steps of a run, its batches where they are what is counted, and its learning rate."""

    num_steps: int
    num_batches: int | None
    learning: Learning


def _run_length(
    options: TrainOptions, facts: ModelFacts, alignment: Alignment, order: Sampler, before: Run | None,
    callbacks: Callbacks,
) -> _RunLength:  # fmt: skip
    """Choose epochs, learning rate and warm-up where they were not given, and say so."""
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
    counts = {"num_rows": order.num_samples, "num_steps": num_steps, "per_epoch": order.batches_per_epoch}
    callbacks.note(steps_text(options, learning, **counts))
    return _RunLength(num_steps=num_steps, num_batches=num_batches, learning=learning)


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
    if options.peft is not None and (path := config_file(options.peft)) is not None:
        files[ADAPTER_FILE] = path
    if options.transform is not None:
        with suppress(TypeError):  # not written in Python
            files["file of --transform"] = Path(inspect.getsourcefile(load_transform(options.transform)) or "")
    found = {name: _sha256(path) for name, path in files.items() if path.is_file()}
    return found | {TOKENIZER: _sha256_of_all(_files_of_tokens(facts.folder))}


def _files_of_tokens(folder: Path) -> list[Path]:
    """Files that decide what tokens a text has."""
    beside = [folder / name for name in ("special_tokens_map.json", "added_tokens.json")]
    return [*tokenizer_files(folder), *(path for path in beside if path.is_file())]


def _sha256_of_all(paths: Sequence[Path]) -> str:
    """One hash of the names and contents of files."""
    said = "".join(f"{path.name} {_sha256(path)}\n" for path in paths)
    return hashlib.sha256(said.encode()).hexdigest()


def _sha256_of_rows(read: ReadExamples) -> str:
    """One hash of the columns that are read, and of the numbers of the rows."""
    columns = read.training.columns
    found = hashlib.sha256(repr((columns.text, columns.pair, columns.labels)).encode())
    for examples in (read.training, read.evaluation):
        numbers = np.empty(0, np.int64) if examples is None else examples.row_numbers
        found.update(len(numbers).to_bytes(8, "little") + np.ascontiguousarray(numbers).tobytes())
    return found.hexdigest()


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


def _parts(
    read: ReadExamples, space: LabelSpace, encoder: Encoder, phases: Phases, callbacks: Callbacks
) -> tuple[Part, Part | None]:
    """Tokenise the rows of training, and those of evaluation where there are any."""
    with phases.during("tokens"), phases.pieces():
        training = _tokenized(read.training, space, encoder, phases, callbacks, "training")
        if read.evaluation is None:
            return training, None
        return training, _tokenized(read.evaluation, space, encoder, phases, callbacks, "evaluation")


def _tokenized(
    examples: Examples, space: LabelSpace, encoder: Encoder, phases: Phases, callbacks: Callbacks, name: str
) -> Part:
    callbacks.stage(f"tokenising {len(examples):,} rows for {name}")

    def progress(done: int) -> None:
        phases.end_piece()
        callbacks.count(done, len(examples))

    tokens = tokenize(
        encoder,
        examples.texts,
        examples.pairs,
        progress=progress,
        place=examples.place,
        warn=callbacks.warning,
    )
    return Part(examples=examples, tokens=tokens, targets_N=_in_order(examples, space))


def _in_order(examples: Examples, space: LabelSpace) -> Targets:
    """Targets in the model's output order; those of examples are in the order of their own label space."""
    targets, own = examples.targets, examples.space
    assert targets is not None
    assert own is not None
    place: np.ndarray = np.array(
        [space.values[label] for label in sorted(own.values, key=lambda label: own.values[label])]
    )
    if isinstance(targets, LabelRows):
        return targets.renamed(place, space.num_outputs)  # --label-map may give two labels one output
    if space.task == "regression":
        by_column = targets.reshape(len(examples), -1).astype(np.float32)
        return by_column[:, [own.names.index(name) for name in space.names]]
    classes: np.ndarray = place[targets]
    return classes


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

    `prepare` adds the SHA-256 of files that decide what is learned and can change, and the names of data in memory.
    """
    lengths = training.tokens.lengths
    quantiles = {f"p{p}": int(np.percentile(lengths, p)) for p in (0, 5, 25, 50, 75, 95, 100)}
    read = [part.examples.rows for part in (training, evaluation) if part is not None]
    columns = text_parts(training.examples.rows.table.column_names, training.examples.columns.text)
    return {
        **describe(training.examples, evaluation.examples if evaluation else None, num_empty),
        "max_length": max_length,
        "max_length_given": given,
        "joined_columns": list(columns) if len(columns) > 1 else [],
        "token_lengths": {"mean": round(float(lengths.mean()), 1), **quantiles},
        "truncated_share": training.tokens.num_truncated / len(lengths),
        "truncated_rows": training.tokens.num_truncated,
        "notes": list(dict.fromkeys(said for rows in read for said in (*rows.warnings, *rows.notes))),
    }
