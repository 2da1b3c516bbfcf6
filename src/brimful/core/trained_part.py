"""The part of a model that is trained: what --peft and --freeze ask for, as text and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from brimful.core.errors import OptionError, printable
from brimful.core.options.checks import check_numbers, check_positive, flag, split_names

#: Settings of an adapter, by their names in peft's own configuration.
ADAPTER_SETTINGS = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
}
REGEX = "regex:"
#: The recipe's name for what --freeze all-but-head leaves to train, and what earlier versions called it.
HEAD_ALONE, ONCE_HEAD_ALONE = "the head alone", "all but all-but-head"

_LAYERS = re.compile(r"layers?[ :=]?\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?")
_FREEZE_HINT = "all-but-head, or embeddings, layers 0-5 separated by commas, or regex:PATTERN"


@dataclass(frozen=True, kw_only=True)
class FrozenParts:
    """Parts of a model that are not trained.

    layers: (first, last) numbers, counted from 0. pattern: regular expression searched for in names of parameters.
    """

    all_but_head: bool = False
    embeddings: bool = False
    layers: tuple[tuple[int, int], ...] = ()
    pattern: str | None = None

    @classmethod
    def parse(cls, text: str) -> FrozenParts:
        """Read what --freeze was given. Raises: OptionError for anything that names no part."""
        if text.startswith(REGEX):
            return cls(pattern=_checked_pattern("freeze", text.removeprefix(REGEX)))
        layers, known = [], {"all-but-head": False, "embeddings": False}
        for name in split_names(text):
            found = _LAYERS.fullmatch(name)
            if found is not None:
                layers.append((int(found[1]), int(found[2] or found[1])))
            elif name in known:
                known[name] = True
            else:
                raise OptionError(f"--freeze names no part of a model: {printable(name)!r}", hint=_FREEZE_HINT)
        if backwards := next((each for each in layers if each[0] > each[1]), None):
            raise OptionError(
                f"--freeze has layers {backwards[0]}-{backwards[1]}", hint=f"layers {backwards[1]}-{backwards[0]}"
            )
        return cls(all_but_head=known["all-but-head"], embeddings=known["embeddings"], layers=tuple(layers))

    def check_layers(self, count: int) -> None:
        """Raises: OptionError for layers that a model of `count` layers does not have."""
        for first, last in self.layers:
            if last >= count:
                raise OptionError(
                    f"--freeze has layers {first}-{last}, and the model has {count}",
                    hint=f"they are counted from 0: layers {min(first, count - 1)}-{count - 1}",
                )


def check_trained_part(options: Any) -> None:
    """Check the fields of --peft and --freeze, and that they go together."""
    check_positive(options, "lora_r", "lora_alpha")
    check_numbers(options, ("lora_dropout",), lambda value: 0 <= value < 1, "at least 0 and below 1")
    if options.freeze is not None:
        FrozenParts.parse(options.freeze)
    if options.peft is None:
        given = [name for name in (*ADAPTER_SETTINGS, "merge") if getattr(options, name) not in (None, False)]
        if given:
            raise OptionError(f"{flag(given[0])} is given without --peft", hint="add --peft lora, or leave it out")
        return
    if options.freeze is not None:
        said = "--peft and --freeze are both given, and with --peft all but the adapter and the head is frozen"
        raise OptionError(said, hint="leave out --freeze; which layers have an adapter is for --lora-target-modules")
    target = options.lora_target_modules
    if target is not None and target.startswith(REGEX):
        _checked_pattern("lora_target_modules", target.removeprefix(REGEX))
    for name in ("peft", "lora_target_modules", "lora_modules_to_save"):
        if getattr(options, name) is not None and "" in split_names(getattr(options, name)):
            raise OptionError(f"{flag(name)} has an empty name", hint="as in query,value")


def _checked_pattern(name: str, pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        said = f"{flag(name)} is no regular expression: {printable(pattern)!r}: {error}"
        raise OptionError(said, hint="try it with Python's re.compile") from error
    return pattern
