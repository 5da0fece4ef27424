"""Adapters beside peft: benchmarks/lora.sh, the peers' loss and choice of a microbatch, and what is told of a plan."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import benchmark
import pytest
import torch
from harness.forked import HANG_SECONDS
from launch import run_ranks
from make_model import num_parameters, write_config
from predicted import beside, remarks
from rows import Row, Workload, mobius_measurement, peer_measurement
from transformers import AutoConfig, AutoModelForCausalLM

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
GIB = 2**30
WORKLOAD = Workload(num_parameters=10**9, tokens=1000, num_gpus=1, gpu_name="", warmup=0)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))


def a_row(name: str, measured: Any) -> Row:
    return Row(name=name, options="", measurement=measured, problem=None, run_seconds=1.0)


def test_qwen2_14b_has_the_parameters_that_it_is_said_to_have(tmp_path: Path) -> None:
    write_config(tmp_path, "14b", 2)
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    assert config.model_type == "qwen2"
    assert num_parameters("14b", 2) == sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters("14b") == pytest.approx(14.77e9, rel=1e-3)


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("chunk_tokens", [0, 5])
def test_the_loss_and_gradients_of_chunks_are_the_plain_models(tmp_path: Path, chunk_tokens: int) -> None:
    from lora import adapt, make_lora_parser, read_base_config

    write_config(tmp_path, "tiny", 2)
    words = [str(tmp_path), "--batch_size", "2", "--seq_length", "12", "--output", "x"]
    arguments = make_lora_parser("").parse_args([*words, "--loss_chunk_tokens", str(chunk_tokens)])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(read_base_config(arguments), dtype=torch.float32)
    tokens = torch.randint(0, 32000, (2, 12))
    adapted = adapt(model, arguments, has_fp32_adapters=True)
    trained = {name: value for name, value in adapted.named_parameters() if value.requires_grad}
    plain = adapted.model(input_ids=tokens, labels=tokens).loss
    expected = torch.autograd.grad(plain, list(trained.values()))

    loss = adapted(tokens)

    assert len(trained) == 2 * 7 * 2  # two matrices beside each of a layer's seven
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    for got, wanted in zip(torch.autograd.grad(loss, list(trained.values())), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.usefixtures("peers")
def test_a_microbatch_has_a_number_of_rows_that_divides_a_ranks() -> None:
    from microbatch_search import candidates_of

    def given(batch_size: int, *rows: int) -> argparse.Namespace:
        return argparse.Namespace(batch_size=batch_size, rows_per_microbatch=list(rows))

    assert candidates_of(given(16, 16, 3, 1, 8, 8), num_ranks=2) == [1, 8]
    for wrong in (given(16, 3, 5), given(15, 1)):
        with pytest.raises(SystemExit, match="none of them divides --batch_size"):
            candidates_of(wrong, num_ranks=2)


@pytest.mark.usefixtures("peers")
def test_the_memory_of_a_larger_microbatch_is_on_the_line_of_the_two_before() -> None:
    from microbatch_search import predicted_peak

    assert predicted_peak({0: 5.0}, 1) == 5
    assert predicted_peak({0: 1.0, 1: 5.0, 2: 6.0}, 4) == 8


class Memory:
    """A GPU of 100 bytes in the place of the search's meter: a microbatch takes 20 and as much for every row."""

    def __init__(self, bytes_per_row: int) -> None:
        self.held, self._bytes_per_row, self._peak, self.tried = 20.0, bytes_per_row, 0.0, list[int]()

    def reset(self) -> None:
        self._peak = 0.0

    def peak(self) -> float:
        return self._peak

    def share_of_limit(self, num_bytes: float) -> float:
        return num_bytes / 100

    def take(self, rows: int) -> None:
        self.tried.append(rows)
        self._peak = 20.0 + self._bytes_per_row * rows
        if self._peak > 100:
            raise torch.OutOfMemoryError


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize(
    ("bytes_per_row", "tried", "best"),
    [(1, [1, 2, 4, 8], 8), (9, [1, 2, 4, 8, 4], 8), (11, [1, 2, 4, 8], 4), (20, [1, 2, 4], 4), (40, [1, 2], 2)],
)
def test_the_fastest_microbatch_that_fits_is_trained_with(
    bytes_per_row: int, tried: list[int], best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import microbatch_search
    from microbatch_search import MicrobatchSearch
    from torch import distributed as dist

    memory = Memory(bytes_per_row)
    arguments = argparse.Namespace(
        batch_size=8, rows_per_microbatch=[1, 2, 4, 8], seq_length=2, steps=3, gpu_memory_limit=None
    )
    arguments.output = tmp_path / "output.json"

    def train_step(microbatches: Any) -> torch.Tensor:
        memory.take(len(microbatches[0]))
        return torch.zeros(())

    def clocked(step: Any, make: Any, number: int, _: object) -> dict[str, Any]:
        """The seconds of steps, of which a microbatch takes one whatever its rows."""
        seconds = []
        for _ in range(number):
            microbatches = make()
            step(microbatches)
            seconds.append(float(len(microbatches)))
        return {"step_seconds": seconds, "loss": 0.0}

    monkeypatch.setattr(microbatch_search, "time_steps", clocked)
    monkeypatch.setattr(microbatch_search, "end_at_sign", lambda sign: None)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        search = MicrobatchSearch(arguments, train_step, torch.device("cpu"), vocab_size=9)
        monkeypatch.setattr(search, "_meter", memory)
        try:
            search.run()
        except torch.OutOfMemoryError:
            assert (tmp_path / "output.ends").exists()  # the sign for all ranks to end with what there is
    finally:
        dist.destroy_process_group()
    told = json.loads(arguments.output.read_text())
    assert list(dict.fromkeys(memory.tried)) == list(dict.fromkeys(tried))
    assert (told["rows_per_microbatch"], len(told["step_seconds"])) == (best, 3)


@pytest.mark.extended
def test_two_ranks_of_fsdp2_train_adapters(tmp_path: Path) -> None:
    write_config(tmp_path / "model", "tiny", 1)
    output = tmp_path / "output.json"
    words = f"{tmp_path / 'model'} --output {output}"
    words += (
        " --batch_size 4 --seq_length 8 --steps 2 --max_grad_norm 1 --rows_per_microbatch 1 2 --loss_chunk_tokens 8"
    )
    result = run_ranks(
        [sys.executable, str(BENCHMARKS / "peers" / "lora_fsdp2.py"), *words.split()],
        num_ranks=2,
        environment={"OMP_NUM_THREADS": "1"},
        output=output,
        timeout_seconds=HANG_SECONDS,
    )

    assert result.problem is None, result.log_end
    assert set(result.output["trial_seconds_per_row"]) == {"1", "2"}
    assert result.output["loss"] == pytest.approx(10.37, abs=0.2)


def test_deepspeed_takes_the_settings() -> None:
    pytest.importorskip("deepspeed")
    sys.path.insert(0, str(BENCHMARKS / "peers"))
    from deepspeed.runtime.config import DeepSpeedConfig
    from lora_deepspeed import engine_settings

    settings = engine_settings(argparse.Namespace(max_grad_norm=1.0), 1)
    assert DeepSpeedConfig(settings).zero_config.offload_param.device == "cpu"


def test_predictions_stand_beside_measurements() -> None:
    step = {"step_seconds": 3.0, "wait_seconds": {}, "peak_gpu_memory_gib": 19.0, "reserved_gpu_memory_gib": 20.0}
    plan = {"num_stages": 2, "num_chunks": 4, "resident": [1], "gpu_gib": 20.0, "host_gib": 2.0, "step_seconds": 4.0}
    told = {"steps": [step | {"peak_host_memory_gib": 2.5, "loss": 1.0}], "load_seconds": 1.0, "plan": plan}
    peer = {"step_seconds": [1.0], "peak_allocated": 0, "peak_reserved": 0, "peak_host": GIB, "load_seconds": 1.0}
    peer |= {"loss": 1.0, "rows_per_microbatch": 2, "trial_seconds_per_row": {"1": 0.5, "2": 0.25}}
    rows = [
        a_row("Mobius", mobius_measurement(told, WORKLOAD, 0)),
        a_row("peer", peer_measurement(peer, WORKLOAD, 0)),
        Row(name="other", options="", measurement=None, problem="failed", run_seconds=1.0),
    ]

    assert remarks(rows, 10**9) == [
        "Mobius: 2 stages, 4 microbatches, resident stages [1]",
        "Mobius: predicted GPU GiB 20.00, measured 19.00 (-5.0%); host GiB 2.00, measured 2.50 (+25.0%); "
        "s/step 4.00, measured 3.00 (-25.0%); host 2.68 bytes per parameter",
        "peer: 2 rows per microbatch; tried, s per row: 1: 0.500, 2: 0.250",
    ]
    assert beside("s/step", None, 3.0) == "s/step -, measured 3.00"


def test_a_run_without_time_left_is_told(tmp_path: Path) -> None:
    arguments = benchmark.parse(["tiny", "--no_mobius", "--peer", "lora-fsdp2", "--ranks", "1"])
    (run,) = benchmark.plan_runs(arguments, model=tmp_path, output=tmp_path / "out", num_cores=1)

    row = benchmark.measure(run, WORKLOAD, arguments, tmp_path / "out", ends=0.0)

    assert (row.problem, row.measurement) == ("no time left", None)


@pytest.mark.parametrize(
    ("part", "size", "ranks", "num_peers"),
    [("one", "14b", 1, 2), ("chunked", "14b", 1, 2), ("two", "14b", 2, 3), ("seventy", "70b", 2, 0)],
)
def test_every_part_is_a_command_that_benchmark_understands(
    part: str, size: str, ranks: int, num_peers: int, tmp_path: Path
) -> None:
    fake = tmp_path / "python"
    fake.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" >{tmp_path}/words\n')
    fake.chmod(0o755)
    environment = {"PYTHON": str(fake), "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", BENCHMARKS / "lora.sh", part], env=environment, check=True, capture_output=True)
    script, *argv = (tmp_path / "words").read_text().splitlines()

    arguments = benchmark.parse(argv)
    assert script == "benchmarks/benchmark.py"
    assert (arguments.size, arguments.ranks, len(arguments.peer)) == (size, ranks, num_peers)
    assert (arguments.gpu_memory_limit, arguments.batch_size, arguments.seq_length) == (24, 16, 2048)
    assert arguments.mobius_options[:3] == ["--use_lora", "--lora_rank", "8"]


def test_a_part_that_is_not_there_is_told() -> None:
    finished = subprocess.run(["bash", BENCHMARKS / "lora.sh", "three"], capture_output=True, text=True, check=False)

    assert finished.returncode == 2
    assert "no part three; there are: one chunked two seventy" in finished.stderr
