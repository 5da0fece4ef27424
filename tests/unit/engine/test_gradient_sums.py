"""The squared norm of each tensor, in fp32 whatever they are stored in."""

import pytest
import torch

from mobius.engine.gradient_sums import squared_norms

CPU = torch.device("cpu")


def test_they_are_the_squares_of_the_norms_that_torch_clips_by() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (31,), "b": (8, 9), "c": (2, 3, 4)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    found = squared_norms(tensors, tensors, CPU)

    assert found.tolist() == [float(torch.nn.utils.get_total_norm([own]).square()) for own in tensors.values()]


def test_a_name_without_a_tensor_has_norm_zero() -> None:
    assert squared_norms(["a", "b"], {"b": torch.full((3,), 2.0)}, CPU).tolist() == [0.0, pytest.approx(12.0)]
    assert squared_norms(["a", "b"], {}, CPU).tolist() == [0.0, 0.0]


def test_a_tensor_has_the_same_bits_whatever_is_beside_it() -> None:
    generator = torch.Generator().manual_seed(0)
    long, short = torch.randn(200_000, generator=generator), torch.randn(3, generator=generator)

    alone = squared_norms(["long"], {"long": long}, CPU)
    both = squared_norms(["short", "long"], {"short": short, "long": long}, CPU)

    assert torch.equal(alone[0], both[1])


def test_half_precision_is_summed_in_fp32() -> None:
    tensors = {"a": torch.full((4096,), 100.0, dtype=torch.float16)}  # its sum of squares, 4.1e7, is beyond fp16

    assert squared_norms(tensors, tensors, CPU).tolist() == pytest.approx([4096 * 1e4])


def test_no_tensors_have_no_norms() -> None:
    assert squared_norms([], {}, CPU).tolist() == []
