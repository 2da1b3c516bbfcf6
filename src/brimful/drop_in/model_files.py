"""The folder of a model that a pipeline is given: by name, in memory, or with another tokenizer."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from brimful.core.errors import printable
from brimful.drop_in.models_in_memory import NotHere, refuse_changed
from brimful.models.hub.adapters import find_adapter
from brimful.models.hub.resolve import find_folder

#: Settings of a tokenizer that its calls read, also where they were set after it was made. `save_pretrained` leaves out
#: some of them.
_SETTINGS = ("truncation_side", "split_special_tokens", "model_max_length", "model_input_names")

#: Beginnings of names of files that tokenizers write.
_OF_TOKENIZERS = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "sentencepiece", "spiece", "chat_")


class Parts:
    """A model's folder or hub name. A temporary folder goes with it. tokenizer: the one given, None for the model's."""

    def __init__(self, path: str | Path, *, tokenizer: Any = None, is_temporary: bool = False) -> None:
        self.path, self.tokenizer = path, tokenizer
        if is_temporary:
            weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)


def tokenizer_settings(tokenizer: Any) -> dict[str, Any]:
    """Settings of a tokenizer as they are now, and its number of tokens: those of a copy that encodes alike."""
    found = {name: getattr(tokenizer, name) for name in _SETTINGS if hasattr(tokenizer, name)}
    return copy.deepcopy(found) | {"num_tokens": len(tokenizer)}


def model_folder(model: Any, tokenizer: Any, *, trust_remote_code: bool) -> Parts:
    """Find or make the folder of a model with its tokenizer.

    model: a name, or a model in memory, whose weights of now are copied. tokenizer: None for the model's own.
    Raises: NotHere for a model that would answer differently once it is saved and read.
    """
    by_name = isinstance(model, str | Path)
    if isinstance(tokenizer, str | Path):
        if by_name and str(tokenizer) == str(model):
            return Parts(model)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    if tokenizer is None:
        if by_name:
            return Parts(model)
        raise NotHere("a model in memory comes with its tokenizer")
    if not hasattr(tokenizer, "save_pretrained"):
        raise NotHere(f"its tokenizer is a {printable(type(tokenizer).__name__)}")
    if not by_name:
        refuse_changed(model)
    folder = Path(tempfile.mkdtemp(prefix="brimful-model-"))
    parts = Parts(folder, tokenizer=tokenizer, is_temporary=True)
    if by_name:
        _link(model, folder, trust_remote_code)
    else:
        model.save_pretrained(folder)
    _save_tokenizer(tokenizer, folder)
    return parts


def _link(model: str | Path, folder: Path, trust_remote_code: bool) -> None:
    """Link the files of a model in `folder`, without those of its tokenizer."""
    source = find_folder(str(model), trust_remote_code=trust_remote_code, allow_pickle=False)
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith(_OF_TOKENIZERS):
            (folder / file.name).symlink_to(file.resolve())
    if (adapter := find_adapter(source)) is not None and not (folder / "config.json").exists():
        base = find_folder(adapter.base, trust_remote_code=trust_remote_code, allow_pickle=False)
        (folder / "config.json").symlink_to((base / "config.json").resolve())


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer with its settings of now."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = {name: value for name, value in tokenizer_settings(tokenizer).items() if name in _SETTINGS}
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | settings), "utf-8")
