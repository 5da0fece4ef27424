"""The rank comes from torchrun's variables, and half of them are worse than none."""

import os

import pytest

from mobius.errors import ConfigError
from mobius.ranks import (
    Ranks,
    allows_peer_copies,
    forbid_peer_copies,
    omp_num_threads,
    prepare_environment,
    separate_device_queues,
    visible_devices,
)

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def set_environment(monkeypatch: pytest.MonkeyPatch, *values: str | None) -> None:
    for name, value in zip(NAMES, values, strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)


def test_without_torchrun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, None, None, None)
    assert Ranks.from_environment() == Ranks(rank=0, num_ranks=1, local_rank=0)
    assert Ranks.from_environment().is_first


def test_torchruns_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, "3", "4", "3")
    ranks = Ranks.from_environment()
    assert (ranks.rank, ranks.num_ranks, ranks.local_rank, ranks.is_first) == (3, 4, 3, False)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        (("0", None, None), "WORLD_SIZE, LOCAL_RANK"),
        ((None, "4", "1"), "not RANK"),
        (("one", "4", "1"), "whole numbers"),
        (("4", "4", "4"), "below WORLD_SIZE"),
        (("-1", "4", "-1"), "at least 0"),
        (("5", "8", "1"), "one node"),
    ],
)
def test_inconsistent_variables_are_told(
    monkeypatch: pytest.MonkeyPatch, values: tuple[str | None, ...], part: str
) -> None:
    set_environment(monkeypatch, *values)
    with pytest.raises(ConfigError, match=part):
        Ranks.from_environment()


def test_preparing_keeps_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"TRANSFORMERS_VERBOSITY": "info"})
    prepare_environment()
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "info"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


@pytest.mark.parametrize(("text", "expected"), [("8", 8), ("0", None), ("", None), ("many", None), (None, None)])
def test_the_thread_count_is_a_positive_number_or_absent(
    monkeypatch: pytest.MonkeyPatch, text: str | None, expected: int | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if text is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert omp_num_threads() == expected


def test_an_empty_device_list_is_not_an_absent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_devices() == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_devices() is None


@pytest.mark.parametrize(("text", "expected"), [(None, True), ("0", True), ("1", False)])
def test_gpus_reach_each_other_unless_the_user_forbids_it(
    monkeypatch: pytest.MonkeyPatch, text: str | None, expected: bool
) -> None:
    monkeypatch.setattr(os, "environ", {} if text is None else {"NCCL_P2P_DISABLE": text})
    assert allows_peer_copies() is expected


def test_peer_copies_that_are_forbidden_are_so_for_nccl_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"NCCL_P2P_DISABLE": "0"})
    assert allows_peer_copies()
    forbid_peer_copies()
    assert not allows_peer_copies()
    assert os.environ["NCCL_P2P_DISABLE"] == "1"


@pytest.mark.parametrize(("text", "expected"), [(None, "32"), ("8", "8")])
def test_streams_get_all_hardware_queues_unless_the_user_has_set_a_number(
    monkeypatch: pytest.MonkeyPatch, text: str | None, expected: str
) -> None:
    monkeypatch.setattr(os, "environ", {} if text is None else {"CUDA_DEVICE_MAX_CONNECTIONS": text})
    separate_device_queues()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == expected
