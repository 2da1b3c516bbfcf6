"""Streaming: weights of layers in host memory or in a file, each on the device for its turn alone.

For models that are read and do not fit. A pass takes as long as its products or as the link takes for all weights,
whichever is longer: a large token budget hides the link.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from brimful.core.errors import OptionError, printable
from brimful.core.options import ClassifyOptions
from brimful.core.units import bytes_text
from brimful.hardware.memory import free_host_bytes
from brimful.levers.lever import Assembly, Cost, Lever, StepWork, Verdict
from brimful.levers.packing import streamed
from brimful.levers.precision import PrecisionLever
from brimful.models.model_stats import layers_of
from brimful.models.packed.streamed_layers import StreamedLayers, own_parameters

#: Share of free host memory that pinned weights may take.
_HOST_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class Streaming(Lever):
    """Layers whose weights come for their turn. num_bytes: of these, as they are kept. largest: of one of them."""

    name = "streaming"
    source = "Sheng et al. 2023, arXiv 2303.06865; Rajbhandari et al. 2021, arXiv 2104.07857"
    num_bytes: int
    largest: int

    @classmethod
    def supports(cls, assembly: Assembly) -> Verdict:
        """Return whether layers can be told apart."""
        if layers_of(assembly.model) is None:
            return Verdict(ok=False, because="the model has no list of layers of its own")
        if assembly.precision.value == "fp8":
            return Verdict(ok=False, because="copies of weights in fp8 stay on the device; take bf16")
        return Verdict(ok=True, because="two layers are on the device at a time")

    @classmethod
    def choose(cls, assembly: Assembly) -> Streaming | None:
        """Stream where it was asked for."""
        if not streamed(assembly):
            return None
        asked: str = assembly.options.stream_weights  # type: ignore[union-attr]
        verdict = cls.supports(assembly)
        if not verdict.ok:
            raise OptionError(f"--stream-weights {asked} does not work here: {verdict.because}", hint="leave it out")
        assembly.lever(PrecisionLever)  # weights are kept as they are multiplied
        layers = layers_of(assembly.model)
        assert layers is not None
        sizes = [sum(p.nbytes for p in each) for each in own_parameters(layers)]
        if asked == "host":
            _check_host(sum(sizes))
        where = "in host memory" if asked == "host" else f"in a file in {_folder(assembly)}"
        reason = f"asked for: {bytes_text(sum(sizes))} of {len(sizes)} layers {where}; {verdict.because}"
        return cls(value=asked, reason=reason, num_bytes=sum(sizes), largest=max(sizes))

    def cost(self, work: StepWork) -> Cost:
        """Bytes of the layers that are not on the device; seconds of their copies are taken to be hidden."""
        return Cost(resident_bytes=2 * self.largest - self.num_bytes)

    def apply(self, assembly: Assembly) -> None:
        """Put the weights where they are kept, and bring them for each pass."""
        layers = layers_of(assembly.model)
        assert layers is not None
        folder = Path(_folder(assembly)) if self.value == "disk" else None
        try:
            assembly.model.streamed_layers = StreamedLayers(layers, assembly.device, folder)
        except OSError as error:
            where = printable(str(folder), 200)
            raise OptionError(
                f"--stream-weights disk: a file of {bytes_text(self.num_bytes)} cannot be made in {where}: {error}",
                hint="name another folder with --stream-folder",
            ) from error


def _folder(assembly: Assembly) -> str:
    options = assembly.options
    return (options.stream_folder if isinstance(options, ClassifyOptions) else None) or tempfile.gettempdir()


def _check_host(num_bytes: int) -> None:
    free = free_host_bytes()
    if free is not None and num_bytes > _HOST_SHARE * free:
        raise OptionError(
            f"--stream-weights host needs {bytes_text(num_bytes)} of host memory, and {bytes_text(free)} are free",
            hint="--stream-weights disk keeps them in a file",
        )
