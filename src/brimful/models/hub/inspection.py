"""Facts of a model before its weights are loaded, and all refusals that need no weights.

    facts = inspect_model("bert-base-uncased", trust_remote_code=False, allow_pickle=False)
    facts.has_head, facts.max_positions      # (False, 512)
    tokenizer = load_tokenizer(facts)

The configuration and the headers of the weights are read as data; the model is built on torch's meta device, which
holds shapes and no numbers. No code that comes with a model runs unless trust_remote_code.
"""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brimful.core.atomic_files import path_text
from brimful.core.errors import ModelError, printable
from brimful.core.records import TrainedInputs
from brimful.core.units import count_text
from brimful.models.hub.adapters import AdapterFiles, find_adapter
from brimful.models.hub.model_config import build_config, read_config
from brimful.models.hub.quiet import first_line, quiet_transformers
from brimful.models.hub.resolve import find_folder
from brimful.models.hub.trained_inputs import read_trained_inputs
from brimful.models.hub.weight_files import AGAIN, Weights, find_weights, refuse_lfs_pointer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

_TOKENIZER_FILE = re.compile(r"(tokenizer|vocab|merges|spiece|sentencepiece|tekken|bpe).*|.*\.(model|tiktoken)")
#: Heads of other tasks whose parameters have the names of a sequence-classification head in some families.
_OTHER_HEADS = ("ForTokenClassification", "ForMultipleChoice")


#: Models pretrained on masked words come without the pooler that their classifier reads.
POOLER = re.compile(r"(^|\.)pooler\.")
OTHER_CONFIG = "is config.json that of these weights? if so, download or copy the model again"


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A model that can be loaded.

    name: as the user gave it. folder: where it lies.
    label_names: of the outputs of the head in the weights, by index; None without a head, or where they are not
        numbered from 0.
    labels_are_placeholders: the names are only LABEL_0, LABEL_1, ...
    has_head: the weights hold a whole sequence-classification head. head_note: why, in words.
    max_positions: longest sequence in tokens; None if the positions are relative and have no limit.
    weight_bytes: of the files, in their own dtype. num_parameters: with a head of as many outputs as in config.json.
    num_embedded: tokens that the model has embeddings of; None where it has none, or they are not a table.
    runs_own_code: the model is built by Python code that came with it.
    inputs: those that brimful trained it on; None where it did not.
    adapter: of peft, to be merged into the weights, which are those of its base model; None for a model without one.
    new_parameters: those of the body that the files do not hold, and that loading draws: a pooler's.
    """

    name: str
    folder: Path
    config: PreTrainedConfig
    model_type: str
    label_names: tuple[str, ...] | None
    labels_are_placeholders: bool
    has_head: bool
    head_note: str
    max_positions: int | None
    weight_files: tuple[Path, ...]
    weight_bytes: int
    num_parameters: int
    runs_own_code: bool
    num_embedded: int | None = None
    inputs: TrainedInputs | None = None
    adapter: AdapterFiles | None = None
    new_parameters: tuple[str, ...] = ()

    @property
    def source(self) -> Path:
        """The folder that `inspect_model` was given: of the model, or of the adapter on it."""
        return self.folder if self.adapter is None else self.adapter.folder

    @property
    def base_name(self) -> str:
        """Name by which an adapter finds this model again: that on the hub, or the whole path of a folder."""
        return str(self.folder) if Path(self.name).expanduser().is_dir() else self.name


def inspect_model(name: str, *, trust_remote_code: bool, allow_pickle: bool) -> ModelFacts:
    """The facts of the model `name`, a folder or a name on the hub, whose files are downloaded if need be.

    Raises: ModelError for whatever is missing, torn, unknown or not allowed.
    """
    given = folder = base = find_folder(name, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    adapter = find_adapter(folder)
    if adapter is not None:
        base = find_folder(adapter.base, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
        folder = given if (given / "config.json").is_file() and tokenizer_files(given) else base
    raw = read_config(folder)
    weights = find_weights(base, allow_pickle=allow_pickle)
    if adapter is not None:
        weights = weights.with_adapter(adapter.shapes)
    _require_tokenizer_files(folder)
    config, own_code = build_config(folder, raw, trust_remote_code=trust_remote_code)
    model = empty_model(folder, config, own_code)
    if adapter is not None and (outputs := _outputs_of(adapter, model)) != config.num_labels:
        config.num_labels = outputs
        model = empty_model(folder, config, own_code)
    has_head, note = _find_head(folder, model, weights)
    _require_body(folder, model, weights)
    names = _label_names(config) if has_head else None
    return ModelFacts(
        name=name,
        folder=folder,
        config=config,
        model_type=str(config.model_type),
        label_names=names,
        labels_are_placeholders=names is not None and all(re.fullmatch(r"LABEL_\d+", n) for n in names),
        has_head=has_head,
        head_note=note,
        max_positions=max_positions(config, model),
        weight_files=weights.files,
        weight_bytes=weights.total_bytes,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_embedded=num_embedded(model),
        runs_own_code=own_code,
        inputs=read_trained_inputs(given),
        adapter=adapter,
        new_parameters=_new_parameters(model, weights),
    )


def load_tokenizer(facts: ModelFacts) -> PreTrainedTokenizerFast:
    """The tokenizer of the model: fast, padding on the right, with a padding token (end of text where it has none).

    Raises: ModelError if it cannot be read, has no fast form, no vocabulary, or no usable padding token.
    """
    from transformers import AutoTokenizer

    where = path_text(facts.folder)
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(
                facts.folder, config=facts.config, trust_remote_code=facts.runs_own_code, local_files_only=True
            )
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ModelError(f"{where}: its tokenizer cannot be loaded: {first_line(error)}", hint=AGAIN) from error
    if not tokenizer.is_fast:
        raise ModelError(
            f"{where}: its tokenizer, {type(tokenizer).__name__}, has no fast form (tokenizer.json)",
            hint="use a model whose tokenizer has one",
        )
    if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):
        # transformers makes up an empty tokenizer where the vocabulary is missing.
        raise ModelError(f"{where}: its tokenizer has no vocabulary", hint=AGAIN)
    # The lengths in tokenizer.json were right for other data: all-MiniLM pads everything to 128 tokens.
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.padding_side = "right"
    _ensure_padding_token(where, tokenizer, facts.config)
    return tokenizer


def head_parameters(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters outside the base model: those of the head, by name."""
    base = {id(parameter) for parameter in model.base_model.parameters()}
    return {name: tuple(p.shape) for name, p in model.named_parameters() if id(p) not in base}


def _outputs_of(adapter: AdapterFiles, model: PreTrainedModel) -> int:
    """Outputs of the head in an adapter; the model's own where it holds none."""
    num_labels = int(model.config.num_labels)
    for name, shape in head_parameters(model).items():
        if shape[:1] == (num_labels,) and name in adapter.shapes:
            return adapter.shapes[name][0]
    return num_labels


def _new_parameters(model: PreTrainedModel, weights: Weights) -> tuple[str, ...]:
    """Names of the pooler's parameters that no file holds."""
    prefix, named = model.base_model_prefix + ".", model.base_model.named_parameters()
    absent = (name for name, _ in named if POOLER.search(name) and not {name, prefix + name} & weights.shapes.keys())
    return tuple(prefix + name for name in absent)


def tokenizer_files(folder: Path) -> list[Path]:
    """Files of the model in `folder` that its tokenizer may be read from, those of special tokens aside."""
    return sorted(path for path in folder.iterdir() if path.is_file() and _TOKENIZER_FILE.fullmatch(path.name))


def _require_tokenizer_files(folder: Path) -> None:
    found = tokenizer_files(folder)
    if not found:
        raise ModelError(
            f"{path_text(folder)} has no tokenizer files", hint="copy tokenizer.json and tokenizer_config.json there"
        )
    for path in found:
        refuse_lfs_pointer(path)


def empty_model(folder: Path, config: PreTrainedConfig, own_code: bool) -> PreTrainedModel:
    """The model in `folder` without weights, on the meta device: only names and shapes."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from brimful.hardware.process_settings import unchanged_random_streams

    try:
        with quiet_transformers(), unchanged_random_streams(), torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(copy.deepcopy(config), trust_remote_code=own_code)
    except Exception as error:  # whatever a model makes of sizes that do not fit, or of a package that is not there
        raise ModelError(
            f"{path_text(folder)}: no {printable(config.model_type)} model can be built from its config.json: "
            f"{first_line(error)}",
            hint="install the package that it names" if isinstance(error, ImportError) else AGAIN,
        ) from error


def _find_head(folder: Path, model: PreTrainedModel, weights: Weights) -> tuple[bool, str]:
    """Tell if the weights hold all of the model's head, and why."""
    wanted = head_parameters(model)
    if not wanted:
        raise ModelError(
            f"{path_text(folder)}: a {type(model).__name__} has no head apart from its body", hint="use another model"
        )
    if absent := [name for name in wanted if name not in weights.shapes]:
        return False, f"its weights have no {', '.join(absent)}"
    for name, shape in wanted.items():
        if weights.shapes[name] != shape:
            return False, f"{name} is {weights.shapes[name]} in its weights and {shape} by its config.json"
    others = [printable(a) for a in model.config.architectures or () if str(a).endswith(_OTHER_HEADS)]
    if others:
        return False, f"its head is that of {others[0]}"
    return True, f"its weights have {', '.join(wanted)}"


def _require_body(folder: Path, model: PreTrainedModel, weights: Weights) -> None:
    """Raises: ModelError if the weights are far from those of the body, which loading would then make up in memory.

    Loading is exact about names and shapes; here only parameters of equal name and the total are compared, since some
    files hold parameters under older names.
    """
    prefix = model.base_model_prefix + "."
    for name, parameter in model.base_model.named_parameters():
        in_file = weights.shapes.get(prefix + name, weights.shapes.get(name))
        if in_file is not None and math.prod(in_file) != parameter.numel():
            shape = tuple(parameter.shape)
            raise ModelError(
                f"{path_text(folder)}: {name} is {in_file} in its weights and {shape} by its config.json",
                hint=OTHER_CONFIG,
            )
    wanted = sum(p.numel() for name, p in model.base_model.named_parameters() if not POOLER.search(name))
    held = sum(math.prod(shape) for shape in weights.shapes.values())
    if wanted > 1.5 * held:
        raise ModelError(
            f"{path_text(folder)}: its weights hold {count_text(held)} numbers, and the body of the model in its "
            f"config.json has {count_text(wanted)}",
            hint=OTHER_CONFIG,
        )


def _label_names(config: PreTrainedConfig) -> tuple[str, ...] | None:
    names = config.id2label
    if sorted(names) != list(range(len(names))):
        return None
    return tuple(str(names[index]) for index in range(len(names)))


def num_embedded(model: PreTrainedModel) -> int | None:
    """Return how many tokens a model has embeddings of; None where it does not say."""
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
    except (AttributeError, NotImplementedError):
        return None
    return None if weight is None or weight.ndim != 2 else int(weight.shape[0])


def max_positions(config: PreTrainedConfig, model: PreTrainedModel) -> int | None:
    """Return the longest sequence in tokens, None where positions have no limit."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    if getattr(text, "relative_attention", False) and not getattr(text, "position_biased_input", True):
        return None  # DeBERTa without a table of positions
    for name, module in model.base_model.named_modules():
        # RoBERTa and related models number positions from padding_idx + 1 on, within the one table.
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None and module.weight.shape[0] == limit:
            return limit - int(padding) - 1
    return limit


def _ensure_padding_token(where: str, tokenizer: Any, config: PreTrainedConfig) -> None:
    if tokenizer.pad_token is None:
        pad_id = getattr(config.get_text_config(), "pad_token_id", None)
        named = tokenizer.convert_ids_to_tokens(pad_id) if isinstance(pad_id, int) and pad_id >= 0 else None
        tokenizer.pad_token = named or tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise ModelError(
            f"{where}: its tokenizer has neither a padding nor an end-of-text token",
            hint="name one of its tokens as pad_token in tokenizer_config.json",
        )
    vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    if isinstance(vocab_size, int) and tokenizer.pad_token_id >= vocab_size:
        raise ModelError(
            f"{where}: its padding token is number {tokenizer.pad_token_id}, and the model embeds {vocab_size} tokens",
            hint="name a token below that as pad_token in tokenizer_config.json",
        )
