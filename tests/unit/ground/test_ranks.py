"""The rank comes from torchrun's variables, and half of them are worse than none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mobius.errors import ConfigError
from mobius.process.ranks import (
    Ranks,
    allows_peer_copies,
    command_variable,
    command_words,
    forbid_peer_copies,
    launch_id,
    mark_launcher_as_patient,
    prepare_environment,
    seconds_since_launch,
    seconds_until_killed,
    set_cuda_max_connections,
)

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def set_environment(monkeypatch: pytest.MonkeyPatch, *values: str | None) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
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
        (("5", "8", "1"), "equally many"),
    ],
)
def test_inconsistent_variables_are_told(
    monkeypatch: pytest.MonkeyPatch, values: tuple[str | None, ...], part: str
) -> None:
    set_environment(monkeypatch, *values)
    with pytest.raises(ConfigError, match=part):
        Ranks.from_environment()


def test_places_of_two_nodes_and_of_pipelines_within_them(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, "6", "8", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    ranks = Ranks.from_environment()
    assert (ranks.num_nodes, ranks.node, ranks.num_replicas, ranks.replica, ranks.pipeline_rank) == (2, 1, 2, 1, 2)
    halves = ranks.split_into_pipelines(2)
    assert (halves.num_replicas, halves.replica, halves.pipeline_rank, halves.num_pipeline_ranks, halves.num_local) == (
        4,
        3,
        0,
        2,
        4,
    )
    assert halves.split_into_pipelines(None) == ranks
    with pytest.raises(ConfigError, match=r"`--pipeline_ranks` 3: .*divisor of 4"):
        ranks.split_into_pipelines(3)
    with pytest.raises(ConfigError, match=r"`--pipeline_ranks` 8: .*a pipeline cannot span nodes"):
        ranks.split_into_pipelines(8)


@pytest.mark.parametrize(("rank", "local_rank", "num_local"), [("3", "3", "5"), ("5", "0", "4"), ("1", "1", "0")])
def test_nodes_that_start_unequally_many_processes_are_refused(
    monkeypatch: pytest.MonkeyPatch, rank: str, local_rank: str, num_local: str
) -> None:
    set_environment(monkeypatch, rank, "8", local_rank)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_local)
    with pytest.raises(ConfigError, match="same --nproc_per_node"):
        Ranks.from_environment()


def test_preparing_keeps_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"TRANSFORMERS_VERBOSITY": "info"})
    prepare_environment()
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "info"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


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
    set_cuda_max_connections()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == expected


def test_a_launch_is_told_from_others_and_has_a_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    assert (launch_id(), seconds_since_launch()) == (None, 0)
    monkeypatch.setattr(os, "environ", {"TORCHELASTIC_RUN_ID": "none"})
    own, since = launch_id(), seconds_since_launch()
    assert own is not None
    assert own == launch_id()
    begun = subprocess.check_output(["ps", "-o", "etimes=", "-p", str(os.getppid())], text=True)
    assert since == pytest.approx(int(begun), abs=3)
    monkeypatch.setattr(os, "getppid", os.getpid)
    assert launch_id() != own


def test_nobody_kills_a_process_without_torchrun_or_under_our_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    assert seconds_until_killed() is None
    monkeypatch.setattr(os, "environ", {"TORCHELASTIC_RUN_ID": "none"})
    assert seconds_until_killed() == 30
    mark_launcher_as_patient()
    assert seconds_until_killed() is None


@pytest.mark.parametrize(
    ("release", "words", "variable", "expected"),
    [
        ("2.13.0+cpu", ["torchrun", "--shutdown-timeout", "90", "main.py"], "7", 90),
        ("2.13.0", ["torchrun", "--shutdown_timeout=45", "main.py"], None, 45),
        ("2.13.1", ["torchrun", "main.py"], "7", 7),
        ("2.13.1", ["torchrun", "main.py"], None, 30),
        ("2.11.0", ["torchrun", "main.py"], "7", 30),
    ],
)
def test_torchrun_kills_when_it_was_told_to(
    monkeypatch: pytest.MonkeyPatch, release: str, words: list[str], variable: str | None, expected: float
) -> None:
    monkeypatch.setattr("mobius.process.ranks._command_of", lambda _: words)
    monkeypatch.setattr("mobius.process.ranks.metadata.version", lambda _: release)
    told = {} if variable is None else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": variable}
    monkeypatch.setattr(os, "environ", {"TORCHELASTIC_RUN_ID": "none", **told})
    assert seconds_until_killed() == expected


FAMILY = """
import os, subprocess, sys, time
from mobius.process.ranks import has_lost_rank
if len(sys.argv) > 1:
    print("alive", flush=True)
    sys.stdin.read() if os.environ["RANK"] == "1" else (sys.stdin.readline(), print(has_lost_rank(), flush=True))
else:
    def start(rank):
        return subprocess.Popen([sys.executable, "family.py", "x"], env={{**os.environ, "RANK": str(rank)}},
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    other_program = subprocess.Popen(["sleep", "1000"])
    first, second = start(0), start(1)
    first.stdout.readline(), second.stdout.readline()
    if {dies}:
        second.kill()
        while open(f"/proc/{{second.pid}}/stat").read().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
    print(first.communicate("\\n")[0].strip())
    second.kill()
    other_program.kill()
"""


@pytest.mark.parametrize("dies", [True, False])
def test_a_rank_that_is_gone_is_missed_by_the_others(tmp_path: Path, dies: bool) -> None:
    """Also before its parent has noticed."""
    (tmp_path / "family.py").write_text(FAMILY.format(dies=dies))
    root = str(Path(__file__).resolve().parents[3])
    told = {"PYTHONPATH": root, "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}
    result = subprocess.run(
        [sys.executable, "family.py"],
        cwd=tmp_path,
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout == f"{dies}\n", result.stderr


def test_a_run_knows_the_command_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, told = command_variable(["bash", "train.sh", "my run.yaml"]).partition("=")
    monkeypatch.setattr(os, "environ", {name: told})
    assert command_words() == ["bash", "train.sh", "my run.yaml"]
    monkeypatch.setattr(os, "environ", {})
    assert command_words() == sys.orig_argv
    parent = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1]
    monkeypatch.setattr(os, "environ", {"TORCHELASTIC_RUN_ID": "none"})
    assert command_words() == parent


@pytest.mark.parametrize(
    ("words", "restarts", "is_refused"),
    [
        ("--rdzv_backend c10d", "1", True),
        ("--rdzv-backend=etcd-v2", "3", True),
        ("--rdzv_backend c10d", "0", False),
        ("--rdzv_backend=static", "1", False),
        ("--nnodes 2", "1", False),
    ],
)
def test_restarts_that_nodes_count_apart_are_refused(
    monkeypatch: pytest.MonkeyPatch, words: str, restarts: str, is_refused: bool
) -> None:
    set_environment(monkeypatch, "1", "2", "0")
    for name, value in (("LOCAL_WORLD_SIZE", "1"), ("RUN_ID", "x"), ("MAX_RESTARTS", restarts)):
        monkeypatch.setenv(name if name.startswith("LOCAL") else f"TORCHELASTIC_{name}", value)
    monkeypatch.delenv("PET_RDZV_BACKEND", raising=False)
    monkeypatch.setattr("mobius.process.ranks._command_of", lambda _: ["torchrun", *words.split(), "main.py"])
    if is_refused:
        with pytest.raises(ConfigError, match=r"--rdzv_backend (c10d|etcd-v2) with --max_restarts [13]: .* or use --m"):
            Ranks.from_environment()
    else:
        assert Ranks.from_environment().num_nodes == 2
