"""Every head that transformers has: a walk with a tiny classifier of each type, and the table of what was found.

python tests/heads/run_heads.py                          all of them; exit code 1 if anything is wrong
python tests/heads/run_heads.py bert t5                  these
python tests/heads/run_heads.py --write RESULTS.jsonl    all of them; the results, and docs/reference/models.md
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TABLE = ROOT / "docs" / "reference" / "models.md"
sys.path[:0] = [str(HERE), str(HERE.parent)]


def prepare() -> None:
    """Set a process up as the tests are: offline, quiet, on one thread."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    import warnings

    import torch
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def walk_one(model_type: str) -> dict[str, Any]:
    """Return the fields of `Walked` for a model of this type."""
    from walk import walk

    with tempfile.TemporaryDirectory(prefix="brimful-head-") as folder:
        return dataclasses.asdict(walk(model_type, Path(folder)))


def walk_all(model_types: Sequence[str], jobs: int) -> Iterator[dict[str, Any]]:
    """Yield what each walk found, in order, from `jobs` processes with one cache folder that is new."""
    with tempfile.TemporaryDirectory(prefix="brimful-heads-cache-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        with multiprocessing.get_context("spawn").Pool(jobs, prepare) as pool:
            yield from pool.imap(walk_one, model_types)


def line(found: dict[str, Any]) -> str:
    """One walk on a line of the terminal."""
    errors = " ".join("   -   " if found[f"{n}_error"] is None else f"{found[f'{n}_error']:.1e}" for n in _ERRORS)
    verdict = "FAILED" if found["failure"] else found["verdict"]
    said = found["failure"] or found["reason"]
    return f"{found['model_type']:22s} {verdict:8s} {errors} {found['seconds']:5.1f} s  {said}"


_ERRORS = ("gradient", "loss", "answer")


def reason(found: dict[str, Any]) -> str:
    """Why a model does not run packed, as the table has it: without measured numbers, which differ by machine."""
    if found["verdict"] == "packed":
        return ""
    return re.sub(r" by \d\S*$", "", found["reason"]).replace("FOLDER/model: ", "").replace("|", "\\|")


def rows(results: Sequence[dict[str, Any]]) -> list[str]:
    """Rows of the table in Markdown."""
    return [f"| {r['model_type']} | {r['verdict']} | {reason(r)} |" for r in results]


def table(results: Sequence[dict[str, Any]], version: str) -> str:
    """The page docs/reference/models.md."""
    from walk import GRADIENT, LOGITS, LOSS

    counts = {verdict: sum(r["verdict"] == verdict for r in results) for verdict in ("packed", "padded", "refused")}
    slow = [r["model_type"] for r in results if _has_slow_tokenizer(r["model_type"])]
    page = _PAGE.format(
        version=version, total=len(results), **counts, slow=", ".join(slow),
        gradient=_most(results, "gradient"), loss=_most(results, "loss"), answer=_most(results, "answer"),
        allowed=f"{GRADIENT:.0e}, {LOSS:.0e} and {LOGITS:.0e}",
    )  # fmt: skip
    paragraphs = [each if each[0] in "#-|" else textwrap.fill(each, 120) for each in page.strip().split("\n\n")]
    return "\n\n".join(paragraphs) + "\n" + "\n".join(rows(results)) + "\n"


def _has_slow_tokenizer(model_type: str) -> bool:
    """True if transformers has a tokenizer class for the type, and it is written in Python."""
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    name = TOKENIZER_MAPPING_NAMES.get(model_type)
    return name is not None and not issubclass(getattr(transformers, name), transformers.PreTrainedTokenizerFast)


def _most(results: Sequence[dict[str, Any]], name: str) -> str:
    return f"{max(r[f'{name}_error'] or 0.0 for r in results):.0e}"


_PAGE = """\
# Models: all heads of transformers

All {total} model types that `AutoModelForSequenceClassification` of transformers {version} knows: {packed} run packed,
{padded} padded, {refused} are refused. `make heads` makes a tiny model of each from its configuration, and checks it in
fp32 on a CPU, with texts and with pairs, beside plain Hugging Face with eager attention: the gradient of the first
batch, ten steps of `brimful train`, and the answers of the saved model, loaded by transformers and by `Classifier`. The
largest differences of any type are {gradient} (gradient), {loss} (losses) and {answer} (logits); {allowed} are allowed.

- **packed**: no padding is computed. The equivalence check decides that on your own model, so a model with other
  settings may run otherwise: [exactness](../concepts/exactness.md).
- **padded**: rows of similar length, with the same gradient and answers. Where a row's result depends on the others
  or on padding, a training batch is one micro-batch padded as Hugging Face's collator pads it, and texts are answered
  one by one, or those of one length together where each has the answer then that it has alone.
- **refused**: one line says why, before anything is trained.

The tokenizer needs a fast form (`tokenizer.json`). transformers has none for {slow}: checkpoints of these types are
refused until one is saved beside them.

| model type | runs | why not packed |
|---|---|---|
"""


def main() -> int:
    """Walk, print and write; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--write", type=Path, help="file for the results, a line of JSON each; writes the page too")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    asked = parser.parse_args()
    prepare()
    import transformers
    from tiny_heads import MODEL_TYPES

    results = []
    for found in walk_all(asked.types or MODEL_TYPES, asked.jobs):
        print(line(found), flush=True)
        results.append(found)
    if asked.write is not None:
        asked.write.parent.mkdir(parents=True, exist_ok=True)
        asked.write.write_text("".join(json.dumps(found) + "\n" for found in results), "utf-8")
        if not asked.types:
            TABLE.write_text(table(results, transformers.__version__), "utf-8")
    wrong = [found["model_type"] for found in results if found["failure"]]
    print(f"{len(results)} types, {len(wrong)} of them wrong" + ": " * bool(wrong) + ", ".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
