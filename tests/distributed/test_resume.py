"""Runs of several ranks go on: on as many ranks to the bit, on fewer with the same numbers, and by themselves."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.forked import HANG_SECONDS
from harness.grids import named
from harness.launched import Launched
from harness.runs import (
    ROOT,
    assert_goes_on_exactly,
    environment,
    evaluations_of,
    make_checkpoint,
    make_dataset,
    run_main,
    steps_of,
    tensors_of,
)

OPTIONS = """--model_path model --dataset data.jsonl --num_chunks 2 --batch_size 4 --seq_length 32 --num_iterations 12
    --save_steps 4 --save_total_limit 0 --learning_rate 1e-3 --warmup_steps 1 --save_params none --val_size 4
    --eval_strategy steps --eval_steps 6"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and data, which all tests share."""
    folder = tmp_path_factory.mktemp("resume")
    make_checkpoint(folder / "model", num_layers=6)
    make_checkpoint(folder / "tied", num_layers=6, is_tied=True)
    make_dataset(folder / "data.jsonl", 60)
    return folder


def train(num_ranks: int, place: Path, options: str) -> str:
    finished = run_main(num_ranks, place, *options.split())
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


def resumed(num_ranks: int, place: Path, checkpoint: str, save_dir: str, more: str = "") -> Path:
    options = f"--resume_from_checkpoint {checkpoint} --save_dir {save_dir} --save_params none {more}"
    output = train(num_ranks, place, f"{options} --save_results {save_dir}.txt")
    assert "resumed from" in output
    return place / save_dir


VARIANTS = {
    "streamed, clipped": "--fp32 --num_stages 6",
    "bf16, tied, updates in the middle of backward": "--bf16 --max_grad_norm 0 --num_stages 6 --model_path tied",
    "resident": "--fp32 --no_offload --num_stages 2",
}


@pytest.mark.parametrize("options", named(VARIANTS, on_demand=["resident", "streamed, clipped"]))
def test_two_ranks_go_on_to_the_bit(place: Path, options: str) -> None:
    name = f"whole-{[*VARIANTS.values()].index(options)}"
    train(2, place, f"{OPTIONS} {options} --save_dir {name} --save_results {name}.txt")

    found = resumed(2, place, f"{name}/checkpoint-4", f"{name}-resumed")

    assert_goes_on_exactly(place / name, found, step=4)
    assert len(evaluations_of(found)) == 2


def test_three_ranks_become_two_and_then_one(place: Path) -> None:
    whole = f"{OPTIONS} --num_iterations 28 --fp32 --num_stages 6"
    train(3, place, f"{whole} --save_dir three --save_results three.txt")

    two = resumed(2, place, "three/checkpoint-4", "two", "--num_stages 4 --num_chunks 4 --resident_stages 1")
    one = resumed(1, place, "two/checkpoint-8", "one", "--num_stages 2 --resident_stages 0")

    expected = steps_of(place / "three")
    for folder, first in ((two, 4), (one, 8)):
        rows = steps_of(folder)[-(28 - first) :]
        assert len(rows) >= 20
        for row, other in zip(rows, expected[first:], strict=True):
            assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
            assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
            exact = ("step", "epoch", "num_tokens", "num_samples", "learning_rate")
            assert [row[key] for key in exact] == [other[key] for key in exact]
    assert (place / "one" / "checkpoint-28").is_dir()


def test_all_ranks_refuse_a_damaged_shard_of_one_of_them(place: Path) -> None:
    train(2, place, f"{OPTIONS} --fp32 --num_stages 2 --save_dir hurt --save_results hurt.txt")
    shard = sorted((place / "hurt" / "checkpoint-12").glob("optimizer*.safetensors"))[-1]
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)

    words = "--resume_from_checkpoint hurt/checkpoint-12 --save_dir unhurt --save_params none --save_results unhurt.txt"
    finished = run_main(2, place, *words.split())

    assert finished.returncode == 1
    assert f"{shard.name} is damaged: the checksum of" in finished.stdout
    newest = f"The newest good checkpoint there is {place / 'hurt' / 'checkpoint-8'}: --resume_from_checkpoint"
    assert newest in finished.stdout
    assert "Traceback" not in finished.stdout
    assert not (place / "unhurt").exists()


@pytest.fixture
def launched(place: Path) -> Iterator[Launched]:
    """A run under our launcher, which may start its ranks again once."""
    launcher = f"--nproc_per_node 2 --max_restarts 1 --master_port 0 {ROOT / 'main.py'} --device cpu".split()
    words = f"{OPTIONS} --fp32 --num_stages 4 --save_dir again --save_results again.txt --num_iterations 24"
    process = Launched([*launcher, *words.split()], place, environment(place / "cache"), forks_ranks=True)
    yield process
    process.kill()
    process.wait()


def test_a_launcher_that_starts_ranks_again_goes_on_from_the_newest_checkpoint(place: Path, launched: Launched) -> None:
    end = time.monotonic() + HANG_SECONDS
    while not (place / "again" / "checkpoint-4").exists():
        assert time.monotonic() < end
        assert launched.poll() is None, launched.output()
        time.sleep(0.01)
    children = Path(f"/proc/{launched.pid}/task/{launched.pid}/children").read_text().split()
    ranks = {Path(f"/proc/{child}/comm").read_text().strip(): int(child) for child in children}
    os.kill(ranks["rank 1"], signal.SIGKILL)

    assert launched.wait(HANG_SECONDS) == 0, launched.output()

    output = launched.output()
    assert "they start again (1 of 1 times)" in output
    assert "resumed from again/checkpoint-" in output
    assert [row["step"] for row in steps_of(place / "again")] == list(range(1, 25))
    assert json.loads((place / "again" / "trainer_state.json").read_text())["global_step"] == 24
    assert tensors_of(place / "again")
