"""Kernels of adamw_gpu.py in Triton, which torch installs for GPUs; import this module only on a machine with a GPU.

The kernels have the same operations as adamw.c. They compute the same bits if products and sums are not fused, and
square root and division are rounded correctly. Weights and remainders are integers: the bits of bf16, and the rest of
the master. `key` and `first` are the numbers of a `reduced_states.NoisePlace`, as signed 32 bits.
"""

import triton
import triton.language as tl

BLOCK = 1024
GROUP = tl.constexpr(32)
"""Equal to state_codec.GROUP."""


@triton.jit
def _update(master, mean, square, gradient, factor, decay, beta2, c1, c2, step_size, root_correction, epsilon):
    """Return the updated master and moments; `c1` and `c2` are 1 - beta1 and 1 - beta2."""
    scaled = gradient.to(tl.float32) * factor
    mean = mean + (scaled - mean) * c1
    square = square * beta2 + c2 * scaled * scaled
    divisor = tl.math.div_rn(tl.math.sqrt_rn(square), root_correction) + epsilon
    return master * decay - tl.math.div_rn(step_size * mean, divisor), mean, square


@triton.jit
def _join(weight, remainder):
    return ((weight.to(tl.int32) << 16) + remainder.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _split(value):
    """Return `value` rounded to bf16 (to nearest, ties to even), and the rest, both int16.

    The shift to the right keeps the sign of the rest, which the low half alone would not have.
    """
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rest = tl.minimum(bits - (rounded << 16), 0x7FFF)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, 0x7FC0, rounded).to(tl.int16), tl.where(is_nan, 0, rest).to(tl.int16)


@triton.jit
def _noise(key, index):
    x = index.to(tl.uint32, bitcast=True) ^ key.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise_of_fours(key, index):
    """Return 20 bits per element: four elements share a word, which is rotated for each element."""
    index = index.to(tl.uint32, bitcast=True)
    word, by = _noise(key, index >> 2), 8 * (index & 3)
    return (((word >> by) | (word << ((32 - by) & 31))) >> 12).to(tl.int32)


@triton.jit
def _is_finite(bits):
    return (bits & 0x7F800000) != 0x7F800000


@triton.jit(do_not_specialize=["count"])
def adamw_split(
    weights,
    remainder,
    exp_avg,
    exp_avg_sq,
    gradient,
    found_inf,
    count,
    gradient_factor,
    decay,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    step_size,
    root_correction,
    epsilon,
    block: tl.constexpr,
):
    """Update `count` elements; weights and remainder are int16, all scalars are fp32."""
    if tl.load(found_inf) == 0.0:
        index = tl.program_id(0) * block + tl.arange(0, block)
        mask = index < count
        master = _join(tl.load(weights + index, mask=mask, other=0), tl.load(remainder + index, mask=mask, other=0))
        updated, mean, square = _update(
            master,
            tl.load(exp_avg + index, mask=mask, other=0.0),
            tl.load(exp_avg_sq + index, mask=mask, other=0.0),
            tl.load(gradient + index, mask=mask, other=0.0),
            gradient_factor,
            decay,
            beta2,
            one_minus_beta1,
            one_minus_beta2,
            step_size,
            root_correction,
            epsilon,
        )
        weight, rest = _split(updated)
        tl.store(weights + index, weight, mask=mask)
        tl.store(remainder + index, rest, mask=mask)
        tl.store(exp_avg + index, mean, mask=mask)
        tl.store(exp_avg_sq + index, square, mask=mask)


@triton.jit(do_not_specialize=["count", "key", "first"])
def adamw_bf16_states(
    weights,
    remainder,
    exp_avg,
    exp_avg_sq,
    gradient,
    found_inf,
    count,
    key,
    first,
    gradient_factor,
    decay,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    step_size,
    root_correction,
    epsilon,
    block: tl.constexpr,
):
    """Update like `adamw_split`, with moments in bf16."""
    if tl.load(found_inf) == 0.0:
        index = tl.program_id(0) * block + tl.arange(0, block)
        mask = index < count
        master = _join(tl.load(weights + index, mask=mask, other=0), tl.load(remainder + index, mask=mask, other=0))
        updated, mean, square = _update(
            master,
            tl.load(exp_avg + index, mask=mask, other=0.0).to(tl.float32),
            tl.load(exp_avg_sq + index, mask=mask, other=0.0).to(tl.float32),
            tl.load(gradient + index, mask=mask, other=0.0),
            gradient_factor,
            decay,
            beta2,
            one_minus_beta1,
            one_minus_beta2,
            step_size,
            root_correction,
            epsilon,
        )
        weight, rest = _split(updated)
        tl.store(weights + index, weight, mask=mask)
        tl.store(remainder + index, rest, mask=mask)
        tl.store(exp_avg + index, _split(mean)[0].to(tl.bfloat16, bitcast=True), mask=mask)
        bits = square.to(tl.int32, bitcast=True)
        bits += tl.where(_is_finite(bits), (_noise(key, first + index) >> 16).to(tl.int32), 0)
        tl.store(exp_avg_sq + index, (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)


@triton.jit
def _exponents(words, span: tl.constexpr):
    """Return the exponent of each row of fp32 words without sign."""
    return tl.minimum(tl.maximum((tl.max(words, axis=1) >> 23) + 1, span + 1), 254)


@triton.jit
def _lowest_words(exponents, span: tl.constexpr):
    """Return a column with the word that code 0 would represent in each row."""
    return ((exponents.to(tl.int32) - span) << 23)[:, None]


@triton.jit
def _codes(words, lowest, added, least: tl.constexpr, most: tl.constexpr):
    return tl.minimum(tl.maximum((words - lowest + added) >> 20, least), most)


@triton.jit(do_not_specialize=["count", "key", "first"])
def adamw_compact(
    weights,
    remainder,
    exp_avg,
    exp_avg_exponents,
    exp_avg_sq,
    exp_avg_sq_exponents,
    gradient,
    found_inf,
    count,
    key,
    first,
    gradient_factor,
    decay,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    step_size,
    root_correction,
    epsilon,
    block: tl.constexpr,
):
    """Update `count` elements, a multiple of GROUP. Weights: int16, remainder: int8, codes and exponents: uint8."""
    if tl.load(found_inf) == 0.0:
        group = tl.program_id(0) * (block // GROUP) + tl.arange(0, block // GROUP)
        group_mask = group * GROUP < count
        index = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        mask = index < count
        upper = tl.load(weights + index, mask=mask, other=0).to(tl.int32) << 8
        master = ((upper + tl.load(remainder + index, mask=mask, other=0).to(tl.int32)) << 8).to(
            tl.float32, bitcast=True
        )
        lowest = _lowest_words(tl.load(exp_avg_exponents + group, mask=group_mask, other=0), 15)
        code = tl.load(exp_avg + index, mask=mask, other=0).to(tl.int32)
        words = tl.where((code & 0x7F) != 0, ((code & 0x7F) << 20) + lowest, 0) | ((code & 0x80) << 24)
        lowest = _lowest_words(tl.load(exp_avg_sq_exponents + group, mask=group_mask, other=0), 31)
        code = tl.load(exp_avg_sq + index, mask=mask, other=0).to(tl.int32)
        squares = tl.where(code != 0, (code << 20) + lowest, 0)
        updated, mean, square = _update(
            master,
            words.to(tl.float32, bitcast=True),
            squares.to(tl.float32, bitcast=True),
            tl.load(gradient + index, mask=mask, other=0.0),
            gradient_factor,
            decay,
            beta2,
            one_minus_beta1,
            one_minus_beta2,
            step_size,
            root_correction,
            epsilon,
        )
        noise = _noise_of_fours(key, first + index)
        bits = updated.to(tl.int32, bitcast=True)
        word = (bits + (noise & 0xFF)) >> 8  # an infinity stays one, because its last bits are zeros
        rounded = (word + 0x80) >> 8
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        tl.store(weights + index, tl.where(is_nan, 0x7FC0, rounded).to(tl.int16), mask=mask)
        tl.store(remainder + index, tl.where(is_nan, 0, word - (rounded << 8)).to(tl.int8), mask=mask)
        bits = mean.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        exponents = _exponents(magnitude, 15)
        code = _codes(magnitude, _lowest_words(exponents, 15), 1 << 19, 0, 127) | ((bits >> 24) & 0x80)
        tl.store(exp_avg_exponents + group, exponents.to(tl.uint8), mask=group_mask)
        tl.store(exp_avg + index, code.to(tl.uint8), mask=mask)
        bits = tl.minimum(square.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000) + noise
        exponents = _exponents(bits, 31)
        code = _codes(bits, _lowest_words(exponents, 31), 0, 1, 255)
        tl.store(exp_avg_sq_exponents + group, exponents.to(tl.uint8), mask=group_mask)
        tl.store(exp_avg_sq + index, tl.where((bits >> 20) != 0, code, 0).to(tl.uint8), mask=mask)
