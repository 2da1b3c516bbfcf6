"""The command line that asks for given options."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

from brimful.core.errors import OptionError
from brimful.core.options.checks import flag

#: Fields that a command takes as positional arguments, and those that its line shows even at their default.
_POSITIONALS = {
    "train": ("data",),
    "classify": ("model", "data"),
    "evaluate": ("model", "data"),
    "bench": ("model", "data"),
}
_ALWAYS = {"train": ("model", "output"), "classify": (), "evaluate": (), "bench": ("output",)}


def command_of(command: str, options: Any) -> str:
    """Command line that gives `options`."""
    words, given = [], []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name in _POSITIONALS[command]:
            given += [] if value is None else [value]
            continue
        if field.name not in _ALWAYS[command] and _is_default(options, field):
            continue
        text = str(value).removesuffix(".0") if isinstance(value, float) else str(value)
        if value is True or value is False:
            words += [flag(field.name if value else f"no_{field.name}")]
        elif text.startswith("-"):
            words += [f"{flag(field.name)}={text}"]
        else:
            words += [flag(field.name), text]
    if any(each.startswith("-") and each != "-" for each in given):
        return shlex.join(["brimful", command, *words, "--", *given])
    return shlex.join(["brimful", command, *given, *words])


def launched(command: str, count: int, local_count: int) -> str:
    """Return a command as torchrun starts it in several processes of one host. For one process, and for several hosts
    (`count` is not `local_count`), it is as it is: a launcher has what only it knows."""
    return f"torchrun --nproc-per-node {count} -m {command}" if count == local_count > 1 else command


def _is_default(options: Any, field: dataclasses.Field[Any]) -> bool:
    """True for a value that an option has without its flag, as the options make it of `auto`."""
    if field.default is dataclasses.MISSING:
        return False
    value = getattr(options, field.name)
    if value == field.default or field.default != "auto":
        return bool(value == field.default)
    try:
        return bool(getattr(dataclasses.replace(options, **{field.name: field.default}), field.name) == value)
    except OptionError:
        return False
