"""AdamW of layers whose weights come to the device for their turn: gradients and states stay outside it, too.

    backward pass        a layer's gradients are added to their sums in host memory, and freed; the norm of each sum is
                         taken while it is on the device
    end of the step      norm and decision, and the update of what stays on the device
    next forward pass    in a layer's turn, states and sums come, too: its weights are updated, used, and sent back

So the update's copies go on beside products, and weights come once for both. What reads weights in between (`settle`)
has the layers that are due updated first. The arithmetic is that of `BucketedAdamW`, bit for bit. An update within the
backward pass is made in a layer's turn there, and no gradient leaves the device.

A graph of a whole step has the updates of the step before in its forward pass: which layers are due is part of what
tells graphs apart, and after a replay the host takes them to be due again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brimful.core.errors import MemoryFullError, OptionError, first_line, printable
from brimful.core.units import bytes_text
from brimful.hardware.file_memory import unnamed_file
from brimful.hardware.memory import is_out_of_memory
from brimful.measurement.memory import Kept
from brimful.models.packed.streamed_layers import StreamedLayers, end_streaming
from brimful.step.state import StepState
from brimful.step.updates import bucketed_adamw
from brimful.step.updates.bucketed_adamw import BucketedAdamW
from brimful.step.updates.buckets import Bucket, buckets_of, norms_of
from brimful.step.updates.host_states import HostStates

#: A bucket of a layer that is due, and those of its parameters that have gradients.
_Waiting = list[tuple[Bucket, list[int]]]
_GO_ON = "go on from the last checkpoint with --resume, and a lower --token-budget if it happens again"
#: Bytes of states, and as many of sums, that may be on their way to the host: those of a layer of width 1,024.
LAYER_LEAVING = 100_000_000


class StreamedAdamW(BucketedAdamW):
    """AdamW by buckets, some of which are of streamed layers. Its savings have states in host memory."""

    #: Buckets of a layer are updated one right after the other, and leave while the next layer computes.
    _leaving_bytes = LAYER_LEAVING
    #: Sums over micro-batches begin in one, and are added to in others, as the host knows.
    captures_several = False

    def __init__(
        self, model: Any, schedule: Tensor, *, streamed: StreamedLayers, device: torch.device, **given: Any
    ) -> None:
        self._streamed = streamed
        self._owners = {id(p): number for number, each in enumerate(streamed.parameters) for p in each}
        super().__init__(model, schedule, device=device, **given)
        own = [[b for b in self._buckets if self._owner(b.members[0]) == n] for n in range(len(streamed.parameters))]
        self._of_layer: list[list[Bucket]] = own
        sums = (self._outside(4 * bucket.size if self._is_streamed(bucket) else 0) for bucket in self._buckets)
        views = [each.view(torch.float32).view(1, -1) for each in sums]
        self._layer_sums = HostStates(views, self.device, leaving_bytes=self._leaving_bytes)
        self._summed: set[int] = set()  # buckets of layers that this batch has gradients of
        self._norms: dict[int, Tensor] = {}  # of the gradients of layers' parameters that it has
        self._waiting: dict[int, _Waiting] = {}  # of each layer that is due, what is to be updated yet
        self._left_due: dict[Hashable, dict[int, _Waiting]] = {}  # by the graph that leaves them so
        self._recorded: dict[int, _Waiting] | None = None  # what the graph that is recorded leaves
        self._is_recording = self._has_updated_layers = False
        streamed.after_backward = self._take_layer

    def _owner(self, index: int) -> int | None:
        """The number of the layer that a parameter is streamed with, None for one that stays."""
        return self._owners.get(id(self.parameters[index]))

    def _is_streamed(self, bucket: Bucket) -> bool:
        return self._owner(bucket.members[0]) is not None

    def _made_buckets(self) -> list[Bucket]:
        return buckets_of(self.parameters, bucketed_adamw.BUCKET, self._owner)

    def _has_stream(self) -> bool:
        """False: weights leave when the turn of their layer ends."""
        return False

    def _stays(self, bucket: Bucket) -> bool:
        """False: layers come and go in any case."""
        return False

    def _arena(self, num_bytes: int, *, stays: bool) -> Tensor:
        return self._outside(num_bytes)

    def _outside(self, num_bytes: int) -> Tensor:
        """Bytes, all 0, where weights are kept."""
        folder: Path | None = self._streamed.folder
        if folder is None or not num_bytes:
            return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        try:
            return unnamed_file(folder, num_bytes)
        except OSError as error:
            said = f"--stream-weights disk: a file of {bytes_text(num_bytes)} for sums and states cannot be made"
            where = printable(str(folder), 200)
            hint = "name another folder with --stream-folder"
            raise OptionError(f"{said} in {where}: {error.strerror}", hint=hint) from error

    def _is_summed_here(self, index: int) -> bool:
        return self._owner(index) is None

    def before(self) -> None:
        """As `Update` has it."""
        super().before()
        self._layer_sums.finish()

    def _leave_on_host(self, index: int) -> None:
        """Nothing: gradients of layers go to host memory by `_take_layer`."""

    def _take_layer(self, number: int) -> None:
        """Take the gradients of a layer, in its turn: update its weights, or add to the sums in host memory."""
        for bucket in self._of_layer[number]:
            if not self._is_begun:
                self._add(bucket)
            elif not bucket.is_done:
                self._update_early(bucket)

    def _add(self, bucket: Bucket) -> None:
        given = {i: g for i in bucket.members if (g := self.parameters[i].grad) is not None}
        if not given:
            return
        if bucket.number in self._summed:
            sums = self._layer_sums.fetch(bucket.number)
        else:
            sums = torch.zeros(1, bucket.size, dtype=torch.float32, device=self.device)
        summed = self._cut(bucket, sums)
        for i, gradient in given.items():
            summed[i].add_(gradient)
            self.parameters[i].grad = None
        norms = norms_of([summed[i] for i in given])
        self._norms.update(zip(given, norms, strict=True))
        self._summed.add(bucket.number)
        self._layer_sums.put(bucket.number, sums)

    def _norm(self, gradients: Mapping[int, Tensor]) -> Tensor:
        here = norms_of(list(gradients.values()))
        norms = self._norms | dict(zip(gradients, here, strict=True))
        whole: Tensor = torch.linalg.vector_norm(torch.stack([norms[i] for i in sorted(norms)]))
        return whole

    def _apply_whole(self, *, gathered: bool) -> Tensor:
        self._streamed.make_due()  # a layer that this batch left out
        return super()._apply_whole(gathered=gathered)

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """As `Update` has it. A layer that the forward pass left out is updated first: what follows may begin an
        update."""
        if self._savings.in_backward:
            self._streamed.make_due()
        with super().around_backward():
            yield

    def _begin(self) -> None:
        super()._end_copies()
        super()._begin()

    def _end_copies(self) -> None:
        """Nothing, while layers are due: their states come already."""
        if not self._streamed.is_due:
            super()._end_copies()

    def _update_all(self, gradients: Mapping[int, Tensor]) -> None:
        self._layer_sums.finish()
        for bucket in self._buckets:
            if not self._is_streamed(bucket):
                self._update(bucket, {i: gradients[i] for i in bucket.members if i in gradients}, ahead=-1)
        self._have_due(
            {
                number: [(bucket, [i for i in bucket.members if i in self._norms]) for bucket in buckets]
                for number, buckets in enumerate(self._of_layer)
            }
        )

    def _have_due(self, waiting: Mapping[int, _Waiting]) -> None:
        self._streamed.drop_due()
        self._waiting = {number: list(each) for number, each in waiting.items() if each}
        for number, each in self._waiting.items():
            self._streamed.change_later(number, partial(self._update_layer, each))

    def graph_kind(self) -> Hashable:
        """As `Update` has it: what is due. All copies come first."""
        if self._streamed.is_due and not self._has_updated_layers:  # kernels that a capture must not load
            self._streamed.make_due()
        self._streamed.come_together()
        self._end_layers()
        due = ((number, self._waiting[number]) for number in self._streamed.due)
        return tuple((number, *((bucket.number, *given) for bucket, given in waiting)) for number, waiting in due)

    @contextmanager
    def recording(self, key: Hashable) -> Iterator[None]:
        """As `Update` has it."""
        due = {number: list(self._waiting[number]) for number in self._streamed.due}
        self._recorded, self._is_recording = None, True
        try:
            yield
        finally:
            self._is_recording = False
            if self._recorded is not None:
                self._left_due[key] = self._recorded
            self._streamed.drop_copies()
            self._layer_sums.forget()
            if self._host is not None:
                self._host.forget()
            if self._summed or self._is_begun:  # it was refused in the midst of a backward pass
                self._end(gathered=True)
            self._have_due(due)

    def replayed(self, key: Hashable) -> None:
        """As `Update` has it."""
        self._have_due(self._left_due[key])

    def apply(self, *, gathered: bool) -> Tensor:
        """As `Update` has it. A graph ends with no copy under way."""
        readings = super().apply(gathered=gathered)
        if self._is_recording:
            self._recorded = {number: list(self._waiting[number]) for number in self._streamed.due}
            self._streamed.come_together()
            self._end_layers()
        return readings

    def _end_layers(self) -> None:
        """Have what is launched from now on come after all copies of sums and states."""
        self._layer_sums.finish()
        if self._host is not None:
            self._host.finish()

    def _update_layer(self, waiting: _Waiting) -> None:
        """Update a layer's buckets, which are taken off the list. Layers follow one another from the last bucket on.

        Where memory for what comes runs out, the rest waits for the next turn. Raises: MemoryFullError where it runs
        out later: a bucket that is updated by half must not be again.
        """
        assert self._host is not None
        while waiting:
            bucket, given = waiting[-1]
            self._host.bring(bucket.number, ahead=-1)
            sums = self._sums_of(bucket, given)
            try:
                self._update(bucket, sums, ahead=-1)
            except Exception as error:
                if self._is_recording:  # nothing was updated
                    raise
                self.committed = True
                if is_out_of_memory(error):
                    said = f"memory ran out while weights of a layer were being changed ({first_line(error)})"
                    raise MemoryFullError(said, resumable=False, hint=_GO_ON) from error
                raise
            waiting.pop()
        self._has_updated_layers |= not self._is_recording

    def _sums_of(self, bucket: Bucket, given: Collection[int]) -> dict[int, Tensor]:
        """Sums of a layer's gradients on the device, by parameter. given: those that have any."""
        if not given:
            return {}
        found = self._cut(bucket, self._layer_sums.fetch(bucket.number, ahead=-1))
        return {i: found[i] for i in given}

    def _cut(self, bucket: Bucket, sums: Tensor) -> dict[int, Tensor]:
        """(1, size) sums by parameter."""
        shapes = ((i, start, self.parameters[i].shape) for i, start in zip(bucket.members, bucket.starts, strict=True))
        return {i: sums[0, start : start + shape.numel()].view(shape) for i, start, shape in shapes}

    def _update_early(self, bucket: Bucket) -> None:
        owner = self._owner(bucket.members[0])
        if owner is None:
            super()._update_early(bucket)
            return
        with self._streamed.turn(owner, changes=True):
            super()._update_early(bucket)

    def _end(self, *, gathered: bool) -> None:
        super()._end(gathered=gathered)
        self._summed.clear()
        self._norms.clear()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """As `Update` has it. There must be no gradients yet."""
        self._streamed.make_due()
        with super().undisturbed():
            try:
                yield
            finally:
                self._streamed.drop_due()  # updates that were held back
                self._end(gathered=True)

    def gradients(self, *, gathered: bool) -> list[Tensor]:
        """As `Update` has it, in host memory: there may be no room for them elsewhere. Waits for the device."""
        self._layer_sums.finish()
        return self._read(self._gradients(gathered=gathered), self._summed, self._norms)

    def gradients_later(self) -> Callable[[], list[Tensor]]:
        """As `Update` has it."""
        here = {i: gradient.clone() for i, gradient in self._gradients(gathered=False).items()}
        return partial(self._read, here, set(self._summed), set(self._norms))

    def _read(self, here: Mapping[int, Tensor], buckets: Collection[int], given: Collection[int]) -> list[Tensor]:
        """Gradients in host memory. here: those on the device. buckets, given: of layers, which have any."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = {i: gradient.cpu() for i, gradient in here.items()}
        for bucket in self._buckets:
            if bucket.number in buckets:
                summed = self._cut(bucket, self._layer_sums.arenas[bucket.number])
                found |= {i: summed[i] for i in bucket.members if i in given}
        zeros = (torch.zeros(p.shape, dtype=torch.float32) for p in self.parameters)
        return [found[i].clone() if i in found else zero for i, zero in enumerate(zeros)]

    def weights(self) -> dict[str, Tensor]:
        """As `Update` has it, those of layers in host memory. Waits for the device."""
        self._streamed.settle()
        return super().weights()

    def weight(self, name: str) -> Tensor:
        """As `Update` has it."""
        self._streamed.settle()
        return super().weight(name)

    def state(self) -> StepState:
        """As `Update` has it."""
        self._streamed.settle()
        return super().state()

    def load_state(self, state: StepState) -> None:
        """As `Update` has it. Waits for the device: what it still sends would come after what is loaded."""
        self._streamed.forget()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._streamed.settle()
        super().load_state(state)

    def kept(self) -> Kept:
        """As `Update` has it, the pieces that weights come to included."""
        weights = [*self.model.parameters(), *self.model.buffers(), *self._streamed.pieces]
        return Kept.of(self.device, weights, self._gradient_tensors(), self._state_tensors())

    def release(self) -> None:
        """As `Update` has it: weights of layers are in host memory."""
        end_streaming(self.model)
        super().release()
