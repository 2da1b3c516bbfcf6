"""brimful.json of a saved model: the inputs that it was trained on, for whoever classifies with it.

A file of its own, not a part of config.json: other tools that train the model further do not copy it, and so cannot
leave behind what is no longer true.
"""

from __future__ import annotations

from pathlib import Path

from brimful.core.atomic_files import path_text
from brimful.core.errors import ModelError
from brimful.core.records import TrainedInputs, from_json, to_json

FILE = "brimful.json"


def write_trained_inputs(folder: Path, inputs: TrainedInputs) -> None:
    """Write the file into the folder of a model."""
    (folder / FILE).write_text(to_json(inputs), encoding="utf-8")


def read_trained_inputs(folder: Path) -> TrainedInputs | None:
    """Return what the file says; None for a model that has none, such as one that brimful did not train.

    Raises: ModelError for a file that is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        inputs = from_json(TrainedInputs, path.read_text(encoding="utf-8"))
        names = [inputs.text_column, *inputs.label_columns]
        names += [] if inputs.pair_column is None else [inputs.pair_column]
        if type(inputs.max_length) is not int or inputs.max_length < 1 or not all(isinstance(n, str) for n in names):
            raise ValueError("a value of another kind")
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"{path_text(path)} cannot be read: it says which columns and lengths the model was trained on",
            hint="copy the model again, or remove this file and give --text-column and --max-length",
        ) from error
    return inputs
