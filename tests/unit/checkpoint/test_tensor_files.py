"""Which stage writes which file, what is in it to the bit, and how a disk that fails is told."""

from __future__ import annotations

import filecmp
import subprocess
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.checkpoints import PARAMETERS, same_bits, save, values_of
from safetensors.torch import load_file, save_file

from mobius.checkpoint import tensor_files
from mobius.checkpoint.tensor_files import (
    Files,
    StageParameter,
    check_disk_space,
    checkpoint_disk_bytes,
    plan_files,
    write_stage,
)
from mobius.engine import stage_memory
from mobius.errors import CheckpointError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def files_of(kind: str, files: Files) -> Files:
    return {file_name: names for file_name, names in files.items() if file_name.startswith(kind)}


def test_files_have_whole_parameters_of_one_stage_and_end_at_the_limit() -> None:
    sizes_and_stages = [(40, 0), (40, 0), (30, 0), (100, 1), (250, 1), (10, 3)]
    parameters = [StageParameter(f"p{i}", (size,), stage) for i, (size, stage) in enumerate(sizes_and_stages)]

    plan = plan_files(parameters, dtype=torch.bfloat16, has_optimizer=True, max_file_bytes=200)

    model = "model-0000{}-of-00005.safetensors"
    assert [files_of("model", files) for files in plan] == [
        {model.format(1): ["p0", "p1"], model.format(2): ["p2"]},
        {model.format(3): ["p3"], model.format(4): ["p4"]},
        {},
        {model.format(5): ["p5"]},
    ]
    assert [len(files_of("optimizer", files)) for files in plan] == [3, 2, 0, 1]
    assert plan[0]["optimizer-00001-of-00006.safetensors"] == ["p0.exp_avg", "p0.exp_avg_sq", "p0.master_low"]


def test_the_order_in_which_stages_are_given_changes_nothing() -> None:
    def planned(parameters: list[StageParameter]) -> list[Files]:
        return plan_files(parameters, dtype=torch.float32, has_optimizer=False)

    first, second = StageParameter("a", (2,), 0), StageParameter("b", (2,), 1)
    assert planned([second, first]) == planned([first, second])


def test_frozen_parameters_and_runs_that_save_the_model_only_have_no_states() -> None:
    def states(parameters: list[StageParameter], *, has_optimizer: bool) -> list[str]:
        (files,) = plan_files(parameters, dtype=torch.bfloat16, has_optimizer=has_optimizer)
        return [name for names in files_of("optimizer", files).values() for name in names]

    trained, frozen = StageParameter("a", (2,), 0), StageParameter("b", (2,), 0, is_trained=False)
    assert states([trained, frozen], has_optimizer=True) == ["a.exp_avg", "a.exp_avg_sq", "a.master_low"]
    assert states([frozen], has_optimizer=True) == []
    assert states([trained], has_optimizer=False) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_written_files_hold_every_bit_in_the_parameters_shapes(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = values_of(1, dtype)
    plan = plan_files(PARAMETERS, dtype=dtype, has_optimizer=True)

    records = [record for files in plan for record in write_stage(tmp_path, files, tensors.__getitem__)]

    stored = {name: value for record in records for name, value in load_file(tmp_path / record.file_name).items()}
    assert stored.keys() == tensors.keys()
    assert all(same_bits(stored[name], value) for name, value in tensors.items())
    for record in records:
        path = tmp_path / record.file_name
        assert (record.num_bytes, path.stat().st_mode & 0o777) == (path.stat().st_size, 0o644)
        for name, found in record.checksums.items():
            assert found == zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())


def test_a_file_is_that_of_the_library_to_the_byte_in_however_many_parts_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_memory, "PART_BYTES", 64)
    tensors = {
        f"{letter}.{number}": torch.arange(9, 50).to(dtype)
        for letter in "ba"
        for number, dtype in enumerate(tensor_files.DTYPES.values())
    }
    tensors |= {"none": torch.zeros(0, 3), "one": torch.ones(()), "turned": torch.arange(6.0).view(2, 3).t()}

    (record,) = write_stage(tmp_path, {"own.safetensors": [*tensors]}, tensors.__getitem__)

    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, tmp_path / "library.safetensors", metadata={"format": "pt"})
    assert filecmp.cmp(tmp_path / "own.safetensors", tmp_path / "library.safetensors", shallow=False)
    sums = {name: zlib.crc32(each.reshape(-1).view(torch.uint8).numpy()) for name, each in contiguous.items()}
    assert record.checksums == sums


def test_sums_are_made_while_the_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where training waits for the disk, the disk should not wait for them."""
    path, summed, sizes = tmp_path / "model.safetensors", zlib.crc32, list[int]()

    def crc32(data: Any, value: int) -> int:
        end = time.monotonic() + 20
        while path.stat().st_size < 2**23 and time.monotonic() < end:
            time.sleep(0.01)
        sizes.append(path.stat().st_size)
        return summed(data, value)

    monkeypatch.setattr(tensor_files, "zlib", SimpleNamespace(crc32=crc32))
    (record,) = write_stage(tmp_path, {path.name: ["a"]}, lambda _: torch.ones(2**21))
    assert sizes[0] >= 2**23, "the disk has nothing to do"
    assert record.checksums == {"a": summed(torch.ones(2**21).numpy())}


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_told_with_what_was_to_be_written_and_what_is_free(full_disk: Path) -> None:
    (files,) = plan_files([StageParameter("a", (2**20,), 0)], dtype=torch.float32, has_optimizer=False)

    with pytest.raises(CheckpointError) as raised:
        write_stage(full_disk, files, lambda _: torch.zeros(2**20))

    told = str(raised.value)
    assert told.startswith(f"cannot write {full_disk / 'model.safetensors'}: ")
    assert "No space left on device" in told
    assert "4.0 MiB were to be written, 64.0 KiB is free" in told


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_the_space_that_is_asked_for_suffices(dtype: torch.dtype, has_optimizer: bool, tmp_path: Path) -> None:
    path = save(tmp_path, 1, number=1, dtype=dtype, has_optimizer=has_optimizer, max_file_bytes=1)

    used = sum(file.stat().st_size for file in path.iterdir())

    needed = checkpoint_disk_bytes(PARAMETERS, dtype, has_optimizer)
    assert used <= needed - 48 * 2**20  # the small files of this checkpoint take nothing


def test_space_grows_by_the_bytes_of_weights_and_states() -> None:
    def needed(num_elements: int, *, has_optimizer: bool) -> int:
        return checkpoint_disk_bytes([StageParameter("a", (num_elements,), 0)], torch.bfloat16, has_optimizer)

    assert needed(2000, has_optimizer=True) - needed(1000, has_optimizer=True) == 12 * 1000
    assert needed(2000, has_optimizer=False) - needed(1000, has_optimizer=False) == 2 * 1000


def test_too_little_space_is_told_with_what_is_needed_and_what_is_free(tmp_path: Path) -> None:
    check_disk_space(tmp_path / "a" / "b", 1)

    with pytest.raises(CheckpointError, match=r"a/b needs 1048576\.0 GiB, .* GiB is free\. Free some space"):
        check_disk_space(tmp_path / "a" / "b", 2**50)
    assert not (tmp_path / "a").exists()
