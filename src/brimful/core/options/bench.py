"""Options of `bench`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from brimful.core.errors import OptionError, printable
from brimful.core.options.checks import check_header, check_numbers, check_positive, check_text_format, check_types
from brimful.core.options.choices import DeviceChoice, MissingLabels, TaskChoice
from brimful.core.options.train import TrainOptions


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """A comparison of ways to train one model, ours and transformers' Trainer's, on this machine."""

    model: str
    """Any sequence-classification or base model of Hugging Face: a folder, or a hub name."""
    data: str | None = None
    """Labelled rows, in any of the forms that train takes. Default: random tokens of --shape."""
    output: str = "bench"
    """Folder for results.json, results.csv, results.md, bench.html and the rows. The same command with the same folder
    goes on where it stopped."""
    rows: str = "default"
    """Rows to measure, separated by commas: `default`, `best` (compiled, for GPUs), `guide` (the table
    of Hugging Face's guide to one GPU, and ours), `lean` (ours in the least memory), `levers` (each way to train of
    brimful, with Trainer's counterpart), or settings of train as `precision=bf16`, several of one row joined by `+`.
    Trainer's plain row is always first."""
    shape: str | None = None
    """ROWSxTOKENS of random tokens, as 512x512, where no DATA are given. Default: 512x512; on a CPU 256x128."""
    batch_size: int = 32
    """Effective batch size: samples per optimizer step, however a row splits it."""
    max_length: int | None = None
    """Longest sequence of DATA in tokens; longer ones are truncated. Default: the model's limit, at most 512."""
    budget_s: float = 540.0
    """Seconds for all rows. What does not fit is left for the next call, and said. 0: no limit."""
    steps: int | None = None
    """Steps of a timed block. Default: chosen from the time of a plain step, at most 20."""
    repeats: int | None = None
    """Timed blocks of a row. Default: 5."""
    warmup_steps: int | None = None
    """Steps before the first timed block. Default: chosen from the time of a plain step, 2 to 24."""
    text_column: str | None = None
    """Column with the text. Default: found by name and type."""
    pair_column: str | None = None
    """Column with the second text of a pair. Default: found by name."""
    label_column: str | None = None
    """Column with the label, or several separated by commas. Default: found by name."""
    header: bool | None = None
    """Take the first line of CSV and TSV files as column names. Default: names, with a warning if it looks like a
    row."""
    column_names: str | None = None
    """Names of the columns of CSV and TSV files without a header, separated by commas; implies --no-header."""
    delimiter: str | None = None
    """Character between the columns of CSV and .txt files, or `tab`. Default: the one that the first line shows."""
    encoding: str | None = None
    """Encoding of text files. Default: UTF-8; bytes that are not are read as windows-1252."""
    sheet: str | None = None
    """Sheet of Excel files. Default: the first with a table, of the columns asked for or of usual names."""
    task: TaskChoice = "auto"
    """Kind of task. auto: inferred from the label column."""
    missing_labels: MissingLabels = "error"
    """Rows without a label. error: name the first, and stop; drop: leave them out; none: in multi_label, rows that no
    label is true of."""
    label_map: str | None = None
    """Data label to model label, for a head with other names: `pos=POSITIVE,neg=NEGATIVE`, or a JSON file."""
    new_head: bool = False
    """Replace the model's classification head by a new one for the labels in the data."""
    limit: int = 2048
    """Most rows of DATA to use, drawn by --seed."""
    learning_rate: float = 5e-5
    """Peak learning rate of all rows, with a linear schedule of 10,000 steps, of which a row takes the first."""
    seed: int = 42
    """Seed of the rows' order, new head and dropout."""
    device: DeviceChoice = "auto"
    """Device to run on. auto: a GPU if there is one."""
    memory_limit: str | None = None
    """Most memory of a row's process on a GPU, as 8GB: it behaves as a smaller one. Default: all of it."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model."""
    allow_pickle: bool = False
    """Load weights that exist only as a pickle (pytorch_model.bin)."""
    quiet: bool = False
    """Print warnings and errors alone on stderr."""
    json: bool = False
    """Print one JSON document on stdout at the end."""

    def __post_init__(self) -> None:
        check_types(self)
        check_header(self.header, self.column_names)
        check_text_format(self.delimiter, self.encoding)
        check_positive(self, "batch_size", "max_length", "steps", "repeats", "warmup_steps", "limit", "learning_rate")
        check_numbers(self, ("budget_s",), lambda value: 0 <= value < float("inf"), "finite and at least 0")
        if not self.output:
            raise OptionError("--output is empty", hint="give the name of a folder")
        if self.shape is not None and self.data is not None:
            raise OptionError("--shape and DATA are both given", hint="--shape is of random tokens: leave one out")
        self.shape_of("512x512")
        self.train_options()  # checks what they share

    def shape_of(self, default: str) -> tuple[int, int]:
        """Rows and tokens of random data. Raises: OptionError."""
        found = re.fullmatch(r"([1-9]\d{0,7})x([1-9]\d{0,5})", self.shape or default)
        if found is None:
            said = f"--shape is '{printable(self.shape)}': it must be rows x tokens"
            raise OptionError(said, hint="as in --shape 512x512")
        rows, tokens = int(found[1]), int(found[2])
        if tokens < 3:
            raise OptionError(f"--shape {self.shape} has sequences of {tokens} tokens", hint="give at least 3")
        return rows, tokens

    def train_options(self, **settings: object) -> TrainOptions:
        """The options of train that a row of these settings has. Raises: OptionError for settings that do not fit."""
        shared = {name: getattr(self, name) for name in OF_TRAIN}
        fixed = {"eval_split": 0.0, "max_steps": LONG_RUN, "baselines": False}
        given = {"data": self.data or "", "model": self.model, "output": ""}
        return TrainOptions(**{**given, **shared, **fixed, **settings})  # type: ignore[arg-type]


#: Options of train that all rows have alike.
OF_TRAIN = (
    *("text_column", "pair_column", "label_column", "header", "column_names", "delimiter", "encoding", "sheet", "task"),
    *(
        "limit",
        "max_length",
        "batch_size",
        "missing_labels",
        "label_map",
        "new_head",
        "learning_rate",
        "seed",
        "device",
        "memory_limit",
    ),
    *("trust_remote_code", "allow_pickle"),
)
#: Steps of the run that each row is the beginning of: levers and schedules are chosen as for it.
LONG_RUN = 10_000
