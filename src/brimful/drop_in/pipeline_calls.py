"""Arguments of a pipeline's calls, and answers to inputs that come one after another."""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from brimful.core.errors import ArgumentError, OptionError, printable

#: A tokenizer without a limit says so by a number of tokens above this.
_NO_LIMIT = 1_000_000


@contextmanager
def refusing() -> Iterator[None]:
    """Within, what an option cannot be is a ValueError too, as callers of transformers' pipelines expect."""
    try:
        yield
    except ArgumentError:
        raise
    except OptionError as error:
        raise ArgumentError(str(error), hint=error.hint) from error


def arguments_of_tokenizers(given: Mapping[str, Any], takes: Collection[str]) -> Iterator[str]:
    """Name the arguments that only a tokenizer can follow. takes: those that calls have a form for."""
    from transformers import PreTrainedTokenizerBase

    known = inspect.signature(PreTrainedTokenizerBase.__call__).parameters
    yield from (name for name in given if name in known and name not in takes)
    named = getattr(given.get("truncation"), "value", given.get("truncation"))
    if "truncation" in takes and named in ("only_first", "only_second"):
        yield f"truncation={named!r}"


@dataclass(frozen=True)
class Cut:
    """Length in tokens at which texts are cut; None for the model's own end. of_pairs: whether pairs can be cut so."""

    longest: int | None
    of_pairs: bool = True


def given_cut(given: Mapping[str, Any], tokenizer: Any) -> Cut:
    """The cut that truncation and max_length ask for, as tokenizers read them.

    Raises: ArgumentError for another truncation.
    """
    truncation, longest = given.get("truncation"), given.get("max_length")
    named = getattr(truncation, "value", truncation)
    if named not in (None, True, False, "longest_first", "only_first", "do_not_truncate"):
        raise ArgumentError(
            f"truncation is {printable(named)}", hint="it is True or False: the longer text of a pair is cut"
        )
    if named in (False, "do_not_truncate") or (named is None and longest is None):
        return Cut(None)
    if longest is not None and (not isinstance(longest, int) or longest < 1):
        raise ArgumentError(f"max_length is {printable(longest)}", hint="it is a number of tokens")
    limit = getattr(tokenizer, "model_max_length", None)
    known = limit if isinstance(limit, int) and limit < _NO_LIMIT else None
    return Cut(longest or known, of_pairs=named != "only_first")


def require_room(cut: Cut, tokenizer: Any, *, pairs: bool) -> None:
    """Check that texts can be cut so. Raises: ArgumentError where special tokens alone are as long."""
    special = tokenizer.num_special_tokens_to_add(pair=pairs)
    if cut.longest is not None and cut.longest <= special:
        raise ArgumentError(
            f"max_length is {cut.longest}, and the tokenizer adds {special} special tokens to a"
            f" {'pair of texts' if pairs else 'text'}",
            hint=f"use at least {special + 1}",
        )
    if pairs and not cut.of_pairs:
        raise ArgumentError(
            "truncation is only_first, and a pair was given", hint="give it to pipeline, which hands it over"
        )


def given_labels(asked: Any) -> list[Any]:
    """Candidate labels of text with commas between them, or of what holds them. Raises: ArgumentError for none."""
    if isinstance(asked, str):
        asked = [label.strip() for label in asked.split(",") if label.strip()]
    found = list(asked) if hasattr(asked, "__iter__") else []
    if not found:
        raise ArgumentError("there are no candidate labels", hint="candidate_labels=['sports', 'politics']")
    return found


def as_pairs(inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """First texts, and the second one of each pair, None for a single text.

    A pair is {"text": ..., "text_pair": ...}, or [[first, second]] as transformers took it once.
    Raises: ArgumentError for anything else.
    """
    texts, pairs = list[Any](), list[Any]()
    for place, each in enumerate(inputs):
        text, pair = each, None
        if isinstance(each, Mapping):
            if "text" not in each or set(each) - {"text", "text_pair"}:
                raise _no_text(place, each)
            text, pair = each["text"], each.get("text_pair") or None
        elif isinstance(each, list):
            if not (len(each) == 1 and isinstance(each[0], list) and len(each[0]) == 2):
                raise _no_text(place, each)
            text, pair = each[0][0], each[0][1] or None
        if not isinstance(text, str) or not isinstance(pair, str | None):
            raise _no_text(place, each)
        texts.append(text)
        pairs.append(pair)
    return texts, pairs


def _no_text(place: int, each: Any) -> ArgumentError:
    return ArgumentError(
        f"inputs[{place}] is no text: {printable(repr(each), 80)}",
        hint='each is a str, or a pair as {"text": ..., "text_pair": ...}',
    )


class Answers:
    """Answers to inputs that come one after another, in their order, asked for as they are read.

    together: most inputs that are answered at once. One is at first, then twice as many each time: the first answers
    come soon, and later ones fast.
    """

    def __init__(self, inputs: Any, answer: Callable[[list[Any]], list[Any]], *, together: int) -> None:
        self._inputs, self._answer, self._most = inputs, answer, together
        self._source = _each(inputs)
        self._ready: deque[Any] = deque()
        self._next = 1

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if not self._ready:
            window = list(itertools.islice(self._source, self._next))
            if not window:
                raise StopIteration
            self._ready.extend(self._answer(window))
            self._next = min(2 * self._next, self._most)
        return self._ready.popleft()

    def __len__(self) -> int:
        return len(self._inputs)


def _each(inputs: Any) -> Iterator[Any]:
    """Elements of a generator, or of a data set, which may have a length and no iterator."""
    if not hasattr(inputs, "__len__") or hasattr(inputs, "__iter__"):
        return iter(inputs)
    return (inputs[place] for place in range(len(inputs)))
