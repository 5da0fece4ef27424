"""A resumed run is the one that was never interrupted: to the bit, to rounding with other microbatches."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from convert_checkpoint import main as convert
from harness.grids import named
from harness.runs import (
    assert_equal_tensors,
    assert_goes_on_exactly,
    evaluations_of,
    make_checkpoint,
    make_dataset,
    run_main,
    steps_of,
    tensors_of,
)
from harness.sessions import resume
from harness.small_run import EIGHT, Run

from mobius.config.cli import given_options, parse_args
from mobius.errors import ConfigError
from mobius.planner import solver
from mobius.process.ranks import Ranks
from mobius.training.run import run_training

IN_EPOCHS = """--model_path model --dataset data.jsonl --device cpu --dtype fp32 --num_stages 2 --num_chunks 2
    --batch_size 4 --seq_length 16 --num_train_epochs 3 --save_steps 4 --save_total_limit 0 --learning_rate 1e-3
    --save_params none --val_size 4 --eval_strategy epoch --save_dir out"""

VARIANTS = {
    "streamed, clipped": "",
    "streamed, updates in the middle of backward": "--max_grad_norm 0",
    "one slot": "--no_prefetch",
    "resident": "--no_offload",
    "one stage resident": "--resident_stages 1 --max_grad_norm 0",
    "bf16": "--dtype bf16",
    "bf16, resident, not clipped": "--dtype bf16 --no_offload --max_grad_norm 0",
    "bf16 states": "--dtype bf16 --optimizer_states bf16",
    "compact states": "--dtype bf16 --optimizer_states compact --resident_stages 1",
    "states on disks": "--dtype bf16 --offload_states_to disk,other/disk --resident_stages 1",
    "compact states on disks, not clipped": (
        "--dtype bf16 --offload_states_to disk --optimizer_states compact --max_grad_norm 0"
    ),
    "fp16, whose loss scale is found by steps that are not taken": "--dtype fp16",
    "packed rows of several samples": "--seq_length 64",
    "evaluated": "--val_size 4 --eval_strategy steps --eval_steps 2",
    "a dropped tail of the schedule": "--lr_scheduler_type cosine --warmup_steps 4",
    "a tied matrix": "--model_path tied --num_stages 4",
    "a schedule with numbers": "--lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs num_decay_steps=5",
}


SIX = ["--num_iterations", "6", "--save_steps", "3", *EIGHT[4:]]
"""Options of six steps with checkpoints 3 and 6."""
TRUST = "--trust-dcp-metadata"
ON_DEMAND = [
    "streamed, updates in the middle of backward",
    "one slot",
    "resident",
    "one stage resident",
    "bf16",
    "bf16 states",
    "compact states on disks, not clipped",
    "evaluated",
    "a tied matrix",
    "a schedule with numbers",
]


@pytest.mark.parametrize("options", named(VARIANTS, on_demand=ON_DEMAND))
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(run: Run, workplace: Path, options: str) -> None:
    make_checkpoint(workplace / "tied", is_tied=True)
    run(*SIX, *options.split())

    resume("out/checkpoint-3", "--save_dir", "resumed")

    assert_goes_on_exactly(Path("out"), Path("resumed"), step=3)
    assert len({row["loss"] for row in steps_of(Path("out"))}) > 4, "the loss moves"
    assert ("lm_head.weight" in tensors_of(Path("out"))) == ("tied" not in options)


def test_a_run_with_states_both_in_memory_and_on_disks_resumes_exactly(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        solver, "with_states_in_memory", lambda _, plan: replace(plan, states_in_memory=frozenset((0,)))
    )
    run(*SIX, *["--dtype", "bf16", "--offload_states_to", "disk", "--durable_steps", "off"])

    resume("out/checkpoint-3", "--save_dir", "resumed")

    assert_goes_on_exactly(Path("out"), Path("resumed"), step=3)
    assert [*Path("disk").iterdir()] == [], "unlinked, and made"


def test_epochs_are_resumed_in_their_middle(workplace: Path) -> None:
    words = IN_EPOCHS.split()
    run_training(parse_args(words, num_ranks=1), Ranks(0, 1, 0), given=given_options(words))
    rows = steps_of(Path("out"))
    assert rows[-1]["epoch"] == pytest.approx(3, abs=0.2)
    assert 0.1 < rows[3]["epoch"] % 1 < 0.9

    resume("out/checkpoint-4", "--save_dir", "resumed")

    assert_goes_on_exactly(Path("out"), Path("resumed"), step=4)


def test_a_run_resumes_in_its_own_folder_as_if_nothing_had_been(eight: None, workplace: Path) -> None:
    shutil.copytree("out", "killed")
    for path in [*Path("killed").glob("model*"), Path("killed/config.json")]:
        path.unlink()
    shutil.rmtree("killed/checkpoint-8")

    resume("true", "--save_dir", "killed")

    assert_goes_on_exactly(Path("out"), Path("killed"), step=4)
    assert len(steps_of(Path("killed"))) == 8
    state = json.loads(Path("killed/trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == list(range(1, 9))


def test_a_run_that_is_at_its_end_only_saves_the_model(eight: None, workplace: Path) -> None:
    resume("out/checkpoint-8", "--save_dir", "resumed")

    assert_equal_tensors(Path("out"), Path("resumed"))
    assert (workplace / "resumed" / "config.json").is_file()


def test_true_passes_over_a_torn_checkpoint(eight: None, workplace: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree("out", "whole")
    next(Path("out/checkpoint-8").glob("model*.safetensors")).unlink()
    for path in [*Path("out").glob("model*"), Path("out/config.json")]:
        path.unlink()
    caplog.set_level(logging.INFO, logger="mobius")

    resume("true", "--save_dir", "out")

    assert any("checkpoint-8 is skipped" in message for message in caplog.messages)
    assert_goes_on_exactly(Path("whole"), Path("out"), step=4)


OF_RANKS = """--model_path model --dataset data.jsonl --num_chunks 2 --batch_size 4 --seq_length 32 --num_iterations 6
    --save_steps 2 --save_total_limit 0 --learning_rate 1e-3 --warmup_steps 1 --save_params none --val_size 4
    --eval_strategy steps --eval_steps 3"""


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


def resumed_by(num_ranks: int, place: Path, checkpoint: str, save_dir: str, more: str = "") -> Path:
    options = f"--resume_from_checkpoint {checkpoint} --save_dir {save_dir} --save_params none {more}"
    output = train(num_ranks, place, f"{options} --save_results {save_dir}.txt")
    assert "resumed from" in output
    return place / save_dir


OF_TWO_RANKS = {
    "streamed, clipped": "--fp32 --num_stages 6",
    "bf16, tied, updates in the middle of backward": "--bf16 --max_grad_norm 0 --num_stages 6 --model_path tied",
    "resident": "--fp32 --no_offload --num_stages 2",
}


@pytest.mark.parametrize("options", named(OF_TWO_RANKS, on_demand=["resident", "streamed, clipped"]))
def test_two_ranks_resume_to_the_bit(place: Path, options: str) -> None:
    name = f"whole-{[*OF_TWO_RANKS.values()].index(options)}"
    train(2, place, f"{OF_RANKS} {options} --save_dir {name} --save_results {name}.txt")

    found = resumed_by(2, place, f"{name}/checkpoint-2", f"{name}-resumed")

    assert_goes_on_exactly(place / name, found, step=2)
    assert len(evaluations_of(found)) == 2


@pytest.mark.usefixtures("two_threads")
def test_other_ranks_and_stages_resume_to_the_bit(place: Path) -> None:
    train(3, place, f"{OF_RANKS} --bf16 --max_grad_norm 0.5 --num_stages 6 --save_dir most --save_results most.txt")

    two = resumed_by(2, place, "most/checkpoint-2", "fewer", "--num_stages 4 --resident_stages 1")
    one = resumed_by(1, place, "fewer/checkpoint-4", "fewest", "--num_stages 1")

    assert_goes_on_exactly(place / "most", two, step=2)
    assert_goes_on_exactly(place / "most", one, step=4)
    assert all(row["grad_norm"] > 0.5 for row in steps_of(place / "most"))


@pytest.mark.extended  # to the bit, but for the chunks, this is the test before
def test_three_ranks_become_two_and_then_one(place: Path) -> None:
    whole = f"{OF_RANKS} --num_iterations 16 --fp32 --num_stages 6"
    train(3, place, f"{whole} --save_dir three --save_results three.txt")

    two = resumed_by(2, place, "three/checkpoint-4", "two", "--num_stages 4 --num_chunks 4 --resident_stages 1")
    one = resumed_by(1, place, "two/checkpoint-8", "one", "--num_stages 2 --resident_stages 0")

    expected = steps_of(place / "three")
    for folder, first in ((two, 4), (one, 8)):
        rows = steps_of(folder)[-(16 - first) :]
        assert len(rows) >= 8
        for row, other in zip(rows, expected[first:], strict=True):
            assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
            assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
            exact = ("step", "epoch", "num_tokens", "num_samples", "learning_rate")
            assert [row[key] for key in exact] == [other[key] for key in exact]
    assert (place / "one" / "checkpoint-16").is_dir()


def test_all_ranks_refuse_a_damaged_shard_of_one_of_them(place: Path) -> None:
    train(2, place, f"{OF_RANKS} --fp32 --num_stages 2 --save_dir hurt --save_results hurt.txt")
    shard = sorted((place / "hurt" / "checkpoint-6").glob("optimizer*.safetensors"))[-1]
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)

    words = "--resume_from_checkpoint hurt/checkpoint-6 --save_dir unhurt --save_params none --save_results unhurt.txt"
    finished = run_main(2, place, *words.split())

    assert finished.returncode == 1
    assert f"{shard.name} is damaged: the checksum of" in finished.stdout
    newest = f"The newest good checkpoint there is {place / 'hurt' / 'checkpoint-4'}: --resume_from_checkpoint"
    assert newest in finished.stdout
    assert "Traceback" not in finished.stdout
    assert not (place / "unhurt").exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fp32", "compact"),
        ("compact", "fp32"),
        pytest.param("bf16", "compact", marks=pytest.mark.extended),
    ],
)
def test_a_run_resumes_with_its_states_in_another_format(
    run: Run, workplace: Path, caplog: pytest.LogCaptureFixture, before: str, after: str
) -> None:
    run(*SIX, "--dtype", "bf16", "--optimizer_states", before)
    caplog.set_level(logging.INFO, logger="mobius")

    with pytest.raises(ConfigError, match="optimizer_states"):
        resume("out/checkpoint-3", "--save_dir", "refused", "--optimizer_states", after)
    changes = ("--optimizer_states", after, "--learning_rate", "1e-7")
    resume("out/checkpoint-3", "--save_dir", "resumed", *changes, "--resume_changes", "optimizer_states,learning_rate")

    assert (
        f"optimizer states are converted and rounded once: saved as {before}, used as {after} (--optimizer_states)"
        in caplog.messages
    )
    assert any("last bit of a 24-bit master" in message for message in caplog.messages) == (after == "compact")
    losses = [[row["loss"] for row in steps_of(Path(folder))[-3:]] for folder in ("out", "resumed")]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert losses[1] != losses[0]
    saved = tensors_of(Path("resumed/checkpoint-6"))
    assert any(name.endswith("exp_avg.codes") for name in saved) == (after == "compact")
    for words in (["to-dcp", "resumed/checkpoint-6", "dcp"], ["from-dcp", "dcp", "back/checkpoint-6", TRUST]):
        assert convert(words) == 0
    assert_equal_tensors(Path("resumed/checkpoint-6"), Path("back/checkpoint-6"))
