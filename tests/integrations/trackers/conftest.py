"""A tiny model, rows for it, and a package in wandb's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from integrations.trackers.pretended import Pretended
from runs import save_tiny_model, single_label_rows, write_rows


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("trackers") / "base", dropout=0.0)


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("trackers") / "rows.jsonl", single_label_rows(60))


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretended:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    (tmp_path / "packages").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    return Pretended(tmp_path / "packages")
