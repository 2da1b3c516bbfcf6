"""The command line: arguments to a call of the API, errors to one line and an exit code. No logic of its own.

0  done                       3  too many non-finite steps     130  stopped by Ctrl-C, all saved
1  an error of ours           4  disk full, checkpoints whole  143  stopped by SIGTERM, all saved
2  cannot be done as asked    5  no checkpoint to resume from
"""

from __future__ import annotations

import atexit
import difflib
import gc
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from brimful.core.errors import BrimfulError, printable

if TYPE_CHECKING:
    from brimful.reports.terminal import Terminal

_HELP = """usage: brimful COMMAND ...

Fine-tune and run Hugging Face text classifiers with the GPU filled to the
brim, without changing what they learn.

commands:
  train DATA --model MODEL --output DIR   fine-tune a classifier on your texts
  classify MODEL INPUT                    label a file of texts with it
  profile DATA --model MODEL              see where the time of a step goes
  demo                                    watch both at work, in a few minutes

`brimful COMMAND --help` shows the options of a command, `brimful --version`
the version. Results go to stdout, everything else to stderr.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command line and exits with its code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # data are UTF-8, whatever the terminal's language
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Runs one command line; its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP, end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from brimful import __version__

        print(__version__)
        return 0
    command = _COMMANDS.get(arguments[0])
    if command is None:
        near = difflib.get_close_matches(arguments[0], _COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(_COMMANDS)}"
        return _fail(f"there is no command '{printable(arguments[0])}'", hint, 2)
    try:
        code = command(arguments[1:])
        sys.stdout.flush()
        return code
    except BrimfulError as error:
        return _fail(str(error), error.hint or f"see brimful {arguments[0]} --help", error.exit_code)
    except KeyboardInterrupt:
        again = "what is done is kept: the same command with --resume goes on"
        resumable = arguments[0] == "train" or (arguments[0] == "classify" and _has_output(arguments))
        return _fail("interrupted at once", again if resumable else "start it again", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        said = str(error).split(". ")[0]
        return _fail(f"the GPU's memory is full: {said}", "lower --token-budget, or --max-length", 1)


def _has_output(words: list[str]) -> bool:
    return any(word.startswith(("--output", "-o")) for word in words)


def _fail(message: str, hint: str, code: int) -> int:
    print(f"error: {printable(message, 2000)}", file=sys.stderr)
    print(f"hint: {printable(hint, 2000)}", file=sys.stderr)
    return code


def _train(words: list[str]) -> int:
    from brimful.cli.flags import train_options

    options = train_options(words)
    with _terminal() as callbacks:
        with _importing():
            from brimful.api import run_training, summary_json

        record = run_training(options, callbacks)
    if options.json:
        print(summary_json(record))
    return 0


def _classify(words: list[str]) -> int:
    from brimful.cli.flags import classify_options

    options = classify_options(words)
    with _terminal() as callbacks:
        with _importing():
            from brimful.api import run_classification
            from brimful.core.records import to_json
            from brimful.reports.classification_text import classification_text

        record = run_classification(options, callbacks, sys.stdout)
        callbacks.text(classification_text(record))
    if options.json and options.output is not None:
        print(to_json(record).rstrip())
    return 0


def _profile(words: list[str]) -> int:
    from brimful.cli.flags import profile_options

    options = profile_options(words)
    with _terminal() as callbacks:
        with _importing():
            from brimful.api import run_profile
            from brimful.core.records import to_json
            from brimful.reports.profile_text import anatomy_text

        record = run_profile(options, callbacks)
    print(to_json(record).rstrip() if options.json else anatomy_text(record))
    return 0


def _demo(words: list[str]) -> int:
    from brimful.cli.flags import demo_options

    options = demo_options(words)
    with _terminal() as callbacks:
        with _importing():
            from brimful.api import summary_json
            from brimful.cli.demo import run_demo

        record = run_demo(options, callbacks)
    if options.json:
        print(summary_json(record))
    return 0


@contextmanager
def _importing() -> Iterator[None]:
    """Imports without the garbage collector, which would go through a million new objects again and again, a fifth of
    the time. They stay until the process ends, so it leaves them alone until then."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)


def _terminal() -> closing[Terminal]:
    """The terminal as a callbacks, whose live display ends with the block."""
    from brimful.reports.terminal import Terminal

    return closing(Terminal())


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "classify": _classify,
    "profile": _profile,
    "demo": _demo,
}
