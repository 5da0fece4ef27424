"""What a resumed run refuses, reports and takes from its checkpoint; tests/pipeline/test_resume.py has its bits."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.runs import steps_of
from harness.sessions import resume
from harness.small_run import EIGHT, SMALL, Run

from mobius.checkpoint.manifest import Manifest
from mobius.checkpoint.resume import find_resume
from mobius.config.cli import given_options, parse_args
from mobius.engine.optimizer_stepper import OptimizerStepper
from mobius.engine.step_sums import StepSums
from mobius.errors import CheckpointError, ConfigError, NonFiniteLossError
from mobius.planner.measured_plan import Measurements
from mobius.planner.plan_file import VERSION
from mobius.planner.solver import PlanResult
from mobius.process.ranks import Ranks
from mobius.training.run import run_training

Change = Callable[[Path], object]
FREQUENT = ["--save_steps", "1", "--save_total_limit", "1"]


def bytes_replaced(name: str, old: bytes, new: bytes) -> Change:
    def change(checkpoint: Path) -> None:
        content = (checkpoint / name).read_bytes()
        assert old in content
        (checkpoint / name).write_bytes(content.replace(old, new, 1))

    return change


def last_bit_flipped(checkpoint: Path) -> None:
    shard = next(iter(sorted(checkpoint.glob("optimizer*.safetensors"))))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def sealed_with(part: str, **changes: object) -> Change:
    """Values of the manifest, which has the sum that belongs to them."""

    def change(checkpoint: Path) -> None:
        path = checkpoint / "checkpoint.json"
        manifest = Manifest.from_json(json.loads(path.read_text()))
        path.write_text(replace(manifest, **{part: {**getattr(manifest, part), **changes}}).to_json())

    return change


def other_data(_: Path) -> None:
    lines = Path("data.jsonl").read_text().splitlines()
    Path("data.jsonl").unlink()
    Path("data.jsonl").write_text("\n".join(lines[1:]) + "\n")


def as_it_is(_: Path) -> None:
    pass


EDITED = " is damaged: it was changed"
TO_THE_NEWEST = "out/checkpoint-8"
REFUSED: dict[str, tuple[Change, str, tuple[str, ...]]] = {
    "another encoding": (bytes_replaced("trainer_state.json", b"loss", b"l\xffss"), "", ("trainer_state.json",)),
    "other settings": (
        bytes_replaced("training_args.yaml", b"seed: 42", b"seed: 43"),
        "",
        (f"training_args.yaml{EDITED}", "checksum", TO_THE_NEWEST),
    ),
    "another epoch": (
        bytes_replaced("trainer_state.json", b'"epoch": 0', b'"epoch": 9'),
        "",
        (f"trainer_state.json{EDITED}", "checksum", TO_THE_NEWEST),
    ),
    "another plan": (
        bytes_replaced("plan.json", b'"version": 3', b'"version": 1'),
        "",
        (f"plan.json{EDITED}", "checksum", TO_THE_NEWEST),
    ),
    "a damaged shard": (last_bit_flipped, "", ("optimizer-0", "newest good checkpoint there is", TO_THE_NEWEST)),
    "a text for a number": (sealed_with("training", num_updates="4"), "", ("it has '4' for `num_updates`",)),
    "no loss scale": (sealed_with("training", loss_scale=0.0), "", ("loss_scale=0.0",)),
    "no epoch": (sealed_with("data", epoch=[]), "", ("its epoch is []",)),
    "no evaluation": (sealed_with("data", best=3), "", ("best evaluation is 3",)),
    "other data": (other_data, "", ("trained on other data, ", "--resume_changes dataset")),
    "what would train something else": (
        as_it_is,
        "--learning_rate 1 --batch_size 8 --seq_length 32 --dataset other.jsonl",
        (
            *("`--learning_rate` is 1.0, checkpoint-4 has 0.001", "`--batch_size` is 8, checkpoint-4 has 4"),
            *("`--seq_length` is 32, checkpoint-4 has 16", "`--dataset` is other.jsonl, checkpoint-4 has data.jsonl"),
            "--resume_changes batch_size,dataset,learning_rate,seq_length",
        ),
    ),
    "another format, though allowed": (
        as_it_is,
        "--dtype bf16 --resume_changes dtype",
        ("`--dtype` is bf16, checkpoint-4 has fp32", "--model_path out/checkpoint-4"),
    ),
    "fewer steps than are done": (
        as_it_is,
        "--num_iterations 3 --resume_changes num_iterations",
        ("`--num_iterations` 3: checkpoint-4 has done 4 steps; give at least",),
    ),
}


FOUND_LATE = ("no evaluation", "no epoch")
"""When the run has its folder already."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_go_on_is_refused(eight: None, workplace: Path, case: str) -> None:
    change, words, told = REFUSED[case]
    change(Path("out/checkpoint-4"))

    with pytest.raises((CheckpointError, ConfigError)) as raised:
        resume("out/checkpoint-4", "--save_dir", "resumed", *words.split())

    assert [text for text in told if text not in str(raised.value)] == []
    assert not (workplace / "resumed").exists() or case in FOUND_LATE


def test_a_change_that_is_allowed_by_name_is_taken(eight: None, workplace: Path) -> None:
    words = "--save_dir resumed --learning_rate 2e-3 --num_iterations 6 --resume_changes learning_rate,num_iterations"
    resume("out/checkpoint-4", *words.split())

    rows = steps_of(Path("resumed"))
    assert [row["step"] for row in rows] == [5, 6]
    assert rows[0]["loss"] == steps_of(Path("out"))[4]["loss"], "the weights are the checkpoint's"
    assert rows[0]["learning_rate"] != steps_of(Path("out"))[4]["learning_rate"]


def test_a_checkpoint_whose_plan_has_the_version_before_is_planned_anew_with_a_line(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as older:
        older.setattr("mobius.planner.plan_file.VERSION", VERSION - 1)
        run(*EIGHT)
    with caplog.at_level(logging.INFO):
        resume("out/checkpoint-4", "--save_dir", "resumed")
    (told,) = (text for text in caplog.messages if "plan is not used" in text)
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

    def note(result: PlanResult, *_: object) -> PlanResult:
        measured.append(Measurements.of(result, torch.device("cuda", 0)).host)
        return result

    monkeypatch.setattr("mobius.training.session.plan_by_measurement", note)
    run(*EIGHT, "--num_iterations", "5")
    resume("out/checkpoint-4", "--save_dir", "resumed")
    resume("out/checkpoint-4", "--save_dir", "other", "--num_stages", "4", "--overwrite_output_dir")

    assert measured == [True, False, True]


def test_weights_alone_are_no_state_to_go_on_from(run: Run, workplace: Path) -> None:
    run(*EIGHT, "--save_only_model")
    assert not list((workplace / "out" / "checkpoint-4").glob("optimizer*"))

    with pytest.raises(
        CheckpointError, match=r"holds weights only \(--save_only_model\).*--model_path out/checkpoint-4"
    ):
        resume("out/checkpoint-4", "--save_dir", "resumed")


def test_the_card_of_a_resumed_run_tells_what_the_run_began_with(run: Run, workplace: Path) -> None:
    run(*EIGHT, "--num_iterations", "4")
    expected = "All parameters fine-tuned from `model`"
    assert expected in (workplace / "out" / "README.md").read_text()

    # The checkpoint is removed on the way, and there is no folder to look at in the end.
    resume("true", "--save_dir", "out", "--resume_changes", "num_iterations", "--num_iterations", "6", *FREQUENT)

    assert not (workplace / "out" / "checkpoint-4").exists()
    assert expected in (workplace / "out" / "README.md").read_text()


def test_steps_in_a_row_that_are_not_finite_are_counted_across_a_resume(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four before the checkpoint and six behind it are ten, which end a run."""
    taken = OptimizerStepper.apply

    def overflow_from_step_5(self: OptimizerStepper, sums: StepSums, *, step: int) -> object:
        return taken(self, replace(sums, numbers=sums.numbers * float("nan")) if step >= 5 else sums, step=step)

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
