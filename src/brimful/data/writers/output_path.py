"""The output of a classification: its form by name, and checks that it can be written."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from brimful.core.atomic_files import path_text
from brimful.core.errors import OptionError, printable
from brimful.core.manifest import MANIFEST, MANIFEST_SUFFIX
from brimful.data.writers.row_files import FORMS, PARQUET, Form, form_of

#: Bytes that Linux allows the name of a file.
_LONGEST_NAME = 255


@dataclass(frozen=True, kw_only=True)
class OutputPath:
    """One file, or a folder of shards.

    path: the file or the folder. form: of the file, or of each shard. single: it is one file.
    """

    path: Path
    form: Form
    single: bool

    @property
    def folder(self) -> Path:
        """Folder of the files until the run is finished."""
        return self.path.with_name(self.path.name + ".parts") if self.single else self.path

    @property
    def manifest(self) -> Path:
        """The manifest of a finished run."""
        return self.path.with_name(self.path.name + MANIFEST_SUFFIX) if self.single else self.path / MANIFEST


def parse_output(path: Path) -> OutputPath:
    """Output for `path`: a file if it has a suffix, a folder if not; an existing folder stays one.

    Raises: OptionError for a suffix of a form that cannot be written.
    """
    form = form_of(path)
    if path.is_dir() or not path.suffix:
        return OutputPath(path=path, form=PARQUET, single=False)
    if form is None:
        hint = f"use {FORMS}; or a name without a suffix, for a folder of Parquet files"
        raise _refused(path, f": no form of file is known by the suffix '{printable(path.suffix)}'", hint)
    return OutputPath(path=path, form=form, single=True)


def check_output(path: Path, data: str, files: Iterable[Path] = ()) -> None:
    """Check before the run that results can be written to `path`, and that `path` is not an input.

    data: what the user calls the input. files: those that it was found to be.
    Raises: OptionError.
    """
    place = parse_output(path)
    if len(os.fsencode(place.manifest.name)) > _LONGEST_NAME:
        raise _refused(path, ": the name is too long for its manifest's beside it", "shorten it")
    above = next(folder for folder in (place.folder, *place.folder.absolute().parents) if folder.exists())
    if not above.is_dir():
        raise _refused(path, f": {path_text(above)} is a file", "give another name")
    if not os.access(above, os.W_OK | os.X_OK):
        hint = "choose another --output, or make this one writable"
        raise _refused(path, f": this user may not write into {path_text(above)}", hint)
    for file in (Path(data), *files):
        _check_apart(place, file)
    _check_not_matched(place, data)


def check_claimed(path: Path) -> None:
    """Check that `path` is a folder, for files of results of many processes. Raises: OptionError."""
    if parse_output(path).single:
        raise _refused(path, " is one file, and --claim gives a file of results for each input file", "name a folder")


def check_replaced(path: Path, *, overwrite: bool, resume: bool) -> str | None:
    """Check that no file of somebody else is replaced; a note where earlier results are.

    Raises: OptionError.
    """
    place = parse_output(path)
    if not place.single or resume or not place.path.is_file() or not place.path.stat().st_size:
        return None
    if place.manifest.exists() or place.folder.exists():
        return f"{path_text(path)} holds the results of an earlier run, and is replaced at the end"
    if overwrite:
        return f"{path_text(path)} is replaced at the end (--overwrite)"
    raise _refused(path, " is there already, and was not made by brimful", "give another name, or add --overwrite")


def check_new(path: Path, *, overwrite: bool) -> None:
    """Check that there is no file yet, or that it is to be replaced. Raises: OptionError."""
    if not overwrite and path.is_file() and path.stat().st_size:
        raise _refused(path, " is there already", "give another name, or add --overwrite")


def _check_apart(place: OutputPath, file: Path) -> None:
    """Check that `place` is no input file, holds none, and is not inside an input folder."""
    try:
        given, ours = file.resolve(), place.path.resolve()
        if not given.exists():
            return
        same = ours == given or (ours.exists() and ours.samefile(given))
    except (OSError, ValueError, RuntimeError):  # `-`, or the name of something that is no file
        return
    if same:
        said = " is the file that is read" if place.single else " is the folder that is read"
        raise _refused(place.path, said, "give another name")
    if given.is_dir() and given in ours.parents:
        said = " is in the folder that is read, whose files it would be one of the next time"
        raise _refused(place.path, said, "give a name in another folder")
    if not place.single and ours in given.parents:
        raise _refused(place.path, f" holds {path_text(file)}, which is read", "use a new folder")


def _check_not_matched(place: OutputPath, data: str) -> None:
    """Check that a glob does not match the output: a resumed or repeated run would read it."""
    if not any(character in data for character in "*?["):
        return
    pattern = str(Path(data).expanduser().absolute())
    for written in (place.path, place.folder, place.manifest, place.folder / "part-00000.parquet"):
        path = written.absolute()
        if fnmatch.fnmatch(str(path), pattern.replace("**/", "*")) if "**" in pattern else path.match(pattern):
            said = f": {printable(data)}, which is read, matches {path_text(written)} too"
            raise _refused(place.path, said, "give a name in another folder")


def _refused(output: Path, said: str, hint: str) -> OptionError:
    return OptionError(f"--output {path_text(output)}{said}", hint=hint)
