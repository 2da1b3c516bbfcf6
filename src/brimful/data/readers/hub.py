"""Data sets of the Hugging Face hub, by name, through the extra `datasets`."""

from __future__ import annotations

import re

import pyarrow as pa

from brimful.core.errors import DataError, first_line

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.+-]+)?")


def looks_like_hub_name(spec: str) -> bool:
    """True for `owner/name` or `name`, with or without `:split`."""
    return _NAME.fullmatch(spec) is not None


def load_hub(spec: str, otherwise: str) -> pa.Table:
    """The rows of `owner/name:split`, of the split `train` where none is named, as a table mapped from the disk.

    otherwise: hint for a user who did not mean the hub.
    Raises: DataError without the extra, without a network, and for a data set or split that is not there.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "there is no such file or folder, and reading it from the hub needs the package `datasets`",
            value=spec,
            hint=f"pip install 'brimful[datasets]'; {otherwise}",
        ) from error
    name, _, split = spec.partition(":")
    try:
        dataset = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # whatever the network, the hub and its files raise
        unreachable = isinstance(error, ConnectionError) or "Couldn't reach" in str(error)
        why = "cannot be reached" if unreachable else f"gave no such data set ({first_line(error)})"
        raise DataError(
            f"there is no such file or folder, and the hub {why}",
            value=spec,
            hint=otherwise,
        ) from error
    return dataset.data.table.replace_schema_metadata(dataset.features.arrow_schema.metadata)
