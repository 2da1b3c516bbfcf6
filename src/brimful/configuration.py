"""Options from a TOML or YAML file, as the arguments that would say the same, so that flags after them override."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brimful.core.errors import OptionError, printable
from brimful.core.options import flag


def with_configuration(arguments: Sequence[str], options: type[Any]) -> list[str]:
    """`arguments` with `--config FILE` replaced by what stands in the file.

    Raises: OptionError for a file that cannot be read or has a key that `options` does not have.
    """
    rest: list[str] = []
    files: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--config":
            file = next(words, None)
            if file is None:
                raise OptionError("--config needs a file", hint="--config run.toml")
            files.append(file)
        elif word.startswith("--config="):
            files.append(word.removeprefix("--config="))
        else:
            rest.append(word)
    given = [word for file in files for word in _arguments(file, options, first=not rest or rest[0].startswith("-"))]
    return [*given, *rest]


def _arguments(file: str, options: type[Any], *, first: bool) -> list[str]:
    """What stands in the file as arguments; `data`, which is no flag, only where the command line gives none first."""
    known = [field.name for field in dataclasses.fields(options)]
    words: list[str] = []
    for key, value in _read(file).items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise OptionError(
                f"{printable(file, 200)} has an unknown key {printable(key)!r}",
                hint=f"did you mean {near[0]}?" if near else "the keys are the flags of brimful train --help",
            )
        if isinstance(value, dict | list):
            raise OptionError(f"{printable(file, 200)}: {printable(key)} must be one value, and is a {_kind(value)}")
        if name == "data":
            words = [str(value), *words] if first else words
        elif isinstance(value, bool):
            words.append(flag(name) if value else flag(f"no_{name}"))
        elif value is not None:
            words += [flag(name), str(value)]
    return words


def _kind(value: object) -> str:
    return "table" if isinstance(value, dict) else "list"


def _read(file: str) -> Mapping[str, Any]:
    path = Path(file)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--config {printable(file, 200)} cannot be read: {printable(error)}") from error
    try:
        found = tomllib.loads(text) if path.suffix == ".toml" else _yaml(text)
    except ValueError as error:
        raise OptionError(f"{printable(file, 200)} is not valid: {printable(error, 300)}") from error
    if not isinstance(found, Mapping):
        raise OptionError(f"{printable(file, 200)} holds no keys", hint="write one `key: value` a line")
    return found


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
