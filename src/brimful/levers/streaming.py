"""Streaming: weights of layers in host memory or in a file, each on the device for its turn alone.

For models that do not fit. A pass takes as long as its products or as the link takes for all weights, whichever is
longer: a large token budget hides the link. In training gradients and states of the optimizer stay outside, too, and
layers are computed again in the backward pass; a layer is updated when the next forward pass comes to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer

from brimful.core.errors import OptionError
from brimful.core.options.train import TrainOptions
from brimful.core.units import bytes_text
from brimful.hardware.file_memory import FileRoom
from brimful.hardware.memory import free_host_bytes
from brimful.levers.facts import warn_on_cpu
from brimful.levers.lever import Assembly, Cost, Lever, StepWork, Verdict
from brimful.levers.packing import streamed, streamed_to
from brimful.levers.precision import PrecisionLever
from brimful.models.model_stats import layers_of, linear_parameters
from brimful.models.packed.streamed_layers import READ, TRAINED, StreamedLayers, own_parameters
from brimful.step.updates.streamed_adamw import LAYER_LEAVING

#: Share of free host memory that pinned weights may take.
_HOST_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class Streaming(Lever):
    """Layers whose weights come for their turn.

    num_bytes: of these, as they are kept. largest: of one of them. pieces: layers on the device. trained: how many of
    their weights are trained.
    """

    name = "streaming"
    source = "Sheng et al. 2023, arXiv 2303.06865; Rajbhandari et al. 2021, arXiv 2104.07857"
    num_bytes: int
    largest: int
    pieces: int = READ
    trained: int = 0

    @classmethod
    def supports(cls, assembly: Assembly) -> Verdict:
        """Return whether layers can be told apart."""
        layers = layers_of(assembly.model)
        if layers is None:
            return Verdict(ok=False, because="the model has no list of layers of its own")
        if assembly.training and not all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
            return Verdict(ok=False, because="Hugging Face's own code cannot recompute this model's layers")
        if assembly.precision.value == "fp8":
            return Verdict(ok=False, because="copies of weights in fp8 stay on the device; take bf16")
        if assembly.num_ranks > 1:
            return Verdict(ok=False, because="weights are streamed in one process")
        if assembly.optimizer is not None:
            return Verdict(ok=False, because="the loop's own optimizer needs all weights at once")
        return Verdict(ok=True, because=f"{_num_pieces(assembly)} layers are on the device at a time")

    @classmethod
    def choose(cls, assembly: Assembly) -> Streaming | None:
        """Stream where it was asked for."""
        if not streamed(assembly):
            return None
        asked = assembly.options.stream_weights
        verdict = cls.supports(assembly)
        if not verdict.ok:
            raise OptionError(f"--stream-weights {asked} does not work here: {verdict.because}", hint="leave it out")
        assembly.lever(PrecisionLever)  # weights are kept as they are multiplied
        layers = layers_of(assembly.model)
        assert layers is not None
        own, halved = own_parameters(layers), {id(p) for p in _halved(assembly)}
        sizes = [sum(p.numel() * (2 if id(p) in halved else p.itemsize) for p in each) for each in own]
        trained = sum(p.numel() for each in own for p in each if p.requires_grad)
        if asked == "host":
            warn_on_cpu(assembly, "--stream-weights host")
            _check_host(sum(sizes) + _bytes_beside(assembly.options) * trained)
        where = "in host memory" if asked == "host" else f"in a file in {streamed_to(assembly.options)}"
        beside = ", with their gradients and the optimizer's states" if assembly.training else ""
        reason = f"asked for: {bytes_text(sum(sizes))} of {len(sizes)} layers {where}{beside}; {verdict.because}"
        reason += "; layers are computed again" if assembly.training else ""
        return cls(
            value=asked, reason=reason, num_bytes=sum(sizes), largest=max(sizes), pieces=_num_pieces(assembly),
            trained=trained,
        )  # fmt: skip

    def cost(self, work: StepWork) -> Cost:
        """Bytes of the layers that are not on the device, nor their gradients, of states that leave it, and seconds of
        computing layers again; those of copies are taken to be hidden."""
        again = work.products_s(work.num_tokens) / work.passes if work.num_trained else 0.0
        leaving = LAYER_LEAVING if self.trained else 0
        return Cost(
            resident_bytes=self.pieces * self.largest - self.num_bytes,
            step_bytes=leaving - 4 * self.trained,
            step_s=again,
        )

    def apply(self, assembly: Assembly) -> None:
        """Put the weights where they are kept, and bring them for each pass."""
        layers = layers_of(assembly.model)
        assert layers is not None
        folder, halved, dtype = streamed_to(assembly.options), _halved(assembly), assembly.precision.dtype
        leaving = {id(p) for each in own_parameters(layers) for p in each} if folder is not None else set()
        if folder is not None and (filed := [p for p in halved if id(p) in leaving]):
            room = FileRoom(folder, sum(FileRoom.bytes_with(p.numel() * dtype.itemsize) for p in filed))
            for parameter in filed:
                parameter.data = room.put(parameter.data, dtype)
        for parameter in halved:  # others stay where they are
            parameter.data = parameter.data.to(dtype)
        assembly.model.streamed_layers = streamed_layers = StreamedLayers(layers, assembly.device, folder, self.pieces)
        if assembly.training:
            streamed_layers.recompute()


def _num_pieces(assembly: Assembly) -> int:
    return TRAINED if assembly.training else READ


def _halved(assembly: Assembly) -> list[Any]:
    """Trained weights that the update keeps in half precision alone."""
    if getattr(assembly.options, "weight_dtype", "fp32") == "fp32" or assembly.precision.half is None:
        return []
    linear = linear_parameters(assembly.model)
    return [p for p in assembly.model.parameters() if p.requires_grad and id(p) in linear]


def _bytes_beside(options: Any) -> int:
    """Bytes of a trained weight beside itself: its states, and its gradient unless that is used up at once."""
    if not isinstance(options, TrainOptions):
        return 0
    states = {"fp32": 8, "bf16": 4, "8bit": 2}[options.optimizer_state_dtype]
    return states + (0 if options.optimizer_in_backward else 4)


def _check_host(num_bytes: int) -> None:
    free = free_host_bytes()
    if free is not None and num_bytes > _HOST_SHARE * free:
        raise OptionError(
            f"--stream-weights host needs {bytes_text(num_bytes)} of host memory, and {bytes_text(free)} are free",
            hint="--stream-weights disk keeps them in a file",
        )
