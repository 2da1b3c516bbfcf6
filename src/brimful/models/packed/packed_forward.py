"""Two ways to run one classifier: packed, without padding, and padded as Hugging Face does. Same parameters, same head.

The packed way runs the unmodified base model on one row of T tokens, with attention told where sequences end; then it
pools one hidden state a sequence and lets the model's own classification code finish on these states, as if they were
sequences of one token. Nothing here knows a family by name; `family_forms.py` does, for families whose attention or
positions are their own; `equivalence.py` finds out whether the result is right, and which pooling and
first position the model has.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from brimful.hardware.capture import is_capturing
from brimful.kernels.attention.dispatch import Attention, choose_attention, reference_attention
from brimful.kernels.attention.pattern import Pattern
from brimful.kernels.forward_context import ForwardContext, active_context, current
from brimful.kernels.layout import Inputs, PackedInputs, PaddedInputs, Segments, map_tensors
from brimful.models.model_stats import embeddings_of, layer_lists, layers_of, matmul_parameters
from brimful.models.packed.after_attention import Cut, after_attention
from brimful.models.packed.attention_check import Watch
from brimful.models.packed.family_forms import FamilyForm, decoder_ids_T, has_form, uses_interface
from brimful.models.packed.given_states import GivenStates, means_SX
from brimful.models.packed.host_decisions import HostDecisions
from brimful.models.packed.layer_calls import LayerCall, many_compiled_forms, place_calls
from brimful.models.packed.narrow_windows import NarrowWindows
from brimful.models.packed.own_scans import OwnScans
from brimful.models.packed.refusals import refusals
from brimful.models.packed.replaced_buffers import Place, places_of, write_back

#: Hidden states of a sequence that the head reads; `late`: all of them, each by itself, and the mean of the logits.
Pooling = Literal["first", "last", "mean", "late"]

PACKED = "brimful_packed"
#: What models of transformers look for padding by, where they are given no mask.
_LOOKS_FOR_PADDING = "warn_if_padding_and_no_attention_mask"


#: What layers hand on to everything in them. Anything else may change what attention computes, be it a little: sinks,
#: biases, caps under other names. A little is what a equivalence check on weights that were never trained does not see.
_NOT_FOR_ATTENTION = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "deterministic"}
)


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    plain: bool = False,
    watch: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of Hugging Face layers on one packed row, (1, H, T, D) in and (1, T, H, D) out."""
    if segments is None:
        segments, plain, watch = _told_by_the_pass(module)
    unknown = [name for name, value in others.items() if value is not None and name not in _NOT_FOR_ATTENTION]
    if unknown:
        raise TypeError(f"packed attention does not know {', '.join(unknown)}, which {type(module).__name__} gives it")
    pattern = Pattern(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        causal=bool(getattr(module, "is_causal", False) if is_causal is None else is_causal),
        window=sliding_window,
        softcap=softcap,
        dropout=dropout,
    )
    heads = (query.squeeze(0), key.squeeze(0), value.squeeze(0))  # the gradient of x[0] would be a copy
    found_HTD = _attend(*heads, segments, pattern, plain, watch)
    return found_HTD.transpose(0, 1)[None].contiguous(), None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # nothing of a single pass may enter the graph of a layer
def _told_by_the_pass(module: nn.Module) -> tuple[Segments, bool, Watch | None]:
    """Segments, whether to use the reference, and who watches, where layers do not hand these on to their attention."""
    context = active_context()
    if context is None or context.attention is None:
        raise TypeError(f"{type(module).__name__} does not hand keyword arguments on to its attention")
    told: tuple[Segments, bool, Watch | None] = context.attention
    return told


def _attend(
    q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, segments: Segments, pattern: Pattern, plain: bool, watch: Any = None
) -> Tensor:
    """Attention in the dtype of products, by the kernel chosen for it or by the reference if `plain`."""
    device = q_HTD.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else v_KTD.dtype
    attend: Attention = (
        reference_attention
        if plain
        else choose_attention(device, dtype, pattern, q_HTD.shape[-1], segments.typical_length, segments.attention)
    )
    given = (q_HTD.to(dtype), k_KTD.to(dtype), v_KTD.to(dtype))
    if watch is not None:
        watch(attend, given, segments, pattern)
    return attend(*given, segments, pattern)


#: No mask goes with it: making one would wait for the device to learn whether positions begin anew in a row.
AttentionInterface.register(PACKED, _packed_attention)


@dataclass(frozen=True, kw_only=True)
class ForwardOutputs:
    """Results of one forward pass.

    logits: (slots, C). auxiliary_loss: () to be added to the loss, such as the balance of experts' loads; None in a
    model without one. hidden_states: the base model's last ones where a packed row was run: one a token, or one a slot
    or segment where there are no others.
    """

    logits: Tensor
    auxiliary_loss: Tensor | None = None
    hidden_states: Tensor | None = None


class LayoutModel:
    """Runs a classifier on a layout, by `forward(inputs, context)`.

    Gradients flow into `model`'s own parameters. `train()` and `eval()` of the model are obeyed.
    """

    model: Any
    packed: bool

    def __call__(self, inputs: Inputs, context: ForwardContext | None = None) -> ForwardOutputs:
        """One pass over a layout, whose first slots are its sequences. context: a new one for each pass."""
        raise NotImplementedError

    def settle(self) -> None:
        """Do what a pass with a gradient left for after its backward pass. Unless overridden, nothing."""


class PaddedModel(LayoutModel):
    """The plain Hugging Face forward on padded rows.

    decisions: of its code on the host, where passes are to be captured and these depend on numbers of the device, or
    numbers of the host are copied there, or buffers are replaced. Then logits of a captured pass are NaN where a
    decision would be another one, and what replaces buffers is not written. plain: whether the model's code runs as it
    is, for others to be compared with: its windows and its scans. own_scans: whether its scans are ours where they can
    be.
    """

    packed = False
    decisions: HostDecisions | None = None

    def __init__(
        self, model: Any, attention: str = "sdpa", *, plain: bool = False, own_scans: bool = True
    ) -> None:  # fmt: skip
        self.model, self.attention, self.plain = model, attention, plain
        try:
            model.set_attn_implementation(attention)
        except (ValueError, ImportError):  # families without it: they say so, and have another
            model.set_attn_implementation("eager")
        if model.config.is_encoder_decoder:
            _tell_both_halves(model)
        self._takes_types = has_token_types(model.config)
        self._settings = _without_cache(model) | _named_outputs(model.config)
        lists = [*layer_lists(model), layers_of(model) or ()]  # of several classes, as Jamba's: in the last
        layers = dict.fromkeys(layer for layers in lists for layer in layers)
        within = (each for layer in layers for each in layer.modules() if isinstance(each, GradientCheckpointingLayer))
        self._layers = list(layers | dict.fromkeys(within))  # Zamba's hybrid layers have one that is checkpointed, too
        self._unsettled: tuple[list[Place], Tensor | None] | None = None
        self._windows, scans = NarrowWindows(model), OwnScans(model)
        self.scans = scans if own_scans and scans.found else None
        self._reads_last_place = any(getattr(module, "summary_type", None) == "last" for module in model.modules())

    def __call__(self, inputs: Inputs, context: ForwardContext | None = None) -> ForwardOutputs:
        assert isinstance(inputs, PaddedInputs)
        if self._reads_last_place:
            inputs = _padded_on_the_left(inputs)
        types = {"token_type_ids": inputs.types_RL} if self._takes_types and inputs.types_RL is not None else {}
        given = {"input_ids": inputs.ids_RL, "attention_mask": inputs.mask_RL, **types, **self._settings}
        if any(_needs_context(layer) for layer in self._layers):
            place_calls(self._layers, None)
        context = context or ForwardContext()
        if self.decisions is not None:
            decisions = self.decisions
            context = replace(context, outside=decisions.paused, both_calls=decisions.of_both_calls)
        if inputs.places_RL is not None:
            context = replace(context, places_X=inputs.places_RL.flatten())
        if not self.plain:
            compiled = any(map(_is_compiled, self.model.modules()))
            context = replace(context, told=partial(self._told, inputs.ids_RL.shape[1], compiled=compiled))
        looks = refusals(self.model.config.model_type, inputs)
        with looks, context.active(), many_compiled_forms(self._layers), context.told():
            return ForwardOutputs(logits=self._logits(given))

    @contextmanager
    def _told(self, length: int, *, compiled: bool) -> Iterator[None]:
        """Within, windows are those of rows of this length, and scans our own; torch's compiler has one for itself."""
        scanning = nullcontext() if compiled or self.scans is None else self.scans.scanning()
        with self._windows.for_rows(length), scanning:
            yield

    def _logits(self, given: dict[str, Any]) -> Tensor:
        found: Tensor
        if self.decisions is None:
            found = self.model(**given).logits
            return found
        key, places = (self.model.training, tuple(given["input_ids"].shape)), places_of(self.model)
        if not is_capturing():
            with self.decisions.recorded(key):
                found = self.model(**given).logits
            self._unsettled = (places, None)
        else:
            with self.decisions.granted(key) as truths:
                found = self.model(**given).logits
            all_true = torch.stack(truths).all() if truths else found.new_ones((), dtype=torch.bool)
            self._unsettled = (places, all_true)
            found = torch.where(all_true, found, math.nan) if truths else found
        if not torch.is_grad_enabled():
            self.settle()
        return found

    def settle(self) -> None:
        """As `LayoutModel` has it: buffers are written once nothing needs them as they were, or replaces them again."""
        if self._unsettled is not None:
            (places, if_true), self._unsettled = self._unsettled, None
            write_back(places, if_true=if_true)


def _tell_both_halves(model: Any) -> None:
    """Set the model's attention in the copies of its configuration that an encoder and a decoder have.

    transformers 5.17 leaves UMT5's at `sdpa`, which drops its bias and mask.
    """
    for half in (model.base_model.get_encoder(), model.base_model.get_decoder()):
        for module in half.modules() if isinstance(half, nn.Module) else ():
            config = getattr(module, "config", None)
            if config is not None and config.model_type == model.config.model_type:
                config._attn_implementation = model.config._attn_implementation


def _padded_on_the_left(inputs: PaddedInputs) -> PaddedInputs:
    """The same rows with their padding in front, as XLNet's tokenizer has it: its head reads the last place."""
    length, device = inputs.mask_RL.shape[1], inputs.mask_RL.device
    index_RL = (torch.arange(length, device=device) + inputs.mask_RL.sum(dim=1, keepdim=True)) % length
    return map_tensors(inputs, lambda given_RL: given_RL.gather(1, index_RL))


def _is_compiled(module: nn.Module) -> bool:
    """True for a module whose call torch compiles: it would trace what a pass puts in place of a forward."""
    if hasattr(module, "_orig_mod"):  # what torch.compile makes of a module
        return True
    call = module._compiled_call_impl
    return call is not None and (not isinstance(call, LayerCall) or call.compiled is not None)


def _needs_context(layer: nn.Module) -> bool:
    """True for a layer that is compiled, or that is recomputed in its context."""
    return layer._compiled_call_impl is not None or getattr(layer, "gradient_checkpointing", False)


@contextmanager
def _needs_no_mask(base: nn.Module) -> Iterator[None]:
    """Within, transformers does not look for padding, which it warns of where there is no mask: a packed row's end is
    filled up. It would read ids of the device for that."""
    vars(base)[_LOOKS_FOR_PADDING] = _does_not_look
    try:
        yield
    finally:
        del vars(base)[_LOOKS_FOR_PADDING]


def _does_not_look(*_: object) -> None: ...


def _named_outputs(config: Any) -> dict[str, Any]:
    """Arguments that have a forward return logits by their name, where the configuration has it return a tuple."""
    return {} if getattr(config, "return_dict", True) else {"return_dict": True}


def _without_cache(model: Any) -> dict[str, Any]:
    """Arguments that keep a forward from storing keys and values: those of one pass are for no other.

    A head of images and text, as Qwen3.5's, does not name the argument, and hands it on to its decoder.
    """
    parameters, config = inspect.signature(model.forward).parameters, model.config
    hands_on = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    of_decoder = config.get_text_config() is not config and getattr(config.get_text_config(), "use_cache", False)
    stores = hands_on and of_decoder and not config.is_encoder_decoder
    return {"use_cache": False} if "use_cache" in parameters or stores else {}


@dataclass(frozen=True, kw_only=True)
class PackedForm:
    """Form of the packed forward: the pooling that the head reads, and the first position.

    short: whether what follows attention in the last layer is given the tokens that the head reads, and no others.
    skips_padding: whether positions number the tokens that are not padding: a padding token that a text holds has the
    position before the first.
    """

    pooling: Pooling
    first_position: int
    short: bool = False
    skips_padding: bool = False


class LeftOut(NamedTuple):
    """Work skipped in the last layer for tokens that the head does not read.

    parameters: of the matrices that they are not multiplied with. attention: whether their queries too.
    """

    parameters: int = 0
    attention: bool = False


class ShortLayer(Protocol):
    """A last layer that may be compiled to give the first token of each segment only, (1, N, H).

    pooled: whether it did in the last pass. shared: parameters of matrices that it multiplies all tokens with even so.
    """

    pooled: bool
    shared: int


class PackedModel(LayoutModel):
    """The unmodified base model on one packed row, and the model's own head on one pooled state a sequence.

    plain: run with the reference attention instead of the kernel chosen for the device and dtype. watch: hears each
    call of attention, with the kernel chosen for it.
    last: the backend that layers were compiled by, if that may leave out in the last one what the head does not read.
    The model is then this execution's alone: another one would take what is left for all.
    """

    packed = True

    def __init__(self, model: Any, form: PackedForm, *, plain: bool = False, watch: Watch | None = None) -> None:
        self.model, self.form, self.plain, self._watch = model, form, plain, watch
        attend = _attend if watch is None else partial(_attend, watch=watch)
        self._family = FamilyForm(model, attend) if has_form(model.config) else None
        self._interface = uses_interface(model.config)
        if self._interface:
            model.set_attn_implementation(PACKED)
        self._base: Any = model.base_model
        self._takes_types = has_token_types(model.config)
        self._settings = _without_cache(self._base)
        parameters = inspect.signature(self._base.forward).parameters
        hands_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and self._family is None
        self._takes_positions = "position_ids" in parameters or hands_on
        self._head = copy.copy(model)
        self._head._modules = dict(model._modules)
        self._given = GivenStates(self._base)
        self._head._modules[model.base_model_prefix] = self._given
        self._dummy_id = 0 if padding_id_of(model.config) == 1 else 1  # not padding
        self.last: ShortLayer | None = None
        self._layers, self._embeddings = list(layers_of(model) or ()), embeddings_of(model)
        self._after = after_attention(model)
        self._is_short = form.short and self._after is not None

    @property
    def left_out(self) -> LeftOut:
        """Work that the last pass skipped."""
        layers = layers_of(self.model)
        if layers is None:
            return LeftOut()
        if self._short_layer is not None:
            return LeftOut(matmul_parameters(layers[-1]) - self._short_layer.shared, attention=True)
        return LeftOut(self._after.parameters) if self._cuts and self._after is not None else LeftOut()

    def run_whole(self) -> None:
        """From now on the last layer is run as it is, but for what a backend that it was compiled by leaves out."""
        self._is_short = False

    @property
    def _cuts(self) -> bool:
        return self._is_short and self._after is not None and self._after.may_be_cut()

    @property
    def _short_layer(self) -> ShortLayer | None:
        return self.last if self.last is not None and self.last.pooled else None

    def __call__(self, inputs: Inputs, context: ForwardContext | None = None) -> ForwardOutputs:
        assert isinstance(inputs, PackedInputs)
        cut = Cut(self._after, self._chosen_S(inputs)) if self._after is not None and self._cuts else None
        context = replace(context or ForwardContext(), inputs=inputs, cut=cut, places_X=inputs.places_T)
        context = replace(context, attention=(inputs.segments, self.plain, self._watch), told=self._told(inputs))
        if self.last is not None:
            self.last.pooled = False  # it says so itself, where what it was compiled to is run
        place_calls(self._layers, self._embeddings)
        with context.active(), many_compiled_forms(self._layers):
            states_TH = self._hidden_states_TH(inputs)
            if self.form.pooling == "late":
                logits = means_SX(self.head(states_TH), inputs)
            else:
                logits = self.head(self._pool_SH(states_TH, inputs))
        return ForwardOutputs(logits=logits, hidden_states=states_TH)

    def _hidden_states_TH(self, inputs: PackedInputs) -> Tensor:
        """The base model's last hidden states: one a token, or one a slot or segment if there are no others."""
        types = {"token_type_ids": inputs.types_T[None]} if self._takes_types and inputs.types_T is not None else {}
        if self._takes_positions:
            types["position_ids"] = self._positions_T(inputs)[None]
        arguments = self._row_arguments(inputs)
        with current().told(), _needs_no_mask(self._base):
            states: Tensor = self._base(input_ids=inputs.ids_T[None], **arguments, **types, **self._settings)[0]
        return states.squeeze(0)

    def _positions_T(self, inputs: PackedInputs) -> Tensor:
        """Positions as the model numbers them."""
        if not self.form.skips_padding:
            return inputs.positions_T + self.form.first_position
        real_T = inputs.ids_T != padding_id_of(self.model.config)
        before_T = real_T.cumsum(0) - real_T.long()  # tokens that are not padding, before each in the row
        places_T = before_T - before_T[inputs.segments.cu_seqlens_N[inputs.segments.segment_T].long()]
        return torch.where(real_T, places_T + self.form.first_position, self.form.first_position - 1)

    def _told(self, inputs: PackedInputs) -> Callable[[], AbstractContextManager[None]]:
        """Makes contexts in which a family's own modules know the packed row."""
        if self._family is None:
            return nullcontext
        rows = self._family.rows(inputs, self._positions_T(inputs), plain=self.plain)
        return partial(self._family.told, rows, PACKED)

    def _row_arguments(self, inputs: PackedInputs) -> dict[str, Any]:
        """Arguments that give attention the sequence ends."""
        arguments: dict[str, Any] = {}
        if self._interface:
            watched = {} if self._watch is None else {"watch": self._watch}
            arguments = {"segments": inputs.segments, "plain": self.plain, **watched}
        if self.model.config.is_encoder_decoder:
            arguments["decoder_input_ids"] = decoder_ids_T(inputs, self.model.config)[None]
        if self._family is not None and not self._interface:
            # A mask without padding: else the model makes one, or looks for padding with a host that waits.
            arguments["attention_mask"] = torch.ones_like(inputs.ids_T)[None]
        return arguments

    def _chosen_S(self, inputs: PackedInputs) -> Tensor:
        return inputs.first_S if self.form.pooling == "first" else inputs.last_S

    def _pool_SH(self, states_TH: Tensor, inputs: PackedInputs) -> Tensor:
        cut = current().cut
        if (cut is not None and cut.is_done) or self._short_layer is not None:  # a row a slot, or a row a segment
            return states_TH[: inputs.first_S.shape[0]]
        if self.form.pooling == "mean":
            return means_SX(states_TH, inputs)
        return states_TH.index_select(0, self._chosen_S(inputs))

    def head(self, states_SH: Tensor) -> Tensor:
        """Logits (S, C) of the model's own classification code on pooled states."""
        if self.model.config.is_encoder_decoder and hasattr(self.model, "classification_head"):
            # Around it is a search for end tokens, with a host that waits.
            found: Tensor = self.model.classification_head(states_SH)
            return found
        logits: Tensor = self.head_outputs(states_SH).logits
        return logits

    def head_outputs(self, states_SH: Tensor, **arguments: Any) -> Any:
        """All that the model's own classification code returns for pooled states. arguments: of its forward."""
        self._head.training = self.model.training
        self._given.states_S1H = states_SH[:, None]
        ids_S1 = torch.full((states_SH.shape[0], 1), self._dummy_id, device=states_SH.device)
        try:
            named = _named_outputs(self.model.config)
            return self._head(input_ids=ids_S1, attention_mask=torch.ones_like(ids_S1), **named, **arguments)
        finally:
            self._given.states_S1H = None


def has_token_types(config: Any) -> bool:
    """True if a model must be told token types: it has several, or embeds them as if they were words, as GPT-2 does."""
    if hasattr(config, "type_vocab_sizes") or hasattr(config, "vision_config"):
        return False  # TAPAS has seven of a table's cell; elsewhere they tell images from text
    num_types = getattr(config, "type_vocab_size", None)
    if num_types is not None:
        return bool(num_types > 1)
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    return kind is not None and "token_type_ids" in inspect.signature(kind.forward).parameters


def padding_id_of(config: Any) -> int:
    """The token that fills what no sequence uses: the model's own for padding, 0 where it names none."""
    padding_id = getattr(config.get_text_config(), "pad_token_id", None)
    return padding_id if isinstance(padding_id, int) else 0
