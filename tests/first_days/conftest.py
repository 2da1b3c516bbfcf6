"""The command line in this process, and a base model and a classifier for it to work on."""

from __future__ import annotations

import pytest

from commands import Brimful, Files, call
from tiny_files import save_base, save_classifier, write_reviews


@pytest.fixture
def brimful() -> Brimful:
    return call


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A base model, a classifier, and 40 reviews."""
    folder = tmp_path_factory.mktemp("files")
    return Files(
        base=save_base(folder / "base"),
        classifier=save_classifier(folder / "classifier", ["bad", "good"]),
        reviews=write_reviews(folder / "reviews.csv", 40),
    )
