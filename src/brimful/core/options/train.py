"""Options of `train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from brimful.core.errors import OptionError
from brimful.core.options.checks import (
    check_checkpointing,
    check_gpus,
    check_header,
    check_launcher,
    check_numbers,
    check_positive,
    check_sharding,
    check_size,
    check_streaming,
    check_tensor_parallel,
    check_text_format,
    check_types,
    check_update,
    effective_batch,
    flag,
)
from brimful.core.options.choices import (
    AllocatorChoice,
    DeviceChoice,
    LauncherChoice,
    MissingLabels,
    OptimizerChoice,
    PrecisionChoice,
    ScheduleChoice,
    ShardingChoice,
    TaskChoice,
    TrainingExecution,
)
from brimful.core.trackers import tracker_names
from brimful.core.trained_part import check_trained_part

#: Numbers that can be given as `auto`, which is the default.
CAN_BE_AUTO = ("learning_rate", "num_train_epochs")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """One fine-tuning run. Names and defaults are those of transformers' TrainingArguments where it has them."""

    data: str
    """Rows to train on: CSV, TSV, JSON, JSONL, fastText (.txt), Parquet (each also .gz or .zst), Excel, Arrow, a folder
    saved by `datasets`, a folder with one sub-folder of .txt files per class, a folder of splits (train, test), a glob
    of these, or a hub data set name."""
    model: str
    """Any sequence-classification or base model of Hugging Face: a folder, or a hub name."""
    output: str
    """Folder of the run: model/, run.json, events.jsonl, checkpoints/."""

    eval_data: str | None = None
    """Rows to evaluate on, in any of the forms of DATA. Default: a split of DATA."""
    eval_split: float = 0.1
    """Share of DATA held out for evaluation, stratified by label. 0 trains on every row. Ignored with --eval-data."""
    text_column: str | None = None
    """Column with the text, or several separated by commas, whose texts are joined by line breaks. Default: found by
    name and type."""
    pair_column: str | None = None
    """Column with the second text of a pair. Default: found by name."""
    label_column: str | None = None
    """Column with the label, or several separated by commas, one per output. Default: found by name."""
    weight_column: str | None = None
    """Column with the weight of each training row in the loss, above 0; rows of weight 0 are left out. Times the weight
    of its class, if both are given. Default: all count alike."""
    header: bool | None = None
    """Take the first line of CSV and TSV files as column names. --no-header: it is a row, and columns are called
    column_1, column_2, ... Default: names, with a warning if it looks like a row."""
    column_names: str | None = None
    """Names of the columns of CSV and TSV files without a header, separated by commas; implies --no-header."""
    delimiter: str | None = None
    """Character between the columns of CSV and .txt files, or `tab`. Default: the one that the first line shows."""
    encoding: str | None = None
    """Encoding of text files, as windows-1252 or gb18030. Default: UTF-8; bytes that are not are read as windows-1252,
    and counted."""
    sheet: str | None = None
    """Sheet of Excel files. Default: the first with a table, of the columns asked for or of usual names."""
    task: TaskChoice = "auto"
    """Kind of task. auto: inferred from the label column, and printed."""
    missing_labels: MissingLabels = "error"
    """Rows without a label. error: name the first, and stop; drop: leave them out, and count them; none: in
    multi_label, rows that no label is true of."""
    limit: int | None = None
    """Use only so many rows of DATA, drawn by --seed, to try things out."""
    target_scaling: Literal["auto", "off"] = "auto"
    """auto: train a new head for numbers on targets with a mean of 0 and a spread of 1 (one for all columns), where
    theirs are far from that; metrics and the saved model are in your units. off: on the targets as they are."""
    label_map: str | None = None
    """Data label to model label, for a head with other names: `pos=POSITIVE,neg=NEGATIVE`, or a JSON file."""
    new_head: bool = False
    """Replace the model's classification head by a new one for the labels in the data."""
    max_length: int | None = None
    """Longest sequence in tokens; longer ones are truncated, and counted. Default: the model's limit, at most 512."""

    peft: str | None = None
    """Train an adapter of the peft library: `lora`, `rslora`, `dora`, `ia3`, `loha`, ... with peft's own settings, or a
    peft config file (adapter_config.json). model/ then holds the adapter. The head is trained too."""
    lora_r: int | None = None
    """Rank of the adapter's matrices. Default: peft's, 8."""
    lora_alpha: float | None = None
    """Scale of the adapter, divided by its rank. Default: peft's, 8."""
    lora_dropout: float | None = None
    """Dropout of the adapter's inputs. Default: peft's, 0."""
    lora_target_modules: str | None = None
    """Modules that are given an adapter, as ends of names separated by commas, `all-linear`, or a regular expression
    after `regex:`. Default: peft's for this type of model, all-linear where it has none."""
    lora_modules_to_save: str | None = None
    """Modules that are trained whole besides the head and are saved with the adapter, separated by commas."""
    merge: bool = False
    """Merge the adapter into the model at the end: model/ is then a plain model."""
    freeze: str | None = None
    """Weights that are not trained: `all-but-head`, or `embeddings`, `layers 0-5`, separated by commas, or parameters
    by a regular expression after `regex:`."""

    batch_size: int = 32
    """Effective batch size: samples per optimizer step, however it is split into micro-batches."""
    per_device_batch_size: int | None = None
    """Most rows of a micro-batch; the effective batch is this times --gradient-accumulation-steps, of all processes
    together (transformers multiplies by their number). Also accepted as transformers' --per-device-train-batch-size.
    Default: as many as --token-budget holds."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches of --per-device-batch-size rows in an effective batch. Default: 1 with it."""
    learning_rate: float | None = None
    """Peak learning rate. Default, and `auto`: chosen by the model's width and by what is trained, with a warm-up."""
    num_train_epochs: float | None = None
    """Passes over the training rows. Default, and `auto`: 3, and more of few rows, until there are enough steps."""
    max_steps: int | None = None
    """Applied optimizer steps to train for; overrides --num-train-epochs."""
    warmup_steps: int | None = None
    """Steps of linear warm-up. Default: 0; of a chosen learning rate a tenth of all."""
    warmup_ratio: float | None = None
    """Warm-up as a share of all steps; not together with --warmup-steps."""
    lr_scheduler_type: Literal["auto", ScheduleChoice] = "auto"
    """Learning-rate schedule after warm-up. auto: linear; constant_with_warmup for schedule-free optimizers, which
    average weights instead."""
    optim: OptimizerChoice = "adamw_torch_fused"
    """Optimizer, by transformers' names. All but AdamW and SGD change what is learned, or how states are rounded.
    schedule_free_...: without --lr-scheduler-type, the learning rate stays what it is after warm-up."""
    optim_args: str | None = None
    """The optimizer's own settings, as transformers takes them: `momentum=0.9` for sgd. For adamw_torch `foreach=False`
    (a loop over weights), `foreach=True` or `fused=True`: torch's own update, not ours."""
    weight_decay: float = 0.0
    """Decoupled weight decay; never on biases and norms."""
    adam_beta1: float = 0.9
    """AdamW's first decay."""
    adam_beta2: float = 0.999
    """AdamW's second decay."""
    adam_epsilon: float = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: float = 1.0
    """Gradient clipping by global norm; 0 turns it off."""
    optimizer_in_backward: bool = False
    """Update each weight as soon as its gradient is complete, and free the gradient: AdamW, and batches of a single
    micro-batch. Needs --max-grad-norm 0, or --late-clipping."""
    late_clipping: bool = False
    """With --optimizer-in-backward: clip by the norm of the step before; the first step is not clipped."""
    optimizer_offload: bool = False
    """Keep AdamW's states in host memory, and copy them beside the update."""
    optimizer_state_dtype: Literal["fp32", "bf16", "8bit"] = "fp32"
    """AdamW's states. bf16: half the memory, rounded by chance, so that small updates arrive in the mean. 8bit: those
    of Linear weights in 8 bits, with a scale for each 256; those of embeddings and of all else stay fp32."""
    weight_dtype: Literal["fp32", "bf16"] = "fp32"
    """Weights that AdamW updates. bf16: those of Linear layers have no fp32 masters, and are rounded by chance. Needs
    products in bf16."""
    label_smoothing_factor: float = 0.0
    """Label smoothing, for single_label and multi_label."""
    class_weights: str | None = None
    """`balanced`, or weights by label as `spam=3,ham=1`: of the class, or in multi-label of its positives."""
    seed: int = 42
    """Seed of sample order, data split, new head and dropout."""

    eval_steps: int | None = None
    """Applied steps between evaluations. Default: after each epoch."""
    save_steps: int | None = None
    """Applied steps between checkpoints. Default: after each epoch."""
    save_total_limit: int = 2
    """Complete checkpoints to keep, besides the best one."""
    logging_steps: int = 10
    """Applied steps between logged lines; the first and the last step have one, too."""
    metric_for_best_model: str | None = None
    """Metric that picks the saved model and ends training early, e.g. f1_macro or loss. Default: the last model."""
    early_stopping_patience: int | None = None
    """Stop after this many evaluations without improvement of --metric-for-best-model."""
    baselines: bool = True
    """At the end, fit a linear model of the words in a second or two and show its metrics beside the model's."""
    report: str | None = None
    """File for an HTML report of the run, one page that needs no network; brimful report makes it at any time."""
    push_to_hub: str | None = None
    """Repository of the Hugging Face hub that the saved model is uploaded to, as my-name/my-model; if it is not there,
    a private one is made. Needs a login (`hf auth login`)."""

    precision: PrecisionChoice = "auto"
    """Precision of matrix products; weights, gradients, optimizer, norms and loss stay fp32.
    auto: bf16 on a GPU that has it, fp32 elsewhere. fp8: bf16, and fp8 for the products of fused layers that a
    measurement shows to be faster; needs compute capability 9.0 (Hopper)."""
    device: DeviceChoice = "auto"
    """Device to run on. auto: a GPU if there is one."""
    deterministic: bool = False
    """Give the same bits for the same seed on a GPU; somewhat slower."""
    packing: Literal["auto", "off"] = "auto"
    """auto: run packed, without padding, if the equivalence check passes on this model. off: padded batches."""
    token_budget: int | None = None
    """Most tokens of a micro-batch; halved where memory runs out. Default: chosen from the data's lengths and the
    device."""
    gradient_checkpointing: str = "none"
    """Activations that are computed again in the backward pass instead of being kept: `none`, those of all layers
    (`full`) or of every N-th (`every-N`), or `selective`: of layers and parts of layers, as cheaply as fits in
    --activation-memory, as little as can be without it. `offload`: they wait in host memory. Less memory, the same
    gradient."""
    activation_memory: str | None = None
    """Most memory of activations of a micro-batch, as 4GB, for --gradient-checkpointing selective or offload."""
    execution: TrainingExecution = "auto"
    """Launch mode on a GPU. eager: one kernel after another; fused: the same, of layers on fused kernels; captured:
    CUDA graphs; compiled: CUDA graphs of compiled layers. auto: captured, or compiled if the run is long enough to save
    time; eager where graphs do not work, or fused where weights in parts are in host memory."""
    stream_weights: Literal["none", "host", "disk"] = "none"
    """Keep weights of layers, their gradients and AdamW's states in host memory, or in files on a fast disk, and bring
    each layer's to the device for its turn; layers are computed again in the backward pass. For models that do not
    fit."""
    stream_folder: str | None = None
    """Folder of the files of --stream-weights disk. Default: the system's for temporary files."""
    memory_limit: str | None = None
    """Most memory of the process on a GPU, as 8GB or 7.5GiB: it behaves as a smaller one. Default: all of it."""
    allocator: AllocatorChoice = "default"
    """Segments that torch takes from a GPU's driver. expandable: they grow, and fragment less."""
    transform: str | None = None
    """Function applied to each text at each epoch, in worker processes: `file.py:function` or `module:function`,
    called with the text and a random.Random seeded by seed, epoch and sample."""
    num_workers: int | None = None
    """Worker processes for --transform. Default: one per core, at most 8."""
    gpus: str | None = None
    """GPUs of this machine to train on together: a number, or all. Default: one; under torchrun, accelerate launch or
    srun as many processes as they start."""
    launcher: LauncherChoice = "none"
    """ray: start the processes as workers of Ray Train, on the cluster of RAY_ADDRESS or on this machine; needs
    brimful[ray]."""
    num_processes: int | None = None
    """With --launcher ray: processes to start, each with a GPU unless --device is cpu. Default: 1."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Gradients on their way between several processes. bf16: half the bytes; they are added up in fp32, and rounded
    twice."""
    peer_copies: bool | None = None
    """Have copy engines move gradients and weights between the GPUs of one host, and not NCCL's kernels, which take
    multiprocessors from the model: 2 to 10 % more of two H100s' rate. For AdamW in fp32 without --memory-limit.
    Default: where NVLink joins the GPUs, and each process sees all of them. Asked for: copy, or end with an error.
    --no-peer-copies: by NCCL."""
    sharding: ShardingChoice = "auto"
    """Parts that each of several processes keeps alone: none; of the optimizer's states; of gradients, too; of weights,
    too, with --optimizer-offload in host memory; deepspeed: of weights, by its ZeRO-3, for --offload-folder; needs
    brimful[deepspeed]. Sums and updates are those of one process. auto: what fits each GPU, of ours."""
    offload_folder: str | None = None
    """Folder on an NVMe disk for weights in fp32 and states of --sharding deepspeed. Default: none, they are in
    memory."""
    tensor_parallel: int = 1
    """Processes that have one model's weights together, cut by transformers' own plan for the model: each computes a
    part of every layer, on the same rows. The number of processes is a multiple of it; rows are shared among groups."""
    hang_timeout: float = 8.0
    """Seconds in a step or a window of an evaluation, with several processes, after which one that does not get on is
    taken to hang and all are ended; ten of the slowest so far, where these take longer; ten times as long for a batch
    that goes through a --transform. Compiling and all other work have limits of their own."""
    prefetch: int | None = None
    """Batches that a thread makes and sends to the device ahead of the step. More help where a --transform takes uneven
    time. Default: 3; none for CUDA graphs on one GPU without a --transform: batches are made between two launches."""

    resume: bool = False
    """Resume from the newest complete checkpoint in the output folder, or start if there is none."""
    dry_run: bool = False
    """Print what would run, and stop."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model."""
    allow_pickle: bool = False
    """Load weights that exist only as a pickle (pytorch_model.bin)."""
    report_to: str = "none"
    """Send the log to these trackers too: tensorboard, wandb, mlflow, trackio, separated by commas."""
    quiet: bool = False
    """Print warnings and errors alone on stderr."""
    json: bool = False
    """Print one JSON document on stdout at the end, and nothing else there."""

    def __post_init__(self) -> None:
        for name in CAN_BE_AUTO:
            if getattr(self, name) == "auto":
                object.__setattr__(self, name, None)
        check_types(self)
        if self.lr_scheduler_type == "auto":
            free = self.optim.startswith("schedule_free")
            object.__setattr__(self, "lr_scheduler_type", "constant_with_warmup" if free else "linear")
        check_header(self.header, self.column_names)
        check_text_format(self.delimiter, self.encoding)
        check_size(self, "memory_limit")
        check_size(self, "activation_memory")
        check_positive(self, "per_device_batch_size", "gradient_accumulation_steps", "prefetch")
        check_gpus(self.gpus, self.device)
        check_launcher(self)
        tracker_names(self.report_to)
        object.__setattr__(self, "batch_size", effective_batch(self, TrainOptions.batch_size))
        check_trained_part(self)
        check_positive(self, "batch_size", "num_train_epochs", "learning_rate", "save_total_limit", "logging_steps")
        check_positive(self, "max_steps", "eval_steps", "save_steps", "max_length", "token_budget", "num_workers")
        check_positive(self, "hang_timeout", "early_stopping_patience", "adam_epsilon", "limit")
        not_negative = ("weight_decay", "max_grad_norm", "warmup_steps", "seed")
        check_numbers(self, not_negative, lambda value: 0 <= value < float("inf"), "finite and at least 0")
        below_one = ("adam_beta1", "adam_beta2", "label_smoothing_factor", "eval_split")
        check_numbers(self, below_one, lambda value: 0 <= value < 1, "at least 0 and below 1")
        check_numbers(self, ("seed",), lambda value: value < 1 << 63, "below 2^63")
        check_numbers(self, ("warmup_ratio",), lambda value: 0 <= value <= 1, "between 0 and 1")
        check_checkpointing(self)
        check_update(self)
        check_sharding(self)
        check_tensor_parallel(self)
        check_streaming(self)
        if self.warmup_ratio is not None and self.warmup_steps is not None:
            raise OptionError("--warmup-ratio and --warmup-steps are both given", hint="give one of them")
        if self.early_stopping_patience is not None and self.metric_for_best_model is None:
            raise OptionError(
                "--early-stopping-patience needs a metric to watch",
                hint="add --metric-for-best-model loss, or accuracy, f1_macro, ...",
            )
        evaluated = [name for name in ("metric_for_best_model", "eval_steps") if getattr(self, name) is not None]
        if evaluated and self.eval_data is None and self.eval_split == 0:
            raise OptionError(
                f"{flag(evaluated[0])} needs rows to evaluate on", hint="give --eval-data, or an --eval-split above 0"
            )


#: Fields that may differ on --resume: they change nothing that is learned but its rounding, which is said, or are
#: compared by what they lead to: data by content, the task by the labels, the longest sequence in tokens. How long a
#: run is may change too.
NOT_PART_OF_THE_RUN = frozenset(
    {"data", "eval_data", "header", "column_names", "delimiter", "encoding", "sheet", "output", "resume", "dry_run"}
    | {"json", "report_to", "num_workers", "save_total_limit", "save_steps", "logging_steps", "task", "max_length"}
    | {"device", "execution", "packing", "token_budget", "gradient_checkpointing", "deterministic"}
    | {"trust_remote_code", "allow_pickle", "num_train_epochs", "max_steps"}
    | {"baselines", "report", "quiet", "push_to_hub", "gpus", "reduce_dtype", "sharding", "offload_folder"}
    | {"launcher", "num_processes", "tensor_parallel"}
    | {"memory_limit", "activation_memory", "allocator", "prefetch", "hang_timeout", "peer_copies"}
    | {"optimizer_offload", "optimizer_in_backward", "stream_weights", "stream_folder"}
    | {"per_device_batch_size", "gradient_accumulation_steps"}
)


#: Fields that decide which rows and columns are read. On --resume what they lead to is compared, once it is read.
CHOICE_OF_ROWS = frozenset(
    {"text_column", "pair_column", "label_column", "eval_split", "missing_labels", "limit"}
)  # fmt: skip


def differences(before: Mapping[str, object], now: TrainOptions, *, alike: Collection[str] = ()) -> list[str]:
    """Options that differ from those a run was started with, as `--seed was 1, is 2`, in the order of the fields.

    alike: names of those that mean the same, whatever they say.
    """
    free = NOT_PART_OF_THE_RUN | CHOICE_OF_ROWS | frozenset(alike)
    if now.metric_for_best_model is None:  # evaluations pick no model then
        free = free | {"eval_steps"}
    return _differences(before, now, [field for field in dataclasses.fields(now) if field.name not in free])


def differences_in_rows(before: Mapping[str, object], now: TrainOptions) -> list[str]:
    """As `differences`, of the options that decide which rows and columns are read."""
    return _differences(before, now, [field for field in dataclasses.fields(now) if field.name in CHOICE_OF_ROWS])


def _differences(
    before: Mapping[str, object], now: TrainOptions, fields: Iterable[dataclasses.Field[Any]]
) -> list[str]:
    pairs = [(field.name, before.get(field.name, field.default), getattr(now, field.name)) for field in fields]
    return [f"{flag(name)} was {was}, is {value}" for name, was, value in pairs if was != value]
