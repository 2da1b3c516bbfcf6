"""Options of `evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from brimful.core.errors import OptionError
from brimful.core.options.checks import (
    check_gpus,
    check_header,
    check_launcher,
    check_numbers,
    check_positive,
    check_size,
    check_streaming,
    check_text_format,
    check_types,
)
from brimful.core.options.choices import (
    AllocatorChoice,
    DeviceChoice,
    ExecutionChoice,
    LauncherChoice,
    PrecisionChoice,
)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """One evaluation of a classifier on labelled rows, or of answers that it gave before."""

    model: str
    """A fine-tuned classifier, as of `classify`. Or, without DATA: a file or folder that `classify` wrote from rows
    with labels."""
    data: str | None = None
    """Labelled rows to evaluate on, in any of the forms of training data."""
    output: str | None = None
    """File (.parquet, or .csv, .tsv, .jsonl, each also .gz or .zst) for each row's place, true label, given label and
    score."""
    overwrite: bool = False
    """Replace a file at --output."""
    text_column: str | None = None
    """Column with the text. Default: that of training, else found by name and type."""
    pair_column: str | None = None
    """Column with the second text of a pair. Default: that of training, else found by name."""
    label_column: str | None = None
    """Column with the true label, or several separated by commas, one per output. Default: that of training, else found
    by name."""
    prediction_column: str | None = None
    """Without DATA: column with the label that was given. Default: the one that `classify` added."""
    score_column: str | None = None
    """Without DATA: column with the score of that label, or with the number. Default: the one that `classify` added."""
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
    limit: int | None = None
    """Use only so many rows of DATA, drawn by --seed, for a first look."""
    max_length: int | None = None
    """Longest sequence in tokens. Default: that of training, where brimful trained the model, else the model's limit,
    at most 8192."""

    label_map: str | None = None
    """Data label to model label, where they are spelled differently: `pos=POSITIVE,neg=NEGATIVE`, or a JSON file."""
    unknown_labels: Literal["error", "drop"] = "error"
    """Rows with a label that the model does not have. error: stop and name them. drop: leave them out, and count."""
    threshold: float | None = None
    """Least probability of a given label, for models that give several. Default: 0.5."""
    resamples: int = 1000
    """Resamples of the bootstrap that intervals are from; 0 for no intervals."""
    seed: int = 42
    """Seed of the bootstrap and of --limit."""
    report: str | None = None
    """File for an HTML report, one page that needs no network."""
    quiet: bool = False
    """Print warnings and errors alone on stderr."""
    json: bool = False
    """Print the whole record as one JSON document on stdout at the end, and nothing else there."""

    precision: PrecisionChoice = "auto"
    """Precision of matrix products. auto: bf16 on a GPU or CPU with units for it, fp32 elsewhere."""
    device: DeviceChoice = "auto"
    """Device to run on. auto: a GPU if there is one."""
    gpus: str | None = None
    """GPUs of this machine to use, a process each: a number, or `all`. Default: one; under a launcher such as torchrun
    or srun, one for each process, which share the rows."""
    launcher: LauncherChoice = "none"
    """ray: start the processes as workers of Ray Train, on the cluster of RAY_ADDRESS or on this machine; needs
    brimful[ray], and --output."""
    num_processes: int | None = None
    """With --launcher ray: processes to start, each with a GPU unless --device is cpu. Default: 1."""
    verify: int | None = None
    """Rows on which the fast path is first compared with the plain fp32 model; 0: none. Default: 256; on a CPU fewer
    where they are long, a fortieth of all tokens, 2,048 at least."""
    packing: Literal["auto", "off"] = "auto"
    """auto: run packed, without padding, if the equivalence check passes on this model. off: padded batches."""
    token_budget: int | None = None
    """Most tokens of a micro-batch. Default: chosen by device."""
    execution: ExecutionChoice = "auto"
    """Launch mode on a GPU. auto: captured, or compiled if there are enough rows to save time."""
    stream_weights: Literal["none", "host", "disk"] = "none"
    """Keep weights of layers in host memory, or in a file on a fast disk, and bring each layer's to the device for its
    turn: for models that do not fit."""
    stream_folder: str | None = None
    """Folder of the file of --stream-weights disk. Default: the system's for temporary files."""
    memory_limit: str | None = None
    """Most memory of the process on a GPU, as 8GB or 7.5GiB: it behaves as a smaller one. Default: all of it."""
    allocator: AllocatorChoice = "default"
    """Segments that torch takes from a GPU's driver. expandable: they grow, and fragment less."""
    num_workers: int | None = None
    """Tokeniser processes; 0: threads of this process. Default: chosen by the number of cores and the device."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model."""
    allow_pickle: bool = False
    """Load weights that exist only as a pickle (pytorch_model.bin)."""

    def __post_init__(self) -> None:
        check_types(self)
        check_header(self.header, self.column_names)
        check_text_format(self.delimiter, self.encoding)
        check_gpus(self.gpus, self.device)
        check_launcher(self)
        check_streaming(self)
        check_size(self, "memory_limit")
        check_positive(self, "max_length", "token_budget", "limit")
        check_numbers(
            self, ("verify", "num_workers", "resamples", "seed"), lambda value: 0 <= value < 1 << 63, "at least 0"
        )
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise OptionError(
                f"--threshold is {self.threshold}: it must be between 0 and 1", hint="leave it out for 0.5"
            )
        if self.data == "-":
            raise OptionError("DATA is -: rows are read more than once", hint="save them in a file")
        if self.data is None and self.limit is not None:
            raise OptionError(
                "--limit is for rows that a model answers", hint="answers that are there cost little: all count"
            )
        if self.data is not None and (self.prediction_column or self.score_column):
            given = "--prediction-column" if self.prediction_column else "--score-column"
            raise OptionError(f"{given} is for answers that were given before", hint="leave DATA out, or this option")
