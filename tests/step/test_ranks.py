"""Steps of several processes on parts of a batch: the gradient, loss and weights of one process on all of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from brimful.core.options.choices import ShardingChoice
from brimful.core.place import Place
from brimful.data.batches.batch import Batch, Layout, Whole, make_batch
from brimful.data.batches.shares import shares_of
from brimful.hardware.ranks import ALONE, Ranks, joined
from brimful.levers import optimizer as optimizers
from brimful.levers.optimizer import Optimizer
from brimful.models.fsdp_hooks import STATE_OF_FSDP, Sent
from brimful.step.precision import Precision
from brimful.step.reduce import buckets, layer_copies, table_rows
from brimful.step.reduce.buckets import Bucket, Overlap
from brimful.step.state import Part, StepState, whole_of
from brimful.step.step import Step
from brimful.step.updates.bucketed_adamw import Savings
from brimful.tasks.task import MultiLabel, Regression, SingleLabel, Task
from file_peers import FilePeers
from forked_ranks import Forked
from step.test_exactness import _label_space
from step.test_step import PACKED, PADDED, execution_of
from tiny import FAMILIES, sequences
from tolerances import STEP_FP64, STEP_PARTLY_FP32, difference

CPU = torch.device("cpu")
FUSED = importlib.util.find_spec("triton") is not None
WEIGHTS = np.array([1, 2, 0.5], dtype=np.float32)
#: The first batch has rows for one process alone: what others have no gradient of yet is used, too.
LENGTHS = [[9], [30, 4, 17, 8, 2, 39], [5, 5, 33], [12, 40, 3, 3, 21, 6]]


def tasks() -> dict[str, tuple[Task, np.ndarray]]:
    random = np.random.default_rng(0)
    return {
        "single_label": (SingleLabel(_label_space("single_label", 3), WEIGHTS, 0.1), random.integers(0, 3, (4, 6))),
        "multi_label": (
            MultiLabel(_label_space("multi_label", 3), WEIGHTS, 0.0),
            random.integers(0, 2, (4, 6, 3)).astype(np.float32),
        ),
        "regression": (Regression(_label_space("regression", 3)), random.normal(0, 3, (4, 6, 3)).astype(np.float32)),
    }


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of four steps. tokens: most of a micro-batch. half: gradients in bf16 on their way. fused: our AdamW.

    same_shapes: of micro-batches in all processes; else one without rows has none. bf16: products in it, in fp32 else.
    """

    kind: str = "single_label"
    packed: bool = True
    tokens: int | None = None
    frozen: bool = False
    half: bool = False
    overlap: bool = True
    fused: bool = False
    sharding: str = "none"
    adamw: bool = False
    offload: bool = False
    same_shapes: bool = True
    bf16: bool = False
    family: str = "bert"


CASES = [
    *(Case(kind=kind) for kind in ("single_label", "multi_label", "regression")),
    Case(packed=False),
    Case(tokens=48),
    Case(tokens=48, packed=False),
    Case(frozen=True),
    Case(overlap=False),
    Case(same_shapes=False),
    Case(half=True),
    *(
        Case(sharding=sharding, adamw=adamw, tokens=tokens, packed=packed)
        for sharding in ("states", "gradients")
        for adamw, tokens, packed in ((False, None, True), (True, 48, True), (True, 48, False))
    ),
    Case(sharding="gradients", adamw=True, half=True, frozen=True),
]
#: These take more time.
OF_WEIGHTS = [
    Case(sharding="parameters", adamw=True, tokens=48),
    Case(sharding="parameters", packed=False),
    Case(sharding="parameters", bf16=True),  # the pooler is used twice in a packed pass
    Case(sharding="parameters", adamw=True, frozen=True, offload=True),
]
#: The backward pass brings weights back in another order than that of the forward pass reversed: the module around the
#: layers has weights of its own. In the last one a module is called that nothing learns by.
IN_ANOTHER_ORDER = [
    Case(sharding="parameters", family=family, packed=packed)
    for family, packed in (("deberta-v2", False), ("mpnet", True), ("rembert", True))
]
#: Tables of words that are modules of their own, cut by rows.
OF_TABLES = [
    Case(sharding="parameters", family="mpt"),
    Case(sharding="parameters", family="mpt", adamw=True, tokens=48),
    Case(sharding="parameters", family="mpt", frozen=True),
    Case(sharding="parameters", family="llama"),
]
OF_OURS = [
    Case(fused=True, tokens=48),
    Case(fused=True, tokens=48, sharding="states"),
    Case(fused=True, sharding="states", same_shapes=False),
]
OF_OURS = OF_OURS if FUSED else []
#: By processes: each task at every number, with what has to do with that number beside it.
OF_COUNTS = {
    2: CASES + OF_OURS + OF_WEIGHTS,
    3: [
        *(Case(), Case(kind="multi_label", tokens=48), Case(kind="regression", overlap=False)),
        Case(sharding="states"),
        Case(sharding="gradients"),
        Case(sharding="gradients", adamw=True, half=True, frozen=True),
    ],
    4: [
        *(Case(half=True), Case(), Case(kind="multi_label", packed=False), Case(kind="regression", frozen=True)),
        Case(sharding="states", adamw=True, tokens=48, packed=False),
        Case(sharding="gradients", adamw=True, tokens=48, packed=False),
        OF_WEIGHTS[0],
    ],
}


def trained(
    ranks: Ranks, case: Case, make: Callable[..., Step] = Step, rounds: int = 1, memory: Path | None = None
) -> dict[str, Any]:
    """Four steps of SGD in fp64, whose weights then hold their gradients; of AdamW in fp32 where it is ours.

    memory: a folder of what processes reach of one another's, None to send.
    """
    torch.set_num_threads(1)
    task, targets = tasks()[case.kind]
    model = FAMILIES[case.family].model(3).train()
    model = model if case.fused or case.bf16 else model.double()
    if case.frozen and case.family != "bert":
        model.get_input_embeddings().requires_grad_(False)
    elif case.frozen:
        model.bert.embeddings.requires_grad_(False)
        model.bert.encoder.layer[0].attention.requires_grad_(False)
    precision = Precision(value="bf16" if case.bf16 else "fp32", device=CPU, reason="a test")
    adamw = Optimizer(value="adamw_torch", fused=case.fused, epsilon=1e-3, weight_decay=0.1)
    optimizer = adamw if case.fused or case.adamw else Optimizer(value="sgd")
    savings = Savings(on_host=True) if case.offload and ranks.count > 1 else None
    if ranks.count > 1:
        parts = ranks.count if case.fused and case.sharding == "states" else 1
        optimizer = replace(optimizer, sharding=case.sharding, savings=savings, parts=parts)
    update = optimizer.update(model, torch.full((9,), 0.1), precision, max_grad_norm=1.0)
    if memory is not None:
        update.find_peers = lambda ranks, _: (FilePeers(ranks, memory), "")
        update.pass_tokens = 1 if case.packed else 0
    execution = execution_of(model, case.family, packed=case.packed)
    step = make(
        execution, task, update, precision, seed=0, ranks=ranks, half_wire=case.half, overlap=case.overlap
    )  # fmt: skip
    assert step.meet() == ""
    layout = PACKED if case.packed else PADDED
    layout = layout if case.tokens is None else layout.limited(case.tokens, 40)
    outcomes = []
    for number in range(len(LENGTHS) * rounds):
        batch = part_of(number, ranks, task, targets, layout, same_shapes=case.same_shapes)
        batch = batch if make is Step else batch.sent(CPU)
        outcomes.append(step.run(batch).read())
    parts = [p.detach() for p in model.parameters()]
    weights = torch.cat([(p.full_tensor() if hasattr(p, "full_tensor") else p).flatten() for p in parts])
    step.release()
    assert not any(name.startswith(STATE_OF_FSDP) for module in model.modules() for name in vars(module))
    if ranks.leads and not case.fused:  # a plain model again
        assert torch.equal(weights, torch.cat([p.detach().flatten() for p in model.parameters()]))
        execution(batch.arrived(0).inputs)
    return {"weights": weights.numpy(), "told": [(o.loss, o.grad_norm, o.num_samples, o.num_tokens) for o in outcomes]}


def part_of(
    number: int, ranks: Ranks, task: Task, targets: np.ndarray, layout: Layout, *, same_shapes: bool = True
) -> Batch:
    """This process's part of a batch of `LENGTHS`."""
    lengths = LENGTHS[number % len(LENGTHS)]
    ids, rows = sequences(lengths, seed=number), np.arange(len(lengths))
    of_rows = np.array([0.5, 2, 1, 1, 3, 1], dtype=np.float32)[: len(lengths)]
    targets_N = targets[number % len(LENGTHS)][: len(lengths)]
    shares = shares_of(np.array(lengths), ranks.count)
    whole = Whole(
        denominator=task.denominator(targets_N, of_rows), num_samples=len(lengths), num_tokens=sum(lengths),
        shares=[np.array(lengths)[rows] for rows in shares] if same_shapes else (),
    )  # fmt: skip
    mine = shares[ranks.rank]
    return make_batch(
        number, rows[mine], [ids[i] for i in mine], None, targets_N[mine], task, layout, weights_N=of_rows[mine],
        whole=whole if ranks.count > 1 else None,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("count", [4, 3, 2])
def test_several_processes_learn_what_one_does(count: int, tmp_path: Path) -> None:
    cases = OF_COUNTS[count]
    assert {case.kind for case in cases} == tasks().keys()

    def work(place: Place) -> list[dict[str, Any]]:
        with pytest.MonkeyPatch.context() as patch, joined(place, CPU) as ranks:
            patch.setattr(buckets, "BUCKET_BYTES", 1 << 12)
            patch.setattr(optimizers, "SENT_BYTES", 1 << 12)
            return [trained(ranks, case) for case in cases]

    found = Forked(tmp_path, count, work).results()
    for number, case in enumerate(cases):
        expected = trained(ALONE, case)
        weights, told = (1e-3, 1e-2) if case.half or case.bf16 else (1e-5, 1e-4) if case.fused else (STEP_FP64, 1e-9)
        for each in (rank[number] for rank in found):
            assert difference(each["weights"], expected["weights"]) < weights, case
            np.testing.assert_allclose(each["told"], expected["told"], rtol=told)
            assert np.array_equal(each["weights"], found[0][number]["weights"])


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("count", [3, 2])
def test_copies_of_weights_in_parts_are_what_is_sent(count: int, tmp_path: Path) -> None:
    """To the bit in two processes; three sum in another order. Sent is what finds no memory: of one group, where two
    are needed."""
    cases = [*OF_WEIGHTS[:3], *IN_ANOTHER_ORDER] if count == 2 else OF_WEIGHTS[::2][:2]

    def work(place: Place) -> list[list[dict[str, Any]]]:
        copied, sent_all_the_same = set[torch.dtype](), set[str]()
        fetch, put = layer_copies.WeightCopies.__call__, layer_copies.GradientCopies.__call__

        def fetching(self: Any, **given: Any) -> None:
            output = given["output_tensor"]
            copied.add(output.dtype)
            if output.data_ptr() not in [each.own.data_ptr() for each in self._memories]:
                sent_all_the_same.add(case.family)
            fetch(self, **given)

        def putting(self: Any, **given: Any) -> None:
            assert given["input_tensor"].dtype in copied
            put(self, **given)

        found = []
        with pytest.MonkeyPatch.context() as patch, joined(place, CPU) as ranks:
            patch.setattr(layer_copies.WeightCopies, "__call__", fetching)
            patch.setattr(layer_copies.GradientCopies, "__call__", putting)
            for number, case in enumerate(cases):
                patch.setattr(layer_copies, "_IN_TURN", 1 if case.family == "mpnet" else 2)
                sent = trained(ranks, case)
                assert not copied
                found.append([sent, trained(ranks, case, memory=tmp_path / str(number))])
                assert copied == ({torch.bfloat16, torch.float32} if case.bf16 else {torch.float64})
                copied.clear()
        assert sent_all_the_same == ({"mpnet"} if count == 2 else set())
        return found

    for of_rank in Forked(tmp_path / "logs", count, work).results():
        for case, (sent, copied) in zip(cases, of_rank, strict=True):
            if count == 2:
                assert np.array_equal(copied["weights"], sent["weights"]), case
                assert copied["told"] == sent["told"]
            else:
                assert difference(copied["weights"], sent["weights"]) < (1e-4 if case.bf16 else STEP_FP64), case


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("count", [3, 2])
def test_rows_of_tables_are_read_where_they_are(count: int, tmp_path: Path) -> None:
    """Of two processes the second one has fewer. What is not trained has no gradient."""

    def work(place: Place) -> list[tuple[int, int, dict[str, Any]]]:
        calls, read, add = [0, 0], table_rows.TableRows.read, table_rows.TableRows.sum

        def reading(self: Any, *given: Any) -> Any:
            calls[0] += 1
            return read(self, *given)

        def adding(self: Any, *given: Any) -> Any:
            calls[1] += 1
            return add(self, *given)

        found = []
        with pytest.MonkeyPatch.context() as patch, joined(place, CPU) as ranks:
            patch.setattr(table_rows, "_LEAST_BYTES", 0)
            patch.setattr(table_rows.TableRows, "read", reading)
            patch.setattr(table_rows.TableRows, "sum", adding)
            for number, case in enumerate(OF_TABLES):
                calls[:] = 0, 0
                told = trained(ranks, case, memory=tmp_path / str(number))
                found.append((*calls, told))
        return found

    expected = [trained(ALONE, case) for case in OF_TABLES]
    for of_rank in Forked(tmp_path / "logs", count, work).results():
        for case, alone, (num_read, num_summed, found) in zip(OF_TABLES, expected, of_rank, strict=True):
            assert num_read > 0
            assert num_summed == (0 if case.frozen else num_read)
            tolerance = STEP_PARTLY_FP32 if case.family == "llama" else STEP_FP64
            assert difference(found["weights"], alone["weights"]) < tolerance, case
            np.testing.assert_allclose(found["told"], alone["told"], rtol=max(1e-9, tolerance))


@pytest.mark.slow
@pytest.mark.sampled
def test_an_evaluation_brings_nothing_to_the_next_step(tmp_path: Path) -> None:
    """torch would bring its last layers back: the order of its forward pass had no backward pass to follow it."""

    def work(place: Place) -> None:
        brought, of_steps = [0], list[int]()
        fetch = layer_copies.WeightCopies.__call__

        def fetching(self: Any, **given: Any) -> None:
            brought[0] += 1
            fetch(self, **given)

        class Counted(Step):
            evaluates = False

            def run(self, batch: Batch) -> Any:
                if self.evaluates:
                    with torch.no_grad():
                        self.execution(batch.arrived(0).inputs)
                before = brought[0]
                outcome = super().run(batch)
                of_steps.append(brought[0] - before)
                return outcome

        with pytest.MonkeyPatch.context() as patch, joined(place, CPU) as ranks:
            patch.setattr(layer_copies.WeightCopies, "__call__", fetching)
            case = Case(sharding="parameters")
            plain = trained(ranks, case, Counted, memory=tmp_path / "memory")
            patch.setattr(Counted, "evaluates", True)
            evaluated = trained(ranks, case, Counted, memory=tmp_path / "memory again")
        assert of_steps[:4] == of_steps[4:]
        assert np.array_equal(plain["weights"], evaluated["weights"])

    Forked(tmp_path / "logs", 2, work).results()


def test_memory_of_gradients_is_not_taken_for_that_of_their_sum() -> None:
    """Also where a pass was left when the former was there."""
    ranks: Any = SimpleNamespace(count=2)
    memory: Any = None
    copies = layer_copies.GradientCopies(Sent(num_bytes=16, half=torch.bfloat16), memory, 0, ranks)
    taken: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
    assert copies.allocate((8,), **taken).dtype == torch.bfloat16  # and left
    gradients = copies.allocate((4,), **taken)
    assert (gradients.dtype, copies.allocate((2,), **taken).dtype) == (torch.bfloat16, torch.float32)


def test_buckets_are_begun_in_one_order_as_gradients_complete() -> None:
    """Those that nothing was learned of come at the end; what is added after a bucket has begun is a mistake."""
    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    parameters = [p for layer in layers for p in layer.parameters()]
    cut = [
        Bucket(number=n, members=(4 - 2 * n, 5 - 2 * n), starts=(0, 16), start=0, end=32) for n in range(3)
    ]  # fmt: skip
    begun: list[int] = []
    overlap = Overlap(parameters, cut, lambda bucket: begun.append(bucket.number))

    def learn(chosen: list[torch.nn.Linear]) -> list[int]:
        begun.clear()
        x = torch.ones(1, 4)
        for layer in chosen:
            x = layer(x)
        x.sum().backward()
        return list(begun)

    assert learn(layers) == []
    overlap.arm()
    assert learn(layers) == [0, 1, 2]
    overlap.arm()
    assert learn([layers[0], layers[2]]) == [0]
    overlap.finish()
    assert begun == [0, 1, 2]
    overlap.finish()  # of a process without rows
    assert begun == [0, 1, 2, 0, 1, 2]
    overlap.arm()
    learn(layers)
    with pytest.raises(RuntimeError, match="after it was sent"):
        learn(layers)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_buckets_hold_each_parameter_once_in_whole_parts(count: int) -> None:
    sizes = [5, 1 << 24, 33, 1 << 20, 1, 3 << 20, 1 << 22, 7]
    found = buckets.cut_buckets(sizes, count)
    assert [index for bucket in found for index in bucket.members] == list(reversed(range(len(sizes))))
    assert len(found) > 2
    end = 0
    for bucket in found:
        assert (bucket.start, (bucket.end - bucket.start) % (16 * count)) == (end, 0)
        for index, start in zip(bucket.members, bucket.starts, strict=True):
            assert end <= start
            end = start + sizes[index]
        assert end <= bucket.end
        end = bucket.end


def test_others_have_as_many_micro_batches_of_the_same_shapes() -> None:
    lengths = np.array([40, 3, 33, 21, 5, 12, 9])
    task, targets = tasks()["single_label"]
    layout = replace(PACKED, groups=False).limited(48, 40)
    for rows in (lengths, lengths[:1]):
        shares = shares_of(rows, 4)
        whole = Whole(denominator=1.0, num_samples=len(rows), num_tokens=1, shares=[rows[mine] for mine in shares])
        made = [
            make_batch(
                0, mine, [np.ones(n, dtype=np.int64) for n in rows[mine]], None, targets[0][:1].repeat(len(mine)),
                task, layout, whole=whole,
            )
            for mine in shares
        ]  # fmt: skip
        assert len({tuple(micro.shape for micro in batch.micro_batches) for batch in made}) == 1
        assert sorted(int(row) for batch in made for row in batch.samples) == list(range(len(rows)))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_are_even_and_whole(count: int) -> None:
    random = np.random.default_rng(1)
    for number_of_rows in (1, 2, 7, 32, 256):
        lengths = random.integers(1, 200, number_of_rows)
        shares = shares_of(lengths, count)
        assert sorted(np.concatenate(shares).tolist()) == list(range(number_of_rows))
        assert all((np.diff(share) > 0).all() for share in shares)
        loads = [int(lengths[share].sum()) for share in shares]
        assert max(loads) <= max(lengths.sum() / count * 4 / 3, lengths.max())  # Graham's bound


@pytest.mark.thorough
@pytest.mark.skipif(not FUSED, reason="needs Triton")
@pytest.mark.parametrize(("count", "by_peers"), [(2, False), (2, True), (3, True)])
def test_our_kernels_update_by_parts_what_they_update_whole(count: int, by_peers: bool, tmp_path: Path) -> None:
    """With gradients and copies in bf16: sums of the same numbers, and the same states, whole and by parts; sent, and
    copied between processes' memory: sums of several micro-batches in fp32, gradients of one as they are, in bf16."""
    layout = replace(PACKED, budgets=replace(PACKED.budgets, tokens=(40,))) if count == 2 else PACKED

    def learn(ranks: Ranks, sharding: ShardingChoice, after: StepState | None = None) -> tuple[Any, StepState]:
        model = FAMILIES["bert"].model(3, num_hidden_layers=1).train()
        precision = Precision(value="bf16", device=CPU, reason="a test")
        parts = ranks.count if sharding == "states" else 1
        optimizer = Optimizer(value="adamw_torch", fused=True, sharding=sharding, parts=parts, weight_decay=0.1)
        update = optimizer.update(model, torch.full((9,), 0.1), precision, max_grad_norm=1.0)
        task, targets = tasks()["single_label"]
        if by_peers and parts > 1:
            folder = tmp_path / ("first" if after is None else "second")
            update.find_peers = lambda ranks, _: (FilePeers(ranks, folder), "")
        step = Step(execution_of(model), task, update, precision, seed=0, ranks=ranks)
        step.meet()
        if after is not None:
            step.load_state(after)
        first = (1, 2, 1) if by_peers and count == 2 else (1, 2)  # from one precision to the other and back
        numbers = first if after is None else (3,)
        batches = [part_of(number, ranks, task, targets, layout) for number in numbers]
        several = [len(batch.micro_batches) > 1 for batch in batches]
        assert several == ([number != 2 and count == 2 for number in numbers])
        told = [step.run(batch).read() for batch in batches]
        kept = [p.detach().clone() for p in model.parameters()]
        state = step.state()
        step.release()
        assert all(p.dtype == torch.float32 for p in model.parameters())
        released = dict(model.named_parameters())
        others: list[Any] = [None] * count  # whose parts, of weights that are used in bf16, came last of all
        dist.all_gather_object(others, [p.detach() for p in released.values()])
        assert all(map(torch.equal, others[0], others[-1]))
        for name, weight in state.weights.items():
            part = state.parts.get(f"weights/{name}", Part(shape=tuple(weight.shape), starts=(0,) * weight.ndim))
            whole = released[name].detach().clone()
            part.put(weight, whole)
            assert torch.equal(whole, released[name])
        return (kept, [(each.loss, each.grad_norm) for each in told]), state

    def work(place: Place) -> None:
        with pytest.MonkeyPatch.context() as patch, joined(place, CPU) as ranks:
            patch.setattr(buckets, "BUCKET_BYTES", 1 << 12)
            patch.setattr(optimizers, "SENT_BYTES", 1 << 12)
            patch.setattr("brimful.kernels.optimizers.adamw.PARTIALS", 64)  # programs, one after another here
            (weights, told), state = learn(ranks, "none")
            (by_parts, told_by_parts), part = learn(ranks, "states")
            assert part.parts
            gathered: list[Any] = [None] * count
            dist.all_gather_object(gathered, part)
            own = whole_of(gathered)
            np.testing.assert_allclose(told_by_parts, told, rtol=1e-5)
            assert all(torch.allclose(one, two, atol=1e-5) for one, two in zip(by_parts, weights, strict=True))
            for name, weight in own.weights.items():
                torch.testing.assert_close(weight, state.weights[name], rtol=1e-5, atol=1e-5)
            assert own.weights.keys() == state.weights.keys()
            assert own.optimizer.keys() == state.optimizer.keys()
            for name, kept in own.optimizer.items():
                for key, tensor in kept.tensors.items():
                    torch.testing.assert_close(tensor, state.optimizer[name].tensors[key], rtol=1e-3, atol=1e-7)
            (weights, told), _ = learn(ranks, "none", after=state)
            (by_parts, told_by_parts), _ = learn(ranks, "states", after=state)
            np.testing.assert_allclose(told_by_parts, told, rtol=1e-4)

    Forked(tmp_path, count, work).results()
