"""Facts of the rows of a training, and what its scores owe to them."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.core.evaluation import Baseline
from brimful.core.units import share_text

#: Share of rows from which it matters that they are cut.
_MANY_CUT = 0.05
#: Share of evaluation rows from which it matters that they are trained on: as much as it may add to the accuracy.
_MANY_TRAINED_ON = 0.01
#: Most characters of a token, in words that a model knows: with fewer to each token the linear model reads less.
_CHARACTERS_OF_TOKEN = 5


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """Facts of rows that the scores of a training depend on.

    cut_share: of training rows that are longer than `max_length` tokens. max_positions: of the model; None for any
    number. num_trained_on: evaluation rows with the text of a training row, of `num_evaluated`.
    """

    cut_share: float = 0.0
    max_length: int = 0
    max_positions: int | None = None
    num_trained_on: int = 0
    num_evaluated: int = 0

    def unread(self, linear: Baseline) -> tuple[str, str] | None:
        """Say what the linear model reads of the rows beyond the model, and name the remedy.

        None where it reads no more, or where few rows are cut.
        """
        read = linear.most_characters
        if self.cut_share < _MANY_CUT or (read is not None and read < _CHARACTERS_OF_TOKEN * self.max_length):
            return None
        its = "which the linear model reads whole" if read is None else f"the linear model at {read:,} characters"
        longer = self.max_positions is None or self.max_length < self.max_positions
        remedy = "a longer --max-length" if longer else "a model with more positions"
        return f"{share_text(self.cut_share)} of the training rows are cut at {self.max_length:,} tokens, {its}", remedy

    def trained_on(self) -> str | None:
        """The finding that evaluation rows are trained on too; None of so few that scores hardly change."""
        share = self.num_trained_on / self.num_evaluated if self.num_evaluated else 0.0
        if share < _MANY_TRAINED_ON:
            return None
        have, them = ("have", "them") if self.num_trained_on > 1 else ("has", "it")
        return (
            f"{self.num_trained_on:,} of {self.num_evaluated:,} evaluation rows {have} the text of a training row"
            f" ({share_text(share)}), so scores are too high: remove {them} from the evaluation rows"
        )
