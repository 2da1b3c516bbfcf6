"""Match the labels of the data with the outputs of the model's head.

alignment = align_labels(space, facts, label_map=None, new_head=False)
model = load_model(facts, alignment.space, head=alignment.head, seed=42)
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from brimful.core.atomic_files import path_text
from brimful.core.errors import ModelError, OptionError, listed, printable
from brimful.core.records import LabelSpace
from brimful.models.hub.inspection import ModelFacts
from brimful.models.hub.weight_files import read_json_object

NEW_HEAD = "--new-head replaces the head by a new one for these labels"


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """The labels in the order of the model's outputs, whether its head is kept or made new, and why."""

    space: LabelSpace
    head: Literal["kept", "new"]
    reason: str


def align_labels(space: LabelSpace, facts: ModelFacts, *, label_map: str | None, new_head: bool) -> Alignment:
    """Match the labels of the data, `space`, with the head of the model.

    A head is kept if its names are those of the data in any order, first with and then without regard to case; if they
    are more than those; if they are only LABEL_0, LABEL_1, ... and as many; or as `label_map` says. `values` of what
    comes back has the labels of the data only, `names` are the model's. For regression, names are always those of the
    data's columns.

    Raises: ModelError if the labels are not those of the head, OptionError for a `label_map` that does not fit.
    """
    if label_map is not None and new_head:
        raise OptionError("--label-map and --new-head are both given", hint="a new head takes the labels of the data")
    if new_head and facts.has_head:
        return Alignment(space=space, head="new", reason="asked for: --new-head")
    if not facts.has_head:
        if label_map is not None:
            raise OptionError(
                f"--label-map maps to the labels of a head, and {printable(facts.name)} has none",
                hint="leave it out: the new head takes the labels of the data",
            )
        return Alignment(space=space, head="new", reason=facts.head_note)
    if space.task == "regression":
        return _align_regression(space, facts, label_map)
    if facts.label_names is None:
        raise ModelError(
            f"{printable(facts.name)}: id2label in config.json does not number its labels from 0", hint=NEW_HEAD
        )
    if repeated := [name for name in facts.label_names if facts.label_names.count(name) > 1]:
        raise ModelError(f"{printable(facts.name)}: two outputs are named {printable(repeated[0])!r}", hint=NEW_HEAD)
    if label_map is not None:
        outputs = _mapped(space, facts.label_names, label_map)
        return _kept(space, facts.label_names, outputs, "its labels are mapped by --label-map")
    return _align_by_name(space, facts, facts.label_names)


def _align_by_name(space: LabelSpace, facts: ModelFacts, names: tuple[str, ...]) -> Alignment:
    for key, said in ((str, ""), (str.casefold, ", but for upper and lower case")):
        matched = _match(space.names, names, key)
        if matched is not None:
            others = len(names) - len(matched)
            more = f" and {others} more" if others else ""
            return _kept(space, names, matched, f"it has the labels of the data{said}{more}")
    if facts.labels_are_placeholders and len(names) == space.num_outputs:
        in_order = sorted(space.names, key=natural)
        outputs = [in_order.index(name) for name in space.names]
        pairs = ", ".join(f"{name}={label}" for name, label in zip(names, in_order, strict=True))
        reason = f"its outputs have no names of their own, and take the labels in sorted order: {printable(pairs)}"
        return _kept(space, tuple(in_order), outputs, reason)
    raise ModelError(
        f"the labels of the data are not those of {printable(facts.name)}: {_some(space.names)} against {_some(names)}",
        hint=f"{_suggested_map(space.names, names)} maps them to the head's; {NEW_HEAD}",
    )


def _match(labels: Sequence[str], names: Sequence[str], key: Callable[[str], str]) -> list[int] | None:
    """Output of each label, comparing them by `key`; None if a label has none, or `key` makes two equal."""
    outputs = {key(name): output for output, name in enumerate(names)}
    wanted = [key(label) for label in labels]
    if len(outputs) < len(names) or len(set(wanted)) < len(wanted) or not outputs.keys() >= set(wanted):
        return None
    return [outputs[label] for label in wanted]


def _kept(space: LabelSpace, names: tuple[str, ...], outputs: Sequence[int], reason: str) -> Alignment:
    """The head as it is, with label i of the data at outputs[i]."""
    values = {text: outputs[index] for text, index in space.values.items()}
    return Alignment(space=replace(space, names=names, values=values), head="kept", reason=reason)


def natural(label: str) -> tuple[int, int, str]:
    """Return a key that sorts whole numbers by size, before everything else by its letters."""
    return (0, int(label), label) if label.removeprefix("-").isdecimal() else (1, 0, label)


def _align_regression(space: LabelSpace, facts: ModelFacts, label_map: str | None) -> Alignment:
    if label_map is not None:
        raise OptionError("--label-map is for classes, and the labels are numbers", hint="leave it out")
    outputs = facts.config.num_labels
    problem = facts.config.problem_type or "regression"
    if outputs != space.num_outputs or (outputs > 1 and problem != "regression"):
        what = f"has {outputs} outputs" if outputs != space.num_outputs else f"is for {problem}"
        raise ModelError(
            f"the head of {printable(facts.name)} {what}, and the data has {space.num_outputs} columns of numbers",
            hint=NEW_HEAD,
        )
    names, reason = space.names, "it has as many outputs as the data has columns of numbers"
    for key in (str, str.casefold):
        matched = _match(space.names, facts.label_names or (), key)
        if matched is not None:
            names = tuple(space.names[matched.index(i)] for i in range(outputs))
            reason = "it has the columns of the data"
            break
    return Alignment(space=replace(space, names=names), head="kept", reason=reason)


def _mapped(space: LabelSpace, names: tuple[str, ...], label_map: str) -> list[int]:
    """Output of each label of the data by `label_map`."""
    pairs = read_label_map(label_map)
    outputs = []
    for label in space.names:
        if label not in pairs:
            raise OptionError(
                f"--label-map says nothing of the label {printable(label)!r}",
                hint=_meant(label, list(pairs)) or f"add {printable(label)}=..., one of {_some(names)}",
            )
        if pairs[label] not in names:
            raise OptionError(
                f"--label-map maps {printable(label)!r} to {printable(pairs[label])!r}, which is no label of the model",
                hint=_meant(pairs[label], list(names)) or f"the model has {_some(names)}",
            )
        outputs.append(names.index(pairs[label]))
    if space.task == "multi_label" and len(set(outputs)) < len(outputs):
        raise OptionError("--label-map maps two columns to one output", hint="map each column to its own output")
    return outputs


def read_label_map(label_map: str) -> Mapping[str, str]:
    """Data label -> model label, from `a=X,b=Y` or a JSON file with an object. Raises: OptionError."""
    path = Path(label_map).expanduser()
    if label_map.endswith(".json"):
        if not path.is_file():
            raise OptionError(f"--label-map: there is no file {path_text(path)}", hint="or give it as a=X,b=Y")
        try:
            return {label: str(name) for label, name in read_json_object(path).items()}
        except ModelError as error:
            raise OptionError(f"--label-map: {error}", hint='it holds {"data label": "model label", ...}') from error
    pairs: dict[str, str] = {}
    for part in label_map.split(","):
        label, equals, name = (piece.strip() for piece in part.partition("="))
        if not (label and equals and name):
            raise OptionError(
                f"--label-map: {printable(part)!r} is not of the form data label=model label",
                hint="as pos=POSITIVE,neg=NEGATIVE; labels with a comma or an equals sign go into a JSON file",
            )
        if label in pairs:
            raise OptionError(f"--label-map names {printable(label)!r} twice", hint="map each label once")
        pairs[label] = name
    return pairs


def _meant(word: str, known: list[str]) -> str | None:
    by_fold = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(word.casefold(), list(by_fold), n=1)
    return f"did you mean {printable(by_fold[near[0]])!r}?" if near else None


def _suggested_map(labels: Sequence[str], names: Sequence[str]) -> str:
    """`--label-map` for these labels, filled in where they are the numbers of the outputs."""
    numbered = all(label.isdecimal() and int(label) < len(names) for label in labels)
    targets = [names[int(label)] if numbered else "..." for label in labels[:3]]
    rest = ",..." if len(labels) > 3 else ""
    return "--label-map " + ",".join(printable(f"{a}={b}") for a, b in zip(labels[:3], targets, strict=True)) + rest


def _some(names: Sequence[str], limit: int = 8) -> str:
    return listed([repr(printable(name, 40)) for name in names], limit)
