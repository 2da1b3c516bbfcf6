"""Identity of a pass: everything that its answers depend on, by which a run is resumed or refused."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from brimful.core.options.checks import flag
from brimful.core.options.classify import ClassifyOptions
from brimful.engine.classification.inputs import Given
from brimful.engine.classification.runner import Checked
from brimful.hardware.probe import probe

#: Name of the device in an identity.
DEVICE = "the device"
#: Options that do not change an answer, or are told by what they led to: the device.
_NOT_OF_AN_ANSWER = frozenset(
    {"data", "output", "overwrite", "resume", "max_errors", "shard_rows", "report", "json", "num_workers"}
    | {"gpus", "device", "allocator", "claim", "lease", "quiet", "launcher", "num_processes"}
)


def identity_of(options: ClassifyOptions, given: Given) -> dict[str, Any]:
    """Everything the answers depend on, by displayed name."""
    precision = given.precision
    on_gpu = precision.device.type == "cuda"
    machine = probe()
    chosen = {
        flag(name): value for name, value in vars(options).items() if name not in {*_NOT_OF_AN_ANSWER, "precision"}
    }
    return {
        "the input": given.rows.fingerprint,
        "the model's files": _fingerprint(given.checked),
        **chosen,
        "--precision": precision.value,
        DEVICE: machine.gpus[0].name if on_gpu and machine.gpus else f"CPU, {torch.get_num_threads()} threads",
        "versions": dict(machine.versions),
    }


def _fingerprint(checked: Checked) -> str:
    """Of names, sizes and times of change of the weights, and of all that the small files beside them hold."""
    digest = hashlib.sha256()
    weights = set(checked.facts.weight_files)
    adapter = checked.facts.adapter
    folders = {checked.facts.folder} if adapter is None else {checked.facts.folder, adapter.folder}
    beside = {path for folder in folders for path in folder.iterdir() if path.is_file()}
    for path in sorted(beside if adapter is None else beside | weights):
        facts = path.stat()
        digest.update(f"{path.name}\0{facts.st_size}\0".encode(errors="surrogateescape"))
        digest.update(
            str(facts.st_mtime_ns).encode() if path in weights or facts.st_size > 1 << 24 else path.read_bytes()
        )
    return digest.hexdigest()
