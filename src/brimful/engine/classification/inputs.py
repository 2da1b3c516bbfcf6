"""Inputs of a pass before weights are read: the rows, the columns that are read, the first texts, the request."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from brimful.core.callbacks import Callbacks
from brimful.core.cores import num_cores
from brimful.core.options.classify import ClassifyOptions
from brimful.data.file_names import COMPRESSION
from brimful.data.readers.file_format import FileFormat
from brimful.data.readers.in_memory import Tables
from brimful.data.readers.sources import open_stream
from brimful.data.readers.stream import RowStream
from brimful.data.tokens.token_stream import TokenStream, choose_workers
from brimful.data.writers.output_path import check_output, check_replaced
from brimful.engine.classification.gpu_workers import check_gpus_there
from brimful.engine.classification.request import Request, TextRequest, Texts, make_zero_shot, zero_shot_encoder
from brimful.engine.classification.runner import Checked, check_model
from brimful.engine.classification.windows import Reading
from brimful.engine.read_examples import report_columns
from brimful.hardware.probe import choose_device
from brimful.levers.precision import choose_forward_precision
from brimful.step.precision import Precision
from brimful.tasks.answers import answer_form
from brimful.tasks.zero_shot import zero_shot_form

#: How many times larger a compressed file is in memory, about.
_PACKED = 4
#: First texts, by whose lengths kernels are chosen and of which some are compared with the plain model; and the most
#: rows, and bytes of them, that are looked through for so many.
_SAMPLE_TEXTS, _SAMPLE_ROWS, _SAMPLE_BYTES = 2048, 1 << 14, 4 << 20
#: Rows that are looked at at a time.
_STEP = 256


@dataclass(frozen=True, kw_only=True)
class Given:
    """Checked inputs of a run; no weights are loaded yet.

    sample: texts of the first rows. row_bytes: bytes of such a row in memory.
    """

    precision: Precision
    checked: Checked
    rows: RowStream
    reading: Reading
    sample: Texts
    row_bytes: float
    limit: int | None


def look(options: ClassifyOptions, callbacks: Callbacks, tables: Tables | None) -> Given:
    if options.output is not None:
        check_output(Path(options.output), options.data)
        replaced = check_replaced(Path(options.output), overwrite=options.overwrite, resume=options.resume)
        if replaced is not None:
            callbacks.note(replaced)
    precision = choose_forward_precision(options.precision, choose_device(options.device))
    check_gpus_there(options, precision.device)
    checked = check_model(options)
    callbacks.stage(f"reading {options.data}")
    stdin = sys.stdin.buffer if options.data == "-" else None
    form = FileFormat.of(options)
    rows = open_stream(options.data, stdin, form, options.limit, tables, keep_broken=options.claim)
    for warning in rows.warnings:
        callbacks.warning(warning)
    for note in rows.notes:
        callbacks.note(note)
    if options.output is not None:
        check_output(Path(options.output), options.data, map(Path, rows.files))
    reading = Reading.of(rows.sample, options, checked.facts.inputs)
    report_columns(reading.columns, callbacks)
    if reading.doubt is not None:
        callbacks.warning(reading.doubt)
    sample, row_bytes = _first_texts(rows, reading, max(_SAMPLE_TEXTS, options.verify or 0))
    return Given(
        precision=precision,
        checked=checked,
        rows=rows,
        reading=reading,
        sample=sample,
        row_bytes=row_bytes,
        limit=options.limit,
    )


def _first_texts(rows: RowStream, reading: Reading, wanted: int) -> tuple[Texts, float]:
    """Texts of an input's first rows, up to the one with the `wanted`th text, and bytes of such a row in memory."""
    tables, found, num_rows, num_bytes = list[pa.Table](), 0, 0, 0
    steps = (table.slice(row, _STEP) for table in rows.beginning() for row in range(0, table.num_rows, _STEP))
    for table in steps:
        places = np.flatnonzero(reading.texts(table).asked_N())[: wanted - found]
        is_last = found + len(places) >= wanted
        tables.append(reading.only(table.slice(0, places[-1] + 1) if is_last else table))
        found, num_rows, num_bytes = found + len(places), num_rows + table.num_rows, num_bytes + table.nbytes
        if is_last or num_rows >= _SAMPLE_ROWS or num_bytes >= _SAMPLE_BYTES:
            break
    first = pa.concat_tables(tables)
    first = first.take(np.arange(first.num_rows))  # a copy: all else that was read is let go
    del tables, steps
    pa.default_memory_pool().release_unused()
    return reading.texts(first), max(1.0, num_bytes / max(1, num_rows))


def make_request(given: Given, options: ClassifyOptions, stack: ExitStack, callbacks: Callbacks) -> Request:
    """Request of a run. stack: closes the tokenisers."""
    checked, num_workers = given.checked, options.num_workers
    if num_workers is None:
        num_rows, row_bytes = expected_rows(given), given.sample.num_bytes / max(1, len(given.sample))
        text_bytes = num_rows * row_bytes if num_rows else None
        num_workers = choose_workers(text_bytes, given.precision.device.type, num_cores() or 1)
    settings: dict[str, Any] = {
        "top_k": options.top_k, "threshold": options.threshold, "logits": options.logits,
    }  # fmt: skip
    if options.labels is None:
        tokens = stack.enter_context(TokenStream(checked.encoder, num_workers=num_workers, warn=callbacks.warning))
        return TextRequest(answer_form(checked.facts.config, **settings), tokens)
    settings |= {"multi_label": options.multi_label, "template": options.hypothesis_template}
    zero_shot, encoder = zero_shot_form(checked.facts.config, **settings), zero_shot_encoder(checked)
    bare = encoder.without_special_tokens()
    tokens = stack.enter_context(TokenStream(bare, num_workers=num_workers, warn=callbacks.warning))
    return make_zero_shot(zero_shot, encoder, tokens, options.labels, given.sample, callbacks)


def expected_rows(given: Given) -> float:
    """Rows of the whole input, about; 0 where nothing is known of its length."""
    rows = given.rows
    if rows.num_rows is not None:
        return rows.num_rows
    sizes = {Path(file): Path(file).stat().st_size for file in rows.files if Path(file).is_file()}
    size_bytes = sum(size * (_PACKED if file.suffix in COMPRESSION else 1) for file, size in sizes.items())
    expected = size_bytes / given.row_bytes
    return expected if given.limit is None else min(given.limit, expected or given.limit)
