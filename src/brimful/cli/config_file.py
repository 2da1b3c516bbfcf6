"""Options from a TOML or YAML file, by the names of the flags, with - or _."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brimful.core.errors import OptionError, did_you_mean, printable

#: Examples of fields whose value is a list on the command line.
_AS_TEXT = {"label_map": '"pos=POSITIVE,neg=NEGATIVE"', "class_weights": '"spam=3,ham=1"'}


def read_configuration(file: str, known: Sequence[str]) -> dict[str, Any]:
    """Read a configuration file: field name -> text, number, true or false. A null value leaves the field out.

    known: names of the fields.
    Raises: OptionError for a file that cannot be read, an unknown or repeated key, and a list or table as a value.
    """
    found: dict[str, Any] = {}
    shown = printable(file, 200)
    for key, value in _read(file).items():
        name = str(key).replace("-", "_")
        if name not in known:
            one = next((each for each in known if "_" in each), known[0])
            raise OptionError(
                f"{shown} has an unknown key '{printable(key)}'",
                hint=did_you_mean(name, known) or f"the keys are the names of the flags, as in {one}",
            )
        if name in found:
            raise OptionError(f"{shown} has the key {name} twice, with - and with _", hint="leave one of them out")
        if isinstance(value, dict | list):
            raise OptionError(
                f"{shown}: {name} must be one value, and is a {'table' if isinstance(value, dict) else 'list'}",
                hint="write it as on the command line, in quotes: " + _AS_TEXT.get(name, '"a,b"'),
            )
        if value is not None:
            found[name] = value
    return found


def _read(file: str) -> Mapping[Any, Any]:
    path = Path(file).expanduser()
    shown = printable(file, 200)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(f"--config {shown} is not UTF-8 text", hint="give a TOML or YAML file") from error
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        why = getattr(error, "strerror", None) or printable(error)
        said = f"--config {shown} cannot be read: {why}"
        raise OptionError(said, hint="give a TOML or YAML file, as --config run.toml") from error
    try:
        found = tomllib.loads(text) if path.suffix.lower() == ".toml" else _yaml(text)
    except ValueError as error:
        kind = "TOML" if path.suffix.lower() == ".toml" else "YAML"
        raise OptionError(
            f"{shown} is not valid {kind}: {printable(error, 300)}",
            hint="write one `key = value` a line in .toml, text in quotes; `key: value` in .yaml",
        ) from error
    if not isinstance(found, Mapping):
        raise OptionError(f"{shown} holds no keys", hint="write one `key: value` a line, as in `batch_size: 16`")
    return found


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except (RecursionError, TypeError) as error:  # nested beyond measure, or a key that is itself a list
        raise ValueError(str(error)) from error
