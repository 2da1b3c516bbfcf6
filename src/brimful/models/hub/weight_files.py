"""The weight files of a model's folder, checked to be whole by their headers, without reading weights.

weights = find_weights(Path("model"), allow_pickle=False)
weights.shapes["classifier.weight"]   # (2, 384)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from brimful.core.atomic_files import path_text
from brimful.core.errors import ModelError, printable
from brimful.models.hub.quiet import first_line

AGAIN = "download or copy the model again"
PICKLE_HINT = "--allow-pickle loads it, refusing anything in it but tensors; safer is the same model as safetensors"

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLE, _PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_HEADER_LIMIT_BYTES = 100_000_000  # safetensors' own
_OTHER_WEIGHTS = {
    "adapter_model.safetensors": ("only a PEFT adapter", "merge it into its base model with PEFT, and save that"),
    "adapter_model.bin": ("only a PEFT adapter", "merge it into its base model with PEFT, and save that"),
    "tf_model.h5": ("only weights of TensorFlow", "save the model from PyTorch, as model.safetensors"),
    "flax_model.msgpack": ("only weights of Flax", "save the model from PyTorch, as model.safetensors"),
}


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Whole weight files. shapes: of each tensor, by its name in the files."""

    files: tuple[Path, ...]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def total_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def with_adapter(self, shapes: Mapping[str, tuple[int, ...]]) -> Weights:
        """The same beside an adapter's tensors, whose head stands in the place of the model's own."""
        return Weights(files=self.files, shapes={**self.shapes, **shapes})


def find_weights(folder: Path, *, allow_pickle: bool) -> Weights:
    """The weights of the model in `folder`, in the order of preference of transformers.

    Raises: ModelError if there are none, if a file is missing, torn or a stand-in of git-lfs, or for a pickle unless
    allow_pickle.
    """
    if (folder / _SINGLE).is_file():
        return _weights(folder / _SINGLE, pickled=False)
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
            return _weights(path, pickled=True) if name == _PICKLE else _sharded(path, pickled=True)
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


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor in a safetensors file, whose header is checked against the file to the last byte.

    Raises: ModelError naming the file.
    """
    refuse_lfs_pointer(path)
    try:
        with safe_open(path, framework="numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        state = "truncated" if _is_cut_off(path) else "corrupt"
        why = printable(str(error).removeprefix("Error while deserializing header: "), 200)
        said = f"{path_text(path)} is {state}: {why} ({path.stat().st_size:,} bytes)"
        raise ModelError(said, hint=AGAIN) from error


def _is_cut_off(path: Path) -> bool:
    """True for a file that ends before its header does, or before the last tensor in it.

    A file is 8 bytes with the length N of the header, N bytes of JSON with the place of each tensor, and the bytes of
    these (https://github.com/huggingface/safetensors#format).
    """
    data = path.stat().st_size - 8
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if data < 0 or length > data:
            return data < 0 or length <= _HEADER_LIMIT_BYTES
        try:
            header = json.loads(file.read(length))
            last = max(header[name]["data_offsets"][1] for name in header if name != "__metadata__")
            return bool(last > data - length)
        except (ValueError, LookupError, TypeError, RecursionError):
            return False


def _read_pickled_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    import torch

    refuse_lfs_pointer(path)
    try:
        tensors = torch.load(path, map_location="meta", weights_only=True)
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    except Exception as error:  # unpickling raises anything
        said = f"{path_text(path)} cannot be read as a pickle of tensors: {first_line(error)}"
        raise ModelError(said, hint=AGAIN) from error


def _weights(*files: Path, pickled: bool) -> Weights:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes.update(_read_pickled_shapes(file) if pickled else read_shapes(file))
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
    weights = _weights(*(index.parent / name for name in names), pickled=pickled)
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
