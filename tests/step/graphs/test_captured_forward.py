"""The pass over windows by graphs, recorded on the CPU: logits are those of each text alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from brimful.data.tokens.encoder import Tokens, offsets_of
from brimful.levers.precision import choose_precision
from brimful.models.packed import packed_forward
from brimful.models.packed.host_decisions import HostDecisions
from brimful.models.packed.packed_forward import PackedModel, PaddedModel
from brimful.step.graphs.captured_forward import PackedForward, PaddedForward
from models.packed.test_host_reads import t5
from recorder import CpuRecorder
from tiny import FAMILIES, pair_types, sequences

CPU = torch.device("cpu")
LENGTHS = [9, 30, 0, 4, 4, 17, 2, 25]


def tokens_of(lengths: list[int], seed: int = 0, *, with_types: bool) -> Tokens:
    ids = sequences(lengths, seed)
    types = np.concatenate(pair_types(ids)).astype(np.uint8) if with_types else None
    return Tokens(
        ids=np.concatenate(ids).astype(np.int32),
        offsets=offsets_of(np.array(lengths)),
        types=types,
        truncated=np.zeros(len(lengths), np.bool_),
    )


def make_forward(model: Any, family: str, recorder: CpuRecorder | None) -> PackedForward:
    return PackedForward(
        PackedModel(model, FAMILIES[family].form, plain=True),
        choose_precision("fp32", CPU),
        budget=64,
        longest=32,
        padding_id=model.config.pad_token_id,
        typical_length=10,
        recorder=recorder,
        fused=False,
        note=pytest.fail,
    )


def alone(model: Any, tokens: Tokens) -> np.ndarray:
    """Logits of the plain model, a text at a time."""
    rows = []
    for row in range(len(tokens)):
        ids, types = tokens.sequence(row), tokens.sequence_types(row)
        if not len(ids):
            rows.append(np.full(3, np.nan, np.float32))
            continue
        given = {"input_ids": torch.tensor(ids[None], dtype=torch.long)}
        if types is not None:
            given["token_type_ids"] = torch.tensor(types[None], dtype=torch.long)
        rows.append(model(**given).logits[0].numpy())
    return np.stack(rows)


def make_padded(model: Any, recorder: CpuRecorder | None, note: Callable[[str], None] = pytest.fail) -> PaddedForward:
    return PaddedForward(
        PaddedModel(model, "eager"),
        choose_precision("fp32", CPU),
        budget=64,
        longest=32,
        padding_id=model.config.pad_token_id,
        recorder=recorder,
        note=note,
    )


@pytest.mark.parametrize(("family", "with_types"), [("bert", True), ("bert", False), ("gpt2", False)])
def test_padded_windows_are_answered_as_each_text_alone(family: str, with_types: bool) -> None:
    """Eagerly, recorded and replayed; with a text longer than those that shapes are for."""
    model, recorder = FAMILIES[family].model().eval(), CpuRecorder()
    forward = make_padded(model, recorder)
    for turn in range(3):
        tokens = tokens_of([*LENGTHS, 38], seed=turn, with_types=with_types)
        found = forward.submit(tokens).result()
        with torch.inference_mode():
            np.testing.assert_allclose(found, alone(model, tokens), rtol=1e-4, atol=1e-5)
    assert recorder.num_recorded > 1


def texts_of(lengths: list[int], seed: int, ends: int = 1) -> Tokens:
    """Texts with so many end tokens each."""
    random = np.random.default_rng(seed)
    ids = [np.append(random.integers(5, 99, length - ends), [2] * ends) for length in lengths]
    truncated = np.zeros(len(ids), np.bool_)
    return Tokens(
        ids=np.concatenate(ids).astype(np.int32), offsets=offsets_of(np.array(lengths)), types=None, truncated=truncated
    )


def test_rows_with_other_decisions_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that counts end tokens is captured for one in each row, and answers others eagerly from then on."""
    model, recorder, notes = t5().eval(), CpuRecorder(), list[str]()
    monkeypatch.setattr(packed_forward, "is_capturing", lambda: recorder.is_capturing)
    forward = make_padded(model, recorder, notes.append)
    assert isinstance(forward.execution, PaddedModel)
    forward.execution.decisions = HostDecisions()
    lengths = [9, 30, 4, 17, 5, 25]
    for turn, ends in enumerate([1, 1, 1, 2, 2, 1]):
        tokens = texts_of(lengths, turn, ends)
        found = forward.submit(tokens).result()
        with torch.inference_mode():
            np.testing.assert_allclose(found, alone(model, tokens), rtol=1e-4, atol=1e-5)
        assert bool(recorder.num_recorded) == (turn > 0)
        assert len(notes) == (turn > 2)
    assert "what the model's code decides on the host is not the same for all rows of one shape" in notes[0]


@pytest.mark.parametrize(
    ("family", "with_types"), [("bert", True), ("bert", False), ("roberta", False), ("gpt2", False)]
)
def test_logits_are_those_of_each_text_alone(family: str, with_types: bool) -> None:
    """Eager, captured and replayed, on other texts of the same lengths; token types among them."""
    plain, model = FAMILIES[family].model().eval(), FAMILIES[family].model().eval()
    recorder = CpuRecorder()
    forward, eager = make_forward(model, family, recorder), make_forward(model, family, None)
    for turn in range(4):
        tokens = tokens_of(LENGTHS, seed=turn, with_types=with_types)
        found = forward.submit(tokens).result()
        with torch.inference_mode():
            expected = alone(plain, tokens)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        np.testing.assert_array_equal(found, eager.submit(tokens).result())
    assert recorder.num_recorded == 2  # a class of lengths each


def test_a_window_without_tokens() -> None:
    forward = make_forward(FAMILIES["bert"].model().eval(), "bert", CpuRecorder())
    pending = forward.submit(tokens_of([0, 0], with_types=False))
    assert np.isnan(pending.result()).all()
    assert pending.result().shape == (2, 3)


def test_windows_of_a_data_set_hold_each_row_once() -> None:
    forward = make_forward(FAMILIES["bert"].model().eval(), "bert", None)
    lengths = np.random.default_rng(0).integers(0, 30, 500)
    rows = list(forward.windows(lengths))
    assert len(rows) > 1
    together = np.concatenate(rows)
    assert sorted(together.tolist()) == np.flatnonzero(lengths).tolist()
    assert (np.diff(lengths[together]) <= 0).all()


def test_casts_of_one_pass_are_not_anothers() -> None:
    """Autocast keeps casts of weights that are trained, for as long as it lasts."""
    model = FAMILIES["bert"].model().eval().requires_grad_(True)
    forward = make_forward(model, "bert", CpuRecorder())
    forward.precision = choose_precision("bf16", CPU)
    tokens = tokens_of([5, 7], with_types=False)
    found = [forward.submit(tokens).result() for _ in range(3)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    changed = forward.submit(tokens).result()
    fresh = make_forward(model, "bert", None)
    fresh.precision = forward.precision
    assert np.array_equal(found[0], found[2])
    assert np.array_equal(changed, fresh.submit(tokens).result())
    assert not np.array_equal(changed, found[0])
