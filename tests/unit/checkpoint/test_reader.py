"""A reader gives back every bit, and never a wrong one: whatever was damaged is named, with the checkpoint to take."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
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


def flip_last_bit(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_a_flipped_bit_is_found_and_the_newest_good_checkpoint_named(kind: str, tmp_path: Path) -> None:
    save(tmp_path, 2, number=1)
    newest_good = save(tmp_path, 4, number=3)
    path = save(tmp_path, 6, number=4)
    file = sorted(path.glob(f"{kind}-*"))[0]
    flip_last_bit(file)
    reader = open_checkpoint(path)  # sizes are as they were

    with pytest.raises(CheckpointError) as raised:
        reader.verify_all()

    told = str(raised.value)
    assert re.match(rf"{re.escape(str(file))} is damaged: the checksum of '[a-z.0-9_]+' is [0-9a-f]{{8}}, saved", told)
    assert told.endswith(f"--resume_from_checkpoint {newest_good}")
    with pytest.raises(CheckpointError, match="is damaged: the checksum of"):
        has_values(reader, seed=6)


def test_without_another_checkpoint_that_is_said(tmp_path: Path) -> None:
    path = save(tmp_path, 6, number=4)
    flip_last_bit(path / "trainer_state.json")

    with pytest.raises(CheckpointError, match=r"trainer_state\.json is damaged: .* There is no other good checkpoint"):
        open_checkpoint(path).verify_all()


def test_a_file_that_is_cut_after_it_was_opened_is_told(tmp_path: Path) -> None:
    path = save(tmp_path, 6, number=4)
    reader = open_checkpoint(path)
    for file in path.glob("model-*"):
        file.write_bytes(file.read_bytes()[:-1])

    with pytest.raises(CheckpointError, match=r"is damaged: it ends in the middle of '"):
        reader.verify_all()


def damaged_header(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[bytes], bytes]:
    def damage(contents: bytes) -> bytes:
        length = int.from_bytes(contents[:8], "little")
        header = json.loads(contents[8 : 8 + length])
        change(header)
        text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
        return len(text).to_bytes(8, "little") + text + contents[8 + length :]

    return damage


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda contents: b"\xff" * 8 + contents[8:], "its header is none of safetensors"),
        (lambda contents: contents[:8] + b"[" * 40 + contents[48:], "its header is none of safetensors"),
        (damaged_header(lambda header: header["embed.weight"].update(dtype="F4")), r"'embed.weight' is F4 \[7, 3\]"),
        (damaged_header(lambda header: header["embed.weight"].update(shape=[9])), "its header is none of safetensors"),
        (damaged_header(lambda header: header["embed.weight"].update(shape=-1)), "its header is none of safetensors"),
        (damaged_header(lambda header: header["embed.weight"].update(data_offsets=[0])), "its header is none of"),
        (
            damaged_header(lambda header: header.pop("embed.weight")),
            "and checkpoint.json disagree about 'embed.weight'",
        ),
    ],
)
def test_a_damaged_header_is_told(damage: Callable[[bytes], bytes], reason: str, tmp_path: Path) -> None:
    path = save(tmp_path, 6, number=4)
    reader = open_checkpoint(path)
    file = path / "model-00001-of-00002.safetensors"
    file.write_bytes(damage(file.read_bytes()))

    with pytest.raises(CheckpointError, match=reason):
        reader.read("embed.weight", torch.empty(7, 3, dtype=torch.bfloat16))
