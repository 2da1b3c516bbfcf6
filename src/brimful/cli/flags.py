"""Parse a command line into options: one flag per field of the command's dataclass, its help the docstring under it.

A flag overrides --config, which overrides the default. A mistake is an OptionError of one line.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from itertools import pairwise
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from brimful.cli.config_file import read_configuration
from brimful.core.errors import OptionError, did_you_mean, printable
from brimful.core.options.bench import BenchOptions
from brimful.core.options.checks import batch_conflict, flag
from brimful.core.options.classify import ClassifyOptions
from brimful.core.options.compare import CompareOptions
from brimful.core.options.demo import DemoOptions
from brimful.core.options.evaluate import EvaluateOptions
from brimful.core.options.export import ExportOptions
from brimful.core.options.profile import ProfileOptions, flags_of
from brimful.core.options.report import ReportOptions
from brimful.core.options.train import CAN_BE_AUTO, TrainOptions

_CONFIG_HELP = "TOML or YAML file with any of these options, by the same names; flags override it."


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command. positionals: field -> its name in the usage line. groups: first field of a group -> its heading.

    short: field -> its one-letter flag.
    """

    name: str
    options: type[Any]
    summary: str
    example: str
    positionals: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    short: Mapping[str, str] = field(default_factory=dict)


COMMANDS = (
    Command(
        name="train",
        options=TrainOptions,
        summary="Fine-tune a classifier on a file of texts.",
        example="brimful train reviews.csv --model bert-base-uncased --output run",
        positionals={"data": "DATA"},
        groups={
            "model": "needed",
            "eval_data": "data and labels",
            "batch_size": "what is learned",
            "eval_steps": "evaluation, checkpoints, log",
            "precision": "how it runs",
            "resume": "the run",
        },
        short={"output": "-o"},
    ),
    Command(
        name="classify",
        options=ClassifyOptions,
        summary="Label files of texts of any size with a fine-tuned classifier, or zero-shot with an NLI model.",
        example="brimful classify run/model reviews.csv -o labelled.csv",
        positionals={"model": "MODEL", "data": "INPUT"},
        groups={
            "output": "rows in, rows out",
            "labels": "what is asked, what is answered",
            "resume": "the run",
            "precision": "how it runs",
        },
        short={"output": "-o"},
    ),
    Command(
        name="evaluate",
        options=EvaluateOptions,
        summary="Show how good a classifier is on labelled rows, or how good answers are that it gave before.",
        example="brimful evaluate run/model test.csv",
        positionals={"model": "MODEL", "data": "DATA"},
        groups={
            "output": "rows and labels",
            "label_map": "what is scored",
            "report": "the result",
            "precision": "how it runs",
        },
        short={"output": "-o"},
    ),
    Command(
        name="export",
        options=ExportOptions,
        summary="Make a model of a checkpoint, of a run that was interrupted too.",
        example="brimful export run --output model-so-far",
        positionals={"run": "RUN"},
        short={"output": "-o"},
    ),
    Command(
        name="report",
        options=ReportOptions,
        summary="Write a page about a run, finished or under way: how it learned, how good it is, how it ran.",
        example="brimful report run",
        positionals={"run": "RUN"},
        short={"output": "-o"},
    ),
    Command(
        name="compare",
        options=CompareOptions,
        summary="Put runs, evaluations or benches side by side: settings, metrics on the same rows, speed, memory.",
        example="brimful compare run-a run-b",
        positionals={"folders": "A B ..."},
    ),
    Command(
        name="profile",
        options=ProfileOptions,
        summary="Show where the time of one training step goes, on your data. Nothing is trained, nothing is saved.",
        example="brimful profile reviews.csv --model bert-base-uncased",
        positionals={"data": "DATA"},
        groups={
            "model": "needed",
            "eval_data": "data and labels",
            "batch_size": "what is learned",
            "precision": "how it runs",
            "trust_remote_code": "the profile",
        },
    ),
    Command(
        name="bench",
        options=BenchOptions,
        summary="Measure ways to train a model on this machine, brimful's and transformers' Trainer's side by side.",
        example="brimful bench bert-base-uncased reviews.csv --output bench",
        positionals={"model": "MODEL", "data": "DATA"},
        groups={
            "output": "what is measured",
            "text_column": "data and labels",
            "learning_rate": "what is learned",
            "device": "how it runs",
        },
        short={"output": "-o"},
    ),
    Command(
        name="demo",
        options=DemoOptions,
        summary="Fine-tune MiniLM on BBC News, on this machine, and label a few sentences with the result.",
        example="brimful demo --output demo-run",
        short={"output": "-o"},
    ),
)

#: Flags of transformers', and of earlier versions, that mean the same.
_ALSO: Mapping[str, str] = {"--per-device-train-batch-size": "--per-device-batch-size", "--num-gpus": "--gpus"}
_SHOWN_AS: Mapping[str, str] = {
    "output": "PATH", "trace": "FILE", "metric_for_best_model": "METRIC", "report_to": "NAMES"
}  # fmt: skip
#: Values that make sense, where 8 does not.
_EXAMPLES: Mapping[str, int | str] = {
    "--max-length": 256, "--max-steps": 1000, "--limit": 500, "--seed": 42, "--save-steps": 500, "--eval-steps": 500,
    "--logging-steps": 10, "--token-budget": 8192, "--shard-rows": 1000000, "--verify": 256, "--warmup-steps": 100,
    "--gradient-checkpointing": "full",
}  # fmt: skip
_KINDS: Mapping[type[Any], str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def parse_options(name: str, words: Sequence[str]) -> Any:
    """Options of the command called `name`. Prints its help and exits with 0 if `words` ask for it.

    Raises: OptionError for an unknown option, a wrong value, and a missing argument.
    """
    (command,) = (each for each in COMMANDS if each.name == name)
    all_hints = get_type_hints(command.options)
    hints = {field.name: all_hints[field.name] for field in flags_of(command.options)}
    words = [_with_dashes(word) for word in words]
    _check_known(command, hints, words)
    parsed, left = _parser(command, hints).parse_known_args(words)
    if left:
        said = f"brimful {command.name} does not know what to do with {printable(' '.join(left), 200)}"
        raise OptionError(said, hint=f"quote values with spaces, and globs{_quoted(words, left)}; {command.example}")
    asked = vars(parsed)
    given = read_configuration(asked.pop("config"), list(all_hints)) if "config" in asked else {}
    given = {name: value for name, value in given.items() if name in hints} | asked
    missing = [f.name for f in flags_of(command.options) if f.default is MISSING and f.name not in given]
    if missing:
        shown = " and ".join(command.positionals.get(name, flag(name)) for name in missing)
        raise OptionError(f"brimful {command.name} needs {shown}", hint=command.example)
    if command.options is ClassifyOptions and given.get("output") == "-":
        given["output"] = None  # stdout, the default
    values = {name: _value(flag(name), hints[name], value) for name, value in given.items()}
    options = command.options(**values)
    if "per_device_batch_size" in values and values.get("batch_size", options.batch_size) != options.batch_size:
        raise batch_conflict(str(values["batch_size"]), options.batch_size)  # given, though it is the default
    return options


def help_texts(options: type[Any]) -> dict[str, str]:
    """Map each field of a dataclass, inherited ones too, to the docstring under it, on one line."""
    texts: dict[str, str] = {}
    for kind in reversed([kind for kind in options.__mro__ if dataclasses.is_dataclass(kind)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, after in pairwise(definition.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
                texts[ast.unparse(statement.target)] = " ".join(str(ast.literal_eval(after.value)).split())
    return texts


class _Help(argparse.HelpFormatter):
    """Help whose lines break between words: never within a flag."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        said = message.removeprefix("argument ")
        name = said.partition(":")[0]
        hint = f"as in {name} {_EXAMPLES[name]}" if name in _EXAMPLES else f"{self.prog} --help"
        raise OptionError(printable(said, 300), hint=hint)


def _with_dashes(word: str) -> str:
    """`--batch_size=3` as `--batch-size=3`, and names of transformers' as ours."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    name = name.replace("_", "-")
    return _ALSO.get(name, name) + equals + value


def _check_known(command: Command, hints: Mapping[str, Any], words: Sequence[str]) -> None:
    """Raises: OptionError for an unknown flag, before argparse can take its value for an argument."""
    known = [flag(name) for name in hints if name not in command.positionals]
    known += [flag(f"no_{name}") for name, hint in hints.items() if bool in _kinds(hint)] + ["--help", "--config"]
    for word in words[: words.index("--")] if "--" in words else words:
        name = word.partition("=")[0]
        if word.startswith("--") and name not in known:
            raise OptionError(
                f"brimful {command.name} has no option {printable(name)}",
                hint=did_you_mean(name, known) or f"brimful {command.name} --help shows them all",
            )


def _parser(command: Command, hints: Mapping[str, Any]) -> argparse.ArgumentParser:
    needed = [f.name for f in flags_of(command.options) if f.default is MISSING]
    words = [shown if name in needed else f"[{shown}]" for name, shown in command.positionals.items()]
    usage = " ".join(["brimful", command.name, *words])
    usage += "".join(f" {flag(name)} {_shown_as(name)}" for name in needed if name not in command.positionals)
    parser = _Parser(
        prog=f"brimful {command.name}",
        usage=f"{usage} [options]",
        description=command.summary,
        epilog=f"example: {command.example}",
        formatter_class=_Help,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    texts = help_texts(command.options)
    positionals = parser.add_argument_group("arguments") if command.positionals else parser
    group = parser.add_argument_group("options")
    for option in flags_of(command.options):
        name, hint, text = option.name, hints[option.name], texts[option.name].replace("%", "%%")
        if name in command.positionals:
            several = "*" if get_origin(hint) is tuple else "?"
            positionals.add_argument(name, metavar=command.positionals[name], nargs=several, help=text)
            continue
        if name in command.groups:
            group = parser.add_argument_group(command.groups[name])
        if not any(option.default is nothing for nothing in (MISSING, None, False)):
            text += f" (default: {option.default})"
        if bool in _kinds(hint):
            group.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=text)
        else:
            flags = [*([command.short[name]] if name in command.short else []), flag(name)]
            group.add_argument(*flags, dest=name, metavar=_shown_as(name, hint), help=text)
    group.add_argument("--config", metavar="FILE", help=_CONFIG_HELP)
    group.add_argument("-h", "--help", action="help", help="Show this help, and stop.")
    return parser


def _quoted(words: Sequence[str], left: Sequence[str]) -> str:
    """A flag with the value that words left over probably belong to, in quotes; "" where they follow none."""
    place = words.index(left[0]) if left[0] in words else 0
    if place < 2 or not words[place - 2].startswith("--") or words[place - 1].startswith("-"):
        return ""
    value = " ".join([words[place - 1], *itertools.takewhile(lambda word: word in left, words[place:])])
    return f", as in {words[place - 2]} {printable(shlex.quote(value), 200)}"


def _shown_as(name: str, hint: Any = str) -> str:
    if get_origin(hint) is Literal:
        return "{" + ",".join(get_args(hint)) + "}"
    kinds = _kinds(hint)
    if str not in kinds:
        return "N" if int in kinds else "X"
    return _SHOWN_AS.get(name, name.rpartition("_")[2].upper())


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types that a field takes, apart from None."""
    return tuple(kind for kind in get_args(hint) or (hint,) if kind is not type(None))


def _value(name: str, hint: Any, given: object) -> object:
    """Convert text or a value of a file to the field's type. The dataclass checks the rest."""
    if get_origin(hint) is Literal:
        return "off" if given is False else given  # YAML reads `off` as false
    if get_origin(hint) is tuple:
        return tuple(map(str, given)) if isinstance(given, list | tuple) else given
    (kind,) = _kinds(hint)
    if given == "auto" and name in map(flag, CAN_BE_AUTO):
        return None
    if kind is str and isinstance(given, int | float) and not isinstance(given, bool):
        return str(given)
    if kind is str or not isinstance(given, str):
        return given
    try:
        return kind(given) if kind is not bool else {"true": True, "false": False}[given.lower()]
    except (ValueError, KeyError):
        number = _EXAMPLES.get(name, 8)
        examples = {int: f"as in {name} {number}", float: f"as in {name} 0.5", bool: f"{name} alone says true"}
        if name == "--learning-rate":
            examples[float] = f"as in {name} 2e-5"
        said = f"{name} is '{printable(given)}': it must be {_KINDS[kind]}"
        raise OptionError(said, hint=examples[kind]) from None
