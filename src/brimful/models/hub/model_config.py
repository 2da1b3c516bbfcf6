"""config.json of a model, read as data and then as a configuration of transformers."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brimful.core.atomic_files import path_text
from brimful.core.errors import ModelError, printable
from brimful.models.hub.quiet import first_line, quiet_transformers
from brimful.models.hub.weight_files import AGAIN, read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_AUTO = "AutoModelForSequenceClassification"
#: Keys of config.json that change where a model's code or weights come from, not what it computes.
_NOT_OF_THE_MODEL = ("auto_map", "fusion_config", "transformers_weights")
#: Counts that transformers runs through one by one to build a model, by the ends of their names, with a most that no
#: real model comes near: beyond it, building would take the whole memory before anything could be refused.
_MOST = {
    "layers": 1_000,
    "n_layer": 1_000,
    "num_hidden_groups": 1_000,
    "inner_group_num": 1_000,
    "experts": 100_000,
    "num_labels": 1_000_000,
}


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json.

    Raises: ModelError if it is not there, is no JSON object, names no model_type, gives a count beyond all measure, or
    says that the weights are quantized.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{path_text(folder)} has no config.json: it is not the folder of a model",
            hint=f"did you mean {path_text(folder / 'model')}?"
            if (folder / "model" / "config.json").is_file()
            else "give the folder that has config.json and the weights in it",
        )
    raw = read_json_object(path)
    if not isinstance(raw.get("model_type"), str):
        raise ModelError(
            f"{path_text(path)} has no model_type", hint='add one, as in "model_type": "bert", or use a newer copy'
        )
    if raw.get("quantization_config"):
        raise ModelError(
            f"{path_text(folder)}: its weights are quantized, and cannot be trained in full precision",
            hint="use the model that they were made from",
        )
    _require_sane_counts(path, raw)
    return raw


def _require_sane_counts(path: Path, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _require_sane_counts(path, value)
        most = next((most for end, most in _MOST.items() if name.endswith(end)), None)
        if most is not None and isinstance(value, int) and value > most:
            raise ModelError(f"{path_text(path)} gives {printable(name)} as {printable(value)}", hint=AGAIN)


def build_config(folder: Path, raw: dict[str, Any], *, trust_remote_code: bool) -> tuple[PreTrainedConfig, bool]:
    """The configuration, and whether the model is built by Python code that came with it.

    A type that transformers knows is built by transformers, unless the user trusts the model's own code.

    Raises: ModelError if only such code could build it and it is not trusted, for a type that is not known or has no
    sequence classifier, and for values that transformers refuses.
    """
    own_code = _is_built_by_own_code(folder, raw, trust_remote_code)
    config = _read_by_transformers(folder, own_code)
    if not own_code:
        _require_classifier(folder, raw, config)
    for name in _NOT_OF_THE_MODEL:
        if name in config.__dict__ and not (own_code and name == "auto_map"):
            delattr(config, name)
    config._attn_implementation = None  # the default: a name in config.json can be that of a kernel on the hub
    return config, own_code


def _is_built_by_own_code(folder: Path, raw: dict[str, Any], trusted: bool) -> bool:
    from transformers import CONFIG_MAPPING

    model_type, offered = raw["model_type"], _own_classes(raw)
    known = model_type in CONFIG_MAPPING
    if known or (trusted and {_AUTO, "AutoConfig"} <= offered):
        return trusted and _AUTO in offered
    if offered and not trusted:
        raise _untrusted(folder, model_type)
    if offered:
        raise ModelError(
            f"{path_text(folder)}: the code that comes with it has no {_AUTO}", hint="use a model that has a classifier"
        )
    near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING.keys()), n=1)
    meant = f"if it is {near[0]!r}, say so in config.json; " if near else ""
    raise ModelError(
        f"{path_text(folder)}: this transformers knows no model_type {printable(model_type)!r}",
        hint=f"{meant}a newer transformers may know it",
    )


def _own_classes(raw: dict[str, Any]) -> set[str]:
    auto_map = raw.get("auto_map")
    return set(auto_map) if isinstance(auto_map, dict) else set()


def _untrusted(folder: Path, model_type: str) -> ModelError:
    return ModelError(
        f"{path_text(folder)}: a classifier of type {printable(model_type)!r} is built by Python code that comes with "
        "the model, which is not run unasked",
        hint="read that code, then add --trust-remote-code",
    )


def _read_by_transformers(folder: Path, own_code: bool) -> PreTrainedConfig:
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(folder, trust_remote_code=own_code, local_files_only=True)
    except Exception as error:  # each configuration class checks in its own way
        raise ModelError(
            f"{path_text(folder / 'config.json')} is refused by transformers: {first_line(error)}", hint=AGAIN
        ) from error


def _require_classifier(folder: Path, raw: dict[str, Any], config: PreTrainedConfig) -> None:
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return
    if _AUTO in _own_classes(raw):
        raise _untrusted(folder, raw["model_type"])
    raise ModelError(
        f"{path_text(folder)}: transformers has no sequence classifier of type {printable(raw['model_type'])!r}",
        hint="use a text model, such as a BERT, ModernBERT, DeBERTa, Llama or Qwen",
    )
