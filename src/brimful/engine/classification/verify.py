"""A runner that is verified: its answers on some of the user's own rows are those of the plain fp32 model.

Where they are not, a slower path is tried: bf16 after fp8, then fp32, then padded rows. What runs in the end, and why,
is told.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from brimful.core.callbacks import Callbacks
from brimful.core.classification import AnswerEquivalence
from brimful.core.options import ClassifyOptions
from brimful.core.units import share_text
from brimful.engine.classification.request import Asked, Request, Texts
from brimful.engine.classification.runner import Checked, Runner, make_runner
from brimful.engine.classification.stages import Busy
from brimful.levers.precision import choose_precision
from brimful.step.precision import Precision
from brimful.tasks.answer_equivalence import compare_answers


@dataclass(frozen=True, kw_only=True)
class VerifiedRunner:
    """A runner and what is known of it. equivalence: None if it was not asked for, or there was no row to compare.

    fallback: why it is not the path that was planned, None if it is.
    """

    runner: Runner
    equivalence: AnswerEquivalence | None
    fallback: str | None


@contextmanager
def verified_runner(
    checked: Checked, options: ClassifyOptions, precision: Precision, request: Request, sample: Texts, *,
    asked: Asked, num_tokens: int, callbacks: Callbacks,
) -> Generator[VerifiedRunner]:  # fmt: skip
    """The fastest runner that agrees with the plain model; products of the process have its precision meanwhile.

    sample: the first rows of the input, asked: the same tokenised. num_tokens: of all of the input, about.
    """
    compared = _some(request, sample, options.verify)
    if compared is None and options.verify:
        callbacks.warning(
            f"nothing was compared with the plain model: none of the first {len(sample):,} rows can be asked about"
        )
    plain = None if compared is None else plain_answers(checked, options, precision, request, compared, callbacks)
    fallback: str | None = None
    for attempt, packing_wanted in _attempts(options, precision):
        with attempt.apply():
            runner = make_runner(
                checked,
                options if packing_wanted or options.packing != "auto" else replace(options, execution="auto"),
                attempt,
                sample=asked.sequences,
                num_tokens=num_tokens,
                packing_wanted=packing_wanted,
                callbacks=callbacks,
            )
            equivalence = None if plain is None else plain.compare(runner)
            plainest = attempt.value == "fp32" and not runner.packing.packed
            if equivalence is None or equivalence.passed or plainest:
                yield VerifiedRunner(runner=runner, equivalence=equivalence, fallback=fallback)
                return
            fallback = _failed(equivalence, packed=runner.packing.packed)
            callbacks.warning(fallback)
            del runner  # its memory is the next one's


@dataclass(frozen=True, kw_only=True)
class PlainAnswers:
    """What the plain model says of some rows. logits_PC: of their sequences."""

    request: Request
    asked: Asked
    logits_PC: npt.NDArray[np.float32]

    def compare(self, runner: Runner) -> AnswerEquivalence:
        """A runner's answers against these. Products of the process must have its precision."""
        found_PC = runner.submit(self.asked.sequences).result()
        return compare_answers(
            self.request.form,
            self.request.scores(self.asked, found_PC),
            self.request.scores(self.asked, self.logits_PC),
            precision=runner.precision.value,
        )


def plain_answers(
    checked: Checked, options: ClassifyOptions, precision: Precision, request: Request, asked: Asked,
    callbacks: Callbacks,
) -> PlainAnswers:  # fmt: skip
    """Those of the plain Hugging Face model in fp32, on padded rows. It is loaded for it, where `precision` runs."""
    exact, uncaptured = choose_precision("fp32", precision.device), replace(options, execution="eager")
    with exact.apply():
        plain = make_runner(
            checked, uncaptured, exact, sample=asked.sequences, num_tokens=0, packing_wanted=False, callbacks=callbacks
        )
        return PlainAnswers(request=request, asked=asked, logits_PC=plain.submit(asked.sequences).result())


def _attempts(options: ClassifyOptions, precision: Precision) -> Iterator[tuple[Precision, bool]]:
    """Precisions, and whether to pack, from the fastest to the plainest."""
    wanted = options.packing == "auto"
    yield precision, wanted
    if precision.value == "fp8":
        yield precision.in_bf16("its answers were not those of the plain model"), wanted
    exact = choose_precision("fp32", precision.device)
    if precision.value != "fp32":
        yield exact, wanted
    if wanted:
        yield exact, False


def _some(request: Request, sample: Texts, num_rows: int) -> Asked | None:
    """At most `num_rows` of the sample's rows, evenly spread, tokenised; None where there are none."""
    there = np.flatnonzero(sample.asked_N())
    if not num_rows or not len(there):
        return None
    places = np.unique(np.linspace(0, len(there) - 1, min(num_rows, len(there))).astype(np.int64))
    return request.submit(sample.take(there[places]), Busy())()


def _failed(found: AnswerEquivalence, *, packed: bool) -> str:
    how = f"{found.precision}{', packed' if packed else ''}"
    return (
        f"on {found.num_rows:,} rows, {how} differs from the plain fp32 model by up to {found.largest_difference:.2g}"
        f" (allowed: {found.tolerance:g}) and agrees on {share_text(found.agreement)} of the labels:"
        " a slower path runs instead"
    )
