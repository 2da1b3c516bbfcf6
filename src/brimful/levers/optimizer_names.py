"""Optimizers by transformers' `optim` names, each as transformers' Trainer makes it.

AdamW in fp32 and SGD without momentum are what other runs are held to. All others change what is learned, or how it is
rounded, and so are taken only where they are asked for.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from brimful.core.errors import OptionError, did_you_mean, printable
from brimful.core.records import Arithmetic

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Names whose states are in 8 or 4 bits, but for those of embeddings, and the same with states in 32 bits.
WITH_32_BITS = {
    "adamw_8bit": "adamw_torch",
    "adamw_bnb_8bit": "adamw_torch",
    "adamw_torch_8bit": "adamw_torch",
    "adamw_torch_4bit": "adamw_torch",
    "paged_adamw_8bit": "paged_adamw_32bit",
    "lion_8bit": "lion_32bit",
    "paged_lion_8bit": "paged_lion_32bit",
    "ademamix_8bit": "ademamix",
    "paged_ademamix_8bit": "paged_ademamix_32bit",
    "rmsprop_bnb_8bit": "rmsprop_bnb_32bit",
}


@dataclass(frozen=True, kw_only=True)
class NamedOptimizer:
    """Facts about an optimizer of transformers' list.

    state_bytes: of a trained parameter, without scales of blocks and Adafactor's sums of rows and columns.
    package: that it comes from, besides torch and transformers.
    """

    state_bytes: int
    source: str
    package: str | None = None

    @property
    def arithmetic(self) -> Arithmetic:
        """Effect on results."""
        return "training"


_8BIT, _4BIT = "Dettmers et al. 2022, arXiv 2110.02861", "Li et al. 2023, arXiv 2309.01507; torchao"
_LION, _ADEMAMIX = "Chen et al. 2023, arXiv 2302.06675", "Pagliardini et al. 2024, arXiv 2409.03137"
_PAGED = "Dettmers et al. 2023, arXiv 2305.14314"
_FREE = "Defazio et al. 2024, arXiv 2405.15682"

OPTIMIZERS: Mapping[str, NamedOptimizer] = {
    "adafactor": NamedOptimizer(state_bytes=0, source="Shazeer and Stern 2018, arXiv 1804.04235"),
    "adagrad": NamedOptimizer(state_bytes=4, source="Duchi et al. 2011; torch.optim"),
    "rmsprop": NamedOptimizer(state_bytes=4, source="Tieleman and Hinton 2012; torch.optim"),
    "adamw_torch_8bit": NamedOptimizer(state_bytes=2, source=f"{_8BIT}; torchao", package="torchao"),
    "adamw_torch_4bit": NamedOptimizer(state_bytes=1, source=_4BIT, package="torchao"),
    "adamw_8bit": NamedOptimizer(state_bytes=2, source=_8BIT, package="bitsandbytes"),
    "adamw_bnb_8bit": NamedOptimizer(state_bytes=2, source=_8BIT, package="bitsandbytes"),
    "paged_adamw_32bit": NamedOptimizer(state_bytes=8, source=_PAGED, package="bitsandbytes"),
    "paged_adamw_8bit": NamedOptimizer(state_bytes=2, source=_PAGED, package="bitsandbytes"),
    "lion_32bit": NamedOptimizer(state_bytes=4, source=_LION),  # ours
    "lion_8bit": NamedOptimizer(state_bytes=1, source=_LION, package="bitsandbytes"),
    "paged_lion_32bit": NamedOptimizer(state_bytes=4, source=f"{_LION}; {_PAGED}", package="bitsandbytes"),
    "paged_lion_8bit": NamedOptimizer(state_bytes=1, source=f"{_LION}; {_PAGED}", package="bitsandbytes"),
    "ademamix": NamedOptimizer(state_bytes=12, source=_ADEMAMIX, package="bitsandbytes"),
    "ademamix_8bit": NamedOptimizer(state_bytes=3, source=_ADEMAMIX, package="bitsandbytes"),
    "paged_ademamix_32bit": NamedOptimizer(state_bytes=12, source=f"{_ADEMAMIX}; {_PAGED}", package="bitsandbytes"),
    "paged_ademamix_8bit": NamedOptimizer(state_bytes=3, source=f"{_ADEMAMIX}; {_PAGED}", package="bitsandbytes"),
    "rmsprop_bnb": NamedOptimizer(state_bytes=4, source="Tieleman and Hinton 2012", package="bitsandbytes"),
    "rmsprop_bnb_8bit": NamedOptimizer(state_bytes=1, source="Tieleman and Hinton 2012", package="bitsandbytes"),
    "rmsprop_bnb_32bit": NamedOptimizer(state_bytes=4, source="Tieleman and Hinton 2012", package="bitsandbytes"),
    "schedule_free_adamw": NamedOptimizer(state_bytes=8, source=_FREE, package="schedulefree"),
    "schedule_free_radam": NamedOptimizer(state_bytes=8, source=_FREE, package="schedulefree"),
    "schedule_free_sgd": NamedOptimizer(state_bytes=4, source=_FREE, package="schedulefree"),
}


#: Those that have a form whose steps decide on the device whether to be skipped.
_ON_DEVICE = ("adafactor", "lion_32bit")
#: Those that have one on GPUs.
_ON_GPUS = ("adamw_8bit", "adamw_bnb_8bit")


def decides_on_device(name: str, device: torch.device, betas: tuple[float, float]) -> bool:
    """Return whether steps of an optimizer decide on the device whether to be skipped: then no host waits for them."""
    from brimful.step.updates.rounded_kernels import can_launch

    return name in _ON_DEVICE or (name in _ON_GPUS and can_launch(device, betas))


#: Those whose settings have no betas, and no epsilon of Adam's, and others without the epsilon.
_WITHOUT_BETAS = (
    *("sgd", "adafactor", "adagrad", "rmsprop", "schedule_free_sgd"),
    *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
)
_WITHOUT_EPSILON = ("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit")


def without_effect(name: str) -> tuple[str, ...]:
    """Return which of Adam's settings transformers does not pass on to an optimizer."""
    if name in _WITHOUT_BETAS:
        return ("adam_beta1", "adam_beta2", "adam_epsilon")
    return ("adam_epsilon",) if name in _WITHOUT_EPSILON else ()


def check_installed(name: str) -> None:
    """Check that the package of an optimizer is there. Raises: OptionError."""
    named = OPTIMIZERS.get(name)
    if named is not None and named.package is not None and importlib.util.find_spec(named.package) is None:
        raise OptionError(f"--optim {name} needs the package {named.package}", hint="pip install 'brimful[optimizers]'")


def make_optimizers(
    name: str, groups: Sequence[dict[str, Any]], embeddings: Sequence[Tensor], hyperparameters: Mapping[str, Any],
    learning_rate: Tensor | None = None,
) -> list[torch.optim.Optimizer]:  # fmt: skip
    """Make the optimizer called `name` of groups of parameters, and one with states in 32 bits of embeddings where its
    own are in fewer.

    hyperparameters: `learning_rate`, `adam_beta1`, `adam_beta2`, `adam_epsilon`, `weight_decay`, `warmup_steps` and
    `optim_args` as in transformers' TrainingArguments. learning_rate: () tensor that those read which decide on the
    device whether to skip a step, and torchao's.
    """
    from brimful.step.updates.torchao_states import is_of_torchao, read_rate_from

    kinds = {id(p) for p in embeddings} if name in WITH_32_BITS else set()
    rate, betas = learning_rate, (hyperparameters["adam_beta1"], hyperparameters["adam_beta2"])
    if rate is None or not decides_on_device(name, rate.device, betas):
        learning_rate = None  # of all parts, or none
    parts = [(name, False), (WITH_32_BITS.get(name, name), True)]
    found = []
    for part, of_embeddings in parts:
        chosen = [g | {"params": [p for p in g["params"] if (id(p) in kinds) == of_embeddings]} for g in groups]
        chosen = [group for group in chosen if group["params"]]
        if chosen:
            found.append(made := _make(part, chosen, hyperparameters, learning_rate))
            if rate is not None and is_of_torchao(made):
                read_rate_from(made, rate)
    return found


def _check_all_used(name: str, arguments: Any, kind: type, settings: Mapping[str, Any]) -> None:
    """Check that an optimizer takes each of its --optim-args: transformers leaves out what it does not know.

    Raises: OptionError.
    """
    from transformers import Trainer

    given = [part for part in str(arguments.optim_args or "").replace(" ", "").split(",") if part]
    for part in given:
        without = SimpleNamespace(**vars(arguments) | {"optim_args": ",".join(p for p in given if p != part) or None})
        asked, _, value = part.partition("=")
        if Trainer.get_optimizer_cls_and_kwargs(cast(Any, without))[1] == settings and not _is(settings, asked, value):
            known = [*settings, *inspect.signature(kind).parameters]
            if asked in known:
                said = f"{asked} in --optim-args has no effect: transformers does not pass it on to --optim {name}"
                raise OptionError(said, hint="leave it out")
            said = f"--optim {name} does not take {printable(asked)}, which --optim-args has"
            raise OptionError(said, hint=did_you_mean(asked, known) or "leave it out")


def _is(settings: Mapping[str, Any], name: str, value: str) -> bool:
    """Return whether an optimizer has this setting without being asked for it. value: as it was given."""
    with suppress(ValueError, SyntaxError):
        return name in settings and bool(settings[name] == ast.literal_eval(value))
    return name in settings and str(settings[name]) == value


def _make(
    name: str, groups: list[dict[str, Any]], hyperparameters: Mapping[str, Any], learning_rate: Tensor | None
) -> torch.optim.Optimizer:
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    if name == "lion_32bit" and learning_rate is not None:  # transformers knows bitsandbytes' own alone
        return _lion(groups, hyperparameters, learning_rate)
    if name == "adamw_torch" and learning_rate is not None:
        name = "adamw_torch_fused"  # the same arithmetic
    arguments = SimpleNamespace(optim=OptimizerNames(name), optim_target_modules=None, **hyperparameters)
    try:
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(cast(Any, arguments))
        _check_all_used(name, arguments, kind, settings)
        if learning_rate is not None and (ours := _on_device(name, groups, settings, learning_rate)) is not None:
            return ours
        made: torch.optim.Optimizer = kind(groups, **settings)
    except (ValueError, TypeError, KeyError, ImportError) as error:
        asked = hyperparameters.get("optim_args")
        given = f" with --optim-args {printable(asked)}" if asked else ""
        hint = "look at --optim-args: name=value, separated by commas" if asked else "see --help"
        raise OptionError(f"--optim {name}{given} does not work: {printable(error, 200)}", hint=hint) from error
    return made


def _lion(
    groups: list[dict[str, Any]], hyperparameters: Mapping[str, Any], learning_rate: Tensor
) -> torch.optim.Optimizer:
    """Lion of our own, which has no settings but its betas, as transformers passes none on."""
    from brimful.step.updates.lion import Lion

    if given := hyperparameters.get("optim_args"):
        asked = printable(str(given).partition("=")[0].strip())
        raise OptionError(f"--optim lion_32bit does not take {asked}, which --optim-args has", hint="leave it out")
    return Lion(groups, learning_rate, betas=(hyperparameters["adam_beta1"], hyperparameters["adam_beta2"]))


def _on_device(
    name: str, groups: list[dict[str, Any]], settings: Mapping[str, Any], learning_rate: Tensor
) -> torch.optim.Optimizer | None:
    """The same optimizer, of which no step waits for the device; None where there is none.

    torch's fused SGD is none of them with momentum: its first step leaves that unset where it is skipped.
    """
    import torch

    from brimful.step.updates import adafactor

    rest = {key: value for key, value in settings.items() if key != "lr"}
    if name == "adafactor" and rest == adafactor.SETTINGS:
        return adafactor.Adafactor(groups, learning_rate)
    if name == "adamw_torch_fused":
        capturable = learning_rate.is_cuda
        return torch.optim.AdamW(groups, lr=learning_rate, capturable=capturable, **rest)
    if name in _ON_GPUS and rest.keys() <= {"betas", "eps", "optim_bits", "is_paged"}:
        from bitsandbytes.functional import create_dynamic_map

        from brimful.step.updates.bitsandbytes_adamw import BitsandbytesAdamW

        shares = (create_dynamic_map(signed=True), create_dynamic_map(signed=False))
        return BitsandbytesAdamW(groups, learning_rate, betas=rest["betas"], eps=rest["eps"], shares=shares)
    return None
