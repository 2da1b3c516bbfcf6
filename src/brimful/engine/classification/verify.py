"""--verify: answers on some of the user's own rows are compared with those of the plain Hugging Face model in fp32.

Where they differ, a slower path is tried: bf16 after fp8, then fp32, then padded rows. The fallback and its reason are
warned of and recorded.
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

#: Tokens of a batch of the plain model.
_REFERENCE_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class VerifiedRunner:
    """A runner and the comparison with the plain model.

    equivalence: None with --verify 0, or if there was no row to compare. fallback: why a slower path runs, or None.
    """

    runner: Runner
    equivalence: AnswerEquivalence | None
    fallback: str | None


@contextmanager
def verified_runner(
    checked: Checked, options: ClassifyOptions, precision: Precision, request: Request, sample: Texts, *,
    asked: Asked, num_tokens: int, callbacks: Callbacks,
) -> Generator[VerifiedRunner]:  # fmt: skip
    """Yield the fastest runner that agrees with the plain model.

    sample: the first rows of the input; asked: the same rows tokenised. num_tokens: estimate for the whole input.
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
        how = f"{attempt.value}, packed" if runner.packing.packed else attempt.value
        fallback = (
            f"on {equivalence.num_rows:,} rows, {how} differs from the plain fp32 model by up to"
            f" {equivalence.largest_difference:.2g} (allowed: {equivalence.tolerance:g}) and agrees on"
            f" {share_text(equivalence.agreement)} of the labels: a slower path runs instead"
        )
        callbacks.warning(fallback)
        del runner  # frees its memory for the next one


@dataclass(frozen=True, kw_only=True)
class PlainAnswers:
    """Logits of the plain model on some rows. logits_PC: one row per sequence."""

    request: Request
    asked: Asked
    logits_PC: npt.NDArray[np.float32]

    def compare(self, runner: Runner) -> AnswerEquivalence:
        """Compare a runner's answers with these."""
        found_PC = runner.submit(self.asked.sequences).result()
        return compare_answers(
            self.request.form,
            self.request.form.score_blocks(found_PC, self.asked.candidates),
            self.request.form.score_blocks(self.logits_PC, self.asked.candidates),
            precision=runner.precision.value,
        )


def plain_answers(
    checked: Checked, options: ClassifyOptions, precision: Precision, request: Request, asked: Asked,
    callbacks: Callbacks,
) -> PlainAnswers:  # fmt: skip
    """Load the plain Hugging Face model in fp32 on the device of `precision`, and run it on padded rows.

    Its attention is eager: torch's fused one is wrong for some lengths with a sliding window. Eager scores grow with
    the square of the length, so batches are small.
    """
    exact = choose_precision("fp32", precision.device)
    budget = max(checked.max_length, _REFERENCE_TOKENS)
    uncaptured = replace(options, execution="eager", token_budget=min(options.token_budget or budget, budget))
    with exact.apply():
        plain = make_runner(
            checked, uncaptured, exact, sample=asked.sequences, num_tokens=0, packing_wanted=False, callbacks=callbacks
        )
        plain.model.set_attn_implementation("eager")
        return PlainAnswers(request=request, asked=asked, logits_PC=plain.submit(asked.sequences).result())


def _attempts(options: ClassifyOptions, precision: Precision) -> Iterator[tuple[Precision, bool]]:
    """Pairs of precision and packing, from the fastest to the plainest."""
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
    """Tokenise at most `num_rows` of the sample's rows, evenly spread; None if there are none."""
    present = np.flatnonzero(sample.asked_N())
    if not num_rows or not len(present):
        return None
    chosen = np.unique(np.linspace(0, len(present) - 1, min(num_rows, len(present))).astype(np.int64))
    return request.submit(sample.take(present[chosen]), Busy())()
