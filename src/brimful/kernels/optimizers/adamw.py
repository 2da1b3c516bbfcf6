"""AdamW over all parameters in three launches: gradients' norm, what is decided from it, the update.

The parameters' fp32 masters and both moments lie in one arena each. Gradients lie wherever a backward pass left them,
in fp32 or in half precision, and are found through a table of addresses, so a captured graph needs no copies of them.
The update writes half-precision copies of the weights while it has the masters at hand: 28 bytes a parameter and step.

A block is up to `BLOCK` numbers of one parameter, of a table of embeddings whole rows. A block that never had a
gradient has no moments, and is left alone but for weight decay: words that no text has had yet cost their gradient's
zeros alone. Arithmetic is that of torch's fused AdamW; `torch.optim.AdamW` and `torch.nn.utils.get_total_norm` are the
reference. Nothing is added atomically: equal inputs give equal bits.

Source: Loshchilov and Hutter 2019, arXiv 1711.05101.
"""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

#: Numbers of one program.
BLOCK = 1024
#: Programs of the norm, and so partial sums that are added at the end.
PARTIALS = 2048
#: Numbers in the arenas, by which parameters are aligned.
ALIGNMENT = 16


@triton.jit
def _gradient(ADDRESSES, HALVES, parameter, offsets, end, HALF: tl.constexpr, SIZE: tl.constexpr):
    """Gradients at `offsets` of one parameter up to `end`, in fp32; zeros for a parameter that has none.

    A block whose end is a multiple of 16 is loaded in the widest words: torch aligns what it allocates.
    """
    g = tl.zeros([SIZE], tl.float32)
    address = tl.load(ADDRESSES + parameter)
    if address != 0:
        wide = offsets < tl.multiple_of(end // 16 * 16, 16)
        if tl.load(HALVES + parameter) != 0:
            halves = tl.multiple_of(address.to(tl.pointer_type(HALF)), 16)
            if end % 16 == 0:
                g = tl.load(halves + offsets, mask=wide, other=0.0).to(tl.float32)
            else:
                g = tl.load(halves + offsets, mask=offsets < end, other=0.0).to(tl.float32)
        else:
            floats = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
            if end % 16 == 0:
                g = tl.load(floats + offsets, mask=wide, other=0.0)
            else:
                g = tl.load(floats + offsets, mask=offsets < end, other=0.0)
    return g


@triton.jit
def _place(BLOCKS, block, SIZE: tl.constexpr):
    """Of a block: its parameter, its places in it, and where it ends."""
    parameter, start, end = (
        tl.load(BLOCKS + 3 * block),
        tl.load(BLOCKS + 3 * block + 1),
        tl.load(BLOCKS + 3 * block + 2),
    )
    return parameter, tl.multiple_of(start, 16) + tl.arange(0, SIZE), end


@triton.jit
def _own(STARTS, parameter, offsets, end):
    """The block's places in the arenas, and which are its own; arenas are padded to multiples of `ALIGNMENT`."""
    mask = offsets < tl.multiple_of((end + 15) // 16 * 16, 16)
    return tl.multiple_of(tl.load(STARTS + parameter), 16) + offsets, mask


@triton.jit
def adamw_norm(BLOCKS, HALVES, ADDRESSES, PARTS, num_blocks, HALF: tl.constexpr, SIZE: tl.constexpr):
    """Partial sums of squares of all gradients, one a program."""
    total = tl.zeros([SIZE], tl.float32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        parameter, offsets, end = _place(BLOCKS, block, SIZE)
        g = _gradient(ADDRESSES, HALVES, parameter, offsets, end, HALF, SIZE)
        total += g * g
    tl.store(PARTS + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _add_squares(PARTS, total, begins):
    """Add squares to the program's partial sum, or begin it with them."""
    squares = tl.sum(total, 0)
    if begins == 0:
        squares += tl.load(PARTS + tl.program_id(0))
    tl.store(PARTS + tl.program_id(0), squares)


@triton.jit
def sum_parts(FIRST, SECOND, SUM, PARTS, size, begins, SIZE: tl.constexpr):
    """The sum of two processes' gradients in fp32, and its squares, which are added to each program's partial sum, or
    begin it.

    So the norm needs no look at the gradients of its own. FIRST and SECOND: fp32 or halves; SECOND may be another GPU's
    memory.
    """
    total = tl.zeros([SIZE], tl.float32)
    for start in range(tl.program_id(0) * SIZE, size, tl.num_programs(0) * SIZE):
        places = start + tl.arange(0, SIZE)
        mask = places < size
        first = tl.load(FIRST + places, mask=mask, other=0.0).to(tl.float32)
        g = first + tl.load(SECOND + places, mask=mask, other=0.0).to(tl.float32)
        tl.store(SUM + places, g, mask=mask)
        total += g * g
    _add_squares(PARTS, total, begins)


@triton.jit
def sum_with_own(BLOCKS, STARTS, HALVES, ADDRESSES, IN_USE, OTHER, SUM, PARTS, origin, num_blocks, begins,
                 HALF: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """`sum_parts` of another process's gradients and of this one's, which are read where a backward pass left them.

    OTHER, SUM: a part of a bucket, which begins at `origin` of the arenas and has these blocks.
    """
    total = tl.zeros([SIZE], tl.float32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        parameter, offsets, end = _place(BLOCKS, block, SIZE)
        g = _gradient(ADDRESSES, HALVES, parameter, offsets, end, HALF, SIZE)
        own, mask = _own(STARTS, parameter, offsets, end)
        places = own - origin
        g += tl.load(OTHER + places, mask=mask, other=0.0).to(tl.float32)
        tl.store(SUM + places, g, mask=mask)
        total += g * g
        if tl.load(ADDRESSES + parameter) != 0:
            tl.store(IN_USE + parameter, 1)
    _add_squares(PARTS, total, begins)


@triton.jit
def adamw_decide(PARTS, ADDRESSES, IN_USE, STEPS, CORRECTIONS, LOSS, SCALE, APPLIED, SCHEDULE, CONTROL, READINGS,
                 GATHERED, num_parameters, num_parts, schedule_length, max_norm, LOG_BETA1: tl.constexpr,
                 LOG_BETA2: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Norm, clipping, whether all is finite, learning rate and bias corrections; counts the step if it is applied.

    CONTROL: (3,) whether it is skipped, factor of the gradients, learning rate. CORRECTIONS: (parameters, 2).
    READINGS: (5,) loss, norm, learning rate, scale, whether it is skipped.
    """
    lanes = tl.arange(0, SIZE)
    norm = tl.sqrt(tl.sum(tl.load(PARTS + lanes, mask=lanes < num_parts, other=0.0), 0))
    loss, scale, applied = tl.load(LOSS), tl.load(SCALE), tl.load(APPLIED)
    norm = norm / scale
    finite = (tl.abs(norm) < float("inf")) & (tl.abs(loss) < float("inf"))
    clip = 1.0
    if max_norm > 0:
        clip = tl.minimum(max_norm / (norm + 1e-6), 1.0)
    rate = tl.load(SCHEDULE + tl.minimum(applied, schedule_length - 1))
    skipped = tl.where(finite, 0.0, 1.0)
    tl.store(CONTROL, skipped)
    tl.store(CONTROL + 1, clip / scale)
    tl.store(CONTROL + 2, rate)
    tl.store(READINGS, loss.to(tl.float64))
    tl.store(READINGS + 1, norm.to(tl.float64))
    tl.store(READINGS + 2, rate.to(tl.float64))
    tl.store(READINGS + 3, scale.to(tl.float64))
    tl.store(READINGS + 4, skipped.to(tl.float64))
    tl.store(APPLIED, applied + tl.where(finite, 1, 0))
    tl.store(LOSS, 0.0)
    tl.store(GATHERED, 0)
    for first in range(0, num_parameters, SIZE):
        parameters = first + lanes
        inside = parameters < num_parameters
        found = tl.load(ADDRESSES + parameters, mask=inside, other=0) != 0
        used = (tl.load(IN_USE + parameters, mask=inside, other=0) != 0) | found
        steps = tl.load(STEPS + parameters, mask=inside, other=0.0) + tl.where(used, 1.0 - skipped, 0.0)
        tl.store(IN_USE + parameters, used.to(tl.int32), mask=inside)
        tl.store(STEPS + parameters, steps, mask=inside)
        # In fp64: 1 - beta^n loses half of fp32's digits where n is small.
        one = 1.0 - tl.exp(steps.to(tl.float64) * LOG_BETA1)
        two = 1.0 - tl.exp(steps.to(tl.float64) * LOG_BETA2)
        tl.store(CORRECTIONS + 2 * parameters, one.to(tl.float32), mask=inside)
        tl.store(CORRECTIONS + 2 * parameters + 1, tl.sqrt(two).to(tl.float32), mask=inside)


@triton.jit
def adamw_update(BLOCKS, TOUCHED, STARTS, STATES, DECAYS, COPIED, HALVES, ADDRESSES, IN_USE, CORRECTIONS, CONTROL,
                 MASTER, MOMENT1, MOMENT2, COPY, rest1, rest2, epsilon, HALF: tl.constexpr,
                 SIZE: tl.constexpr):  # fmt: skip
    """One block of masters and moments, and of the half-precision copy if its parameter has one.

    TOUCHED: of each block, whether it ever had a gradient that was not all zeros. STATES: first places of parameters in
    the memory of moments, before it for one that only a later part is kept of. rest1, rest2: 1 - beta, of which a
    kernel's own difference in fp32 would have four digits.
    """
    if tl.load(CONTROL) != 0.0:
        return
    block = tl.program_id(0)
    touched = tl.load(TOUCHED + block)
    parameter, offsets, end = _place(BLOCKS, block, SIZE)
    if tl.load(IN_USE + parameter) == 0:
        return
    factor, rate = tl.load(CONTROL + 1), tl.load(CONTROL + 2)
    g = _gradient(ADDRESSES, HALVES, parameter, offsets, end, HALF, SIZE) * factor
    if touched == 0:
        touched = tl.where(tl.max(tl.abs(g), 0) > 0.0, 1, 0)
        tl.store(TOUCHED + block, touched)
    decay = rate * tl.load(DECAYS + parameter)
    if (touched != 0) | (decay != 0.0):
        own, mask = _own(STARTS, parameter, offsets, end)
        p = tl.load(MASTER + own, mask=mask, other=0.0)
        p -= decay * p
        if touched != 0:
            state, _ = _own(STATES, parameter, offsets, end)
            m = tl.load(MOMENT1 + state, mask=mask, other=0.0)
            v = tl.load(MOMENT2 + state, mask=mask, other=0.0)
            m += rest1 * (g - m)
            v += rest2 * (tl.minimum(g * g, 3.4e38) - v)  # not inf - inf
            bias1, bias2 = tl.load(CORRECTIONS + 2 * parameter), tl.load(CORRECTIONS + 2 * parameter + 1)
            p -= rate / bias1 * (m / (tl.sqrt(v) / bias2 + epsilon))
            tl.store(MOMENT1 + state, m, mask=mask)
            tl.store(MOMENT2 + state, v, mask=mask)
        tl.store(MASTER + own, p, mask=mask)
        if tl.load(COPIED + parameter) != 0:
            tl.store(COPY + own, p.to(HALF), mask=mask)


@triton.jit
def gather_gradients(BLOCKS, STARTS, HALVES, ADDRESSES, IN_USE, GATHERED, SUM, HALF: tl.constexpr,
                     SIZE: tl.constexpr):  # fmt: skip
    """Adds the gradients of one micro-batch to `SUM`, fp32, or begins it with them if none was gathered yet."""
    parameter, offsets, end = _place(BLOCKS, tl.program_id(0), SIZE)
    g = _gradient(ADDRESSES, HALVES, parameter, offsets, end, HALF, SIZE)
    own, mask = _own(STARTS, parameter, offsets, end)
    if tl.load(GATHERED) != 0:
        g += tl.load(SUM + own, mask=mask, other=0.0)
    tl.store(SUM + own, g, mask=mask)
    if tl.load(ADDRESSES + parameter) != 0:
        tl.store(IN_USE + parameter, 1)
