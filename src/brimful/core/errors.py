"""Every error a user can meet, in one tree.

    BrimfulError                 exit  what happened
    ├── InputError                2    something asked for cannot be done as asked
    │   ├── OptionError           2    a flag, a configuration key or an argument
    │   │   └── ArgumentError     2    one of an estimator or a pipeline: also a ValueError
    │   ├── DataError             2    rows, columns, labels, files of text
    │   ├── ModelError            2    weights, configuration, tokenizer
    │   │   ├── RowsRefusedError  2    rows that the model's own code cannot take
    │   │   └── HalfPrecisionError 2   the model's own code has no half precision
    │   ├── OutputError           2    the output folder, or the disk under it
    │   └── DeviceError           2    a device that is not there or cannot do it
    │       └── MeetingError      2    a process of several that does not come to the others
    ├── NonFiniteError            3    training stopped after too many non-finite steps
    ├── DiskFullError             4    the disk filled up while running; the last checkpoint is whole
    ├── CheckpointError           5    no checkpoint can be resumed from
    ├── MemoryFullError           6    memory ran out, and the work cannot be split any further
    └── RanksError                7    another process of the same training is gone, or stuck
    KeyboardInterrupt
    └── Interrupted             130/143  stopped by Ctrl-C or SIGTERM after saving

Every message is one line that says what, where and why; `hint` says what to do about it.

    try:
        brimful.train("reviews.csv", model="bert-base-uncased", output="run")
    except brimful.BrimfulError as error:
        print(error, error.hint)
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Sequence


def encodes(text: str) -> bool:
    """True if `text` can be written as UTF-8: half a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(text: object, limit: int = 120) -> str:
    """`text` on one line, control characters and line breaks escaped, cut to `limit` characters: safe in a terminal."""
    escaped = "".join(
        c
        if unicodedata.category(c)[0] != "C" and c not in "\u2028\u2029"
        else c.encode("unicode_escape", "backslashreplace").decode("ascii")
        for c in str(text)
    )
    return escaped if len(escaped) <= limit else escaped[: limit - 1] + "…"


def listed(names: Sequence[str], limit: int = 20) -> str:
    """`a, b and 3 more`: the first `limit` names."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def first_line(error: BaseException) -> str:
    """The message of another library, as one printable line."""
    return printable(str(error).partition("\n")[0] or type(error).__name__)


class BrimfulError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        hint: what to do about it, one line, or None.
        exit_code: what the command line returns.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint is not None:
            self.add_note(f"hint: {hint}")  # under a traceback


class InputError(BrimfulError):
    """Something asked for cannot be done as asked."""

    exit_code = 2


class OptionError(InputError):
    """A flag, a configuration key or an argument."""


class ArgumentError(OptionError, ValueError):
    """An argument of a call that has the form of another library's, whose callers expect a ValueError."""


class DataError(InputError):
    """Rows, columns, labels or files of text.

    Attributes:
        file: path as the user gave it, or None.
        row: 1-based number of the row within the file, header not counted, or None.
        value: the offending value, or None.
        message: without file, row and value.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        row: int | None = None,
        value: object = None,
        hint: str | None = None,
    ) -> None:
        place = [printable(file, 200)] if file else []
        place += [f"row {row}"] if row is not None else []
        said = f"{', '.join(place)}: {message}" if place else message
        if value is not None:
            said += f": '{printable(value)}'"
        super().__init__(said, hint=hint)
        self.message, self.file, self.row, self.value = message, file, row, value

    def at(self, file: str, row: int) -> DataError:
        """The same error about a row of a file."""
        return DataError(self.message, file=file, row=row, value=self.value, hint=self.hint)

    def in_column(self, name: str) -> DataError:
        """The same error about a column."""
        return DataError(f"column '{printable(name)}' {self.message}", value=self.value, hint=self.hint)


class ModelError(InputError):
    """Weights, configuration or tokenizer of a model."""


class RowsRefusedError(ModelError):
    """Rows that the model's own code cannot take: shorter or longer ones it may."""


class HalfPrecisionError(ModelError):
    """The model's own code does something that has no half precision on this device."""


class OutputError(InputError):
    """The output folder, or the disk under it."""


class DeviceError(InputError):
    """A device that is not there, or cannot do what was asked."""


class MeetingError(DeviceError):
    """A process of several that does not come to the others: it alone can say why."""


class NonFiniteError(BrimfulError):
    """Training stopped: too many steps in a row had a non-finite loss or gradient."""

    exit_code = 3


class DiskFullError(BrimfulError):
    """The disk filled up while running. Complete checkpoints are untouched."""

    exit_code = 4


class CheckpointError(BrimfulError):
    """No checkpoint can be resumed from."""

    exit_code = 5


class MemoryFullError(BrimfulError):
    """Memory ran out, and the work cannot be split into smaller pieces. What was saved and written is whole.

    resumable: whether the state of a training run is what it was before the batch that it ran out in.
    """

    exit_code = 6

    def __init__(self, message: str, *, resumable: bool = True, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.resumable = resumable


class RanksError(BrimfulError):
    """Another process of the same training is gone, or stuck.

    lost: its number, None if it is not known.
    """

    exit_code = 7

    def __init__(self, message: str, *, lost: int | None = None) -> None:
        super().__init__(
            message, hint="see what that process said, then start all again, with --resume where the command has it"
        )
        self.lost = lost


class Interrupted(KeyboardInterrupt):
    """Stopped by a signal after saving; `--resume` goes on. Exit code 128 + the signal's number.

    As of Ctrl-C anywhere in Python, it ends a loop that goes on after errors.
    """

    def __init__(self, message: str, *, signal_number: int = 2, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint, self.exit_code = hint, 128 + signal_number
        if hint is not None:
            self.add_note(f"hint: {hint}")


#: Names that options have elsewhere, or are called by habit.
_ALSO_CALLED = {
    **dict.fromkeys(("lr", "rate"), "learning_rate"),
    **dict.fromkeys(("epochs", "epoch", "num_epochs", "n_epochs"), "num_train_epochs"),
    **dict.fromkeys(("bs", "batch", "per_device_batch_size", "train_batch_size"), "batch_size"),
    "per_device_train_batch_size": "per_device_batch_size",
    **dict.fromkeys(("max_len", "max_seq_length", "max_seq_len", "seq_length", "length"), "max_length"),
    **dict.fromkeys(("dtype", "torch_dtype", "half", "amp", "mixed_precision"), "precision"),
    **dict.fromkeys(("output_dir", "out", "save", "out_dir", "predictions", "save_predictions"), "output"),
    **dict.fromkeys(("eval", "validation", "valid", "val", "dev", "test", "test_data", "eval_dataset"), "eval_data"),
    **dict.fromkeys(("label", "target", "labels_column", "y"), "label_column"),
    **dict.fromkeys(("text", "texts", "text_field"), "text_column"),
    **dict.fromkeys(("sample_weight", "sample_weights", "weights_column"), "weight_column"),
    **dict.fromkeys(("scheduler", "schedule", "lr_scheduler"), "lr_scheduler_type"),
    **dict.fromkeys(("warmup", "warmup_proportion"), "warmup_ratio"),
    **dict.fromkeys(("patience", "early_stopping"), "early_stopping_patience"),
    **dict.fromkeys(("optimizer", "optimiser"), "optim"),
    **dict.fromkeys(("weights", "class_weight"), "class_weights"),
    **dict.fromkeys(("workers", "num_proc", "n_jobs"), "num_workers"),
    **dict.fromkeys(("force", "replace"), "overwrite"),
    **dict.fromkeys(("sep", "separator"), "delimiter"),
    **dict.fromkeys(("names", "columns"), "column_names"),
    **dict.fromkeys(("n", "head", "max_rows", "max_samples", "max_train_samples"), "limit"),
    **dict.fromkeys(("cpu", "cuda"), "device"),
    **dict.fromkeys(("gpu", "n_gpu", "n_gpus", "nproc", "nproc_per_node", "devices"), "gpus"),
    **dict.fromkeys(("fsdp", "deepspeed", "ddp", "zero", "zero_stage"), "sharding"),
}

#: Options of transformers' TrainingArguments that are a value of one here.
_ALSO_SET = {
    **{name: ("precision", name) for name in ("fp32", "tf32", "bf16", "fp16", "fp8")},
    "torch_compile": ("execution", "compiled"),
}

#: Options of transformers' that have nothing to set here: an option of every command that the reason holds for, and the
#: reason to leave it out.
_ALWAYS_SO = {
    "auto_find_batch_size": ("batch_size", "where memory runs out, micro-batches get smaller by themselves"),
    "dataloader_num_workers": ("prefetch", "batches are made ahead of the step"),
    "dataloader_pin_memory": ("prefetch", "host memory of batches is pinned on a GPU"),
    "group_by_length": ("packing", "sequences are packed, without padding"),
    "per_device_eval_batch_size": ("batch_size", "evaluation counts tokens, not rows"),
    "torch_empty_cache_steps": ("batch_size", "where memory runs out, what torch keeps unused is given back"),
    "use_liger_kernel": ("execution", "a GPU runs layers on fused kernels"),
}


def did_you_mean(name: str, known: Sequence[str]) -> str | None:
    """Hint with the one of `known` that `name` may mean, by its name elsewhere or misspelt; None if none is close."""
    spelt = {each.lstrip("-").replace("-", "_"): each for each in known}
    bare = name.lstrip("-").replace("-", "_").lower()
    if bare in _ALSO_SET and (setting := spelt.get(_ALSO_SET[bare][0])) is not None:
        value = _ALSO_SET[bare][1]
        return f"did you mean {setting} {value}?" if setting.startswith("--") else f'did you mean {setting}="{value}"?'
    if bare in _ALWAYS_SO and _ALWAYS_SO[bare][0] in spelt:
        return f"leave it out: {_ALWAYS_SO[bare][1]}"
    meant = _ALSO_CALLED.get(bare)
    while meant is not None and meant not in spelt:
        meant = _ALSO_CALLED.get(meant)
    if meant is not None:
        return f"did you mean {spelt[meant]}?"
    near = difflib.get_close_matches(bare, spelt, n=1, cutoff=0.7)
    return f"did you mean {spelt[near[0]]}?" if near else None
