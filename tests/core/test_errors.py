"""The tree of errors: exit codes, messages of one line, hints."""

from __future__ import annotations

import pickle
import traceback
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brimful.core import errors
from brimful.core.errors import (
    BrimfulError,
    CheckpointError,
    DataError,
    DeviceError,
    DiskFullError,
    InputError,
    Interrupted,
    ModelError,
    NonFiniteError,
    OptionError,
    OutputError,
    printable,
)


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [
        *((kind, 2) for kind in (InputError, OptionError, DataError, ModelError, OutputError, DeviceError)),
        (NonFiniteError, 3),
        (DiskFullError, 4),
        (CheckpointError, 5),
    ],
)
def test_exit_codes_are_those_of_the_tree(kind: type[BrimfulError], exit_code: int) -> None:
    error = kind("what happened", hint="what to do")
    assert error.exit_code == exit_code
    assert isinstance(error, InputError) == (exit_code == 2)
    assert (str(error), error.hint) == ("what happened", "what to do")
    assert kind("what happened").hint is None
    assert traceback.format_exception(error)[-1] == "hint: what to do\n"


@pytest.mark.parametrize(("signal_number", "exit_code"), [(2, 130), (15, 143)])
def test_interrupted_exits_as_a_shell_expects(signal_number: int, exit_code: int) -> None:
    error = Interrupted("stopped", signal_number=signal_number)
    assert error.exit_code == exit_code
    assert isinstance(error, KeyboardInterrupt)
    assert not isinstance(error, Exception)  # which a loop over trainings may catch


def test_every_error_is_in_the_drawn_tree() -> None:
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, BrimfulError)}
    assert all(name in str(errors.__doc__) for name in kinds)
    assert len(kinds) == 16
    assert Interrupted.__name__ in str(errors.__doc__)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({}, "no label"),
        ({"file": "a.csv"}, "a.csv: no label"),
        ({"row": 0}, "row 0: no label"),
        ({"file": "a.csv", "row": 7}, "a.csv, row 7: no label"),
        ({"file": "a\nb.csv", "row": 7}, "a\\nb.csv, row 7: no label"),
        ({"file": "a.csv", "row": 7, "value": "x"}, "a.csv, row 7: no label: 'x'"),
        ({"value": 0}, "no label: '0'"),
        ({"value": ""}, "no label: ''"),
    ],
)
def test_a_data_error_says_where(named: dict[str, object], said: str) -> None:
    error = DataError("no label", **named)  # type: ignore[arg-type]
    assert str(error) == said
    assert (error.file, error.row, error.value) == (named.get("file"), named.get("row"), named.get("value"))


def test_errors_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(DataError("no label", file="a.csv", row=7, value="x", hint="add one")))
    assert str(error) == "a.csv, row 7: no label: 'x'"
    assert (error.file, error.row, error.value, error.hint) == ("a.csv", 7, "x", "add one")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢字 🙂", "plain é 漢字 🙂"),
        ("a\tb\r\nc\x00", "a\\tb\\r\\nc\\x00"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\u202eright to left", "\\u202eright to left"),
        ("half a pair \ud83d", "half a pair \\ud83d"),
        (7, "7"),
        (None, "None"),
    ],
)
def test_printable(text: object, shown: str) -> None:
    assert printable(text) == shown


def test_printable_is_cut() -> None:
    assert printable("x" * 120) == "x" * 120
    assert printable("x" * 121) == "x" * 119 + "…"
    assert printable("abcdef", 3) == "ab…"


@given(st.text(st.characters(exclude_categories=())), st.integers(1, 50))
def test_printable_of_any_text(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert len(shown) <= limit
    assert all(unicodedata.category(c)[0] != "C" for c in shown)
    shown.encode("utf-8")
