"""Over NCCL or mailboxes between two GPUs: whole runs end with the parameters that a single process has.

With `-m gpu` on a CPU, the same there over gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from harness.runs import make_checkpoint, make_dataset, run_main

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(HAS_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


Parameters = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def single_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Parameters]:
    """What one GPU ends with, with and without tied matrices; each trained once."""
    return cache(
        lambda is_tied: _train(
            tmp_path_factory.mktemp("single"), 1, "--use_offload --resident_stages 0", is_tied=is_tied
        )
    )


@pytest.mark.parametrize(
    ("mode", "is_tied"),
    [
        ("--use_offload --resident_stages 0", False),
        ("--resident_stages 1", True),
        ("--no_offload", True),
        ("--use_offload --resident_stages 0 --no_copy_messages", True),
        ("--no_offload --no_copy_messages", False),
        ("--spread_head", True),
        ("--spread_head --no_offload --no_copy_messages", False),
    ],
)
def test_two_gpus_train_like_one(
    tmp_path: Path, single_runs: Callable[[bool], Parameters], mode: str, is_tied: bool
) -> None:
    single, double = single_runs(is_tied), _train(tmp_path, 2, mode, is_tied=is_tied)
    assert single.keys() == double.keys()
    for name, expected in single.items():
        # lr 1e-3 over 6 steps moves a parameter by 6e-3 at most; rounding may cost a hundredth of that.
        assert (double[name] - expected).abs().max() < 6e-5, name


def _train(folder: Path, num_ranks: int, mode: str, *, is_tied: bool) -> Parameters:
    make_checkpoint(folder / "model", is_tied=is_tied)
    make_dataset(folder / "data.jsonl")
    options = f"""--model_path model --dataset data.jsonl --fp32 --device {"cuda" if HAS_GPU else "cpu"} --num_stages 4
        --num_chunks 2 --batch_size 4 --seq_length 16 --packing off --num_iterations 6 --learning_rate 1e-3
        --verbose --save_dir out-{num_ranks} --save_params {num_ranks}.pt --save_results {num_ranks}.txt"""
    result = run_main(num_ranks, folder, *options.split(), *mode.split())
    assert result.returncode == 0, result.stdout
    wants_copies = HAS_GPU and num_ranks > 1 and "--no_copy_messages" not in mode
    assert ("messages travel by copy engines" in result.stdout) == wants_copies, result.stdout
    return dict(torch.load(folder / f"{num_ranks}.pt", weights_only=True))
