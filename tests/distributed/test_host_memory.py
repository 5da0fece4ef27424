"""Host memory of a run on CPUs is what its plan says: what a GPU would hold is in the host's memory, too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from harness.runs import make_dataset, torchrun_main

from mobius.planner.forecast import forecast
from mobius.units import GIB

TOKENIZER = Path(__file__).parents[2] / "assets" / "tiny-llama"
SHAPE = {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
"""With tiny-llama's other fields 40 million parameters, which take more than the processes themselves."""


def make_folder(folder: Path) -> Path:
    """Return a model folder without weights, which a run draws."""
    shutil.copytree(TOKENIZER, folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | SHAPE | {"head_dim": 64}))
    return folder


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, "--num_stages 2 --num_chunks 2 --batch_size 2 --seq_length 256"),
        pytest.param(1, "--num_stages 2 --num_chunks 1 --batch_size 2 --seq_length 1024", marks=pytest.mark.extended),
    ],
)
def test_a_plan_tells_what_a_run_on_cpus_takes(tmp_path: Path, num_ranks: int, options: str) -> None:
    """A quarter more at most: malloc and libraries differ."""
    words = ["--model_path", str(make_folder(tmp_path / "model")), "--dtype", "fp32", "--device", "cpu"]
    words += options.split()
    planned = forecast([*words, "--num_ranks", str(num_ranks)]).found
    assert planned is not None
    data = str(make_dataset(tmp_path / "data.jsonl"))
    run = torchrun_main(num_ranks, tmp_path, *words, "--dataset", data, "--num_iterations", "2", "--save_dir", "out")
    assert run.returncode == 0, run.stdout
    steps = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    measured = steps[-1]["peak_host_memory_gib"]
    assert measured < planned.host_estimate.total / GIB < 1.25 * measured
