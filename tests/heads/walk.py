"""A walk through brimful with one tiny classifier, beside plain Hugging Face: load, learn, save, reload, answer.

Plain is the model as transformers runs it, with eager attention in fp32: whole batches padded to their longest text to
learn, one text at a time to answer. A difference is the norm over the norm of what plain gives; gradients are compared
over all parameters together.
"""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from tiny_heads import LABELS, WORDS, has_weights, save_head
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import brimful
from tolerances import difference

#: Words of each text: one has more than any window, one is a single word.
LENGTHS = (5, 17, 44, 1, 2, 31, 9, 12)
#: The same for models that cannot run short texts.
LONG = (20, 17, 44, 23, 35, 31, 19, 26)
MAX_LENGTH = 100
NUM_STEPS = 10
LEARNING_RATE = 1e-3
#: Most that logits, gradients and losses of ten steps may differ in fp32.
LOGITS, GRADIENT, LOSS = 1e-4, 1e-4, 1e-3
#: The learning rate of the step whose update is the gradient: far above the weights, which round it off otherwise.
_LARGE = 1024.0

Verdict = Literal["packed", "padded", "refused", "failed"]
Text = str | tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Walked:
    """Outcome of one walk.

    reason: of the run's record, or the refusal with its hint. independent: batches may be split. gradient_error: the
    worse of texts and pairs. loss_error: the worst of ten steps. answer_error: of the saved model's logits, the worse
    of texts and pairs. failure: what was wrong; empty if nothing.
    """

    model_type: str
    verdict: Verdict
    reason: str
    gradient_error: float | None = None
    loss_error: float | None = None
    answer_error: float | None = None
    failure: str = ""
    seconds: float = 0.0


def walk(model_type: str, folder: Path) -> Walked:
    """Walk with a model of this type; `folder` is empty and stays behind with its files."""
    began = time.perf_counter()
    try:
        found = _walk(model_type, folder)
    except brimful.BrimfulError as refusal:
        said = f"{refusal}; hint: {refusal.hint}".replace(str(folder), "FOLDER")
        clear = refusal.hint is not None and "\n" not in said
        found = {"verdict": "refused", "reason": said, "failure": "" if clear else "a refusal without a hint"}
    except Exception as error:
        if "TRACE" in os.environ:
            raise
        said = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
        found = {"verdict": "failed", "reason": said, "failure": said}
    return Walked(model_type=model_type, seconds=round(time.perf_counter() - began, 2), **found)


def _walk(model_type: str, folder: Path) -> dict[str, Any]:
    model, run, note = str(save_head(folder / "model", model_type)), folder / "run", ""
    if not has_weights(folder / "model"):  # transformers cannot build it here
        brimful.Classifier(model, device="cpu")("a text")
        raise AssertionError("a model that transformers cannot build was taken")
    rows = _rows(LENGTHS)
    if (said := _plain_refusal(model, rows[0])) is not None:
        rows, note = _rows(LONG), f"transformers cannot run short texts: {said}"
        if _plain_refusal(model, rows[0]) is not None:
            _train(model, folder, rows[1])
            raise AssertionError("a model that transformers cannot run was trained")
        _require_refusal(model, ["a"])
    errors = {"gradient_error": max(_gradient_errors(model, rows))}
    trained = _train(model, folder, rows[1])
    losses = [event["loss"] for event in _events(run) if "loss" in event]
    errors["loss_error"] = difference(np.array(losses), np.array(_plain_losses(model, rows[1])))
    with brimful.Classifier(run / "model", device="cpu", precision="fp32", max_length=MAX_LENGTH) as classifier:
        errors["answer_error"] = max(_answer_error(classifier, str(run / "model"), each) for each in rows)
    limits = {"gradient_error": GRADIENT, "loss_error": LOSS, "answer_error": LOGITS}
    wrong = [f"{name} {errors[name]:.1e}" for name, most in limits.items() if not errors[name] <= most]
    return errors | {
        "verdict": "failed" if wrong else "packed" if trained.packed else "padded",
        "reason": note or trained.packed_reason,
        "failure": ", ".join(wrong),
    }


def _rows(lengths: Sequence[int]) -> tuple[list[Text], list[Text]]:
    """Texts, and pairs of texts, of so many words."""
    pairs = zip(_texts(lengths, seed=1), _texts(lengths[::-1], seed=2), strict=True)
    return list(_texts(lengths, seed=0)), list(pairs)


def _texts(lengths: Sequence[int], seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, size=length)) for length in lengths]


def _targets(rows: Sequence[Text]) -> Tensor:
    return torch.arange(len(rows)) % len(LABELS)


def _write(path: Path, pairs: Sequence[Text]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = [(*pair, LABELS[target]) for pair, target in zip(pairs, _targets(pairs), strict=True)]
        csv.writer(file).writerows([("text", "text_pair", "label"), *rows])


def _events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text("utf-8").splitlines()]


# --- plain Hugging Face ----------------------------------------------------------------------------------------------


def _plain(folder: str, *, alone: bool = False) -> tuple[Any, Any]:
    """Model and tokenizer as a user of transformers has them; without a padding token, the last special one is it.

    alone: for one text at a time, as the pipeline does by default: no token of the model is padding if it names none.
    """
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "left" if model.config.model_type == "xlnet" else "right"  # as XLNet's own tokenizer
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if not alone and getattr(model.config.get_text_config(), "pad_token_id", None) is None:
        model.config.pad_token_id = model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _encoded(tokenizer: Any, rows: Sequence[Text]) -> dict[str, Tensor]:
    return dict(tokenizer(*_columns(rows), padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt"))


def _columns(rows: Sequence[Text]) -> tuple[list[str], ...]:
    """Texts, or first and second texts."""
    return (list(rows),) if isinstance(rows[0], str) else tuple(map(list, zip(*rows, strict=True)))  # type: ignore[arg-type]


def _plain_refusal(folder: str, rows: Sequence[Text]) -> str | None:
    """Message of transformers' own error on texts, each alone and all together; None if it runs them."""
    model, tokenizer = _plain(folder)
    try:
        for each in ([row] for row in rows):
            model.eval()(**_encoded(tokenizer, each))
        model.train()(**_encoded(tokenizer, rows))
    except Exception as error:
        return str(error).strip().partition("\n")[0]
    return None


def _require_refusal(folder: str, texts: list[str]) -> None:
    try:
        brimful.Classifier(folder, device="cpu", precision="fp32", max_length=MAX_LENGTH)(texts)
    except brimful.ModelError as refusal:
        if refusal.hint is None:
            raise AssertionError("a refusal without a hint") from refusal
    else:
        raise AssertionError("brimful answers what transformers cannot run")


def _plain_gradient(folder: str, rows: Sequence[Text]) -> dict[str, Tensor]:
    model, tokenizer = _plain(folder)
    F.cross_entropy(model.train()(**_encoded(tokenizer, rows)).logits, _targets(rows)).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def _plain_losses(folder: str, rows: Sequence[Text]) -> list[float]:
    model, tokenizer = _plain(folder)
    inputs, losses = _encoded(tokenizer, rows), []
    update = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for _ in range(NUM_STEPS):
        loss = F.cross_entropy(model.train()(**inputs).logits, _targets(rows))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
        update.zero_grad()
        losses.append(float(loss.detach()))
    return losses


# --- brimful beside it -----------------------------------------------------------------------------------------------


def _train(model: str, folder: Path, pairs: Sequence[Text]) -> brimful.Run:
    _write(folder / "pairs.csv", pairs)
    return brimful.train(
        folder / "pairs.csv", model=model, output=folder / "run", max_steps=NUM_STEPS, batch_size=len(pairs),
        eval_split=0.0, max_length=MAX_LENGTH, learning_rate=LEARNING_RATE, lr_scheduler_type="constant", device="cpu",
        precision="fp32", logging_steps=1,
    )  # fmt: skip


def _gradient_errors(folder: str, rows: tuple[list[Text], list[Text]]) -> Iterator[float]:
    """Of texts and of pairs: the gradient of one batch is what one step of gradient descent takes off the weights."""
    model, tokenizer = _plain(folder)
    step = brimful.Step(
        model, num_steps=2, batch_size=len(rows[0]), max_length=MAX_LENGTH, optim="sgd", max_grad_norm=0.0,
        learning_rate=_LARGE, lr_scheduler_type="constant", device="cpu", precision="fp32",
    )  # fmt: skip
    parameters = dict(model.named_parameters())
    for each in rows:
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        encoded = [tokenizer(*_columns([row]), truncation=True, max_length=MAX_LENGTH) for row in each]
        labelled = [
            {name: values[0] for name, values in row.items()} | {"labels": int(target)}
            for row, target in zip(encoded, _targets(each), strict=True)
        ]
        step.run(step.batch(labelled)).read()
        expected = _plain_gradient(folder, each)
        found = {name: (before[name] - parameter.detach()) / _LARGE for name, parameter in parameters.items()}
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(before[name])
        yield difference(*(torch.cat([part[name].flatten() for name in found]) for part in (found, expected)))


def _answer_error(classifier: Any, folder: str, rows: Sequence[Text]) -> float:
    given = [row if isinstance(row, str) else {"text": row[0], "text_pair": row[1]} for row in rows]
    answers = classifier(given, top_k=None, function_to_apply="none")
    found = [[next(a["score"] for a in answer if a["label"] == label) for label in LABELS] for answer in answers]
    model, tokenizer = _plain(folder, alone=True)
    with torch.no_grad():
        expected = torch.cat([model.eval()(**_encoded(tokenizer, [row])).logits for row in rows])
    return difference(torch.tensor(found), expected)
