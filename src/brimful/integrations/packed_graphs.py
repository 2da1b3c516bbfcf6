"""Calls of a packed model as CUDA graphs, inside a loop that calls `backward()` itself.

A call's row is laid out in one of few shapes. A shape runs kernel by kernel when it is first met, and is captured when
it comes again. The first shape that is captured is compared with the same pass launched kernel by kernel, by outputs
and gradients, from the same state of torch's generators; where they differ, nothing is captured.

Kernel by kernel run: calls between another one and its backward pass, and all that torch or the user looks into while
it runs (hooks, anomaly detection, hooks of saved tensors, dispatch modes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

from brimful.core.errors import first_line
from brimful.core.tolerances import TOLERANCES
from brimful.hardware.capture import is_capturing
from brimful.hardware.memory import is_out_of_memory
from brimful.hardware.process_settings import products_are_full
from brimful.integrations.module_hooks import PLACES, gathers_weights
from brimful.integrations.packed_execution import PackedExecution
from brimful.integrations.problem_type import problem_of
from brimful.kernels.layout import PackedShape, unpack_numbers
from brimful.step.graphs.cache import Graph, GraphCache, GraphPool, Recorder
from brimful.step.graphs.differentiable import Flight, RecordedPass, Weights

#: What a captured call may return.
_FIELDS = frozenset({"loss", "logits"})
#: Times that a loop may put other weights in the place of a model's before nothing is captured any more.
_MOST_CHANGES = 8
#: What peft's layers keep of the state of their adapters.
_ADAPTER = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")


def captures(device: torch.device) -> bool:
    """True if calls of a device can be captured: of the current one, as graphs are recorded there."""
    return device.type == "cuda" and device.index in (None, torch.cuda.current_device())


def make_recorder(device: torch.device, most_tokens: int) -> Recorder:
    """Return what records calls. most_tokens: of the largest row that is expected."""
    return GraphPool(device, most_tokens)


class Call:
    """One call: its packed row on the host, and arguments of the model's head.

    numbers, shape, has_positions: of `PaddedBatch.numbers`. precision: of its products.
    """

    def __init__(
        self,
        execution: PackedExecution,
        numbers: Tensor,
        shape: PackedShape,
        has_positions: bool,
        head: Mapping[str, Any],
        precision: str,
    ) -> None:
        self.execution, self.numbers, self.shape, self.head = execution, numbers, shape, head
        self.precision, self._has_positions = precision, has_positions

    @property
    def key(self) -> Hashable:
        """All that calls of one graph have in common."""
        labels, config = self.head.get("labels"), self.execution.model.config
        problem = problem_of(config, labels) if isinstance(labels, Tensor) else None
        return self.shape, self._has_positions, len(self.numbers), problem, tuple(map(_kind, self.head.items()))

    @property
    def differentiates_head(self) -> bool:
        """True if an argument of the head wants a gradient."""
        return any(isinstance(value, Tensor) and value.requires_grad for value in self.head.values())

    def compute(self, numbers: Tensor, head: Mapping[str, Any]) -> Any:
        """Return what the model's own forward returns, from numbers on its device."""
        positions_T = None
        if self._has_positions:
            numbers, positions_T = numbers[: -self.shape.num_tokens], numbers[-self.shape.num_tokens :].long()
        return self.execution.outputs(unpack_numbers(numbers, self.shape), positions_T, head)


class _Recorded:
    """Graphs of calls of one key, and the memory that they read the head's arguments from."""

    def __init__(self, call: Call) -> None:
        self._call, self._type, self.names = call, dict, ()
        self._head = {name: _static(value, call.execution.model.device) for name, value in call.head.items()}
        self.passes: RecordedPass | Graph[tuple[Tensor, ...]] | None = None

    _type: Any
    names: tuple[str, ...]

    def compute(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Outputs of a call, from where graphs read. Raises: RuntimeError for outputs that graphs do not give."""
        found = self._call.compute(numbers, self._head)
        self._type, self.names = type(found), tuple(found)
        if others := set(self.names) - _FIELDS:
            raise RuntimeError(f"the model returns {', '.join(sorted(others))}")
        return tuple(found.values())

    def take(self, head: Mapping[str, Any]) -> None:
        """Put a call's arguments where graphs read them."""
        for name, value in head.items():
            if isinstance(value, Tensor):
                self._head[name].copy_(value)  # which blocks for memory of the host, as the loop may write it again
            elif _is_count(value):
                self._head[name].fill_(value)

    def answer(self, outputs: tuple[Tensor, ...]) -> Any:
        """Return outputs as the model returns them."""
        return self._type(**dict(zip(self.names, outputs, strict=True)))


class PackedGraphs:
    """Graphs of one model's calls. note: takes the reason, once, where calls cannot be captured."""

    def __init__(self, model: Any, note: Callable[[str], None]) -> None:
        self._model, self._note = model, note
        self._modules = list(model.modules())
        self._tables = [table for module in self._modules for table in (module._parameters, module._buffers)]
        self._settings = [
            (vars(module), name)
            for module in self._modules
            for name, value in vars(module).items()
            if isinstance(value, float)
        ]
        self._adapted = [module for module in self._modules if hasattr(module, _ADAPTER[0])]
        self._held: tuple[Hashable, ...] = ()
        self._num_changes = 0
        self._parameters: list[Any] = []
        self._weights: Weights | None = None
        self._recorders: dict[bool, Recorder] = {}
        self._caches: dict[bool, GraphCache] = {}
        self._recorded: dict[Hashable, _Recorded] = {}
        self._flight: ReferenceType[Flight] | None = None
        self._stream: Any = None
        self._is_checked = False

    def outputs(self, call: Call) -> Any:
        """Return what the model's own forward returns; None where the call is to run kernel by kernel."""
        if call.execution.recomputes or call.differentiates_head or not self._may_capture():
            return None
        self._drop_what_changed()
        learns = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self._parameters)
        cache, key = self._cache(call, learns), (learns, self._modes(), call.precision, call.key)
        if not cache.enabled or not cache.meet([key]) or (learns and self._is_in_flight):
            return None
        try:
            recorded = self._found(cache, key, call)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.give_back(f"there is no memory for their graphs ({first_line(error)})")
            return None
        if recorded is None:
            if not cache.enabled:  # a refused capture has renewed torch's generator: earlier graphs have the old one
                self.give_back()
            return None
        recorded.take(call.head)
        return recorded.answer(self._run(recorded, call.numbers))

    @property
    def holds_memory(self) -> bool:
        """True if there are graphs, or what they need."""
        return bool(self._recorded) or self._weights is not None

    def give_back(self, because: str | None = None) -> None:
        """Drop all graphs with their memory; nothing is captured from now on. because: to be said, if it was not."""
        self._drop_all()
        for cache in self._caches.values():
            if because is not None and cache.enabled:
                cache.stop(because)
                because = None
            cache.stop()

    def _drop_all(self) -> None:
        self._recorded.clear()
        self._weights, self._is_checked = None, False
        for cache in self._caches.values():
            cache.free()

    def _run(self, recorded: _Recorded, numbers: Tensor) -> tuple[Tensor, ...]:
        if isinstance(recorded.passes, RecordedPass):
            flight = Flight(recorded.passes)
            self._flight = ref(flight)
            return flight.run(numbers)
        assert recorded.passes is not None
        return tuple(output.clone() for output in recorded.passes.replay(numbers))

    @property
    def _is_in_flight(self) -> bool:
        """True while the backward pass of a call is to come."""
        flight = None if self._flight is None else self._flight()
        return flight is not None and not flight.done

    def _found(self, cache: GraphCache, key: tuple[Any, ...], call: Call) -> _Recorded | None:
        """Graphs of a key, recorded and compared if there are none yet; None where that is refused."""
        if key in self._recorded:
            return self._recorded[key]
        learns, recorded = key[0], _Recorded(call)
        expected = None if self._is_checked else self._launched(call, learns)
        if learns:
            self._weights = self._weights or Weights(self._model)
            recorded.passes = RecordedPass.find(cache, key, self._weights, recorded.compute, call.numbers)
        else:
            recorded.passes = cache.find(key, recorded.compute, call.numbers)
        if recorded.passes is None:
            return None
        if expected is not None and not self._agrees(recorded, call, learns, expected):
            return None
        self._recorded[key] = recorded
        return recorded

    def _launched(self, call: Call, learns: bool) -> list[Tensor | None]:
        """Outputs and gradients of a call kernel by kernel, for its graphs to be compared with. Draws no numbers."""
        with self._same_draws(), self._recorders[learns].measured(call.shape.num_tokens):
            found = call.compute(call.numbers.to(self._device, non_blocking=True), call.head)
            return self._with_gradients(tuple(found.values()), learns)

    def _agrees(self, recorded: _Recorded, call: Call, learns: bool, expected: list[Tensor | None]) -> bool:
        """Compare graphs with what was launched; where they differ, capture nothing from now on."""
        with self._same_draws():
            recorded.take(call.head)
            found = self._with_gradients(self._run(recorded, call.numbers), learns)
        num_outputs = len(recorded.names)
        errors = [_distance(found[:num_outputs], expected[:num_outputs])]
        errors += [_distance(found[num_outputs:], expected[num_outputs:])] if learns else []
        if all(error <= TOLERANCES[call.precision].step for error in errors):  # NaN is not
            self._is_checked = learns or self._is_checked
            return True
        said = ", ".join(f"{error:.1e}" for error in errors)
        self.give_back(f"captured ones differ from those launched kernel by kernel ({said})")
        return False

    def _with_gradients(self, outputs: tuple[Tensor, ...], learns: bool) -> list[Tensor | None]:
        """Outputs, and the gradient of each weight of their sum; None where it has none."""
        found: list[Tensor | None] = [output.detach() for output in outputs]
        if learns:
            weights = [parameter for parameter in self._parameters if parameter.requires_grad]
            learned = [output for output in outputs if output.requires_grad]
            ones = [torch.ones_like(output) for output in learned]
            with torch.autocast(self._device.type, enabled=False):
                found += torch.autograd.grad(learned, weights, ones, allow_unused=True)
        return found

    def _same_draws(self) -> Any:
        devices = [self._device] if self._device.type == "cuda" else []
        return torch.random.fork_rng(devices)

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    def _cache(self, call: Call, learns: bool) -> GraphCache:
        """Graphs of calls that learn, or of others. Those of one do not touch what the other's keep."""
        if learns not in self._caches:
            self._recorders[learns] = make_recorder(self._device, 2 * call.shape.num_tokens)
            self._caches[learns] = GraphCache(self._recorders[learns], what="calls", note=self._note)
        return self._caches[learns]

    def _may_capture(self) -> bool:
        """True if nobody looks into the pass, and nobody records it, on the stream of the calls before."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            self._stream = self._stream or stream
            if stream != self._stream:
                return False
        return not (
            is_capturing()
            or torch.is_anomaly_enabled()
            or torch._C._len_torch_dispatch_stack()
            or torch._C._len_torch_function_stack()
            or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
            or any(getattr(torch_module, f"_global{place}") for place in PLACES)
            or gathers_weights(self._modules)
        )

    def _modes(self) -> Hashable:
        """All that a pass depends on besides its inputs and weights."""
        kind = self._device.type
        return (
            tuple(module.training for module in self._modules),
            tuple(values.get(name) for values, name in self._settings),  # dropout and the like
            tuple(str([getattr(module, name, None) for name in _ADAPTER]) for module in self._adapted),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            torch.get_deterministic_debug_mode(),
            products_are_full(),
        )

    def _drop_what_changed(self) -> None:
        """Drop all graphs where the model's numbers lie elsewhere, or others of them learn: they are captured anew."""
        there = [tensor for table in self._tables for tensor in table.values() if tensor is not None]
        held = tuple((id(tensor), tensor.data_ptr(), tensor.requires_grad) for tensor in there)
        if held == self._held:
            return
        self._num_changes += bool(self._held)
        self._held, self._parameters = held, list(self._model.parameters())
        self._drop_all()
        if self._num_changes > _MOST_CHANGES:
            self.give_back("the loop puts the model's weights elsewhere again and again")


def _kind(argument: tuple[str, Any]) -> Hashable:
    """Return what graphs know of an argument of the head."""
    name, value = argument
    if isinstance(value, Tensor):
        return name, value.shape, value.dtype
    return name, int if _is_count(value) else value


def _is_count(value: Any) -> bool:
    """True for a number that differs from call to call, as that of the items of a batch."""
    return isinstance(value, int) and not isinstance(value, bool)


def _static(value: Any, device: torch.device) -> Any:
    """Return memory on the device that holds an argument of the head."""
    if _is_count(value):
        return torch.tensor(value, device=device)
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value


def _distance(found: list[Tensor | None], expected: list[Tensor | None]) -> float:
    """Return the norm of all differences together over that of all that is expected; infinity for other shapes."""
    off, size = 0.0, 0.0
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None or one.shape != other.shape:
            if one is not other:
                return math.inf
            continue
        off += float((one.double() - other.double()).square().sum())
        size += float(other.double().square().sum())
    return math.sqrt(off / max(size, 1e-60))
