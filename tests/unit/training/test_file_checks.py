"""Folders that nodes do not share, and other files at the same path, are told apart before training needs them."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness.local_transport import together
from safetensors.torch import save_file

from mobius.checkpoint import resume
from mobius.checkpoint.resume import open_same_checkpoint
from mobius.config.cli import parse_args
from mobius.config.config import Config
from mobius.distributed.rendezvous import Rendezvous
from mobius.errors import CheckpointError, ConfigError
from mobius.process.ranks import Ranks
from mobius.training import file_checks
from mobius.training.file_checks import check_same_model, check_save_dir


def ranks(rank: int, num_nodes: int = 3) -> Ranks:
    return Ranks(rank, 3, 0, num_replicas=3, num_nodes=num_nodes)


def config(options: str = "") -> Config:
    return parse_args(f"--save_dir out --batch_size 12 {options}".split(), num_ranks=3, num_nodes=3)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_checks, "_SIGHT_SECONDS", 0.2)


def look(places: Callable[[int], Path], options: str = "", num_nodes: int = 3) -> list[object]:
    """What a look at the folder `places(rank)` comes to."""

    def work(rank: int, seat: Rendezvous) -> None:
        check_save_dir(config(options), ranks(rank, num_nodes), places(rank) / "out", seat)

    for rank in range(3):
        (places(rank) / "out").mkdir(exist_ok=True, parents=True)
    found: list[object] = list(together(work))
    assert not any(list((places(rank) / "out").iterdir()) for rank in range(3))
    return found


def test_a_folder_that_all_nodes_share_is_not_spoken_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mobius")
    best = "--load_best_model_at_end --eval_strategy steps --val_size 0.1"
    assert look(lambda rank: tmp_path, best) == [None] * 3
    assert look(lambda rank: tmp_path / str(rank), best, num_nodes=1) == [None] * 3
    assert not caplog.text


def test_a_folder_of_one_node_is_told_with_both_places_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mobius")
    assert look(lambda rank: tmp_path / str(min(rank, 1))) == [None] * 3
    (line,) = caplog.messages
    assert f"--save_dir out: {tmp_path}/0/out of rank 0 (" in line
    assert f") is not {tmp_path}/1/out of rank 1 (" in line
    assert "copy it to the same path on" in line


@pytest.mark.parametrize(
    ("options", "restarts", "reason"),
    [
        ("--load_best_model_at_end --eval_strategy steps --val_size 0.1", "0", "--load_best_model_at_end reads"),
        ("", "2", "--max_restarts resumes from"),
    ],
)
def test_a_folder_of_one_node_is_refused_by_all_where_others_will_read_it(
    tmp_path: Path, options: str, restarts: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    told = look(lambda rank: tmp_path / str(rank == 2), options)
    assert all(isinstance(error, CheckpointError) for error in told)
    assert len(set(map(str, told))) == 1
    assert f"{tmp_path}/True/out of rank 2 (" in str(told[0])
    assert reason in str(told[0])


def test_restarts_of_a_run_without_checkpoints_need_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert look(lambda rank: tmp_path / str(rank), "--save_strategy no") == [None] * 3


def make_model(folder: Path, value: float, **fields: object) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "model_type": "llama", **fields}))
    save_file({"weight": torch.full((64,), value)}, folder / "model.safetensors")


def test_another_model_at_the_same_path_is_told_on_all_nodes(tmp_path: Path) -> None:
    for name, value, fields in (("a", 1.0, {"_name_or_path": "a"}), ("b", 1.0, {}), ("c", 2.0, {"hidden_size": 9})):
        make_model(tmp_path / name, value, **fields)

    def meet(names: str) -> list[object]:
        return list(together(lambda rank, seat: check_same_model(tmp_path / names[rank], None, seat)))

    assert meet("aba") == [None] * 3  # copies of its own on each node
    told = meet("aac")
    assert all(isinstance(error, ConfigError) for error in told)
    assert "the model's weights differs: " in str(told[1])
    assert "the model's config.json differs: " in str(told[1])
    assert " on rank 2 (" in str(told[1])


def test_an_adapter_that_one_node_lacks_is_told(tmp_path: Path) -> None:
    make_model(tmp_path / "model", 1.0)
    (tmp_path / "adapter").mkdir()
    save_file({"weight": torch.ones(4)}, tmp_path / "adapter" / "adapter_model.safetensors")

    def work(rank: int, seat: Rendezvous) -> None:
        given = tmp_path / ("adapter" if rank != 1 else "nowhere")
        check_same_model(tmp_path / "model", str(given), seat)

    told = together(work)
    assert "the adapter's weights differs: " in str(told[0])
    assert "none on rank 1" in str(told[0])


def test_another_checkpoint_or_none_on_a_node_is_told_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.json").write_text(name)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")

    def opened(path: Path) -> str:  # a reader of whole checkpoints is tested elsewhere
        if not path.exists():
            raise CheckpointError(f"there is no {path}.")
        return path.name

    monkeypatch.setattr(resume, "open_checkpoint", opened)

    def meet(*names: str, num_nodes: int = 3) -> list[object]:
        def work(rank: int, seat: Rendezvous) -> object:
            return open_same_checkpoint(tmp_path / names[rank], ranks(rank, num_nodes), seat)

        return list(together(work))

    assert meet("a", "copy", "a") == ["a", "copy", "a"]
    other, absent = meet("a", "a", "b"), meet("a", "c", "a")
    for told in (other, absent):
        assert all(isinstance(error, CheckpointError) for error in told)
    assert "rank 2 (" in str(other[0])
    assert "rank 1 (" in str(absent[0])
    assert f"there is no {tmp_path}/c." in str(absent[0])
    alone = meet("a", "c", "a", num_nodes=1)
    assert [str(each) for each in alone] == ["a", f"there is no {tmp_path}/c.", "a"]
