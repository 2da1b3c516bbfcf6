"""The file that an equivalence check's result is kept in, named after all that the result depends on.

That is the architecture and its modules, the base model's weights, the device and precision, the kernel, versions, and
the source of our own kernels and checks.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from brimful.core.cache import cache_path
from brimful.kernels.attention.dispatch import length_class
from brimful.models.packed.check_inputs import Kernel, module_settings

#: Source that a result depends on, below the package.
_SOURCES = ("kernels", "models/packed", "models/fusion", "core/tolerances.py")
#: Numbers of each weight that are looked at: another checkpoint differs in all of them.
_LOOKED_AT = 64
#: Packages whose code is told by their versions, or by a digest in the names of its modules.
_VERSIONED = frozenset({"torch", "transformers", "transformers_modules", "brimful", "peft"})
_NOT_ARCHITECTURE = frozenset({"_name_or_path", "id2label", "label2id", "transformers_version", "dtype", "torch_dtype"})


def path_of(model: Any, max_length: int, device: torch.device, precision: str, kernel: Kernel) -> Path | None:
    """Cache file of this model's check. None for a user without a home, and where modules are of code that no version
    tells from what it was: a user's own, in a notebook or a script."""
    if not all(_is_versioned(module) for module in model.modules()):
        return None
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_ARCHITECTURE}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    chosen_by = None
    if device.type == "cuda":
        typical_length, attention = kernel
        chosen_by = [None if typical_length is None else length_class(typical_length), attention]
    versions = [torch.__version__, transformers.__version__, _source()]
    made_of = [str(model), module_settings(model), _weights(model)]
    return cache_path("equivalence", [kind, config, made_of, max_length, name, precision, chosen_by, versions])


def _is_versioned(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in _VERSIONED


def _weights(model: Any) -> str:
    """Digest of some numbers of each parameter and buffer. Those of the head, which may be new, are left out."""
    base = model.base_model
    named = [*base.named_parameters(), *base.named_buffers()]
    digest = hashlib.sha256()
    with torch.no_grad():
        for name, tensor in named:
            flat = tensor.detach().flatten()
            some = flat[:: max(1, len(flat) // _LOOKED_AT)][:_LOOKED_AT].double().cpu().numpy()
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(some.tobytes())
    return digest.hexdigest()


@cache
def _source() -> str:
    """Digest of our own code that a result depends on."""
    root = Path(__file__).parents[2]
    files = [
        path
        for part in _SOURCES
        for path in sorted((root / part).rglob("*.py") if (root / part).is_dir() else [root / part])
    ]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()
