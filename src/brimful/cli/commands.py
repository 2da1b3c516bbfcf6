"""The command line: arguments become a call of the API, errors one line and an exit code.

0  done                       3  too many non-finite steps     130  stopped by Ctrl-C, all saved
1  an internal error          4  disk full, checkpoints whole  143  stopped by SIGTERM, all saved
2  cannot be done as asked    5  no checkpoint to resume from       6  memory is full
7  another process of the same training is gone
"""

from __future__ import annotations

import atexit
import io
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, NoReturn

from brimful.cli.launch import LIFELINE, launch, number_of, watch_launcher
from brimful.core.errors import (
    BrimfulError,
    Interrupted,
    MeetingError,
    OptionError,
    RanksError,
    did_you_mean,
    printable,
)
from brimful.core.place import LAUNCHED, Place, find_place

#: Seconds in which the leader will have said what all processes have found wrong.
_LEADER_S = 3.0
_COMMANDS = ("train", "classify", "evaluate", "export", "report", "compare", "profile", "bench", "demo")

_HELP = """usage: brimful COMMAND ...

Fine-tune and run Hugging Face text classifiers with the GPU filled to the
brim, without changing what they learn.

commands:
  train DATA --model MODEL --output DIR   fine-tune a classifier on your texts
  classify MODEL INPUT                    label a file of texts with it
  evaluate MODEL DATA                     see how good it is, on labelled texts
  export RUN                              make a model of a run's checkpoint
  report RUN                              write a page about a run
  compare A B ...                         put runs, or benches, side by side
  profile DATA --model MODEL              see where the time of a step goes
  bench MODEL DATA                        compare ways to train, Trainer's too
  demo                                    watch both at work, in a few minutes

`brimful COMMAND --help` shows the options of a command, `brimful --version`
the version. Results go to stdout, everything else to stderr.
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command line and exit with its code. Without `arguments`, those of this process, which ends at once."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # data are UTF-8, whatever the terminal's language
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    if arguments is not None:
        sys.exit(run(list(arguments)))
    _leave(run(sys.argv[1:]))


def _leave(code: int) -> NoReturn:
    """End the process as `sys.exit` does, without taking a million objects apart first, which takes over a second.

    As there, other threads end first, then exit handlers are called.
    """
    end_threads = getattr(threading, "_shutdown", None)
    if "torch" not in sys.modules or end_threads is None:
        sys.exit(code)
    end_threads()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a pipe that nobody reads any more, or a closed stream
            stream.flush()
    os._exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line; return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP, end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "help":
        return run([*arguments[1:2], "--help"])
    if arguments[0] == "--version":
        from brimful import __version__

        print(__version__)
        return 0
    if arguments[0] not in _COMMANDS:
        hint = did_you_mean(arguments[0], _COMMANDS) or f"the commands are {', '.join(_COMMANDS)}"
        return _fail(f"there is no command '{printable(arguments[0])}'", hint, 2)
    try:
        code = _run(arguments[0], arguments[1:])
        sys.stdout.flush()
        return code
    except (BrimfulError, Interrupted) as error:
        return _fail(str(error), error.hint or f"see brimful {arguments[0]} --help", error.exit_code)
    except KeyboardInterrupt:
        again = "start it again; with --resume it goes on from what was saved, if anything was"
        has_output = any(word.startswith(("--output", "-o")) for word in arguments)
        resumable = arguments[0] == "train" or (arguments[0] == "classify" and has_output)
        return _fail("interrupted", again if resumable else "start it again", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        said = str(error).split(". ")[0]
        return _fail(f"memory is full: {said}", "lower --token-budget, or --max-length", 6)


def _fail(message: str, hint: str, code: int) -> int:
    with suppress(BrokenPipeError):  # the code says it, too
        print(f"error: {printable(message, 2000)}", file=sys.stderr)
        print(f"hint: {printable(hint, 2000)}", file=sys.stderr)
    return code


def _run(name: str, words: list[str]) -> int:
    """Run a command; return its exit code."""
    from brimful.cli.flags import parse_options

    try:
        options = parse_options(name, words)
    except BrimfulError as error:
        if "--claim" in words or find_place().leads:
            raise
        return _after_the_leader(error)
    if getattr(options, "launcher", "none") != "none" and LAUNCHED not in os.environ:
        return _on_ray(name, options, words)
    claims = getattr(options, "claim", False)  # then each process works by itself, whoever started it
    place = Place() if claims else find_place()
    if name in ("train", "profile") and options.gpus not in (None, "1"):
        if place.count == 1:
            return _on_several(options.gpus, [name, *words])
        if LIFELINE not in os.environ:
            from brimful.hardware.gpu_missing import check_not_launched

            try:
                check_not_launched(options.gpus, place.count)
            except OptionError as error:
                if place.leads:
                    raise
                return _after_the_leader(error)
    watch_launcher()
    together = name in ("train", "classify", "evaluate", "profile")
    if place.count > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # stacks of torch's for each connection that ends
        if not together:
            if not place.leads:
                return OptionError.exit_code
            hint = "start it without torchrun or srun"
            raise OptionError(f"brimful {name} is for one process, and {place.count} were started", hint=hint)
    if together and not place.leads:
        return _follow(name, options)
    without_torch = {"report": _report, "compare": _compare, "bench": _bench}
    if name in without_torch:
        without_torch[name](options)
        return 0
    return _act(name, options, place)


def _act(name: str, options: Any, place: Place) -> int:
    """Run a command that may load torch, in this process; return its exit code."""
    from brimful.core.phases import Phases, process_began
    from brimful.engine.process_start import importing, start_process
    from brimful.reports.terminal import Quiet, Terminal

    phases = Phases(process_began())
    if getattr(options, "allocator", "default") == "expandable" and "torch" not in sys.modules:
        given = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")  # read when torch starts; later it is set again, and checked
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = ",".join(filter(None, (given, "expandable_segments:True")))
    with ExitStack() as stack:
        terminal = stack.enter_context(closing(Quiet() if options.quiet else Terminal()))
        if name != "demo":
            from brimful.engine.early import check_early

            check_early(options, terminal)
        if name == "evaluate" and options.data is None:
            return _evaluate_answers(options, terminal)
        processes = _gpu_processes(options, stack) if name in ("classify", "evaluate") and place.count == 1 else []
        with importing():
            start_process(on_gpu=_starts_device(name, options))
            from brimful.cli.actions import act

        result = act(name, options, terminal, phases, processes)
    if result is not None:
        print(result.rstrip())
    return 0


def _on_several(gpus: str, words: list[str]) -> int:
    """Run the command once for each of several GPUs."""
    from brimful.hardware.gpu_missing import check_count, check_gpu

    check_gpu("cuda", gpus)
    check_count(gpus)
    count = number_of(gpus)
    return launch([sys.executable, "-m", "brimful", *words], count)


def _on_ray(name: str, options: Any, words: list[str]) -> int:
    """Run the command in workers of Ray, after a look at what would end it at once."""
    from brimful.cli.ray_launch import launch_on_ray
    from brimful.core.callbacks import Callbacks
    from brimful.engine.early import check_early

    check_early(options, Callbacks())
    return launch_on_ray(
        [name, *words],
        options.num_processes or 1,
        output=Path(options.output),
        on_gpu=options.device != "cpu",
        claims=getattr(options, "claim", False),
    )


def _follow(name: str, options: Any) -> int:
    """Take part in work that another process leads: what there is to say, it says."""
    from brimful.core.callbacks import Callbacks
    from brimful.engine.early import check_early

    try:
        check_early(options, Callbacks())  # as the leader does, which does not wait for others then
    except BrimfulError as error:
        if LIFELINE not in os.environ:  # otherwise who started all ends them
            from brimful.hardware.meeting import tell_failure

            tell_failure(find_place(), error)
        return _after_the_leader(error)
    from brimful.engine.process_start import importing, start_process

    with importing():
        start_process(on_gpu=False)  # this process's GPU is known later
        from brimful.api import run_classification, run_training
        from brimful.engine.evaluation.run import run_evaluation
        from brimful.engine.profiling.profile import profile

    try:
        commands = {"train": run_training, "classify": run_classification, "evaluate": run_evaluation}
        run: Any = (commands | {"profile": profile})[name]
        run(options, Callbacks())
    except BrimfulError as error:
        if isinstance(error, MeetingError):  # the leader does not hear of it
            return _fail(str(error), error.hint or "", error.exit_code)
        if isinstance(error, RanksError) and error.lost == 0 and find_place().rank == 1:  # the leader cannot
            return _fail(str(error), error.hint or "", error.exit_code)
        return error.exit_code if isinstance(error, RanksError) else _after_the_leader(error)
    return 0


def _after_the_leader(error: BrimfulError) -> int:
    """Wait until the leader will have said what is wrong, as torchrun ends all with the first; the exit code."""
    if LIFELINE not in os.environ:
        time.sleep(_LEADER_S)
    return error.exit_code


def _report(options: Any) -> None:
    """Write a page, and send a run to trackers, which needs no charts; without loading torch."""
    from brimful.core.errors import InputError
    from brimful.core.records import json_text
    from brimful.core.trackers import check_trackers
    from brimful.reports.svg import check_charts
    from brimful.reports.write import report

    check_trackers(options.report_to)
    without: InputError | None = None
    try:
        check_charts()
    except InputError as error:
        if options.report_to == "none":
            raise
        without = error
    path = None if without is not None else report(options.run, options.output)
    if options.report_to != "none":
        from brimful.integrations.trackers.reporting import send_run

        for name, url in send_run(options.run, options.report_to).items():
            if not options.quiet:
                print(f"sent to {name}" if url is None else f"sent to {name}: {printable(url, 300)}", file=sys.stderr)
    if without is not None:
        if options.output is not None:
            raise without
        print(f"warning: no page was written: {without}; {without.hint}", file=sys.stderr)
    if options.json or path is not None:
        print(json_text({"report": None if path is None else str(path)}) if options.json else path)


def _bench(options: Any) -> None:
    """Measure rows, each in a process of its own: this one loads no torch. Raises: InputError if none was measured."""
    from brimful.benchmarking.run import BenchRun
    from brimful.benchmarking.told import check_measured
    from brimful.core.command_line import command_of
    from brimful.core.records import to_json
    from brimful.reports.bench_text import bench_text
    from brimful.reports.terminal import Quiet, Terminal

    def show(bench: Any) -> None:
        print(to_json(bench).rstrip() if options.json else bench_text(bench), flush=True)

    with closing(Quiet() if options.quiet else Terminal()) as terminal:
        work = BenchRun(options, command_of("bench", options), terminal)
        try:
            bench = work.run()
        except Interrupted:
            terminal.close()
            if work.stopped is not None:
                show(work.stopped)
            raise
    show(bench)
    check_measured(bench)


def _compare(options: Any) -> None:
    """Print a comparison, without loading torch."""
    from brimful.comparison.compare import run_comparison
    from brimful.core.records import to_json
    from brimful.reports.comparison_text import comparison_text

    comparison = run_comparison(options)
    if options.html is not None:
        print(f"page: {printable(options.html, 500)}", file=sys.stderr)
    print(to_json(comparison).rstrip() if options.json else comparison_text(comparison))


def _evaluate_answers(options: Any, terminal: Any) -> int:
    """Score the answers in a file, without loading torch; return the exit code."""
    from brimful.core.records import to_json
    from brimful.engine.evaluation.run import run_evaluation
    from brimful.reports.evaluation_text import evaluation_text

    evaluation = run_evaluation(options, terminal)
    print((to_json(evaluation) if options.json else evaluation_text(evaluation)).rstrip())
    return 0


def _gpu_processes(options: Any, stack: ExitStack) -> list[Any]:
    """Begin the processes of GPUs beside the first, which load torch while this one does. `stack` ends them."""
    if options.gpus in (None, "1") or getattr(options, "claim", False):
        return []
    from brimful.engine.classification.gpu_process import begin_processes
    from brimful.hardware.driver import count_gpus

    there = count_gpus()
    asked = there if options.gpus == "all" else int(options.gpus)
    return begin_processes(asked, stack) if asked <= there else []


def _starts_device(name: str, options: Any) -> bool:
    """Return whether a command runs on the first GPU that is visible, if on any, and could begin. With --claim each of
    a host's processes has another one; --deterministic has a say in how the matrix library starts."""
    if name == "train":
        return options.device != "cpu" and not options.deterministic and _could_begin(options)
    if name not in ("classify", "evaluate") or options.device == "cpu" or getattr(options, "claim", False):
        return False
    return Path(options.data).exists()


def _could_begin(options: Any) -> bool:
    """Return whether the files that a training names are where it says; its own checks say what is wrong."""
    return Path(options.data).exists() and (options.resume or not (Path(options.output) / "run.json").exists())
