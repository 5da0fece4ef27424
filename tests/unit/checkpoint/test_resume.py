"""What a resumed run refuses, reports and takes from its checkpoint; tests/pipeline/test_resume.py has its bits."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.fuzzed_inputs import with_sums
from harness.runs import steps_of
from harness.sessions import resume
from harness.small_run import EIGHT, SMALL, Run

from mobius.checkpoint.resume import find_resume
from mobius.config.cli import given_options, parse_args
from mobius.distributed.transport import Transport
from mobius.engine.optimizer_stepper import OptimizerStepper
from mobius.engine.step_sums import StepSums
from mobius.errors import CheckpointError, ConfigError, NonFiniteLossError
from mobius.planner.measured_plan import Measurements
from mobius.planner.plan_file import VERSION
from mobius.planner.run_setup import RunSetup
from mobius.ranks import Ranks
from mobius.training.run import run_training

FREQUENT = ["--save_steps", "1", "--save_total_limit", "1"]


def test_a_byte_of_another_encoding_in_a_checkpoint_is_told_by_its_file(eight: None, workplace: Path) -> None:
    path = Path("out/checkpoint-4/trainer_state.json")
    path.write_bytes(path.read_bytes().replace(b"loss", b"l\xffss", 1))

    with pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        resume("out/checkpoint-4", "--save_dir", "resumed")


def test_what_would_train_something_else_is_refused_with_both_values(run: Run, workplace: Path) -> None:
    run(*EIGHT, "--num_iterations", "4")

    changes = "--learning_rate 1 --batch_size 8 --seq_length 32 --dataset other.jsonl"
    with pytest.raises(ConfigError) as raised:
        resume("out/checkpoint-4", "--save_dir", "resumed", *changes.split())

    for told in (
        *("`--learning_rate` is 1.0, checkpoint-4 has 0.001", "`--batch_size` is 8, checkpoint-4 has 4"),
        *("`--seq_length` is 32, checkpoint-4 has 16", "`--dataset` is other.jsonl, checkpoint-4 has data.jsonl"),
        "--resume_changes batch_size,dataset,learning_rate,seq_length",
    ):
        assert told in str(raised.value)
    assert not (workplace / "resumed").exists()


def test_a_change_that_is_allowed_by_name_is_taken(eight: None, workplace: Path) -> None:
    words = "--save_dir resumed --learning_rate 2e-3 --num_iterations 6 --resume_changes learning_rate,num_iterations"
    resume("out/checkpoint-4", *words.split())

    rows = steps_of(Path("resumed"))
    assert [row["step"] for row in rows] == [5, 6]
    assert rows[0]["loss"] == steps_of(Path("out"))[4]["loss"], "the weights are the checkpoint's"
    assert rows[0]["learning_rate"] != steps_of(Path("out"))[4]["learning_rate"]


def test_another_format_of_the_weights_is_refused_though_it_is_allowed_by_name(eight: None, workplace: Path) -> None:
    with pytest.raises(ConfigError, match=r"`--dtype` is bf16, checkpoint-4 has fp32.*--model_path out/checkpoint-4"):
        resume("out/checkpoint-4", *["--save_dir", "resumed", "--dtype", "bf16", "--resume_changes", "dtype"])


def test_a_checkpoint_whose_plan_has_the_version_before_is_planned_anew_with_a_line(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as older:
        older.setattr("mobius.planner.plan_file.VERSION", VERSION - 1)
        run(*EIGHT)
    with caplog.at_level(logging.INFO):
        resume("out/checkpoint-4", "--save_dir", "resumed")
    (told,) = (text for text in caplog.messages if "plan is not taken" in text)
    assert f"has version {VERSION - 1}, this program reads version {VERSION}" in told
    assert [row["loss"] for row in steps_of(Path("resumed"))] == [row["loss"] for row in steps_of(Path("out"))][4:]


@pytest.mark.parametrize(("begun", "resumed"), [(False, True), (True, False)])
def test_a_resumed_run_keeps_its_own_values_whichever_defaults_its_start_has(
    begun: bool, resumed: bool, workplace: Path
) -> None:
    options = SMALL.replace("--num_chunks 2", "--save_steps 1")
    run_training(own := parse_args(options.split(), is_command=begun), Ranks(0, 1, 0), given=())
    assert Path("finetune_params.pt").exists() == Path("test_result.txt").exists() == (not begun)
    assert Path("out/test_result.txt").exists() == begun
    words = ["--resume_from_checkpoint", "out/checkpoint-2"]
    found = find_resume(parse_args(words, is_command=resumed), Ranks(0, 1, 0), given=given_options(words))
    assert found is not None
    pipeline, output = found.config.pipeline, found.config.output
    assert (pipeline.num_stages, pipeline.num_chunks) == (own.pipeline.num_stages, own.pipeline.num_chunks)
    assert (output.params_file, output.results_file) == (own.output.params_file, own.output.results_file)


def test_a_restart_goes_on_from_what_its_own_launch_has_saved(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it goes on as the first start did, whatever an earlier run has left in the folder."""

    def found(text: str, launch: str) -> tuple[str, str] | None:
        monkeypatch.setattr("mobius.checkpoint.resume.launch_id", lambda: launch)
        words = text.split()
        resume = find_resume(parse_args(words, num_ranks=1), Ranks(0, 1, 0), given=given_options(words))
        return None if resume is None else (str(resume.reader.path), resume.config.output.save_dir)

    monkeypatch.setattr("mobius.training.loop.launch_id", lambda: "the first")
    run(*EIGHT)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    named, anew = "--resume_from_checkpoint out/checkpoint-4", " ".join([*SMALL.split(), "--overwrite_output_dir"])
    assert found(named, "another") == ("out/checkpoint-4", "out")
    assert found(anew, "another") is None
    assert found("--resume_from_checkpoint True --save_dir out", "another") == ("out/checkpoint-8", "out")
    assert found(named, "the first") == ("out/checkpoint-8", "out")
    assert found("--save_dir out", "the first") == ("out/checkpoint-8", "out")


def test_a_run_does_not_become_shorter_than_what_is_done(eight: None, workplace: Path) -> None:
    fewer = "--num_iterations 6 --resume_changes num_iterations"
    with pytest.raises(ConfigError, match=r"^`--num_iterations` 6: checkpoint-8 has done 8 steps; give at least"):
        resume("out/checkpoint-8", "--save_dir", "resumed", *fewer.split())

    assert not (workplace / "resumed").exists()


def test_the_command_to_go_on_names_a_folder_that_only_the_checkpoint_told(
    run: Run, workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(*EIGHT, "--num_iterations", "4", "--save_dir", "here")
    caplog.set_level(logging.INFO, logger="mobius")

    more = "--num_iterations 8 --resume_changes num_iterations --max_run_time 0.00001"
    resume("here/checkpoint-4", *more.split())

    assert caplog.messages[-1].endswith(" --save_dir here --resume_from_checkpoint true")


def test_nothing_that_is_measured_changes_the_plan_of_the_checkpoint(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would on GPUs, where what the host does is measured at the start and may keep other stages there."""
    measured = list[bool]()

    def note(run_setup: RunSetup, transport: Transport) -> RunSetup:
        on_gpu = replace(run_setup, rank_context=replace(run_setup.rank_context, device=torch.device("cuda", 0)))
        measured.append(Measurements.of(on_gpu).host)
        return run_setup

    monkeypatch.setattr("mobius.training.session.plan_by_measurement", note)
    run(*EIGHT, "--num_iterations", "5")
    resume("out/checkpoint-4", "--save_dir", "resumed")
    resume("out/checkpoint-4", "--save_dir", "other", "--num_stages", "4", "--overwrite_output_dir")

    assert measured == [True, False, True]


def test_other_data_under_the_same_name_are_refused(run: Run, workplace: Path) -> None:
    run(*EIGHT, "--num_iterations", "4")
    lines = (workplace / "data.jsonl").read_text().splitlines()
    (workplace / "data.jsonl").unlink()
    (workplace / "data.jsonl").write_text("\n".join(lines[1:]) + "\n")

    with pytest.raises(CheckpointError, match=r"trained on other data, .*--resume_changes dataset"):
        resume("out/checkpoint-4", "--save_dir", "resumed")


def test_weights_alone_are_no_state_to_go_on_from(run: Run, workplace: Path) -> None:
    run(*EIGHT, "--save_only_model")
    assert not list((workplace / "out" / "checkpoint-4").glob("optimizer*"))

    with pytest.raises(
        CheckpointError, match=r"holds weights only \(--save_only_model\).*--model_path out/checkpoint-4"
    ):
        resume("out/checkpoint-4", "--save_dir", "resumed")


def test_a_damaged_shard_is_refused_and_the_newest_good_checkpoint_named(eight: None, workplace: Path) -> None:
    shard = next(iter(sorted(Path("out/checkpoint-8").glob("optimizer*.safetensors"))))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)

    told = rf"{shard.name}.*newest good checkpoint there is \S*out/checkpoint-4: --resume_from_checkpoint"
    with pytest.raises(CheckpointError, match=told):
        resume("out/checkpoint-8", "--save_dir", "resumed")


def test_the_card_of_a_resumed_run_tells_what_the_run_began_with(run: Run, workplace: Path) -> None:
    run(*EIGHT, "--num_iterations", "4")
    expected = "All parameters fine-tuned from `model`"
    assert expected in (workplace / "out" / "README.md").read_text()

    # The checkpoint is removed on the way, and there is no folder to look at in the end.
    resume("true", "--save_dir", "out", "--resume_changes", "num_iterations", "--num_iterations", "6", *FREQUENT)

    assert not (workplace / "out" / "checkpoint-4").exists()
    assert expected in (workplace / "out" / "README.md").read_text()


def test_files_of_a_checkpoint_that_were_edited_are_refused_by_name(eight: None, workplace: Path) -> None:
    for file, old, new in (
        ("training_args.yaml", "seed: 42", "seed: 43"),
        ("trainer_state.json", '"epoch": 0', '"epoch": 9'),
        ("plan.json", '"version": 3', '"version": 1'),
    ):
        path = workplace / "out" / "checkpoint-4" / file
        text = path.read_text()
        assert text.replace(old, new) != text, "the edit is one, and leaves the size as it is"
        path.write_text(text.replace(old, new))

        with pytest.raises(CheckpointError, match=rf"{file} is damaged: it was changed .* checksum") as raised:
            resume("out/checkpoint-4", "--save_dir", "resumed")

        assert f"--resume_from_checkpoint {workplace / 'out' / 'checkpoint-8'}" in str(raised.value)
        path.write_text(text)
    assert not (workplace / "resumed").exists()


WRONG_KINDS: list[tuple[str, tuple[Any, ...], object, str]] = [
    ("trainer_state.json", ("log_history", 0, "loss"), "silu", "entry 0 of log_history has 'silu' for loss"),
    ("checkpoint.json", ("training", "num_updates"), "4", "it has '4' for `num_updates`"),
    ("checkpoint.json", ("training", "loss_scale"), 0.0, "loss_scale=0.0"),
    ("checkpoint.json", ("data", "epoch"), [], "its epoch is []"),
    ("checkpoint.json", ("data", "best"), 3, "best evaluation is 3"),
]


def test_values_of_another_kind_are_refused_though_their_sums_are_right(eight: None, workplace: Path) -> None:
    folder = Path("out/checkpoint-4")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for file, (*within, last), value, told in WRONG_KINDS:
        files = dict[str, bytes | None](before)
        texts = {name: json.loads(before[name]) for name in ("trainer_state.json", "checkpoint.json")}
        target = texts[file]
        for name in within:
            target = target[name]
        target[last] = value
        files["trainer_state.json"] = json.dumps(texts["trainer_state.json"]).encode()
        for name, content in with_sums(files, texts["checkpoint.json"]).items():
            (folder / name).write_bytes(content or b"")

        with pytest.raises(CheckpointError, match=re.escape(told)):
            resume("out/checkpoint-4", "--save_dir", "resumed")


def test_steps_in_a_row_that_are_not_finite_are_counted_across_a_resume(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four before the checkpoint and six behind it are ten, which end a run."""
    taken = OptimizerStepper.apply

    def overflow_from_step_5(self: OptimizerStepper, sums: StepSums, *, step: int) -> object:
        return taken(self, replace(sums, loss=sums.loss * float("nan")) if step >= 5 else sums, step=step)

    monkeypatch.setattr(OptimizerStepper, "apply", overflow_from_step_5)
    with pytest.raises(NonFiniteLossError, match=r"10 steps in a row, the last of them step 14") as raised:
        run(*EIGHT, "--num_iterations", "20")
    assert "out/checkpoint-12" in "".join(raised.value.__notes__)

    with pytest.raises(NonFiniteLossError, match=r"10 steps in a row, the last of them step 14"):
        resume("out/checkpoint-8", "--save_dir", "resumed")

    manifest = json.loads(Path("out/checkpoint-8/checkpoint.json").read_text())
    assert manifest["training"]["skipped_in_a_row"] == 4


def test_data_to_evaluate_on_that_a_resume_adds_are_evaluated_on(
    run: Run, workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run("--save_steps", "2")
    resume("out/checkpoint-2", "--save_dir", "judged", "--eval_dataset", "data.jsonl")
    assert "`--eval_dataset` without `--eval_strategy`" in caplog.text
    assert (workplace / "judged" / "eval_results.json").is_file()

    with pytest.raises(ConfigError, match=r"`--max_new_tokens` has no effect"):
        resume("out/checkpoint-2", "--save_dir", "again", "--max_new_tokens", "7")
