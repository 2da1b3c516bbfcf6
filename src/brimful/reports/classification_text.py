"""A classification as text: what was found, how fast, which stage was the limit, and the equivalence check.

`classification_page` shows the same record as a page, in the same sentences.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import accumulate

from rich.cells import cell_len

from brimful.core.classification import CONFIDENCE_BINS, LENGTH_ENDS, AnswerEquivalence, Classification, StageName
from brimful.core.errors import printable
from brimful.core.units import count_text, part_text, seconds_text, share_text
from brimful.reports.memory_text import memory_text
from brimful.reports.text_columns import fitted, padded

#: Labels that are listed with their counts.
_MOST_LABELS = 20
#: Processes that are listed.
_MOST_WORKERS = 8
#: Widest name of a label, and most labels named in a sentence.
_NAME, _FEW = 40, 5
#: Confidences called sure (from the first on) and unsure (below the second).
_SURE, _UNSURE = 0.9, 0.5
_NOTHING_TO_COMPARE = "none of the first rows can be classified"
STAGES: dict[StageName, str] = {
    "read": "reading",
    "tokenise": "tokenising",
    "compute": "computing",
    "write": "writing",
}


def classification_text(record: Classification, told: Collection[str] = ()) -> str:
    """The whole report, without a line break at its end. told: warnings and notes that were shown before."""
    warnings = [f"warning: {printable(said, 1000)}" for said in concerns(record) if said not in told]
    parts = (_pass(record), warnings, _stages(record), _texts(record), _labels(record), _equivalence(record))
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _pass(record: Classification) -> list[str]:
    whence = "standard input" if record.data == "-" else printable(record.data, 200)
    lines = [f"Classified  {headline(record)}", f"  {whence} by {printable(record.model, 200)}"]
    rates = (
        (record.texts_per_s, f"{count_text(record.texts_per_s)} texts/s"),
        (record.tokens_per_s, f"{count_text(record.tokens_per_s)} tokens/s"),
        (record.mfu, f"MFU {share_text(record.mfu)}"),
    )
    if said := ", ".join(said for value, said in rates if value is not None):
        lines.append("  " + said)
    if record.start_s is not None:
        checked = f"; {seconds_text(record.verify_s)} of it comparing with the plain model (--verify)"
        before = f"  {seconds_text(record.start_s)} before it: loading and checking the model"
        lines.append(before + (checked if record.verify_s else ""))
    lines += claimed_lines(record)
    if record.resumed_rows:
        lines.append(f"  resumed after {record.resumed_rows:,} rows of an interrupted run")
    if peak := memory_text(record.peak_bytes):
        lines.append(f"  peak memory {peak}")
    return lines


def claimed_lines(record: Classification) -> list[str]:
    """Files and processes of --claim, one process a line; none otherwise."""
    if (found := record.claimed) is None:
        return []
    taken = f"; {found.num_taken_over:,} taken over from processes that had ended or stopped"
    files, processes = found.num_files, len(found.workers)
    lines = [
        f"  {files:,} file{_s(files)} by {processes:,} process{'' if processes == 1 else 'es'}"
        + (taken if found.num_taken_over else "")
    ]
    for by in found.workers[:_MOST_WORKERS]:
        rate = f", {count_text(by.num_rows / by.work_s)} texts/s" if by.work_s else ""
        said = f"{by.num_files:,} file{_s(by.num_files)}, {by.num_rows:,} row{_s(by.num_rows)}{rate}"
        lines.append(f"    {printable(by.host, _NAME)} {by.pid} ({printable(by.device)}): {said}")
    if processes > _MOST_WORKERS:
        lines.append(f"    and {processes - _MOST_WORKERS:,} more")
    return lines


def headline(record: Classification) -> str:
    """State the number of texts, the time and the device."""
    within = "" if record.wall_s is None else f" in {seconds_text(record.wall_s)}"
    return f"{record.counts.num_rows:,} text{_s(record.counts.num_rows)}{within} on {printable(record.recipe.device)}"


def _s(number: int) -> str:
    """The ending of a noun after a number."""
    return "" if number == 1 else "s"


def concerns(record: Classification) -> list[str]:
    """Warnings, shown before the figures: guesses, omissions, fallbacks, a failed check, rows cut or with an error."""
    counts, found = record.counts, record.equivalence
    said = list(record.notes)
    if record.fallback is not None:
        said.append(f"a slower path ran than planned: {record.fallback}")
    if compared(record) is None and record.options.get("verify") != 0:
        said.append(f"nothing was compared with the plain model: {_NOTHING_TO_COMPARE}")
    if found is not None and not found.passed:
        said.append(f"the equivalence check was not passed: {equivalence_text(record, found)}")
    warnings = (
        (counts.num_errors, "were not read or classified in full: see the column `error`", counts.first_errors),
        (counts.num_empty, "had no text, and have no answer", ()),
        (counts.num_unlabelled, "had no candidate labels, and have no answer", ()),
        (counts.num_truncated, f"were longer than {_longest(record)}, and were cut (--max-length)", ()),
    )
    for count, what, first in warnings:
        if count:
            singular = what.replace("were", "was").replace("have", "has") if count == 1 else what
            said.append(f"{part_text(count, counts.num_rows)} of {counts.num_rows:,} rows {singular}")
            said += [f"row {each.row:,} of {printable(each.file)}: {each.error}" for each in first]
    return said


def _longest(record: Classification) -> str:
    """The longest sequence and its reason; records of earlier versions have neither."""
    if record.max_length is None:
        return "the longest sequence"
    return f"{record.max_length:,} tokens ({record.max_length_reason})"


def _stages(record: Classification) -> list[str]:
    if not record.stages:
        return []
    lines = [f"{'Stages':<14}{'busy':>14}{'of the time':>14}"]
    for stage in record.stages:
        share = share_text(stage.busy_s / record.wall_s) if record.wall_s else ""
        limit = "  the limit" if stage.name == record.limit else ""
        lines.append(f"  {STAGES[stage.name]:<12}{seconds_text(stage.busy_s):>14}{share:>14}{limit}".rstrip())
    if (advice := limit_text(record)) is not None:
        lines.append(f"  {advice}")
    return lines + _gpus(record)


def _gpus(record: Classification) -> list[str]:
    """Each GPU of several: seconds that it computed, and their share of the time since it joined."""
    lines = list[str]()
    for each in record.gpus:
        there_s = max((record.wall_s or 0.0) - each.joined_s, 1e-9)
        joined = f", from {seconds_text(each.joined_s)} on" if each.number else ""
        said, share = f"{each.num_windows:,} windows{joined}", share_text(each.busy_s / there_s)
        lines.append(f"  {f'GPU {each.number}':<12}{seconds_text(each.busy_s):>14}{share:>14}  {said}")
    return lines


def limit_text(record: Classification) -> str | None:
    """Name the stage that the others waited for, and the remedy. None where it is not known."""
    on_gpu = record.recipe.device != "CPU"
    if record.limit == "read":
        packed = "a .gz is unpacked by one core: " if record.data.endswith(".gz") else ""
        return f"Reading is the limit: {packed}Parquet on a local disk is read fastest."
    if record.limit == "tokenise":
        waits = ", and the GPU waits for it" if on_gpu else ""
        return f"Tokenising is the limit{waits}: use more cores, or more processes for it (--num-workers)."
    if record.limit == "write":
        better = "a faster disk helps" if (record.output or "").endswith(".parquet") else "Parquet is written fastest"
        return f"Writing is the limit: {better}."
    if record.limit == "compute":
        more = "more GPUs (--gpus)" if on_gpu else "a GPU"
        return (
            f"Computing is the limit, as it should be. Faster: {more}, shorter texts (--max-length), a smaller model."
        )
    return None


def _texts(record: Classification) -> list[str]:
    lines = (
        ("tokens", lengths_text(record.counts.num_tokens, record.counts.lengths)),
        ("confidence", confidence_text(record.counts.confidences)),
    )
    known = [f"  {name:<12}{said}" for name, said in lines if said is not None]
    return ["Texts", *known] if known else []


def lengths_text(num_tokens: int, lengths: Sequence[int]) -> str | None:
    """Lengths of the texts, None if there are none."""
    counted = sum(lengths)
    if not counted:
        return None
    said, reached = [f"{num_tokens / counted:,.1f} on average"], list(accumulate(lengths))
    half, most = (bisect_left(reached, share * counted) for share in (0.5, 0.95))
    if half < most:
        said.append(f"half of the texts have at most {LENGTH_ENDS[half]:,}")
    if most < len(LENGTH_ENDS):  # the last class is open
        said.append(f"95 % have at most {LENGTH_ENDS[most]:,}")
    return ", ".join(said)


def confidence_text(confidences: Sequence[int]) -> str | None:
    """Count the texts with a confident label, and those without. None if nothing is known."""
    counted = sum(confidences)
    if not counted:
        return None
    sure = sum(confidences[round(_SURE * CONFIDENCE_BINS) :])
    unsure = sum(confidences[: round(_UNSURE * CONFIDENCE_BINS)])
    return (
        f"{_SURE} or more in {part_text(sure, counted)} of the texts, below {_UNSURE} in {part_text(unsure, counted)}"
    )


def _labels(record: Classification) -> list[str]:
    listed, rest = ranked_labels(record, _MOST_LABELS)
    if not listed:
        return []
    rows = [(fitted(name, _NAME), part_text(count, record.counts.num_rows)) for name, count in listed]
    width = max(cell_len(name) for name, _ in rows)
    lines = ["Labels", *(f"  {padded(name, width)}  {said:>20}" for name, said in rows)]
    if rest:
        lines.append(f"  {rest_text(rest)}")
    if (absent := absent_text(record)) is not None:
        lines.append(f"  {absent}")
    return lines


def ranked_labels(record: Classification, most: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Labels and their counts, the most frequent first: at most `most` of them, and the others."""
    given = [(name, count) for name, count in record.counts.labels.items() if count]
    ranked = sorted(given, key=lambda label: (-label[1], label[0]))
    return ranked[:most], ranked[most:]


def rest_text(rest: Sequence[tuple[str, int]]) -> str:
    """The labels that are not listed, in one line."""
    times = sum(count for _, count in rest)
    return f"{len(rest):,} more label{_s(len(rest))}, given {times:,} time{_s(times)}"


def absent_text(record: Classification) -> str | None:
    """Name the labels that no text was given. None if there are none, or no text was given any."""
    given = {name for name, count in record.counts.labels.items() if count}
    absent = [name for name in record.labels.names if name not in given]
    if record.labels.task == "regression" or not given or not absent:
        return None
    named = ", ".join(printable(name, _NAME) for name in absent[:_FEW])
    more = f" and {len(absent) - _FEW:,} more" if len(absent) > _FEW else ""
    return f"Never given: {named}{more}."


def _equivalence(record: Classification) -> list[str]:
    if (found := compared(record)) is None:
        return [f"Equivalence check  not run: nothing was compared with the plain model ({unchecked_text(record)})"]
    return [f"Equivalence check  {'passed' if found.passed else 'NOT passed'}: {equivalence_text(record, found)}"]


def compared(record: Classification) -> AnswerEquivalence | None:
    """Return the comparison with the plain model, None if there was no row to compare."""
    return record.equivalence if record.equivalence is not None and record.equivalence.num_rows else None


def unchecked_text(record: Classification) -> str:
    """State why no row was compared."""
    return _NOTHING_TO_COMPARE if record.options.get("verify") != 0 else "--verify"


def equivalence_text(record: Classification, found: AnswerEquivalence) -> str:
    """Summarise the comparison with the plain model in one line."""
    said = f"{found.precision} against plain fp32 "
    if record.labels.task == "regression":
        said += f"on {found.num_rows:,} rows"
    else:
        said += f"has the {same_label(record)} in {found.num_rows - found.num_flips:,} of {found.num_rows:,} rows"
        said += f", {flips_text(found)}" if found.num_flips else ""
    relatively = " (relative)" if record.labels.task == "regression" else ""
    return f"{said}; off by at most {found.largest_difference:.2g} of {found.tolerance:g}{relatively}"


def same_label(record: Classification) -> str:
    """Name what both models must give a row of this task."""
    return "same labels" if record.labels.task == "multi_label" else "same label"


def flips_text(found: AnswerEquivalence) -> str:
    """Explain the rows that were given another label."""
    if found.num_unexplained:
        return f"{found.num_unexplained:,} of the {found.num_flips:,} others are no near-ties"
    return "the other one a near-tie" if found.num_flips == 1 else f"the {found.num_flips:,} others near-ties"
