"""Options of `classify`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from brimful.core.errors import OptionError
from brimful.core.options.checks import (
    check_claim,
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
from brimful.core.options.choices import AllocatorChoice, DeviceChoice, ExecutionChoice, LauncherChoice, PrecisionChoice


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions:
    """One pass of a classifier over texts."""

    model: str
    """A fine-tuned classifier: the `model` folder of a run, any folder of Hugging Face form, or a hub name."""
    data: str
    """Texts to classify: CSV, TSV, JSONL, .txt with a text in each line, Parquet (each also .gz or .zst), Excel, Arrow,
    a folder or a glob of these, or `-` for JSONL on stdin."""
    output: str | None = None
    """File (.parquet, or .csv, .tsv, .jsonl, each also .gz or .zst) or folder (of Parquet shards) for the results, with
    all columns of the input. Default, and `-`: JSONL on stdout."""
    text_column: str | None = None
    """Column with the text, or several separated by commas, whose texts are joined by line breaks. Default: found by
    name and type."""
    pair_column: str | None = None
    """Column with the second text of a pair. Default: found by name."""
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
    max_length: int | None = None
    """Longest sequence in tokens; longer ones are truncated, and counted. Default: that of training, where brimful
    trained the model, else the model's limit, at most 8192."""

    labels: str | None = None
    """Zero-shot with a model of natural-language inference: candidate labels, separated by commas, or `column:NAME` for
    a column with those of each row (a list, or text separated by commas)."""
    hypothesis_template: str = "This example is {}."
    """Zero-shot: sentence that each label is put into."""
    multi_label: bool = False
    """Zero-shot: score each label by itself, so that several can be true; without it, exactly one is."""
    top_k: int | None = None
    """Also a column `scores` with this many labels of each text and their scores, likeliest first; 0 for all."""
    threshold: float | None = None
    """Least probability of a given label. Default: 0.5 for multi-label models; other models always give the likeliest
    label."""
    logits: bool = False
    """Also a column `logits` with the model's raw outputs, in the order of its labels."""

    resume: bool = False
    """Resume an interrupted run into the same output, or start if there is none."""
    claim: bool = False
    """Share the files of INPUT with other processes that run this command, on any machines that see the same folders:
    each claims one file after another. The output is a folder, with a file of results for each. Any of them can be
    killed, and the command started again."""
    lease: float = 60.0
    """With --claim: seconds without a sign of life of a process, after which another one takes over its file."""
    limit: int | None = None
    """Classify only the first so many rows."""
    max_errors: int | None = None
    """Stop when more rows than this cannot be classified. Default: never; the column `error` has the reasons."""
    shard_rows: int = 1_000_000
    """Rows per file in a folder of results."""
    overwrite: bool = False
    """Replace a file at --output that is no result of brimful."""
    verify: int | None = None
    """Rows of the input on which the fast path is first compared with the plain fp32 model; 0: none. Default: 256; on a
    CPU fewer of long ones: a fortieth of all tokens, 2,048 at least."""
    report: str | None = None
    """File for an HTML report of the pass, one page that needs no network."""

    precision: PrecisionChoice = "auto"
    """Precision of matrix products. auto: bf16 on a GPU or CPU with units for it, fp32 elsewhere. fp8: bf16, and fp8
    for the products of fused layers that a measurement shows to be faster; needs compute capability 9.0 (Hopper)."""
    device: DeviceChoice = "auto"
    """Device to run on. auto: a GPU if there is one."""
    gpus: str | None = None
    """GPUs of this machine to use, a process each: a number, or `all`. Default: all visible ones, or one for a small
    input; one with --claim, and under a launcher such as torchrun or srun, where processes share the rows."""
    launcher: LauncherChoice = "none"
    """ray: start the processes as workers of Ray Train, on the cluster of RAY_ADDRESS or on this machine; needs
    brimful[ray]."""
    num_processes: int | None = None
    """With --launcher ray: processes to start, each with a GPU unless --device is cpu. Default: 1."""
    packing: Literal["auto", "off"] = "auto"
    """auto: run packed, without padding, if the equivalence check passes on this model. off: padded batches."""
    token_budget: int | None = None
    """Most tokens of a micro-batch; halved where memory runs out. Default: chosen by device."""
    execution: ExecutionChoice = "auto"
    """Launch mode on a GPU. eager: one kernel after another; captured: CUDA graphs; compiled: CUDA graphs of compiled
    layers. auto: captured, or compiled if the input is long enough to save time."""
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
    quiet: bool = False
    """Print warnings and errors alone on stderr."""
    json: bool = False
    """With --output: print one JSON document about the pass on stdout at the end."""

    def __post_init__(self) -> None:
        check_types(self)
        check_header(self.header, self.column_names)
        check_text_format(self.delimiter, self.encoding)
        check_streaming(self)
        check_size(self, "memory_limit")
        check_positive(self, "max_length", "token_budget", "shard_rows", "limit", "lease")
        if self.output == "":
            raise OptionError("--output is empty", hint="give a name, or leave it out for JSONL on stdout")
        if self.json and self.output is None:
            raise OptionError("--json is given without --output: rows go to stdout then", hint="name an --output")
        not_negative = ("top_k", "max_errors", "verify", "num_workers")
        check_numbers(self, not_negative, lambda value: value >= 0, "at least 0")
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise OptionError(
                f"--threshold is {self.threshold}: it must be between 0 and 1",
                hint="leave it out: it is 0.5 where a text may have several labels",
            )
        if self.labels is None and self.multi_label:
            raise OptionError("--multi-label is for zero-shot", hint="add --labels, or use --threshold")
        if self.labels is None and self.hypothesis_template != ClassifyOptions.hypothesis_template:
            raise OptionError("--hypothesis-template is for zero-shot", hint="add --labels, or leave it out")
        check_gpus(self.gpus, self.device)
        check_launcher(self)
        check_claim(self)
        if self.resume and (self.output is None or self.data == "-"):
            raise OptionError(
                "--resume needs an output, and an input that can be read again", hint="give --output FILE"
            )
