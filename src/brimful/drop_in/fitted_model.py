"""The model that a fit has left: a folder, and the classifier that reads it at the first call."""

from __future__ import annotations

import shutil
import tempfile
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from brimful.api import Classifier
from brimful.core.errors import ArgumentError, printable
from brimful.drop_in.given_rows import GivenTexts


class FitFolder:
    """A new folder for one fit: under `parent`, or a temporary one, removed with the last estimator that refers to it.

    Pickled, it is its path alone. A temporary folder that was pickled stays, since nobody can know for how long.
    """

    def __init__(self, parent: str | Path | None) -> None:
        self._remove: Any = None
        if parent is None:
            self.path = Path(tempfile.mkdtemp(prefix="brimful-fit-"))
            self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        else:
            self.path = _next_folder(Path(parent))

    @property
    def is_temporary(self) -> bool:
        """True while the folder goes away with its estimators."""
        return self._remove is not None and self._remove.alive

    def __getstate__(self) -> Mapping[str, Any]:
        if self.is_temporary:
            self._remove.detach()
            warnings.warn(
                f"the pickle refers to {self.path}, a temporary folder, which now stays until somebody removes it;"
                " hint: TextClassifier(output=FOLDER) keeps its models there",
                stacklevel=2,
            )
        return {"path": self.path, "_remove": None}

    def __copy__(self) -> FitFolder:
        return self

    def __deepcopy__(self, memo: object) -> FitFolder:
        return self


def _next_folder(parent: Path) -> Path:
    """`fit-1`, or the first number that is free: fits may run side by side."""
    number = 0
    while True:
        number += 1
        path = parent / f"fit-{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path.absolute()


class FittedModel:
    """A trained classifier by reference to its folder. options: of `Classifier`. It pickles without weights."""

    def __init__(self, folder: FitFolder, options: Mapping[str, Any]) -> None:
        self.folder, self._options = folder, dict(options)
        self._classifier: Classifier | None = None

    @property
    def path(self) -> Path:
        """The folder of the model, in Hugging Face form."""
        return self.folder.path / "model"

    def logits(self, given: GivenTexts) -> np.ndarray:
        """(N, C) of the model's outputs. Raises: ArgumentError where the folder is gone."""
        if self._classifier is None:
            if not self.path.is_dir():
                raise ArgumentError(
                    f"{printable(self.path, 200)} is not there: a pickled TextClassifier refers to its model's folder",
                    hint="copy the folder along, and set estimator.model_.folder.path",
                )
            self._classifier = Classifier(self.path, **self._options)
        with self._classifier as classifier:
            return classifier.logits(given.texts, given.pairs)

    def __getstate__(self) -> Mapping[str, Any]:
        return {**vars(self), "_classifier": None}

    def __deepcopy__(self, memo: object) -> FittedModel:
        return FittedModel(self.folder, self._options)
