"""Files that share blocks with a slot: wherever tensors begin in it, any reader of safetensors finds them."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
import torch
from harness.shared_blocks import BLOCK, copy_range
from safetensors.torch import load_file
from torch import Tensor

from mobius.checkpoint import cloned_stages
from mobius.checkpoint.cloned_stages import StepTensors, clone_tensors
from mobius.checkpoint.slot_reader import Region
from mobius.errors import CheckpointError

CHUNK = 2 * BLOCK
SHAPES: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {
    "a": (0, torch.bfloat16, (3, 1000)),  # ends in the middle of a block
    "a.codes": (6000, torch.uint8, (4999,)),  # another kind: the files of states
    "b.codes": (10999, torch.int8, (10001,)),  # from an odd byte on, over three chunks
    "b": (21000, torch.float32, (2000,)),
    "c": (29000, torch.bfloat16, (5,)),
    "d": (29120, torch.bfloat16, (7,)),  # behind a gap
}
WEIGHTS = {"a", "b", "c", "d"}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files that have shared blocks, by copies."""
    names: list[str] = []

    def clone_range(source: int, start: int, length: int, target: int, position: int) -> None:
        copy_range(source, start, length, target, position)
        names.append(Path(os.readlink(f"/proc/self/fd/{target}")).name)

    monkeypatch.setattr(cloned_stages, "clone_range", clone_range)
    monkeypatch.setattr(cloned_stages, "SMALLEST_CLONE", BLOCK)
    return names


@pytest.fixture
def step(tmp_path: Path) -> StepTensors:
    """A region in chunks that two files have by turns, the second one from its end."""
    memory = torch.frombuffer(bytearray(os.urandom(4 * CHUNK)), dtype=torch.uint8)
    chunks = [(0, CHUNK, CHUNK, 0), (1, CHUNK, CHUNK, 0), (0, 0, CHUNK, 0), (1, 0, CHUNK, 0)]
    files = [bytearray(2 * CHUNK), bytearray(2 * CHUNK)]
    for number, (file, offset, _, _) in enumerate(chunks):
        files[file][offset : offset + CHUNK] = bytes(memory[number * CHUNK : (number + 1) * CHUNK].tolist())
    paths = [tmp_path / "0.raw", tmp_path / "1.raw"]
    for path, content in zip(paths, files, strict=True):
        path.write_bytes(content)
    (tmp_path / "made").mkdir()
    region = Region.of(chunks, tensors_in(memory))
    return StepTensors(paths, {(3, "weights"): region}, {name: crc(each) for name, each in tensors_in(memory).items()})


def tensors_in(memory: Tensor) -> dict[str, Tensor]:
    """Views of `memory`, by name."""
    found = {}
    for name, (start, dtype, shape) in SHAPES.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        found[name] = memory[start : start + size].view(dtype).view(shape)
    return found


def crc(tensor: Tensor) -> int:
    return zlib.crc32(bytes(tensor.reshape(-1).view(torch.uint8).tolist()))


def values_in(step: StepTensors) -> dict[str, bytes]:
    """Bytes of each tensor, from the slot's files."""
    (region,) = step.regions.values()
    files = [path.read_bytes() for path in step.paths]
    memory = b"".join(files[file][offset : offset + length] for file, offset, length, _ in region.chunks)
    return {name: memory[slice(*region.span(name))] for name in region.tensors}


def test_every_tensor_is_found_in_files_of_its_kind(step: StepTensors, tmp_path: Path, made: list[str]) -> None:
    folder = tmp_path / "made"
    records = clone_tensors(folder, step, WEIGHTS)

    by_file = {record.file_name: {*record.checksums} for record in records}
    assert by_file == {
        "model-3-0.safetensors": {"a"},
        "optimizer-3-1.safetensors": {"a.codes", "b.codes"},
        "model-3-2.safetensors": {"b", "c"},
        "model-3-small.safetensors": {"d"},
    }
    assert set(made) == {*by_file} - {"model-3-small.safetensors"}, "small ones are copied"
    expected, seen = values_in(step), set[str]()
    for record in records:
        assert (folder / record.file_name).stat().st_size == record.num_bytes
        for name, tensor in load_file(folder / record.file_name).items():
            _, dtype, shape = SHAPES[name]
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
            assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == expected[name]
            assert record.checksums[name] == zlib.crc32(expected[name])
            seen.add(name)
    assert seen == {*SHAPES}


def test_files_have_the_usual_size(
    step: StepTensors, tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloned_stages, "MAX_FILE_BYTES", 12000)

    clone_tensors(tmp_path / "made", step, WEIGHTS)

    assert {path.name: [*load_file(path)] for path in (tmp_path / "made").glob("optimizer-*")} == {
        "optimizer-3-1.safetensors": ["a.codes"],
        "optimizer-3-2.safetensors": ["b.codes"],
    }


def test_a_file_that_cannot_be_cloned_is_named(step: StepTensors, tmp_path: Path, made: list[str]) -> None:
    step.paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"cannot clone .*made/model-3-0.safetensors: No such file"):
        clone_tensors(tmp_path / "made", step, WEIGHTS)


def test_a_small_tensor_that_is_damaged_is_not_copied(step: StepTensors, tmp_path: Path, made: list[str]) -> None:
    damaged = StepTensors(step.paths, step.regions, {**step.checksums, "d": step.checksums["d"] ^ 1})
    with pytest.raises(CheckpointError, match=r"'d' has another checksum"):
        clone_tensors(tmp_path / "made", damaged, WEIGHTS)
