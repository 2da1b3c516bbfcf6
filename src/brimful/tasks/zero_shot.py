"""Zero-shot classification: what an NLI model's logits of text and hypothesis pairs say of candidate labels.

    form = zero_shot_form(config, multi_label=False)
    candidates = Candidates.of_every_row(parse_labels("sports, politics"), num_rows=len(texts))
    form.hypotheses(candidates.names)           one per name: tokenise each once
    form.columns(logits_PC, candidates)         {"label": ..., "score": ...}, arrays of N

One pair is one row's text with one of its candidate labels. Scores are those of transformers' pipeline, but for logits
above 88, where it has no number.

Legend: N rows, P pairs of all rows together, C outputs of the model, G rows with M labels each, N1 is N + 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brimful.core.classification import Counts
from brimful.core.errors import DataError, ModelError, OptionError, encodes, printable
from brimful.core.options import ClassifyOptions
from brimful.tasks.answers import LOGITS, Form, softmax
from brimful.tasks.ranking import (
    Flags,
    Integers,
    Ranking,
    Singles,
    as_lists,
    finite_rows,
    offsets_of,
    offsets_within,
    shortest,
)

#: The pipeline's, as the command line has it.
DEFAULT_TEMPLATE = ClassifyOptions.hypothesis_template
_NAN = np.float32(np.nan)


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Candidate labels of N rows: those of row n are names[indices_P[offsets_N1[n] : offsets_N1[n + 1]]].

    names: each label's text, large_string. A row may have none; it has no pairs and no answer.
    """

    names: pa.Array
    indices_P: Integers
    offsets_N1: Integers

    @classmethod
    def of_every_row(cls, labels: Sequence[str], num_rows: int) -> Candidates:
        """The same labels for each of the rows."""
        return cls(
            names=pa.array(labels, pa.large_string()),
            indices_P=np.tile(np.arange(len(labels)), num_rows),
            offsets_N1=np.arange(num_rows + 1) * len(labels),
        )

    @classmethod
    def from_column(cls, column: pa.Array | pa.ChunkedArray) -> Candidates:
        """Each row's own labels: a column of lists of text, or of text in which commas part them.

        Null rows have no labels, null labels are none. Raises: DataError for a column that holds no text.
        """
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        lists = _lists_of_text(column)
        labels_P = lists.flatten()
        lengths_N = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        kept_P = labels_P.is_valid().to_numpy(zero_copy_only=False)
        encoded = labels_P.filter(pa.array(kept_P)).dictionary_encode()
        return cls(
            names=encoded.dictionary,
            indices_P=encoded.indices.to_numpy().astype(np.int64),
            offsets_N1=offsets_within(kept_P, offsets_of(lengths_N)),
        )

    def slice(self, start: int, num_rows: int) -> Candidates:
        """Of rows from `start` on."""
        offsets_N1 = self.offsets_N1[start : start + num_rows + 1]
        indices_P = self.indices_P[offsets_N1[0] : offsets_N1[-1]]
        return self._of(indices_P, offsets_N1 - offsets_N1[0])

    def take(self, rows: Integers) -> Candidates:
        """Of some of the rows, in this order; names that none of them has are left out."""
        lengths_N = np.diff(self.offsets_N1)[rows]
        offsets_N1 = offsets_of(lengths_N)
        places_P = np.arange(offsets_N1[-1]) + np.repeat(self.offsets_N1[:-1][rows] - offsets_N1[:-1], lengths_N)
        return self._of(self.indices_P[places_P], offsets_N1)

    def _of(self, indices_P: Integers, offsets_N1: Integers) -> Candidates:
        used, indices_P = np.unique(indices_P, return_inverse=True)
        return Candidates(names=self.names.take(pa.array(used)), indices_P=indices_P, offsets_N1=offsets_N1)

    def only(self, there_N: Flags) -> Candidates:
        """Those of these rows; the others have none."""
        kept_P = np.repeat(there_N, np.diff(self.offsets_N1))
        return replace(self, indices_P=self.indices_P[kept_P], offsets_N1=offsets_within(kept_P, self.offsets_N1))

    def faults(self) -> pa.Array:
        """(N,) large_string: what is wrong with a row whose labels have one twice, null elsewhere."""
        rows_P = np.repeat(np.arange(len(self.offsets_N1) - 1), np.diff(self.offsets_N1))
        found, times = np.unique(rows_P * max(1, len(self.names)) + self.indices_P, return_counts=True)
        wrong: list[str | None] = [None] * (len(self.offsets_N1) - 1)
        for row, index in np.stack(np.divmod(found[times > 1], max(1, len(self.names))), axis=1).tolist():
            wrong[row] = wrong[row] or _twice(self.names[index].as_py())
        return pa.array(wrong, pa.large_string())

    def blocks(self) -> Iterator[Integers]:
        """(G, M) pairs at a time: those of all rows with M labels, for each M from 1 on."""
        lengths_N = np.diff(self.offsets_N1)
        for num_labels in np.unique(lengths_N[lengths_N > 0]):
            yield self.offsets_N1[:-1][lengths_N == num_labels, None] + np.arange(num_labels)


def parse_labels(labels: str | Sequence[Any]) -> tuple[str, ...]:
    """Candidate labels from text in which commas part them, or as they are.

    Raises: OptionError if there are none, and for one that is blank, no text or cannot be encoded, or is there twice.
    """
    if isinstance(labels, str):
        labels = list(map(str.strip, labels.split(",")))
    wrong = next((each for each in labels if not (isinstance(each, str) and each.strip() and encodes(each))), None)
    if not any(labels) or wrong is not None:
        said = f"{printable(repr(wrong))} is no candidate label" if any(labels) else "there are no candidate labels"
        raise OptionError(said, hint="name them, separated by commas (sports,politics), or as a list of texts")
    twice = next((label for place, label in enumerate(labels) if label in labels[:place]), None)
    if twice is not None:
        raise OptionError(_twice(twice), hint="name each once")
    return tuple(labels)


def _twice(label: str) -> str:
    return f"the candidate label '{printable(label)}' is there twice"


@dataclass(frozen=True, kw_only=True)
class ZeroShotForm(Form):
    """Answers about candidate labels by an NLI model.

    multi_label: each label is true or not by itself; else one of a row's labels is. A row's only label is always judged
    by itself. entailment: output that says a hypothesis follows, -1 for the last; contradiction: the one that it is
    weighed against. guess: that no output is named entailment, and which one was taken for it.
    """

    multi_label: bool
    entailment: int
    template: str = DEFAULT_TEMPLATE

    @property
    def listed(self) -> bool:
        return self.multi_label

    @property
    def contradiction(self) -> int:
        return -1 if self.entailment == 0 else 0

    def hypotheses(self, names: pa.Array) -> pa.Array:
        """(K,) large_string: the sentence that each of K labels makes."""
        return pa.array([self.template.format(name) for name in names.to_pylist()], pa.large_string())

    def columns(self, logits_PC: Singles, candidates: Candidates) -> dict[str, pa.Array]:
        """The columns of `schema`, in its order; null in the rows without an answer.

        A row has an answer if it has labels and all logits of its pairs are finite. label, score: the likeliest label,
        null below `threshold`, and its score; with multi_label lists of those from `least` on, the likeliest first.
        scores: lists of {label, score}. logits: a list for each candidate label, in the order they were given.
        """
        return self._columns(self._ranking(logits_PC, candidates), lambda: _logit_lists(logits_PC, candidates))

    def counts(self, logits_PC: Singles, candidates: Candidates) -> Counts:
        """Labels given and confidences. The other counts are the caller's to add: `counts + Counts(num_rows=...)`."""
        return self._count(self._ranking(logits_PC, candidates))

    def objects(self, logits_PC: Singles, candidates: Candidates, texts: Sequence[str | None]) -> list[dict[str, Any]]:
        """Return what transformers' pipeline("zero-shot-classification") returns for a list of these texts.

        For one text alone it returns the one element. A row without an answer has no labels.
        """
        rows = self._ranking(logits_PC, candidates).objects()
        return [
            {"sequence": text, "labels": labels, "scores": scores}
            for text, (labels, scores) in zip(texts, rows, strict=True)
        ]

    def score_blocks(self, logits_PC: Singles, candidates: Candidates) -> list[Singles]:
        """(G, M) scores of all rows with M labels, for each M; rows without an answer are NaN."""
        finite_P = finite_rows(logits_PC)
        blocks = [(self._scores(logits_PC[pairs_GM]), finite_P[pairs_GM]) for pairs_GM in candidates.blocks()]
        return [np.where(finite_GM.all(axis=1, keepdims=True), scores_GM, _NAN) for scores_GM, finite_GM in blocks]

    def _scores(self, logits_GMC: Singles) -> Singles:
        if self.multi_label or logits_GMC.shape[1] == 1:
            return softmax(logits_GMC[..., [self.contradiction, self.entailment]])[..., 1]
        return softmax(logits_GMC[..., self.entailment])

    def _ranking(self, logits_PC: Singles, candidates: Candidates) -> Ranking:
        """All labels of each row. Of equal scores the pipeline's numpy decides which comes first; so it does here."""
        scores_P = np.zeros(len(logits_PC), dtype=np.float32)
        sorted_P = np.arange(len(logits_PC))
        for pairs_GM in candidates.blocks():
            scores_GM = self._scores(logits_PC[pairs_GM])
            scores_P[pairs_GM] = scores_GM
            sorted_P[pairs_GM] = np.take_along_axis(pairs_GM, scores_GM.argsort(axis=1)[:, ::-1], axis=1)
        answered_N, kept_P = _answered(logits_PC, candidates)
        sorted_P = sorted_P[kept_P]
        return Ranking(
            names=candidates.names,
            indices_P=candidates.indices_P[sorted_P],
            scores_P=shortest(scores_P[sorted_P]),
            offsets_N1=offsets_within(kept_P, candidates.offsets_N1),
            answered_N=answered_N,
        )

    @property
    def _logits_type(self) -> pa.DataType:
        return pa.list_(LOGITS)


def zero_shot_form(
    config: Any,
    *,
    multi_label: bool = False,
    template: str = DEFAULT_TEMPLATE,
    top_k: int | None = None,
    threshold: float | None = None,
    logits: bool = False,
) -> ZeroShotForm:
    """The answers of a model with this configuration about candidate labels.

    Entailment is the first label of `label2id` that begins with "entail", in any case; where there is none the last
    output is taken, as transformers' pipeline does, and `guess` says so.
    Raises: ModelError for a model that cannot tell entailment, OptionError for a template without a place for a label.
    """
    _check_template(template)
    found = (output for label, output in config.label2id.items() if str(label).lower().startswith("entail"))
    entailment = int(next(found, -1))
    if config.num_labels < 2 or not -1 <= entailment < config.num_labels:
        raise ModelError(
            f"zero-shot: entailment is output {entailment} of a model that has {config.num_labels}",
            hint="use a model of natural-language inference, with an output for entailment and one for contradiction",
        )
    guess = None
    if entailment == -1:
        names = ", ".join(printable(label, 40) for label in list(config.label2id)[:8])
        guess = f"no label of the model begins with 'entail' ({names}): its last output is taken for entailment"
    return ZeroShotForm(
        multi_label=multi_label,
        entailment=entailment,
        template=template,
        guess=guess,
        top_k=top_k,
        threshold=threshold,
        logits=logits,
    )


def _check_template(template: str) -> None:
    try:
        has_place = template.format("a") != template.format("b")
    except (LookupError, ValueError, AttributeError, TypeError):
        has_place = False
    if not has_place:
        raise OptionError(
            f"--hypothesis-template '{printable(template)}' has no place for a label, or one that it cannot fill",
            hint="write {} where the label goes, and {{ and }} for braces",
        )


def _lists_of_text(column: pa.Array) -> pa.Array:
    """Lists of large_string. Raises: DataError."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if _is_text(kind):
        parts = pc.split_pattern(column.cast(pa.large_string()), ",")
        return _without_blanks(_lists(parts, pc.utf8_trim_whitespace(parts.flatten())))
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_text(kind.value_type):
        return _without_blanks(column.cast(pa.large_list(pa.large_string())))
    raise DataError(
        f"the column of candidate labels holds {column.type}",
        hint="it must be text in which commas part the labels, or lists of text",
    )


def _is_text(kind: pa.DataType) -> bool:
    return any(is_it(kind) for is_it in (pa.types.is_null, pa.types.is_string, pa.types.is_large_string))


def _without_blanks(lists: pa.Array) -> pa.Array:
    """Blank labels null."""
    values_P = lists.flatten()
    return _lists(lists, pc.if_else(pc.equal(pc.utf8_trim_whitespace(values_P), ""), None, values_P))


def _lists(lists: pa.Array, values_P: pa.Array) -> pa.Array:
    """Lists as long as `lists`, of other values; empty where those are null."""
    lengths_N = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return pa.LargeListArray.from_arrays(pa.array(offsets_of(lengths_N)), values_P)


def _answered(logits_PC: Singles, candidates: Candidates) -> tuple[Flags, Flags]:
    """(N,) rows that have labels and finite logits for all of them, and (P,) their pairs."""
    lengths_N = np.diff(candidates.offsets_N1)
    finite_P = finite_rows(logits_PC)
    answered_N = (lengths_N > 0) & (np.diff(offsets_within(finite_P, candidates.offsets_N1)) == lengths_N)
    return answered_N, np.repeat(answered_N, lengths_N)


def _logit_lists(logits_PC: Singles, candidates: Candidates) -> pa.Array:
    """(N,) lists of lists: the logits of each of a row's pairs."""
    answered_N, kept_P = _answered(logits_PC, candidates)
    by_pair = pa.FixedSizeListArray.from_arrays(pa.array(logits_PC[kept_P].ravel()), logits_PC.shape[1]).cast(LOGITS)
    return as_lists(by_pair, offsets_within(kept_P, candidates.offsets_N1), answered_N)
