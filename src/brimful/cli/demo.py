"""The demonstration: `brimful train` and `brimful classify` whole, on a real model and real text, without a network.

Model and text come from Python packages (the `demo` extra): all-MiniLM-L6-v2, a base model of 22.7 M parameters without
a classification head, and BBC News, 2,225 articles in five classes.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from brimful.api import Classifier, run_training
from brimful.core.atomic_files import make_folder, write_bytes
from brimful.core.callbacks import Callbacks
from brimful.core.command_line import command_of
from brimful.core.errors import Interrupted, OptionError
from brimful.core.options.demo import DemoOptions
from brimful.core.options.train import TrainOptions
from brimful.core.records import Run
from brimful.data.readers.packaged import bbc_news, minilm

#: Sentences nobody trained on, to see the model at work.
_EXAMPLES = (
    "The central bank raised interest rates again as inflation stayed above its target.",
    "The striker scored twice in the second half and sent her team to the final.",
    "The new phone ships with a faster processor and a larger battery.",
    "Voters go to the polls on Thursday after a campaign about schools and taxes.",
    "The film won three awards, best director among them.",
)


def run_demo(options: DemoOptions, callbacks: Callbacks) -> Run:
    """Writes BBC News as JSONL, fine-tunes MiniLM on it, and classifies a few sentences with the result.

    Raises: InputError if the packages with model and text are not installed; what training raises.
    """
    folder = _free_name(Path(options.output))
    data = folder / "bbc-news.jsonl"
    asked = TrainOptions(
        data=str(data),
        model=str(minilm()),
        output=str(folder / "run"),
        num_train_epochs=options.num_train_epochs,
        max_length=options.max_length,
        learning_rate=2e-4,
        warmup_ratio=0.1,
        batch_size=32,
        seed=options.seed,
    )
    articles = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in bbc_news())
    make_folder(folder)
    write_bytes(data, articles.encode())
    callbacks.stage(f"BBC News is now in {data}. What runs is this command:")
    callbacks.note(command_of("train", asked))
    try:
        run = run_training(asked, callbacks)
    except Interrupted as stopped:
        stopped.hint = f"go on with {command_of('train', asked)} --resume"
        raise
    callbacks.stage("Sentences that nobody trained on, each with its label and how sure the model is:")
    with Classifier(folder / "run" / "model") as classifier:
        for text, answer in zip(_EXAMPLES, classifier(_EXAMPLES), strict=True):
            callbacks.note(f"{answer['label']:<13}  {answer['score']:.2f}  {text}")
    return run


def _free_name(wanted: Path) -> Path:
    """`wanted`, or `wanted-2`, `wanted-3`, ... if it is taken."""
    if not wanted.name:
        raise OptionError(f"--output {wanted} is no name for a new folder", hint="leave it out, or give a new name")
    names = (wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(1))
    return next(path for path in names if not path.exists())
