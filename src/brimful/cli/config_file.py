"""Options from a TOML or YAML file, by the names of the flags, with - or _."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brimful.core.errors import OptionError, printable


def read_configuration(file: str, known: Sequence[str]) -> dict[str, Any]:
    """What stands in the file, by field name, as the file has it: text, a number, true or false.

    known: names of the fields there are. A key whose value is null is as good as left out.
    Raises: OptionError for a file that cannot be read, a key that is unknown or there twice, a value that is several.
    """
    found: dict[str, Any] = {}
    shown = printable(file, 200)
    for key, value in _read(file).items():
        name = str(key).replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            one = next((each for each in known if "_" in each), known[0])
            raise OptionError(
                f"{shown} has an unknown key '{printable(key)}'",
                hint=f"did you mean {near[0]}?" if near else f"the keys are the names of the flags, as in {one}",
            )
        if name in found:
            raise OptionError(f"{shown} has the key {name} twice, with - and with _", hint="leave one of them out")
        if isinstance(value, dict | list):
            raise OptionError(
                f"{shown}: {name} must be one value, and is a {'table' if isinstance(value, dict) else 'list'}",
                hint="write it as on the command line, in quotes: " + _one_value(name),
            )
        if value is not None:
            found[name] = value
    return found


def _one_value(name: str) -> str:
    return {"label_map": '"pos=POSITIVE,neg=NEGATIVE"', "class_weights": '"spam=3,ham=1"'}.get(name, '"a,b"')


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
