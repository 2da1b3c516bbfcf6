"""Most tokens of a sequence: in training, and where a trained model reads."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.core.errors import OptionError
from brimful.models.hub.inspection import ModelFacts

#: Sequences to train on are cut here unless --max-length says otherwise or the model ends earlier.
DEFAULT_MAX_LENGTH = 512
#: Sequences that are only read are cut here, unless --max-length or training said otherwise or the model ends earlier.
MOST_READ = 8192


def longest_sequence(asked: int | None, facts: ModelFacts, model: str) -> int:
    """The longest sequence to train on, in tokens: what was asked for, else the model's limit and at most 512.

    Raises: OptionError if more was asked for than the model has positions.
    """
    _check_length(asked, facts, model)
    return asked or min(DEFAULT_MAX_LENGTH, facts.max_positions or DEFAULT_MAX_LENGTH)


@dataclass(frozen=True, kw_only=True)
class Longest:
    """The longest sequence to read, in tokens, and its reason. asked: whether the user gave it."""

    tokens: int
    reason: str
    asked: bool = False


def longest_to_read(asked: int | None, facts: ModelFacts, model: str) -> Longest:
    """The longest sequence that a trained classifier reads: what was asked for, else what it was trained on, else the
    model's limit, so that answers are those of the whole text, as the pipeline's are; at most 8,192.

    Raises: OptionError if more was asked for than the model has positions.
    """
    _check_length(asked, facts, model)
    if asked is not None:
        return Longest(tokens=asked, reason="as asked for", asked=True)
    limit, inputs = facts.max_positions, facts.inputs
    if inputs is not None and (limit is None or inputs.max_length <= limit):
        return Longest(tokens=inputs.max_length, reason="the longest in training")
    if limit is not None and limit <= MOST_READ:
        return Longest(tokens=limit, reason="the model has no more positions")
    takes = "of any length" if limit is None else f"of up to {limit:,}"
    return Longest(tokens=MOST_READ, reason=f"the model takes texts {takes}, if asked to")


def _check_length(asked: int | None, facts: ModelFacts, model: str) -> None:
    limit = facts.max_positions
    if asked is not None and limit is not None and asked > limit:
        raise OptionError(
            f"--max-length is {asked}, and {model} has positions for {limit} tokens", hint=f"use at most {limit}"
        )
