"""Real runs of the command line on a tiny model, each in a fork of a warm process, and what they leave behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tiny import FAMILIES, VOCABULARY

DRIVER = Path(__file__).with_name("engine") / "training" / "kill_driver.py"
#: Words of the tiny models' vocabulary; the last one is in no text unless a test puts it there.
WORDS = [f"w{number}" for number in range(5, VOCABULARY)]
POISON = WORDS.pop()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, in BERT's frame."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, POISON]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def save_tiny_model(folder: Path, *, family: str = "bert", dropout: float = 0.1, **settings: Any) -> Path:
    """A tiny base model, without a classification head, and its tokenizer."""
    model = FAMILIES[family].model(dropout=dropout, **settings)
    model.base_model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def texts(number: int, seed: int = 0, longest: int = 40) -> list[str]:
    """Texts of very different lengths."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=1 + int(longest * draw.random() ** 2))) for _ in range(number)]


def label_of(text: str) -> str:
    """Something that a tiny model can learn: which third of the vocabulary the first word is from."""
    return ("low", "middle", "high")[3 * WORDS.index(text.split()[0]) // len(WORDS)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def single_label_rows(number: int, seed: int = 0) -> list[dict[str, Any]]:
    return [{"text": text, "label": label_of(text)} for text in texts(number, seed)]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of one run of the command line.

    code: negative for a signal. peak_bytes: the most memory that it had. said: stdout and stderr together.
    """

    code: int
    seconds: float
    peak_bytes: int
    said: str


@dataclass
class Runner:
    """Runs command lines in forks of one warm process."""

    folder: Path
    process: subprocess.Popen[str] = field(init=False)
    number: int = 0

    def __post_init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVER), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def __call__(self, arguments: list[str], plan: str = "", **request: Any) -> Ended:
        """One command line to its end; see `kill_driver.py` for plans. kill_after_s: SIGKILL from outside."""
        self.number += 1
        log = self.folder / f"run-{self.number}.log"
        log.touch()  # a kill may come before it is opened
        line = json.dumps({"arguments": arguments, "plan": plan, "log": str(log), **request})
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        said = log.read_text("utf-8", "replace")
        assert not answer["timed_out"], said
        return Ended(code=answer["code"], seconds=answer["seconds"], peak_bytes=answer["peak_bytes"], said=said)

    def warm(self, arguments: list[str]) -> Ended:
        """A run whose imports later ones find done."""
        return self(arguments, modules=str(self.folder / "modules.txt"))

    def close(self) -> None:
        assert self.process.stdin is not None
        with self.process:
            self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            self.process.kill()  # whatever holds its input open


@contextlib.contextmanager
def open_runner(folder: Path) -> Iterator[Runner]:
    runner = Runner(folder)
    try:
        yield runner
    finally:
        runner.close()


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """The events of a run, all or those of some kinds. Every line must be whole."""
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text("utf-8").splitlines()]
    return [event for event in found if not kinds or event["kind"] in kinds]


def learned(folder: Path) -> dict[str, Any]:
    """Everything that two runs have in common, bit for bit, if they learned the same."""
    record = json.loads((folder / "run.json").read_text("utf-8"))
    steps = [(e["step"], e["loss"], e["learning_rate"], e["grad_norm"]) for e in events(folder, "step")]
    return {
        "status": record["status"],
        "weights": sha256(folder / "model" / "model.safetensors"),
        "metrics": record["metrics"],
        "steps": record["steps"],
        "skipped_steps": record["skipped_steps"],
        "told": steps,
        "evaluated": [(e["step"], e["metrics"]) for e in events(folder, "evaluated")],
        "skipped": [{k: v for k, v in e.items() if k != "kind"} for e in events(folder, "skipped", "overflow")],
    }


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(folder: Path) -> dict[str, tuple[int, str]]:
    """Time of change and SHA-256 of every file but the lock."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, sha256(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def checkpoints(folder: Path) -> list[int]:
    """Steps of the folders under checkpoints/ that have a manifest."""
    return sorted(int(path.parent.name[5:]) for path in (folder / "checkpoints").glob("step-*/manifest.json"))
