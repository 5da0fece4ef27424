"""The benchmark of slices runs on a CPU with small numbers, and its columns are what they say."""

from __future__ import annotations

import pytest
import sliced_attention
import torch
from sliced_attention import Work, num_pairs

from mobius.models.sliced_attention.kernel_choice import AttentionKernel

SIZES = {"length": 70, "heads": 4, "key_heads": 2, "head_size": 16, "repeats": 1}
SMALL = ["--slices", "32", "16", *(word for name, number in SIZES.items() for word in (f"--{name}", str(number)))]


def test_pairs_are_those_that_see_each_other() -> None:
    for length, window in [(7, None), (7, 3), (7, 1), (7, 7), (7, 9)]:
        distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
        assert num_pairs(length, window) == int(((distance >= 0) & (distance < (window or length))).sum())


def test_a_pass_over_slices_is_a_pass_over_the_whole() -> None:
    arguments = sliced_attention.parse([*SMALL, "--dtype", "float32"])
    work = Work(arguments, AttentionKernel.CPU, torch.device("cpu"), 16)
    work.forward()
    query, key, value = (torch.cat(own, dim=2) for own in (work.queries, work.keys, work.values))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    actual = torch.cat([output for output, _ in work.outputs], dim=1)
    assert torch.allclose(actual, expected.transpose(1, 2), atol=1e-6)
    work.backward()
    assert not work.cache.gradient_sum_views(slice(None), slice(None))[0].any(), "all gradients are taken"


def test_a_table_has_each_kernel_in_one_piece_and_in_slices(capsys: pytest.CaptureFixture[str]) -> None:
    sliced_attention.main([*SMALL, "--kernels", "cpu", "tiles"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == ["cpu"] * 3 + ["tiles"] * 3
    assert [row[1].strip() for row in rows[2:]] == ["70", "32", "16"] * 2
    assert [row[6] for row in rows[2::3]] == ["1.000", "1.000"], "the whole beside itself"
    assert all(float(row[2]) > 0 and float(row[4]) > 0 for row in rows[2:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slices", "80"], "slices of [80] tokens in a sequence of 70"),
        (["--key_heads", "3"], "3 key heads do not divide 4 heads"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sliced_attention.parse([*SMALL, *words])
    assert message in capsys.readouterr().err


def test_a_kernel_that_is_not_here_is_refused() -> None:
    with pytest.raises(SystemExit, match="flash cannot do this here; cpu, tiles can"):
        sliced_attention.main([*SMALL, "--kernels", "flash"])
