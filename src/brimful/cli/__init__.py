"""The command line: arguments to a call of the API, errors to one line and an exit code."""

from brimful.cli.commands import main

__all__ = ["main"]
