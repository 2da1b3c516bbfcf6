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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from brimful.core.errors import ModelError, OptionError, printable
from brimful.core.options.classify import ClassifyOptions
from brimful.tasks.answers import Form, softmax
from brimful.tasks.candidates import Candidates
from brimful.tasks.ranking import Flags, Ranking, Singles, as_lists, finite_rows, offsets_within, shortest

#: The pipeline's, as the command line has it.
DEFAULT_TEMPLATE = ClassifyOptions.hypothesis_template
_NAN = np.float32(np.nan)


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

    def objects(self, logits_PC: Singles, candidates: Candidates, texts: Sequence[str | None]) -> list[dict[str, Any]]:
        """Return what transformers' pipeline("zero-shot-classification") returns for a list of these texts.

        For one text alone it returns the one element. A row without an answer has no labels.
        """
        rows = self._ranking(logits_PC, candidates).objects()
        return [
            {"sequence": text, "labels": labels, "scores": scores}
            for text, (labels, scores) in zip(texts, rows, strict=True)
        ]

    def score_blocks(self, logits_PC: Singles, candidates: Candidates | None = None) -> list[Singles]:
        assert candidates is not None
        finite_P = finite_rows(logits_PC)
        blocks = [(self._scores(logits_PC[pairs_GM]), finite_P[pairs_GM]) for pairs_GM in candidates.blocks()]
        return [np.where(finite_GM.all(axis=1, keepdims=True), scores_GM, _NAN) for scores_GM, finite_GM in blocks]

    def _scores(self, logits_GMC: Singles) -> Singles:
        if self.multi_label or logits_GMC.shape[1] == 1:
            return softmax(logits_GMC[..., [self.contradiction, self.entailment]])[..., 1]
        return softmax(logits_GMC[..., self.entailment])

    def _ranking(self, logits_PC: Singles, candidates: Candidates | None) -> Ranking:
        """All labels of each row. Of equal scores the pipeline's numpy decides which comes first; so it does here."""
        assert candidates is not None
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

    def _logit_lists(self, logits_PC: Singles, candidates: Candidates | None) -> pa.Array:
        """(N,) lists of lists: the logits of each of a row's pairs."""
        assert candidates is not None
        answered_N, kept_P = _answered(logits_PC, candidates)
        by_pair = pa.FixedSizeListArray.from_arrays(pa.array(logits_PC[kept_P].ravel()), logits_PC.shape[1])
        return as_lists(by_pair.cast(pa.list_(pa.float32())), offsets_within(kept_P, candidates.offsets_N1), answered_N)


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
    try:
        has_place = template.format("a") != template.format("b")
    except (LookupError, ValueError, AttributeError, TypeError):
        has_place = False
    if not has_place:
        raise OptionError(
            f"--hypothesis-template '{printable(template)}' has no place for a label, or one that it cannot fill",
            hint="write {} where the label goes, and {{ and }} for braces",
        )
    entailment = entailment_of(config)
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


def entailment_of(config: Any) -> int:
    """Output of the first label that begins with "entail", in any case; -1 where there is none."""
    found = (output for label, output in config.label2id.items() if str(label).lower().startswith("entail"))
    return int(next(found, -1))


def _answered(logits_PC: Singles, candidates: Candidates) -> tuple[Flags, Flags]:
    """(N,) rows that have labels and finite logits for all of them, and (P,) their pairs."""
    lengths_N = np.diff(candidates.offsets_N1)
    finite_P = finite_rows(logits_PC)
    answered_N = (lengths_N > 0) & (np.diff(offsets_within(finite_P, candidates.offsets_N1)) == lengths_N)
    return answered_N, np.repeat(answered_N, lengths_N)
