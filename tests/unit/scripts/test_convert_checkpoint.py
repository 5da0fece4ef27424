"""scripts/convert_checkpoint.py: there and back to the bit, and nothing under a final name where it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from convert_checkpoint import main
from harness.checkpoints import has_values, names, save, values_of

from mobius.checkpoint.folders import open_checkpoint

TRUST = "--trust-dcp-metadata"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_optimizer", [True, False])
@pytest.mark.parametrize("max_file_bytes", [1, 5_000_000_000])
def test_there_and_back_nothing_is_lost(
    dtype: torch.dtype, has_optimizer: bool, max_file_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = save(tmp_path, 8, number=3, dtype=dtype, has_optimizer=has_optimizer, max_file_bytes=max_file_bytes)
    second = tmp_path / "back" / "checkpoint-8"

    assert main(["to-dcp", str(first), str(tmp_path / "dcp")]) == 0
    assert main(["from-dcp", str(tmp_path / "dcp"), str(second), TRUST]) == 0

    assert "to the bit as it was" in capsys.readouterr().out
    reader = open_checkpoint(second)
    reader.verify_all()
    assert has_values(reader, seed=8)
    for name in ("config.json", "trainer_state.json"):
        assert (second / name).read_bytes() == (first / name).read_bytes()
    before, after = open_checkpoint(first).manifest, reader.manifest
    assert (after.training, after.data, after.save_number) == (before.training, before.data, before.save_number)
    assert names(second.parent) == ["checkpoint-8"]


def test_torch_reads_every_tensor_of_the_result(tmp_path: Path) -> None:
    assert main(["to-dcp", str(save(tmp_path, 8, number=1)), str(tmp_path / "dcp")]) == 0
    expected = values_of(8, torch.bfloat16)
    found = {name: torch.zeros_like(value) for name, value in expected.items()}

    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)

    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_torchs_pickle_is_loaded_on_request_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["to-dcp", str(save(tmp_path, 8, number=1)), str(tmp_path / "dcp")])
    monkeypatch.setattr("pickle.load", lambda *_: pytest.fail("a pickle was loaded"))

    assert main(["from-dcp", str(tmp_path / "dcp"), str(tmp_path / "back" / "checkpoint-8")]) == 2

    assert "is a pickle of torch's own" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_a_failure_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 8, number=1)
    assert main(["to-dcp", str(path), str(tmp_path / "dcp")]) == 0

    def failing(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.save", failing)
    assert main(["to-dcp", str(path), str(tmp_path / "other")]) == 1
    monkeypatch.setattr("mobius.checkpoint.tensor_files.save_file", failing)
    assert main(["from-dcp", str(tmp_path / "dcp"), str(tmp_path / "back" / "checkpoint-8"), TRUST]) == 1

    assert capsys.readouterr().err.count("No space left on device; ") == 2
    assert names(tmp_path) == ["back", "checkpoint-8", "dcp"]
    assert names(tmp_path / "back") == []
