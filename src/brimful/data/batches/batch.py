"""Samples to effective batches of fixed-shape micro-batches, in an order that is a function of (seed, epoch, position).

Legend: S slots of a micro-batch, N samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memmove
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, zip_longest
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from brimful.data.batches.packing import Budgets, choose_budgets, pack
from brimful.data.batches.padding import Cut, PaddedShapes, cut
from brimful.data.batches.shares import starts_of
from brimful.kernels.layout import Inputs, PackedShape, map_tensors, packed_inputs, padded_inputs, placed, tensors_of
from brimful.tasks.task import Task

#: Bytes that the tensors of one memory begin at multiples of: the widest words that kernels read.
_ALIGNMENT = 16
#: Lengths of the rows of each of several processes.
Shares = Sequence[np.ndarray]
#: Key of the micro-batches that one graph can run on.
Shape = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Inputs of one forward and backward pass.

    targets_S: the task's targets, any valid value in empty slots. valid_S: (S,) bool, True where there is a sample.
    denominator: () fp64, what the whole effective batch's loss is over. samples: dataset index of each sample, on the
    host, in slot order. weights_S: fp32, what each row counts as in the loss, 0 in empty slots; None: all as one.
    """

    inputs: Inputs
    targets_S: Tensor
    valid_S: Tensor
    denominator: Tensor
    samples: np.ndarray
    weights_S: Tensor | None = None

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor, always in the same order."""
        weights = () if self.weights_S is None else (self.weights_S,)
        return (*tensors_of(self.inputs), self.targets_S, self.valid_S, self.denominator, *weights)

    @cached_property
    def shape(self) -> Shape:
        """The same for micro-batches that one graph can run on."""
        return (type(self.inputs).__name__, *(tuple(tensor.shape) for tensor in self.tensors))

    def map(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """A copy with `change` applied to every tensor."""
        return MicroBatch(
            inputs=map_tensors(self.inputs, change),
            targets_S=change(self.targets_S),
            valid_S=change(self.valid_S),
            denominator=change(self.denominator),
            samples=self.samples,
            weights_S=None if self.weights_S is None else change(self.weights_S),
        )

    @cached_property
    def num_bytes(self) -> int:
        """Of all tensors in one memory, one after the other."""
        return sum(map(_room, self.tensors))

    def write(self, memory: Tensor) -> None:
        """Copies all tensors into (num_bytes,) uint8 in one piece; they and it are on the host.

        Raises: ValueError if they are not, or if there is not room for them.
        """
        if not (memory.is_cpu and memory.is_contiguous() and memory.nbytes >= self.num_bytes):
            raise ValueError(f"{self.num_bytes} bytes do not go into {memory.nbytes} on {memory.device}")
        if not all(tensor.is_cpu for tensor in self.tensors):
            raise ValueError("tensors on another device are not written to the host")
        place = memory.numpy().ctypes.data
        for tensor in self.tensors:
            whole = tensor.contiguous()  # has a name, so that it is there until it is copied
            memmove(place, whole.data_ptr(), whole.nbytes)
            place += _room(tensor)

    def over(self, memory: Tensor) -> MicroBatch:
        """The same layout on a memory that `write` has filled, or a copy of it anywhere.

        Its tensors are no views of one: a model that writes into one of its inputs has not changed the others.
        """
        storage, start = memory.untyped_storage(), memory.storage_offset()

        def place(tensor: Tensor) -> Tensor:
            nonlocal start
            offset, start = start // tensor.itemsize, start + _room(tensor)
            made = torch.empty(0, dtype=tensor.dtype, device=memory.device)
            made.set_(storage, offset, tensor.shape)  # type: ignore[call-overload]
            return made

        return self.map(place)


def _room(tensor: Tensor) -> int:
    """Bytes of a tensor in one memory with others."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, kw_only=True, eq=False)
class Whole:
    """Facts of a whole effective batch, of which one of several processes lays out a part.

    shares: lengths of the rows of each process, by which all of them lay out as many micro-batches, packed ones of the
    same shapes; without them each has as many as it needs. starts_N: places of this part's rows in the batch, as
    `starts_of` has them; None where they are not known, and counted within the part.
    """

    denominator: float
    num_samples: int
    num_tokens: int
    shares: Shares = ()
    starts_N: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """N samples of a batch before it is laid out: ids, token types, targets and weights of each, and their task.

    whole: of the batch, where these are a part of it.
    """

    samples: np.ndarray
    ids: Sequence[np.ndarray]
    types: Sequence[np.ndarray] | None
    targets_N: np.ndarray
    task: Task
    weights_N: np.ndarray | None = None
    whole: Whole | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One effective batch, or one process's part of it: what one optimizer step consumes.

    number: batches consumed before it since training began. num_samples, num_tokens: of the whole effective batch.
    num_computed: tokens of its micro-batches, padding and tails counted. memories: once it was sent to a device, of
    each micro-batch its tensors there, in one memory. rows, layout: what it was made of and by, to lay it out again.
    """

    number: int
    micro_batches: tuple[MicroBatch, ...]
    num_samples: int
    num_tokens: int
    num_computed: int
    memories: tuple[Tensor, ...] = ()
    rows: Rows | None = None
    layout: Layout | None = None

    def laid_out(self, layout: Layout) -> Batch:
        """The batch as `layout` has it, on the host again where that is another than its own."""
        if self.rows is None or self.layout == layout:
            return self
        return make_batch(self.number, layout=layout, **vars(self.rows))

    @property
    def num_bytes(self) -> int:
        """Of all tensors of all micro-batches in one memory."""
        return sum(micro.num_bytes for micro in self.micro_batches)

    def sent(self, device: torch.device, place: Tensor | None = None) -> Batch:
        """The batch and a copy of its tensors that is on its way to a device, one copy on the current stream.

        place: uint8 there, of `num_bytes` at least, that the copy is made in; without it, in a new one.
        """
        parts = [micro.num_bytes for micro in self.micro_batches]
        staged = torch.empty(sum(parts), dtype=torch.uint8, pin_memory=device.type == "cuda")
        for micro, part in zip(self.micro_batches, staged.split(parts), strict=True):
            micro.write(part)
        if place is None:
            place = torch.empty(len(staged), dtype=torch.uint8, device=device)
        return replace(self, memories=place[: len(staged)].copy_(staged, non_blocking=True).split(parts))

    def arrived(self, index: int) -> MicroBatch:
        """One micro-batch with its tensors where it was sent, or on the host if it was not."""
        micro = self.micro_batches[index]
        return micro.over(self.memories[index]) if self.memories else micro

    @property
    def samples(self) -> np.ndarray:
        """Dataset indices of the samples in its micro-batches."""
        return np.concatenate([micro.samples for micro in self.micro_batches] or [np.empty(0, np.int64)])

    @property
    def is_part(self) -> bool:
        """True where other processes have the rest of the effective batch."""
        return self.rows is not None and self.rows.whole is not None


#: The budget of a micro-batch, and which sequences are in it.
Pack = tuple[int, list[int]]
#: Inputs of each micro-batch, and which sequences are in it, in slot order.
Arranged = list[tuple[Inputs, list[int]]]


class Layout(Protocol):
    """Layout of a batch's sequences, of at most `max_length` tokens, in micro-batches."""

    @property
    def max_length(self) -> int: ...

    def arrange(self, ids: Sequence[np.ndarray], types: Sequence[np.ndarray] | None, shares: Shares = ()) -> Arranged:
        """Inputs and members of each micro-batch; members are indices into `ids`, in slot order.

        shares: as of `Whole`. Where others have more micro-batches, the last ones have no members.
        """
        ...

    @property
    def most_tokens(self) -> int:
        """Of a micro-batch, padding counted."""
        ...

    def largest(self, lengths: Sequence[int]) -> int:
        """Tokens of the largest micro-batch of sequences of these lengths, padding counted."""
        ...

    def count(self, lengths: Sequence[int] | np.ndarray) -> int:
        """Micro-batches that sequences of these lengths are laid out in."""
        ...

    def limited(self, num_tokens: int, longest: int, batches: Sequence[np.ndarray] = ()) -> Layout:
        """The layout with at most so many tokens in a micro-batch, or those of one sequence if that has more.

        longest: most tokens of a sequence to come. batches: lengths of batches to come, or like them, that shapes are
        chosen by; without them shapes are those of before, as far as they are small enough.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Sequences end to end in rows of a few token budgets. groups: the attention kernel wants padded rows besides.

    typical_length, attention: see `Segments`.
    """

    budgets: Budgets
    num_slots: int
    max_length: int
    padding_id: int
    groups: bool
    typical_length: int | None = None
    attention: str | None = None

    def arrange(self, ids: Sequence[np.ndarray], types: Sequence[np.ndarray] | None, shares: Shares = ()) -> Arranged:
        """One packed row a micro-batch, as few as fit the rows of each process, and the largest that any needs."""
        lengths = [len(sequence) for sequence in ids]
        longest = max(chain(lengths, *shares), default=0)
        if longest > self.max_length:
            return self._for_longer(int(longest)).arrange(ids, types, shares)
        found: Arranged = []
        for budget, members in _together(pack(lengths, self.budgets), [pack(each, self.budgets) for each in shares]):
            shape = PackedShape(
                num_tokens=budget,
                num_slots=min(self.num_slots, budget),
                max_length=min(self.max_length, budget),
                typical_length=self.typical_length,
                attention=self.attention,
            )
            rows, row_types = _rows(ids, types, members, self.padding_id)
            inputs = packed_inputs(rows, shape, padding_id=self.padding_id, types=row_types, groups=self.groups)
            found.append((inputs, members))
        return found

    def _for_longer(self, longest: int) -> PackedLayout:
        """The layout with room for a sequence longer than those that it was made for."""
        room = 1 << (longest - 1).bit_length()
        budgets = tuple(sorted({*self.budgets.tokens, room}))
        return replace(self, max_length=room, budgets=replace(self.budgets, tokens=budgets))

    @property
    def most_tokens(self) -> int:
        """The largest budget."""
        return self.budgets.tokens[-1]

    def largest(self, lengths: Sequence[int]) -> int:
        """As `Layout` has it."""
        return max(budget for budget, _ in pack(lengths, self.budgets))

    def count(self, lengths: Sequence[int] | np.ndarray) -> int:
        """As `Layout` has it."""
        return len(pack(lengths, self.budgets))

    def limited(self, num_tokens: int, longest: int, batches: Sequence[np.ndarray] = ()) -> PackedLayout:
        """As `Layout` has it. The longest sequence always fits."""
        if not len(batches):
            return replace(self, budgets=self.budgets.up_to(num_tokens, longest))
        return replace(self, budgets=choose_budgets(batches, num_tokens, longest, most_rows=self.budgets.most_rows))


@dataclass(frozen=True, kw_only=True)
class PaddedLayout:
    """Sequences in padded rows: for models that do not run packed.

    split: False where rows influence one another: then the whole batch is one micro-batch padded to its longest.
    max_length: longest sequence there can be.
    """

    shapes: PaddedShapes
    max_length: int
    padding_id: int
    split: bool = True

    def arrange(self, ids: Sequence[np.ndarray], types: Sequence[np.ndarray] | None, shares: Shares = ()) -> Arranged:
        """As `cut` has it; a whole batch as it is where it must not be split."""
        sizes = [len(sequence) for sequence in ids]
        pieces = self._pieces(sizes)
        for _ in range(max((len(self._pieces(each)) for each in shares), default=0) - len(pieces)):
            pieces.append((self.shapes.rows_for(1, 1), self.shapes.length_for(1), []))
        found: Arranged = []
        for num_rows, length, members in pieces:
            rows, chosen = _rows(ids, types, members, self.padding_id)
            inputs = padded_inputs(rows, num_rows, length, padding_id=self.padding_id, types=chosen)
            found.append((inputs, members))
        return found

    def _pieces(self, lengths: Sequence[int] | np.ndarray) -> list[Cut]:
        if not len(lengths):
            return []
        return cut(lengths, self.shapes) if self.split else [(len(lengths), max(lengths), list(range(len(lengths))))]

    def count(self, lengths: Sequence[int] | np.ndarray) -> int:
        """As `Layout` has it."""
        return len(self._pieces(lengths))

    @property
    def most_tokens(self) -> int:
        """Of a whole batch of the longest rows, if it is not split where that is too many."""
        longest = self.max_length if not self.split else self.shapes.length_for(self.max_length)
        whole = self.shapes.num_rows * longest
        return min(whole, max(self.shapes.num_tokens, longest)) if self.split else whole

    def largest(self, lengths: Sequence[int]) -> int:
        """As `Layout` has it."""
        if not self.split:
            return len(lengths) * max(lengths)
        return max(num_rows * length for num_rows, length, _ in cut(lengths, self.shapes))

    def limited(self, num_tokens: int, longest: int, batches: Sequence[np.ndarray] = ()) -> PaddedLayout:
        """As `Layout` has it. Rows that must stay together do."""
        return replace(self, shapes=replace(self.shapes, num_tokens=min(num_tokens, self.shapes.num_tokens)))


def _together(own: list[Pack], of_each: Sequence[list[Pack]]) -> list[Pack]:
    """A process's micro-batches, the largest first, each as large as any process needs its one; as many as any has."""
    if not of_each:
        return own
    sizes = [sorted((budget for budget, _ in packs), reverse=True) for packs in of_each]
    own = sorted(own, key=lambda each: -each[0])
    budgets = [max(found) for found in zip_longest(*sizes, fillvalue=0)]
    return [(budget, own[index][1] if index < len(own) else []) for index, budget in enumerate(budgets)]


def _rows(
    ids: Sequence[np.ndarray], types: Sequence[np.ndarray] | None, members: Sequence[int], padding_id: int
) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """Ids and types of members; where there are none, of one token that counts for nothing: a pass needs a row."""
    if not members:
        return [np.array([padding_id])], None if types is None else [np.zeros(1, dtype=np.int64)]
    return [ids[i] for i in members], None if types is None else [types[i] for i in members]


def make_batch(
    number: int,
    samples: np.ndarray,
    ids: Sequence[np.ndarray],
    types: Sequence[np.ndarray] | None,
    targets_N: np.ndarray,
    task: Task,
    layout: Layout,
    *,
    weights_N: np.ndarray | None = None,
    whole: Whole | None = None,
) -> Batch:
    """The effective batch of these samples: their ids, token types and targets, laid out in micro-batches.

    weights_N: fp32, what each sample counts as in the loss; None: all as one. whole: where these samples, which may be
    none, are a part of the batch.
    """
    micro_batches, num_computed = [], 0
    lengths_N = np.fromiter(map(len, ids), np.int64, len(ids))
    facts = whole or Whole(
        denominator=task.denominator(targets_N, weights_N),
        num_samples=len(samples),
        num_tokens=int(lengths_N.sum()),
    )
    denominator = torch.from_numpy(np.array(facts.denominator, dtype=np.float64))
    starts_N = starts_of(lengths_N) if facts.starts_N is None else facts.starts_N
    for inputs, members in layout.arrange(ids, types, facts.shares) if len(ids) or facts.shares else ():
        targets_S = task.empty_targets(inputs.num_slots)
        targets_S[: len(members)] = targets_N[members]
        weights_S = None
        if weights_N is not None:
            weights_S = torch.zeros(inputs.num_slots, dtype=torch.float32)
            weights_S[: len(members)] = torch.from_numpy(weights_N[members])
        micro_batches.append(
            MicroBatch(
                inputs=placed(inputs, starts_N[members]),
                targets_S=torch.from_numpy(targets_S),
                valid_S=torch.from_numpy(np.arange(inputs.num_slots) < len(members)),
                denominator=denominator,
                samples=samples[members],
                weights_S=weights_S,
            )
        )
        num_computed += inputs.num_tokens
    return Batch(
        number=number,
        rows=Rows(
            samples=samples, ids=ids, types=types, targets_N=targets_N, task=task, weights_N=weights_N, whole=whole
        ),
        layout=layout,
        micro_batches=tuple(micro_batches),
        num_samples=facts.num_samples,
        num_tokens=facts.num_tokens,
        num_computed=num_computed,
    )


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Samples of each effective batch: reshuffled each epoch, the last batch of an epoch ragged.

    A function of (seed, epoch, position) alone: there is no state to save, and resuming costs nothing.
    """

    num_samples: int
    batch_size: int
    seed: int

    @property
    def batches_per_epoch(self) -> int:
        """Effective batches that an epoch has, the ragged last one counted."""
        return -(-self.num_samples // self.batch_size)

    def epoch(self, number: int) -> int:
        """The epoch that batch `number` is in."""
        return number // self.batches_per_epoch

    def samples(self, number: int) -> np.ndarray:
        """Dataset indices of the samples of batch `number`, counted from the beginning of training."""
        epoch, position = divmod(number, self.batches_per_epoch)
        order = _epoch_order(self.seed, epoch, self.num_samples)
        return order[position * self.batch_size : (position + 1) * self.batch_size]


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    order = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(num_samples)
    order.flags.writeable = False  # it is kept, and batches are views of it
    return order
