"""A reader gives back every bit, and never a wrong one: whatever was damaged is named, with the checkpoint to take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.checkpoints import has_values, save, values_of

from mobius.checkpoint.folders import open_checkpoint
from mobius.errors import CheckpointError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_file_bytes", [1, 5_000_000_000])
def test_every_bit_comes_back(dtype: torch.dtype, max_file_bytes: int, tmp_path: Path) -> None:
    reader = open_checkpoint(save(tmp_path, 4, number=1, dtype=dtype, max_file_bytes=max_file_bytes))

    reader.verify_all()
    assert has_values(reader, seed=4)
    assert not has_values(reader, seed=5)


def test_values_are_read_to_where_they_are_wanted(tmp_path: Path) -> None:
    reader = open_checkpoint(save(tmp_path, 4, number=1))
    flat = torch.zeros(100, dtype=torch.bfloat16)
    view, transposed = flat[10:31].view(7, 3), torch.empty(3, 7, dtype=torch.bfloat16).t()

    assert reader.read("embed.weight", view) is view
    assert reader.read("embed.weight", transposed) is transposed

    expected = values_of(4, torch.bfloat16)["embed.weight"]
    assert torch.equal(flat[10:31].view(7, 3), expected)
    assert torch.equal(transposed, expected)
    assert not flat[:10].any()
    assert not flat[31:].any()


@pytest.mark.parametrize(
    ("name", "dtype", "complaint"),
    [
        ("embed.weight", "bfloat16", r"is bfloat16 \[7, 3\], this run needs bfloat16 \[3, 7\]"),
        ("embed.weight.exp_avg", "float16", r"is float32 \[7, 3\], this run needs float16 \[3, 7\]"),
        ("lm_head.weight", "bfloat16", r"has no tensor 'lm_head\.weight'"),
        ("layers.1.frozen.exp_avg", "float32", r"no tensor 'layers\.1\.frozen\.exp_avg'.*other"),
    ],
)
def test_a_tensor_of_another_model_is_refused(name: str, dtype: str, complaint: str, tmp_path: Path) -> None:
    reader = open_checkpoint(save(tmp_path, 4, number=1))

    with pytest.raises(CheckpointError, match=complaint):
        reader.read(name, torch.empty(3, 7, dtype=getattr(torch, dtype)))


@pytest.mark.parametrize("has_read", [False, True], ids=["opened", "read"])
def test_a_file_that_is_cut_after_it_was_opened_or_read_is_told(tmp_path: Path, has_read: bool) -> None:
    path = save(tmp_path, 6, number=4)
    reader = open_checkpoint(path)
    assert not has_read or has_values(reader, seed=6)
    for file in path.glob("model-*"):
        file.write_bytes(file.read_bytes()[:-1])

    with pytest.raises(CheckpointError, match=r"is damaged: it ends in the middle of '"):
        reader.verify_all()
