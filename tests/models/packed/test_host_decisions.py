"""Passes that are given what the model's code reads of the device: the same logits and gradient, or NaN."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from brimful.kernels.layout import PaddedInputs, padded_inputs
from brimful.models.model_stats import layer_lists
from brimful.models.packed import packed_forward
from brimful.models.packed.host_decisions import HostDecisions
from brimful.models.packed.host_questions import HostNeededError
from brimful.models.packed.packed_forward import PaddedModel
from models.packed.test_host_reads import SMALL, ibert, longformer, t5
from tiny import FAMILIES

END = 2
TESTS = Path(__file__).parents[2]


def rows_of(lengths: list[int], seed: int, ends: int = 1) -> PaddedInputs:
    random = np.random.default_rng(seed)
    ids = [np.append(random.integers(5, 99, length - ends), [END] * ends) for length in lengths]
    return padded_inputs(ids, len(ids), 40, padding_id=0)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    return lambda now: monkeypatch.setattr(packed_forward, "is_capturing", lambda: now)


def without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model.train()


def gradient(model: Any, logits: Tensor) -> Tensor:
    found = torch.autograd.grad(logits.square().sum(), list(model.parameters()), materialize_grads=True)
    return torch.cat([each.flatten() for each in found])


@pytest.mark.parametrize("make", [t5, longformer])
def test_a_pass_with_the_decisions_of_another_batch_is_the_plain_one(
    make: Callable[[], Any], capturing: Callable[[bool], None]
) -> None:
    model = without_dropout(make())
    plain, decided = PaddedModel(model), PaddedModel(model)
    decided.decisions = HostDecisions()
    first, other = rows_of([40, 5, 17], 0), rows_of([9, 33, 31], 1)
    assert torch.equal(decided(first).logits, plain(first).logits)
    capturing(True)
    expected, found = plain(other).logits, decided(other).logits
    assert torch.equal(found, expected)
    torch.testing.assert_close(gradient(model, found), gradient(model, expected), rtol=1e-6, atol=1e-7)


def test_a_batch_with_other_decisions_has_no_logits(capturing: Callable[[bool], None]) -> None:
    """And no gradient that is learned from: a loss that is not finite is skipped on the device."""
    model = without_dropout(t5())
    decided = PaddedModel(model)
    decided.decisions = HostDecisions()
    decided(rows_of([40, 5, 17], 0))
    capturing(True)
    assert decided(rows_of([40, 5, 17], 1, ends=2)).logits.isnan().all()
    assert decided(rows_of([12, 5, 40], 1)).logits.isfinite().all()


@torch.no_grad()
def test_a_captured_pass_writes_buffers_where_they_are_and_only_if_its_decisions_hold(
    capturing: Callable[[bool], None],
) -> None:
    model = without_dropout(ibert())
    decided, plain = PaddedModel(model), PaddedModel(without_dropout(copy.deepcopy(model)))
    decided.decisions = HostDecisions()
    first = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    one, other = rows_of([40, 5, 17], 0), rows_of([9, 33, 31], 1)
    capturing(False)
    decided(one)
    capturing(True)
    for name, buffer in model.named_buffers():
        assert buffer is first[name][0]
        first[name] = (buffer, buffer.clone())
    assert decided(other).logits.isnan().all()  # ranges are not what they are before a first batch
    assert all(torch.equal(buffer, first[name][1]) for name, buffer in model.named_buffers())
    capturing(False)
    decided.decisions.forget()
    decided(other)
    capturing(True)
    assert decided(one).logits.isfinite().all()
    for each in (one, other, one):
        plain(each)
    expected = dict(plain.model.named_buffers())
    for name, buffer in model.named_buffers():
        assert buffer is first[name][0]
        torch.testing.assert_close(buffer, expected[name])


@torch.no_grad()
def test_a_buffer_that_is_another_ones_too_is_left_to_the_model(capturing: Callable[[bool], None]) -> None:
    """transformers' scaled rotary embeddings make their frequencies the original ones again: the same tensor."""
    model = without_dropout(FAMILIES["bert"].model())
    original = torch.ones(3)
    model.register_buffer("original", original)
    model.register_buffer("frequencies", original)
    model.register_forward_hook(lambda module, *_: setattr(module, "frequencies", module.original * 2))
    decided = PaddedModel(model)
    decided.decisions = HostDecisions()
    decided(rows_of([40, 5, 17], 0))
    assert (model.original.tolist(), model.frequencies.tolist()) == ([1] * 3, [2] * 3)
    model.frequencies = original
    capturing(True)
    with pytest.raises(HostNeededError, match="replaces its buffer frequencies by one of another form, or place"):
        decided(rows_of([40, 5, 17], 0))


@torch.no_grad()
def test_buffers_that_change_places_keep_their_numbers(capturing: Callable[[bool], None]) -> None:
    model = without_dropout(FAMILIES["bert"].model())
    for name, value in (("one", 1.0), ("two", 2.0)):
        model.register_buffer(name, torch.full((3,), value))

    def turn(module: Any, *_: object) -> None:
        module.one, module.two = module.two + 0, module.one + 0

    model.register_forward_hook(turn)
    decided = PaddedModel(model)
    decided.decisions = HostDecisions()
    for number in range(3):
        capturing(number > 0)
        decided(rows_of([40, 5, 17], 0))
        assert [model.one[0], model.two[0]] == ([1, 2] if number % 2 else [2, 1])


def test_a_shape_without_recorded_decisions_is_refused(capturing: Callable[[bool], None]) -> None:
    decided = PaddedModel(without_dropout(t5()))
    decided.decisions = HostDecisions()
    capturing(True)
    with pytest.raises(HostNeededError, match="no pass over rows of this shape was recorded"):
        decided(rows_of([5, 17], 0))


def test_a_model_that_is_only_read_has_decisions_of_its_own(capturing: Callable[[bool], None]) -> None:
    """Code may ask for other numbers in eval mode than in train mode."""
    decided = PaddedModel(without_dropout(t5()))
    decided.decisions = HostDecisions()
    decided(rows_of([5, 17], 0))
    decided.model.eval()
    capturing(True)
    with pytest.raises(HostNeededError, match="no pass over rows of this shape was recorded"):
        decided(rows_of([5, 17], 0))
    capturing(False)
    decided(rows_of([5, 17], 0))
    capturing(True)
    assert decided(rows_of([17, 9], 1)).logits.isfinite().all()


def test_more_questions_than_were_answered_are_refused() -> None:
    decisions, values = HostDecisions(), torch.tensor([3, 4])

    def ask(times: int) -> list[int]:
        return [int(values[0]) for _ in range(times)]

    with decisions.recorded("a shape"):
        assert ask(2) == [3, 3]
    values += 1
    with decisions.granted("a shape") as truths:
        assert ask(2) == [3, 3]
    assert [bool(truth) for truth in truths] == [False, False]
    with pytest.raises(HostNeededError, match="reads more of the device"), decisions.granted("a shape"):
        ask(3)


PASSES = """
import json, os
from models.packed.pretend_passes import differences
print(json.dumps(differences()), flush=True)
os._exit(0)  # torch's threads of such a device may outlive what they are joined by
"""


@pytest.mark.thorough
def test_captured_passes_need_nothing_of_the_host() -> None:
    """On a device that refuses it as a GPU does, without decisions and constants; with them logits and gradient of
    another batch are the plain model's. It is torch's for a whole process."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", PASSES], capture_output=True, text=True, cwd=TESTS, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 12
    for name, (refused, logits, gradient) in found.items():
        assert refused, name
        assert max(logits, gradient) < 1e-5, name


def test_a_layer_that_decides_otherwise_when_it_is_computed_again_is_not_granted() -> None:
    """Logits of a replay are no numbers then, and its rows run eagerly."""

    def asked(number: int) -> Any:
        return torch.tensor(number).item()

    for second, holds in ((3, True), (4, False)):
        decisions = HostDecisions()
        within = decisions.of_both_calls()
        with decisions.recorded("rows"), within():
            assert asked(3) == 3
        with within():
            assert asked(second) == second
        with decisions.granted("rows") as truths:
            assert asked(3) == 3
        assert bool(torch.stack(truths).all()) is holds


def test_masks_of_full_rows_are_made_as_in_a_capture() -> None:
    """transformers leaves a mask of ones out where it can look, which it cannot in a capture."""
    config = transformers.ConvBertConfig(
        **SMALL, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24
    )
    model = without_dropout(transformers.ConvBertForSequenceClassification(config))
    execution, seen = PaddedModel(model, "eager"), []
    model.convbert.encoder.layer[0].register_forward_pre_hook(lambda _, given: seen.append(given[1] is None))
    expected = execution(rows_of([40, 40], 0)).logits
    execution.decisions = HostDecisions()
    assert torch.equal(execution(rows_of([40, 40], 0)).logits, expected)
    assert seen == [True, False]


def test_layers_that_are_compiled_are_left_alone() -> None:
    """Nobody looks on while they run; before and after them somebody does."""
    model = without_dropout(t5())
    decided, seen = PaddedModel(model), []
    decided.decisions = HostDecisions()
    for layers in layer_lists(model):
        for layer in layers:
            layer._compiled_call_impl = partial(_called, layer, seen)
    expected = decided(rows_of([5, 17], 0)).logits
    assert seen == [0] * 4
    assert torch.equal(PaddedModel(model)(rows_of([5, 17], 0)).logits, expected)


def _called(layer: Any, seen: list[int], *args: Any, **kwargs: Any) -> Any:
    seen.append(len(_get_current_dispatch_mode_stack()) + len(_get_current_function_mode_stack()))
    return layer._call_impl(*args, **kwargs)
