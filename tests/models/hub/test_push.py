"""Pushing a model, to a hub on this machine that keeps what it is given."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from brimful.core.errors import OptionError, OutputError
from brimful.models.hub.push import check_push, push_model
from commands import call
from tiny_files import save_base, write_reviews


class Hub(ThreadingHTTPServer):
    """Answers what an upload asks; every file is small enough for its commit.

    files: by path, as they were committed. refused: status that commits are answered with.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.files: dict[str, bytes] = {}
        self.made: list[dict[str, Any]] = []
        self.refused: int | None = None


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != "Bearer hf_secret":
            self._answer(401, {"error": "Invalid username or password."})
        else:
            self._answer(200, {"name": "me", "type": "user", "auth": {}})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        page = f"http://127.0.0.1:{self.server.server_port}/me/films"
        if self.path.endswith("/repos/create"):
            self.server.made.append(json.loads(body))
            self._answer(200, {"url": page, "name": "me/films"})
        elif self.path.endswith("/validate-yaml"):
            self._answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [each["path"] for each in json.loads(body)["files"]]
            plain = [{"path": path, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for path in files]
            self._answer(200, {"files": plain})
        elif "/commit/" in self.path and self.server.refused is not None:
            self._answer(self.server.refused, {"error": "no space left"})
        elif "/commit/" in self.path:
            for line in body.splitlines():
                if (found := json.loads(line))["key"] == "file":
                    self.server.files[found["value"]["path"]] = base64.b64decode(found["value"]["content"])
            commit = {"commitUrl": f"{page}/commit/1", "commitOid": "1" * 40, "success": True, "pullRequestUrl": None}
            self._answer(200, commit)
        else:
            self._answer(404, {"error": f"unknown: {self.path}"})

    def _answer(self, status: int, found: object) -> None:
        text = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{made.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\0" * 100)
    return tmp_path / "model"


def test_a_folder_is_there_whole(hub: Hub, folder: Path) -> None:
    check_push("me/films")
    assert push_model(folder, "me/films").endswith("/me/films")
    assert hub.files == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert hub.made[0]["name"] == "films"
    assert hub.made[0].get("private", hub.made[0].get("visibility")) in (True, "private")


def test_a_hub_that_refuses_leaves_the_model(hub: Hub, folder: Path) -> None:
    hub.refused = 403
    with pytest.raises(OutputError, match="may not write there"):
        push_model(folder, "me/films")
    hub.refused = 413
    with pytest.raises(OutputError) as caught:
        push_model(folder, "me/films")
    assert f"the model is saved: push it with `hf upload me/films {folder}`" in str(caught.value.hint)
    assert len(list(folder.iterdir())) == 2


def test_nobody_is_logged_in(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(OutputError, match="nobody is logged in"):
        check_push("me/films")


@pytest.mark.parametrize("name", ["", "a/b/c", "../up", "my model", "-x/y"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(OptionError, match="no name of a repository"):
        check_push(name)


def test_no_network_is_said_before_anything_is_read(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    base, data = save_base(tmp_path / "base"), write_reviews(tmp_path / "rows.csv", 24)
    words = ["train", data, "--model", base, "--output", tmp_path / "run", "--push-to-hub", "me/films"]
    said = call(*words)
    assert said.code == 2
    assert said.err.splitlines()[-2].startswith("error: the hub cannot be pushed to: it cannot be reached")
    assert "reading" not in said.err
    assert not (tmp_path / "run").exists()


def test_a_run_pushes_its_model_and_again_when_resumed(hub: Hub, tmp_path: Path) -> None:
    base, data = save_base(tmp_path / "base"), write_reviews(tmp_path / "rows.csv", 24)
    words = ["train", data, "--model", base, "--output", tmp_path / "run", "--max-steps", 1, "--batch-size", 8]
    words += ["--push-to-hub", "me/films", "--no-baselines"]
    hub.refused = 403
    assert call(*words).code == 2
    hub.refused = None
    said = call(*words, "--resume")
    assert said.code == 0, said.err
    assert "pushed: http" in said.err
    saved = {path.name: path.read_bytes() for path in (tmp_path / "run" / "model").iterdir()}
    assert {name: hub.files.get(name) for name in saved} == saved
