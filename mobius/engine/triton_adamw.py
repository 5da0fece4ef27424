"""The kernel of adamw_gpu.py in Triton, which torch installs for GPUs; import it only where there is one.

The kernel is `update` and `split` of adamw.c, operation by operation. It gives the same bits when launched without
fusing products and sums, with correctly rounded square root and division.
"""

import triton
import triton.language as tl

BLOCK = 1024


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
    """Update `count` elements; weights (the bits of bf16) and remainder are int16, all scalars fp32."""
    if tl.load(found_inf) == 0.0:
        index = tl.program_id(0) * block + tl.arange(0, block)
        mask = index < count
        upper = tl.load(weights + index, mask=mask, other=0).to(tl.int32) << 16
        bits = upper + tl.load(remainder + index, mask=mask, other=0).to(tl.int32)
        master = bits.to(tl.float32, bitcast=True)
        scaled = tl.load(gradient + index, mask=mask, other=0.0).to(tl.float32) * gradient_factor
        mean = tl.load(exp_avg + index, mask=mask, other=0.0)
        mean = mean + (scaled - mean) * one_minus_beta1
        square = tl.load(exp_avg_sq + index, mask=mask, other=0.0) * beta2 + one_minus_beta2 * scaled * scaled
        divisor = tl.math.div_rn(tl.math.sqrt_rn(square), root_correction) + epsilon
        updated = master * decay - tl.math.div_rn(step_size * mean, divisor)
        bits = updated.to(tl.int32, bitcast=True)
        # To nearest, ties to even; the shift keeps a sign, which the low half of the result does not contain.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rest = tl.minimum(bits - (rounded << 16), 0x7FFF)
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        tl.store(weights + index, tl.where(is_nan, 0x7FC0, rounded).to(tl.int16), mask=mask)
        tl.store(remainder + index, tl.where(is_nan, 0, rest).to(tl.int16), mask=mask)
        tl.store(exp_avg + index, mean, mask=mask)
        tl.store(exp_avg_sq + index, square, mask=mask)
