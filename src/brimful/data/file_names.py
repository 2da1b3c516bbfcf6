"""File names: the format and the compression that their suffixes name, in reading and in writing."""

from __future__ import annotations

from pathlib import Path

COMPRESSION = {".gz": "gzip", ".zst": "zstd"}


def split_suffix(file: str) -> tuple[str, str | None]:
    """Suffix in lower case and codec, if any: `reviews.CSV.gz` is (".csv", "gzip")."""
    path = Path(file)
    codec = COMPRESSION.get(path.suffix.lower())
    return (Path(path.stem) if codec else path).suffix.lower(), codec
