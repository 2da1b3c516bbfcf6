"""A trained classifier into a folder in Hugging Face form, whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from brimful.core.atomic_files import (
    REPLACED,
    TEMPORARY,
    file_errors,
    make_folder,
    remove,
    replace_folder,
    temporary_path,
)
from brimful.core.records import LabelSpace, TrainedInputs
from brimful.models.hub.adapters import save_adapter
from brimful.models.hub.load import config_for
from brimful.models.hub.quiet import quiet_transformers
from brimful.models.hub.trained_inputs import write_trained_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    space: LabelSpace,
    folder: Path,
    card: str,
    inputs: TrainedInputs | None = None,
) -> None:
    """Write weights (fp32 safetensors), configuration, tokenizer and README.md (`card`) as `folder`.

    inputs: those of training, in brimful.json; their longest sequence is the tokenizer's too, so that transformers'
    `truncation=True` cuts where training did.

    Until all of it is on the disk, `folder` is what it was before: not there, or an older model. `model` is left as it
    is; how it runs (its attention) is not saved.

    Raises: DiskFullError or OutputError naming `folder`.
    """

    def write(temporary: Path) -> None:
        _write(model, tokenizer, space, temporary, card, inputs)

    _replace(folder, write)


def save_adapted_model(
    wrapped: Any, tokenizer: PreTrainedTokenizerFast, space: LabelSpace, folder: Path, card: str,
    inputs: TrainedInputs | None = None,
) -> None:  # fmt: skip
    """The same of an adapter: its weights and those of its head, in peft's form, and the name of its model.

    wrapped: peft's wrapper around the model.
    """

    def write(temporary: Path) -> None:
        temporary.mkdir()
        save_adapter(wrapped, temporary)
        _write_beside(wrapped.get_base_model(), tokenizer, space, temporary, card, inputs)

    _replace(folder, write)


def _replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Have a folder written under another name, and put in its place when all of it is on the disk."""
    temporary = temporary_path(folder)
    try:
        with file_errors(folder), _system_errors(), quiet_transformers():
            make_folder(folder.parent)
            write(temporary)
            replace_folder(temporary, folder)
            for path in list(folder.parent.iterdir()):  # left by saves that were killed
                if path.name.startswith(f"{TEMPORARY}{folder.name}-") or path.name == REPLACED + folder.name:
                    remove(path)
    except BaseException:
        with suppress(Exception):
            remove(temporary)
        raise


def _write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, space: LabelSpace, folder: Path, card: str,
    inputs: TrainedInputs | None,
) -> None:  # fmt: skip
    folder.mkdir()
    state = {
        name: tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in model.state_dict().items()
    }
    model.save_pretrained(folder, state_dict=state)
    _write_beside(model, tokenizer, space, folder, card, inputs)


def _write_beside(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, space: LabelSpace, folder: Path, card: str,
    inputs: TrainedInputs | None,
) -> None:  # fmt: skip
    """All that lies beside the weights: configuration, tokenizer, inputs of training and card."""
    config = config_for(model.config, space)
    config.dtype = torch.float32
    config._attn_implementation = None
    config.save_pretrained(folder)
    whole_length = tokenizer.model_max_length
    try:
        if inputs is not None:
            tokenizer.model_max_length = inputs.max_length
            write_trained_inputs(folder, inputs)
        tokenizer.save_pretrained(folder)
    finally:
        tokenizer.model_max_length = whole_length
    (folder / "README.md").write_text(card, encoding="utf-8")


@contextmanager
def _system_errors() -> Iterator[None]:
    """Raise what others made of a failed write, libraries in Rust above all, as the OSError that it was."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        found = _OS_ERROR.search(str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number)) from error
