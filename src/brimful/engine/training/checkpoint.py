"""Checkpoints that survive a kill, a power cut and a full disk: safetensors and JSON only, nothing is ever unpickled.

    checkpoints/step-00000120/
        weights.safetensors, buffers.safetensors, optimizer.safetensors     each written under a temporary name, synced,
        state.json                                                          renamed
        weights-00001.safetensors ...       parts of another process, which writes them
        manifest.json                       last: run, step, and size and SHA-256 of the others

state.json has the step's counters, what optimizers keep beside tensors, the places of parts, and the training loop's
own state. Parts are put together as they are read, by any number of processes.

A folder without a manifest is no checkpoint. A manifest holds its own SHA-256 too, so no flipped bit goes unseen.
Saving over a complete checkpoint writes the files under second names (weights.1.safetensors) beside the first ones,
until the new manifest has taken the place of the old one in one rename.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import safetensors
import torch

from brimful.core import atomic_files
from brimful.core.atomic_files import Data, Written, path_text
from brimful.core.errors import BrimfulError, CheckpointError, OutputError, printable
from brimful.step.state import Counters, ParameterState, Part, StepState, whole_of

SCHEMA = 3
#: Layouts that are read: 2 had no parts.
_READ = (2, SCHEMA)
MANIFEST = "manifest.json"

#: Seconds in which a file system of several machines may not show a new file yet, and between two looks.
_SEEN_S, _LOOK_S = 30.0, 0.1

_FOLDER = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"([A-Za-z0-9_]+)(?:-(\d{5}))?(?:\.1)?\.(safetensors|json)")

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """The state saved after `step` applied steps of the run with id `run`, its tensors on the CPU.

    loop: the training loop's own state.
    """

    step: int
    run: str
    state: StepState
    loop: dict[str, Any]


class _ReadError(CheckpointError):
    """The disk would not give a file: passed over, and never removed, for it may be whole."""


class _LayoutError(CheckpointError):
    """A checkpoint of another version of this layout: neither passed over nor removed."""


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    run: str
    step: int
    files: Mapping[str, Written]


def begin_checkpoint(folder: Path, step: int) -> int:
    """Make room for the files of a checkpoint beside those of a complete one; return which of two names they have.

    Raises: DiskFullError or OutputError.
    """
    path = checkpoint_path(folder, step)
    atomic_files.make_folder(folder)
    atomic_files.make_folder(path)
    taken = _clear(path)
    return int(bool(taken) and not any(name.count(".") > 1 for name in taken))


def save_part(
    folder: Path, step: int, second: int, rank: int, state: StepState, *, progress: Callable[[], None] = lambda: None
) -> dict[str, Written]:
    """Write one process's part of a checkpoint; return its files.

    second: as of `begin_checkpoint`. progress: called whenever some of it is written.

    Raises: DiskFullError or OutputError.
    """
    mark = f"-{rank:05d}{'.1' * second}"
    return _write_files(checkpoint_path(folder, step), mark, state, _json_of(state), progress)


def save_checkpoint(
    folder: Path, step: int, *, run: str, state: StepState, loop: Mapping[str, Any], second: int | None = None,
    others: Callable[[], Mapping[str, Written]] = dict, progress: Callable[[], None] = lambda: None,
) -> Path:  # fmt: skip
    """Save a checkpoint as `folder`/step-<step>, on the disk when this returns, and return its path.

    state: tensors of any device and layout; tied ones are stored once per name.
    loop: JSON, NaN and infinities allowed, as in values of `state`. Keys come back as text and tuples as lists.
    second: as of `begin_checkpoint`, if that was called. others: waits for the files of other processes. progress:
    called whenever some of it is written.

    Raises: DiskFullError or OutputError; what was there before is then as whole as it was.
    """
    path, state_json = checkpoint_path(folder, step), _json_of(state, loop=dict(loop))
    try:
        second = begin_checkpoint(folder, step) if second is None else second
        files = _write_files(path, ".1" * second, state, state_json, progress)
        theirs = others()
        for name, stored in theirs.items():
            _wait_until_there(path / name, stored)
        files |= theirs
        named = {name: {"bytes": stored.num_bytes, "sha256": stored.sha256} for name, stored in files.items()}
        body = {"schema": SCHEMA, "run": run, "step": step, "files": named}
        manifest = json.dumps({**body, "sha256": _own_sha256(body)}, indent=2).encode("ascii") + b"\n"
        atomic_files.write_bytes(path / MANIFEST, manifest)
    except BaseException:
        # The manifest on the disk says what to keep: an error can come before it was replaced, or just after.
        with suppress(BrimfulError):
            if not _clear(path):
                atomic_files.remove(path)
        raise
    _clear(path)
    return path


def _json_of(state: StepState, **more: Any) -> bytes:
    """All of a state that is no tensor, as JSON. more: beside it."""
    values = {
        "counters": asdict(state.counters),
        "optimizer": {
            name: {"tensors": list(kept.tensors), "values": kept.values, "on_host": kept.on_host}
            for name, kept in state.optimizer.items()
        },
        "groups": [dict(group) for group in state.groups],
        "parts": {name: asdict(part) for name, part in state.parts.items()},
    }
    return json.dumps({"step": values, **more}, indent=2).encode("ascii")


def _write_files(
    path: Path, mark: str, state: StepState, state_json: bytes, progress: Callable[[], None]
) -> dict[str, Written]:
    """Write the files of a state. mark: after the stems of their names."""
    parameters = state.optimizer.items()
    optimizer = {f"{name}/{key}": tensor for name, kept in parameters for key, tensor in kept.tensors.items()}
    tensors = {"weights": state.weights, "buffers": state.buffers, "optimizer": optimizer}
    contents = {f"{stem}{mark}.safetensors": _safetensors(group) for stem, group in tensors.items()}
    contents[f"state{mark}.json"] = iter([state_json])
    return {name: atomic_files.write_chunks(path / name, each, progress=progress) for name, each in contents.items()}


def _wait_until_there(file: Path, stored: Written) -> None:
    """Wait for a file that another process has written to be seen from here. Raises: OutputError."""
    until = time.monotonic() + _SEEN_S
    while True:
        try:
            _check_size(file, stored)
        except CheckpointError as error:
            if time.monotonic() > until:
                why = "all processes must see one folder under this name"
                raise OutputError(f"{error}, and another process has written it", hint=why) from error
            time.sleep(_LOOK_S)
        else:
            return


def load_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`. Every file's size and SHA-256 are checked before it is parsed.

    Raises: CheckpointError naming the file that is missing, truncated or changed.
    """
    return _load(path, _read_manifest(path))


def saved_steps(folder: Path) -> list[int]:
    """Steps that `folder` has something of, whole or not, in ascending order. Raises: CheckpointError."""
    return sorted(step for step, _ in _step_folders(folder))


def checkpoint_path(folder: Path, step: int) -> Path:
    """Path of the checkpoint of `step`, present or not."""
    return folder / f"step-{step:08d}"


def newest_whole(folder: Path, run: str) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint of `run` with the highest step that is whole, and a line on each newer folder passed over.

    None if there is no whole one. Damaged and incomplete folders, and those of other runs, are passed over.
    Raises: CheckpointError if `folder` itself cannot be read, or for a checkpoint of another version of the layout.
    """
    passed_over: list[str] = []
    for _, path in sorted(_step_folders(folder), reverse=True):
        try:
            manifest = _read_manifest(path)
            if manifest.run != run:
                raise CheckpointError(f"{path_text(path)} belongs to another run: {printable(manifest.run)}")
            return _load(path, manifest), passed_over
        except _LayoutError:
            raise
        except CheckpointError as error:
            passed_over.append(str(error))
    return None, passed_over


def rotate(
    folder: Path, keep: int, protect: Collection[int] = (), *, run: str, newest: int, passed_over: Collection[int] = ()
) -> list[Path]:
    """Remove old checkpoints of `run`, oldest first, and return them: all but the `keep` highest steps up to `newest`.

    newest: the step just saved; never removed, and without it being complete nothing is. A number alone does not make
    a checkpoint new: folders of later steps were passed over on resume and count for nothing; they are left alone.
    protect: steps kept besides. passed_over: steps that resuming found damaged; they count for nothing and are left
    alone, though their sizes may look whole. Incomplete folders up to `newest` are removed; unreadable ones and other
    runs' are not.
    """
    complete: dict[int, Path] = {}
    incomplete: dict[int, Path] = {}
    for step, path in sorted(_step_folders(folder)):
        if step <= newest and step not in passed_over:
            _sort_in(step, path, run, complete, incomplete)
    if newest not in complete:
        return []
    kept = {*sorted(complete)[-max(keep, 1) :], *protect}  # the newest is the last of them
    surplus = [path for step, path in sorted({**complete, **incomplete}.items()) if step not in kept]
    for path in surplus:
        # The manifest goes first, and on the disk: half a checkpoint must not look like one.
        atomic_files.remove(path / MANIFEST)
        atomic_files.sync(path)
        atomic_files.remove(path)
    return surplus


def _sort_in(step: int, path: Path, run: str, complete: dict[int, Path], incomplete: dict[int, Path]) -> None:
    """Put `path` where it belongs as far as sizes tell; hashing all content after each save would cost too much."""
    try:
        manifest = _read_manifest(path)
        if manifest.run != run:
            return
        for name, stored in manifest.files.items():
            _check_size(path / name, stored)
    except (_ReadError, _LayoutError):
        return
    except CheckpointError:
        incomplete[step] = path
    else:
        complete[step] = path


def _step_folders(folder: Path) -> list[tuple[int, Path]]:
    try:
        paths = list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{path_text(folder)} cannot be read: {error.strerror}") from error
    found = [(_FOLDER.fullmatch(path.name), path) for path in paths]
    named = [(int(match[1]), path) for match, path in found if match and path.is_dir()]
    return [(step, path) for step, path in named if path == checkpoint_path(folder, step)]


def _clear(path: Path) -> frozenset[str]:
    """Remove all from `path` but its manifest and the files that names; return what is kept, none if incomplete."""
    try:
        kept = frozenset({MANIFEST, *_read_manifest(path).files})
    except (_ReadError, _LayoutError) as error:
        raise OutputError(str(error)) from error
    except CheckpointError:
        kept = frozenset()
    with atomic_files.file_errors(path):
        surplus = sorted(entry for entry in path.iterdir() if entry.name not in kept)
    for entry in surplus:
        atomic_files.remove(entry)
    return kept


def _safetensors(tensors: Mapping[str, torch.Tensor]) -> Iterator[Data]:
    """The bytes of a safetensors file, one tensor at a time.

    The library's own writer holds up to three copies of a file in memory, too much for an optimizer's states.
    Format: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON header, tensors without holes).
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that all are aligned
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        if name == "__metadata__" or tensor.dtype not in _DTYPES:
            raise ValueError(f"a tensor {name!r} of {tensor.dtype} cannot be stored in a checkpoint")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header_json = json.dumps(header).encode("ascii")
    header_json += b" " * (-len(header_json) % 8)
    yield len(header_json).to_bytes(8, "little") + header_json
    for name in names:
        tensor = tensors[name].detach().to("cpu").contiguous()
        # Not reshape(-1): a contiguous tensor of one element may keep a stride that cannot be viewed as bytes.
        yield tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _own_sha256(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode("ascii")).hexdigest()


def _read_manifest(path: Path) -> _Manifest:
    """The manifest of the folder `path`. Raises: CheckpointError."""
    where = path_text(path / MANIFEST)
    try:
        manifest = _parse_manifest((path / MANIFEST).read_bytes(), where)
    except FileNotFoundError:
        raise CheckpointError(f"{path_text(path)} is incomplete: it has no {MANIFEST}") from None
    except OSError as error:
        raise _ReadError(f"{where} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where} cannot be used: it is not a manifest") from error
    except ValueError as error:
        raise CheckpointError(f"{where} cannot be used: {printable(error)}") from error
    if _FOLDER.fullmatch(path.name) and path != checkpoint_path(path.parent, manifest.step):
        raise CheckpointError(f"{where} cannot be used: it is that of step {manifest.step}")
    return manifest


def _parse_manifest(content: bytes, where: str) -> _Manifest:
    """Raises: ValueError with the reason; KeyError, TypeError or AttributeError for what is no manifest at all."""
    body = json.loads(content)
    own_sha256 = body.pop("sha256")
    if own_sha256 != _own_sha256(body):
        raise ValueError("its SHA-256 is not the one it states")
    if body["schema"] not in _READ:
        raise _LayoutError(
            f"{where} has layout {printable(body['schema'])}, and this version of brimful reads {SCHEMA}:"
            " go on with the version that wrote it, or start another run"
        )
    for name in body["files"]:
        if not _FILE.fullmatch(name):  # such as ../../elsewhere.json
            raise ValueError(f"it names the file {printable(name)}")
    files = {
        name: Written(num_bytes=operator.index(entry["bytes"]), sha256=entry["sha256"])
        for name, entry in body["files"].items()
    }
    return _Manifest(run=body["run"], step=operator.index(body["step"]), files=files)


def _load(path: Path, manifest: _Manifest) -> Checkpoint:
    tensors: defaultdict[int, dict[str, dict[str, torch.Tensor]]] = defaultdict(dict)  # by process
    values: dict[int, Any] = {}
    for name, stored in manifest.files.items():
        file, (stem, number, kind) = path / name, cast(re.Match[str], _FILE.fullmatch(name)).groups()
        rank = int(number or 0)
        _check_size(file, stored)
        try:
            with file.open("rb") as opened:
                sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path_text(file)} cannot be read: {error.strerror}") from error
        if sha256 != stored.sha256:
            raise CheckpointError(f"{path_text(file)} is damaged: its SHA-256 is not that of its {MANIFEST}")
        try:
            if kind == "safetensors":
                tensors[rank][stem] = _mapped(file)
            else:
                values[rank] = json.loads(file.read_bytes())
        except (ValueError, KeyError, RecursionError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path_text(file)} cannot be parsed: {printable(error)}") from error
    try:
        states = [_state_of(tensors[rank], values[rank]["step"]) for rank in sorted(values)]
        loop, state = values[0]["loop"], whole_of(states)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path_text(path)} is damaged: its files are not those of a step") from error
    return Checkpoint(step=manifest.step, run=manifest.run, state=state, loop=loop)


def _mapped(file: Path) -> dict[str, torch.Tensor]:
    """Tensors of a file, whose pages the system reads when they are used, and may drop: each of several processes that
    go on from a checkpoint has all of it."""
    with safetensors.safe_open(file, framework="pt") as opened:
        names = opened.keys()  # it is no mapping
        return {name: opened.get_tensor(name) for name in names}


def _state_of(tensors: Mapping[str, Mapping[str, torch.Tensor]], values: Mapping[str, Any]) -> StepState:
    optimizer = {
        name: ParameterState(
            tensors={key: tensors["optimizer"][f"{name}/{key}"] for key in kept["tensors"]},
            values=kept["values"],
            on_host=tuple(kept["on_host"]),
        )
        for name, kept in values["optimizer"].items()
    }
    counters, parts = values["counters"], values.get("parts", {})
    return StepState(
        weights=tensors["weights"],
        buffers=tensors["buffers"],
        optimizer=optimizer,
        counters=Counters(**counters | {"used": tuple(counters["used"])}),
        groups=tuple(values.get("groups", ())),
        parts={name: Part(**{key: tuple(at) for key, at in part.items()}) for name, part in parts.items()},
    )


def _check_size(file: Path, stored: Written) -> None:
    where = path_text(file)
    try:
        num_bytes = file.stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{where} is missing") from None
    except OSError as error:
        raise _ReadError(f"{where} cannot be read: {error.strerror}") from error
    if num_bytes < stored.num_bytes:
        raise CheckpointError(f"{where} is truncated: {num_bytes} of {stored.num_bytes} bytes")
    if num_bytes > stored.num_bytes:
        raise CheckpointError(f"{where} is damaged: {num_bytes} bytes instead of {stored.num_bytes}")
