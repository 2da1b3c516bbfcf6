"""Choose the columns of the text, of its pair and of the label: as told, else by name, else by their values."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from brimful.core.errors import DataError, listed, printable
from brimful.core.options.checks import split_names
from brimful.data.column_names import IDS, LABELS, PAIRS, TEXTS, key_of
from brimful.data.readers.fields import field_names
from brimful.data.readers.rows import Rows

_SAMPLE_ROWS = 100_000
#: How --pair-column says that there is none.
NO_PAIR = "none"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns to read, by name.

    text: of several columns, whose texts are joined, their names with commas between them (`text_parts`).
    labels: one per output, or the one with the label; empty if there is none and none is needed.
    reasons: why each was taken, by "text", "pair", "label" and "weight". doubts: likely mistakes among these, a line
    each. weight: what rows count as in the loss.
    """

    text: str
    pair: str | None
    labels: tuple[str, ...]
    reasons: Mapping[str, str]
    doubts: tuple[str, ...] = ()
    weight: str | None = None


def text_parts(names: Collection[str], text: str) -> tuple[str, ...]:
    """The columns of `names` that `text` stands for: one, whatever its name, or several separated by commas."""
    return (text,) if text in names or "," not in text else split_names(text)


def joined_texts(table: pa.Table, text: str) -> pa.ChunkedArray:
    """(N,) large_string: the texts of the columns `text`. Several are joined by line breaks, without those that are
    missing or blank; null where all are."""
    parts = [table[name].cast(pa.large_string()) for name in text_parts(table.column_names, text)]
    if len(parts) == 1:
        return parts[0]
    missing = pa.scalar(None, pa.large_string())
    parts = [pc.if_else(pc.equal(pc.utf8_trim_whitespace(part), ""), missing, part) for part in parts]
    between = pa.scalar("\n", pa.large_string())
    joined = pc.binary_join_element_wise(*parts, between, null_handling="skip")
    return pc.if_else(pc.equal(joined, ""), missing, joined)


def describe_columns(columns: Columns) -> list[str]:
    """One line for each column that is read: why it was taken, and the flag that names another."""
    named = {"text": columns.text, "pair": columns.pair, "label": ", ".join(columns.labels), "weight": columns.weight}
    lines = []
    for role, reason in columns.reasons.items():
        other = " (none: single texts)" if role == "pair" else ""
        settled = "" if reason == "given" else f"; --{role}-column names another{other}"
        lines.append(f"{role}: column '{printable(named[role], 200)}' ({reason}{settled})")
    return lines


def find_columns(
    rows: Rows, *, text: str | None = None, pair: str | None = None, label: str | None = None,
    weight: str | None = None, need_labels: bool = True,
) -> Columns:  # fmt: skip
    """The columns of `rows` to read. Names are compared without regard to case.

    text, pair, label, weight: names given by the user; text and label may be several, separated by commas. The pair
    `none` is none, unless there is a column of this name.
    need_labels: False for rows to classify: then labels are those that `label` names, or none.

    Raises: DataError for a name that is not there, and where no column, or more than one, can be meant.
    """
    given = {"text": text, "pair": pair, "label": label, "weight": weight}
    reasons = {role: "given" for role, name in given.items() if name is not None}
    labels = _given_labels(rows, label) if label is not None else ()
    is_single = pair == NO_PAIR and NO_PAIR not in rows.table.column_names
    if is_single:
        del reasons["pair"]
    pair = None if is_single else pair
    for name in () if text is None else text_parts(rows.table.column_names, text):
        check_exists(rows, name, "--text-column")
    if text in rows.table.column_names:
        _check_given(rows, text, "--text-column")
    _check_given(rows, pair, "--pair-column")
    if weight is not None:
        check_exists(rows, weight, "--weight-column")
    others = {*labels, *({weight} if weight else ())}
    doubts: tuple[str, ...] = ()
    if text is None:
        text, reasons["text"], doubts = _find_text(rows, taken={*others, *({pair} if pair else ())})
    if pair is None and not is_single and (pair := _find_pair(rows, text, others)):
        reasons["pair"] = f"the pair of {text!r} by name"
    names = [*text_parts(rows.table.column_names, text), *(each for each in (pair, weight) if each is not None)]
    _check_roles([*names, *labels])
    if need_labels and not labels:
        found, reasons["label"], of_label = _find_label(rows, taken=names, weight=weight)
        labels, doubts = (found,), (*doubts, *of_label)
    return Columns(text=text, pair=pair, labels=labels, reasons=reasons, doubts=doubts, weight=weight)


def _check_roles(names: Sequence[str]) -> None:
    """Raises: DataError for a column that is read for two things."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        hint = "the text, its pair, the label or labels and the weight each need a column of their own"
        raise DataError("one column cannot have two roles", value=twice, hint=hint)


def _given_labels(rows: Rows, label: str) -> tuple[str, ...]:
    """A column may have a comma in its own name."""
    names = [label] if label in rows.table.column_names else [name.strip() for name in label.split(",")]
    for name in names:
        check_exists(rows, name, "--label-column")
        if names.count(name) > 1:
            raise DataError("--label-column names a column twice", value=name, hint="name each once")
    return tuple(names)


def _check_given(rows: Rows, name: str | None, flag: str) -> None:
    if name is None:
        return
    check_exists(rows, name, flag)
    kind = rows.table.schema.field(name).type
    if not (pa.types.is_large_string(kind) or pa.types.is_null(kind)):
        raise DataError(
            f"{flag} {printable(name)} holds {printable(kind)}, not text", file=rows.name, hint=_available(rows)
        )


def check_exists(rows: Rows, name: str, flag: str) -> None:
    """Raises: DataError where no column has this name. flag: the option that gave it."""
    if name in rows.table.column_names:
        return
    names = field_names(rows.table.schema)
    by_lower = {each.lower(): each for each in names}
    near = [by_lower[each] for each in difflib.get_close_matches(name.lower(), by_lower, n=1)]
    meant = f"did you mean '{printable(near[0])}'? " if near else ""
    raise DataError(f"{flag}: there is no such column", file=rows.name, value=name, hint=meant + _available(rows))


def _find_text(rows: Rows, taken: Collection[str]) -> tuple[str, str, tuple[str, ...]]:
    """Name, reason and doubts of the column with the text, or with the first text of a pair."""
    texts = _text_columns(rows, taken)
    partners = {key_of(name) for name in taken}
    if "text" not in texts:
        for first, second in PAIRS:
            if first in texts and (second in texts or second in partners):
                return texts[first], f"the first of a pair with {second!r} by name", ()
    for name in TEXTS:
        if name in texts:
            return texts[name], "by name", ()
    columns = {name: rows.table[name].slice(0, _SAMPLE_ROWS) for name in texts.values()}
    lengths = {name: pc.mean(pc.utf8_length(c)).as_py() or 0.0 for name, c in columns.items() if not _is_numeric(c)}
    if not lengths:
        raise DataError("no column holds text", file=rows.name, hint=f"name it by --text-column; {_available(rows)}")
    longest = max(lengths, key=lambda name: lengths[name])
    reason = f"the longest text, {lengths[longest]:.0f} characters on average"
    return longest, reason, tuple(_doubts_of_text(rows, longest, columns[longest]))


def _doubts_of_text(rows: Rows, name: str, column: pa.ChunkedArray) -> Iterator[str]:
    """A guessed column of single words, such as dates, names or codes, is hardly the text. Not all scripts have
    spaces, so other letters than ASCII's are no sign of that."""
    is_word = pc.and_(pc.string_is_ascii(column), pc.invert(pc.match_substring(pc.utf8_trim_whitespace(column), " ")))
    share = pc.mean(is_word.cast(pa.float32())).as_py()
    if share is None or share <= 0.5:
        return
    within = [printable(each) for each in field_names(rows.table.schema) if each not in rows.table.column_names]
    meant = f", as {listed(within, 3)}" if within else ""
    said = f"'{printable(name)}' is taken for the text, and most of its values are single words"
    yield f"{said}; --text-column names another{meant}"


def _find_pair(rows: Rows, text: str, taken: Collection[str]) -> str | None:
    texts = _text_columns(rows, taken)
    return next((texts[second] for first, second in PAIRS if first == key_of(text) and second in texts), None)


def _find_label(rows: Rows, taken: Collection[str], weight: str | None) -> tuple[str, str, tuple[str, ...]]:
    """Name, reason and doubts of the column with the label: by its name, by the last word of its name, else the one
    with the fewest distinct values."""
    left = [name for name in rows.table.column_names if name not in taken]
    by_key = {key_of(name): name for name in reversed(left)}
    for name in LABELS:
        if name in by_key:
            return by_key[name], "by name", ()
    counts = {name: _num_distinct(rows.table[name]) for name in left if key_of(name) not in IDS}
    counts = {name: count for name, count in counts.items() if count > 1}
    for word in LABELS:
        ending = [name for name in counts if key_of(name).endswith(f"_{word}")]
        if len(ending) == 1:
            return ending[0], f"its name ends with {word!r}", ()
    fewest = [name for name, count in counts.items() if count == min(counts.values())]
    if len(fewest) == 1:
        reason = f"the fewest distinct values, {counts[fewest[0]]}"
        others = [
            f"{printable(name)} has {count:,}"
            for name, count in counts.items()
            if name not in fewest and not _is_prose(rows.table[name], count)
        ]
        said = f"the label may be another column than '{printable(fewest[0])}', which has {reason}: {listed(others, 4)}"
        return fewest[0], reason, (f"{said}; --label-column names it",) if others else ()
    if fewest:
        shown = ",".join(printable(name) for name in fewest)
        raise DataError(
            f"{len(fewest)} columns could be the label: {shown}",
            file=rows.name,
            hint=f"name it: --label-column {printable(fewest[0])}, or {shown} for one output each",
        )
    alone = [f"'{printable(name)}' has one value in all rows" for name in left if key_of(name) not in IDS]
    used = [f"'{printable(name)}' is read as {'weights' if name == weight else 'text'}" for name in taken]
    said = f"no column can be the label: {listed([*alone, *used], 4)}"
    meant = "" if weight is None or key_of(weight) not in LABELS else ", or other weights by --weight-column"
    raise DataError(said, file=rows.name, hint=f"name it by --label-column{meant}; {_available(rows)}")


def _text_columns(rows: Rows, taken: Collection[str]) -> dict[str, str]:
    """Columns of text by their names as names are compared; of several alike the first."""
    names = [field.name for field in rows.table.schema if pa.types.is_large_string(field.type)]
    return {key_of(name): name for name in reversed(names) if name not in taken}


def _is_numeric(column: pa.ChunkedArray) -> bool:
    """True if all values of the sample are numbers as text; empty ones say nothing."""
    values = pc.utf8_trim_whitespace(column.drop_null())
    number = pc.match_substring_regex(values, r"^([-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?)?$")
    return bool(pc.all(number, min_count=0).as_py())


def _is_prose(column: pa.ChunkedArray, num_distinct: int) -> bool:
    """True for text of which most rows have their own: no labels."""
    is_text = pa.types.is_large_string(column.type) and not _is_numeric(column.slice(0, _SAMPLE_ROWS))
    return is_text and 2 * num_distinct > len(column)


def _num_distinct(column: pa.ChunkedArray) -> int:
    """Distinct values but null; 0 for a column of a type that no label has."""
    kind = column.type
    if pa.types.is_large_list(kind):
        column, kind = pc.list_flatten(column), kind.value_type
    types = pa.types
    plain = (types.is_large_string, types.is_integer, types.is_floating, types.is_decimal, types.is_boolean)
    return int(pc.count_distinct(column).as_py()) if any(is_kind(kind) for is_kind in plain) else 0


def _available(rows: Rows) -> str:
    return "columns: " + listed([printable(name, 40) for name in field_names(rows.table.schema)])
