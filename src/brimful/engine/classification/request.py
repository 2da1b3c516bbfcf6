"""Requests: the sequences that each row gives the model (a text, a pair, or candidate labels), and the answers.

A request turns a window of rows into sequences of tokens, and the logits of these sequences into answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brimful.core.callbacks import Callbacks
from brimful.core.classification import Counts
from brimful.core.records import LabelSpace
from brimful.data.tokens.encoder import Encoder, Tokens
from brimful.data.tokens.pairs import PairTemplate, assemble, assembly_is_exact, encode_pairs, find_template
from brimful.data.tokens.token_stream import TokenStream
from brimful.engine.classification.runner import Checked
from brimful.engine.classification.stages import Busy
from brimful.tasks.answers import AnswerForm, Form
from brimful.tasks.zero_shot import Candidates, ZeroShotForm, parse_labels

#: Rows on which pairs put together from ids are compared with the tokenizer's own.
_COMPARED = 64
#: Candidate labels that a row of a column of them is taken to have.
_TYPICAL_LABELS = 8


@dataclass(frozen=True, kw_only=True)
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

    def first(self, num_rows: int) -> Texts:
        """The first rows, all if there are no more."""
        return self.slice(0, num_rows)

    def slice(self, start: int, num_rows: int) -> Texts:
        """Rows from `start` on."""
        return Texts(
            texts=self.texts.slice(start, num_rows),
            pairs=None if self.pairs is None else self.pairs.slice(start, num_rows),
            labels=None if self.labels is None else self.labels.slice(start, num_rows),
        )

    def take(self, rows: npt.NDArray[np.int64]) -> Texts:
        """Some of the rows."""
        return Texts(
            texts=self.texts.take(rows),
            pairs=None if self.pairs is None else self.pairs.take(rows),
            labels=None if self.labels is None else self.labels.take(rows),
        )


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A window as the model will read it: P sequences of N rows.

    num_tokens_N: of all sequences of a row. truncated_N: rows with a sequence that was cut. candidates: zero-shot only.
    use_cache: False where words are not looked up any more, as `tokenizers` had given other ids.
    """

    sequences: Tokens
    num_tokens_N: npt.NDArray[np.int64]
    truncated_N: npt.NDArray[np.bool_]
    candidates: Candidates | None = None
    use_cache: bool = True

    @property
    def unlabelled_N(self) -> npt.NDArray[np.bool_]:
        """(N,) rows of zero-shot that nothing was asked about, as they have no candidate labels."""
        if self.candidates is None:
            return np.zeros(len(self.num_tokens_N), dtype=bool)
        return np.asarray(np.diff(self.candidates.offsets_N1) == 0)


class Request(Protocol):
    """One kind of request."""

    @property
    def form(self) -> Form:
        """Columns of the answers."""
        ...

    @property
    def sequences_per_row(self) -> int:
        """Sequences per row; the mean where rows differ."""
        ...

    def labels(self, counts: Counts) -> LabelSpace:
        """Possible answers, for the record. counts: of all rows."""
        ...

    def submit(self, window: Texts, busy: Busy) -> Callable[[], Asked]:
        """Begins to tokenise a window; the result waits for it. busy: counts the time that it takes."""
        ...

    def drop_cache(self) -> None:
        """Words are not looked up from the next window on, as a run that is resumed did not in the end."""
        ...

    def columns(self, asked: Asked, logits_PC: npt.NDArray[np.float32]) -> dict[str, pa.Array]:
        """The answers, (N,) each, by the columns of the form's schema."""
        ...

    def counts(self, asked: Asked, logits_PC: npt.NDArray[np.float32]) -> Counts:
        """Labels given and confidences."""
        ...

    def scores(self, asked: Asked, logits_PC: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
        """Scores as `tasks.answer_equivalence` compares them."""
        ...


class TextQuestion:
    """The label of a text, or of a pair of texts."""

    sequences_per_row = 1

    def __init__(self, form: AnswerForm, tokens: TokenStream) -> None:
        self.form, self._tokens = form, tokens

    def labels(self, counts: Counts) -> LabelSpace:
        """See `Request`."""
        return self.form.space

    def submit(self, window: Texts, busy: Busy) -> Callable[[], Asked]:
        """See `Request`."""
        future = _timed(self._tokens.submit(window.texts, window.pairs), busy)
        use_cache = self._tokens.use_cache

        def asked() -> Asked:
            found = future.result()
            return Asked(sequences=found, num_tokens_N=found.lengths, truncated_N=found.truncated, use_cache=use_cache)

        return asked

    def drop_cache(self) -> None:
        """See `Request`."""
        self._tokens.drop_cache()

    def columns(self, asked: Asked, logits_PC: npt.NDArray[np.float32]) -> dict[str, pa.Array]:
        """See `Request`."""
        return self.form.columns(logits_PC)

    def counts(self, asked: Asked, logits_PC: npt.NDArray[np.float32]) -> Counts:
        """See `Request`."""
        return self.form.counts(logits_PC)

    def scores(self, asked: Asked, logits_PC: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
        """See `Request`."""
        return self.form.score_blocks(logits_PC)


class ZeroShotQuestion:
    """Zero-shot: one sequence per text and candidate label, put together from ids.

    encoder: of `zero_shot_encoder`. tokens: of `encoder.without_special_tokens()`. labels: those of every row, None if
    each has its own. template: how pairs are put together from ids; None to have the tokenizer encode each.
    """

    def __init__(
        self, form: ZeroShotForm, encoder: Encoder, tokens: TokenStream, labels: Sequence[str] | None, *,
        template: PairTemplate | None,
    ) -> None:  # fmt: skip
        self.form, self._encoder, self._tokens = form, encoder, tokens
        self._labels, self._template = labels, template

    @property
    def sequences_per_row(self) -> int:
        """See `Request`."""
        return _TYPICAL_LABELS if self._labels is None else len(self._labels)

    def labels(self, counts: Counts) -> LabelSpace:
        """See `Request`. Where each row has its own labels, those that were given, in the order of the alphabet."""
        names = sorted(counts.labels) if self._labels is None else self._labels
        return LabelSpace(task="multi_label" if self.form.multi_label else "single_label", names=tuple(names))

    def submit(self, window: Texts, busy: Busy) -> Callable[[], Asked]:
        """See `Request`."""
        candidates = self._candidates(window)
        text_P = np.repeat(np.arange(len(window)), np.diff(candidates.offsets_N1))
        hypotheses = self.form.hypotheses(candidates.names).to_pylist()
        if self._template is None:
            texts = window.texts.fill_null("").to_pylist()

            def encoded() -> Asked:
                with busy.working():
                    found = encode_pairs(self._encoder, texts, hypotheses, text_P, candidates.indices_P)
                    return _asked(found, text_P, candidates)

            return encoded
        template, future = self._template, _timed(self._tokens.submit(window.texts), busy)
        use_cache = self._tokens.use_cache

        def assembled() -> Asked:
            texts = future.result()
            with busy.working():
                bare = self._tokens.encoder.encode(hypotheses, use_cache=False)
                found = assemble(template, texts, bare, text_P, candidates.indices_P)
                return _asked(found, text_P, candidates, use_cache=use_cache)

        return assembled

    def drop_cache(self) -> None:
        """See `Request`."""
        self._tokens.drop_cache()

    def _candidates(self, window: Texts) -> Candidates:
        """Those of each row; a row that is not asked about has none."""
        found = window.labels or Candidates.of_every_row(self._labels or (), len(window))
        if not window.texts.null_count:
            return found
        return found.only(window.texts.is_valid().to_numpy(zero_copy_only=False))

    def columns(self, asked: Asked, logits_PC: npt.NDArray[np.float32]) -> dict[str, pa.Array]:
        """See `Request`."""
        return self.form.columns(logits_PC, _candidates_of(asked))

    def counts(self, asked: Asked, logits_PC: npt.NDArray[np.float32]) -> Counts:
        """See `Request`."""
        return self.form.counts(logits_PC, _candidates_of(asked))

    def scores(self, asked: Asked, logits_PC: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
        """See `Request`."""
        return self.form.score_blocks(logits_PC, _candidates_of(asked))


def zero_shot_encoder(checked: Checked) -> Encoder:
    """Of pairs of a text and a hypothesis: where both are too long, the text is cut."""
    return Encoder.from_tokenizer(
        checked.tokenizer, checked.max_length, with_types=checked.encoder.with_types, truncation="only_first"
    )


def make_zero_shot(
    form: ZeroShotForm, encoder: Encoder, tokens: TokenStream, asked: Sequence[Any] | str, sample: Texts,
    callbacks: Callbacks,
) -> ZeroShotQuestion:  # fmt: skip
    """Zero-shot request with the labels of each row if the sample has them, else with --labels.

    encoder: of `zero_shot_encoder`. tokens: of `encoder.without_special_tokens()`.
    """
    if form.guess is not None:
        callbacks.warning(form.guess)
    if sample.labels is None:
        labels = some = parse_labels(asked)
    else:
        labels, some = None, sample.labels.names.slice(0, _COMPARED).to_pylist()
    template = pair_template(encoder, form, sample, some)
    if template is None:
        callbacks.note("texts and labels are tokenised pair by pair: this tokenizer looks across the two")
    return ZeroShotQuestion(form, encoder, tokens, labels, template=template)


def pair_template(encoder: Encoder, form: ZeroShotForm, sample: Texts, labels: Sequence[str]) -> PairTemplate | None:
    """Template that puts pairs together from ids, if it gives the tokenizer's ids on a sample of the user's rows."""
    template = find_template(encoder)
    texts = sample.texts.drop_null().slice(0, _COMPARED).to_pylist()
    hypotheses = form.hypotheses(pa.array(labels, pa.large_string())).to_pylist()
    if template is None or not assembly_is_exact(template, encoder, texts, hypotheses):
        return None
    return template


def _timed(future: Future[Tokens], busy: Busy) -> Future[Tokens]:
    busy.begin()
    future.add_done_callback(lambda _: busy.end())
    return future


def _asked(
    sequences: Tokens, text_P: npt.NDArray[np.int64], candidates: Candidates, *, use_cache: bool = True
) -> Asked:
    num_rows = len(candidates.offsets_N1) - 1
    num_tokens_N = np.bincount(text_P, weights=sequences.lengths, minlength=num_rows).astype(np.int64)
    truncated_N = np.bincount(text_P, weights=sequences.truncated, minlength=num_rows) > 0
    return Asked(
        sequences=sequences,
        num_tokens_N=num_tokens_N,
        truncated_N=truncated_N,
        candidates=candidates,
        use_cache=use_cache,
    )


def _candidates_of(asked: Asked) -> Any:
    assert asked.candidates is not None
    return asked.candidates
