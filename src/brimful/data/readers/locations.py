"""Places of rows by a user's name for them: files of a folder, of a glob, or a data set of the hub."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brimful.core.errors import DataError, first_line, printable
from brimful.core.manifest import is_manifest
from brimful.data.file_names import split_suffix
from brimful.data.readers.formats import KINDS, NEEDS_ROWS, is_data_file
from brimful.data.readers.hub import looks_like_hub_name

#: A split in a name, as `train`, `news_train` and `trainset` have one.
_SPLIT = re.compile(
    r"(?<![a-z])(training|train|testing|test|validation|valid|val|dev|eval)[-_ ]?(?:set|data)?(?![a-z])"
)
_SAME_SPLIT = {"training": "train", "testing": "test"}
#: Splits to evaluate on, the best first.
_EVALUATION = ("validation", "valid", "val", "dev", "eval", "test")


@dataclass(frozen=True)
class Location:
    """A file of rows; a .txt file which is the text of one row; or a data set of the hub.

    path: the file, or the name on the hub. is_text: it is the text of one row, of the class `label` if any.
    otherwise: for a name on the hub, what else the user may have meant.
    """

    path: str
    label: str | None = None
    is_text: bool = False
    otherwise: str | None = None


def locate(spec: str) -> list[Location]:
    """The places of the rows of `spec`, as `sources.read_rows` describes it, in the order of the files' names.

    Raises: DataError for what is not there, and for a folder without data or with several splits.
    """
    if not spec:
        raise DataError("the data has no name", hint="give a file, a folder or a hub name")
    spec = str(Path(spec).expanduser()) if spec.startswith("~") else spec
    if Path(spec).exists():
        return _in_path(spec)
    if any(character in spec for character in "*?["):
        return _in_glob(spec)
    otherwise = _nearest(spec)
    if is_data_file(spec) or not looks_like_hub_name(spec):
        raise DataError("there is no such file or folder", value=spec, hint=otherwise)
    return [Location(spec, otherwise=otherwise)]


@contextlib.contextmanager
def refusals(spec: str) -> Iterator[None]:
    """Makes a DataError of the system's refusal to read files of `spec`."""
    try:
        yield
    except OSError as error:
        file = str(error.filename or spec)
        said = f"cannot be read ({error.strerror or first_line(error)})"
        raise DataError(said, file=file, hint="may this user read it?") from error


def _in_path(path: str) -> list[Location]:
    return _in_folder(path) if Path(path).is_dir() else [Location(path)]


def _in_glob(pattern: str) -> list[Location]:
    anchor = Path(pattern).anchor
    try:
        found = list(Path(anchor).glob(str(Path(pattern).relative_to(anchor))))
    except ValueError as error:
        said = f"cannot be read as a pattern ({first_line(error)})"
        raise DataError(said, value=pattern, hint='give a file, a folder, or a glob such as "data/*.csv"') from error
    matches = sorted(str(path) for path in found if not path.name.startswith(".") and not is_manifest(path))
    if not matches:
        raise DataError("no file has a name like this", value=pattern, hint=_nearest(pattern))
    return [location for match in matches for location in _in_path(match)]


def _in_folder(folder: str) -> list[Location]:
    inside = sorted(path for path in Path(folder).iterdir() if not path.name.startswith("."))
    names = [path.name for path in inside]
    if "dataset_dict.json" in names:
        return _in_saved(_train_split(folder))
    if "state.json" in names:
        return _in_saved(folder)
    _check_one_split(folder, _parts_of(inside))
    classes = [path for path in inside if path.is_dir() and any(path.glob("*.txt"))]
    if classes:
        return [Location(str(text), path.name, True) for path in classes for text in sorted(path.glob("*.txt"))]
    files = [str(path) for path in inside if path.is_file() and is_data_file(path.name) and not is_manifest(path)]
    if not files:
        folders = [f"{folder}/{path.name}" for path in inside if path.is_dir()]
        hint = f"it can hold {KINDS}, or one sub-folder of .txt files per class, or splits (train, test)"
        hint = f"give one of its folders: {_shown(folders)}" if folders else hint
        raise DataError("the folder holds no data", file=folder, hint=hint)
    if all(split_suffix(file)[0] == ".txt" for file in files):
        return [Location(file, is_text=True) for file in files]
    return [Location(file) for file in files]


def _in_saved(folder: str) -> list[Location]:
    """A folder by `datasets.Dataset.save_to_disk`: state.json names its Arrow files in order."""
    state = _json_of(Path(folder) / "state.json")
    try:
        files = [str(Path(folder) / each["filename"]) for each in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError("does not name its files", file=f"{folder}/state.json", hint="save the data again") from error
    if not files:
        raise DataError("has no rows", file=folder, hint=NEEDS_ROWS)
    return [Location(file) for file in files]


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


@dataclass(frozen=True)
class Splits:
    """Names of the data of a folder with splits; evaluation is None where there is one to train on only."""

    training: str
    evaluation: str | None


def find_splits(spec: str) -> Splits | None:
    """The splits in the folder `spec`, files or folders called train, validation or test; None where there are none.

    Names may say more, as `news_train.csv` and `news_test.csv` do, where that is the same in all. To evaluate on,
    validation is taken before test, which is for the end.
    """
    folder = Path(spec).expanduser()
    if not spec or not folder.is_dir():
        return None
    with refusals(spec):
        if (folder / "dataset_dict.json").is_file():
            state = _json_of(folder / "dataset_dict.json")
            names = state.get("splits", []) if isinstance(state, dict) else []
            found = _by_split(f"{spec.rstrip('/')}/{name}" for name in names)
        else:
            inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
            found = _by_split(_parts_of(inside))
    paths = [path for split in found.values() for path in split]
    if "train" not in found or len(found) == 1 or len(paths) > len(found) or len({*map(_said_besides, paths)}) > 1:
        return None
    evaluation = next((found[name][0] for name in _EVALUATION if name in found), None)
    return Splits(found["train"][0], evaluation)


def _parts_of(inside: Iterable[Path]) -> Iterator[str]:
    """Files and folders that can each be a split."""
    return (str(path) for path in inside if path.is_dir() or (is_data_file(path.name) and not is_manifest(path)))


def _by_split(paths: Iterable[str]) -> dict[str, list[str]]:
    """Paths by their splits. Folders are called so from the start of their names on: others may be classes."""
    splits: dict[str, list[str]] = {}
    for path in paths:
        found = _split_in(path)
        if found is not None and (found.start() == 0 or not Path(path).is_dir()):
            splits.setdefault(_SAME_SPLIT.get(found.group(1), found.group(1)), []).append(path)
    return splits


def _split_in(path: str) -> re.Match[str] | None:
    """The split in a path's name, in which `newsTrain` is `news_train`."""
    return _SPLIT.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", Path(path).name).lower())


def _said_besides(path: str) -> str:
    """Text that a name has besides its split; none where it begins with it, whatever follows."""
    found = _split_in(path)
    if found is None or found.start() == 0:
        return ""
    return found.string[: found.start()] + "*" + found.string[found.end() :].partition(".")[0]


def _check_one_split(folder: str, files: Iterable[str]) -> None:
    """Training and test rows side by side are not one data set."""
    splits = _by_split(files)
    if len(splits) > 1 and "train" in splits:
        raise DataError(
            f"the folder holds several splits: {', '.join(sorted(splits))}",
            file=folder,
            hint=f"give one of them, as {_shown([splits['train'][0]])}, or a glob",
        )


def _nearest(path: str) -> str:
    """A hint for a path that is not there: existing ones with a similar name."""
    folder = Path(path).parent
    while not folder.is_dir():
        path, folder = str(folder), folder.parent
    near = difflib.get_close_matches(Path(path).name, sorted(each.name for each in folder.iterdir()), n=3)
    if near:
        return f"did you mean {_shown((str(folder / name) for name in near), ' or ')}?"
    return f"nothing in the folder {_shown([str(folder.absolute())])} has a similar name"


def _shown(names: Iterable[str], between: str = ", ") -> str:
    return between.join(printable(name) for name in itertools.islice(names, 5))
