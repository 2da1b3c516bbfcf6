"""Every pair of levers on a GPU, captured and compiled ones among them; on a CPU: tests/levers/test_lever_pairs.py.

Streamed weights are captured of packed rows alone, and so are tried beside each other lever by themselves.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from brimful.core.errors import OptionError
from brimful.core.records import Recipe
from brimful.data.batches.batch import make_batch
from brimful.engine.assemble import LEVERS as ALL
from brimful.levers.checkpointing import seeds_dropout
from brimful.levers.execution import ExecutionMode
from brimful.levers.lever import Assembly
from brimful.step.graphs.captured_step import CapturedStep
from brimful.step.step import Step
from levers.assemblies import assembly_of
from levers.pairs import FREEZING, LEVERS, PLAIN, REFUSED, learning, pairs, tolerances_of
from levers.test_lever_pairs import EQUAL
from levers.test_named_optimizers import learned
from step.test_step import ROWS, TASK, snapshot
from tiny import FAMILIES
from tolerances import difference

pytestmark = pytest.mark.gpu

#: A batch comes four times: met, captured and replayed.
NUM_STEPS = 4
MORE = {"captured": {"execution": "captured"}, "compiled": {"execution": "compiled"}, "tf32": {"precision": "tf32"}}
HERE = LEVERS | MORE
#: Graphs have no copies of padded rows' weights, nor reads of a file.
REFUSED_HERE = REFUSED | {
    frozenset((streamed, mode)): f"--execution {mode} does not work here: {reason}"
    for streamed, reason in (
        ("weights streamed", "weights are streamed to padded rows by the host"),
        ("weights streamed from a file", "the host reads weights from a file in each pass"),
    )
    for mode in ("captured", "compiled")
}
#: Our kernels on packed rows, and sums of atomic adds: as far as fp32 goes on a GPU.
LEAST = (1e-3, 1e-3)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brimful.models.packed.offload.LEAST_BYTES", 1)
    monkeypatch.setattr("brimful.step.updates.bucketed_adamw.BUCKET", 20_000)


def made(seed: int = 0, **asked: Any) -> tuple[Step, Assembly, Recipe]:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "num_hidden_layers": 4}
    model = FAMILIES["bert"].model(seed=seed, **sizes).train()
    assembly = assembly_of(
        model, equivalence=EQUAL, device="cuda:0", warn=lambda _: None, lengths=tuple(ROWS.lengths[0]),
        **{"batch_size": 6, "execution": "eager"} | PLAIN | asked,
    )  # fmt: skip
    recipe = assembly.recipe(ALL, "cuda")
    mode, parts = assembly.lever(ExecutionMode), (assembly.execution, TASK, assembly.update, assembly.precision)
    options: dict[str, Any] = {"seed": 0, "seeded_dropout": seeds_dropout(assembly)}
    if not mode.captured:
        return Step(*parts, **options), assembly, recipe  # type: ignore[arg-type]
    captured = {"most_tokens": 256, "precompile": mode.fused, "note": pytest.fail}
    return CapturedStep(*parts, **options, **captured), assembly, recipe  # type: ignore[arg-type]


def course(step: Step, assembly: Assembly, start: int = 0, stop: int = NUM_STEPS) -> list[Any]:
    found = []
    for number in range(start, stop):
        assert assembly.layout is not None
        batch = make_batch(number, ROWS.samples(0), ROWS.ids(0), None, ROWS.targets(0), TASK, assembly.layout)
        found.append(step.run(batch.sent(step.device)).read())
    return found


@cache
def plain(**learns: Any) -> tuple[list[float], torch.Tensor]:
    step, assembly, _ = made(**learns)
    losses = [each.loss for each in course(step, assembly)]
    step.release()  # to the averages that some optimizers are judged by
    return losses, learned(step.execution.model).cpu()


@pytest.mark.parametrize(("one", "other"), list(pairs(HERE)))
def test_two_levers(one: str, other: str) -> None:
    asked = HERE[one] | HERE[other]
    if "schedule-free" in (one, other):
        pytest.importorskip("schedulefree")
    if (reason := REFUSED_HERE.get(frozenset((one, other)))) is not None:
        with pytest.raises(OptionError, match=reason):
            made(**asked)
        return
    step, assembly, recipe = made(**asked)
    outcomes = course(step, assembly, stop=3)
    saved = snapshot(step)
    outcomes += course(step, assembly, start=3)
    losses, expected = plain(**learning(asked))
    of_loss, of_weights = (max(pair) for pair in zip(tolerances_of(recipe), LEAST, strict=True))
    assert all(each.applied for each in outcomes)
    assert [each.loss for each in outcomes] == pytest.approx(losses, rel=of_loss)
    resumed, again, _ = made(seed=int(not asked.keys() & FREEZING), **asked)  # what is frozen is in no checkpoint
    resumed.load_state(saved)
    (found,) = course(resumed, again, start=3)
    assert found.loss == pytest.approx(outcomes[3].loss, rel=1e-4)
    step.release()
    assert difference(learned(step.execution.model).cpu(), expected) < of_weights


BESIDE_STREAMED = ("bf16", "fp16", "split by tokens", "updated in backward", "states in bf16", "states in 8 bits",
                   "weights in bf16", "frozen in part")  # fmt: skip


@pytest.mark.parametrize("other", ["", *BESIDE_STREAMED])
def test_streamed_weights_in_graphs_learn_what_the_host_launches(other: str) -> None:
    """Layers that are due are updated in the next graph, or by the host where a checkpoint reads them; then the next
    graph has none to update."""
    found = []
    for execution in ("eager", "captured"):
        asked: dict[str, Any] = {"packing": "auto", "stream_weights": "host", "execution": execution}
        step, assembly, _ = made(**asked | LEVERS.get(other, {}))
        outcomes = course(step, assembly)
        saved = snapshot(step)
        outcomes += course(step, assembly, start=NUM_STEPS, stop=2 * NUM_STEPS)
        assert bool(step.num_graphs) == (execution == "captured" and other != "split by tokens")
        step.load_state(saved)
        outcomes += course(step, assembly, start=NUM_STEPS, stop=NUM_STEPS + 2)
        step.release()
        found.append(([each.loss for each in outcomes], learned(step.execution.model).cpu()))
    (losses, weights), (captured, others) = found
    assert captured == pytest.approx(losses, rel=LEAST[0])
    assert captured[-2:] == pytest.approx(captured[NUM_STEPS : NUM_STEPS + 2], rel=LEAST[0])
    assert difference(others, weights) < LEAST[1]
