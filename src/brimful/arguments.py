"""Words of a command line to options: the flags of each command, made from the fields of its dataclass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from brimful.configuration import with_configuration
from brimful.core.options import ClassifyOptions, DemoOptions, TrainOptions


@dataclass(frozen=True, kw_only=True)
class _Train(TrainOptions):
    data: tyro.conf.Positional[str]


@dataclass(frozen=True, kw_only=True)
class _Classify(ClassifyOptions):
    model: tyro.conf.Positional[str]
    data: tyro.conf.Positional[str]


def train_options(words: Sequence[str]) -> TrainOptions:
    """Options of `brimful train`. Exits with code 2 for words that are none, and with 0 after --help.

    Raises: OptionError for a value that cannot be, or a configuration file that cannot be read.
    """
    return tyro.cli(
        _Train,
        prog="brimful train",
        description="Fine-tune a classifier. --config FILE gives the same options as TOML or YAML; flags override it.",
        args=with_configuration(words, TrainOptions),
    )


def classify_options(words: Sequence[str]) -> ClassifyOptions:
    """Options of `brimful classify`; otherwise as `train_options`."""
    return tyro.cli(
        _Classify, prog="brimful classify", description="Label a file of texts with a fine-tuned model.", args=words
    )


def demo_options(words: Sequence[str]) -> DemoOptions:
    """Options of `brimful demo`; otherwise as `train_options`."""
    return tyro.cli(DemoOptions, prog="brimful demo", description="Fine-tune MiniLM on BBC News.", args=words)
