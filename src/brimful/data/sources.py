"""What a user calls their data -> rows: a file, a folder, a glob of these, or a name on the hub."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from brimful.core.errors import DataError, printable
from brimful.data.formats import KINDS, is_data_file, read_file
from brimful.data.hub import looks_like_hub_name, read_hub
from brimful.data.opening import first_line, not_utf8
from brimful.data.place import is_manifest
from brimful.data.rows import Rows, join_files

__all__ = ["Rows", "read_rows"]

_SPLIT = re.compile(r"(train|test|valid|validation|val|dev|eval)(?![a-z])")

Parts = list[tuple[str, pa.Table]]


def read_rows(spec: str) -> Rows:
    """The rows of `spec`, in the order of the files' names and of the rows within each.

    spec: a CSV, TSV, JSON, JSONL, Parquet (each also .gz or .zst), Arrow or Feather file; a folder of such files; a
    folder saved by `datasets`, of which several splits the one called train; a folder with one sub-folder of .txt files
    per class; a glob of any of these; or `name`, `owner/name` or `owner/name:split` of a hub data set.

    Raises: DataError for whatever is missing, damaged, empty or inconsistent, with file and row.
    """
    if not spec:
        raise DataError("the data has no name", hint="give a file, a folder or a hub name")
    try:
        return join_files(spec, _read(str(Path(spec).expanduser()) if spec.startswith("~") else spec))
    except OSError as error:
        file = str(error.filename or spec)
        said = f"cannot be read ({error.strerror or first_line(error)})"
        raise DataError(said, file=file, hint="may this user read it?") from error


def _read(spec: str) -> Parts:
    if Path(spec).exists():
        return _read_path(spec)
    if any(character in spec for character in "*?["):
        return _read_glob(spec)
    otherwise = _nearest(spec)
    if is_data_file(spec) or not looks_like_hub_name(spec):
        raise DataError("there is no such file or folder", value=spec, hint=otherwise)
    return [(spec, read_hub(spec, otherwise))]


def _read_path(path: str) -> Parts:
    return _read_folder(path) if Path(path).is_dir() else [(path, read_file(path))]


def _read_glob(pattern: str) -> Parts:
    anchor = Path(pattern).anchor
    try:
        found = list(Path(anchor).glob(str(Path(pattern).relative_to(anchor))))
    except ValueError as error:
        said = f"cannot be read as a pattern ({first_line(error)})"
        raise DataError(said, value=pattern, hint='give a file, a folder, or a glob such as "data/*.csv"') from error
    matches = sorted(str(path) for path in found if not path.name.startswith(".") and not is_manifest(path))
    if not matches:
        raise DataError("no file has a name like this", value=pattern, hint=_nearest(pattern))
    return [part for match in matches for part in _read_path(match)]


def _read_folder(folder: str) -> Parts:
    inside = sorted(path for path in Path(folder).iterdir() if not path.name.startswith("."))
    names = [path.name for path in inside]
    if "dataset_dict.json" in names:
        return _read_saved(_train_split(folder))
    if "state.json" in names:
        return _read_saved(folder)
    classes = [path for path in inside if path.is_dir() and any(path.glob("*.txt"))]
    if classes:
        return [part for path in classes for part in _read_class(path)]
    files = [str(path) for path in inside if path.is_file() and is_data_file(path.name) and not is_manifest(path)]
    if not files:
        raise DataError("the folder holds no data", file=folder, hint=_hint_empty(folder, inside))
    _check_one_split(folder, files)
    return [(file, read_file(file)) for file in files]


def _read_saved(folder: str) -> Parts:
    """A folder by `datasets.Dataset.save_to_disk`: state.json names its Arrow files in order."""
    state = _json_of(Path(folder) / "state.json")
    try:
        files = [str(Path(folder) / each["filename"]) for each in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError("does not name its files", file=f"{folder}/state.json", hint="save the data again") from error
    if not files:
        raise DataError("has no rows", file=folder, hint="it needs rows of texts: is it the right file?")
    return [(file, read_file(file)) for file in files]


def _train_split(folder: str) -> str:
    state = _json_of(Path(folder) / "dataset_dict.json")
    splits = state.get("splits", []) if isinstance(state, dict) else []
    if "train" in splits or len(splits) == 1:
        return str(Path(folder) / ("train" if "train" in splits else splits[0]))
    hint = f"give one of them: {_shown(f'{folder}/{split}' for split in splits)}" if splits else "save it again"
    raise DataError("has no split called train", file=folder, hint=hint)


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError("is not JSON", file=str(path), hint="save the data again") from error


def _read_class(folder: Path) -> Parts:
    """One row per .txt file, labelled with the folder's name."""
    parts = []
    for path in sorted(folder.glob("*.txt")):
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise not_utf8(error.object, file=str(path)) from error
        columns = {"text": pa.array([text], pa.large_string()), "label": pa.array([folder.name], pa.large_string())}
        parts.append((str(path), pa.table(columns)))
    return parts


def _check_one_split(folder: str, files: list[str]) -> None:
    """Training and test rows side by side are not one data set."""
    splits: dict[str, str] = {}
    for file in files:
        if found := _SPLIT.match(Path(file).name.lower()):
            splits.setdefault(found.group(1), file)
    if len(splits) > 1:
        first = splits.get("train", files[0])
        raise DataError(
            f"the folder holds several splits: {', '.join(sorted(splits))}",
            file=folder,
            hint=f"give one of them, as {_shown([first])}, or a glob",
        )


def _hint_empty(folder: str, inside: list[Path]) -> str:
    folders = [f"{folder}/{path.name}" for path in inside if path.is_dir()]
    if folders:
        return f"give one of its folders: {_shown(folders)}"
    return f"it can hold {KINDS}, or one sub-folder of .txt files per class"


def _nearest(path: str) -> str:
    """What the user may have meant by a path that is not there."""
    folder = Path(path).parent
    while not folder.is_dir():
        path, folder = str(folder), folder.parent
    near = difflib.get_close_matches(Path(path).name, sorted(each.name for each in folder.iterdir()), n=3)
    if near:
        return f"did you mean {_shown((str(folder / name) for name in near), ' or ')}?"
    return f"nothing in the folder {_shown([str(folder.absolute())])} has a similar name"


def _shown(names: Iterable[str], between: str = ", ") -> str:
    return between.join(printable(name) for name in itertools.islice(names, 5))
