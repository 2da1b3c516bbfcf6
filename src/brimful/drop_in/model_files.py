"""The folder of a model that a pipeline is given: by name, in memory, or with another tokenizer."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from brimful.drop_in.models_in_memory import NotHere, refuse_changed
from brimful.models.hub.adapters import find_adapter
from brimful.models.hub.resolve import find_folder


class Parts:
    """A model's folder or hub name. A temporary folder goes with it."""

    def __init__(self, path: str | Path, *, is_temporary: bool = False) -> None:
        self.path = path
        if is_temporary:
            weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)


def model_folder(model: Any, tokenizer: Any, *, trust_remote_code: bool) -> Parts:
    """Find or make the folder of a model with its tokenizer.

    model: a name, or a model in memory, whose weights of now are copied. tokenizer: None for the model's own.
    Raises: NotHere for a model that would answer differently once it is saved and read.
    """
    if isinstance(model, str | Path):
        if tokenizer is None or str(tokenizer) == str(model):
            return Parts(model)
        source = find_folder(str(model), trust_remote_code=trust_remote_code, allow_pickle=False)
    elif tokenizer is None:
        raise NotHere("a model in memory comes with its tokenizer")
    else:
        refuse_changed(model)
    folder = Path(tempfile.mkdtemp(prefix="brimful-model-"))
    parts = Parts(folder, is_temporary=True)
    if isinstance(model, str | Path):
        _link(source, folder)
        if (adapter := find_adapter(source)) is not None and not (folder / "config.json").exists():
            base = find_folder(adapter.base, trust_remote_code=trust_remote_code, allow_pickle=False)
            (folder / "config.json").symlink_to((base / "config.json").resolve())
    else:
        model.save_pretrained(folder)
    if isinstance(tokenizer, str | Path):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    tokenizer.save_pretrained(folder)
    return parts


def _link(source: Path, folder: Path) -> None:
    """Link the files of a model in `folder`, without those of its tokenizer."""
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith(("tokenizer", "special_tokens", "added_tokens", "vocab")):
            (folder / file.name).symlink_to(file.resolve())
