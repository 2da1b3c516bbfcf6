"""Runs on a GPU against plain Hugging Face models in fp32, without dropout: gradients of whole runs, and answers.

Every way to run: eager, captured, compiled, split, padded; and every way that inputs are staged: single texts, pairs,
zero-shot, positions from 2 on, heads that read the last token.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

import brimful
from brimful.core.callbacks import Callbacks
from gpu.sized_models import plain_classifier, plain_inputs, save_sized_classifier
from tiny_files import BAD, GOOD, OTHER, write_csv
from tolerances import difference

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LABELS = ["bad", "fair", "good"]
#: Full-batch steps: a budget is captured when it is met again, and the steps after that are replays.
STEPS, LEARNING_RATE = 5, 0.005
#: Largest difference of what was learned, of all weights together, and of logits; norms over norms.
LEARNED, LOGITS = 1e-4, 1e-4
HOW: dict[str, dict[str, Any]] = {
    "eager": {"execution": "eager"},
    "captured": {"execution": "captured"},
    "compiled": {"execution": "compiled"},
    "split": {"execution": "captured", "token_budget": 512},
    "padded": {"packing": "off"},
}
FAMILIES = ["bert", "roberta", "modernbert", "mpnet", "deberta-v2", "llama", "gpt2"]


def texts(number: int, longest: int = 90) -> list[str]:
    draw = random.Random(number)
    return [" ".join(draw.choices(GOOD + BAD + OTHER, k=draw.randint(1, longest))) for _ in range(number)]


def learned_by_plain(model: Path, rows: list[tuple[Any, ...]], *, paired: bool) -> torch.Tensor:
    """Difference of all weights that SGD on the whole batch makes, with torch's own loss."""
    plain = plain_classifier(model, DEVICE).train()
    inputs = plain_inputs(model, plain, [row[0] for row in rows], [row[1] for row in rows] if paired else None)
    targets = torch.tensor([LABELS.index(row[-1]) for row in rows], device=DEVICE)
    before = [p.detach().clone() for p in plain.parameters()]
    optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(plain(**inputs).logits, targets).backward()
        optimizer.step()
    return torch.cat([(p.detach() - q).flatten() for p, q in zip(plain.parameters(), before, strict=True)]).cpu()


def learned_by_brimful(
    model: Path, rows: list[tuple[Any, ...]], folder: Path, *, paired: bool, **how: Any
) -> tuple[torch.Tensor, brimful.Run]:
    header = ("text", "text_pair", "label") if paired else ("text", "label")
    run = brimful.train(
        write_csv(folder / "d.csv", header, rows),
        model=model,
        output=folder / "run",
        callbacks=Callbacks(),
        device=DEVICE,
        precision="fp32",
        optim="sgd",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_steps=STEPS,
        batch_size=len(rows),
        eval_split=0.0,
        max_length=256,
        **how,
    )
    before, after = (plain_classifier(path, "cpu") for path in (model, folder / "run" / "model"))
    moved = [(q - p).detach().flatten() for p, q in zip(before.parameters(), after.parameters(), strict=True)]
    return torch.cat(moved), run


@pytest.mark.parametrize(
    ("family", "how", "paired"),
    [
        *((family, how, False) for family in ("bert", "llama") for how in HOW),
        *((family, "captured", False) for family in FAMILIES if family not in ("bert", "llama")),
        ("bert", "captured", True),
        ("bert", "compiled", True),
        ("roberta", "compiled", False),
        ("roberta", "captured", True),
    ],
)
def test_what_is_learned_is_what_plain_steps_learn(family: str, how: str, paired: bool, tmp_path: Path) -> None:
    model = save_sized_classifier(tmp_path / "model", family, LABELS)
    firsts, seconds = texts(40), texts(41, longest=60)[:40]
    rows: list[tuple[Any, ...]] = [
        (first, *([second] if paired else []), LABELS[i % 3])
        for i, (first, second) in enumerate(zip(firsts, seconds, strict=True))
    ]
    found, run = learned_by_brimful(model, rows, tmp_path, paired=paired, **HOW[how])
    expected = learned_by_plain(model, rows, paired=paired)
    off = difference(found, expected)
    print(f"{family}, {how}{', pairs' if paired else ''}: {off:.1e}, {run.compilations.captured} graphs")
    assert off < LEARNED
    assert run.packed == (how != "padded"), run.packed_reason
    if how in ("captured", "compiled", "split"):
        assert run.compilations.captured > 0


@pytest.mark.parametrize("execution", ["captured", "compiled"])
@pytest.mark.parametrize(("family", "paired"), [*((family, False) for family in FAMILIES), ("bert", True)])
def test_logits_are_those_of_the_plain_model(family: str, paired: bool, execution: Any, tmp_path: Path) -> None:
    """Of windows long enough to be captured, the second time replayed."""
    model = save_sized_classifier(tmp_path, family, LABELS)
    given = texts(700)
    pairs = texts(701, longest=60)[:700] if paired else None
    plain = plain_classifier(model, DEVICE).eval()
    with torch.no_grad():
        parts = [slice(start, start + 100) for start in range(0, 700, 100)]
        expected = torch.cat(
            [plain(**plain_inputs(model, plain, given[p], None if pairs is None else pairs[p])).logits for p in parts]
        ).cpu()
    options: dict[str, Any] = {"precision": "fp32", "device": DEVICE, "max_length": 256}
    with brimful.Classifier(model, execution=execution, token_budget=4096, **options) as classifier:
        for _ in range(3):
            found = classifier.logits(given, pairs=pairs)
            assert difference(torch.from_numpy(found), expected) < LOGITS
        assert classifier.recipe is not None
        assert classifier.recipe.value("packing") == "packed"


@pytest.mark.parametrize("family", ["bert", "roberta", "llama"])
@pytest.mark.parametrize("multi_label", [False, True])
def test_zero_shot_answers_are_those_of_the_pipeline(family: str, multi_label: bool, tmp_path: Path) -> None:
    labels = ["contradiction", "neutral", "entailment"]
    model = save_sized_classifier(tmp_path, family, labels, initializer_range=0.1)
    given, candidates = texts(60, longest=40), ["good", "bad", "long story"]
    template = "it felt {} ."
    plain = transformers.pipeline("zero-shot-classification", model=str(model), device=DEVICE)
    plain.model.set_attn_implementation("eager")
    expected = plain(given, candidates, multi_label=multi_label, hypothesis_template=template)
    with brimful.Classifier(model, precision="fp32", device=DEVICE, max_length=256) as classifier:
        for _ in range(3):
            found = classifier(given, labels=candidates, multi_label=multi_label, hypothesis_template=template)
            _same_ranking(found, expected)


def _same_ranking(found: Any, expected: Any) -> None:
    """The same scores by label; labels in another order only where their scores are nearly equal."""
    for one, other in zip(found, expected, strict=True):
        assert one["sequence"] == other["sequence"]
        scores = dict(zip(other["labels"], other["scores"], strict=True))
        assert dict(zip(one["labels"], one["scores"], strict=True)) == pytest.approx(scores, abs=LOGITS)
        assert list(one["scores"]) == sorted(one["scores"], reverse=True)


def test_pairs_are_answered_as_by_the_pipeline(tmp_path: Path) -> None:
    model = save_sized_classifier(tmp_path, "bert", LABELS)
    pairs = [{"text": a, "text_pair": b} for a, b in zip(texts(80), texts(81, longest=60)[:80], strict=True)]
    plain = transformers.pipeline("text-classification", model=str(model), device=DEVICE)
    expected = plain(pairs, top_k=None)
    with brimful.Classifier(model, precision="fp32", device=DEVICE, max_length=256) as classifier:
        for _ in range(3):
            found = classifier(pairs, top_k=None)
            for one, other in zip(found, expected, strict=True):
                scores = {each["label"]: each["score"] for each in other}
                assert {each["label"]: each["score"] for each in one} == pytest.approx(scores, abs=LOGITS)


def test_metrics_of_many_labels_are_those_of_all_logits(tmp_path: Path) -> None:
    """An evaluation in windows, whose logits are not kept, against scikit-learn on those of the saved model."""
    from sklearn.metrics import f1_score

    labels = [f"l{i:03}" for i in range(300)]
    rows = [(text, labels[i % 300]) for i, text in enumerate(texts(1500, longest=30))]
    data = write_csv(tmp_path / "d.csv", ("text", "label"), rows)
    model = save_sized_classifier(tmp_path / "model", "bert", labels)
    run = brimful.train(
        data, model=model, output=tmp_path / "run", eval_data=str(data), max_steps=3, precision="fp32", device=DEVICE,
        callbacks=Callbacks(), max_length=256,
    )  # fmt: skip
    with brimful.Classifier(tmp_path / "run" / "model", precision="fp32", device=DEVICE) as classifier:
        predicted = classifier.logits([text for text, _ in rows]).argmax(-1)
        names = np.array(classifier.labels.names)
    truth = np.array([label for _, label in rows])
    expected = f1_score(truth, names[predicted], average="weighted", zero_division=0)
    assert run.metrics["f1_weighted"] == pytest.approx(expected, abs=2e-3)  # near-ties may fall either way
    assert run.metrics["accuracy"] == pytest.approx((truth == names[predicted]).mean(), abs=2e-3)
