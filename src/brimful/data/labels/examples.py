"""Rows -> examples: what is trained and evaluated on, its split, and what it looks like.

Rows without text are left out and counted, and where asked for, those without a label. Nothing else is: duplicates and
leakage are told, not removed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brimful.core.errors import DataError
from brimful.core.options.choices import MissingLabels
from brimful.core.records import LabelSpace
from brimful.data.labels.columns import Columns, joined_texts
from brimful.data.labels.label_columns import LabelColumn
from brimful.data.labels.label_space import encode_labels, has_labels
from brimful.data.readers.rows import Rows
from brimful.tasks.label_rows import LabelRows, Targets, dense, taken

_BINS = 10
#: A character that is no white space of Unicode. Trimming would copy every text.
_NOT_BLANK = r"[^\s\v\x1c-\x1f\x{85}\pZ]"
_LENGTH_QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """N examples in the order of their rows.

    texts, pairs: (N,) large_string; pairs is None without a second column.
    targets: as `encode_labels` gives them; None without a label space.
    row_numbers: (N,) int64, the row of `rows` that each is. num_unlabelled: rows left out for want of a label.
    weights: (N,) float32 above 0, what each counts as in the loss; None: all as one.
    """

    rows: Rows
    columns: Columns
    space: LabelSpace | None
    texts: pa.ChunkedArray
    pairs: pa.ChunkedArray | None
    targets: Targets | None
    row_numbers: npt.NDArray[np.int64]
    num_unlabelled: int = 0
    weights: npt.NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.row_numbers)

    def filter(self, chosen_N: npt.NDArray[np.bool_]) -> Examples:
        """The chosen examples, in order."""
        mask = pa.array(chosen_N)
        return replace(
            self,
            texts=self.texts.filter(mask),
            pairs=None if self.pairs is None else self.pairs.filter(mask),
            targets=None if self.targets is None else taken(self.targets, chosen_N),
            weights=None if self.weights is None else self.weights[chosen_N],
            row_numbers=self.row_numbers[chosen_N],
        )

    def place(self, index: int) -> tuple[str, int]:
        """File and 1-based row within it of example `index`."""
        return self.rows.place(int(self.row_numbers[index]))


def make_examples(
    rows: Rows, columns: Columns, space: LabelSpace | None, missing_labels: MissingLabels = "error"
) -> tuple[Examples, int]:
    """The rows that have a text (and, of pairs, both), and the number of those left out.

    space: what the labels mean; None to leave them alone. missing_labels: whether rows without one are an error, are
    left out, or in multi_label have none.
    Raises: DataError where no row is left, and what `encode_labels` raises.
    """
    texts = joined_texts(rows.table, columns.text)
    pairs = None if columns.pair is None else rows.table[columns.pair].cast(pa.large_string())
    present = has_text(texts) if pairs is None else pc.and_(has_text(texts), has_text(pairs))
    num_empty = len(texts) - (pc.sum(present).as_py() or 0)
    if num_empty == len(texts):
        raise DataError(
            f"column {columns.text!r} has no text in any of {num_empty:,} rows",
            file=rows.name,
            hint="is --text-column the right one?",
        )
    numbers = np.arange(len(texts), dtype=np.int64)
    num_unlabelled = 0
    if missing_labels == "drop" and space is not None:
        labelled = pa.array(has_labels(rows, columns))
        num_unlabelled = len(texts) - num_empty - (pc.sum(pc.and_(present, labelled)).as_py() or 0)
        present = pc.and_(present, labelled)
        if num_unlabelled + num_empty == len(texts):
            raise DataError("no row has a text and a label", file=rows.name, hint="is --label-column the right one?")
    examples = Examples(
        num_unlabelled=num_unlabelled,
        rows=rows,
        columns=columns,
        space=space,
        texts=texts,
        pairs=pairs,
        targets=None,
        row_numbers=numbers,
    )
    if num_empty or num_unlabelled:
        examples = examples.filter(present.to_numpy())
    if space is not None:
        chosen = examples.row_numbers if num_empty or num_unlabelled else None
        targets = encode_labels(rows, columns, space, chosen, missing_is_none=missing_labels == "none")
        examples = replace(examples, targets=targets)
    return examples, num_empty


def num_empty_labels(examples: Examples) -> int:
    """Examples of several labels each whose text of labels is empty: no label is true of them."""
    space, names = examples.space, examples.columns.labels
    if space is None or space.task != "multi_label" or len(names) != 1:
        return 0
    column = LabelColumn(rows=examples.rows, name=names[0], row_numbers=examples.row_numbers)
    return 0 if column.holds_lists else int(column.texts.null_count)


def split_examples(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """Training and evaluation examples: `share` of each class to evaluate on, chosen by `seed`, each part in order.

    Stratified by class, by combination of labels, or by tenth of a single regression target. Each class, and each label
    of multi_label, keeps an example to train on. Equal texts stay together, where that leaves any to evaluate on: then
    nothing is evaluated on that is trained on.

    Raises: DataError where that leaves nothing to evaluate on.
    """
    if share == 0:
        return examples, examples.filter(np.zeros(len(examples), np.bool_))
    strata, (firsts, group_N) = _strata(examples), _groups(examples)
    held_out = _chosen_by_stratum(strata[firsts], share, np.random.default_rng(seed))[group_N]
    if not held_out.any():
        group_N = np.arange(len(examples))
        held_out = _chosen_by_stratum(strata, share, np.random.default_rng(seed))
    targets = examples.targets
    if isinstance(targets, LabelRows):
        _give_back_lone_labels(held_out, targets, group_N)
    if not held_out.any():
        alone = len(np.unique(strata)) == len(strata)
        why = "every class has one row" if alone else "each class keeps one to train on"
        raise DataError(
            f"{len(examples):,} rows are too few to hold out {share:g} of them: {why}",
            file=examples.rows.name,
            hint="is --label-column the right one? otherwise give other rows by --eval-data, or --eval-split 0"
            if alone
            else "give more rows, other rows by --eval-data, or --eval-split 0",
        )
    return examples.filter(~held_out), examples.filter(held_out)


def draw(examples: Examples, count: int | None, seed: int) -> Examples:
    """`count` of the examples, drawn by `seed`, in order; all where there are no more."""
    if count is None or count >= len(examples):
        return examples
    chosen_N = np.zeros(len(examples), np.bool_)
    chosen_N[np.random.default_rng(seed).permutation(len(examples))[:count]] = True
    return examples.filter(chosen_N)


def describe(train: Examples, evaluation: Examples | None, empty_rows: int = 0) -> dict[str, Any]:
    """Summary of the examples, for JSON.

    rows, eval_rows: examples; eval_rows is None without an evaluation. empty_rows: rows left out for want of text.
    unlabelled_rows: for want of a label.
    weights: of training examples, min, mean and max, where they have any.
    labels, eval_labels: examples by label; for regression target and eval_target, with min, mean and max by output.
    duplicate_texts: training examples whose text (with its pair) stood in an earlier one.
    eval_texts_in_train: evaluation examples whose text (with its pair) is trained on: too good a score.
    characters: quantiles of the length of training texts, with the pair's.
    """
    keys = text_keys(train)
    eval_keys = None if evaluation is None else text_keys(evaluation)
    other = evaluation if evaluation is not None and evaluation.rows is not train.rows else None
    report: dict[str, Any] = {
        "rows": len(train),
        "eval_rows": None if evaluation is None else len(evaluation),
        "empty_rows": empty_rows,
        "unlabelled_rows": train.num_unlabelled + (other.num_unlabelled if other else 0),
        **({} if train.weights is None else {"weights": _spread(train.weights)}),
        **_balance(train, ""),
        **({} if evaluation is None else _balance(evaluation, "eval_")),
        "duplicate_texts": len(train) - pc.count_distinct(keys).as_py(),
        "eval_texts_in_train": None if eval_keys is None else pc.sum(pc.is_in(eval_keys, keys)).as_py() or 0,
        "characters": _characters(train),
    }
    return report


# Splitting


def _strata(examples: Examples) -> npt.NDArray[np.int64]:
    """(N,) the group of each example; every group is split in the same share."""
    targets, space = examples.targets, examples.space
    if isinstance(targets, LabelRows):
        return _combinations(targets)
    if targets is None or space is None or (targets.ndim > 1 and space.task == "regression"):
        return np.zeros(len(examples), np.int64)
    if space.task == "single_label":
        return targets.astype(np.int64, copy=False)
    ranks = np.argsort(np.argsort(targets, kind="stable"), kind="stable")
    bins = _BINS if len(examples) >= 2 * _BINS else 1
    return np.asarray(ranks * bins // max(1, len(examples)), np.int64)


def _combinations(targets: LabelRows) -> npt.NDArray[np.int64]:
    """(N,) the number of each row's combination of labels, in the order of their flags.

    Combinations that stand once would all stay in training: together they are a group of their own, the last one.
    """
    if not len(targets):
        return np.zeros(0, np.int64)
    parts = np.split(targets.labels_E, targets.offsets_N1[1:-1])
    coded = pa.array((part.tobytes() for part in parts), pa.large_binary()).dictionary_encode()
    group_N = coded.indices.to_numpy()
    several = np.flatnonzero(np.bincount(group_N, minlength=len(coded.dictionary)) > 1)
    flags = [tuple(-np.frombuffer(coded.dictionary[int(group)].as_py(), np.int32)) for group in several]
    order = sorted(range(len(several)), key=flags.__getitem__)
    number_G = np.full(len(coded.dictionary), len(several))
    number_G[several[order]] = np.arange(len(several))
    return np.asarray(number_G[group_N], np.int64)


def _chosen_by_stratum(
    strata: npt.NDArray[np.int64], share: float, random: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """(N,) True for about `share` of each stratum, and for round(share * N) in all where none is used up."""
    counts = np.bincount(strata)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    shuffled = random.permutation(len(strata))
    by_stratum = shuffled[np.argsort(strata[shuffled], kind="stable")]
    place_in_stratum = np.arange(len(strata)) - np.repeat(starts, counts)
    chosen = np.zeros(len(strata), np.bool_)
    chosen[by_stratum] = place_in_stratum < np.repeat(_quotas(counts, share), counts)
    return chosen


def _quotas(counts: npt.NDArray[np.int64], share: float) -> npt.NDArray[np.int64]:
    """Number to take of each stratum: its share rounded down, the rest by largest remainder. One row stays."""
    exact = counts * share
    most = np.maximum(counts - 1, 0)
    quotas: npt.NDArray[np.int64] = np.minimum(np.floor(exact).astype(np.int64), most)
    missing = max(1, round(share * int(counts.sum()))) - int(quotas.sum())
    open_strata = np.flatnonzero(quotas < most)
    by_remainder = open_strata[np.argsort((quotas - exact)[open_strata], kind="stable")]
    quotas[by_remainder[: max(0, missing)]] += 1
    return quotas


def _groups(examples: Examples) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of each distinct text the first example, in order, and (N,) the number of each example's text among them."""
    if not len(examples):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    texts = text_keys(examples).combine_chunks()
    group_N = pc.dictionary_encode(texts).indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return np.unique(group_N, return_index=True)[1], group_N


def _give_back_lone_labels(held_out: npt.NDArray[np.bool_], targets: LabelRows, group_N: npt.NDArray[np.int64]) -> None:
    """Moves a text back to training for each label that only the evaluation has, in place."""
    for having in targets.having():
        if len(having) and held_out[having].all():
            held_out[group_N == group_N[having[0]]] = False


# Describing


def _balance(examples: Examples, prefix: str) -> dict[str, Any]:
    targets, space = examples.targets, examples.space
    if targets is None or space is None:
        return {}
    if space.task == "regression":
        outputs = dict(zip(space.names, dense(targets).reshape(len(targets), -1).T, strict=True))
        return {f"{prefix}target": {name: _spread(values) for name, values in outputs.items()}}
    counts = rows_of_labels(targets, space.num_outputs)
    return {f"{prefix}labels": dict(zip(space.names, counts.tolist(), strict=True))}


def rows_of_labels(targets: Targets, num_labels: int) -> npt.NDArray[np.int64]:
    """(C,) rows that have each label."""
    if isinstance(targets, LabelRows):
        return np.asarray(targets.counts(), np.int64)
    return np.bincount(targets, minlength=num_labels)


def _spread(values: npt.NDArray[np.float32]) -> dict[str, float] | None:
    if not len(values):
        return None
    return {"min": float(values.min()), "mean": float(values.mean(dtype=np.float64)), "max": float(values.max())}


def _characters(examples: Examples) -> dict[str, int] | None:
    if not len(examples):
        return None
    lengths = pc.utf8_length(examples.texts).to_numpy()
    if examples.pairs is not None:
        lengths = lengths + pc.utf8_length(examples.pairs).to_numpy()
    quantiles = np.quantile(lengths, list(_LENGTH_QUANTILES.values()), method="higher")
    return dict(zip(_LENGTH_QUANTILES, quantiles.astype(int).tolist(), strict=True))


def text_keys(examples: Examples) -> pa.ChunkedArray:
    """Keys by which two examples are the same to a model: the text, with the pair."""
    if examples.pairs is None:
        return examples.texts
    return pc.binary_join_element_wise(examples.texts, examples.pairs, pa.scalar("\0", pa.large_string()))


def has_text(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """(N,) bool: whether each is there and not all white space."""
    return pc.match_substring_regex(texts, _NOT_BLANK).fill_null(False)
