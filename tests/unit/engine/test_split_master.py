"""A master split into bf16 and a 16-bit remainder comes back bit by bit, but for one kind of tie."""

import pytest
import torch
from torch import Tensor

from mobius.engine.split_master import join_master, split_master

# Upper halves of fp32 numbers: zero, denormals, the smallest normal, ordinary ones even and odd, the largest.
UPPER_HALVES = (0x0000, 0x0001, 0x007E, 0x007F, 0x0080, 0x2BCC, 0x3F7F, 0x3F80, 0x3F81, 0x4049, 0x7F7E, 0x7F7F)
SIGNS = (0x0000, 0x8000)
EVERY_LOWER_HALF = torch.arange(2**16, dtype=torch.int64)


def fp32(bits: Tensor) -> Tensor:
    """The fp32 numbers whose bits are `bits` (int64, 0 to 2**32 - 1)."""
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def bits_of(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.empty_like(master, dtype=torch.bfloat16)
    remainder = torch.empty_like(master, dtype=torch.int16)
    split_master(master, weights=weights, remainder=remainder)
    return weights, remainder


def join(weights: Tensor, remainder: Tensor) -> Tensor:
    return join_master(weights, remainder, out=torch.empty_like(weights, dtype=torch.float32))


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("upper", UPPER_HALVES)
def test_every_master_comes_back_but_a_tie_that_rounds_to_zero_comes_one_step_nearer_to_it(
    upper: int, sign: int
) -> None:
    bits = ((upper | sign) << 16) + EVERY_LOWER_HALF
    expected = bits.clone()
    if upper % 2 == 0:
        expected[0x8000] -= 1

    assert torch.equal(bits_of(join(*split(fp32(bits)))), expected)


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("upper", UPPER_HALVES[:-1])
def test_the_weight_is_the_nearest_bf16_number_and_of_two_the_even_one(upper: int, sign: int) -> None:
    bits = ((upper | sign) << 16) + EVERY_LOWER_HALF
    below, above = (fp32(torch.tensor((half | sign) << 16)).double() for half in (upper, upper + 1))
    master = fp32(bits).double()
    to_below, to_above = (master - below).abs(), (above - master).abs()
    is_below = (to_below < to_above) | ((to_below == to_above) & (upper % 2 == 0))

    assert torch.equal(split(fp32(bits))[0].double(), torch.where(is_below, below, above))


def test_a_master_that_was_moved_is_kept_from_then_on() -> None:
    once = join(*split(fp32(torch.tensor([0x3F808000, 0xBF808000]))))

    assert bits_of(once).tolist() == [0x3F807FFF, 0xBF807FFF]
    assert torch.equal(join(*split(once)), once)
    assert split(once)[0].tolist() == [1.0, -1.0]


@pytest.mark.parametrize("sign", SIGNS)
def test_a_master_beyond_bf16_is_kept_though_its_weight_is_infinite(sign: int) -> None:
    master = fp32(torch.tensor([(0x7F7F | sign) << 16 | 0xFFFF]))
    weights, remainder = split(master)

    assert weights.isinf().all()
    assert torch.equal(join(weights, remainder), master)


def test_infinities_are_kept_and_every_nan_stays_a_nan() -> None:
    infinities = torch.tensor([float("inf"), -float("inf")])
    assert torch.equal(join(*split(infinities)), infinities)

    for upper in (0x7F80, 0x7F81, 0x7FBF, 0x7FC0, 0x7FFF, 0xFF80, 0xFFC0, 0xFFFF):
        nans = fp32((upper << 16) + EVERY_LOWER_HALF[1:])
        assert nans.isnan().all()
        weights, remainder = split(nans)
        assert weights.isnan().all()
        assert join(weights, remainder).isnan().all()


def test_in_one_of_131072_numbers_the_remainder_does_not_fit() -> None:
    bits = torch.cat([(upper << 16) + EVERY_LOWER_HALF for upper in range(0x3F80, 0x3F80 + 64)])

    assert (bits_of(join(*split(fp32(bits)))) != bits).sum() * 131072 == len(bits)


def test_the_zero_of_untouched_memory_is_zero() -> None:
    assert torch.equal(
        bits_of(join(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int16))).sum(), torch.tensor(0)
    )
