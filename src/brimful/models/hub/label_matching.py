"""Match the labels of evaluated rows with the outputs of a model, which stay as they are."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from brimful.core.errors import OptionError, listed, printable
from brimful.models.hub.label_alignment import natural, read_label_map

_PLACEHOLDER = re.compile(r"label_(\d+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Matched:
    """Output of each label of the data; labels that no output has; how they were matched, if not as they stand.

    guessed: True if the match can be wrong.
    """

    outputs: Mapping[str, int]
    unknown: tuple[str, ...]
    note: str | None = None
    guessed: bool = False


def match_labels(labels: Sequence[str], names: Sequence[str], label_map: str | None) -> Matched:
    """Match labels with the names of outputs.

    By `label_map` where it names a label, else as they stand; and where no two labels would become one, without regard
    to case. Only where no label is found so, and there is no `label_map`: numbers and LABEL_0, LABEL_1, ... as numbers
    of outputs, or in sorted order, where the outputs are only called LABEL_0, LABEL_1, ... and are as many.
    Raises: OptionError for a label_map with a label that the model does not have.
    """
    mapped = {} if label_map is None else _mapped(label_map, labels, names)
    rest = [label for label in labels if label not in mapped]
    found, note = _spelled(rest, names)
    guessed = not found and label_map is None
    if guessed:
        found, note = _guess(rest, names)
    return Matched(
        outputs=found | mapped,
        unknown=tuple(label for label in rest if label not in found),
        note=note,
        guessed=guessed and bool(found),
    )


def unknown_hint(unknown: Sequence[str], names: Sequence[str]) -> str:
    """Name the model's labels, and the options that settle unknown ones."""
    near = {label: difflib.get_close_matches(label, names, n=1) for label in unknown[:3]}
    pairs = ",".join(printable(f"{label}={(close or ['...'])[0]}", 60) for label, close in near.items())
    shown = listed([repr(printable(name, 40)) for name in names], 8)
    return f"the model's are {shown}; --label-map {pairs} maps them, --unknown-labels drop leaves their rows out"


def are_placeholders(names: Sequence[str]) -> bool:
    """Return whether outputs are only called LABEL_0, LABEL_1, ..."""
    return all(_PLACEHOLDER.fullmatch(name) for name in names)


def _spelled(labels: Sequence[str], names: Sequence[str]) -> tuple[dict[str, int], str | None]:
    """Outputs of the labels' own names, and what was said of case."""
    found = _by(str, labels, names)
    folded = _by(_folded, labels, names) | found
    if len(folded) > len(found) and len(set(folded.values())) == len(folded):
        return folded, "labels are compared without regard to case, hyphens and underscores"
    return found, None


def _guess(labels: Sequence[str], names: Sequence[str]) -> tuple[dict[str, int], str | None]:
    """Outputs of labels that no output is named after, by number or in sorted order."""
    if numbers := _numbers(labels, len(names)):
        shown = ", ".join(f"{label} is {names[output]!r}" for label, output in list(numbers.items())[:4])
        more = ", ..." if len(numbers) > 4 else ""
        return numbers, f"labels are taken as the numbers of the model's outputs: {printable(shown + more)}"
    if are_placeholders(names) and len(labels) == len(names):
        in_order = sorted(labels, key=natural)
        shown = ", ".join(f"{printable(label)} is {name}" for label, name in zip(in_order[:4], names, strict=False))
        said = f"the model's outputs have no names, and take the labels in sorted order: {shown}"
        return {label: i for i, label in enumerate(in_order)}, said
    return {}, None


def _by(key: Callable[[str], str], labels: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """Outputs of the labels that `key` makes equal to the name of one output alone."""
    keys = [key(name) for name in names]
    outputs, many = {each: output for output, each in enumerate(keys)}, Counter(keys)
    return {label: outputs[key(label)] for label in labels if many[key(label)] == 1}


def _folded(label: str) -> str:
    """Fold case, and spaces, hyphens and underscores between words. A sign of a number, or a grade's, is no hyphen."""
    return " ".join(re.sub(r"(?<=\w)[-_](?=\w)", " ", label.casefold()).split())


def _numbers(labels: Sequence[str], num_outputs: int) -> dict[str, int]:
    """Labels that are all numbers of outputs, or all LABEL_ with such a number."""
    found = {}
    for label in labels:
        match = _PLACEHOLDER.fullmatch(label.strip())
        text = match[1] if match else label.strip()
        if not text.isdecimal() or int(text) >= num_outputs:
            return {}
        found[label] = int(text)
    return found


def _mapped(label_map: str, labels: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    pairs = read_label_map(label_map)
    for label, name in pairs.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            raise OptionError(
                f"--label-map maps {printable(label)!r} to {printable(name)!r}, which is no label of the model",
                hint=f"did you mean {printable(near[0])!r}?"
                if near
                else f"the model has {listed([repr(printable(name, 40)) for name in names], 8)}",
            )
    return {label: names.index(pairs[label]) for label in labels if label in pairs}
