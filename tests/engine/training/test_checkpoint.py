"""Checkpoints under every fault that can be made on one machine: kills, power cuts, torn files, full disks."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.core.errors import BrimfulError, CheckpointError, DiskFullError, OutputError
from brimful.engine.training import checkpoint as module
from brimful.engine.training.checkpoint import (
    MANIFEST,
    Checkpoint,
    load_checkpoint,
    newest_whole,
    rotate,
    save_checkpoint,
)
from brimful.step.state import Counters, ParameterState, StepState

RUN = "run-1"
#: What changes a disk, and close, where some file systems tell of a failed write.
OPERATIONS = ("open", "write", "fsync", "close", "replace", "rename", "unlink", "mkdir", "rmdir")


def content(step: int) -> dict[str, Any]:
    weight = torch.arange(64, dtype=torch.float32).reshape(8, 8) * step
    kept = ParameterState(
        tensors={"exp_avg": weight.bfloat16(), "step": torch.tensor(step)},
        values={"schedule/name": "linear", "scales": [0.5, None], "factored": True, "step": step},
        on_host=("step",),
    )
    return {
        "state": state_of(
            {"weight": weight, "transposed": weight.t(), "ids": torch.tensor([step, 2**62])},
            buffers={"positions": torch.arange(step)},
            optimizer={"weight": kept, "transposed": ParameterState(tensors={})},
            counters=Counters(applied=step, scale=2.0**-20 / 3, growth=7, used=("weight",)),
        ),
        "loop": {"epoch": 1, "loss": step / 3, "best": None},
    }


def state_of(weights: dict[str, torch.Tensor] | None = None, **parts: Any) -> StepState:
    counters = Counters(applied=0, scale=1.0, growth=0, used=())
    return StepState(**{"weights": weights or {}, "buffers": {}, "optimizer": {}, "counters": counters} | parts)


def flat(state: StepState) -> dict[str, Any]:
    """Everything of a state, its tensors as bytes."""
    return {
        "weights": {name: raw(tensor) for name, tensor in state.weights.items()},
        "buffers": {name: raw(tensor) for name, tensor in state.buffers.items()},
        "optimizer": {
            name: ({key: raw(tensor) for key, tensor in kept.tensors.items()}, kept.values, kept.on_host)
            for name, kept in state.optimizer.items()
        },
        "others": (state.counters, dict(state.parts)),
    }


def save(folder: Path, step: int, variant: int = 0, run: str = RUN) -> Path:
    return save_checkpoint(folder, step, run=run, **content(step + variant))


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return tensor.dtype, tensor.shape, bytes(dense.flatten().view(torch.uint8).numpy())


def same(found: Checkpoint | None, step: int, variant: int = 0) -> bool:
    expected = content(step + variant)
    return (
        found is not None
        and (found.step, found.run, found.loop) == (step, RUN, expected["loop"])
        and flat(found.state) == flat(expected["state"])
    )


# --- saving and loading ---------------------------------------------------------------------------------------------


def test_comes_back_equal_and_leaves_only_named_files(tmp_path: Path) -> None:
    path = save(tmp_path / "run" / "checkpoints", 120)
    assert path.name == "step-00000120"
    assert same(load_checkpoint(path), 120)
    assert {p.name for p in path.iterdir()} == {
        MANIFEST,
        "weights.safetensors",
        "buffers.safetensors",
        "optimizer.safetensors",
        "state.json",
    }
    manifest = json.loads((path / MANIFEST).read_text())
    assert (manifest["schema"], manifest["run"], manifest["step"]) == (3, RUN, 120)
    assert manifest["files"]["state.json"]["bytes"] == (path / "state.json").stat().st_size


def test_files_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = save(tmp_path, 3)
    loaded = load_file(path / "weights.safetensors")
    assert {name: raw(t) for name, t in loaded.items()} == {
        name: raw(t) for name, t in content(3)["state"].weights.items()
    }


def test_tensors_are_aligned_in_their_file(tmp_path: Path) -> None:
    group = {"a": torch.zeros(3, dtype=torch.int8), "bc": torch.zeros(1, dtype=torch.int64), "d": torch.zeros(1)}
    path = save_checkpoint(tmp_path, 1, run=RUN, state=state_of(group), loop={})
    data = (path / "weights.safetensors").read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    assert header_bytes % 8 == 0
    header = json.loads(data[8 : 8 + header_bytes])
    assert all(header[name]["data_offsets"][0] % group[name].element_size() == 0 for name in group)


def test_loaded_tensors_can_be_trained_on(tmp_path: Path) -> None:
    loaded = load_checkpoint(save(tmp_path, 1)).state.weights["weight"]
    loaded.add_(1)
    assert torch.equal(loaded, content(1)["state"].weights["weight"] + 1)


def test_tied_and_gradient_carrying_tensors(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    path = save_checkpoint(tmp_path, 1, run=RUN, state=state_of({"a": weight, "b": weight.t()}), loop={})
    group = load_checkpoint(path).state.weights
    assert torch.equal(group["a"], weight)
    assert torch.equal(group["b"], weight.t())
    assert not group["a"].requires_grad


def test_state_keeps_what_json_has_no_numbers_for(tmp_path: Path) -> None:
    state = {"best": float("-inf"), "seed": 2**63, "lr": 0.1 + 0.2, "text": "\u2028 \ud800 é"}
    assert load_checkpoint(save_checkpoint(tmp_path, 0, run=RUN, state=state_of(), loop=state)).loop == state


@pytest.mark.parametrize("weights", [{"__metadata__": torch.zeros(1)}, {"w": torch.zeros(1, dtype=torch.complex64)}])
def test_what_cannot_be_stored_is_refused_and_leaves_nothing(tmp_path: Path, weights: Any) -> None:
    save(tmp_path, 1)
    with pytest.raises(ValueError, match="cannot be stored in a checkpoint"):
        save_checkpoint(tmp_path, 2, run=RUN, state=state_of(weights), loop={})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_state_that_is_not_json_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path / "checkpoints", 2, run=RUN, state=state_of(), loop={"a": torch.zeros(1)})
    assert not (tmp_path / "checkpoints").exists()


def test_saving_over_a_complete_one_again_and_again(tmp_path: Path) -> None:
    for variant in range(4):
        path = save(tmp_path, 5, variant)
        assert same(load_checkpoint(path), 5, variant)
        assert len(list(path.iterdir())) == 5


def test_saving_over_one_with_other_files(tmp_path: Path) -> None:
    save(tmp_path, 5)
    (tmp_path / "step-00000005" / "other.safetensors").write_bytes(b"of something else")
    path = save(tmp_path, 5)
    stems = ("weights", "buffers", "optimizer")
    assert {p.name for p in path.iterdir()} == {MANIFEST, "state.1.json", *(f"{s}.1.safetensors" for s in stems)}
    assert same(load_checkpoint(save(tmp_path, 5)), 5)


DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


@st.composite
def any_tensor(draw: st.DrawFn) -> torch.Tensor:
    shape, dtype = draw(st.lists(st.integers(0, 4), max_size=3)), draw(st.sampled_from(DTYPES))
    item_bytes = torch.empty(0, dtype=dtype).element_size()
    num_bytes = item_bytes * int(torch.Size(shape).numel())
    data = bytearray(draw(st.binary(min_size=num_bytes, max_size=num_bytes)))
    if dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    layout = draw(st.sampled_from(("as it is", "transposed", "strided", "expanded")))
    if layout == "transposed":
        return tensor.permute(tuple(reversed(range(tensor.dim()))))
    if layout == "strided" and tensor.dim():
        return tensor[::2]
    return tensor.expand(2, *shape) if layout == "expanded" else tensor


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=12).filter("__metadata__".__ne__), any_tensor(), max_size=5))
def test_any_tensors_come_back_bit_equal(tensors: dict[str, torch.Tensor]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = save_checkpoint(Path(folder), 1, run=RUN, state=state_of(tensors), loop={})
        loaded = load_checkpoint(path).state.weights
    assert {name: raw(t) for name, t in loaded.items()} == {name: raw(t) for name, t in tensors.items()}


# --- damage ---------------------------------------------------------------------------------------------------------

DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda data: None,
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "half": lambda data: data[: len(data) // 2],
    "last byte lost": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\n",
    "zeros": lambda data: bytes(len(data)),
    "first byte flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "middle byte flipped": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0x10]) + data[len(data) // 2 + 1 :]
    ),
    "last byte flipped": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
}
WORDS = {
    "missing": ("missing", "incomplete"),
    "empty": ("truncated: 0 of", "cannot be used"),
    "one byte more": ("bytes instead of", "cannot be used"),
}


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json", MANIFEST])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_passed_over(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    damaged = DAMAGES[damage](file.read_bytes())
    if (name, damage) == (MANIFEST, "one byte more") or (name, damage) == (MANIFEST, "last byte lost"):
        damaged = b"x" + (damaged or b"")  # a line feed more or less at the end of JSON is no damage
    if damaged is None:
        file.unlink()
    else:
        file.write_bytes(damaged)

    found, passed_over = newest_whole(tmp_path, RUN)

    assert same(found, 1)
    assert len(passed_over) == 1
    assert name in passed_over[0]
    assert "step-00000002" in passed_over[0]
    assert "\n" not in passed_over[0]
    assert any(word in passed_over[0] for word in WORDS.get(damage, ("",)))
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(file.parent)


@pytest.mark.slow
def test_no_byte_of_a_manifest_can_change_unseen(tmp_path: Path) -> None:
    save(tmp_path, 1)
    file = save(tmp_path, 2) / MANIFEST
    whole = file.read_bytes()
    for place in range(len(whole) - 1):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found, passed_over = newest_whole(tmp_path, RUN)
        assert same(found, 1), place
        assert len(passed_over) == 1


def forge(path: Path, **changes: Any) -> None:
    """A manifest whose own SHA-256 is right but whose content is not."""
    body = {**json.loads((path / MANIFEST).read_text()), **changes}
    del body["sha256"]
    (path / MANIFEST).write_text(json.dumps({**body, "sha256": module._own_sha256(body)}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": 1}, "manifest.json has layout 1, and this version of brimful reads 3: go on with"),
        ({"files": {"../../etc/passwd": {"bytes": 1, "sha256": "0"}}}, "names the file ../../etc/passwd"),
        ({"files": {"state.json": {"bytes": "1", "sha256": "0"}}}, "not a manifest"),
        ({"files": {"state.json": {}}}, "not a manifest"),
        ({"files": []}, "not a manifest"),
        ({"files": {}}, "its files are not those of a step"),
        ({"step": 8}, "that of step 8"),
        ({"step": None}, "not a manifest"),
    ],
)
def test_a_forged_manifest_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = save(tmp_path, 7)
    forge(path, **changes)
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(path)


def test_a_checkpoint_of_another_layout_is_not_passed_over(tmp_path: Path) -> None:
    """Nor removed, nor written over: a run that began with it would begin anew in silence."""
    save(tmp_path, 1)
    forge(save(tmp_path, 7), schema=1)
    with pytest.raises(CheckpointError, match=r"step-00000007.manifest\.json has layout 1"):
        newest_whole(tmp_path, RUN)
    with pytest.raises(OutputError, match="has layout 1"):
        save(tmp_path, 7)
    save(tmp_path, 9)
    assert rotate(tmp_path, 1, run=RUN, newest=9) == [tmp_path / "step-00000001"]
    assert (tmp_path / "step-00000007" / "weights.safetensors").exists()


@pytest.mark.parametrize("text", ["", "[]", "null", "7", '{"sha256": 1}', "[" * 100_000, "\x00" * 50])
def test_what_is_no_manifest_at_all(tmp_path: Path, text: str) -> None:
    path = save(tmp_path, 7)
    (path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=MANIFEST):
        load_checkpoint(path)


def test_a_whole_file_that_is_no_safetensors(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    data = b"<html>not found</html>"
    (path / "weights.safetensors").write_bytes(data)
    files = json.loads((path / MANIFEST).read_text())["files"]
    files["weights.safetensors"] = {"bytes": len(data), "sha256": module.hashlib.sha256(data).hexdigest()}
    forge(path, files=files)
    with pytest.raises(CheckpointError, match=r"weights.safetensors cannot be parsed"):
        load_checkpoint(path)


def test_newest_goes_by_step_and_by_run(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        save(tmp_path, step)
    save(tmp_path, 300, run="other\nrun")
    (tmp_path / "step-900").mkdir()
    (tmp_path / "step-0000000900").mkdir()
    (tmp_path / "step-00000900").write_text("a file")
    (tmp_path / "notes.txt").write_text("kept")
    found, passed_over = newest_whole(tmp_path, RUN)
    assert same(found, 100)
    assert passed_over == [f"{tmp_path / 'step-00000300'} belongs to another run: other\\nrun"]


def test_newest_of_nothing(tmp_path: Path) -> None:
    assert newest_whole(tmp_path / "not there", RUN) == (None, [])
    assert newest_whole(tmp_path, RUN) == (None, [])
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file cannot be read"):
        newest_whole(tmp_path / "file", RUN)


# --- rotation -------------------------------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


@pytest.mark.parametrize(
    ("keep", "protect", "left"),
    [(1, (), [4]), (2, (), [3, 4]), (2, {1}, [1, 3, 4]), (2, {4}, [3, 4]), (0, (), [4]), (9, (), [1, 2, 3, 4])],
)
def test_rotation_keeps_the_newest_and_the_protected(tmp_path: Path, keep: int, protect: Any, left: list[int]) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    removed = rotate(tmp_path, keep, protect, run=RUN, newest=4)
    assert steps(tmp_path) == left
    assert [path.name for path in removed] == [f"step-{step:08d}" for step in range(1, 5) if step not in left]


def test_rotation_counts_only_what_is_complete(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "step-00000002" / MANIFEST).unlink()
    (tmp_path / "step-00000003" / "weights.safetensors").write_bytes(b"")
    rotate(tmp_path, 2, run=RUN, newest=4)
    assert steps(tmp_path) == [1, 4]


def test_rotation_never_removes_by_number_alone(tmp_path: Path) -> None:
    save(tmp_path, 1, run="other")
    for step in (2, 3):
        save(tmp_path, step)
    save(tmp_path, 500, run="other")
    (save(tmp_path, 700) / "weights.safetensors").write_bytes(b"")
    rotate(tmp_path, 1, run=RUN, newest=3)
    assert steps(tmp_path) == [1, 3, 500, 700]


def test_rotation_without_the_newest_removes_nothing(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-00000003" / MANIFEST).unlink()
    assert rotate(tmp_path, 1, run=RUN, newest=3) == []
    assert steps(tmp_path) == [1, 2, 3]


def test_rotation_removes_the_manifest_first_and_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    done: list[str] = []
    for name in ("unlink", "fsync"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, real=real, name=name, **n: (done.append(f"{name} {a[0]}"), real(*a, **n))[1]
        )
    rotate(tmp_path, 1, run=RUN, newest=2)
    assert done[0] == f"unlink {tmp_path / 'step-00000001' / MANIFEST}"
    assert done[1].startswith("fsync")
    assert len(done) == 6


def test_what_the_disk_would_not_give_is_passed_over_but_never_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.parent.name == "step-00000002":
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read_bytes)
        with pytest.raises(CheckpointError, match="cannot be read: Input/output error"):
            load_checkpoint(tmp_path / "step-00000002")
        assert rotate(tmp_path, 1, run=RUN, newest=3) == [tmp_path / "step-00000001"]
        with pytest.raises(OutputError, match="cannot be read: Input/output error"):
            save(tmp_path, 2, 5)
    assert same(load_checkpoint(tmp_path / "step-00000002"), 2)


# --- kills ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A folder, what is done to it, and the (step, variant) of the newest whole checkpoint before and after."""

    prepare: Callable[[Path], object]
    work: Callable[[Path], object]
    before: tuple[int, int] | None
    after: tuple[int, int]


def save_and_rotate(folder: Path) -> None:
    save(folder, 2)
    rotate(folder, 1, run=RUN, newest=2)


def leave_an_incomplete_one(folder: Path) -> None:
    save(folder, 1)
    path = save(folder, 2, 7)
    (path / MANIFEST).unlink()
    (path / "weights.safetensors").write_bytes(b"torn")
    (path / ".tmp-state.json-0123abcd").write_bytes(b"left")


SCENARIOS = {
    "first save": Scenario(lambda folder: None, lambda folder: save(folder, 1), None, (1, 0)),
    "second save with rotation": Scenario(lambda folder: save(folder, 1), save_and_rotate, (1, 0), (2, 0)),
    "over an incomplete one": Scenario(leave_an_incomplete_one, lambda folder: save(folder, 2), (1, 0), (2, 0)),
    "over one saved over before": Scenario(
        lambda folder: [save(folder, 2, 5), save(folder, 2)],
        lambda folder: save(folder, 2, 9),
        (2, 0),
        (2, 9),
    ),
    "over a complete one": Scenario(lambda folder: save(folder, 2), lambda folder: save(folder, 2, 9), (2, 0), (2, 9)),
}


def check(folder: Path, scenario: Scenario, *, only_after: bool = False) -> bool:
    """True if the newest whole checkpoint is the one from after; else it must be the one from before, bit for bit."""
    found, _ = newest_whole(folder, RUN)
    if same(found, *scenario.after):
        return True
    assert not only_after, "what was saved is not there"
    assert found is None if scenario.before is None else same(found, *scenario.before)
    return False


class Kills:
    """Copies of a folder as a SIGKILL leaves it: before each operation on the disk, and half-way each write."""

    def __init__(self, folder: Path, into: Path) -> None:
        self.left: list[Path] = []
        self._folder, self._into, self._copying = folder, into, False

    def copy(self) -> None:
        self._copying = True  # its own operations are of no interest
        self.left.append(self._into / str(len(self.left)))
        shutil.copytree(self._folder, self.left[-1])
        self._copying = False

    def before(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """`real`, an operation of that name, with a copy made before it."""

        def operation(*args: Any, **named: Any) -> Any:
            if self._copying:
                return real(*args, **named)
            self.copy()
            if name != "write":
                return real(*args, **named)
            half = len(args[1]) // 2
            real(args[0], args[1][:half])
            self.copy()
            return half + real(args[0], args[1][half:])

        return operation


@pytest.mark.sampled
@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_at_every_operation(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, folder, into = SCENARIOS[name], tmp_path / "checkpoints", tmp_path / "left"
    folder.mkdir()
    into.mkdir()
    scenario.prepare(folder)
    kills = Kills(folder, into)
    with monkeypatch.context() as patch:
        for operation in OPERATIONS:
            patch.setattr(os, operation, kills.before(operation, getattr(os, operation)))
        scenario.work(folder)
    assert check(folder, scenario, only_after=True)
    assert len(kills.left) > 25
    assert {check(left, scenario) for left in kills.left} == {True, False}
    for left in kills.left[::4]:  # whoever resumes does it again, over what the kill left
        scenario.work(left)
        assert check(left, scenario, only_after=True)


# --- power cuts: what was not synced may be lost, in any combination ------------------------------------------------


@dataclass(eq=False)
class File:
    live: bytes = b""
    synced: bytes = b""


@dataclass(eq=False)
class Folder:
    live: dict[str, Any] = field(default_factory=dict)
    synced: dict[str, Any] = field(default_factory=dict)

    def survivors(self) -> Iterator[dict[str, Any]]:
        """Its possible contents after a power cut: all changes, none, only the new names, only the removals."""
        yield self.live
        yield self.synced
        yield {**self.synced, **self.live}
        yield {name: node for name, node in self.synced.items() if name in self.live}


class Disk:
    """A disk that forgets what was not synced, fed with the operations of a real save."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = self._read(root)
        self.paths: dict[int, Path] = {}

    def _read(self, path: Path) -> Any:
        if path.is_file():
            return File(path.read_bytes(), path.read_bytes())
        entries = {entry.name: self._read(entry) for entry in path.iterdir()}
        return Folder(dict(entries), dict(entries))

    def node(self, path: Path) -> Any:
        node = self.tree
        for part in path.relative_to(self.root).parts:
            node = node.live[part]
        return node

    def follow(self, name: str, result: Any, args: tuple[Any, ...], dir_fd: int | None) -> None:
        """Do to the model what the operation `name` did to the disk."""
        place = (
            args[0] if isinstance(args[0], int) else Path(self.paths[dir_fd] if dir_fd is not None else "/", args[0])
        )
        path = self.paths.get(place) if isinstance(place, int) else place
        if path is None or not path.is_relative_to(self.root):
            return
        if name == "open":
            self.paths[result] = path
            if args[1] & os.O_CREAT:
                self.node(path.parent).live[path.name] = File()
        elif name == "write":
            self.node(path).live += bytes(args[1][:result])
        elif name == "fsync":
            node = self.node(path)
            node.synced = node.live if isinstance(node, File) else dict(node.live)
        elif name == "close":
            del self.paths[place]
        elif name == "mkdir":
            self.node(path.parent).live[path.name] = Folder()
        else:
            moved = self.node(path.parent).live.pop(path.name)
            if name in ("replace", "rename"):
                self.node(Path(args[1]).parent).live[Path(args[1]).name] = moved

    def after_a_power_cut(self) -> Iterator[Any]:
        """Each tree that may be found, as nested tuples."""
        for data in (
            lambda f: f.live,
            lambda f: f.synced,
            lambda f: f.live[: len(f.live) // 2],
            lambda f: bytes(len(f.live)),
        ):
            yield from self._trees(self.tree, lambda f, data=data: f.synced if f.synced == f.live else data(f))

    def _trees(self, node: Any, data: Callable[[File], bytes]) -> set[Any]:
        if isinstance(node, File):
            return {data(node)}
        found = set()
        for entries in node.survivors():
            names = sorted(entries)
            for trees in itertools.product(*(self._trees(entries[name], data) for name in names)):
                found.add(tuple(zip(names, trees, strict=True)))
        return found


def write_tree(path: Path, tree: Any) -> None:
    if isinstance(tree, bytes):
        path.write_bytes(tree)
        return
    path.mkdir()
    for name, inner in tree:
        write_tree(path / name, inner)


@pytest.mark.sampled
@pytest.mark.parametrize("name", SCENARIOS)
def test_power_cut_at_every_operation(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = SCENARIOS[name]
    root = tmp_path / "disk"
    folder = root / "run" / "checkpoints"
    folder.mkdir(parents=True)
    scenario.prepare(folder)
    if name == "first save":
        folder.rmdir()
    disk = Disk(root)
    states: set[Any] = set()

    def followed(operation: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, dir_fd: int | None = None, **named: Any) -> Any:
            result = real(*args, **named) if dir_fd is None else real(*args, dir_fd=dir_fd, **named)
            disk.follow(operation, result, args, dir_fd)
            states.update(disk.after_a_power_cut())
            return result

        return run

    with monkeypatch.context() as patch:
        for operation in OPERATIONS:
            patch.setattr(os, operation, followed(operation, getattr(os, operation)))
        scenario.work(folder)

    outcomes = set()
    for number, tree in enumerate(states):
        write_tree(tmp_path / str(number), tree)
        outcomes.add(check(tmp_path / str(number) / "run" / "checkpoints", scenario))
    assert outcomes == {True, False}
    for number, tree in enumerate(set(disk.after_a_power_cut())):
        write_tree(tmp_path / f"end-{number}", tree)
        check(tmp_path / f"end-{number}" / "run" / "checkpoints", scenario, only_after=True)


# --- full and failing disks -----------------------------------------------------------------------------------------

FAILURES = [(errno.ENOSPC, DiskFullError), (errno.EIO, OutputError)]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("number", "error"), FAILURES)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_failing_at_every_operation(
    tmp_path: Path, name: str, number: int, error: type[BrimfulError], lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = SCENARIOS[name]
    start, folder = tmp_path / "start", tmp_path / "checkpoints"
    start.mkdir()
    scenario.prepare(start)
    for k in itertools.count():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)
        with monkeypatch.context() as patch:
            count = itertools.count()
            for operation in ("open", "write", "fsync", "replace", "mkdir"):
                patch.setattr(os, operation, failing(getattr(os, operation), count, k, number, lasting))
            raised = failure(lambda: scenario.work(folder))
            if next(count) <= k:
                break
        if raised is None:  # making a folder that is there already may fail
            check(folder, scenario, only_after=True)
        else:
            assert type(raised) is error
            assert os.strerror(number) in str(raised)
            assert str(tmp_path) in str(raised)
            assert raised.hint
        check(folder, scenario)
        scenario.work(folder)
        check(folder, scenario, only_after=True)
    assert k > 15
    check(folder, scenario, only_after=True)


def failure(work: Callable[[], object]) -> BrimfulError | None:
    try:
        work()
    except BrimfulError as error:
        return error
    return None


def failing(real: Callable[..., Any], count: Iterator[int], k: int, number: int, lasting: bool) -> Callable[..., Any]:
    def operation(*args: Any, **named: Any) -> Any:
        now = next(count)
        if now == k or (lasting and now > k):
            raise OSError(number, os.strerror(number))
        return real(*args, **named)

    return operation


def test_a_real_limit_on_file_size(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    num_full = 0
    for limit in range(1, 2000, 100):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            raised = failure(lambda: save(tmp_path, 2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if raised is None:
            break
        num_full += 1
        assert type(raised) is DiskFullError
        assert "step-00000002" in str(raised)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        assert same(newest_whole(tmp_path, RUN)[0], 1)
    assert num_full > 3
    assert same(newest_whole(tmp_path, RUN)[0], 2)
