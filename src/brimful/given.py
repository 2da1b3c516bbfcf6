"""Arguments of Python calls: data in memory under names that options can have, and callbacks where none are given."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from brimful.core.callbacks import Callbacks, PythonWarnings
from brimful.core.errors import OptionError
from brimful.core.options.classify import ClassifyOptions
from brimful.core.options.evaluate import EvaluateOptions
from brimful.data.column_names import PAIR_COLUMNS
from brimful.data.readers.in_memory import InMemory, Tables, in_memory, is_in_memory, splits_of
from brimful.reports.terminal import Terminal

#: Anything that rows can be read from.
Data = Any
#: Options of a call that classifies rows.
Classifying = TypeVar("Classifying", ClassifyOptions, EvaluateOptions)


class Given:
    """Data of one call. names: what options are to have for each; tables: those that are in memory, by these names."""

    def __init__(self) -> None:
        self.tables: dict[str, Any] = {}
        self.first: InMemory | None = None

    def name(self, data: Data, labels: Any = None, *, role: str = "") -> Any:
        """The name that options have for `data`. role: added to it, where another has the same.

        Raises: OptionError for labels beside a file.
        """
        if not is_in_memory(data):
            if labels is not None:
                raise OptionError("labels go with a list of texts", hint="of a file, name the column: label_column")
            return os.fspath(data) if isinstance(data, os.PathLike) else data
        found = in_memory(data, labels)
        name = f"{found.name} ({role})" if role else found.name
        self.tables[name] = found.table
        self.first = self.first or found
        return name


def as_pairs(options: Classifying, given: InMemory | None) -> Classifying:
    """Options that read the pairs of a list, of tuples or of `text` with `text_pair`, where they name no columns."""
    text, pair = PAIR_COLUMNS
    if given is None or given.kind != "list":
        return options
    has_pairs = {text, pair}.issubset(given.table.column_names)
    is_named = options.text_column is not None or options.pair_column is not None
    is_zero_shot = isinstance(options, ClassifyOptions) and options.labels is not None
    return replace(options, pair_column=pair) if has_pairs and not (is_named or is_zero_shot) else options


def training_data(data: Data, labels: Any, eval_data: Data) -> tuple[Any, Any, Tables]:
    """Names of the data to train and to evaluate on, and the tables behind them."""
    given = Given()
    data, held_out = splits_of(data)
    eval_data = held_out if eval_data is None else eval_data
    name = given.name(data, labels)
    return name, None if eval_data is None else given.name(eval_data, role="eval_data"), given.tables


def is_watched() -> bool:
    """True in a notebook, and where stderr is a terminal."""
    return is_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def is_notebook() -> bool:
    """True in a process that a notebook talks to."""
    shell = sys.modules.get("IPython")
    return "ipykernel" in sys.modules and shell is not None and shell.get_ipython() is not None


@contextmanager
def listening(callbacks: Callbacks | None, progress: bool | None) -> Iterator[Callbacks]:
    """The callbacks that were given, else a terminal where `progress` is wanted, else warnings alone.

    progress: None for True where a person watches.
    """
    if callbacks is not None:
        yield callbacks
    elif is_watched() if progress is None else progress:
        with closing(Terminal(in_notebook=is_notebook())) as terminal:
            yield terminal
    else:
        yield PythonWarnings()
