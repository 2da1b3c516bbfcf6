"""Compare folders: read each, find what differs, and pair the answers to the same rows."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brimful.comparison.answers import Answers, in_common, read_answers
from brimful.comparison.benches import RESULTS, other_work, read_results
from brimful.comparison.paired import RESAMPLES, compare_answers
from brimful.core import atomic_files
from brimful.core.comparison import Compared, ComparedRow, Comparison, Difference, Paired, RowFigures
from brimful.core.errors import DataError, listed
from brimful.core.evaluation import MAIN_METRIC, Evaluation, Metric
from brimful.core.options.checks import flag
from brimful.core.options.compare import CompareOptions
from brimful.core.options.train import NOT_PART_OF_THE_RUN
from brimful.core.record_kinds import RUN, folder_of, kind_of
from brimful.core.records import Machine, Recipe, Run, TaskName
from brimful.reports.comparison_page import comparison_page
from brimful.reports.run_record import RunReport, read_record
from brimful.reports.write import check_page

#: Options of the command rather than of what it made.
_NOT_COMPARED = frozenset(
    {"output", "overwrite", "json", "quiet", "resume", "dry_run", "report", "report_to", "push_to_hub"}
)
#: Options that are not part of what is learned and yet decide it.
_LEARNED = frozenset({"data", "eval_data", "num_train_epochs", "max_steps", "max_length", "task"})

_KINDS = {"run": "a run", "evaluation": "an evaluation", "bench": "a bench"}


@dataclass(frozen=True, kw_only=True)
class _Side:
    """A folder as it was read. settings: by part and name. chosen: those that nobody asked for. source: what its
    evaluation rows are from."""

    compared: Compared
    settings: Mapping[tuple[str, str], str]
    chosen: frozenset[tuple[str, str]] = frozenset()
    task: TaskName | None = None
    source: str | None = None
    answers: Answers | None = None
    rows: Mapping[str, RowFigures] = field(default_factory=dict)


def compare(*folders: str | Path, html: str | Path | None = None, seed: int = 42) -> Comparison:
    """Compare folders of runs, evaluations or benches, two or more, with the first; loads no torch.

    html: a page to write. seed: of the resampling of rows. Raises: BrimfulError.
    """
    page = None if html is None else str(html)
    return run_comparison(CompareOptions(folders=tuple(map(str, folders)), html=page, seed=seed))


def run_comparison(options: CompareOptions) -> Comparison:
    """Compare with `options`, for `compare` and the command line."""
    if options.html is not None:
        check_page(Path(options.html), "--html")
    names = _short_names(options.folders)
    sides = [_read(Path(folder).expanduser(), name) for folder, name in zip(options.folders, names, strict=True)]
    _check_kinds([side.compared for side in sides])
    paired, notes = _paired(sides, options.seed)
    differences = _differences(sides)
    warning = other_work(differences) if sides[0].compared.kind == "bench" else None
    comparison = Comparison(
        compared=tuple(side.compared for side in sides),
        main_metric=MAIN_METRIC[sides[0].task] if sides[0].task is not None else None,
        differences=differences,
        paired=paired,
        rows=_rows(sides),
        warnings=() if warning is None else (warning,),
        notes=(*notes, *_disturbed(sides)),
        resamples=RESAMPLES if paired else 0,
        seed=options.seed,
        command=shlex.join(["brimful", "compare", *options.folders, *_seed(options)]),
    )
    if options.html is not None:
        atomic_files.write_bytes(Path(options.html), comparison_page(comparison).encode())
    return comparison


def _check_kinds(compared: Sequence[Compared]) -> None:
    """Raises: DataError for benches beside anything else."""
    others = [each.kind for each in compared if each.kind != "bench"]
    if others and len(others) < len(compared):
        kinds = ", ".join(f"{each.name} is {_KINDS[each.kind]}" for each in compared)
        many = "benches" if compared[0].kind == "bench" else f"{compared[0].kind}s"
        said = f"a bench is not compared with {_KINDS[others[0]]}: {kinds}"
        raise DataError(said, hint=f"compare {many} with {many}")


def _seed(options: CompareOptions) -> list[str]:
    return [] if options.seed == CompareOptions.seed else ["--seed", str(options.seed)]


def _read(given: Path, name: str) -> _Side:
    folder = folder_of(given)
    results = folder / RESULTS if folder.is_dir() else folder
    is_bench = (results.name == RESULTS and results.is_file()) or kind_of(results) == "bench"
    if is_bench and not (folder / RUN).is_file():
        read = read_results(results)
        bench = Compared(name=name, folder=str(folder), kind="bench", device=read.device, recommended=read.recommended)
        return _Side(compared=bench, settings=read.settings, rows=read.rows)
    record = read_record(folder)
    return _evaluation(record, folder, name) if isinstance(record, Evaluation) else _run(record, folder, name)


def _run(report: RunReport, folder: Path, name: str) -> _Side:
    run, found = report.run, report.evaluation
    main = MAIN_METRIC[run.labels.task]
    plain = {name: Metric(value=value) for name, value in report.metrics.items()}
    compared = Compared(
        name=name,
        folder=str(folder),
        kind="run",
        status="unfinished" if run.status == "running" and not report.is_live else run.status,
        device=run.recipe.device,
        metrics=plain if found is None else found.metrics,
        num_rows=None if found is None else found.num_rows,
        steps=run.steps if run.status == "finished" else report.last_step,
        train_s=run.train_s,
        wall_s=None if "resumed" in report.incidents else sum(run.phases_s.values()) or None,
        samples_per_s=report.samples_per_s,
        tokens_per_s=run.tokens_per_s,
        peak_bytes=run.peak_bytes.total,
        memory=run.peak_bytes.components,
        losses=tuple((each.step, each.loss) for each in report.steps if each.loss is not None),
        evaluated=tuple((e.step, e.metrics[main]) for e in report.evaluations if main in e.metrics),
    )
    chosen = _chosen(run)
    return _Side(
        compared=compared,
        settings=_settings({"model": run.model, **run.options, **chosen}, run.recipe, run.machine)
        | {("learned", "data fingerprint"): run.data_fingerprint[:16]},
        chosen=frozenset(("learned", flag(name)) for name in chosen),
        task=run.labels.task,
        source=run.data_fingerprint.rpartition("+")[2],
        answers=read_answers(folder / "predictions.parquet"),
    )


def _chosen(run: Run) -> dict[str, Any]:
    """Learning rate, epochs and warm-up that nobody asked for, as options."""
    asked, learning = run.options, run.learning
    if learning is None:
        return {}
    found: dict[str, Any] = {}
    if asked.get("learning_rate") is None:
        found["learning_rate"] = learning.learning_rate
    if asked.get("num_train_epochs") is None and learning.num_train_epochs is not None:
        found["num_train_epochs"] = learning.num_train_epochs
    if asked.get("warmup_steps") is None and asked.get("warmup_ratio") is None:
        found["warmup_steps"] = learning.num_warmup_steps
    return found


def _evaluation(record: Evaluation, folder: Path, name: str) -> _Side:
    compared = Compared(
        name=name,
        folder=str(folder),
        kind="evaluation",
        device=None if record.recipe is None else record.recipe.device,
        metrics=record.metrics,
        num_rows=record.num_rows,
        wall_s=record.wall_s,
    )
    beside = (folder if folder.is_dir() else folder.parent) / Path(record.predictions or "predictions.parquet").name
    saved = beside if beside.is_file() else Path(record.predictions or beside)
    return _Side(
        compared=compared,
        settings=_settings(
            {"model": record.model, "data": record.data, **record.options}, record.recipe, record.machine
        ),
        task=record.labels.task,
        source=str(Path(record.data).absolute()),
        answers=read_answers(saved),
    )


def _settings(options: Mapping[str, Any], recipe: Recipe | None, machine: Machine | None) -> dict[tuple[str, str], str]:
    """Settings by part and name, as text; those that are not set are left out."""
    found: dict[tuple[str, str], str] = {}
    for name, value in options.items():
        if name not in _NOT_COMPARED and value is not None:
            is_learned = name in _LEARNED or name not in NOT_PART_OF_THE_RUN
            found["learned" if is_learned else "run", flag(name)] = str(value)
    for lever in recipe.levers if recipe is not None else ():
        found["run", lever.name] = lever.value
    if machine is not None:
        found |= {("machine", name): version for name, version in machine.versions.items()}
        gpus = ", ".join(gpu.name for gpu in machine.gpus)
        facts = {"CPU": machine.cpu, "CPU cores": machine.num_cores, "GPU": gpus or None}
        found |= {("machine", name): str(fact) for name, fact in facts.items() if fact is not None}
    return found


def _differences(sides: Sequence[_Side]) -> tuple[Difference, ...]:
    """Settings that are not the same everywhere, in the order of the first folder that has them.

    Options of an evaluation decide what is evaluated, not what was learned.
    """
    evaluated = any(side.compared.kind == "evaluation" for side in sides)
    keys = dict.fromkeys(key for side in sides for key in side.settings if _is_shared(key, sides))
    found = []
    for key in keys:
        part, name = key
        values = tuple(side.settings.get(key) for side in sides)
        if len(set(values)) > 1:
            shown = tuple(
                f"{value} (chosen)" if key in side.chosen else value for value, side in zip(values, sides, strict=True)
            )
            under: Any = "evaluated" if part == "learned" and evaluated else part
            found.append(Difference(name=name, values=shown, part=under))
    order = ("learned", "evaluated", "run", "machine")
    return tuple(sorted(found, key=lambda each: order.index(each.part)))


def _is_shared(key: tuple[str, str], sides: Sequence[_Side]) -> bool:
    """True for a setting that each kind of folder has: evaluations have few of the options of runs."""
    having = {side.compared.kind for side in sides if key in side.settings}
    return having == {side.compared.kind for side in sides}


def _paired(sides: Sequence[_Side], seed: int) -> tuple[tuple[Paired, ...], list[str]]:
    """Each other folder's answers beside the first one's, and notes about those that cannot be."""
    first, found, notes = sides[0], list[Paired](), list[str]()
    if first.compared.kind == "bench":
        return (), []
    without = [side.compared.name for side in sides if side.answers is None]
    if without:
        notes.append(f"answers to each row are not saved in {listed(without)}: nothing is paired there")
    for place, side in enumerate(sides[1:], 1):
        who = f"{side.compared.name} and {first.compared.name}"
        if first.answers is None or side.answers is None:
            continue
        if side.task != first.task:
            notes.append(f"{who} have different tasks: {side.task}, {first.task}")
            continue
        if side.compared.kind != first.compared.kind:
            notes.append(f"{who} may be of other rows, one a run and one an evaluation: their answers are not paired")
            continue
        if side.source != first.source:
            notes.append(f"{who} were evaluated on rows of different data: their answers are not paired")
            continue
        common = in_common(first.answers, side.answers)
        if common.differing:
            notes.append(f"{common.differing:,} rows have other labels in {side.compared.name}: they do not count")
        rows = (len(first.answers.keys), len(side.answers.keys))
        if len(common.truths) < max(rows):
            said = f"{len(common.truths):,} rows of {rows[0]:,} and {rows[1]:,}"
            notes.append(f"{who} have {said} in common" + ("" if common.truths else ": nothing is paired"))
        if first.task is not None and (pair := compare_answers(common, first.task, first=0, other=place, seed=seed)):
            found.append(pair)
    return tuple(found), notes


def _disturbed(sides: Sequence[_Side]) -> list[str]:
    """A note on rows of benches that others disturbed."""
    names = [side.compared.name for side in sides if any(row.disturbed for row in side.rows.values())]
    busy = "other programs were busy on the machine meanwhile, so that their speed and ratios say little"
    return [f"rows marked * in {listed(names)}: {busy}"] if names else []


def _rows(sides: Sequence[_Side]) -> tuple[ComparedRow, ...]:
    names = dict.fromkeys(name for side in sides for name in side.rows)
    return tuple(ComparedRow(name=name, figures=tuple(side.rows.get(name) for side in sides)) for name in names)


def _short_names(folders: Sequence[str]) -> list[str]:
    """As many of the last parts of each path as tell all apart; a number besides where nothing does."""
    parts = [Path(folder).expanduser().absolute().parts for folder in folders]

    def last(number: int) -> list[str]:
        return ["/".join(each[-number:]) for each in parts]

    longest = max(map(len, parts))
    number = next((n for n in range(1, longest) if len(set(last(n))) == len(set(parts))), longest)
    names, seen = last(number), dict[str, int]()
    for place, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        names[place] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return names
