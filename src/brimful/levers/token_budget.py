"""Tokens of a micro-batch: a few fixed sizes, chosen from the data's lengths, up to what fills the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from brimful.core.errors import OptionError
from brimful.core.options.train import TrainOptions
from brimful.data.batches.batch import PackedLayout, PaddedLayout
from brimful.data.batches.packing import MAX_BUDGETS, TILE, Budgets, choose_budgets
from brimful.data.batches.padding import PaddedShapes
from brimful.hardware.memory import device_free_bytes
from brimful.hardware.probe import device_name
from brimful.hardware.specs import datasheet_flops_per_s
from brimful.levers.activations import fitting_tokens, recomputed_every
from brimful.levers.facts import kernels_of
from brimful.levers.lever import Assembly, Cost, Lever, StepWork, Verdict
from brimful.levers.optimizer import asked_optimizer
from brimful.levers.packing import Packing, streamed
from brimful.levers.padded_rows import padded_shapes
from brimful.levers.sharding import Sharding, needed_bytes
from brimful.levers.tensor_parallel import TensorParallel, cut_bytes
from brimful.levers.weights import cpu_budget
from brimful.models.model_stats import linear_parameters, matmul_parameters
from brimful.models.packed.packed_forward import padding_id_of

#: Most tokens of a micro-batch unless --token-budget says otherwise: on a GPU enough to fill it, in training on a CPU
#: few enough to stay near the caches.
_DEFAULT = {"cuda": 32768, "cpu": 4096}
#: Seconds of one shape before it is replayed, its first eager step and its capture: MiniLM-L6 on an H200
#: (benchmarks/whole_command).
_CAPTURE_S = 0.1
#: Share of the datasheet's peak that steps of small models reach, where a budget costs the most beside them (MiniLM-L6
#: on an H200, 7 %; BERT-base reaches 25 %), and operations per second of a GPU that is not in it.
_SHARE_REACHED, _REACHED = 0.1, 30e12
#: Most sequences of a micro-batch of a model that is only read.
_MOST_TEXTS = 512


@dataclass(frozen=True, kw_only=True)
class TokenBudget(Lever):
    """Sizes of micro-batches.

    tokens: of the largest. budgets: of packed ones, None where windows are cut without being seen before, or rows are
    padded. shapes: of padded rows. token_bytes: of activations of a token that a backward pass needs.
    """

    name = "token_budget"
    source = "Korthikanti et al. 2022, arXiv 2205.05198"
    tokens: int
    token_bytes: int
    budgets: Budgets | None = None
    shapes: PaddedShapes | None = None

    @classmethod
    def supports(cls, assembly: Assembly) -> Verdict:
        """Return whether batches may be split at all: not where rows influence one another."""
        packing = assembly.lever(Packing)
        if packing.packed or packing.equivalence.independent:
            return Verdict(ok=True, because="rows do not influence one another")
        return Verdict(ok=False, because=packing.equivalence.reason)

    @classmethod
    def choose(cls, assembly: Assembly) -> TokenBudget:
        """Choose sizes that the lengths of batches to come fill well, for training as many as are needed."""
        packing, verdict = assembly.lever(Packing), cls.supports(assembly)
        tokens = assembly.options.token_budget or _largest_kept(assembly)
        token_bytes, rows = bytes_a_token(assembly) or 0, _asked_rows(assembly)
        if rows is not None and not verdict.ok and rows < assembly.options.batch_size:  # type: ignore[union-attr]
            raise OptionError(
                f"--gradient-accumulation-steps splits batches, and this model's must stay whole: {verdict.because}",
                hint="give --batch-size instead",
            )
        said = "" if rows is None else f"at most {rows} rows each, as asked; "
        if not packing.packed:
            shapes, reason = padded_shapes(
                assembly, max(tokens, _longest(assembly, assembly.max_length)), most_rows(assembly)
            )
            if verdict.ok:
                _tell_raised(assembly, shapes.num_tokens)
            return cls(
                value=str(max(tokens, shapes.num_tokens)) if verdict.ok else "whole batch",
                reason=said + reason if verdict.ok else verdict.because,
                tokens=tokens,
                token_bytes=token_bytes,
                shapes=shapes,
            )
        if cuts_windows(assembly):
            reason = (
                "tokens of a micro-batch; texts are put in order of length within a window, so that few are missing"
            )
            return cls(value=str(tokens), reason=reason, tokens=tokens, token_bytes=token_bytes)
        batches = assembly.batches(tokens)
        share = sum(int(lengths.sum()) for lengths in batches) / max(1, assembly.num_tokens)
        cost = min(1.0, share) * _budget_tokens(assembly)
        budgets = choose_budgets(
            batches, tokens, _longest(assembly, assembly.usual_length), most_rows=rows, budget_tokens=cost
        )
        _tell_raised(assembly, budgets.tokens[-1])
        asked = assembly.options.token_budget
        if asked is not None and budgets.tokens[-1] <= asked:
            said = f"at most {asked:,} tokens, as asked; {said}"
        more = ", and more would take longer than they save" if cost and len(budgets.tokens) < MAX_BUDGETS else ""
        return cls(
            value=", ".join(map(str, budgets.tokens)),
            reason=f"tokens of a micro-batch, from the data's lengths; {said}{100 * budgets.fill:.1f} % filled{more}",
            tokens=budgets.tokens[-1],
            token_bytes=token_bytes,
            budgets=budgets,
        )

    def cost(self, work: StepWork) -> Cost:
        """Activations of a micro-batch that its backward pass needs, and seconds of the products of empty places."""
        tokens = min(self.tokens, work.num_tokens) if self.budgets is None else self.tokens
        fill = 1.0 if self.budgets is None else self.budgets.fill
        return Cost(
            step_bytes=tokens * self.token_bytes if work.num_trained else 0,
            step_s=work.products_s(round(work.num_tokens * (1 / fill - 1))),
        )

    def apply(self, assembly: Assembly) -> None:
        """Lay batches out in micro-batches of these sizes."""
        assembly.budget = self.tokens
        padding_id = padding_id_of(assembly.model.config)
        if self.budgets is not None:
            assembly.layout = PackedLayout(
                budgets=self.budgets,
                num_slots=most_rows(assembly),
                max_length=min(assembly.usual_length, self.budgets.tokens[-1]),
                padding_id=padding_id,
                groups=False,
            )
        elif self.shapes is not None:
            assembly.layout = PaddedLayout(
                shapes=self.shapes,
                max_length=assembly.max_length,
                padding_id=padding_id,
                split=self.supports(assembly).ok,
            )


def _longest(assembly: Assembly, there_can_be: int) -> int:
    """Return the longest sequence that the largest size must hold. What is asked for is not exceeded for one that no
    training row has: there is another size for it, should it come."""
    asked = assembly.options.token_budget
    if asked is None or not assembly.training:
        return there_can_be
    return min(there_can_be, max(asked // TILE * TILE, _longest_seen(assembly, asked)))


def _longest_seen(assembly: Assembly, tokens: int) -> int:
    return max((int(lengths.max(initial=0)) for lengths in assembly.batches(tokens)), default=0)


def _tell_raised(assembly: Assembly, tokens: int) -> None:
    """Warn that --token-budget is below the longest row that was seen, and what is taken in its place."""
    asked = assembly.options.token_budget
    if asked is None or asked >= assembly.max_length:
        return
    if asked < (longest := _longest_seen(assembly, asked)):
        said = f"a row has {longest:,} tokens, and is not cut in two"
        assembly.warn(f"--token-budget {asked:,} is raised to {tokens:,}: {said}")


def cuts_windows(assembly: Assembly) -> bool:
    """Return whether texts come in windows that are cut into the same few shapes, as they do on a GPU."""
    fixed = assembly.lever(Packing).packed and assembly.fact(kernels_of).variable_length.ok
    return fixed and not assembly.training and assembly.device.type == "cuda"


def most_rows(assembly: Assembly) -> int:
    """Sequences of a batch at most.

    A model that is only read has a text a batch where rows influence one another: an answer must not depend on others.
    Where padding alone does that, texts of one length share a batch.
    """
    if assembly.training:
        return _asked_rows(assembly) or assembly.options.batch_size  # type: ignore[union-attr]
    equivalence = assembly.lever(Packing).equivalence
    return _MOST_TEXTS if equivalence.independent or equivalence.alike_independent else 1


def _asked_rows(assembly: Assembly) -> int | None:
    """Sequences of a micro-batch that training was asked to keep to; None for as many as its tokens hold."""
    return assembly.options.per_device_batch_size if isinstance(assembly.options, TrainOptions) else None


def _budget_tokens(assembly: Assembly) -> float:
    """Return how many tokens a run could compute in the time in which a shape is run eagerly and captured."""
    if assembly.device.type != "cuda" or not assembly.training or assembly.options.execution == "eager":
        return 0.0
    peak = datasheet_flops_per_s(device_name(assembly.device), assembly.precision.value)
    reached = _REACHED if peak is None else _SHARE_REACHED * peak
    return _CAPTURE_S * reached / (6 * max(1, matmul_parameters(assembly.model)))


def _largest_kept(assembly: Assembly) -> int:
    """Return as `_largest` does, within the limit of activations, in whole tiles."""
    most = _largest(assembly)
    fitting = fitting_tokens(assembly, most) if assembly.training else most
    return most if fitting == most else max(TILE, fitting // TILE * TILE)


def _largest(assembly: Assembly) -> int:
    """Return the device's default, for training no more than half of its free memory holds activations of.

    The optimizer has taken no part of that memory yet: no more than nine tenths of what it, gradients and copies of
    weights leave, either. That is the limit where weights are streamed, and all of these are elsewhere: each more
    micro-batch brings all weights once more.
    """
    device = assembly.device
    if not assembly.training and device.type == "cpu":
        return cpu_budget(assembly.model, assembly.usual_length)
    token_bytes = bytes_a_token(assembly)
    if not assembly.training or device.type != "cuda" or token_bytes is None:
        return _DEFAULT[device.type]
    free_bytes = device_free_bytes(device)
    room_bytes = free_bytes * 9 // 10 - _state_bytes(assembly)
    if not streamed(assembly):
        room_bytes = min(room_bytes, free_bytes // 2)
    return max(TILE, min(_DEFAULT["cuda"], room_bytes // token_bytes // TILE * TILE))


def _state_bytes(assembly: Assembly) -> int:
    """Bytes that training adds: masters, half-precision copies, gradients, and the optimizer's states."""
    sharding, tensor_parallel = assembly.find(Sharding), assembly.find(TensorParallel)
    there: int = sum(int(p.nbytes) for p in assembly.model.parameters() if p.is_cuda)
    if tensor_parallel is not None:
        return max(0, cut_bytes(assembly, tensor_parallel) - there)
    if sharding is not None and sharding.value != "none":
        return max(0, needed_bytes(assembly, sharding.value) - there)
    parameters = [p for p in assembly.model.parameters() if p.is_cuda or not streamed(assembly)]
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    asked = asked_optimizer(assembly.options)  # type: ignore[arg-type]
    each = 4 + assembly.precision.dtype.itemsize + asked.gradient_bytes + asked.device_state_bytes
    frozen = sum(p.nbytes for p in parameters if not (p.requires_grad or p.is_cuda))
    linear = linear_parameters(assembly.model)
    staying = asked.staying_bytes(trained, sum(p.numel() for p in parameters if p.requires_grad and id(p) in linear))
    return int(trained * each + frozen + staying)


def bytes_a_token(assembly: Assembly) -> int | None:
    """Bytes of activations of a token that a backward pass needs; None for an unknown size of the model.

    34 bytes a hidden unit and layer in half precision (Korthikanti et al. 2022, without the scores that variable-length
    attention does not keep), a third more for what the formula leaves out. Layers that are recomputed keep their input,
    in fp32 at most, and what their last product made, and one of them at a time is whole.
    """
    config: Any = assembly.model.config
    width, depth = getattr(config, "hidden_size", None), getattr(config, "num_hidden_layers", None)
    if not isinstance(width, int) or not isinstance(depth, int):
        return None
    whole = 45 * width * (assembly.precision.dtype.itemsize // 2)
    every = recomputed_every(assembly.options) if isinstance(assembly.options, TrainOptions) else None
    if every is None:
        return whole * depth
    again = depth // every
    return whole * min(depth, depth - again + 1) + (4 + assembly.precision.dtype.itemsize) * width * again
