"""--verify: answers on some of the user's own rows are compared with those of the plain Hugging Face model in fp32.

Where they differ, a slower path is tried: bf16 after fp8, then fp32, then padded rows. The fallback and its reason are
warned of and recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from brimful.core.callbacks import Callbacks
from brimful.core.classification import AnswerEquivalence
from brimful.core.options import ClassifyOptions
from brimful.core.records import OutOfMemory
from brimful.core.units import share_text
from brimful.engine.classification.request import Asked, Request, Texts
from brimful.engine.classification.runner import Checked, Runner, make_runner
from brimful.engine.classification.stages import Busy
from brimful.levers.precision import choose_precision
from brimful.step.precision import Precision
from brimful.tasks.answer_equivalence import compare_answers

Logits = npt.NDArray[np.float32]

#: Tokens of a batch of the plain model.
_REFERENCE_TOKENS = 4096


def verified_runner(
    checked: Checked, options: ClassifyOptions, precision: Precision, request: Request, sample: Texts, *,
    asked: Asked, num_tokens: int, callbacks: Callbacks, hear: Callable[[OutOfMemory], None],
) -> tuple[Runner, AnswerEquivalence | None, str | None]:  # fmt: skip
    """Return the fastest runner that agrees with the plain model, the comparison, and why a slower path runs, if so.

    sample: the first rows of the input; asked: the same rows tokenised. num_tokens: estimate for the whole input.
    hear: called with each time that memory ran out.
    There is no comparison with --verify 0, or if there was no row to compare.
    """
    present, compared = np.flatnonzero(sample.asked_N()), None
    if options.verify and len(present):
        spread = np.linspace(0, len(present) - 1, min(options.verify, len(present)))
        compared = request.submit(sample.take(present[np.unique(spread.astype(np.int64))]), Busy())()
    elif options.verify:
        callbacks.warning(
            f"nothing was compared with the plain model: none of the first {len(sample):,} rows can be asked about"
        )
    plain_PC = None if compared is None else plain_logits(checked, options, precision, compared, callbacks, hear)
    fallback: str | None = None
    for attempt, how_it_runs in _attempts(options, precision):
        runner = make_runner(
            *(checked, how_it_runs, attempt),
            sample=asked.sequences,
            num_tokens=num_tokens,
            callbacks=callbacks,
            hear=hear,
        )
        equivalence = None
        if compared is not None and plain_PC is not None:
            equivalence = compare(runner, request, compared, plain_PC)
        plainest = attempt.value == "fp32" and not runner.packing.packed
        if equivalence is None or equivalence.passed or plainest:
            return runner, equivalence, fallback
        how = f"{attempt.value}, packed" if runner.packing.packed else attempt.value
        fallback = (
            f"on {equivalence.num_rows:,} rows, {how} differs from the plain fp32 model by up to"
            f" {equivalence.largest_difference:.2g} (allowed: {equivalence.tolerance:g}) and agrees on"
            f" {share_text(equivalence.agreement)} of the labels: a slower path runs instead"
        )
        callbacks.warning(fallback)
        del runner  # frees its memory for the next one
    raise AssertionError("padded rows in fp32 are what the others are compared with")


def compare(runner: Runner, request: Request, asked: Asked, plain_PC: Logits) -> AnswerEquivalence:
    """Compare a runner's answers with those of the plain model's logits."""
    found_PC = runner.submit(asked.sequences).result()
    scores, plain = (request.form.score_blocks(logits_PC, asked.candidates) for logits_PC in (found_PC, plain_PC))
    return compare_answers(request.form, scores, plain, precision=runner.precision.value)


def plain_logits(
    checked: Checked, options: ClassifyOptions, precision: Precision, asked: Asked, callbacks: Callbacks,
    hear: Callable[[OutOfMemory], None] | None = None,
) -> Logits:  # fmt: skip
    """Load the plain Hugging Face model in fp32 on the device of `precision`, and run it on padded rows.

    Its attention is eager: torch's fused one is wrong for some lengths with a sliding window. Eager scores grow with
    the square of the length, so batches are small.
    """
    exact = choose_precision("fp32", precision.device)
    budget = max(checked.max_length, _REFERENCE_TOKENS)
    budget = min(options.token_budget or budget, budget)
    padded = replace(options, execution="eager", packing="off", token_budget=budget)
    plain = make_runner(checked, padded, exact, sample=asked.sequences, num_tokens=0, callbacks=callbacks, hear=hear)
    plain.forward.where = "check"
    plain.model.set_attn_implementation("eager")
    return plain.submit(asked.sequences).result()


def _attempts(options: ClassifyOptions, precision: Precision) -> Iterator[tuple[Precision, ClassifyOptions]]:
    """Precisions with the options to run in them, from the fastest to the plainest."""
    yield precision, options
    if precision.value == "fp8":
        yield precision.in_bf16("its answers were not those of the plain model"), options
    exact = choose_precision("fp32", precision.device)
    if precision.value != "fp32":
        yield exact, options
    if options.packing == "auto":
        yield exact, replace(options, packing="off", execution="auto")
