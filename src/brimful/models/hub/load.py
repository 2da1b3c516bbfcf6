"""Weights into memory: a classifier in fp32 for the labels asked for, from the files that inspection found whole."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from brimful.core.atomic_files import path_text
from brimful.core.errors import ModelError, listed, printable
from brimful.core.records import LabelSpace, TaskName
from brimful.hardware.file_memory import FileRoom
from brimful.hardware.process_settings import unchanged_random_streams
from brimful.models.hub.inspection import (
    OTHER_CONFIG,
    POOLER,
    ModelFacts,
    empty_model,
    head_parameters,
    load_tokenizer,
    num_embedded,
)
from brimful.models.hub.quiet import first_line, quiet_transformers
from brimful.models.hub.weight_files import AGAIN

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: transformers' name of each task, by ours.
PROBLEM_TYPES: Mapping[TaskName, str] = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}
_MOST_NAMED = 4
#: The byte C0, which no text in UTF-8 has, as vocabularies of bytes write it, and those that fall back to bytes.
_NO_BYTE, _NO_FALLBACK_BYTE = "À", "<0xC0>"


def load_model(
    facts: ModelFacts, space: LabelSpace, *, head: Literal["kept", "new"], seed: int, folder: Path | None = None,
    answers: bool = False,
) -> PreTrainedModel:  # fmt: skip
    """The classifier on the CPU, in fp32 whatever its files hold, in evaluation mode, outputs named after `space`.

    head: `kept` takes the head in the weights; `new` draws it from `seed` as transformers does after
    `torch.manual_seed(seed)`, and leaves torch's own generators as they are. What a base model holds of a head
    (ModernBERT's dense layer) is taken; of a whole head nothing is.
    The model owns its memory: the files can be replaced afterwards.
    folder: of a file without a name for safetensors' weights, that a model may be larger than memory.
    answers: whether it is to answer as it is. The head of a decoder then reads the token that transformers reads of a
    text alone: the last one that is not its configuration's padding token. One that is trained has its tokenizer's.

    Raises: ModelError if the weights lack part of the model, or part of it has another shape, OptionError where a file
    cannot be made.
    """
    config = config_for(facts.config, space)
    empty = empty_model(facts.folder, config, facts.runs_own_code)
    head_names = head_parameters(empty).keys()
    if facts.adapter is not None and head == "new":
        raise ModelError(
            f"{path_text(facts.adapter.folder)}: the head of an adapter cannot be replaced",
            hint="train it with --merge, or begin with its base model",
        )
    room = None if folder is None else FileRoom(folder, _safe_bytes(facts))
    try:
        state = _read_tensors(facts.weight_files, room)
        if facts.adapter is not None:
            state |= facts.adapter.tensors([name for name, _ in empty.named_parameters()])
        if head == "new" and head_names <= state.keys():
            state = {name: tensor for name, tensor in state.items() if name not in head_names}
        with quiet_transformers(), unchanged_random_streams():
            torch.default_generator.manual_seed(seed)
            model, info = type(empty).from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # conversions of weights fail in their own ways
        raise ModelError(
            f"{path_text(facts.folder)}: its weights cannot be loaded: {first_line(error)}", hint=AGAIN
        ) from error
    _require_whole(facts, info, head_names if head == "new" else ())
    _record_padding_token(model, facts, answers=answers)
    return model if facts.adapter is None else facts.adapter.merged_into(model)


def config_for(config: PreTrainedConfig, space: LabelSpace) -> PreTrainedConfig:
    """A copy of `config` for the task and the outputs of `space`."""
    config = copy.deepcopy(config)
    config.id2label = dict(enumerate(space.names))
    config.label2id = {name: index for index, name in enumerate(space.names)}
    config.problem_type = PROBLEM_TYPES[space.task]
    return config


def _read_tensors(files: tuple[Path, ...], room: FileRoom | None = None) -> dict[str, Tensor]:
    """All tensors of the files, floating ones in fp32, in memory of their own (not mapped from the files).

    room: for those of safetensors; pickled ones are read whole.
    """
    from safetensors import safe_open

    state: dict[str, Tensor] = {}
    for file in files:
        if file.suffix != ".safetensors":
            pickled = torch.load(file, map_location="cpu", weights_only=True, mmap=False)
            for name in list(pickled):  # one after another: there is no time at which all are there twice
                state[name] = _owned(pickled.pop(name))
            continue
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118  (it is not a mapping)
                state[name] = _owned(opened.get_tensor(name), room)
    return state


def _owned(tensor: Tensor, room: FileRoom | None = None) -> Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return tensor.to(dtype=dtype, copy=True) if room is None else room.put(tensor, dtype)


def _safe_bytes(facts: ModelFacts) -> int:
    """Most bytes of all tensors in safetensors' files, in the dtypes of `_owned`: 8 a number, of integers."""
    from safetensors import safe_open

    found = 0
    for file in (each for each in facts.weight_files if each.suffix == ".safetensors"):
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118  (it is not a mapping)
                part = opened.get_slice(name)
                each = 4 if "F" in part.get_dtype() else 8
                found += FileRoom.bytes_with(each * math.prod(part.get_shape()))
    return found


def _require_whole(facts: ModelFacts, info: Mapping[str, Any], may_be_new: Collection[str]) -> None:
    """Raises: ModelError unless everything but the parameters in `may_be_new`, and then the pooler, was loaded."""

    def excused(name: str) -> bool:
        return name in may_be_new or (bool(may_be_new) and POOLER.search(name) is not None)

    if missing := sorted(name for name in info["missing_keys"] if not excused(name)):
        raise ModelError(
            f"{path_text(facts.folder)}: its weights lack {len(missing)} tensors of a {facts.model_type} model: "
            f"{printable(listed(missing, _MOST_NAMED), 400)}",
            hint=OTHER_CONFIG,
        )
    misfits = sorted(tuple(found) for found in info["mismatched_keys"] if not excused(found[0]))
    if misfits:
        name, in_file, in_model = misfits[0][:3]
        raise ModelError(
            f"{path_text(facts.folder)}: {printable(name)} is {tuple(in_file)} in its weights and {tuple(in_model)} by "
            f"its config.json, one of {len(misfits)} such tensors",
            hint=OTHER_CONFIG,
        )


def _record_padding_token(model: PreTrainedModel, facts: ModelFacts, *, answers: bool) -> None:
    """Tell a model that reads its last token which tokens are padding, and any model that was not told."""
    text = model.config.get_text_config()
    reads_last_token = _reads_last_token(model)
    size, own = num_embedded(model), getattr(text, "pad_token_id", None)
    told = isinstance(own, int) and own >= 0 and (size is None or own < size)
    if told and (answers or not reads_last_token):
        return
    # After the model is built: an embedding built with a padding token never trains that token, here end of text.
    tokenizer = load_tokenizer(facts)
    pad_id = tokenizer.pad_token_id
    if answers and reads_last_token and size is not None:
        pad_id = _never_last(tokenizer, size)
    model.config.pad_token_id = text.pad_token_id = pad_id


def _reads_last_token(model: PreTrainedModel) -> bool:
    """True for the head of a decoder: most are called `score`, others look for padding in their own forward pass."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return hasattr(model, "score") or "pad_token_id" in getattr(code, "co_names", ())


def _never_last(tokenizer: Any, size: int) -> int:
    """A token for padding that no text ends with, of `size` that are embedded.

    transformers reads the last token of a text where a model names no padding token, be it the end of text. One that
    the vocabulary lacks, or a byte that is in no text, is never there; else a special token that hardly ends one.
    """
    numbers: Mapping[str, int] = tokenizer.get_vocab()
    if max(numbers.values()) < size - 1:
        return size - 1
    backend = getattr(tokenizer, "backend_tokenizer", None)
    of_bytes = type(getattr(backend, "decoder", None)).__name__ == "ByteLevel"
    ends, specials = tokenizer("a")["input_ids"][-1:], tokenizer.special_tokens_map
    hardly = (specials.get(f"{name}_token") for name in ("bos", "cls", "mask", "pad", "sep", "eos"))
    named = [_NO_BYTE if of_bytes else None, _NO_FALLBACK_BYTE, *hardly]
    found = (numbers[name] for name in named if name in numbers)
    return next((number for number in found if number not in ends and number < size), size - 1)
