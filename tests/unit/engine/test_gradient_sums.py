"""The squared norm over many tensors, in fp32 whatever they are stored in."""

import pytest
import torch

from mobius.engine.gradient_sums import squared_norm

CPU = torch.device("cpu")


def test_it_is_the_square_of_the_norm_that_torch_clips_by() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in ((31,), (8, 9), (2, 3, 4))]

    expected = torch.nn.utils.get_total_norm(tensors) ** 2
    assert squared_norm(tensors, CPU).item() == pytest.approx(expected.item(), rel=1e-6)


def test_half_precision_is_summed_in_fp32() -> None:
    tensors = [torch.full((4096,), 100.0, dtype=torch.float16)]  # its sum of squares, 4.1e7, is beyond fp16

    assert squared_norm(tensors, CPU).item() == pytest.approx(4096 * 1e4)


def test_no_tensors_have_norm_zero() -> None:
    assert squared_norm([], CPU).item() == 0.0
