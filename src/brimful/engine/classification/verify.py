"""--verify: answers on some of the user's own rows are compared with those of the plain Hugging Face model in fp32.

Where they differ, a slower path is tried: bf16 after fp8, then fp32, then padded rows; and fp32 where a model's own
code has no half precision, unless that was asked for. The fallback and its reason are warned of and recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from brimful.core.callbacks import Callbacks
from brimful.core.classification import AnswerEquivalence
from brimful.core.errors import HalfPrecisionError
from brimful.core.options.classify import ClassifyOptions
from brimful.core.records import OutOfMemory
from brimful.core.units import share_text
from brimful.engine.classification.request import Asked, Request, Texts
from brimful.engine.classification.runner import Checked, Runner, make_runner
from brimful.engine.classification.stages import Busy
from brimful.levers.precision import choose_precision
from brimful.step.precision import Precision
from brimful.step.recovery import OutOfMemoryLog
from brimful.tasks.answer_equivalence import compare_answers

Logits = npt.NDArray[np.float32]

#: Rows that are compared; on a CPU a share of all tokens, and tokens and rows at least.
_COMPARED, _ONE_IN, _FEWEST_TOKENS, _FEWEST_COMPARED = 256, 40, 2048, 8
#: Tokens of a batch of the plain model.
_REFERENCE_TOKENS = 4096


@dataclass(frozen=True)
class Verified:
    """A runner, its comparison with the plain model, and why a slower path runs, if so. seconds: that it took."""

    runner: Runner
    equivalence: AnswerEquivalence | None
    fallback: str | None
    seconds: float | None


def rows_to_compare(asked: int | None, device_type: str, num_tokens: float, mean_tokens: float) -> int:
    """Rows to compare with the plain model: those asked for, else 256; on a CPU, where the plain model takes longer
    than the pass itself, as many as hold a fortieth of its tokens, and 2,048 tokens at least. 0 tokens: nobody knows.

    num_tokens: of the pass, about. mean_tokens: of a row.
    """
    if asked is not None:
        return asked
    if device_type != "cpu" or not num_tokens:
        return _COMPARED
    tokens = max(_FEWEST_TOKENS, num_tokens / _ONE_IN)
    return max(_FEWEST_COMPARED, min(_COMPARED, int(tokens / max(1.0, mean_tokens))))


def verified_runner(
    checked: Checked, options: ClassifyOptions, precision: Precision, request: Request, sample: Texts, *,
    asked: Asked, num_compared: int, num_tokens: int, callbacks: Callbacks,
    hear: Callable[[OutOfMemory], None] | None = None,
) -> Verified:  # fmt: skip
    """Return the fastest runner that agrees with the plain model, and the comparison.

    sample: the first rows of the input; asked: the same rows tokenised. num_compared: rows to compare. num_tokens:
    estimate for the whole input. There is no comparison of no rows, or if there was no row to compare.
    hear: called with each time that memory ran out.
    """
    present, compared, seconds = np.flatnonzero(sample.asked_N()), None, 0.0
    if num_compared and len(present):
        spread = np.linspace(0, len(present) - 1, min(num_compared, len(present)))
        compared = request.submit(sample.take(present[np.unique(spread.astype(np.int64))]), Busy())()
    elif num_compared:
        callbacks.warning(
            f"nothing was compared with the plain model: none of the first {len(sample):,} rows can be asked about"
        )
    plain_PC, fallback, model = None, None, None
    if compared is not None:
        plain = _plain_runner(checked, options, precision, compared, callbacks, hear)
        num_rows = len(compared.num_tokens_N)
        callbacks.stage(f"computing {num_rows:,} rows by the plain fp32 model, to compare with (--verify)")
        began = time.perf_counter()
        plain_PC = plain.submit(compared.sequences).result()
        seconds += time.perf_counter() - began
        model = plain.model  # the first attempt makes it its own: it need not be read again
        del plain
        callbacks.stage("loading the model for the pass")
    for attempt, how_it_runs in _attempts(options, precision):
        runner = make_runner(
            *(checked, how_it_runs, attempt),
            sample=asked.sequences,
            num_tokens=num_tokens,
            callbacks=callbacks,
            hear=hear,
            model=model,
            packing_refused=how_it_runs.packing != options.packing,
        )
        model, equivalence, why_not = None, None, None
        if compared is not None and plain_PC is not None:
            began = time.perf_counter()
            may_widen = options.precision == "auto"
            equivalence, why_not = _judged(runner, request, compared, plain_PC, may_widen=may_widen)
            seconds += time.perf_counter() - began
        plainest = attempt.value == "fp32" and not runner.packing.packed
        if why_not is None or plainest:
            return Verified(runner, equivalence, fallback, None if compared is None else seconds)
        callbacks.warning(why_not)
        fallback = why_not
        del runner  # frees its memory for the next one
    raise AssertionError("padded rows in fp32 are what the others are compared with")


def _judged(
    runner: Runner, request: Request, compared: Asked, plain_PC: Logits, *, may_widen: bool
) -> tuple[AnswerEquivalence | None, str | None]:
    """Return the comparison of a runner, and why a slower path is to run; None where none is.

    may_widen: whether a model without half precision is a reason. Raises: HalfPrecisionError where it is not.
    """
    try:
        found = compare(runner, request, compared, plain_PC)
    except HalfPrecisionError as refusal:
        if not may_widen:
            raise
        return None, f"{refusal}: fp32 runs instead"
    if found.passed:
        return found, None
    how = f"{runner.precision.value}, packed" if runner.packing.packed else runner.precision.value
    return found, (
        f"on {found.num_rows:,} rows, {how} differs from the plain fp32 model by up to"
        f" {found.largest_difference:.2g} (allowed: {found.tolerance:g}) and agrees on"
        f" {share_text(found.agreement)} of the labels: a slower path runs instead"
    )


def compare(runner: Runner, request: Request, asked: Asked, plain_PC: Logits) -> AnswerEquivalence:
    """Compare a runner's answers with those of the plain model's logits: replayed ones, where passes are captured."""
    found_PC = runner.submit(asked.sequences).result()
    if runner.execution in ("captured", "compiled"):  # a shape that is met first runs eagerly
        found_PC = runner.submit(asked.sequences).result()
    scores, plain = (request.form.score_blocks(logits_PC, asked.candidates) for logits_PC in (found_PC, plain_PC))
    return compare_answers(request.form, scores, plain, precision=runner.precision.value)


def plain_logits(
    checked: Checked, options: ClassifyOptions, precision: Precision, asked: Asked, callbacks: Callbacks,
    hear: Callable[[OutOfMemory], None] | None = None,
) -> Logits:  # fmt: skip
    """Logits of the plain Hugging Face model in fp32 on the device of `precision`, on padded rows."""
    plain = _plain_runner(checked, options, precision, asked, callbacks, hear)
    return plain.submit(asked.sequences).result()


def _plain_runner(
    checked: Checked, options: ClassifyOptions, precision: Precision, asked: Asked, callbacks: Callbacks,
    hear: Callable[[OutOfMemory], None] | None,
) -> Runner:  # fmt: skip
    """Load the plain model. Its attention is eager: torch's fused one is wrong for some lengths with a sliding window.
    Eager scores grow with the square of the length, so batches are small.
    """
    exact = choose_precision("fp32", precision.device)
    budget = max(checked.max_length, _REFERENCE_TOKENS)
    budget = min(options.token_budget or budget, budget)
    padded = replace(options, execution="eager", packing="off", token_budget=budget)
    plain = make_runner(
        *(checked, padded, exact),
        sample=asked.sequences,
        num_tokens=0,
        callbacks=Callbacks(),  # what options lead to is said of the pass
        hear=hear or OutOfMemoryLog(warn=callbacks.warning),
        plain=True,
    )
    plain.forward.where = "check"
    plain.model.set_attn_implementation("eager")
    return plain


def _attempts(options: ClassifyOptions, precision: Precision) -> Iterator[tuple[Precision, ClassifyOptions]]:
    """Precisions with the options to run in them, from the fastest to the plainest."""
    yield precision, options
    if precision.value == "fp8":
        yield precision.in_bf16("its answers were not those of the plain model"), options
    exact = choose_precision("fp32", precision.device)
    if precision.value != "fp32":
        exact = replace(exact, reason=f"answers in {precision.value} were not those of the plain model")
        yield exact, options
    if options.packing == "auto":
        yield exact, replace(options, packing="off", execution="auto")
