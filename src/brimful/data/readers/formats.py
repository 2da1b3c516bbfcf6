"""Formats of files of rows, by the end of their names, and what is wrong with a file by its first bytes."""

from __future__ import annotations

from pathlib import Path

from brimful.core.errors import DataError
from brimful.data.file_names import split_suffix
from brimful.data.readers.compression import reading
from brimful.data.readers.text_encoding import UTF16

KINDS = "CSV, TSV, JSON, JSONL, NDJSON, TXT, Parquet (each also .gz or .zst), Excel, Arrow or Feather"

_TEXT = {".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".txt"}
EXCEL = {".xlsx", ".xls", ".xlsm", ".xlsb", ".ods"}
_BINARY = {".parquet", ".arrow", ".feather"}
_HEAD_BYTES = 64 * 1024
_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
_NOT_TEXT = {
    b"PK\x03\x04": ("a zip archive or an Excel workbook", "unpack it, or let its name end in .xlsx"),
    b"\x1f\x8b": ("compressed by gzip", "let its name end in .gz"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "let its name end in .zst"),
    b"PAR1": ("a Parquet file", "let its name end in .parquet"),
    b"ARROW1": ("an Arrow file", "let its name end in .arrow"),
}
NEEDS_ROWS = "it needs rows of texts: is it the right file?"


def is_data_file(file: str) -> bool:
    """True for a name that ends like one of the formats read here."""
    return split_suffix(file)[0] in _TEXT | _BINARY | EXCEL


def checked_format(file: str, encoding: str | None = None) -> str:
    """Suffix of a file that is not empty and begins like its format. encoding: of text, None where nobody said it.

    Raises: DataError for any other file.
    """
    if not is_data_file(file):
        raise DataError("is not a kind of file that can be read", file=file, hint=f"it can be {KINDS}")
    with Path(file).open("rb") as raw:
        head = raw.read(len(_LFS_POINTER))
    if not head:
        raise DataError("is empty", file=file, hint=NEEDS_ROWS)
    if head == _LFS_POINTER:
        raise DataError("is a git-lfs pointer, not the data", file=file, hint="fetch the data: git lfs pull")
    suffix = split_suffix(file)[0]
    if suffix in _TEXT:
        _check_text(file, encoding)
    return suffix


def no_rows(name: str, columns: object) -> DataError:
    """The error for data without a row, with or without a header."""
    return DataError("has a header and no rows" if columns else "has no rows", file=name, hint=NEEDS_ROWS)


def _check_text(file: str, encoding: str | None) -> None:
    """Raises: DataError where the decompressed file has no characters, or does not begin like text."""
    with reading(file) as (stream, _):
        head = stream.read(_HEAD_BYTES)
    for magic, (what, hint) in _NOT_TEXT.items():
        if head.startswith(magic):
            raise DataError(f"is not UTF-8 text but {what}", file=file, hint=hint)
    if encoding is not None or head.startswith(UTF16):
        return
    # A NUL byte in the first line, or, as in UTF-16, a quarter of all bytes NUL or not UTF-8. Texts may have some.
    offset = head.find(b"\0")
    if offset >= 0:
        num_wrong = head.count(b"\0") + head.decode("utf-8", "replace").count("\ufffd")
        if b"\n" not in head[:offset] or num_wrong * 4 > len(head):
            hint = "is its name what it holds? text in UTF-16: --encoding utf-16-le or utf-16-be"
            raise DataError(f"is not text: NUL byte at offset {offset}", file=file, hint=hint)
    if len(head) < _HEAD_BYTES and not head.removeprefix(b"\xef\xbb\xbf").strip():
        raise DataError("is empty", file=file, hint=NEEDS_ROWS)
