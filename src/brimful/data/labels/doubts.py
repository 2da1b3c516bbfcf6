"""Likely mistakes in labels, a line each: words for a missing one, one label in several spellings, lists taken for
classes, labels that nothing is trained or evaluated on, equal texts with different labels."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brimful.core.errors import listed, printable
from brimful.core.records import LabelSpace
from brimful.data.labels.columns import Columns
from brimful.data.labels.examples import Examples, rows_of_labels, text_keys
from brimful.data.labels.label_columns import LabelColumn
from brimful.data.labels.label_sets import detect_sets
from brimful.data.labels.missing import missing_words, said_of_words
from brimful.data.readers.rows import Rows
from brimful.tasks.label_rows import dense

_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]{1,9})?", re.IGNORECASE)
#: Groups and labels that a line names.
_FEW = 3
#: Share of distinct values that are cut by commas, from which on they look like lists.
_LISTS = 0.2


def label_doubts(rows: Rows, columns: Columns, space: LabelSpace) -> list[str]:
    """Likely mistakes in the names of labels, and numbers that are trained on coarsely."""
    if space.task == "regression":
        return [doubt for name in columns.labels for doubt in LabelColumn(rows=rows, name=name).number_doubts()]
    found = []
    if words := missing_words(rows, columns):
        own = "a class of its own" if len(words) == 1 else "classes of their own"
        found.append(f"{said_of_words(words)} {own}; if no label is meant, --missing-labels drop leaves such rows out")
    if variants := _variants(tuple(space.values)):
        shown = "; ".join(" and ".join(f"'{printable(name, 40)}'" for name in group) for group in variants[:_FEW])
        more = f" (and {len(variants) - _FEW} more)" if len(variants) > _FEW else ""
        kinds = [kind for kind in _SPELLINGS if any(_differ_in(kind, group) for group in variants)] or ["spelling"]
        ways = " or ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))
        found.append(f"labels that differ in {ways} only are labels of their own: {shown}{more}")
    column = LabelColumn(rows=rows, name=columns.labels[0])
    if space.task == "single_label" and column.has_decimal_commas:
        said = "the labels look like numbers with a decimal comma, and are taken for classes"
        found.append(f"{said}: --task regression takes them for amounts")
    elif (
        space.task == "single_label"
        and pa.types.is_large_string(column.values.type)
        and (count := _num_in_lists(column))
    ):
        now = len(space.values)
        found.append(f"the {now:,} labels look like lists: --task multi_label cuts them at commas, and gives {count:,}")
    return found


def data_doubts(training: Examples, evaluation: Examples | None, names: Sequence[str]) -> list[str]:
    """Labels without rows to train or to evaluate on, and equal texts with different labels. names: of all labels."""
    found, space = [], training.space
    if space is None or space.task == "regression":
        return []
    trained = _num_rows(training)
    if absent := [name for name, count in zip(names, trained, strict=True) if not count]:
        shown = listed([f"'{printable(name, 40)}'" for name in absent], _FEW)
        label, it = ("label", "it") if len(absent) == 1 else ("labels", "they")
        found.append(f"no training row has the {label} {shown}: {it} cannot be learned")
    always = [name for name, count in zip(names, trained, strict=True) if count == len(training)]
    if space.task == "multi_label" and len(training) > 1 and always:
        shown = listed([f"'{printable(name, 40)}'" for name in always], _FEW)
        label, it = ("label", "it") if len(always) == 1 else ("labels", "them")
        found.append(f"every training row has the {label} {shown}: what rows without {it} look like cannot be learned")
    if evaluation is not None and len(evaluation):
        pairs = zip(names, trained, _num_rows(evaluation), strict=True)
        if unseen := [(name, count) for name, count, held_out in pairs if count and not held_out]:
            shown = listed([f"'{printable(name, 40)}' ({count:,} to train on)" for name, count in unseen], _FEW)
            label, it = ("label", "it") if len(unseen) == 1 else ("labels", "them")
            found.append(f"no evaluation row has the {label} {shown}: metrics say nothing of {it}")
    if conflict := _conflicts(training):
        found.append(conflict)
    return found


def _variants(names: Sequence[str]) -> list[list[str]]:
    """Groups of several names that differ in their spelling only."""
    groups: defaultdict[str | Decimal, list[str]] = defaultdict(list)
    for name in names:
        groups[_plain(name)].append(name)
    return [group for group in groups.values() if len(group) > 1]


def _plain(name: str, *, without: str = "") -> str | Decimal:
    """A name in the one spelling of all that are alike. without: a kind of spelling that counts."""
    plain: str | Decimal = name
    for kind, changed in _SPELLINGS.items():
        if kind != without and isinstance(plain, str):
            plain = changed(plain)
    return plain


def _differ_in(kind: str, names: Sequence[str]) -> bool:
    """Return whether names that are alike differ in this kind of spelling."""
    return len({_plain(name, without=kind) for name in names}) > 1


def _number(name: str) -> str | Decimal:
    """The number that a name is, of any length; a name that is none as it is."""
    return Decimal(name) if _NUMBER.fullmatch(name) else name


#: Ways to spell one label, and what each comes down to.
_SPELLINGS: Mapping[str, Callable[[str], str | Decimal]] = {
    "Unicode form": lambda name: unicodedata.normalize("NFKC", name),
    "case": str.casefold,
    "spaces": lambda name: "".join(name.split()),
    "the form of a number": _number,
}


def _num_in_lists(column: LabelColumn) -> int:
    """Labels that the values give when they are cut, 0 where they do not look like lists."""
    num_values = len(column.distinct)
    if not pc.any(pc.match_substring(column.distinct, ","), min_count=0).as_py():
        return 0
    sets = detect_sets(column.distinct, asked=True)
    if sets is None or sets.num_cut < max(2, _LISTS * num_values):
        return 0
    is_list = len(sets.labels) < num_values and sets.uses().max() > 1
    return len(sets.labels) if is_list and all(len(label.split()) <= _FEW for label in sets.labels) else 0


def _num_rows(examples: Examples) -> list[int]:
    targets, space = examples.targets, examples.space
    assert targets is not None
    assert space is not None
    return [int(count) for count in rows_of_labels(targets, space.num_outputs)]


def _conflicts(examples: Examples) -> str | None:
    """Equal texts of one label each that have different ones, with the first two rows."""
    targets, space = examples.targets, examples.space
    if targets is None or space is None or space.task != "single_label":
        return None
    texts, targets = text_keys(examples).combine_chunks(), dense(targets)
    groups = pc.dictionary_encode(texts).indices.to_numpy(zero_copy_only=False)
    order = np.lexsort((targets, groups))
    differs = (np.diff(groups[order]) == 0) & (np.diff(targets[order]) != 0)
    if not differs.any():
        return None
    in_conflict = np.isin(groups, groups[order[:-1][differs]])
    num_texts, first_at = len(np.unique(groups[in_conflict])), int(np.argmax(in_conflict))
    other_at = int(np.argmax((groups == groups[first_at]) & (targets != targets[first_at])))
    (_, first), (_, second) = examples.place(first_at), examples.place(other_at)
    noun = "text has" if num_texts == 1 else "texts have"
    return (
        f"{num_texts:,} {noun} different labels in different rows ({int(in_conflict.sum()):,} training rows);"
        f" the first: rows {first:,} and {second:,}, '{printable(examples.texts[first_at].as_py(), 40)}'"
    )
