"""Triton's interpreter, without what it does over and over for nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import triton.language
from triton.language import core, semantic
from triton.runtime import interpreter

from brimful.kernels.layers import dropout_add_layernorm

_LESS_THAN_32_BITS = ("fp16", "bf16", "fp8")  # how names of types begin whose division is one of 32 bits
_replaced: dict[int, Any] = {}  # by the id of a module's names: the names


class _Blocks(type):
    """One object for each type of block: equal types are the same, and what follows from a type is found once."""

    known: dict[tuple[Any, ...], Any] = {}

    def __call__(cls, element_ty: Any, shape: Any) -> Any:
        sizes = (*(size.value if isinstance(size, core.constexpr) else size for size in shape),)
        key = (element_ty.name, getattr(element_ty, "address_space", ""), *sizes)
        block = cls.known.get(key)
        if block is None:
            block = cls.known[key] = super().__call__(element_ty, shape)
        return block


class _Block(core.block_type, metaclass=_Blocks):
    def __init__(self, element_ty: Any, shape: Any) -> None:
        super().__init__(element_ty, shape)
        self.others: dict[Any, Any] = {}

    __hash__ = object.__hash__  # equal ones are the same

    def with_element_ty(self, scalar_ty: Any) -> Any:
        other = self.others.get(scalar_ty.name)
        if other is None or scalar_ty.is_ptr():  # names of pointers say not where they point to
            other = self.others[scalar_ty.name] = _Block(scalar_ty, self.shape)
        return other

    def to_ir(self, builder: Any) -> Any:
        return self.with_element_ty(self.element_ty.to_ir(builder))


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    try:
        self.shape, self.numel = type.of_tensors
    except AttributeError:
        sizes = type.shape if type.is_block() else ()
        numel = core.constexpr(type.numel if type.is_block() else 1)
        self.shape, self.numel = type.of_tensors = core.tuple([core.constexpr(size) for size in sizes]), numel


def _init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if not dtype.is_ptr() and data.itemsize > max(dtype.primitive_bitwidth, 8) // 8:
        raise ValueError(f"{data.itemsize} bytes a number are more than {dtype} has")


def _np_dtype(of: Any, slow: Any = interpreter._get_np_dtype) -> Any:
    try:
        return of.of_numpy
    except AttributeError:
        of.of_numpy = slow(of)
        return of.of_numpy


def _operands(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
    slow: Any = semantic.TritonSemantic.binary_op_type_checking_impl,
) -> Any:
    """Both operands as the operation wants them: as they are where both have one type, and numbers of the code as
    blocks that are made once."""
    if type(lhs) is type(rhs) is core.tensor:
        of, scalar, other = lhs.type, lhs.type.scalar, rhs.type.scalar
        if scalar.is_ptr():
            if allow_lhs_ptr and other.is_int():
                return _broadcast(self, lhs, rhs)
        elif scalar is other and not (div_or_mod and scalar.name.startswith(_LESS_THAN_32_BITS)):
            return (lhs, rhs) if of is rhs.type else _broadcast(self, lhs, rhs)
        return slow(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
    number, tensor = (lhs, rhs) if type(rhs) is core.tensor else (rhs, lhs)
    is_kept = arithmetic_check and type(tensor) is core.tensor and type(tensor.type) in (_Block, core.dtype)
    if not is_kept or type(number) not in (int, float):
        return slow(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
    key = (tensor.type, type(number), number or str(number), tensor is lhs, div_or_mod)  # 0.0 and -0.0 are equal
    if (made := _constants.get(key)) is None:
        found = slow(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        if found[tensor is rhs] is tensor:  # and not cast to the number's type
            made = _constants[key] = found[tensor is lhs]
            made.handle.data.setflags(write=False)
        return found
    return (tensor, made) if tensor is lhs else (made, tensor)


#: Numbers of kernels' code beside a type of tensor, as operands of this type.
_constants: dict[tuple[Any, ...], Any] = {}


def _unwrapped(value: Any, slow: Any = core._unwrap_if_constexpr) -> Any:
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    if kind is int or kind is core.tensor or kind is core.dtype or value is None or kind is float or kind is bool:
        return value
    return slow(value)


def _equal(self: Any, other: Any, slow: Any = core.dtype.__eq__) -> Any:
    return self is other or slow(self, other)


def _common_type(
    self: Any,
    a_ty: Any,
    a_is_scalar: bool,
    b_ty: Any,
    b_is_scalar: bool,
    div_or_mod: bool,
    slow: Any = semantic.TritonSemantic.computation_type_impl,
    known: dict[tuple[Any, ...], Any] = {},  # noqa: B006  (for all calls)
) -> Any:
    key = (a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod)
    if key not in known:
        known[key] = slow(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
    return known[key]


def _cast(self: Any, value: Any, to: Any, rounding: Any = None, slow: Any = semantic.TritonSemantic.cast) -> Any:
    return value if value.type.scalar is to.scalar else slow(self, value, to, rounding)


def _broadcast(self: Any, lhs: Any, rhs: Any, slow: Any = semantic.TritonSemantic.broadcast_impl_value) -> Any:
    left, right = lhs.type, rhs.type
    if left.is_block():
        if not right.is_block():
            return lhs, _splat(rhs, left)
        if left.shape.values == right.shape.values:
            return lhs, rhs
    elif right.is_block():
        return _splat(lhs, right), rhs
    else:
        return lhs, rhs
    key = (left, right)
    shapes = _shapes.get(key)
    if shapes is None:
        found = slow(self, lhs, rhs)
        _shapes[key] = tuple(each.type for each in found)
        return found
    return _spread(lhs, shapes[0]), _spread(rhs, shapes[1])


#: Types of two blocks of different shapes, as operands of one operation.
_shapes: dict[tuple[Any, Any], tuple[Any, Any]] = {}


def _splat(scalar: Any, block: Any) -> Any:
    """A scalar as a block of another one's shape."""
    handle = scalar.handle
    data = np.empty(tuple(block.shape.values), handle.data.dtype)
    data.fill(handle.data.item())
    return core.tensor(interpreter.TensorHandle(data, handle.dtype.scalar), block.with_element_ty(scalar.type.scalar))


def _spread(block: Any, of: Any) -> Any:
    """A block as one of another shape."""
    if block.type is of:
        return block
    data = np.broadcast_to(block.handle.data, tuple(of.shape.values))
    return core.tensor(interpreter.TensorHandle(data, block.handle.dtype.scalar), of)


def _convert_float(data: Any, of: Any, to: Any, rounding: Any, slow: Any = interpreter._convert_float) -> Any:
    """The bits of other floating-point numbers. bf16 is the upper half of fp32, and is cut off unless rounded."""
    if (of.name, to.name) == ("bf16", "fp32"):
        return data.view(np.uint16).astype(np.uint32) << 16
    if (of.name, to.name) == ("fp32", "bf16") and rounding is None:
        return (np.ascontiguousarray(data).view(np.uint32) >> 16).astype(np.uint16)
    return slow(data, of, to, rounding)


def _replace_builtin(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    plain = getattr(member, "__wrapped__", member)

    def interpreted(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return plain(*arguments, **named)

    scope.set_attr(obj, name, interpreted)


class _Kept:
    """Nothing to restore: names replaced for a module's kernels stay so."""

    def restore(self) -> None:
        pass


def _replace_language(function: Any, slow: Any = interpreter._patch_lang) -> _Kept:
    """Replace the language of a module at its first kernel, and look through it no more."""
    names = function.__globals__
    if id(names) not in _replaced:
        slow(function)
        _replaced[id(names)] = names
    return _Kept()


def _call(function: Any, *arguments: Any, **named: Any) -> Any:
    """A device function."""
    interpreter._patch_lang(function.fn)
    return function.rewrite()(*arguments, **named)


def make_quick() -> None:
    """Kernels take a quarter of the time, and give the same bits (but of subnormal bf16, which Triton gets wrong).

    A tile of the backward LayerNorm is eight rows, where GPUs take one or two: that many times fewer are interpreted.
    """
    how = dropout_add_layernorm._Backward(2, warps=8, rows=8, stages=1)
    dropout_add_layernorm._Backward.of = lambda _: how
    core.block_type = triton.language.block_type = _Block
    core.tensor.__init__ = _init_tensor
    semantic.TritonSemantic.binary_op_type_checking_impl = _operands
    semantic.TritonSemantic.broadcast_impl_value = _broadcast
    semantic.TritonSemantic.computation_type_impl = _common_type
    semantic.TritonSemantic.cast = _cast
    core._unwrap_if_constexpr = _unwrapped
    core.dtype.__eq__ = _equal
    interpreter.TensorHandle.__init__ = _init_handle
    interpreter._get_np_dtype = _np_dtype
    interpreter._convert_float = _convert_float
    interpreter._patch_attr = _replace_builtin
    interpreter._patch_lang = _replace_language
    interpreter.InterpretedFunction.__call__ = _call
    # Sums and products of integers are computed again in 64 bits for an assertion that is never made.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
