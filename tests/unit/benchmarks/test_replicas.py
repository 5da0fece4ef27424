"""The benchmark of replicas trains a small model on a CPU, and tells host memory beside what it may be."""

from __future__ import annotations

import json
import sys

import pytest
import replica_link
import replicas
from launch import rank_variables
from replicas import CASES, TITLES, Case, Result
from rows import Workload, mobius_measurement

from mobius.distributed.shards import cut

WORDS = "tiny --ranks 2 --batch_size 8 --seq_length 32 --num_chunks 4"


def test_each_pipeline_has_its_part_of_the_microbatches() -> None:
    arguments = replicas.parse([*WORDS.split(), "--", "--num_stages", "2"])
    chosen = [" ".join(replicas.options_of(case, arguments)) for case in CASES[:3]]
    assert "--num_chunks 4" in chosen[0]
    assert "--pipeline_ranks 2" in chosen[0]
    assert all("--num_chunks 2" in words and "--pipeline_ranks 1" in words for words in chosen[1:])
    assert [words.endswith("--num_stages 2 --reduce_dtype bf16") for words in chosen] == [False, False, True]
    assert CASES[3].environment == {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}


def test_replicas_that_share_gpus_stand_beside_a_pipeline_as_long_as_one_of_them() -> None:
    alone, *shared = (CASES[0], CASES[3], CASES[4])
    for words, num_alone, places in ((WORDS, 2, "2"), (f"{WORDS} --share_gpus", 1, "1")):
        arguments = replicas.parse(words.split())
        assert replicas.num_ranks(alone.num_replicas, arguments) == num_alone
        assert f"--pipeline_ranks {places}" in " ".join(replicas.options_of(alone, arguments))
        assert [replicas.num_ranks(case.num_replicas, arguments) for case in shared] == [2, 2]


def test_ranks_of_a_node_are_numbered_there_and_nccl_takes_nodes_for_machines() -> None:
    each = [rank_variables(rank, 4, 2) for rank in range(4)]
    assert [(own["RANK"], own["LOCAL_RANK"], own["NCCL_HOSTID"]) for own in each] == [
        ("0", "0", "node-0"),
        ("1", "1", "node-0"),
        ("2", "0", "node-1"),
        ("3", "1", "node-1"),
    ]
    assert all((own["WORLD_SIZE"], own["LOCAL_WORLD_SIZE"]) == ("4", "2") for own in each)
    assert "NCCL_HOSTID" not in rank_variables(1, 2)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("tiny --ranks 3", "--ranks 3: must be a multiple of 2"),
        ("tiny --ranks 2 --share_gpus --case 1", "goes over links"),
        ("tiny --ranks 2 --num_chunks 3", "--num_chunks 3: must be a multiple of 2"),
        ("tiny --ranks 2 --steps 2", "--steps 2: must be more than the 2 steps"),
    ],
)
def test_a_mistake_is_told(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        replicas.parse(words.split())
    assert complaint in capsys.readouterr().err


def test_a_row_has_a_cell_for_each_title_and_the_memory_of_one_replica() -> None:
    step = {"step_seconds": 2.0, "wait_seconds": {"weights": 0.1, "optimizer": 0.2, "neighbours": 0.3}, "loss": 5.0}
    step |= {"peak_gpu_memory_gib": 9.0, "reserved_gpu_memory_gib": 9.5, "peak_host_memory_gib": 30.0}
    told = {"steps": [step] * 3, "load_seconds": 1.0, "plan": {"step_seconds": 1.9}}
    measured = mobius_measurement(told, Workload(10**9, 1000, 2, "", 1), 0)
    rates = {"sums in float32": 1.25, "weights": 2.5}
    row = replicas.cells(CASES[1], Result(measured, 14.0), rates, 2**30, 2)
    shown = dict(zip(TITLES, row, strict=True))
    assert (shown["s/step"], shown["predicted"], shown["tokens/s"], shown["neighb"]) == (
        "2.000",
        "1.900",
        "500",
        "0.300",
    )
    assert (shown["host"], shown["planned"]) == ("15.0", "14.0")
    assert shown["most"] == "10.5"  # (2 + 12 / 2) x 1 + 2.5 for one process
    assert (shown["sums GB/s"], shown["weights GB/s"]) == ("1.25", "2.50")
    assert replicas.most_gib(2**30, Case("one pipeline", num_replicas=1), 2) == 14 + 5
    assert len(replicas.cells(CASES[1], None, None, 2**30, 2)) == len(TITLES)


def test_bytes_that_travel_are_those_of_the_others() -> None:
    assert replica_link.sent(cut(0, 1200, 3), 4) == 3200


@pytest.mark.extended  # a benchmark
@pytest.mark.usefixtures("forked_starts")
def test_replicas_are_measured_on_the_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--steps 3 --elements 200000 --case 2 -- --device cpu --num_stages 2"
    monkeypatch.setattr(sys, "argv", ["replicas.py", *WORDS.split(), *options.split()])
    with pytest.raises(SystemExit) as ended:
        replicas.main()
    told = capsys.readouterr().out
    assert not ended.value.code, told
    link = json.loads(next(line for line in told.splitlines() if line.startswith("links")).removeprefix("links"))
    assert link.keys() == {"sums in float32", "sums in bfloat16", "weights"}
    assert all(rate > 0 for rate in link.values())
    row = [cell.strip() for cell in told.splitlines()[-1].strip("|").split("|")]
    shown = dict(zip(TITLES, row, strict=True))
    assert float(shown["s/step"]) > 0
    assert shown["sums GB/s"] == f"{link['sums in bfloat16']:.2f}"
    assert 10 < float(shown["loss"]) < 11  # log(32000) is 10.4
