"""Windows: the rows of a stream a few thousand at a time, the texts in them, and the rows with their answers.

Windows are cut by rows and bytes, counted from where a window began, never by time. A run that is resumed begins with a
window, and so cuts the same ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brimful.core.classification import LENGTH_ENDS, Counts
from brimful.core.errors import OptionError, printable
from brimful.core.options.classify import ClassifyOptions
from brimful.core.records import TrainedInputs
from brimful.data.column_names import PAIR_COLUMNS
from brimful.data.labels.columns import Columns, check_exists, find_columns, joined_texts, text_parts
from brimful.data.labels.examples import has_text
from brimful.data.readers.fields import rows_with_fields, with_fields
from brimful.data.readers.rows import Rows
from brimful.data.readers.stream import Chunk
from brimful.engine.classification.request import Asked, Request, Texts
from brimful.tasks.candidates import Candidates

#: Sequences and bytes of text of a window: on a GPU enough to fill many micro-batches of every length, and few enough
#: that one is tokenised while another is computed; on a CPU a few seconds' work.
_SEQUENCES, _BYTES = {"cuda": 32768, "cpu": 4096}, {"cuda": 4 << 20, "cpu": 1 << 20}
_FEWEST_ROWS = 256
#: Operations of a window on a CPU: 5 s of two cores at 100 GFLOP/s. Bytes of text of such a window at least, and bytes
#: of a token, about.
_CPU_OPERATIONS, _FEWEST_BYTES, _BYTES_PER_TOKEN = 5e11, 4096, 4
#: Of texts in memory the first window is this part of the others, the next one twice as large, and so on: a GPU begins
#: while most of a short list is not tokenised yet. Files have windows of one size, wherever a run begins.
_FIRST_PART = {"cuda": 8, "cpu": 1}
#: Bytes of all columns of a window, by the size of the first rows.
_MOST_BYTES = 64 << 20
#: How --labels names a column.
COLUMN_PREFIX = "column:"
#: Where a window's table keeps what is wrong with its rows. No file has a column of this name.
_FAULTS = "\0faults"
_ONE_TEXT = "zero-shot asks about one text a row"
_NO_NUMBER = "the model gave no finite number"


@dataclass(frozen=True, kw_only=True)
class Window:
    """Consecutive rows. faults: (N,) large_string, what of a row could not be read and why, null elsewhere."""

    table: pa.Table
    faults: pa.Array
    texts: Texts


@dataclass(frozen=True, kw_only=True)
class WindowSize:
    """Limits of a window: number of rows, or bytes of text.

    first_part: how many times smaller the first window is of texts that are in memory.
    """

    num_rows: int
    num_bytes: int
    first_part: int = 1

    @classmethod
    def on(
        cls, device_type: str, *, sequences_per_row: int, row_bytes: float = 0.0, token_operations: float = 0.0
    ) -> WindowSize:
        """For a device: fewer rows where each has several sequences, or is large in its other columns.

        token_operations: of the model for a token. On a CPU a window is a few seconds' work, so that what was answered
        is soon on the disk.
        """
        rows = max(_FEWEST_ROWS, _SEQUENCES[device_type] // max(1, sequences_per_row))
        rows = max(1, min(rows, int(_MOST_BYTES / max(1.0, row_bytes))))
        num_bytes = _BYTES[device_type]
        if device_type == "cpu" and token_operations:
            tokens = _CPU_OPERATIONS / token_operations / max(1, sequences_per_row)
            num_bytes = max(_FEWEST_BYTES, min(num_bytes, int(tokens * _BYTES_PER_TOKEN)))
        return cls(num_rows=rows, num_bytes=num_bytes, first_part=_FIRST_PART[device_type])

    def first(self, texts: pa.Array) -> int:
        """Rows of the first window of these, 0 if it may go on beyond them."""
        ends = np.cumsum(pc.binary_length(texts.slice(0, self.num_rows)).fill_null(0).to_numpy(zero_copy_only=False))
        rows = int(np.searchsorted(ends, self.num_bytes)) + 1
        return rows if rows <= len(ends) else self.num_rows if len(ends) == self.num_rows else 0

    def cut(self, texts: Texts) -> Iterator[Texts]:
        """All windows of texts that are in memory."""
        start, part = 0, self.first_part
        while start < len(texts):
            size = replace(self, num_rows=max(1, self.num_rows // part), num_bytes=self.num_bytes // part)
            rows = size.first(texts.texts.slice(start)) or len(texts) - start
            yield texts.slice(start, rows)
            start, part = start + rows, max(1, part // 2)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Columns to read. labels: the one with the candidate labels of each row, None if all have the same.

    doubt: a likely mistake, in words.
    """

    columns: Columns
    labels: str | None
    doubt: str | None = None

    @classmethod
    def of(cls, sample: Rows, options: ClassifyOptions, inputs: TrainedInputs | None) -> Reading:
        """The columns that the options name, else those of training, else those that the first rows look like.

        inputs: those that the model was trained on, None where it is not known.
        Raises: DataError for a column that is not there, OptionError for a pair in zero-shot.
        """
        asked = options.labels or ""
        labels = asked.removeprefix(COLUMN_PREFIX) if asked.startswith(COLUMN_PREFIX) else None
        trained = () if inputs is None else (inputs.text_column, inputs.pair_column)
        sample = rows_with_fields(sample, options.text_column, options.pair_column, labels, *trained)
        if options.labels is not None and options.pair_column is not None:
            raise OptionError("--pair-column and --labels are both given", hint="zero-shot reads one text a row")
        if labels is not None:
            check_exists(sample, labels, "--labels")
        doubt = None
        if options.labels is None and inputs is not None:
            columns, doubt = _columns_as_in_training(sample, options, inputs)
        else:
            columns = find_columns(
                sample, text=options.text_column, pair=options.pair_column, label=labels, need_labels=False
            )
            doubt = next(iter(columns.doubts), None)
        if options.labels is not None:
            reasons = {role: why for role, why in columns.reasons.items() if role != "pair"}
            if columns.pair is not None and options.text_column is None:
                reasons["text"] = f"by name; {columns.pair!r} is not read: {_ONE_TEXT}"
                if (columns.text, columns.pair) == PAIR_COLUMNS:
                    doubt = f"{columns.pair!r} is not read: {_ONE_TEXT}; --text-column names it"
            columns = replace(columns, pair=None, reasons=reasons)
        return cls(columns=columns, labels=columns.labels[0] if labels is not None else None, doubt=doubt)

    def only(self, table: pa.Table) -> pa.Table:
        """The columns that are read."""
        table = self._with_fields(table)
        named = (*text_parts(table.column_names, self.columns.text), self.columns.pair, self.labels)
        return table.select(list(dict.fromkeys(name for name in named if name is not None)))

    def _with_fields(self, table: pa.Table) -> pa.Table:
        return with_fields(table, self.columns.text, self.columns.pair, self.labels)

    def texts(self, table: pa.Table) -> Texts:
        """Texts: null where a text or its pair is missing, or the candidate labels are wrong."""
        return self._read(table, pa.nulls(table.num_rows, pa.large_string()))[0]

    def _read(self, table: pa.Table, faults: pa.Array) -> tuple[Texts, pa.Array]:
        """Texts, and `faults` with those of candidate labels. A row whose fault is in a column that is not read
        has its text, and so an answer."""
        table = self._with_fields(table)
        text, pair, labels = _text(table, self.columns.text), None, None
        there = has_text(text)
        if self.labels is not None:
            labels = Candidates.from_column(table[self.labels])
            wrong = labels.faults()
            there = pc.and_(there, pc.is_null(wrong))
            faults = pc.coalesce(faults, wrong)
        if self.columns.pair is not None:
            pair = _text(table, self.columns.pair)
            there = pc.and_(there, has_text(pair))
            pair = pc.if_else(there, pair, None)
        return Texts(texts=pc.if_else(there, text, None), pairs=pair, labels=labels), faults

    def windows(self, chunks: Iterable[Chunk], size: WindowSize, *, as_they_come: bool = False) -> Iterator[Window]:
        """The rows of all chunks in windows. as_they_come: none waits for the next chunk, for somebody waits for it."""
        rest: pa.Table | None = None
        for chunk in chunks:
            table = chunk.table.append_column(_FAULTS, chunk.errors)
            rest = table if rest is None else pa.concat_tables([rest, table])
            while rows := size.first(_text(self._with_fields(rest.slice(0, size.num_rows)), self.columns.text)):
                yield self._window(rest.slice(0, rows))
                rest = rest.slice(rows)
            if as_they_come and rest.num_rows:
                yield self._window(rest)
                rest = None
        if rest is not None and rest.num_rows:
            yield self._window(rest)

    def no_rows(self, schema: pa.Schema) -> Window:
        """A window without rows, of an input with these columns."""
        return self._window(schema.empty_table().append_column(_FAULTS, pa.array([], pa.large_string())))

    def _window(self, table: pa.Table) -> Window:
        texts, faults = self._read(table, _one_chunk(table[_FAULTS]))
        return Window(table=table.drop_columns([_FAULTS]), faults=faults, texts=texts)


def _columns_as_in_training(
    sample: Rows, options: ClassifyOptions, inputs: TrainedInputs
) -> tuple[Columns, str | None]:
    """Columns of training where the input has them, for what the options do not name; and a likely mistake, in words.

    A pair is read where the model was trained on pairs, or where one is named.
    """
    text, pair = options.text_column, options.pair_column
    reasons = {}
    if text is None and _has_text_column(sample, inputs.text_column):
        text, reasons["text"] = inputs.text_column, "as in training"
    if pair is None and inputs.pair_column is not None and _has_text_column(sample, inputs.pair_column):
        pair, reasons["pair"] = inputs.pair_column, "as in training"
    found = find_columns(sample, text=text, pair=pair, need_labels=False)
    reasons = {role: reasons.get(role, why) for role, why in found.reasons.items()}
    doubt = None
    if reasons["text"] not in ("given", "as in training"):
        said = f"the model was trained on {printable(inputs.text_column)!r}, which is not here"
        doubt = f"{said}: {printable(found.text)!r} is read; --text-column names another"
    if inputs.pair_column is None and found.pair is not None:
        if options.pair_column is None:
            reasons.pop("pair")
            left_out = f"{printable(found.pair)!r} is not read: the model was trained on single texts"
            if (found.text, found.pair) == PAIR_COLUMNS:
                doubt = f"{left_out}; --pair-column {found.pair} reads pairs"
            reasons["text"] += f"; {left_out}"
            found = replace(found, pair=None)
        else:
            doubt = "the model was trained on single texts, and pairs are given (--pair-column)"
    if inputs.pair_column is not None and found.pair is None:
        named = f"{printable(inputs.text_column)!r} with {printable(inputs.pair_column)!r}"
        doubt = f"the model was trained on pairs, {named}, and no second text is read here; --pair-column names it"
    return replace(found, reasons=reasons), doubt


def _has_text_column(sample: Rows, name: str) -> bool:
    """True if there is a column of text of this name, or several where the name is that of several."""
    kinds = {field.name: field.type for field in sample.table.schema}
    parts = text_parts(list(kinds), name)
    return all(part in kinds for part in parts) and (len(parts) > 1 or pa.types.is_large_string(kinds[name]))


def answered(
    window: Window, request: Request, asked: Asked, logits_PC: npt.NDArray[np.float32]
) -> tuple[pa.Table, Counts]:
    """A window's rows with the columns of their answers behind, and what there is to count.

    The columns: those of the request's form, `num_tokens`, `truncated`, and `error` with what is wrong with a row.
    One whose name a column of the input has is called `predicted_...`.
    """
    answers = request.form.columns(logits_PC, asked.candidates)
    read_N, faults = asked.num_tokens_N > 0, window.faults
    if asked.faults:
        faults = pc.coalesce(faults, pa.array(map(asked.faults.get, range(len(faults))), pa.large_string()))
    unread_N = ~read_N & faults.is_null().to_numpy(zero_copy_only=False)
    unlabelled_N = np.zeros_like(unread_N)
    if asked.candidates is not None:
        has_text_N = window.texts.texts.is_valid().to_numpy(zero_copy_only=False)
        unlabelled_N = unread_N & has_text_N & (np.diff(asked.candidates.offsets_N1) == 0)
    answer = next(iter(answers.values()))
    lost_N = read_N & answers["score"].is_null().to_numpy(zero_copy_only=False)
    errors = pc.if_else(pa.array(lost_N), _NO_NUMBER, faults)
    added = answers | {
        "num_tokens": pa.array(asked.num_tokens_N.astype(np.int32)),
        "truncated": pa.array(asked.truncated_N),
        "error": errors,
    }
    table = window.table
    assert len(answer) == table.num_rows
    for name, column in added.items():
        table = table.append_column(free_name(name, table.column_names), column)
    length_bins = np.searchsorted(LENGTH_ENDS, asked.num_tokens_N[read_N])
    counted = Counts(
        num_rows=table.num_rows,
        num_tokens=int(asked.num_tokens_N.sum()),
        num_truncated=int(asked.truncated_N.sum()),
        num_empty=int((unread_N & ~unlabelled_N).sum()),
        num_unlabelled=int(unlabelled_N.sum()),
        num_errors=len(errors) - errors.null_count,
        num_tokenizer_fallback=0 if asked.use_cache else table.num_rows,
        lengths=tuple(np.bincount(length_bins, minlength=len(LENGTH_ENDS) + 1).tolist()),
    )
    return table, counted + request.form.counts(logits_PC, asked.candidates)


def free_name(name: str, taken: Sequence[str]) -> str:
    """`label`, or `predicted_label`, `predicted_label_2`, ... if it is taken."""
    names = itertools.chain((name, f"predicted_{name}"), (f"predicted_{name}_{i}" for i in itertools.count(2)))
    return next(each for each in names if each not in taken)


def _text(table: pa.Table, name: str) -> pa.Array:
    return _one_chunk(joined_texts(table, name))


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
