"""The folder of a model, by the name that a user gave: a path, or a name on the Hugging Face hub."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from brimful.core.atomic_files import path_text
from brimful.core.errors import ModelError, printable
from brimful.models.hub.quiet import first_line

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
#: Small files, and weights under the names that transformers looks for; not the other exports that many models carry.
_FILES = ["*.json", "*.txt", "*.model", "*.bpe", "*.py", "model.safetensors", "model-*-of-*.safetensors"]
_FILES += ["adapter_model.safetensors"]
_PICKLES = ["pytorch_model.bin", "pytorch_model-*-of-*.bin"]


def find_folder(name: str, *, trust_remote_code: bool, allow_pickle: bool) -> Path:
    """The folder `name`, or the one in the local cache of the hub, downloaded first where it is not there.

    Raises: ModelError if there is neither, or the hub cannot be reached.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        is_part = (path.parent / "config.json").exists()
        hint = f"give the folder, {path_text(path.parent)}" if is_part else "give a folder, or a name on the hub"
        raise ModelError(f"{path_text(path)} is a file: a model is a folder", hint=hint)
    if not _HUB_NAME.fullmatch(name):
        raise ModelError(
            f"there is no folder {path_text(path)}", hint=_near(path) or "give a folder, or a name on the hub"
        )
    folder = _download(name, path, [file for file in _FILES if trust_remote_code or file != "*.py"])
    if allow_pickle and not any(folder.glob("*.safetensors")):
        _download(name, path, _PICKLES)
    return folder


def _download(name: str, path: Path, patterns: list[str]) -> Path:
    import huggingface_hub

    try:
        # No sub-folders: they hold exports for other runtimes.
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except Exception as error:  # its own errors, those of the HTTP client under it, and those of the disk
        # A model that transformers fetched can lack small files that we ask for and do not need.
        config = huggingface_hub.try_to_load_from_cache(name, "config.json")
        if isinstance(config, str):
            return Path(config).parent
        raise _unreachable(name, path, error) from None  # what the HTTP client went through helps nobody


def _unreachable(name: str, path: Path, error: Exception) -> ModelError:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return ModelError(
            f"{printable(name)} is gated on the hub, and access was not granted",
            hint="request access on its page on the hub, then log in with `hf auth login`",
        )
    if "RepositoryNotFoundError" in kinds:
        return ModelError(
            f"{printable(name)} is neither a folder here nor a model on the hub",
            hint=_near(path) or "look at its spelling; for a private one, log in with `hf auth login`",
        )
    unreachable = kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "TimeoutException"}
    why = "be reached (no network, or it is turned off)" if unreachable else f"give it: {first_line(error)}"
    return ModelError(
        f"there is no folder {printable(name)}, and the hub cannot {why}",
        hint=(_near(path) if path.parent.is_dir() else None)
        or "give a folder, or download it once where there is a network",
    )


def _near(path: Path) -> str | None:
    """A hint that names the folders beside `path` with almost its name."""
    try:
        beside = sorted(entry.name for entry in path.parent.iterdir() if entry.is_dir())
    except OSError:
        return f"there is no folder {path_text(path.parent)} either"
    near = difflib.get_close_matches(path.name, beside, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(path_text(path.parent / name) for name in near)}?" if near else None
