"""The names that transformers' models bring, found once in a process instead of twice."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from brimful.models.hub.put_off import found_by_name


def import_model_names() -> None:
    """Import transformers, without torch, and its package of models.

    Importing either reads the source of every model, 1,600 files, for the names in it: 0.3 to 0.5 s each. The package
    of models is given what was found for the whole. Where transformers is another than expected, it finds them itself.
    """
    with found_by_name():
        transformers: Any = import_module("transformers")
    structures: Any = import_module("transformers.utils.import_utils")
    if "transformers.models" in sys.modules:
        return
    find = structures.define_import_structure
    with suppress(Exception):
        whole = find(Path(transformers.__file__).parent / "models", prefix="models")  # kept by a cache
        of_models = {
            backends: {name.removeprefix("models."): names for name, names in found.items() if _is_models(name)}
            for backends, found in whole.items()
        }
        structures.define_import_structure = lambda *_, **__: of_models
    try:
        import_module("transformers.models")
    finally:
        structures.define_import_structure = find


def _is_models(name: str) -> bool:
    return name.startswith("models.")
