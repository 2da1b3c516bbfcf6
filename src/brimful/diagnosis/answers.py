"""Findings about the answers of a model: none better than a constant, a label never predicted, numbers far off.

Each is one sentence with its figures and, where there is one, the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator

from brimful.core.errors import listed, printable
from brimful.core.evaluation import CONSTANT, LINEAR, MAIN_METRIC, METRIC_NAMES, Baseline, Evaluation, LabelScore
from brimful.core.units import number_text, share_text
from brimful.diagnosis.learning import Course
from brimful.diagnosis.rows import RowFacts

#: Names of labels in one sentence.
_FEW = 5
#: Expected calibration error from which confidences are called off, on at least so many rows.
_MISCALIBRATED, _ENOUGH_ROWS = 0.1, 200
#: Rows below which intervals are wide whatever the model.
_FEW_ROWS = 50
#: Gain in F1 of all labels from which another threshold is named.
_BETTER_F1 = 0.03
#: What to try where the linear model is better, by what the training came to.
_ADVICE: dict[Course, str] = {
    "open": "try a higher --learning-rate or more epochs",
    "diverged": "try a lower --learning-rate",
    "learned": "the training rows are learned, so more epochs will hardly help: words alone tell these labels apart;"
    " use the linear model, or more rows",
}
#: And where it reads more of the rows: {cut} is what, {remedy} what to do about it.
_ADVICE_OF_CUT: dict[Course, str] = {
    "open": "{cut}: try {remedy}, a higher --learning-rate or more epochs",
    "diverged": "try a lower --learning-rate, and {remedy}: {cut}",
    "learned": "the training rows are learned, so more epochs will hardly help, but {cut}: try {remedy}",
}


def findings_of_answers(evaluation: Evaluation, *, course: Course = "open", rows: RowFacts | None = None) -> list[str]:
    """The gravest first. course, rows: of the training."""
    kinds = {"single_label": _of_one_label, "multi_label": _of_several_labels, "regression": _of_numbers}
    facts = rows or RowFacts()
    found = [] if (trained_on := facts.trained_on()) is None else [trained_on]
    found += kinds[evaluation.labels.task](evaluation)
    if (linear := _worse_than_linear(evaluation, course, facts)) is not None:
        found.append(linear)
    return [*found, *_of_confidence(evaluation), *_of_rows(evaluation)]


def _value(evaluation: Evaluation, name: str) -> float | None:
    metric = evaluation.metrics.get(name)
    return None if metric is None else metric.value


def _baseline(evaluation: Evaluation, name: str) -> Baseline | None:
    return next((each for each in evaluation.baselines if each.name == name), None)


def _of_one_label(evaluation: Evaluation) -> Iterator[str]:
    accuracy, constant = _value(evaluation, "accuracy"), _baseline(evaluation, CONSTANT)
    given = [label for label in evaluation.by_label if label.given]
    true = [label for label in evaluation.by_label if label.support]
    plain = None if constant is None else constant.metrics.get("accuracy")
    if accuracy is None:
        return
    if len(given) == 1 < len(true) and len(evaluation.by_label) > 1:
        only = _quoted(given[0].name)
        yield f"every row is predicted to be {only} (accuracy {number_text(accuracy)}): nothing is told apart"
    elif plain is not None and constant is not None and accuracy <= plain and len(true) > 1:
        correlation = evaluation.metrics.get("matthews_correlation")
        better = f"no better than always answering {_quoted(constant.answer)}"
        figures = f"accuracy {number_text(accuracy)} against {number_text(plain)}"
        if correlation is not None and correlation.low is not None and correlation.low > 0:
            yield (
                f"in accuracy {better} ({figures}), though labels are told apart somewhat (Matthews' correlation"
                f" {number_text(correlation.value)}): labels are unequally frequent, so look at balanced accuracy"
            )
        else:
            yield f"{better}: {figures}"
    if len(true) == 1:
        yield (
            f"every evaluated row has the label {_quoted(true[0].name)}: nothing is known about the others; where they"
            " are held out of the training rows, a larger --eval-split takes some of each label"
        )
    elif absent := [label for label in evaluation.by_label if not label.support]:
        yield _absent_text(absent)
    if len(given) > 1 and (missed := [label for label in true if not label.given]):
        rows = sum(label.support for label in missed)
        yield f"never predicted: {_names(missed)}, which {rows:,} row{'s have' if rows > 1 else ' has'}"


def _of_several_labels(evaluation: Evaluation) -> Iterator[str]:
    accuracy, share = _value(evaluation, "label_accuracy"), _none_given_share(evaluation)
    if accuracy is None:
        return
    if not any(label.given for label in evaluation.by_label):
        threshold = evaluation.options.get("threshold") or 0.5
        yield (
            f"no label reached {threshold:g} in any row: answering nothing scores a label accuracy of"
            f" {number_text(share)} too"
        )
        yield from _of_threshold(evaluation)
        return
    if share is not None and accuracy <= share:
        yield f"no better than answering nothing: label accuracy {number_text(accuracy)} against {number_text(share)}"
    if missed := [label for label in evaluation.by_label if label.support and not label.given]:
        yield f"never predicted: {_names(missed)}"
    yield from _of_threshold(evaluation)
    if absent := [label for label in evaluation.by_label if not label.support]:
        yield _absent_text(absent)


def _absent_text(absent: list[LabelScore]) -> str:
    which = f"no evaluated row has the label {_names(absent)}: nothing is known about rows that do"
    return f"{which}; where they are held out of the training rows, a larger --eval-split takes some of each label"


def _of_threshold(evaluation: Evaluation) -> Iterator[str]:
    """Name the threshold, among the edges of the reliability bins, with a clearly better F1 of all labels.

    Better than giving every row every label, too, which low thresholds come to.
    """
    bins, now = evaluation.reliability, _value(evaluation, "f1_micro")
    num_true = sum(part.count * part.observed for part in bins)
    if now is None or evaluation.num_rows < _FEW_ROWS or not num_true:
        return
    found = []
    for threshold in sorted({part.low for part in bins}):
        above = [part for part in bins if part.low >= threshold]
        right, given = sum(part.count * part.observed for part in above), sum(part.count for part in above)
        found.append((2 * right / (given + num_true), threshold))
    if not found:
        return
    (best, threshold), everything = max(found), found[0][0]
    if threshold > 0 and best >= max(now, everything) + _BETTER_F1:
        yield (
            f"another threshold is better: {_name_of('f1_micro')} {number_text(best)} with --threshold {threshold:.2f},"
            f" and {number_text(now)} with {evaluation.options.get('threshold') or 0.5:g} (of classify and evaluate;"
            " it is chosen on these very rows, so look at it on others)"
        )


def _none_given_share(evaluation: Evaluation) -> float | None:
    """Label accuracy of answering nothing."""
    total = evaluation.num_rows * len(evaluation.by_label)
    return 1 - sum(label.support for label in evaluation.by_label) / total if total else None


def _of_numbers(evaluation: Evaluation) -> Iterator[str]:
    r2 = evaluation.metrics.get("r2")
    if r2 is None or r2.value is None or r2.value > 0.02:
        return
    bins, constant = evaluation.reliability, _baseline(evaluation, CONSTANT)
    counted = sum(part.count for part in bins)
    if not counted:
        return
    target, output = (
        sum(part.count * value for part, value in zip(bins, values, strict=True)) / counted
        for values in ([p.observed for p in bins], [p.predicted for p in bins])
    )
    rmse = _value(evaluation, "rmse") or 0.0
    mean = "" if constant is None else f" ({constant.answer})"
    if abs(target - output) > 0.5 * rmse and abs(target) > 10:
        yield (
            f"worse than always answering the mean: targets average {target:.4g}, outputs {output:.4g}. Outputs of a"
            " new head start near 0: rescale the targets to a mean of 0 and a spread of 1, and the outputs back"
        )
    else:
        yield f"no better than always answering the mean{mean}: {_name_of('r2')} {number_text(r2.value)}"


def _worse_than_linear(evaluation: Evaluation, course: Course, rows: RowFacts) -> str | None:
    """State that the linear model is better by more than chance explains, or that the intervals do not part them."""
    linear, name = _baseline(evaluation, LINEAR), MAIN_METRIC[evaluation.labels.task]
    metric = evaluation.metrics.get(name)
    other = None if linear is None else linear.metrics.get(name)
    if metric is None or metric.value is None or other is None or other <= metric.value:
        return None
    assert linear is not None
    unread = rows.unread(linear)
    more = _ADVICE[course] if unread is None else _ADVICE_OF_CUT[course].format(cut=unread[0], remedy=unread[1])
    mine, its = number_text(metric.value), number_text(other)
    if metric.high is not None and other > metric.high:
        return f"TF-IDF with a linear model is better: {_name_of(name)} {its} against {mine}; {more}"
    said = f"no better than TF-IDF with a linear model: {_name_of(name)} {mine} against {its}, within the interval"
    return f"{said}; {more}, or use more rows" if course == "open" else f"{said}; {more}"


def _of_confidence(evaluation: Evaluation) -> Iterator[str]:
    error = _value(evaluation, "ece")
    if error is None or error < _MISCALIBRATED or evaluation.num_rows < _ENOUGH_ROWS:
        return
    bins = [part for part in evaluation.reliability if part.count]
    counted = sum(part.count for part in bins)
    sure = sum(part.count * part.predicted for part in bins) / counted
    right = sum(part.count * part.observed for part in bins) / counted
    what = "answers are right" if evaluation.labels.task == "single_label" else "labels are true"
    if abs(sure - right) < error / 2:  # too high here and too low there
        yield f"confidences are off by {share_text(error)} on average, some too high and some too low"
        return
    direction = "too high" if sure > right else "too low"
    yield f"confidences are {direction}: {share_text(sure)} on average, while {share_text(right)} of {what}"


def _of_rows(evaluation: Evaluation) -> Iterator[str]:
    if 0 < evaluation.num_rows < _FEW_ROWS:
        was = "row was" if evaluation.num_rows == 1 else "rows were"
        yield f"only {evaluation.num_rows:,} {was} evaluated: the intervals show how little that says"


def _name_of(metric: str) -> str:
    """The name of a metric within a sentence."""
    return METRIC_NAMES[metric].replace(",", "")


def _quoted(name: str | None) -> str:
    return repr(printable(name or "", 60))


def _names(labels: list[LabelScore]) -> str:
    return listed([_quoted(label.name) for label in labels], _FEW)
