"""Requests: the sequences that each row gives the model (a text, a pair, or candidate labels), and the answers.

A request turns a window of rows into sequences of tokens, and the logits of these sequences into answers.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brimful.core.callbacks import Callbacks
from brimful.core.classification import Counts
from brimful.core.errors import ModelError, listed, printable
from brimful.core.records import LabelSpace
from brimful.data.readers.rows import digest_values
from brimful.data.tokens.encoder import Encoder, Tokens
from brimful.data.tokens.pairs import PairTemplate, assemble, assembly_is_exact, encode_pairs, find_template
from brimful.data.tokens.token_stream import TokenStream
from brimful.engine.classification.runner import Checked
from brimful.engine.classification.stages import Busy
from brimful.tasks.answers import AnswerForm, Form
from brimful.tasks.candidates import Candidates, parse_labels
from brimful.tasks.zero_shot import ZeroShotForm

#: Rows on which pairs put together from ids are compared with the tokenizer's own.
_COMPARED = 64
#: Candidate labels that a row of a column of them is taken to have.
_TYPICAL_LABELS = 8


@dataclass(frozen=True)
class Texts:
    """Texts of N rows. A row whose text is null is not classified.

    texts, pairs: large_string. labels: the candidate labels of each row, None where all have the same.
    """

    texts: pa.Array
    pairs: pa.Array | None = None
    labels: Candidates | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def num_bytes(self) -> int:
        """Of texts and pairs, and of what says where they end."""
        return int(self.texts.nbytes + (0 if self.pairs is None else self.pairs.nbytes))

    def asked_N(self) -> npt.NDArray[np.bool_]:
        """(N,) the rows that are asked about: those with a text, and with a label where each has its own."""
        there_N: npt.NDArray[np.bool_] = self.texts.is_valid().to_numpy(zero_copy_only=False)
        return there_N if self.labels is None else there_N & (np.diff(self.labels.offsets_N1) > 0)

    def mark(self) -> int:
        """Return a number that tells these texts from others."""
        digest = hashlib.sha256()
        for column in (self.texts, self.pairs):
            if column is not None:
                digest_values(digest, column)
        return int.from_bytes(digest.digest()[:8])

    def slice(self, start: int, num_rows: int) -> Texts:
        """At most `num_rows` rows from `start` on."""
        return self._part(lambda column: column.slice(start, num_rows))

    def take(self, rows: npt.NDArray[np.int64]) -> Texts:
        """Some of the rows."""
        return self._part(lambda column: column.take(rows))

    def _part(self, of: Callable[[Any], Any]) -> Texts:
        return Texts(*(None if column is None else of(column) for column in (self.texts, self.pairs, self.labels)))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A window as the model will read it: P sequences of N rows.

    num_tokens_N: of all sequences of a row. truncated_N: rows with a sequence that was cut. candidates: zero-shot only.
    use_cache: False where words are not looked up any more, as `tokenizers` had given other ids. faults: what is wrong
    with rows that have a text and are not asked about.
    """

    sequences: Tokens
    num_tokens_N: npt.NDArray[np.int64]
    truncated_N: npt.NDArray[np.bool_]
    candidates: Candidates | None = None
    use_cache: bool = True
    faults: Mapping[int, str] = field(default_factory=dict)


class Request(ABC):
    """One kind of request. form: of the answers. tokens: encodes the texts."""

    def __init__(self, form: Form, tokens: TokenStream) -> None:
        self.form, self._tokens = form, tokens

    @property
    def sequences_per_row(self) -> int:
        """Sequences per row; the mean where rows differ."""
        return 1

    @abstractmethod
    def labels(self, counts: Counts) -> LabelSpace:
        """Possible answers, for the record. counts: of all rows."""

    @abstractmethod
    def submit(self, window: Texts, busy: Busy) -> Callable[[], Asked]:
        """Begin to tokenise a window; the result waits for it. busy: counts the time that it takes."""

    def drop_cache(self) -> None:
        """Look words up no more from the next window on, as a run that is resumed did not in the end."""
        self._tokens.encoder.use_cache = False

    def _encoded(self, window: Texts, busy: Busy) -> Future[Tokens]:
        busy.begin()
        future = self._tokens.submit(window.texts, window.pairs)
        future.add_done_callback(lambda _: busy.end())
        return future


class TextRequest(Request):
    """The label of a text, or of a pair of texts."""

    form: AnswerForm

    def labels(self, counts: Counts) -> LabelSpace:
        return self.form.space

    def submit(self, window: Texts, busy: Busy) -> Callable[[], Asked]:
        future, use_cache = self._encoded(window, busy), self._tokens.encoder.use_cache

        def asked() -> Asked:
            found = future.result()
            if faults := self._tokens.encoder.beyond_vocabulary(found):
                found = found.without(faults)
            return Asked(
                sequences=found,
                num_tokens_N=found.lengths,
                truncated_N=found.truncated,
                use_cache=use_cache,
                faults=faults,
            )

        return asked


class ZeroShotRequest(Request):
    """Zero-shot: one sequence per text and candidate label, put together from ids.

    encoder: of `zero_shot_encoder`. tokens: of `encoder.without_special_tokens()`. labels: those of every row, None if
    each has its own. template: how pairs are put together from ids; None to have the tokenizer encode each.
    """

    form: ZeroShotForm

    def __init__(
        self, form: ZeroShotForm, encoder: Encoder, tokens: TokenStream, labels: Sequence[str] | None, *,
        template: PairTemplate | None,
    ) -> None:  # fmt: skip
        super().__init__(form, tokens)
        self._encoder, self._labels, self._template = encoder, labels, template

    @property
    def sequences_per_row(self) -> int:
        return _TYPICAL_LABELS if self._labels is None else len(self._labels)

    def labels(self, counts: Counts) -> LabelSpace:
        """Candidate labels; where each row has its own, those that were given, in alphabetical order."""
        names = sorted(counts.labels) if self._labels is None else self._labels
        return LabelSpace(task="multi_label" if self.form.multi_label else "single_label", names=tuple(names))

    def submit(self, window: Texts, busy: Busy) -> Callable[[], Asked]:
        num_rows, template = len(window), self._template
        candidates = window.labels or Candidates.of_every_row(self._labels or (), num_rows)
        if window.texts.null_count:
            candidates = candidates.only(window.texts.is_valid().to_numpy(zero_copy_only=False))
        text_P = np.repeat(np.arange(len(window)), np.diff(candidates.offsets_N1))
        hypotheses = self.form.hypotheses(candidates.names).to_pylist()
        future = None if template is None else self._encoded(window, busy)
        use_cache = template is None or self._tokens.encoder.use_cache

        def asked() -> Asked:
            texts = None if future is None else future.result()
            with busy.working():
                if template is None or texts is None:
                    each = window.texts.fill_null("").to_pylist()
                    found = encode_pairs(self._encoder, each, hypotheses, text_P, candidates.indices_P)
                else:
                    bare = self._tokens.encoder.encode(hypotheses, use_cache=False)
                    found = assemble(template, texts, bare, text_P, candidates.indices_P)
                faults = {int(text_P[p]): said for p, said in self._encoder.beyond_vocabulary(found).items()}
                if faults:
                    found = found.without(np.flatnonzero(np.isin(text_P, list(faults))).tolist())
                return Asked(
                    sequences=found,
                    num_tokens_N=np.bincount(text_P, weights=found.lengths, minlength=num_rows).astype(np.int64),
                    truncated_N=np.bincount(text_P, weights=found.truncated, minlength=num_rows) > 0,
                    candidates=candidates,
                    use_cache=use_cache,
                    faults=faults,
                )

        return asked


def zero_shot_encoder(checked: Checked) -> Encoder:
    """Of pairs of a text and a hypothesis: where both are too long, the text is cut.

    Raises: ModelError for a model that brimful trained on single texts: it tells no entailment.
    """
    inputs, config = checked.facts.inputs, checked.facts.config
    if inputs is not None and inputs.pair_column is None:
        names = listed([printable(label, 40) for label in config.label2id], 8)
        raise ModelError(
            "zero-shot needs a model of natural-language inference, and this one was trained on single texts",
            hint=f"leave the candidate labels out: it gives its own ({names})",
        )
    return Encoder.from_tokenizer(
        checked.tokenizer,
        checked.max_length,
        with_types=checked.encoder.with_types,
        truncation="only_first",
        num_embedded=checked.encoder.num_embedded,
    )


def make_zero_shot(
    form: ZeroShotForm, encoder: Encoder, tokens: TokenStream, asked: Sequence[Any] | str, sample: Texts,
    callbacks: Callbacks,
) -> ZeroShotRequest:  # fmt: skip
    """Zero-shot request with the labels of each row if the sample has them, else with --labels.

    Pairs are put together from ids if that gives the tokenizer's ids on a sample of the user's rows.
    encoder: of `zero_shot_encoder`. tokens: of `encoder.without_special_tokens()`.
    """
    if form.guess is not None:
        callbacks.warning(form.guess)
    if sample.labels is None:
        labels = some = parse_labels(asked)
    else:
        labels, some = None, sample.labels.names.slice(0, _COMPARED).to_pylist()
    template = find_template(encoder)
    texts = sample.texts.drop_null().slice(0, _COMPARED).to_pylist()
    hypotheses = form.hypotheses(pa.array(some, pa.large_string())).to_pylist()
    if template is None or not assembly_is_exact(template, encoder, texts, hypotheses):
        template = None
        callbacks.note("texts and labels are tokenised pair by pair: this tokenizer looks across the two")
    return ZeroShotRequest(form, encoder, tokens, labels, template=template)
