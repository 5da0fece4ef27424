"""benchmarks/benchmark.py: what it plans to run, its arithmetic, and a whole run of the smallest model on the CPU."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmark
import compare_rows
import pytest
from launch import run_ranks
from make_model import num_active, num_parameters, write_config
from rows import (
    Row,
    Workload,
    model_flops_utilization,
    peer_measurement,
    record,
)

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
GIB = 2**30
WORKLOAD = Workload(num_parameters=10**9, tokens=1000, num_gpus=2, gpu_name="NVIDIA H200", warmup=2)
PEER_OUTPUT = {
    "step_seconds": [9.0, 8.0, 0.5, 0.4, 2.0],
    "peak_allocated": 3 * GIB,
    "peak_reserved": 4 * GIB,
    "peak_host": 5 * GIB,
    "load_seconds": 7.0,
    "loss": 10.5,
}


def test_a_median_leaves_the_warm_up_out() -> None:
    measured = peer_measurement(PEER_OUTPUT, WORKLOAD, machine_bytes=6 * GIB)

    assert measured.step_seconds == 0.5
    assert measured.tokens_per_second == 2000
    assert (measured.allocated_gib, measured.reserved_gib, measured.host_gib, measured.machine_gib) == (3, 4, 5, 6)
    assert measured.all_step_seconds == PEER_OUTPUT["step_seconds"]


def test_mfu_is_six_operations_per_parameter_and_token_of_the_datasheets_rate() -> None:
    # 6 x 1e9 operations per token at this rate are what one of the two GPUs can do.
    assert model_flops_utilization(989e12 / 6e9, WORKLOAD) == pytest.approx(0.5)
    unknown = Workload(num_parameters=1, tokens=1, num_gpus=1, gpu_name="Quadro P600", warmup=0)
    assert model_flops_utilization(1.0, unknown) is None


@pytest.mark.parametrize(
    ("size", "num_layers"), [("tiny", None), ("tiny", 2), ("qwen3-30b-a3b", 2), ("mixtral-8x7b", 2)]
)
def test_a_model_has_the_parameters_that_it_is_said_to_have(tmp_path: Path, size: str, num_layers: int | None) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_config(tmp_path, size, num_layers)
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    assert num_parameters(size, num_layers) == sum(parameter.numel() for parameter in model.parameters())
    assert config.num_hidden_layers == (num_layers or 4)
    assert (config.dtype, config.tie_word_embeddings) == (torch.bfloat16, False)


def test_of_experts_those_of_a_token_are_active() -> None:
    # An expert is 3 x 2048 x 768 in 48 layers, or 3 x 4096 x 14336 in 32; the models' pages tell 3.3B and 12.9B.
    idle = 48 * (128 - 8) * 3 * 2048 * 768, 32 * (8 - 2) * 3 * 4096 * 14336
    for size, count, billions in zip(("qwen3-30b-a3b", "mixtral-8x7b"), idle, (3.35, 12.88), strict=True):
        assert num_parameters(size) - num_active(size) == count
        assert num_active(size) == pytest.approx(billions * 1e9, rel=0.002)
    assert num_active("7b") == num_parameters("7b")
    rate = model_flops_utilization(1000.0, WORKLOAD)
    assert rate is not None
    assert model_flops_utilization(1000.0, replace(WORKLOAD, num_active=10**8)) == pytest.approx(rate / 10)


def run_program(folder: Path, body: str, timeout_seconds: float = 60) -> Any:
    program = folder / "program.py"
    output = folder / "output.json"
    program.write_text(f"import json, os, pathlib, subprocess, sys, time\nrank = int(os.environ['RANK'])\n{body}\n")
    return run_ranks(
        [sys.executable, str(program), str(output)],
        num_ranks=2,
        environment={"GREETING": "hello"},
        output=output,
        timeout_seconds=timeout_seconds,
    )


def test_ranks_find_each_other_and_the_result_is_read(tmp_path: Path) -> None:
    body = (
        "import socket\n"
        "place = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "if rank == 0:\n"
        "    other = socket.create_server(place).accept()[0].recv(99).decode()\n"
        "    pathlib.Path(sys.argv[1]).write_text(json.dumps([other, os.environ['GREETING']]))\n"
        "while rank == 1:\n"
        "    try: socket.create_connection(place).sendall(b'rank 1'); break\n"
        "    except ConnectionRefusedError: time.sleep(0.01)"
    )
    result = run_program(tmp_path, body)

    assert (result.output, result.problem) == (["rank 1", "hello"], None), result.log_end


PARTS = [
    *("main", "stale", "clip", "fits", "nop2p", "ablation", "13b48", "depth", "depth_nop2p"),
    *("one_lora", "two_lora", "seventy_lora"),
]
EXPANDABLE = [("PYTORCH_ALLOC_CONF", "expandable_segments:True")]
WITHOUT_PEERS = ("ablation", "depth_nop2p", "seventy_lora")


@pytest.mark.parametrize("part", PARTS)
def test_every_part_of_the_gpu_benchmarks_is_a_command_that_benchmark_understands(part: str, tmp_path: Path) -> None:
    # In the place of Python a program that writes down its words.
    fake = tmp_path / "python"
    fake.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" >{tmp_path}/words\n')
    fake.chmod(0o755)
    environment = {"PYTHON": str(fake), "PATH": "/usr/bin:/bin", "HOST_GIB": "400"}
    subprocess.run(["bash", BENCHMARKS / "gpu.sh", part], env=environment, check=True, capture_output=True)
    script, *argv = (tmp_path / "words").read_text().splitlines()

    arguments = benchmark.parse(argv)
    assert script == "benchmarks/benchmark.py"
    assert arguments.size == {"13b48": "13b", "one_lora": "14b", "two_lora": "14b", "seventy_lora": "70b"}.get(
        part, "7b"
    )
    assert arguments.mobius_options.count("--host_memory_limit") == 1
    assert arguments.env == ([("NCCL_P2P_DISABLE", "1")] if part.endswith("nop2p") else EXPANDABLE[: "lora" in part])
    assert (len(arguments.peer) > 0) == (part not in WITHOUT_PEERS)


def test_rows_of_several_commands_are_one_table_beside_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = (
        "python benchmarks/benchmark.py 7b --layers 8 --max_grad_norm 0 --env NCCL_P2P_DISABLE=1 -- --num_chunks 4"
    )
    plan = {"step_seconds": 0.4, "gpu_gib": 3.0, "host_gib": 2.5}
    measured = replace(peer_measurement(PEER_OUTPUT, WORKLOAD, machine_bytes=0), plan=plan)
    row = Row(name="Mobius", options="--num_stages 8", measurement=measured, problem=None, run_seconds=9.0, ratio=1.0)
    rows = [row, replace(row, measurement=None, problem="failed")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record(each, {"command": command})) + "\n" for each in rows))
    monkeypatch.setattr(sys, "argv", ["compare_rows.py", str(path)])
    compare_rows.main()
    told = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert told[2] == [
        *("8 layers of 7b, 64 × 512, no clipping, NCCL_P2P_DISABLE=1", "Mobius --num_stages 8", "0.500", "0.400"),
        *("+25.0%", "2,000", "1.00", "4.0", "3.0", "5.0", "2.5", "7"),
    ]
    assert told[3][2] == "failed"


@pytest.mark.extended
@pytest.mark.usefixtures("forked_starts")
def test_the_smallest_model_is_measured_beside_a_peer_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    options = "tiny --layers 2 --ranks 2 --same_processes --batch_size 4 --seq_length 16 --steps 3"
    options += " --peer fsdp2-offload --peer roundpipe"
    mobius = "--device cpu --num_stages 2 --num_chunks 2 --compile off"
    more = ["--variant", "wrong=--no_such_option", "--output", str(rows)]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *options.split(), *more, "--", *mobius.split()])
    benchmark.main()

    printed = capsys.readouterr().out
    written = [json.loads(text) for text in rows.read_text().splitlines()]
    assert [(row["name"], row["problem"]) for row in written[:3]] == [
        ("Mobius", None),
        ("wrong", "failed"),
        ("fsdp2-offload", None),
    ], printed
    assert "unknown option `--no_such_option`" in printed
    first, peer = written[0], written[2]
    assert first["ratio"] == 1
    rates = [row["measurement"]["tokens_per_second"] for row in (first, peer)]
    assert peer["ratio"] == pytest.approx(rates[0] / rates[1])
    assert len(peer["measurement"]["all_step_seconds"]) == 3
    # A model of random weights guesses one of 32000 tokens: the loss is ln 32000 = 10.37.
    assert [row["measurement"]["loss"] for row in (first, peer)] == pytest.approx([10.37, 10.37], abs=0.2)


@pytest.mark.extended
@pytest.mark.usefixtures("forked_starts")
def test_packed_samples_and_replicas_are_measured_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, lengths = tmp_path / "rows.jsonl", tmp_path / "lengths.json"
    lengths.write_text(json.dumps([5, 9, 12, 3, 7] * 8))
    options = "tiny --layers 2 --ranks 2 --batch_size 4 --seq_length 16 --steps 3 --peer fsdp2"
    more = ["--variant", "replicas=--pipeline_ranks 1 --num_chunks 1", "--lengths", str(lengths), "--output", str(rows)]
    mobius = "--device cpu --num_stages 2 --num_chunks 2 --compile off"
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *options.split(), *more, "--", *mobius.split()])
    benchmark.main()

    written = [json.loads(text) for text in rows.read_text().splitlines()]
    assert [row["problem"] for row in written] == [None] * 3, capsys.readouterr().out
    for row in written:
        measured = row["measurement"]
        tokens = measured["tokens_per_second"] * measured["step_seconds"]
        assert 0.7 * 64 < tokens <= 64, "real ones, in rows that hold two samples or three"
        assert measured["loss"] == pytest.approx(10.37, abs=0.2)
    assert written[0]["measurement"]["loss"] == pytest.approx(written[1]["measurement"]["loss"], rel=1e-3)
