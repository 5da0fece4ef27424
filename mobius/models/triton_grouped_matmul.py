"""Triton kernels for grouped products; import this module only on machines with a GPU, where torch installs Triton.

grouped_rows    one program per tile of the output; it finds its expert from the offsets, so the host need not know them
add_factors     one program per tile of an expert's matrix; it loops over the expert's rows and adds to the fp32 sum
"""

import triton
import triton.language as tl

ROWS, OUT, IN = 128, 128, 32
"""Tile size of grouped_rows, and its step along the inner dimension."""
LEFT, RIGHT = 128, 128
"""Tile size of add_factors."""
SETTINGS = {"num_warps": 8, "num_stages": 3}
ADD_SETTINGS = {"rows_block": 32, "num_warps": 8, "num_stages": 3}
"""Settings of add_factors; `rows_block` is its step along rows."""
ADD_SETTINGS_OF_HALVES = {"rows_block": 64, "num_warps": 4, "num_stages": 3}
"""Settings for 2-byte rows if a program may use 96 KiB of shared memory. An H200 then needs 0.7 of the time."""


@triton.jit(do_not_specialize=["num_experts"])
def grouped_rows(
    rows,
    weight,
    expert_offsets,
    output,
    num_experts,
    num_in,
    num_out,
    stride_expert,
    stride_in,
    stride_out,
    experts_block: tl.constexpr,
    rows_block: tl.constexpr,
    out_block: tl.constexpr,
    in_block: tl.constexpr,
):
    """output[r] = rows[r] @ weight[expert of r]; rows and output are contiguous, weight [experts, in, out] is strided.

    Each tile belongs to one expert, so each expert may have one partial tile.
    """
    place = tl.program_id(1)
    numbers = tl.arange(0, experts_block)
    is_there = numbers < num_experts
    end_rows = tl.load(expert_offsets + numbers, mask=is_there, other=0)
    before = tl.load(expert_offsets + numbers - 1, mask=is_there & (numbers > 0), other=0)
    num_tiles = tl.where(is_there, (end_rows - before + rows_block - 1) // rows_block, 0)
    tiles_through = tl.cumsum(num_tiles, 0)
    expert = tl.sum((tiles_through <= place).to(tl.int32) * is_there.to(tl.int32), 0)
    if expert < num_experts:
        is_own = numbers == expert
        tile = place - tl.sum(tl.where(is_own, tiles_through - num_tiles, 0), 0)
        start = tl.sum(tl.where(is_own, before, 0), 0) + tile * rows_block
        end = tl.sum(tl.where(is_own, end_rows, 0), 0)
        own = (start + tl.arange(0, rows_block)).to(tl.int64)
        columns = tl.program_id(0) * out_block + tl.arange(0, out_block)
        inner = tl.arange(0, in_block)
        left = rows + own[:, None] * num_in + inner[None, :]
        right = (
            weight + expert.to(tl.int64) * stride_expert + inner[:, None] * stride_in + columns[None, :] * stride_out
        )
        total = tl.zeros((rows_block, out_block), dtype=tl.float32)
        for first in range(0, num_in, in_block):
            is_inner = inner < num_in - first
            factor = tl.load(left, mask=(own < end)[:, None] & is_inner[None, :], other=0.0)
            matrix = tl.load(right, mask=is_inner[:, None] & (columns < num_out)[None, :], other=0.0)
            total = tl.dot(factor, matrix, total, input_precision="ieee")
            left += in_block
            right += in_block * stride_in
        target = output + own[:, None] * num_out + columns[None, :]
        tl.store(target, total.to(output.dtype.element_ty), mask=(own < end)[:, None] & (columns < num_out)[None, :])


@triton.jit
def add_factors(
    left,
    right,
    expert_offsets,
    total,
    num_left,
    num_right,
    left_block: tl.constexpr,
    right_block: tl.constexpr,
    rows_block: tl.constexpr,
):
    """total[e] += left[rows of e]^T @ right[rows of e] in fp32; all tensors are contiguous.

    Skips experts without rows.
    """
    expert = tl.program_id(1)
    end = tl.load(expert_offsets + expert)
    start = tl.load(expert_offsets + expert - 1, mask=expert > 0, other=0)
    if end > start:
        num_across = tl.cdiv(num_right, right_block)
        down = (tl.program_id(0) // num_across) * left_block + tl.arange(0, left_block)
        across = (tl.program_id(0) % num_across) * right_block + tl.arange(0, right_block)
        steps = tl.arange(0, rows_block)
        place = total + expert.to(tl.int64) * num_left * num_right
        place += down.to(tl.int64)[:, None] * num_right + across[None, :]
        mask = (down < num_left)[:, None] & (across < num_right)[None, :]
        added = tl.zeros((left_block, right_block), dtype=tl.float32)
        for first in range(start, end, rows_block):
            own = (first + steps).to(tl.int64)
            is_own = own < end
            ours = tl.load(
                left + own[None, :] * num_left + down[:, None],
                mask=is_own[None, :] & (down < num_left)[:, None],
                other=0.0,
            )
            theirs = tl.load(
                right + own[:, None] * num_right + across[None, :],
                mask=is_own[:, None] & (across < num_right)[None, :],
                other=0.0,
            )
            added = tl.dot(ours, theirs, added, input_precision="ieee")
        tl.store(place, tl.load(place, mask=mask, other=0.0) + added, mask=mask)
