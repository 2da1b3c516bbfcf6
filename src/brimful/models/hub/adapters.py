"""Adapters of the peft library: put into a model in place, saved beside nothing else, and merged when they are read.

    wrapped = add_adapter(model, make_config(options), new_parameters=(), base="bert-base-uncased", seed=0)
    wrapped.get_base_model()     # `model`, with modules of peft in the place of its own

peft replaces modules within the model, whose own class, forward and configuration stay: what runs the model need not
know of it. Methods that wrap its forward instead (prompts, prefixes) are refused.
"""

from __future__ import annotations

import importlib.util
import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from brimful.core.atomic_files import path_text
from brimful.core.errors import ModelError, OptionError, did_you_mean, listed, printable
from brimful.core.options.checks import flag, split_names
from brimful.core.options.train import TrainOptions
from brimful.core.trained_part import ADAPTER_SETTINGS, REGEX
from brimful.models.hub.quiet import first_line, quiet_transformers
from brimful.models.hub.weight_files import read_shapes

if TYPE_CHECKING:
    from torch import Tensor, nn

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Before the names of a model's parameters in the file of an adapter.
PREFIX = "base_model.model."
INSTALL = "pip install 'brimful[peft]'"
#: Names of --peft that are settings of another method.
_VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "rslora": ("lora", {"use_rslora": True}),
    "dora": ("lora", {"use_dora": True}),
}
#: Methods that a hint names: they work on every model with linear layers.
_USUAL = ("lora", "rslora", "dora", "ia3", "loha", "lokr", "vera", "oft")
#: Methods that need a call of their own in each step, or a second pass.
_NEED_CALLS = {
    "ADALORA": "it changes ranks in every step",
    "XLORA": "it runs the model twice",
    "POLY": "it needs tasks",
}
#: Modules that peft trains in every sequence classifier.
_ALWAYS_SAVED = ("classifier", "score")
_ALL_LINEAR = "all-linear"
#: Methods that peft chooses the modules of, or asks for them: not every linear one has a place in them.
_CHOOSE = ("IA3", "LN_TUNING")
#: Ends of names that a hint names.
_MOST_ENDS = 8
#: Numbers of each parameter that are looked at.
_LOOKED_AT = 1000


def check_adapter(options: TrainOptions) -> None:
    """Check --peft before anything is read. Raises: OptionError."""
    if options.peft is not None:
        make_config(options)


def make_config(options: TrainOptions) -> Any:
    """Return the configuration of the adapter that was asked for, as peft has it.

    Raises: OptionError without the package, for a method that is not known or cannot work here, and for settings that
    the method does not have.
    """
    assert options.peft is not None
    if importlib.util.find_spec("peft") is None:
        raise OptionError("--peft needs the package peft, which is not installed", hint=INSTALL)
    values = _asked_values(options.peft)
    kind = str(values.pop("peft_type", ""))
    with _quiet_peft():
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
    known = {getattr(name, "value", str(name)): config for name, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    in_place = {getattr(name, "value", str(name)) for name in PEFT_TYPE_TO_TUNER_MAPPING}
    if kind not in known:
        some = [name for name in _USUAL if name in _VARIANTS or name.upper() in in_place]
        raise OptionError(
            f"--peft names no method and no file: {printable(options.peft)}",
            hint=did_you_mean(options.peft, some) or f"{', '.join(some)}, ... or a peft config file",
        )
    _require_in_place(kind, in_place, known[kind])
    for field, name in ADAPTER_SETTINGS.items():
        if (given := getattr(options, field)) is None:
            continue
        if name not in known[kind].__dataclass_fields__:
            raise OptionError(f"{flag(field)} is given, and {kind.lower()} has no {name}", hint="leave it out")
        values[name] = _setting(name, given)
    if values.get("task_type") not in (None, "SEQ_CLS"):
        raise OptionError(
            f"the adapter in --peft is for {printable(values['task_type'])}", hint='"task_type": "SEQ_CLS"'
        )
    values |= {"task_type": "SEQ_CLS", "inference_mode": False, "base_model_name_or_path": None, "revision": None}
    try:
        return known[kind](**{key: value for key, value in values.items() if key in known[kind].__dataclass_fields__})
    except (TypeError, ValueError, ImportError) as error:
        raise OptionError(f"--peft {printable(options.peft)} is refused by peft: {first_line(error)}") from error


def config_file(asked: str) -> Path | None:
    """Return the file that --peft names, None where it names a method: a folder of that name is a run's, perhaps."""
    path = Path(asked).expanduser()
    inside = path / CONFIG
    if inside.is_file() or (path.is_dir() and path.name != asked):
        return inside
    return path if path.is_file() or path.suffix == ".json" else None


def _asked_values(asked: str) -> dict[str, Any]:
    """Values of a configuration, by a method's name or from a file."""
    path = config_file(asked)
    if path is None:
        kind, values = _VARIANTS.get(asked.lower(), (asked.lower(), {}))
        return {"peft_type": kind.upper(), **values}
    return _read_json(path, OptionError)


def _read_json(path: Path, error: type[OptionError] | type[ModelError]) -> dict[str, Any]:
    hint = f"name a peft config file, as {CONFIG}, or a method, as lora" if error is OptionError else "copy it again"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as failure:
        raise error(f"{path_text(path)} cannot be read: there is no such file", hint=hint) from failure
    except OSError as failure:
        raise error(f"{path_text(path)} cannot be read: {failure.strerror}", hint=hint) from failure
    except ValueError as failure:
        raise error(f"{path_text(path)} is not JSON", hint=hint) from failure
    if not isinstance(values, dict) or not isinstance(values.get("peft_type"), str):
        raise error(f"{path_text(path)} has no peft_type", hint='as in {"peft_type": "LORA", "r": 16}')
    return values


def _require_in_place(kind: str, in_place: Collection[str], config: Any) -> None:
    said = _NEED_CALLS.get(kind)
    if said is None and kind not in in_place:
        said = "it does not replace modules"
    if said is None and issubclass(config, _prompt_learning()):
        said = "it puts tokens of its own before each text"
    if said is not None:
        raise OptionError(f"--peft {kind.lower()} does not work here: {said}", hint="use lora, or train without --peft")


def _prompt_learning() -> type[Any]:
    from peft import PromptLearningConfig

    return PromptLearningConfig  # type: ignore[no-any-return]


def _setting(name: str, given: Any) -> Any:
    """A setting as peft takes it."""
    if name == "lora_alpha" and given == int(given):
        return int(given)
    if not isinstance(given, str):
        return given
    if name == "target_modules" and (given == _ALL_LINEAR or given.startswith(REGEX)):
        return given.removeprefix(REGEX)
    return list(split_names(given))


def add_adapter(
    model: Any, config: Any, *, head: Collection[str], new_parameters: Collection[str], base: str, seed: int
) -> Any:
    """Put an adapter into `model` in place, and return peft's wrapper around it.

    Weights are drawn as peft draws them after `torch.manual_seed(seed)`. head: parameters outside the base model, which
    are trained and saved with the adapter, as are modules of new_parameters: those that the model's files do not hold.
    base: name by which the adapter finds its model.

    Raises: OptionError for what peft refuses, and for an adapter that changes the base model's weights.
    """
    import torch

    from brimful.hardware.process_settings import unchanged_random_streams

    with _quiet_peft():
        import peft

    _save_head(config, head, new_parameters)
    _check_names(config.modules_to_save if hasattr(config, "modules_to_save") else None, model)
    if getattr(config, "target_modules", "") is None and not _has_default(config, model):
        config.target_modules = _ALL_LINEAR
    before = [(name, p, _some_of(p).clone()) for name, p in model.named_parameters()]
    try:
        with _quiet_peft(), unchanged_random_streams():
            torch.default_generator.manual_seed(seed)
            wrapped = peft.get_peft_model(model, config)
    except Exception as error:  # peft raises what it likes: ValueError for targets, TypeError for modules
        raise _refused(error, config, model) from error
    _check_loads(wrapped)
    wrapped.peft_config["default"].base_model_name_or_path = base  # peft takes the model's own, which was given weights
    if changed := [name for name, p, some in before if not torch.equal(_some_of(p), some)]:
        raise OptionError(
            f"the adapter changes the base model's weights, {len(changed)} of them, first {changed[0]}: it could not"
            " be loaded on the model again",
            hint="use the default init_lora_weights",
        )
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    plain = {name.replace(".modules_to_save.default", "") for name in trained}
    if left := [name for name in (*head, *new_parameters) if name not in plain]:
        raise OptionError(
            f"the adapter leaves {listed(left, 3)} untrained, which the model's files may not hold",
            hint="name its module in --lora-modules-to-save",
        )
    return wrapped


def _refused(error: Exception, config: Any, model: Any) -> OptionError:
    """The error for an adapter that peft could not put into `model`."""
    ends = _linear_ends(model)
    named = f"--lora-target-modules {','.join(ends)}"
    or_all = "" if _kind_of(config) in _CHOOSE else ", or all-linear"
    asked = getattr(config, "target_modules", None)
    names = sorted(asked) if isinstance(asked, list | set | tuple) else []
    said = f"none of its modules is called {printable(listed(names, 5))}" if names else ""
    if isinstance(asked, str) and asked != _ALL_LINEAR:
        said = f"none of its modules matches {REGEX}{printable(asked)}"
    is_there = any(_is_named(name, model) for name in names) if names else _matches(str(asked), model)
    if said and not is_there:
        return OptionError(f"--peft does not work on this model: {said}", hint=f"use {named}{or_all}")
    if "Unsupported model type" in str(error):  # of a method that knows some types of models alone
        said = f"{_kind_of(config).lower()} knows no model of type {printable(model.config.model_type)}"
        return OptionError(f"--peft does not work on this model: {said}", hint=f"use {_USUAL[0]}")
    return OptionError(
        f"--peft does not work on this model: {first_line(error)}", hint=f"name the modules, as in {named}{or_all}"
    )


def _is_named(end: str, model: Any) -> bool:
    return any(name == end or name.endswith(f".{end}") for name, _ in model.named_modules())


def _matches(pattern: str, model: Any) -> bool:
    with suppress(re.error):
        return any(re.fullmatch(pattern, name) for name, _ in model.named_modules())
    return True


def _linear_ends(model: Any) -> list[str]:
    """Last parts of the names of the base model's linear modules, in their order."""
    from torch import nn

    base = model.base_model
    names = [name for name, module in base.named_modules() if isinstance(module, nn.Linear)]
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))[:_MOST_ENDS]


def _some_of(parameter: Tensor) -> Tensor:
    """Some numbers of a parameter: an initialisation that changes it changes them all."""
    flat = parameter.detach().flatten()
    return flat[:: max(1, len(flat) // _LOOKED_AT)]


def _save_head(config: Any, head: Collection[str], new_parameters: Collection[str]) -> None:
    """Have the head trained and saved: peft does so itself for modules of two names."""
    if not hasattr(config, "modules_to_save"):
        return
    wanted = [name.partition(".")[0] for name in head] + [name.rpartition(".")[0] for name in new_parameters]
    modules = dict.fromkeys([*(config.modules_to_save or ()), *wanted])
    config.modules_to_save = [name for name in modules if name not in _ALWAYS_SAVED] or None


def _has_default(config: Any, model: Any) -> bool:
    """Return whether peft knows which modules of this type of model are given such an adapter."""
    with _quiet_peft():
        from peft import PEFT_TYPE_TO_TUNER_MAPPING

    tuner = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
    known = getattr(tuner, "target_module_mapping", None) or {}
    return _kind_of(config) in _CHOOSE or model.config.model_type in known


def _kind_of(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def _check_names(names: Sequence[str] | None, model: Any) -> None:
    """Check that each of --lora-modules-to-save is a module. Raises: OptionError."""
    known = [name for name, _ in model.named_modules()]
    for name in names or ():
        if name not in _ALWAYS_SAVED and not any(each.endswith(name) for each in known):
            said = f"--lora-modules-to-save has '{printable(name)}', and the model has no module of that name"
            ends = sorted({each.rpartition(".")[2] for each in known})
            raise OptionError(said, hint=did_you_mean(name, ends) or "leave it out")


def _check_loads(wrapped: Any) -> None:
    """Check that what is saved of an adapter can be loaded: before the training, not after it. Raises: OptionError."""
    with _quiet_peft():
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

    try:
        with _quiet_peft():
            set_peft_model_state_dict(wrapped, get_peft_model_state_dict(wrapped, save_embedding_layers=False))
    except Exception as error:  # peft raises what it likes, KeyError for modules that hold others
        raise OptionError(
            f"peft could not load what it would save of this adapter: {printable(error, 200)}",
            hint="name modules without others in them in --lora-modules-to-save, as word_embeddings",
        ) from error


def unwrapped(model: Any) -> Any:
    """Return the model within peft's wrapper, whose modules peft has replaced; any other model as it is.

    Raises: OptionError for a wrapper that does more than that.
    """
    if type(model).__module__.partition(".")[0] != "peft" or not hasattr(model, "get_base_model"):
        return model
    kind = str(getattr(model.active_peft_config.peft_type, "value", model.active_peft_config.peft_type))
    if model.active_peft_config.is_prompt_learning or kind in _NEED_CALLS:
        raise OptionError(f"an adapter of peft's {kind.lower()} does not work here", hint="use lora")
    return model.get_base_model()


def check_merges(wrapped: Any) -> None:
    """Check that an adapter can be merged: before the training, not after it. Raises: OptionError."""
    config, tuner = wrapped.peft_config["default"], wrapped.base_model
    why = ""
    if getattr(config, "layer_replication", None):
        why = "its layer_replication has layers share weights, which files of a model on its own cannot say"
    elif not hasattr(tuner, "merge_and_unload"):
        why = f"peft has no merging of {_kind_of(config).lower()}"
    if why:
        raise OptionError(f"the adapter cannot be merged: {why}", hint="leave out --merge")


def merge_adapter(wrapped: Any) -> nn.Module:
    """Add an adapter to the weights it stands beside; return the plain model, without modules of peft.

    Raises: OptionError for a method that peft cannot merge.
    """
    try:
        with _quiet_peft():
            merged: nn.Module = wrapped.merge_and_unload()
    except Exception as error:
        raise OptionError(f"the adapter cannot be merged: {first_line(error)}", hint="leave out --merge") from error
    return merged


def save_adapter(wrapped: Any, folder: Path) -> None:
    """Write the adapter's weights and configuration in peft's form."""
    with _quiet_peft():
        wrapped.save_pretrained(str(folder), save_embedding_layers=False)


@dataclass(frozen=True, kw_only=True)
class AdapterFiles:
    """An adapter on the disk. base: name of its model. weights: its file, whose tensors have these shapes by their
    names in the model, where it has them too."""

    folder: Path
    base: str
    weights: Path
    shapes: Mapping[str, tuple[int, ...]]

    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        """Those of these names in the model, in fp32 and in memory of their own."""
        with safe_open(self.weights, framework="pt", device="cpu") as opened:
            return {name: opened.get_tensor(PREFIX + name).float().clone() for name in names if name in self.shapes}

    def merged_into(self, model: Any) -> Any:
        """Load the adapter on its model and merge it; all of its weights may be trained. Raises: ModelError."""
        if importlib.util.find_spec("peft") is None:
            raise ModelError(f"{path_text(self.folder)} is an adapter of peft, which is not installed", hint=INSTALL)
        from brimful.hardware.process_settings import unchanged_random_streams

        try:
            with _quiet_peft(), unchanged_random_streams():
                from peft import PeftModel

                wrapped = PeftModel.from_pretrained(model, str(self.folder))
                return merge_adapter(wrapped).eval().requires_grad_(True)  # peft has frozen them
        except Exception as error:  # peft, and torch under it, raise what they like
            raise ModelError(
                f"{path_text(self.folder)}: the adapter cannot be loaded on {printable(self.base)}:"
                f" {first_line(error)}",
                hint="is base_model_name_or_path in its adapter_config.json the model that it was trained on?",
            ) from error


def find_adapter(folder: Path) -> AdapterFiles | None:
    """Return the adapter in a folder; None for one with a model's own weights, or without an adapter.

    Raises: ModelError for an adapter whose files are torn or missing, or that names no model.
    """
    if not (folder / CONFIG).is_file() or any(folder.glob("model*.safetensors*")):
        return None
    values, weights = _read_json(folder / CONFIG, ModelError), folder / WEIGHTS
    if not weights.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        hint = "load it with peft and save it again, as safetensors" if pickled else "copy the adapter again"
        raise ModelError(f"{path_text(folder)} is an adapter, and has no {WEIGHTS}", hint=hint)
    base = values.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"{path_text(folder)} is an adapter, and does not say of which model",
            hint=f"set base_model_name_or_path in its {CONFIG}",
        )
    found = {name.removeprefix(PREFIX): shape for name, shape in read_shapes(weights).items()}
    return AdapterFiles(folder=folder, base=base, weights=weights, shapes=found)


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """Keep warnings of peft, and of what it imports, off the terminal: what matters of them is checked here."""
    with warnings.catch_warnings(), quiet_transformers():
        warnings.simplefilter("ignore")
        yield
