"""AdamW of one parameter in one launch, where its weights or its moments are kept in less than fp32.

All is read once and written once, and rounded on the way: weights and moments in bf16 by chance, by the same noise as
`step.updates.rounding` draws; moments in 8 bits to the nearest share of their block's largest, as
`step.updates.moments` has it. Both are the reference, with torch's fused AdamW between them.

Source: Loshchilov and Hutter 2019, arXiv 1711.05101; Dettmers et al. 2022, arXiv 2110.02861.
"""

# Pointers and sizes of kernels carry their shapes in upper case, as is the field's habit for Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

#: Numbers of one program: whole blocks of moments in 8 bits.
SIZE = 1024
#: Norms that are added at a time.
NORMS = 256
#: Numbers of a gradient whose squares are added by one program; smaller gradients are torch's, all in one launch.
LARGE = 8192


@triton.jit
def _spread(x):
    """Bits of a 32-bit number, mixed: those of `rounding`."""
    x = x * 0x9E3779B9
    return _mixed(x)


@triton.jit
def _mixed(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _seed(APPLIED, number, kind):
    """Seed of what is rounded of a parameter in this step."""
    found = _spread(tl.load(APPLIED).to(tl.uint32))
    found = _spread(found + number)
    return _spread(found + kind)


@triton.jit
def _by_chance(x, offsets, seed):
    """fp32 numbers that bf16 has, each one of the two neighbours of a number of `x`, or itself."""
    noise = _mixed((offsets.to(tl.uint32) * 0x9E3779B9) ^ seed)
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + (noise & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < float("inf"), rounded, x)


@triton.jit
def _unpacked(CODES, SCALES, SHARES, offsets, mask, BLOCK: tl.constexpr):
    codes = tl.load(CODES + offsets, mask=mask, other=0).to(tl.int32)
    scales = tl.load(SCALES + offsets // BLOCK, mask=mask, other=0.0)
    return tl.load(SHARES + codes) * scales


@triton.jit
def _pack(x, CODES, SCALES, MIDDLES, offsets, mask, numel, KEEPS: tl.constexpr, SIZE: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    blocks = tl.reshape(tl.where(mask, x, 0.0), [SIZE // BLOCK, BLOCK])
    scales = tl.max(tl.abs(blocks), 1)
    rows = tl.program_id(0) * (SIZE // BLOCK) + tl.arange(0, SIZE // BLOCK)
    tl.store(SCALES + rows, scales, mask=rows * BLOCK < numel)
    shares = tl.reshape(tl.div_rn(blocks, tl.where(scales > 0.0, scales, 1.0)[:, None]), [SIZE])
    codes = tl.zeros([SIZE], tl.int32)
    for bit in tl.static_range(8):
        higher = codes + (128 >> bit)
        codes = tl.where(shares > tl.load(MIDDLES + higher - 1), higher, codes)
    if KEEPS:  # what is above 0
        codes = tl.where((codes == 0) & (shares > 0.0), 1, codes)
    tl.store(CODES + offsets, codes.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["STEP", "number"])
def rounded_adamw(WEIGHT, GRADIENT, FIRST, SECOND, SCALES1, SCALES2, SHARES, MIDDLES, STEP, RATE, SKIPPED, SCALE,
                  APPLIED, numel, number, decay, rest1, rest2, epsilon, LOG_BETA1: tl.constexpr,
                  LOG_BETA2: tl.constexpr, HAS_GRADIENT: tl.constexpr, EIGHT_BITS: tl.constexpr,
                  KEEPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One block of a parameter. STEP: updates so far, this one counted. SCALE: that gradients are divided by.

    number: of the parameter, by which noise is drawn. SCALES1, SCALES2: of the blocks of moments in 8 bits. SHARES,
    MIDDLES: (2, 256) and (2, 255) of these; signed ones first. KEEPS: whether no second moment above 0 becomes 0.
    rest1, rest2: 1 - beta.
    """
    if tl.load(SKIPPED) != 0.0:
        return
    offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = offsets < numel
    rate, step = tl.load(RATE), tl.load(STEP).to(tl.float64)
    g = tl.zeros([SIZE], tl.float32)
    if HAS_GRADIENT:
        g = tl.load(GRADIENT + offsets, mask=mask, other=0.0).to(tl.float32) / tl.load(SCALE)
    if EIGHT_BITS:
        m = _unpacked(FIRST, SCALES1, SHARES, offsets, mask, BLOCK)
        v = _unpacked(SECOND, SCALES2, SHARES + 256, offsets, mask, BLOCK)
    else:
        m = tl.load(FIRST + offsets, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(SECOND + offsets, mask=mask, other=0.0).to(tl.float32)
    p = tl.load(WEIGHT + offsets, mask=mask, other=0.0).to(tl.float32)
    p -= rate * decay * p
    m += rest1 * (g - m)
    v += rest2 * (tl.minimum(g * g, 3.4e38) - v)  # not inf - inf
    # In fp64: 1 - beta^n loses half of fp32's digits where n is small.
    bias1 = (1.0 - tl.exp(step * LOG_BETA1)).to(tl.float32)
    bias2 = tl.sqrt(1.0 - tl.exp(step * LOG_BETA2)).to(tl.float32)
    p -= rate / bias1 * (m / (tl.sqrt(v) / bias2 + epsilon))
    if WEIGHT.dtype.element_ty == tl.bfloat16:
        p = _by_chance(p, offsets, _seed(APPLIED, number, 2))
    tl.store(WEIGHT + offsets, p.to(WEIGHT.dtype.element_ty), mask=mask)
    if EIGHT_BITS:
        _pack(m, FIRST, SCALES1, MIDDLES, offsets, mask, numel, False, SIZE, BLOCK)
        _pack(v, SECOND, SCALES2, MIDDLES + 255, offsets, mask, numel, KEEPS, SIZE, BLOCK)
    else:
        if FIRST.dtype.element_ty == tl.bfloat16:
            m = _by_chance(m, offsets, _seed(APPLIED, number, 1))
            v = _by_chance(v, offsets, _seed(APPLIED, number, 3))
        tl.store(FIRST + offsets, m.to(FIRST.dtype.element_ty), mask=mask)
        tl.store(SECOND + offsets, v.to(SECOND.dtype.element_ty), mask=mask)


@triton.jit
def square_sums(GRADIENT, PARTS, numel, SIZE: tl.constexpr):
    """The sum of the squares of each piece of a gradient."""
    offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    g = tl.load(GRADIENT + offsets, mask=offsets < numel, other=0.0).to(tl.float32)
    tl.store(PARTS + tl.program_id(0), tl.sum(g * g, 0))


@triton.jit(do_not_specialize=["num_parts", "num_norms", "num_counts"])
def take_norms(PARTS, NORMS, SCALE, SQUARES, SKIPPED, COUNTS, num_parts, num_norms, num_counts, SIZE: tl.constexpr):
    """Add the square of the norm of some gradients, divided by SCALE, and skip from here on if it is not finite; count
    a step of each parameter that is not skipped.

    PARTS: sums of squares. NORMS: of further gradients.
    """
    lanes, total = tl.arange(0, SIZE), tl.zeros([SIZE], tl.float32)
    for first in range(0, num_parts, SIZE):
        total += tl.load(PARTS + first + lanes, mask=first + lanes < num_parts, other=0.0)
    for first in range(0, num_norms, SIZE):
        norm = tl.load(NORMS + first + lanes, mask=first + lanes < num_norms, other=0.0)
        total += norm * norm
    norm = tl.sqrt(tl.sum(total, 0)) / tl.load(SCALE)
    skipped = tl.where(tl.abs(norm) < float("inf"), tl.load(SKIPPED), 1.0)
    tl.store(SQUARES, tl.load(SQUARES) + norm * norm)
    tl.store(SKIPPED, skipped)
    for first in range(0, num_counts, SIZE):
        here = first + lanes < num_counts
        counts = tl.load(COUNTS + first + lanes, mask=here, other=0.0)
        tl.store(COUNTS + first + lanes, counts + (1.0 - skipped), mask=here)
