"""The weight files of a model's folder: which there are, and whether they are whole. Reads headers, never weights.

A safetensors file is 8 bytes with the length N of the header, N bytes of JSON that give each tensor's dtype, shape and
place, and the tensors' bytes without holes (https://github.com/huggingface/safetensors#format). torch is needed only
to look into a pickle.

    weights = find_weights(Path("model"), allow_pickle=False)
    weights.shapes["classifier.weight"]   # (2, 384)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brimful.core.atomic_files import path_text
from brimful.core.errors import ModelError, printable
from brimful.models.hub.quiet import first_line

AGAIN = "download or copy the model again"
PICKLE_HINT = "--allow-pickle loads it, refusing anything in it but tensors; safer is the same model as safetensors"

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLE, _PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_HEADER_LIMIT_BYTES = 100_000_000  # safetensors' own
_MOST_DIMENSIONS = 64  # torch's own
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_OTHER_WEIGHTS = {
    "adapter_model.safetensors": ("only a PEFT adapter", "merge it into its base model with PEFT, and save that"),
    "adapter_model.bin": ("only a PEFT adapter", "merge it into its base model with PEFT, and save that"),
    "tf_model.h5": ("only weights of TensorFlow", "save the model from PyTorch, as model.safetensors"),
    "flax_model.msgpack": ("only weights of Flax", "save the model from PyTorch, as model.safetensors"),
}


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weight files that were found whole. shapes: of each tensor, by its name in the files."""

    files: tuple[Path, ...]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def total_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


def find_weights(folder: Path, *, allow_pickle: bool) -> Weights:
    """The weights of the model in `folder`, in the order of preference of transformers.

    Raises: ModelError if there are none, if a file is missing, torn or a stand-in of git-lfs, or for a pickle unless
    allow_pickle.
    """
    if (folder / _SINGLE).is_file():
        return _safetensors((folder / _SINGLE,))
    if (folder / _INDEX).is_file():
        return _sharded(folder / _INDEX, pickled=False)
    for name in (_PICKLE, _PICKLE_INDEX):
        path = folder / name
        if path.is_file() and not allow_pickle:
            raise ModelError(
                f"{path_text(folder)}: its weights are there only as a pickle ({name}), which can hold code",
                hint=PICKLE_HINT,
            )
        if path.is_file():
            return _pickled((path,)) if name == _PICKLE else _sharded(path, pickled=True)
    raise _no_weights(folder)


def refuse_lfs_pointer(path: Path) -> None:
    """Raises: ModelError if `path` is the stand-in that git leaves for a file that git-lfs has not fetched."""
    with path.open("rb") as file:
        if file.read(40).startswith(b"version https://git-lfs.github.com/spec/"):
            raise ModelError(
                f"{path_text(path)} is a git-lfs pointer, not the file itself",
                hint=f"run `git lfs install` and `git lfs pull` in {path_text(path.parent)}",
            )


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises: ModelError with the place of what is wrong."""
    refuse_lfs_pointer(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ModelError(f"{path_text(path)} is not JSON: {error.msg} at {where}", hint=AGAIN) from error
    except (UnicodeDecodeError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else "not UTF-8 text"
        raise ModelError(f"{path_text(path)} is not JSON: {why}", hint=AGAIN) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path_text(path)} holds a JSON {type(value).__name__}, not an object", hint=AGAIN)
    return value


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor in a safetensors file, by its header, which is checked against the file to the last byte.

    Raises: ModelError naming the file and the byte or the tensor.
    """
    refuse_lfs_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if length > _HEADER_LIMIT_BYTES:
            raise _corrupt(path, f"bytes 0 to 7 give a header of {length} bytes")
        if len(prefix) < 8 or length > size - 8:
            raise _truncated(path, f"{size} bytes, too few for its header")
        text = file.read(length)
    if not text.startswith(b"{"):
        raise _corrupt(path, "its header is not a JSON object")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"its header is not JSON: {error}") from error
    header.pop("__metadata__", None)
    _check_places(path, {name: _place(path, name, entry) for name, entry in header.items()}, size - 8 - length)
    return {name: tuple(entry["shape"]) for name, entry in header.items()}


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _place(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """First byte and byte after the last of one tensor, counted from the end of the header."""
    said = f"the header's entry of {printable(name)!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _corrupt(path, f"{said} lacks dtype, shape or data_offsets")
    shape, offsets, bits = entry["shape"], entry["data_offsets"], _BITS.get(str(entry["dtype"]))
    if bits is None:
        raise _corrupt(path, f"{said} has an unknown dtype {printable(entry['dtype'])}")
    if not _whole_numbers(shape) or len(shape) > _MOST_DIMENSIONS or not _whole_numbers(offsets) or len(offsets) != 2:
        raise _corrupt(path, f"{said} has a shape or offsets that are not whole numbers")
    begin, end = offsets
    if math.prod(shape) * bits != (end - begin) * 8:
        raise _corrupt(path, f"{said} gives {end - begin} bytes to {entry['dtype']} {shape}")
    return begin, end


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_places(path: Path, places: Mapping[str, tuple[int, int]], data_bytes: int) -> None:
    described = max((end for _, end in places.values()), default=0)
    if described > data_bytes:
        raise _truncated(path, f"{data_bytes} bytes of tensors where its header describes {described}")
    position = 0
    for name, (begin, end) in sorted(places.items(), key=lambda place: place[1]):
        if begin != position:
            kind = "a hole" if begin > position else "an overlap"
            raise _corrupt(path, f"{kind} of {abs(begin - position)} bytes before {printable(name)!r}")
        position = end
    if position < data_bytes:
        raise _corrupt(path, f"{data_bytes - position} bytes after the last tensor")


def _safetensors(files: tuple[Path, ...]) -> Weights:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes.update(read_header(file))
    return Weights(files=files, shapes=shapes)


def _pickled(files: tuple[Path, ...]) -> Weights:
    import torch

    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        refuse_lfs_pointer(file)
        try:
            tensors = torch.load(file, map_location="meta", weights_only=True)
            shapes.update({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        except Exception as error:  # unpickling raises anything
            raise ModelError(
                f"{path_text(file)} cannot be read as a pickle of tensors: {first_line(error)}", hint=AGAIN
            ) from error
    return Weights(files=files, shapes=shapes)


def _sharded(index: Path, *, pickled: bool) -> Weights:
    places = read_json_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise _corrupt(index, "it has no weight_map from tensors to files")
    names = sorted(set(places.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise _corrupt(index, f"it names a file outside its folder, {printable(outside[0])!r}")
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise ModelError(
            f"{path_text(index.parent)}: {len(missing)} of {len(names)} weight files are missing: "
            + printable(", ".join(missing)),
            hint=AGAIN,
        )
    files = tuple(index.parent / name for name in names)
    weights = _pickled(files) if pickled else _safetensors(files)
    if absent := [name for name in places if name not in weights.shapes]:
        raise _corrupt(index, f"{len(absent)} tensors it lists are in no file, first {printable(absent[0])!r}")
    return weights


def _no_weights(folder: Path) -> ModelError:
    for name, (what, hint) in _OTHER_WEIGHTS.items():
        if (folder / name).is_file():
            return ModelError(f"{path_text(folder)}: {what} ({name})", hint=hint)
    if any(folder.glob("*.gguf")):
        return ModelError(f"{path_text(folder)}: only GGUF weights", hint="use the model they were made from")
    return ModelError(
        f"{path_text(folder)}: no weights, neither {_SINGLE} nor {_INDEX}",
        hint=f"{AGAIN}, with all its files",
    )


def _corrupt(path: Path, what: str) -> ModelError:
    return ModelError(f"{path_text(path)} is corrupt: {what}", hint=AGAIN)


def _truncated(path: Path, what: str) -> ModelError:
    return ModelError(f"{path_text(path)} is truncated: {what}", hint=AGAIN)
