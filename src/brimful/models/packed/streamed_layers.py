"""Weights of layers outside the device, each brought there for its turn: for models that do not fit.

A layer's weights lie in one piece, in pinned host memory or in a file that is mapped into memory. Few pieces are on the
device at a time: while a layer runs from one, the next layer's weights come into another, on a stream of its own; in
training those of the layer before leave a third. Products are those of weights that never leave. On a CPU pieces are
copied likewise, to memory that stands for a device's.

A layer that is trained has its turn in the forward pass, and in the backward pass, where it is computed again
(`recompute`). What is to change its weights (`change_later`) does so when its next turn begins. Weights that were
changed in a turn go back at its end. In host memory weights have fixed places, and so have pieces: passes that begin
and end with no copy under way (`come_together`) can be captured.

Parameters outside of layers, and those that layers share, stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from brimful.hardware.process_settings import give_back_freed_memory
from brimful.models.packed.recompute import call_recomputed_within
from brimful.models.packed.weight_stores import FileStore, HostStore, Store

#: Pieces on the device of a model that is read, and of one that is trained.
READ, TRAINED = 2, 3
#: Bytes that a parameter starts at a multiple of.
_ALIGNMENT = 256
#: Bytes of weights that are moved before the host gives back what they had.
_GIVEN_BACK_BYTES = 1 << 28


def own_parameters(layers: nn.ModuleList) -> list[list[nn.Parameter]]:
    """The parameters of each layer that no other module has, trained ones first."""
    owners: dict[int, int] = {}
    for layer in layers:
        for parameter in set(layer.parameters()):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    owned = ([p for p in layer.parameters() if owners[id(p)] == 1] for layer in layers)
    return [sorted(each, key=lambda p: not p.requires_grad) for each in owned]


def move_all_but(model: nn.Module, layers: nn.ModuleList, device: torch.device) -> None:
    """Move a model to a device, but for what its layers have of their own."""
    stays = {id(p) for each in own_parameters(layers) for p in each}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in stays:
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def end_streaming(model: Any, *, moved: bool = True) -> None:
    """Give a model whose layers were streamed its weights back, in host memory. Others are left alone.

    moved: as of `StreamedLayers.remove`.
    """
    streamed = getattr(model, "streamed_layers", None)
    if streamed is not None:
        streamed.remove(moved=moved)
        model.streamed_layers = None


class StreamedLayers:
    """Weights of a model's layers, as hooks on them bring them to the device and let them go.

    folder: of a file without a name for the weights, None for host memory. num_bytes: of all that is streamed.
    fetched_bytes, kept_bytes: copied to the device so far, and back, but in replays of graphs. parameters: of each
    layer. pieces: on the device.
    after_backward: called with the number of each layer that a backward pass has come through, in its turn.
    """

    def __init__(
        self, layers: nn.ModuleList, device: torch.device, folder: Path | None = None, num_pieces: int = READ
    ) -> None:
        self._device, self._layers, self.parameters = device, layers, own_parameters(layers)
        self._places = [_places(each) for each in self.parameters]
        sizes = [end for _, end in self._places]
        self._trained = [_places([p for p in each if p.requires_grad])[1] for each in self.parameters]
        self.num_bytes, self.fetched_bytes, self.kept_bytes = sum(sizes), 0, 0
        self.after_backward: Callable[[int], None] = lambda _: None
        self._on_gpu = device.type == "cuda"
        self._inward, self._outward = (torch.cuda.Stream(device) if self._on_gpu else None for _ in range(2))
        self.pieces = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(num_pieces)]
        if self._inward is not None:  # what had this memory before may use it yet
            self._inward.wait_stream(torch.cuda.current_stream(device))
        self._inside: list[int | None] = [None] * num_pieces  # the layer whose weights a piece has, or is given
        self._arrived: list[Any] = [None] * num_pieces
        self._free: list[Any] = [None] * num_pieces
        self._kept: dict[int, Any] = {}
        self._busy: list[Any] = []  # streams with copies that nothing has waited for
        self._turns, self._changed, self._is_wide = [0] * len(layers), set[int](), False
        self._due: dict[int, Callable[[], None]] = {}
        self.folder = folder
        self._store: Store = (
            HostStore(sizes, self._on_gpu) if folder is None else FileStore(sizes, self._on_gpu, folder)
        )
        depth = range(len(self.parameters))
        # Views are made here: those of an inference pass cannot be parameters.
        self._here = [self._views(number, self.pieces[number % len(self.pieces)]) for number in depth]
        self._home = self._moved_home()
        self._hooks = []
        for number, layer in enumerate(layers):
            self._hooks.append(layer.register_forward_pre_hook(self._before(number)))
            self._hooks.append(layer.register_forward_hook(self._after(number), always_call=True))

    def _moved_home(self) -> list[list[Tensor]]:
        """Move weights to where they are kept, layer after layer, and give back what they had. Return their views."""
        homes, moved = list[list[Tensor]](), 0
        for number, parameters in enumerate(self.parameters):
            homes.append(self._views(number, self._store.home(number)))
            for parameter, view in zip(parameters, homes[-1], strict=True):
                parameter.data = view.copy_(parameter.data)
            moved += self._places[number][1]
            if moved > _GIVEN_BACK_BYTES or number == len(self.parameters) - 1:
                give_back_freed_memory()
                moved = 0
        return homes

    def recompute(self) -> None:
        """Have all layers computed again in the backward pass, their weights there until it is through."""
        for number, layer in enumerate(self._layers):
            changed: Any = layer
            changed.gradient_checkpointing = True
            around = partial(self._backward_turn, number)
            changed._gradient_checkpointing_func = partial(call_recomputed_within, around)

    def remove(self, *, moved: bool = True) -> None:
        """Take the hooks off. moved: to memory of their own; otherwise weights stay where they are kept, until they are
        streamed again."""
        for hook in self._hooks:
            hook.remove()
        self.settle()
        for parameters, views in zip(self.parameters, self._home, strict=True):
            for parameter, view in zip(parameters, views, strict=True):
                parameter.data = view.clone() if moved else view

    @property
    def is_due(self) -> bool:
        """True while changes wait for a layer's turn."""
        return bool(self._due)

    @property
    def due(self) -> tuple[int, ...]:
        """Numbers of the layers that changes wait for."""
        return tuple(sorted(self._due))

    def drop_due(self) -> None:
        """Drop all changes that wait."""
        self._due.clear()

    def come_together(self) -> None:
        """Have what is launched from now on come after all copies, and bring weights anew, as graphs begin and end."""
        for stream in self._busy:
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self.drop_copies()

    def drop_copies(self) -> None:
        """Forget what pieces have, and what is on its way: of a capture that is over, it was never brought."""
        self._busy.clear()
        self._kept.clear()
        self._inside = [None] * len(self.pieces)
        self._arrived, self._free = ([None] * len(self.pieces) for _ in range(2))

    def change_later(self, number: int, change: Callable[[], None]) -> None:
        """Have `change` called when a layer's next turn begins, whatever it is for. One that fails is called again."""
        self._due[number] = change

    def make_due(self) -> None:
        """Make all changes that wait."""
        for number in sorted(self._due):
            with self.turn(number, toward=1):
                pass

    def settle(self) -> None:
        """Wait until weights are kept as they are changed: parameters can be read then."""
        self.make_due()
        if self._outward is not None:
            self._outward.synchronize()
            torch.cuda.current_stream(self._device).synchronize()  # graphs have copies among them
        self._store.settle()

    def forget(self) -> None:
        """Bring weights anew: they were changed where they are kept. Changes that wait are dropped."""
        self._due.clear()
        self._inside = [None] * len(self.pieces)
        self._store.forget()

    @contextmanager
    def turn(self, number: int, *, toward: int = -1, changes: bool = False) -> Iterator[None]:
        """Within, the weights of a layer are on the device. toward: 1 or -1, where the next turn is. changes: whether
        they are changed."""
        try:
            self._begin(number, toward)
            if changes:
                self._begin_change(number)
            yield
        finally:
            self._end(number)

    @contextmanager
    def widened(self) -> Iterator[None]:
        """Within, weights in half precision come in fp32."""
        self.make_due()
        self._is_wide = True
        try:
            yield
        finally:
            self._is_wide = False

    @contextmanager
    def _backward_turn(self, number: int) -> Iterator[None]:
        with self.turn(number):
            yield
            self.after_backward(number)

    def _before(self, number: int) -> Callable[..., None]:
        return lambda *_: self._begin(number, toward=1)

    def _after(self, number: int) -> Callable[..., None]:
        def leave(*_: Any) -> None:
            self._end(number)
            if number + 1 == len(self.parameters) and not torch.is_grad_enabled():
                self._fetch(0, toward=1)  # of the next pass; after a pass that learns the last layers come again

        return leave

    def _begin(self, number: int, toward: int) -> None:
        self._turns[number] += 1
        if self._turns[number] > 1:
            return
        self._fetch(number, toward)
        event = self._arrived[number % len(self.pieces)]
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        views = self._here[number]
        self._show(number, [v.float() if v.itemsize == 2 else v for v in views] if self._is_wide else views)
        if 0 <= number + toward < len(self.parameters):
            self._fetch(number + toward, toward)
        if (change := self._due.get(number)) is not None:
            self._begin_change(number)
            with torch.inference_mode(False), torch.no_grad():
                change()
            del self._due[number]

    def _begin_change(self, number: int) -> None:
        """Have a change of a layer come after the one before has left: its weights need not have gone since."""
        self._changed.add(number)
        if (left := self._kept.get(number)) is not None:
            torch.cuda.current_stream(self._device).wait_event(left)

    def _end(self, number: int) -> None:
        self._turns[number] -= 1
        if self._turns[number]:
            return
        place, is_changed = number % len(self.pieces), number in self._changed
        self._changed.discard(number)
        self._show(number, self._home[number])  # first: in a capture that was refused, what follows fails
        if is_changed:
            self._free[place] = self._kept[number] = self._keep(number, self.pieces[place])
        elif self._on_gpu:
            self._free[place] = torch.cuda.current_stream(self._device).record_event()
        torch.clear_autocast_cache()  # casts of weights would stay on the device until the pass is over

    def _use(self, stream: Any) -> None:
        if stream is not None and stream not in self._busy:
            self._busy.append(stream)

    def _keep(self, number: int, piece: Tensor) -> Any:
        self._use(self._outward)
        self.kept_bytes += self._trained[number]
        return self._store.keep(number, piece[: self._trained[number]], self._outward)

    def _fetch(self, number: int, toward: int) -> None:
        """Begin to bring a layer's weights to the piece that they are used from, unless they are there."""
        place = number % len(self.pieces)
        before = self._inside[place]
        if before == number:
            return
        self._inside[place] = None
        home = self._store.take(number, self._following(number, toward))
        piece = self.pieces[place][: len(home)]
        self.fetched_bytes += len(home)
        if self._inward is None:
            piece.copy_(home)
        else:
            self._use(self._inward)
            if self._free[place] is None:  # whatever had the piece before, it is done with what was launched so far
                self._inward.wait_stream(torch.cuda.current_stream(self._device))
            # What was there may have been used again after it was changed, and be on its way to where it is kept yet.
            left = None if before is None else self._kept.get(before)
            for event in (self._free[place], left, self._kept.get(number)):
                if event is not None:
                    self._inward.wait_event(event)
            with torch.cuda.stream(self._inward):
                piece.copy_(home, non_blocking=True)
                self._arrived[place] = self._inward.record_event()
        self._store.taken(number, self._arrived[place])
        self._inside[place] = number

    def _following(self, number: int, toward: int) -> int | None:
        following, depth = number + toward, len(self.parameters)
        if torch.is_grad_enabled():
            return following if 0 <= following < depth else None
        return following % depth

    def _show(self, number: int, views: Sequence[Tensor]) -> None:
        for parameter, view in zip(self.parameters[number], views, strict=True):
            parameter.data = view

    def _views(self, number: int, piece: Tensor) -> list[Tensor]:
        starts, _ = self._places[number]
        return [
            piece[start : start + p.nbytes].view(p.dtype).view(p.shape)
            for start, p in zip(starts, self.parameters[number], strict=True)
        ]


def _places(parameters: Sequence[Tensor]) -> tuple[list[int], int]:
    """Bytes that each parameter starts at in its layer's piece, and where the last one ends."""
    starts, end = [], 0
    for parameter in parameters:
        starts.append(end)
        end += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts, max(end, _ALIGNMENT)
