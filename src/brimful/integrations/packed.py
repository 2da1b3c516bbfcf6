"""A model that computes packed behind its own forward: one line for any loop.

model = brimful.packed(model)          # padded tensors in, transformers' outputs out
loss = model(**batch).loss             # no padding is computed
model = model.unpacked()               # as it was

The model stays the object that it was: its class is one of the same name in front of its own, so that saving, peft,
Accelerate and what else looks at it see the model they know. Each call is read on the host once, laid out in one packed
row, and run by the model's own modules and its own head, which also computes the loss. What the equivalence check does
not allow, and each call whose answer a packed row does not give, runs by the model's own forward; the reason is a
Python warning, once.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from brimful.core.errors import ModelError, OptionError
from brimful.engine.sequence_lengths import DEFAULT_MAX_LENGTH
from brimful.hardware.memory import is_out_of_memory
from brimful.hardware.process_settings import products_are_full
from brimful.integrations.model_structure import settings_of
from brimful.integrations.module_hooks import foreign_hook
from brimful.integrations.packed_execution import PackedExecution, find_left_positions, no_autocast
from brimful.integrations.packed_graphs import Call, PackedGraphs, captures
from brimful.integrations.padded_batch import CannotPackError, LeftPositions, PaddedBatch
from brimful.integrations.problem_type import problem_of
from brimful.kernels.layout import map_tensors
from brimful.levers.facts import choose_kernels
from brimful.models.hub.adapters import unwrapped
from brimful.models.hub.inspection import max_positions
from brimful.models.packed.equivalence import Equivalence, check_equivalence
from brimful.models.packed.layer_calls import remove_calls
from brimful.models.packed.packed_forward import PackedForm
from brimful.step.precision import Precision

M = TypeVar("M")

#: Attribute of a packed model that holds its `_Behind`.
_PLACE = "_brimful_packed"
#: Arguments of a call that a packed pass reads itself, and those that the model's own head is given.
_READ = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids", "return_dict"})
_FOR_HEAD = frozenset({"labels", "num_items_in_batch"})
#: Arguments that ask for nothing where they are false.
_SWITCHES = frozenset({"output_attentions", "output_hidden_states", "use_cache"})
#: Attributes of a model that its head is not a copy of.
_READ_FROM_MODEL = frozenset({"training", "forward"})
#: Classes around a model that several processes or devices need.
WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"})
_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def packed(model: M, *, graphs: bool = True) -> M:
    """Return the same model, which from now on computes packed wherever that is shown equal to its own forward.

    model: an `AutoModelForSequenceClassification`, or peft's wrapper around one. Calls, outputs, weights, saved files
    and random streams are the model's own; `model.unpacked()` undoes it. graphs: whether calls on a GPU, and their
    backward passes, are captured as CUDA graphs where their shapes come again: each call then has one backward pass.
    Where it cannot run packed, the model's own forward runs and a Python warning says why, once for each reason.
    Raises: OptionError for a model that is wrapped already, ModelError for what is no sequence classifier.
    """
    _refuse_wrapped(model)
    inner = unwrapped(model)
    if isinstance(inner, _PackedForward):
        return model
    config = getattr(inner, "config", None)
    if not hasattr(inner, "base_model_prefix") or not hasattr(config, "num_labels"):
        raise ModelError(
            f"{type(inner).__name__} is not a transformers sequence classifier",
            hint="AutoModelForSequenceClassification.from_pretrained(...) makes one",
        )
    _refuse_wrapped(inner)
    object.__setattr__(inner, _PLACE, _Behind(graphs=graphs))
    plain: Any = type(inner)
    inner.__class__ = _packed_class(plain)
    parameter = next(inner.parameters())
    if parameter.device.type == "cuda" or (parameter.device.type == "cpu" and not torch.cuda.is_available()):
        behind: _Behind = getattr(inner, _PLACE)
        behind.check(inner, DEFAULT_MAX_LENGTH)
    return model


def packing_of(model: Any) -> Callable[[Any], Any] | None:
    """Return what packs a model as this one is, when it was unpacked; None for a plain one."""
    behind: _Behind | None = vars(model).get(_PLACE)
    return None if behind is None else functools.partial(packed, graphs=behind.captures)


def _refuse_wrapped(model: Any) -> None:
    hint = "call brimful.packed first, then wrap or prepare what it returns"
    if hasattr(model, "_orig_mod") or type(model).__name__ in WRAPPERS:
        raise OptionError(f"the model is wrapped in {type(model).__name__} already", hint=hint)
    if getattr(model, "base_model", None) is model:
        said = f"{type(model).__name__} has no head that gives classes"
        raise OptionError(said, hint="load it by AutoModelForSequenceClassification.from_pretrained")
    if "forward" in vars(model):
        raise OptionError("the model's forward was replaced already, as Accelerate's prepare does", hint=hint)


class _PackedForward:
    """Stands in front of a classifier's own class."""

    _plain: type[Any]
    _signature: inspect.Signature

    def unpacked(self) -> Any:
        """Undo `brimful.packed`. Return the model: its own forward runs again."""
        model: Any = self
        remove_calls(model)
        vars(model).pop(_PLACE, None)
        model.__class__ = self._plain
        return model

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)
        assert isinstance(made, tuple)
        return (_made_anew, (self._plain,), *made[2:])

    def _as_it_was(self) -> Any:
        """Return the model as one of its own class, with the same modules: for copies of it that are to be plain."""
        cls: Any = self._plain
        plain = cls.__new__(cls)
        vars(plain).update({name: value for name, value in vars(self).items() if name not in (_PLACE, "forward")})
        return plain


def _made_anew(plain: Any) -> Any:
    cls: Any = _packed_class(plain)
    return cls.__new__(cls)


@functools.cache
def _packed_class(plain: Any) -> type[Any]:
    """A class that runs packed, and is otherwise `plain`, under its name."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a packed row's shape is read on the host
    @functools.wraps(plain.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        behind: _Behind | None = vars(self).get(_PLACE)
        if behind is None or getattr(self, "_is_replica", False):  # DataParallel's replicas share what is behind
            return plain.forward(self, *args, **kwargs)
        return behind(self, args, kwargs)

    signature = inspect.signature(plain.forward)
    forward.__signature__ = signature
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    made = {"forward": forward, "_plain": plain, "_signature": signature}
    return type(plain.__name__, (_PackedForward, plain), names | made)


class _Behind:
    """Packed passes of one model, and the checks that they rest on.

    num_packed, num_plain: calls so far; num_captured: of the packed ones. reasons: of plain ones, each said once.
    captures: `graphs` of `packed`.
    """

    def __init__(self, *, graphs: bool) -> None:
        self.num_packed = self.num_plain = self.num_captured = 0
        self.captures = graphs
        self._graphs: PackedGraphs | None = None
        self.reasons: list[str] = []
        self._execution: PackedExecution | None = None
        self._typical: int | None = None
        self._left: tuple[LeftPositions | None, ...] = ()  # empty before it was looked for
        self._structure: tuple[int, ...] = ()
        self._settings: dict[str, Any] = {}
        self._attributes: dict[str, Any] = {}
        self._limit: int | None = None
        self._checked: dict[tuple[str, str, int], Equivalence] = {}
        self._alone = threading.RLock()

    def __reduce__(self) -> Any:
        made = functools.partial(_Behind, graphs=self.captures)
        return made, ()  # a copy of the model is checked and run for itself

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the model's forward. Calls of several threads come one after another: all set its attention."""
        device = next(model.parameters()).device
        with self._alone, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return self._call(model, args, kwargs)

    def _call(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            found = self._packed_call(model, args, kwargs)
            self.num_packed += 1
            return found
        except CannotPackError as refused:
            self._say(str(refused))
        self.num_plain += 1
        return model._plain.forward(model, *args, **kwargs)

    def check(self, model: Any, length: int) -> Equivalence:
        """Return what the equivalence check finds for sequences of up to `length` tokens on the model's device."""
        self._look(model)
        device, precision = next(model.parameters()).device, _precision_of(model)
        longest = max(DEFAULT_MAX_LENGTH, 1 << (length - 1).bit_length())
        longest = longest if self._limit is None else min(longest, self._limit)
        key = (str(device), precision, longest)
        if key not in self._checked:
            if (why := _why_not(model, device)) is not None:
                self._checked[key] = Equivalence(packed=False, independent=True, reason=why)
            else:
                with torch.inference_mode(False), torch.enable_grad(), no_autocast():
                    self._checked[key] = check_equivalence(
                        model._as_it_was(), max_length=longest, device=device, precision=precision,
                        typical_length=self._typical, cache=False,
                    )  # fmt: skip
            if not (found := self._checked[key]).packed:
                self._say(found.reason)
        return self._checked[key]

    def _look(self, model: Any) -> None:
        """Forget all that was found of other modules, or by another configuration: peft, and others, replace some."""
        modules = list(model.modules())
        structure = (id(model), *map(id, modules), *(id(vars(module).get("forward")) for module in modules[1:]))
        settings = settings_of(model.config)
        if structure != self._structure or settings != self._settings:
            self._structure, self._settings, self._limit = structure, settings, max_positions(model.config, model)
            self._execution, self._graphs, self._checked, self._left = None, None, {}, ()
        self._look_at_head(model)

    def _look_at_head(self, model: Any) -> None:
        """Forget the head where its owner set attributes of the model since, such as a loss.

        Those that the model had at first are looked at: others that come later are not read by its class.
        """
        names = self._attributes.keys() or {*vars(model), "_loss_function"} - _READ_FROM_MODEL
        found = {name: vars(model).get(name) for name in names}
        if any(found[name] is not self._attributes.get(name) for name in names):
            self._attributes, self._execution, self._graphs = found, None, None

    def _packed_call(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _bound(model._signature, model, args, kwargs)
        head = {name: value for name, value in given.items() if name in _FOR_HEAD and value is not None}
        _require_known(model, given)
        if isinstance(labels := head.get("labels"), torch.Tensor):
            problem_of(model.config, labels)
        batch = PaddedBatch.read(given)
        self._look(model)
        inner = list(model.modules())[1:]  # hooks of the model itself run around this call
        if (hook := foreign_hook(inner, gathering=False)) is not None:
            raise CannotPackError(f"there is a hook on its modules ({hook}), which would see a packed row")
        if self._limit is not None and batch.ids_BL.shape[1] > self._limit:
            columns = batch.ids_BL.shape[1]
            raise CannotPackError(f"rows are of {columns} columns, and the model has {self._limit} positions")
        if self._typical is None:
            self._typical = round(float(batch.lengths_B.mean()))
        equivalence = self.check(model, batch.ids_BL.shape[1])
        equivalence = equivalence.for_training() if model.training else equivalence
        form = equivalence.form
        if not equivalence.packed or form is None:
            raise CannotPackError(equivalence.reason)
        batch.require_pooling(model.config, form, masked=given.get("attention_mask") is not None)
        left = self._left_positions(model, form) if batch.padded_on_the_left else None
        execution = self._executed(model, form)
        if given.get("position_ids") is not None and not execution.takes_positions:
            raise CannotPackError("the model is not known to read position_ids")
        if execution.recomputed_elsewhere:
            raise CannotPackError("gradient checkpointing of this family's layers is its own")
        found = self._outputs(model, execution, batch, head, left)
        asked = given.get("return_dict")
        as_dict = bool(getattr(model.config, "return_dict", True)) if asked is None else asked
        return found if as_dict else found.to_tuple()

    def _outputs(
        self, model: Any, execution: PackedExecution, batch: PaddedBatch, head: Any, left: LeftPositions | None
    ) -> Any:
        """Return what the model's own forward returns, by graphs where they can be, else kernel by kernel."""
        device, form, typical = next(model.parameters()).device, execution.form, self._typical
        groups = _groups(model, device, typical)
        if not self.captures or groups or not captures(device):
            inputs, positions_T = batch.pack(
                model.config, form, device.type, groups=groups, typical_length=typical, left=left
            )
            inputs = map_tensors(inputs, lambda tensor: tensor.to(device, non_blocking=True))
            return execution.outputs(inputs, None if positions_T is None else positions_T.to(device), head)
        self._graphs = self._graphs or PackedGraphs(model, _note)
        row = batch.numbers(model.config, form, pinned=device.type == "cuda", typical_length=typical, left=left)
        call = Call(execution, *row, head, _precision_of(model))
        found = self._graphs.outputs(call)
        self.num_captured += found is not None
        if found is not None:
            return found
        try:
            return call.compute(call.numbers.to(device, non_blocking=True), head)
        except Exception as error:
            if not (is_out_of_memory(error) and self._graphs.holds_memory):
                raise
            self._graphs.give_back("memory ran out beside their graphs")
        return call.compute(call.numbers.to(device, non_blocking=True), head)

    def _executed(self, model: Any, form: PackedForm) -> PackedExecution:
        if self._execution is None or self._execution.form != form:
            self._execution, self._graphs = PackedExecution(model, form, type(model)._plain), None
        return self._execution

    def _left_positions(self, model: Any, form: PackedForm) -> LeftPositions:
        if not self._left:
            with torch.inference_mode(False), no_autocast():
                self._left = (find_left_positions(model._as_it_was(), form),)
        if (found := self._left[0]) is None:
            raise CannotPackError("the plain forward reads rows that are padded on the left otherwise")
        return found

    def _say(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)
            warnings.warn(f"brimful.packed: {reason}; the model's own forward runs", stacklevel=2)


def _note(text: str) -> None:
    warnings.warn(f"brimful.packed: {text}", stacklevel=2)


def _bound(signature: inspect.Signature, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name."""
    try:
        found = dict(signature.bind(model, *args, **kwargs).arguments)
    except TypeError as error:
        raise CannotPackError(str(error)) from error
    found.pop("self", None)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found


def _require_known(model: Any, given: Mapping[str, Any]) -> None:
    """Refuse a call that asks for more than logits and loss. Raises: CannotPackError."""
    for name, value in given.items():
        if name in _READ | _FOR_HEAD or value is None or (name in _SWITCHES and not value):
            continue
        raise CannotPackError(f"a call gives {name}")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(model.config, name, False) and given.get(name) is None:
            raise CannotPackError(f"the model's configuration has {name}")


def _why_not(model: Any, device: torch.device) -> str | None:
    """The reason that this kind of model is not tried; None if it is."""
    if device.type not in ("cpu", "cuda"):
        return f"packed rows do not run on {device.type}"
    if model.config.is_encoder_decoder:
        return "the head of an encoder-decoder looks for end tokens in the padded batch"
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        return "its weights are quantized"
    if any(parameter.dtype not in _DTYPES for parameter in model.parameters() if parameter.is_floating_point()):
        return "its weights are in a dtype that is not checked"
    return None


def _precision_of(model: Any) -> str:
    """The precision of products as the call has it: of autocast, or of the weights."""
    parameter = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    kind, dtype = parameter.device.type, parameter.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    found = _DTYPES.get(dtype, "fp32")
    loose = kind == "cuda" and found == "fp32" and not products_are_full()
    return "tf32" if loose else found


def _groups(model: Any, device: torch.device, typical_length: int | None) -> bool:
    """True if attention wants rows of similar length beside the packed one."""
    precision = Precision(value=_precision_of(model), device=device, reason="")
    return not choose_kernels(model.config, precision, typical_length or 1).variable_length.ok
