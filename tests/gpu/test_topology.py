"""On real GPUs: the topology is read, and copies between GPUs are checked; two GPUs or more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness.runs import ROOT, environment, free_port, make_checkpoint, make_dataset

from mobius.hardware.topology import best_order, read_topology

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")]


def test_the_topology_of_this_machine_is_read() -> None:
    gpus = read_topology(NUM_GPUS)

    assert all(gpu.name for gpu in gpus)
    assert len({gpu.address for gpu in gpus}) == NUM_GPUS or None in {gpu.address for gpu in gpus}
    assert sorted(best_order(gpus, num_microbatches=NUM_GPUS)) == list(range(NUM_GPUS))


def test_reading_makes_no_context_on_any_gpu(tmp_path: Path) -> None:
    """A context takes some hundred MiB of each GPU; one per rank and GPU would be too many."""
    program = (
        "import sys, torch\n"
        "from mobius.hardware.topology import read_topology\n"
        "read_topology(torch.cuda.device_count())\n"
        "print(*[torch._C._cuda_hasPrimaryContext(i) for i in range(torch.cuda.device_count())])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=_environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )

    assert result.stdout.split() == ["False"] * NUM_GPUS


@pytest.mark.parametrize("spoiled", ["nothing", "last byte", "large messages"])
def test_copies_that_arrive_wrong_are_found_and_those_that_do_not_are_trusted(tmp_path: Path, spoiled: str) -> None:
    launcher = f"-m torch.distributed.run --nproc_per_node 2 --master_port {free_port()}".split()
    worker = str(ROOT / "tests/harness/peer_worker.py")

    result = subprocess.run(
        [sys.executable, *launcher, worker, spoiled],
        env=_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    if "cannot reach" in result.stdout:
        pytest.skip("these GPUs have no P2P: there is nothing to check")
    broken = "(0, 1) " if spoiled != "nothing" else ""
    assert sorted(result.stdout.splitlines()) == [f"rank {rank}: broken {broken}problem None" for rank in (0, 1)]


@pytest.mark.skipif(NUM_GPUS < 4, reason="needs four GPUs")
@pytest.mark.parametrize("mode", ["", "--no_cross_mapping"])
def test_four_gpus_train_in_the_order_that_was_chosen(tmp_path: Path, mode: str) -> None:
    make_checkpoint(tmp_path / "model", is_tied=False)
    make_dataset(tmp_path / "data.jsonl")
    launcher = f"-m torch.distributed.run --nproc_per_node 4 --master_port {free_port()}".split()
    options = """--model_path model --dataset data.jsonl --fp32 --device cuda --num_stages 4 --num_chunks 4
        --batch_size 4 --seq_length 16 --num_iterations 2 --save_dir out --save_params out.pt --save_results out.txt"""

    result = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "main.py"), *options.split(), *mode.split()],
        cwd=tmp_path,
        env=_environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )

    assert result.returncode == 0, result.stdout
    assert "arrive with wrong contents" not in result.stdout


def _environment(folder: Path) -> dict[str, str]:
    """With all GPUs that these tests see."""
    own = environment(folder / "cache")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return own if visible is None else {**own, "CUDA_VISIBLE_DEVICES": visible}
