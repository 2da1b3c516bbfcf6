"""The way that the host launches a step.

    eager     one kernel after another
    fused     the same, with layers on our fused kernels: for weights in parts that come from host memory
    captured  as CUDA graphs: cheap, and it always pays. In longer runs parts of padded layers are on our kernels
    compiled  captured, with layers on fused kernels, ours or torch.compile's. Where ours cover them, they are recorded
              in tenths of a second; otherwise it takes seconds, and pays in long runs

One graph serves all layers and all token budgets: layers are the same code with other parameters, and the number of
tokens is a symbol.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from brimful.core.errors import OptionError
from brimful.core.options.train import TrainOptions
from brimful.data.batches.padding import cut
from brimful.levers.activations import compiled_for_less, fuses_layers
from brimful.levers.checkpointing import Checkpointing
from brimful.levers.compiled_layers import (
    compile_layers,
    compile_padded_layers,
    fuse_padded_layers,
    record_layers,
)
from brimful.levers.facts import kernels_of
from brimful.levers.lever import Assembly, Cost, Lever, StepWork, Verdict
from brimful.levers.optimizer import Optimizer
from brimful.levers.packing import Packing, streamed
from brimful.levers.parameter_efficient import TrainedPart
from brimful.levers.sharding import Sharding
from brimful.levers.tensor_parallel import TensorParallel
from brimful.levers.token_budget import TokenBudget, cuts_windows
from brimful.models.model_stats import layer_lists, layers_of, matmul_parameters
from brimful.models.packed.fused_check import fused_error
from brimful.models.packed.fusible import Fusible, fusible_of_pass
from brimful.models.packed.host_decisions import HostDecisions
from brimful.models.packed.host_reads import Recording, how_recorded
from brimful.models.packed.packed_forward import PackedModel, PaddedModel

#: Cold seconds that compiling a layer costs where torch's compiler does it, and the share of a step's device time that
#: it saves: BERT-base on an H200, torch 2.11 (benchmarks/profile). Fused kernels cost less and save more.
_COMPILE_S, _SAVED = 10.0, 0.25
#: The former of layers with adapters that our kernels do not cover: LoRA on a decoder's queries and values took 55 s on
#: an H100 (benchmarks/adapters) when they did not.
_COMPILE_ADAPTED_S = 50.0
#: The same share where layers of packed rows are trained, and seconds of each in a step that are saved at the least, by
#: fewer kernels: BERT-base on an H100, captured 34 and compiled 18 ms on BBC News, 5.8 and 3.8 ms on tweets
#: (benchmarks/drop_in).
_SAVED_IN_TRAINING, _SAVED_A_LAYER_S = 0.5, 120e-6
#: The latter of padded rows where their step cannot be traced.
_SAVED_A_PADDED_LAYER_S = 300e-6
#: Share that compiled layers save of the seconds that `models.packed.fusible` counts. Counted and saved in a bf16 step
#: of 32 rows of 512 tokens on an H200 (benchmarks/fallback), captured and compiled in different calls: T5-Gemma 24.2
#: and 22.5 ms, A.X-K2 17.8 and 20.5, Qwen3-Next 20.4 and 16.6, Qwen3.5 17.5 and 13.1.
_SAVED_OF_FUSIBLE = 0.75
#: More than any model counts, in seconds of a layer and of each number of its states: counting takes 0.6 to 15 s,
#: and is left out where not even these would pay.
_MOST_FUSIBLE_S, _MOST_OF_A_STATE_S = 1e-3, 1e-9
#: Seconds that fused kernels of recorded layers cost: 4 on a slow host that compiles them, 1 on one that finds them on
#: disk (benchmarks/whole_command).
_RECORD_S = 2.5
#: The same with their comparison on a copy: of a decoder of 1.2 billion parameters, by arithmetic.
_COMPARE_S = 10.0
#: Seconds of a padded layer in a step that parts on our kernels save, by arithmetic: some twenty kernels of 3.5 us.
_SAVED_BY_PARTS_S = 70e-6
#: Cold seconds of fused kernels forward only (benchmarks/classification).
_COMPILE_FORWARD_S = 4.0
#: Cold seconds of layers of padded rows, by torch's compiler alone, for one length of rows, and for several
#: (benchmarks/fallback); and forward only.
_COMPILE_PADDED_S, _COMPILE_LENGTHS_S, _COMPILE_PADDED_FORWARD_S = 40.0, 90.0, 25.0
#: Operators of a layer from which the first takes longer, and seconds of each more. To the first step on an H200, with
#: other work on its host: 16 s of 147 (Phi-MoE), 17 of 179 (gpt-oss), 30 of 244 (A.X-K2), 131 of 359 (Qwen3.5), 99 of
#: 426 (Qwen3-Next). The first is more than the smaller ones: models of more kinds of layers were not measured again.
_FEW_OPERATORS, _COMPILE_AN_OPERATOR_S = 240, 0.5
#: Share of many seconds that a run is charged with. Kernels stay on disk (Qwen3.5's second run took 12 s): a first run
#: loses half of what compiling takes at the most, and later ones of the same shapes save.
_CHARGED = 0.5
#: Types whose layers torch's compiler makes no faster: those of Funnel took 450 s on an H200, and 1.2 times as long as
#: uncompiled then (benchmarks/fallback).
_NOT_FASTER = frozenset({"funnel"})
#: Operations per second that a step reaches, to guess how long a run will take.
_REACHED = 250e12

#: Of batches that must not be split: steps from which a graph of each shape pays, and the most shapes.
_STEPS_A_SHAPE, _MOST_SHAPES = 50, 40


@dataclass(frozen=True, kw_only=True)
class ExecutionMode(Lever):
    """The way the steps, or passes, of one run are launched.

    fused: whether layers are fused around our attention. streamed: whether gradients are a layer's at a time.
    """

    name = "execution"
    source = "torch.compile, torch.cuda.CUDAGraph"
    fused: bool = False
    streamed: bool = False

    @property
    def captured(self) -> bool:
        """True where steps are replayed as graphs."""
        return self.value in ("captured", "compiled")

    @property
    def compiled(self) -> bool:
        """True where layers are compiled, or recorded."""
        return self.value in ("compiled", "fused")

    @classmethod
    def supports(cls, assembly: Assembly) -> Verdict:
        """Return whether steps can be captured: on a GPU, where shapes repeat and the host need not see any number."""
        if assembly.device.type != "cuda":
            because = f"graphs and fused kernels are for GPUs, and this runs on {assembly.device.type}"
            return Verdict(ok=False, because=because)
        if assembly.num_ranks > 1 and (why_not := _why_not_together(assembly)) is not None:
            return Verdict(ok=False, because=why_not)
        if (why_not := _not_streamed_by_graphs(assembly)) is not None:
            return Verdict(ok=False, because=why_not)
        if assembly.training:
            assembly.lever(Optimizer)
            checkpointing = assembly.find(Checkpointing)
            again = streamed(assembly) or (checkpointing is not None and checkpointing.recomputes)
            if again and not assembly.fact(kernels_of).fused:
                return Verdict(ok=False, because="masks of attention could not be drawn again in a graph")
        if assembly.lever(Packing).packed:
            return assembly.fact(kernels_of).variable_length
        shapes = repeats_shapes(assembly)
        if not shapes.ok:
            return shapes
        why_not = assembly.fact(recording_of).why_not
        return Verdict(ok=why_not is None, because=why_not or "rows have few shapes")

    @classmethod
    def supports_fused(cls, assembly: Assembly) -> Verdict:
        """Return whether layers on our fused kernels can be launched one after another, and compute what plain ones do:
        in training with weights whole, or in parts that torch puts together."""
        if assembly.device.type != "cuda" or not assembly.training or streamed(assembly):
            return Verdict(ok=False, because="it is for training on a GPU that layers' weights are on")
        if assembly.find(TensorParallel) is not None or _sharding(assembly) == "deepspeed":
            return Verdict(ok=False, because="layers are cut, or called in a way of DeepSpeed's")
        if assembly.precision.value == "fp8" or not fuses_layers(assembly):
            return Verdict(
                ok=False, because="layers are fused of packed rows, where our attention is taken, in other than fp8"
            )
        error = assembly.fact(fused_error_of)
        if error is None:
            return Verdict(ok=False, because="our kernels do not cover its layers, or these failed on a copy")
        if not error <= 1.0:
            return Verdict(ok=False, because=f"fused layers are {error:.1f} times over their tolerance")
        return Verdict(ok=True, because=f"layers on fused kernels, at {error:.2f} of their tolerance")

    @classmethod
    def choose(cls, assembly: Assembly) -> ExecutionMode:
        """Choose the mode asked for, for `auto` the fastest that works here and pays in a run, or in the next ones."""
        asked, verdict = assembly.options.execution, cls.supports(assembly)
        fused = assembly.lever(Packing).packed and assembly.fact(kernels_of).fused
        if asked == "fused":
            launched = cls.supports_fused(assembly)
            if not launched.ok and assembly.ranks.leads:  # others do what it has found, as far as they can
                raise OptionError(f"--execution fused does not work here: {launched.because}", hint="leave it out")
            return cls(value="fused", reason="asked for", fused=True)
        if asked == "auto" and assembly.precision.value == "fp8" and cuts_windows(assembly) and not _in_parts(assembly):
            asked = "compiled"  # fp8 is of fused layers
        if not verdict.ok:
            if asked not in ("auto", "eager"):
                raise OptionError(f"--execution {asked} does not work here: {verdict.because}", hint="leave it out")
            if asked == "auto" and _in_parts(assembly) and _pays_in_parts(assembly):
                launched = cls.supports_fused(assembly)
                reason = f"{verdict.because}; {launched.because}"
                return cls(value="fused" if launched.ok else "eager", reason=reason, fused=launched.ok)
            return cls(value="eager", reason="asked for" if asked == "eager" else verdict.because)
        if streamed(assembly) and asked != "eager":
            if asked == "compiled":
                because = "a layer's weights are others in each turn"
                raise OptionError(f"--execution compiled does not work here: {because}", hint="use captured")
            reason = "asked for" if asked == "captured" else "one launch a step, copies of weights among it"
            return cls(value="captured", reason=reason, fused=fused, streamed=True)
        if _in_parts(assembly) and asked != "eager":
            return cls._in_graphs(assembly, asked, fused=fused)
        has_layers = bool(lists_to_compile(assembly))
        if asked == "compiled" and not has_layers:
            because = "the model has no list of layers of its own, or the host is needed in them"
            raise OptionError(f"--execution compiled does not work here: {because}", hint="use captured")
        if asked != "auto":
            return cls(value=asked, reason="asked for", fused=fused)
        if assembly.precision.value == "fp8" and has_layers:
            return cls(value="compiled", reason="products in fp8 are those of fused layers", fused=fused)
        if compiled_for_less(assembly):
            reason = "one launch a step, and fused layers keep less of what --activation-memory limits"
            return cls(value="compiled", reason=reason, fused=fused)
        return cls._that_pays(assembly, has_layers=has_layers, fused=fused)

    @classmethod
    def _in_graphs(cls, assembly: Assembly, asked: str, *, fused: bool) -> ExecutionMode:
        """Choose between graphs that hold weights in parts: with layers on our kernels where that is asked for, or
        pays. No compiler is asked for their layers, which torch's hooks run around."""
        if asked == "captured" or (asked == "auto" and not _pays_in_parts(assembly)):
            reason = "asked for" if asked == "captured" else "one launch a step, what is sent among it"
            return cls(value="captured", reason=reason, fused=fused)
        launched = cls.supports_fused(assembly)
        if asked == "compiled" and not launched.ok and assembly.ranks.leads:
            raise OptionError(f"--execution compiled does not work here: {launched.because}", hint="use captured")
        reason = f"one launch a step, what is sent among it; {launched.because}"
        # Others are asked for what the first process has found.
        return cls(value="compiled" if launched.ok or asked == "compiled" else "captured", reason=reason, fused=fused)

    @classmethod
    def _that_pays(cls, assembly: Assembly, *, has_layers: bool, fused: bool) -> ExecutionMode:
        packed = assembly.lever(Packing).packed
        compile_s, charged_s = _compile_seconds(assembly, fused=fused)
        saved_s = saved_seconds(assembly)
        not_faster = not packed and assembly.model.config.model_type in _NOT_FASTER
        if not has_layers or not_faster or saved_s < charged_s:
            against = f"compiling would save about {saved_s:.0f} s of this run and take {compile_s:.0f} s"
            if not_faster:
                against = f"compiled layers of {assembly.model.config.model_type} are no faster"
            if not has_layers:
                against = "there is no list of layers to compile, or the host is needed in them"
            return cls(value="captured", reason=f"one launch a step; {against}", fused=fused)
        reason = "one launch a step, with element-wise work fused by layer"
        if not packed:
            reason += f": about {compile_s:.0f} s to compile in a first run here, {saved_s:.0f} s saved in each"
        return cls(value="compiled", reason=reason, fused=fused)

    def cost(self, work: StepWork) -> Cost:
        """Gradients in the graphs' pool beside those of eager steps, and what compiled layers save of a step."""
        return Cost(
            resident_bytes=4 * work.num_trained if self.captured and not self.streamed else 0,
            step_s=-_SAVED * work.products_s(work.num_tokens) if self.compiled else 0.0,
        )

    def compile_seconds(self, assembly: Assembly) -> float:
        """Return the seconds that the first step waits for torch's compiler where no kernel is on disk; 0 for layers
        that are not compiled, or recorded."""
        if self.value != "compiled" or _is_recorded(assembly, fused=self.fused) or _in_parts(assembly):
            return 0.0
        return _compile_seconds(assembly, fused=self.fused)[0]

    def apply(self, assembly: Assembly) -> None:
        """Compile the model's layers in place, if that was chosen. Compilation itself waits for the first step."""
        execution = assembly.execution
        if self.captured and isinstance(execution, PaddedModel) and assembly.fact(recording_of).with_decisions:
            execution.decisions = HostDecisions(assembly.device)
        if execution is None:
            return
        if self.value == "captured" and isinstance(execution, PaddedModel) and assembly.training:
            lists = lists_to_compile(assembly)
            if _SAVED_BY_PARTS_S * sum(map(len, lists)) * num_steps_of(assembly) >= _RECORD_S:
                fuse_padded_layers(assembly.model, lists)
        if not self.compiled:
            return
        if self.value == "fused" or _in_parts(assembly):
            record_layers(execution)
        elif isinstance(execution, PackedModel):
            fused = fuses_layers(assembly)
            compile_layers(execution, fused=fused, note=assembly.warn, forward_only=not assembly.training)
        else:
            compile_padded_layers(execution, note=assembly.warn)


def fused_error_of(assembly: Assembly) -> float | None:
    """Return the error of fused layers, as `fused_error` has it, in the process that leads."""
    form, kernels = assembly.lever(Packing).equivalence.form, assembly.fact(kernels_of)
    if form is None or not assembly.ranks.leads:
        return None
    return fused_error(
        assembly.model, form, max_length=assembly.max_length, device=assembly.device,
        precision=assembly.precision.value, kernel=(kernels.typical_length, kernels.fastest),
    )  # fmt: skip


def _not_streamed_by_graphs(assembly: Assembly) -> str | None:
    """Return why steps are not captured whose weights are streamed; None where they are, or none are streamed."""
    if not streamed(assembly):
        return None
    if not assembly.training:
        return "weights come layer by layer, and copies take longer than launches"
    if assembly.options.stream_weights != "host":
        return "the host reads weights from a file in each pass"
    return None if assembly.lever(Packing).packed else "weights are streamed to padded rows by the host"


def _sharding(assembly: Assembly) -> str:
    sharding = assembly.find(Sharding)
    return "none" if sharding is None else sharding.value


def _in_parts(assembly: Assembly) -> bool:
    return assembly.training and assembly.num_ranks > 1 and _sharding(assembly) == "parameters"


def _pays_in_parts(assembly: Assembly) -> bool:
    """Return whether fused layers save what their comparison costs. In fp32 they would keep copies of weights."""
    return assembly.precision.half is not None and saved_seconds(assembly) >= _COMPARE_S


def _why_not_together(assembly: Assembly) -> str | None:
    """Return why no graph can hold what several processes send one another in a step; None where one can."""
    if _in_parts(assembly) and isinstance(assembly.options, TrainOptions) and assembly.options.optimizer_offload:
        return "weights in parts come from host memory, from which the host brings them"
    if assembly.lever(Packing).packed and (assembly.lever(Optimizer).fused or _in_parts(assembly)):
        return None
    return "graphs of several processes are of packed rows, whose weights our kernels update or FSDP2 has in parts"


def saved_seconds(assembly: Assembly) -> float:
    """Return the seconds that compiled layers are expected to save in all of a run, in each process."""
    passes = 1 if not assembly.training else 2 if _has_adapter(assembly) else 3  # frozen weights have no gradients
    whole_s = 2 * passes * matmul_parameters(assembly.model) * assembly.num_tokens / _REACHED / assembly.num_ranks
    if not assembly.training:
        return _SAVED * whole_s
    packed = assembly.lever(Packing).packed
    num_layers = sum(map(len, lists_to_compile(assembly)))
    if packed:
        return max(_SAVED_IN_TRAINING * whole_s, _SAVED_A_LAYER_S * num_layers * num_steps_of(assembly))
    fusible = assembly.fact(fusible_of_step)
    of_layers_s = _SAVED_A_PADDED_LAYER_S * num_layers if fusible is None else _SAVED_OF_FUSIBLE * fusible.seconds
    return max(_SAVED * whole_s, of_layers_s * num_steps_of(assembly))


def _is_recorded(assembly: Assembly, *, fused: bool) -> bool:
    """Return whether our kernels cover the layers of packed rows, which then need no compiler of torch's."""
    packing = assembly.lever(Packing)
    return packing.packed and fused and packing.equivalence.recorded


def _compile_seconds(assembly: Assembly, *, fused: bool) -> tuple[float, float]:
    """Return seconds of compiling the layers where no kernel is on disk, and those that a run is charged with."""
    packed, training = assembly.lever(Packing).packed, assembly.training
    if _is_recorded(assembly, fused=fused):
        return _RECORD_S, _RECORD_S
    if packed or not training:
        forward_s = _COMPILE_FORWARD_S if packed else _COMPILE_PADDED_FORWARD_S
        seconds = forward_s if not training else _COMPILE_ADAPTED_S if _has_adapter(assembly) else _COMPILE_S
        return seconds, seconds
    asked = assembly.options.execution != "auto"  # then nothing depends on what is counted, which takes seconds itself
    fusible = None if asked else assembly.fact(fusible_of_step)
    more = 0 if fusible is None else max(0, fusible.operators - _FEW_OPERATORS)
    cold_s = _COMPILE_PADDED_S + _COMPILE_AN_OPERATOR_S * more
    lengths = _COMPILE_LENGTHS_S / _COMPILE_PADDED_S if _has_lengths(assembly) else 1.0
    return lengths * cold_s, lengths * max(_COMPILE_PADDED_S, _CHARGED * cold_s)


def fusible_of_step(assembly: Assembly) -> Fusible | None:
    """Return what compiled layers can fuse in a padded step of this training; None where that is not counted.

    The largest micro-batch of a usual batch is traced, and stands for its others by their tokens.
    """
    lists = lists_to_compile(assembly)
    if assembly.model.config.model_type in _NOT_FASTER or not lists or _in_parts(assembly):
        return None
    steps = [_micro_batches(lengths_N, assembly) for lengths_N in assembly.batches(assembly.budget)]
    sizes = sorted((sum(rows * length for rows, length in step), step) for step in steps)
    num_tokens, usual = sizes[len(sizes) // 2]
    width = getattr(assembly.model.config.get_text_config(), "hidden_size", 0) or 0
    most_s = (_MOST_FUSIBLE_S + _MOST_OF_A_STATE_S * width * num_tokens) * sum(map(len, lists))
    if most_s * num_steps_of(assembly) < _COMPILE_PADDED_S:
        return None
    rows, length = max(usual, key=lambda size: size[0] * size[1])
    attention = getattr(assembly.execution, "attention", "sdpa")
    recording, half = assembly.fact(recording_of), assembly.precision.half
    found = fusible_of_pass(assembly.model, rows, length, recording, attention=attention, half=half)
    return found and replace(found, seconds=found.seconds * num_tokens / (rows * length))


def _micro_batches(lengths_N: np.ndarray, assembly: Assembly) -> list[tuple[int, int]]:
    """Return the rows of a batch's micro-batches and the tokens of each row, padding counted."""
    shapes = assembly.lever(TokenBudget).shapes
    if shapes is None or not assembly.lever(Packing).equivalence.independent:
        return [(len(lengths_N), int(lengths_N.max()))]
    return [(rows, length) for rows, length, _ in cut(lengths_N, shapes)]


def _has_adapter(assembly: Assembly) -> bool:
    part = assembly.find(TrainedPart)
    return part is not None and part.adapter


def _has_lengths(assembly: Assembly) -> bool:
    """Return whether padded rows are of several lengths: then layers are traced for one, and once more for any."""
    shapes = assembly.lever(TokenBudget).shapes
    if shapes is not None and shapes.lengths is not None and assembly.lever(Packing).equivalence.independent:
        return len(shapes.lengths) > 1
    return len({int(lengths_N.max()) for lengths_N in assembly.batches(assembly.budget)}) > 1


def num_steps_of(assembly: Assembly) -> float:
    """Return about how many steps a training run has, by the tokens that each process has of a batch."""
    tokens = float(np.mean([lengths_N.sum() for lengths_N in assembly.batches(assembly.budget)]))
    return assembly.num_tokens / assembly.num_ranks / max(1.0, tokens)


def repeats_shapes(assembly: Assembly) -> Verdict:
    """Return whether padded batches have the same few shapes again and again.

    Where rows influence one another, or padding does, a batch is padded to its own longest sequence: then each longest
    length is a shape, and a run must be long enough for graphs of all of them.
    """
    if assembly.lever(Packing).equivalence.independent:
        return Verdict(ok=True, because="rows have few shapes")
    if not assembly.training:
        return Verdict(ok=False, because="each text is a batch of its own length")
    num_shapes = len({int(lengths_N.max()) for lengths_N in assembly.batches(assembly.budget)})
    num_steps = num_steps_of(assembly)
    asked = assembly.options.execution != "auto"  # it need not pay then
    often = num_steps >= _STEPS_A_SHAPE * num_shapes or asked
    because = f"batches that must not be split have {num_shapes} lengths in about {num_steps:.0f} steps"
    return Verdict(ok=often and num_shapes <= _MOST_SHAPES, because=because)


def recording_of(assembly: Assembly) -> Recording:
    """Return how padded passes can be captured, if they can."""
    attention = getattr(assembly.execution, "attention", "sdpa")
    half = assembly.precision.half
    return how_recorded(assembly.model, assembly.max_length, training=assembly.training, attention=attention, half=half)


def lists_to_compile(assembly: Assembly) -> list[nn.ModuleList]:
    """Return the lists of layers that would be compiled: of a packed model one, of a padded one its decoder's too."""
    if not assembly.lever(Packing).packed:  # the compiler does not see what is asked in the midst of a layer
        return layer_lists(assembly.model) if assembly.fact(recording_of).compilable else []
    layers = layers_of(assembly.model)
    return [] if layers is None else [layers]
