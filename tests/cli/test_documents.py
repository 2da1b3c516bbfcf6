"""Documents and help say what is there: each flag has help, each command and flag that a document names exists."""

from __future__ import annotations

import dataclasses
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import brimful as package
from brimful.cli.flags import help_texts, parse_options
from brimful.core.errors import OptionError
from brimful.core.options.bench import BenchOptions
from brimful.core.options.checks import flag
from brimful.core.options.classify import ClassifyOptions
from brimful.core.options.compare import CompareOptions
from brimful.core.options.demo import DemoOptions
from brimful.core.options.evaluate import EvaluateOptions
from brimful.core.options.export import ExportOptions
from brimful.core.options.profile import ProfileOptions, flags_of
from brimful.core.options.report import ReportOptions
from brimful.core.options.train import TrainOptions
from commands import Brimful

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Documents whose links are followed: those of the benchmarks too, whose flags are those of their scripts.
LINKED = [*DOCUMENTS, ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").rglob("*.md"))]
COMMANDS: dict[str, tuple[type[Any], Any]] = {
    "train": (TrainOptions, partial(parse_options, "train")),
    "classify": (ClassifyOptions, partial(parse_options, "classify")),
    "evaluate": (EvaluateOptions, partial(parse_options, "evaluate")),
    "export": (ExportOptions, partial(parse_options, "export")),
    "report": (ReportOptions, partial(parse_options, "report")),
    "compare": (CompareOptions, partial(parse_options, "compare")),
    "profile": (ProfileOptions, partial(parse_options, "profile")),
    "bench": (BenchOptions, partial(parse_options, "bench")),
    "demo": (DemoOptions, partial(parse_options, "demo")),
}
#: Flags of other programs that documents name.
FOREIGN = {
    "--array",
    "--gpus-per-task",
    "--ntasks",
    "--wrap",
    "--nproc-per-node",
    "--requeue",
    "--kill-on-bad-exit",
    "--signal",
    "--ntasks-per-node",
    "--gpus-per-node",
    "--cpus-per-task",
    "--nodes",
    "--nnodes",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--multi",
    "--num",
    "--strict",
    "--hypothesis-profile",
    "--help",
    "--version",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_help(command: str, brimful: Brimful, capsys: pytest.CaptureFixture[str]) -> None:
    options, _ = COMMANDS[command]
    texts = help_texts(options)
    with pytest.raises(SystemExit) as ended:
        brimful(command, "--help")
    assert ended.value.code == 0
    shown = " ".join(" ".join(part.split()) for part in _help_of(command).split("\n"))
    for field in flags_of(options):
        assert texts[field.name].endswith("."), field.name
        assert texts[field.name] in shown, field.name
        positional = command in ("evaluate", "bench") and field.name == "data"
        assert flag(field.name) in shown or field.default is dataclasses.MISSING or positional
    assert "--config" in shown


def _help_of(command: str) -> str:
    import contextlib
    import io

    from brimful.cli.commands import run

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        run([command, "--help"])
    return out.getvalue()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_fits_in_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = _help_of(command).splitlines()
    choices = [line for line in lines if "{" in line]
    assert all(len(line) <= 80 for line in lines if line not in choices)


def documents_with_code() -> list[tuple[Path, str]]:
    """Each command line of ours in a document, from fenced blocks and from inline code."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        blocks = "\n".join(re.findall(r"^```[a-z]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).replace("\\\n", "")
        found += [(path, line) for line in re.findall(r"^(?:\$ )?(brimful .*)$", blocks, re.MULTILINE)]
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        found += [(path, code) for code in re.findall(r"`(brimful [^`]+)`", prose)]
    return found


def test_documents_show_commands() -> None:
    assert {command.split()[1] for _, command in documents_with_code()} >= set(COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "line"), documents_with_code(), ids=lambda part: str(part)[-60:])
def test_commands_in_documents_can_be_run(
    path: Path, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words of a full command are taken as they stand; where some are left out, those there exist."""
    monkeypatch.chdir(tmp_path)
    for name, content in re.findall(r"^```toml\n# (\S+)\n(.*?)^```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(content, encoding="utf-8")
    words = shlex.split(line.split("   ")[0], comments=True)
    command, rest = words[1], [word for word in words[2:] if word != "..."]
    assert command in COMMANDS, f"{path}: {line}"
    if "--help" in rest:
        return
    if command != "train" or "--config" in rest or {"--model", "--output"} <= set(rest):
        COMMANDS[command][1](rest)
    else:
        with pytest.raises(OptionError, match="needs"):
            COMMANDS[command][1](rest)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_flags_in_documents_exist(path: Path) -> None:
    fields = [field for options, _ in COMMANDS.values() for field in dataclasses.fields(options)]
    known = {flag(field.name) for field in fields}
    known |= {f"--no-{flag(field.name)[2:]}" for field in fields if "bool" in str(field.type)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+[a-z0-9]", path.read_text(encoding="utf-8")))
    assert named <= known | {"--config"} | FOREIGN


@pytest.mark.slow
@pytest.mark.parametrize("path", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_documents_lead_somewhere(path: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", path.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        target = path.parent / link if link else path
        assert target.exists(), f"{path}: {link}"
        assert not anchor or anchor in anchors(target), f"{path}: {link}#{anchor}"


def anchors(document: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_make_targets_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for path in DOCUMENTS:
        code = " ".join(re.findall(r"`+[^`]+`+", path.read_text(encoding="utf-8")))
        assert set(re.findall(r"\bmake ([a-z]+)", code)) <= targets, path


def test_python_in_the_readme_calls_what_there_is() -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert blocks
    options = {field.name for field in dataclasses.fields(TrainOptions)} | {"callbacks"}
    for block in blocks:
        compile(block, "README.md", "exec")
        assert set(re.findall(r"brimful\.([a-zA-Z_]+)", block)) <= set(package.__all__)
        assert set(re.findall(r"\b([a-z_]+)=", block)) <= options
