"""Training without its dropout: what a model does in train mode that it does not do in eval mode.

Batch normalisation lets rows influence one another; LayerDrop tosses a coin on the host, which a captured graph would
freeze. Both are found by what the model computes, not by the names of its modules.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.kernels.layout import Inputs


@contextmanager
def without_dropout(model: Any, *, but: Sequence[nn.Module] = (), only_of_numbers: bool = False) -> Iterator[None]:
    """Within, every dropout of a model in train mode keeps all: modules, and probabilities under names of their own.

    but: modules left as they are, with all that is in them. LayerDrop and noise stay: they are no dropout of numbers.
    only_of_numbers: whether dropout stays, too, that may have one mask for a whole row, as DropPath and Dropout1d have.
    """
    is_dropout = _is_dropout_of_numbers if only_of_numbers else _is_dropout
    left = {id(module) for each in but for module in each.modules()}
    owners = [module for module in model.modules() if id(module) not in left]
    settings = _settings_of(owners)
    changed = list(_probabilities((*owners, *(settings.values() if not but else ())), is_dropout))
    for owner, name, _ in changed:
        object.__setattr__(owner, name, 0.0)
    try:
        yield
    finally:
        for owner, name, value in changed:
            object.__setattr__(owner, name, value)


def drops_numbers(module: nn.Module) -> bool:
    """Return whether a dropout is at work, some part of a module in train mode; those of its configuration count."""
    owners = list(module.modules())
    return any(each.training for each in owners) and any(
        True for _ in _probabilities((*owners, *_settings_of(owners).values()), _is_dropout)
    )


def _settings_of(owners: Sequence[nn.Module]) -> dict[int, Any]:
    """Configurations that modules have, each once."""
    return {id(config): config for config in (getattr(owner, "config", None) for owner in owners) if config}


def _probabilities(
    owners: Sequence[Any], is_dropout: Callable[[object, str], bool]
) -> Iterator[tuple[Any, str, float]]:
    """Owner, name and value of each probability above zero."""
    for owner in owners:
        for name, value in vars(owner).items():
            if isinstance(value, float) and value > 0 and is_dropout(owner, name):
                yield owner, name, value


def _is_dropout(owner: object, name: str) -> bool:
    if isinstance(owner, _DropoutNd):
        return name == "p"
    if isinstance(owner, nn.Module) and "Dropout" in type(owner).__name__:  # of a family's own making
        return name in ("p", "drop_prob")
    return "dropout" in name or name.endswith(("pdrop", "drop_prob"))


def _is_dropout_of_numbers(owner: object, name: str) -> bool:
    """Return whether this is the probability of a dropout known to have a mask of its own for each number."""
    if isinstance(owner, _DropoutNd):
        return name == "p" and isinstance(owner, nn.Dropout | nn.AlphaDropout)
    if type(owner).__name__ == "StableDropout":  # of DeBERTa
        return name == "drop_prob"
    return "dropout" in name or name.endswith("pdrop")


class _Fixed(TorchDispatchMode):
    """Within, all random numbers are the least, or the largest, that there are. drawn: whether there were any."""

    def __init__(self, value: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._value, self.drawn = value, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(found, Tensor):
            self.drawn = True
            found.fill_(self._value)
        return found


@contextmanager
def _given_back() -> Iterator[None]:
    """Within, random numbers may be drawn from Python's, numpy's and torch's own streams."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def draws_numbers(run: Callable[[], Tensor]) -> bool:
    """True if what a model without dropout computes depends on random numbers that it draws itself."""
    with torch.no_grad(), _given_back():
        before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        with _Fixed(0.0) as least:
            one = run()
        with _Fixed(1.0 - 2**-24) as largest:
            other = run()
        elsewhere = before != (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    return elsewhere or ((least.drawn or largest.drawn) and not torch.equal(one, other))


def mixes_rows(
    run: Callable[[Inputs], Tensor], whole: Inputs, parts: Sequence[Inputs], tolerance: float, *, rows: int = 1
) -> bool:
    """True if the result of a row depends on the other rows of its batch.

    whole: all rows. parts: batches of them, of which the first `rows` count: for one row, a batch of it and once more
    of it, as one row alone is refused by some. Numbers that the model draws are the same in each batch, and such as
    drop no layer.
    """

    def alike(inputs: Inputs) -> Tensor:
        random.seed(0)
        np.random.seed(0)
        with _Fixed(1.0 - 2**-24):
            return run(inputs)

    with torch.no_grad(), _given_back():
        together = alike(whole)
        apart = torch.cat([alike(part)[:rows] for part in parts])
    error = (together - apart).norm() / together.norm().clamp_min(1e-30)
    return not float(error) <= tolerance
