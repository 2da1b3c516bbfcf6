"""Records: frozen, keyword-only dataclasses, JSON both ways. Unknown is None."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

TaskName = Literal["single_label", "multi_label", "regression"]
Arithmetic = Literal["exact", "rounding", "training"]


@dataclass(frozen=True, kw_only=True)
class LabelSpace:
    """Task and output names of a classifier.

    names: output i is called names[i]. For regression, the name of the label column(s).
    values: label in the data, as text -> output index. Empty for regression and zero-shot.
    """

    task: TaskName
    names: tuple[str, ...]
    values: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_outputs(self) -> int:
        return len(self.names)


@dataclass(frozen=True, kw_only=True)
class TrainedInputs:
    """The inputs that a classifier was trained on, saved beside its weights and read where it is used.

    text_column, pair_column, label_columns: names in the training data; pair_column is None for single texts.
    max_length: longest sequence in tokens.
    """

    text_column: str
    pair_column: str | None
    label_columns: tuple[str, ...]
    max_length: int
    schema: int = 1


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Facts of one GPU. total_bytes by the driver; compute_capability such as (9, 0)."""

    name: str
    total_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts of the machine a run was made on."""

    cpu: str | None
    num_cores: int | None
    memory_bytes: int | None
    gpus: tuple[Gpu, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Lever:
    """One choice of how to run, its effect on the arithmetic, and its reason.

    source: of the method, such as a paper; None in records of versions that did not keep it.
    """

    name: str
    value: str
    arithmetic: Arithmetic
    reason: str
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every lever of a run with its reason. The options hold what is learned."""

    device: str
    levers: tuple[Lever, ...]

    def value(self, name: str) -> str | None:
        """Value of the lever called `name`, None if the recipe has none."""
        return next((lever.value for lever in self.levers if lever.name == name), None)

    def with_note(self, name: str, note: str) -> Recipe:
        """Return the same with more to the reason of the lever called `name`."""
        levers = (replace(each, reason=f"{each.reason}; {note}") if each.name == name else each for each in self.levers)
        return replace(self, levers=tuple(levers))


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Learning rate and length of a training, as asked for or chosen.

    learning_rate: the peak. num_train_epochs: None where steps were asked for. num_warmup_steps: of linear warm-up.
    reason: of what was chosen; None where all was asked for.
    """

    learning_rate: float
    num_train_epochs: float | None
    num_warmup_steps: int
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class TargetScale:
    """Units that numbers are trained on: (target - center) / spread. centers: by output."""

    centers: tuple[float, ...]
    spread: float


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Highest memory of a run in bytes, and its parts. None: unknown.

    allocated, reserved: by torch on a GPU. nvml: the driver's highest reading of the process. resident: of the host,
    for runs on a CPU. components: sum up to `total`. On a GPU, weights, gradients, optimizer_states, activations,
    temporaries and workspaces (of cuBLAS) are those allocated at `moment`, the phase in which that was the most;
    unused: what torch held besides at its own peak; outside_torch: what the driver counted beyond that, most at once.
    On a CPU weights and optimizer_states that there were at the end, gradients that there were when resident memory was
    highest, and all_else. There are no gradients in it where that was before the first step, unless they outlive steps.
    """

    allocated: int | None = None
    reserved: int | None = None
    nvml: int | None = None
    resident: int | None = None
    total: int | None = None
    moment: str | None = None
    components: Mapping[str, int] = field(default_factory=dict)


#: Work that memory can run out in, and go on after.
Work = Literal["check", "capture", "step", "evaluation", "classification"]


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """Memory that ran out, and what the run went on with: the same work in smaller micro-batches.

    batch: number of the batch in training, from 1; None elsewhere. tokens_before, tokens_after: most tokens of a
    micro-batch. free_bytes: what could still be allocated, None where unknown. eager: whether nothing is captured from
    then on, since no graph fits.
    """

    where: Work
    batch: int | None
    tokens_before: int
    tokens_after: int
    free_bytes: int | None
    eager: bool = False


@dataclass(frozen=True, kw_only=True)
class Compilations:
    """Compilations and captures of a training process.

    traced: graphs traced by torch's compiler, retraced ones counted again. captured: CUDA graphs.
    last_traced, last_captured: batches consumed when the last of each was made; None if there was none.
    """

    traced: int = 0
    captured: int = 0
    last_traced: int | None = None
    last_captured: int | None = None


@dataclass(frozen=True, kw_only=True)
class FirstBatch:
    """Comparison of the step that runs with the plain model in fp32, on rows of the first batch, dropout off.

    passed: None where they could not be compared. reason: of that, or of a failure. loss, plain_loss: means over the
    rows. *_error: norm of the difference over the norm, of the rows' losses, of the whole gradient, and of the
    parameter that differs the most for its size. gradient_lost: what the plain model's gradient loses in the precision
    of the run, None in fp32. fallbacks: faster paths that were tried before and failed. num_left_out: rows that were to
    be compared too, and that memory did not suffice for.
    """

    num_rows: int
    num_tokens: int
    precision: str
    passed: bool | None = None
    reason: str | None = None
    loss: float | None = None
    plain_loss: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    gradient_lost: float | None = None
    worst_parameter: str | None = None
    worst_error: float | None = None
    fallbacks: tuple[str, ...] = ()
    num_left_out: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ProcessWork:
    """Work of one of several processes of a training, in its steps.

    device: GPU of its host, or CPU. steps_s: seconds in steps but the first. tokens_per_s: in these. waited_s: of
    these, waiting for other processes, as far as its host sees it. sent_s: in which gradients were on their way, those
    that come late waited for; hidden_s: of these, beside other work. Both are by the clock of a GPU, and None with
    weights in parts, which torch sends. peak_bytes: of the process, once it has made its steps. limit_bytes: that it
    may take, of --memory-limit or the GPU's; None on a CPU. None is also what a process has not said yet.
    """

    host: str
    device: str
    tokens: int
    samples: int
    steps_s: float | None = None
    waited_s: float | None = None
    tokens_per_s: float | None = None
    sent_s: float | None = None
    hidden_s: float | None = None
    peak_bytes: PeakMemory | None = None
    limit_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Work of several processes since the training, or its last part, began.

    imbalance: tokens of the process that has the most in a step, over the mean of all: 1 where all finish together.
    """

    imbalance: float
    each: tuple[ProcessWork, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Run:
    """A fine-tuning run: everything needed to repeat and to explain it. Stored as run.json in the run's folder.

    status: `planned` by --dry-run; `running` until the model is saved, then `finished`.
    metrics: of the saved model on the evaluation rows, by name; empty if there were none, None if not finite.
    baselines: metrics of simple models on the same rows, by name. findings: what stands out, in words; both are in
    evaluation.json too.
    steps: applied optimizer steps. skipped_steps: batches consumed without an update.
    train_s: seconds in the training loop, without loading, tokenising and evaluation.
    compilations: of the process that finished the run. phases_s: seconds of that process by phase, from its start until
    the model was saved (`core.phases`).
    input_wait_s: of that process, seconds in which its loop waited for a batch that was not ready; a GPU has work for
    two steps more.
    out_of_memory: each time that memory ran out, in order.
    packed: True, or False with the reason in `packed_reason`. first_batch: None in a dry run.
    processes: of that process, its own work and that of the others; None for one alone.
    learning: None in records of versions that chose nothing; the options hold it there. target_scale: None where
    targets are trained on as they are.
    """

    run: str
    status: Literal["planned", "running", "finished"]
    model: str
    options: Mapping[str, Any]
    command: str
    labels: LabelSpace
    recipe: Recipe
    machine: Machine
    data_fingerprint: str
    data: Mapping[str, Any]
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    baselines: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    steps: int = 0
    skipped_steps: int = 0
    train_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    peak_bytes: PeakMemory = field(default_factory=PeakMemory)
    compilations: Compilations = field(default_factory=Compilations)
    phases_s: Mapping[str, float] = field(default_factory=dict)
    input_wait_s: float | None = None
    out_of_memory: tuple[OutOfMemory, ...] = ()
    packed: bool = False
    packed_reason: str | None = None
    first_batch: FirstBatch | None = None
    learning: Learning | None = None
    target_scale: TargetScale | None = None
    processes: Processes | None = None
    schema: int = 1


T = TypeVar("T")

#: Names in `Run.data["sha256"]` of the file that --peft named, of all files of the tokenizer, and of the rows and
#: columns that are trained and evaluated on.
ADAPTER_FILE, TOKENIZER, CHOSEN_ROWS = "file of --peft", "model's tokenizer", "choice of rows"

#: Characters escaped besides those of JSON: controls, direction marks, line separators, half surrogate pairs (which a
#: file name can hold and UTF-8 cannot). They occur in strings only.
_OBEYED = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def to_json(record: Any) -> str:
    """A record as one JSON document, keys in the order of its fields."""
    return json_text(dataclasses.asdict(record), indent=2) + "\n"


def json_text(value: Any, *, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """Strict JSON that is safe to print: control characters are escaped, letters are not.

    Raises: ValueError for a number that JSON does not have.
    """
    text = _encoder(indent, default).encode(value)
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


@functools.lru_cache(maxsize=16)
def _encoder(indent: int | None, default: Callable[[Any], Any] | None) -> json.JSONEncoder:
    """Cached encoder: making one takes longer than encoding a row of results."""
    return json.JSONEncoder(indent=indent, ensure_ascii=False, allow_nan=False, default=default)


def from_json(kind: type[T], text: str) -> T:
    """Parse a record that `to_json` wrote. Unknown keys are dropped: a newer version wrote them.

    Raises: ValueError for text that is not JSON, KeyError or TypeError for a required field that is missing.
    """
    return cast(T, _build(kind, json.loads(text)))


def _build(kind: Any, value: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any or (value is None and type(None) in arguments):
        return value
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise TypeError(f"{getattr(kind, '__name__', kind)} is a JSON object, not {type(value).__name__}")
        hints = get_type_hints(kind)
        known = {f.name for f in dataclasses.fields(kind)}
        return cast(Any, kind)(**{name: _build(hints[name], item) for name, item in value.items() if name in known})
    if origin is tuple:
        kinds = [arguments[0]] * len(value) if arguments[-1:] == (Ellipsis,) else arguments
        return tuple(_build(k, item) for k, item in zip(kinds, value, strict=True))
    if origin is Mapping and dataclasses.is_dataclass(arguments[1]):
        return {name: _build(arguments[1], item) for name, item in value.items()}
    if origin is not None and type(None) in arguments:
        return _build(next(a for a in arguments if a is not type(None)), value)
    return value
