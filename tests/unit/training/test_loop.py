"""Ends of a run before its last step: each leaves what it promises, and says it."""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.runs import (
    assert_equal_tensors,
    assert_goes_on_exactly,
    evaluations_of,
    steps_of,
    tensors_of,
)

from mobius.checkpoint import saver
from mobius.config.cli import given_options, parse_args
from mobius.engine.executor import Executor
from mobius.errors import CheckpointError, DataError, GpuMemoryError
from mobius.process.ranks import Ranks
from mobius.process.signal_handling import RunStatus, SavedAndStopped
from mobius.reporting.trackers import Trackers
from mobius.training.loop import TrainingLoop
from mobius.training.run import run_training

Run = Callable[..., None]
OPTIONS = "--num_iterations 12 --save_steps 4 --save_total_limit 0 --learning_rate 1e-3 --save_params none"
SMALL = """--model_path model --dataset data.jsonl --device cpu --dtype fp32 --num_stages 2 --num_chunks 2
    --batch_size 4 --seq_length 16 --save_dir out"""


def start(text: str, run_status: RunStatus | None = None) -> None:
    words = text.split()
    config = parse_args(words, num_ranks=1)
    run_training(config, Ranks(0, 1, 0), given=given_options(words), run_status=run_status)


def go_on(save_dir: str, more: str = "") -> None:
    start(
        f"--device cpu --save_params none --save_results resumed.txt --resume_from_checkpoint true {more} "
        f"--save_dir {save_dir}"
    )


def leave_alone(run: Run) -> None:
    """The folder `whole` of the run of OPTIONS, which is trained once for all tests."""
    trained = Path.cwd().parents[1] / "left alone, of twelve steps"
    if not trained.exists():
        run(*OPTIONS.split(), "--save_dir", "whole", "--save_results", "whole.txt")
        shutil.copytree("whole", trained)
    else:
        shutil.copytree(trained, "whole")


def test_a_run_whose_time_is_up_saves_and_ends_well(
    run: Run, workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="mobius")
    leave_alone(run)

    start(f"{SMALL} {OPTIONS} --max_run_time 0.0001")

    assert [path.name for path in Path("out").glob("checkpoint-*")] == ["checkpoint-1"]
    assert not (workplace / "out" / "config.json").exists()
    told = [message for message in caplog.messages if message.startswith("--max_run_time 0.0001 minutes are over")]
    assert f"the state is saved in {workplace / 'out' / 'checkpoint-1'}. To go on: " in told[0]
    go_on("out")
    assert_goes_on_exactly(Path("whole"), Path("out"), step=1)


@pytest.mark.parametrize("at", ["in a step", "while a save is under way"])
def test_a_signal_saves_the_step_and_the_run_goes_on_from_there(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    leave_alone(run)
    run_status = RunStatus()
    stepped, written, calls = Executor.run, saver.write_stage, list[int]()

    def step(self: Executor, *arguments: Any, **more: Any) -> Any:
        calls.append(0)
        if at == "in a step" and len(calls) == 6:
            run_status.request_stop("SIGTERM")
        return stepped(self, *arguments, **more)

    def write(folder: Path, *arguments: Any, **more: Any) -> Any:
        if at != "in a step" and "checkpoint-4" in folder.name:
            run_status.request_stop("SIGTERM")
        return written(folder, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Executor, "run", step)
        patch.setattr(saver, "write_stage", write)
        with pytest.raises(SavedAndStopped) as raised:
            start(f"{SMALL} {OPTIONS}", run_status)

    newest = max((path for path in Path("out").glob("checkpoint-*")), key=lambda path: int(path.name[11:]))
    last = int(newest.name[11:])
    assert len(steps_of(Path("out"))) == last == (6 if at == "in a step" else last) < 12
    assert last > 4, "the step that was under way is saved, too"
    assert f"the state is saved in {newest.resolve()}" in str(raised.value)
    assert not (workplace / "out" / "config.json").exists()
    go_on("out")
    assert_goes_on_exactly(Path("whole"), Path("out"), step=last)


def test_the_time_counts_from_the_start_of_the_launcher(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart does not give the run its time anew."""
    caplog.set_level(logging.INFO, logger="mobius")
    monkeypatch.setattr("mobius.training.run.seconds_since_launch", lambda: 3600.0)

    start(f"{SMALL} {OPTIONS} --max_run_time 59")

    assert caplog.messages[-1].startswith("--max_run_time 59 minutes are over: the state is saved in ")


def test_a_step_that_could_not_be_saved_is_not_told_as_saved(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_status, told, written = RunStatus(), list[str](), saver.write_stage

    def write(folder: Path, *arguments: Any, **more: Any) -> Any:
        if "checkpoint-6" in folder.name:
            raise CheckpointError("the disk is full.")
        return written(folder, *arguments, **more)

    def step(self: Executor, *arguments: Any, run: Any = Executor.run, **more: Any) -> Any:
        if self._observers.activity._step == 6:  # the thread that gives checkpoint-4 its name may still be at it
            end = time.monotonic() + 60
            while "checkpoint-4" not in run_status.clean_up() and time.monotonic() < end:
                time.sleep(0.01)
            told.append(run_status.clean_up())
            run_status.request_stop("SIGTERM")
        return run(self, *arguments, **more)

    def local(self: saver.CheckpointSaver, run: Any = saver.CheckpointSaver.local) -> Any:
        end = time.monotonic() + 60  # the disk may be slower than the steps: what is told in step 4 was written
        while self.save_number and not self._stage_saver.is_done and time.monotonic() < end:
            time.sleep(0.01)
        return run(self)

    monkeypatch.setattr(saver, "write_stage", write)
    monkeypatch.setattr(saver.CheckpointSaver, "local", local)
    monkeypatch.setattr(Executor, "run", step)
    with pytest.raises(
        SavedAndStopped, match=r"this step could not be saved; the newest checkpoint is .*/checkpoint-4"
    ):
        start(f"{SMALL} {OPTIONS}", run_status)

    assert "checkpoint of step 6 is not saved, and the run ends: the disk is full." in caplog.text
    assert re.match(r"after step 5 of 12: the newest checkpoint is \S*/checkpoint-4; ", told[0]), "in the step after it"


def test_an_evaluation_before_the_first_step_offers_no_save(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_status, offers = RunStatus(), list[bool]()

    def evaluate(self: TrainingLoop, step: int, run: Any = TrainingLoop.evaluate) -> Any:
        offers.append(run_status.can_save)
        return run(self, step)

    monkeypatch.setattr(TrainingLoop, "evaluate", evaluate)
    start(
        f"{SMALL} {OPTIONS} --num_iterations 4 --val_size 4 --eval_strategy steps --eval_steps 2 --eval_on_start",
        run_status,
    )

    assert offers[:3] == [False, True, True]


def test_a_run_that_cannot_begin_leaves_nothing(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **more: Any) -> Any:
        raise DataError("no samples")

    monkeypatch.setattr("mobius.training.run.Evaluator", fails)
    with pytest.raises(DataError):
        start(f"{SMALL} {OPTIONS} --val_size 4 --eval_strategy steps --eval_steps 2")

    assert not list(workplace.glob("out*"))


GROWS_WORSE = f"""{SMALL} {OPTIONS} --save_steps 2 --save_total_limit 1 --val_size 4 --eval_strategy steps
    --eval_steps 2 --learning_rate 0.3 --warmup_steps 2 --lr_scheduler_type constant --adam_beta2 0.9"""


def test_a_run_that_gets_worse_ends_by_its_patience_and_its_best_weights_are_the_result(
    workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="mobius")

    start(f"{GROWS_WORSE} --early_stopping_patience 2 --load_best_model_at_end --do_eval")

    losses = {step: loss for step, loss, _ in evaluations_of(Path("out"))}
    last, first = max(losses), min(losses, key=lambda step: losses[step])
    assert last == first + 4 < 12, losses
    (told,) = (text for text in caplog.messages if "early stopping" in text)
    assert f"after step {last}: none of the last 2 evaluations" in told
    assert f"better loss than {losses[first]:.4f} of step {first} (--early_stopping_patience 2)" in told
    assert [row["step"] for row in steps_of(Path("out"))] == list(range(1, last + 1))
    assert {path.name for path in Path("out").glob("checkpoint-*")} == {f"checkpoint-{first}", f"checkpoint-{last}"}
    best, result = tensors_of(Path(f"out/checkpoint-{first}")), tensors_of(Path("out"))
    assert all(torch.equal(best[name], value) for name, value in result.items())
    assert json.loads(Path("out/eval_results.json").read_text())["eval_loss"] == losses[first]
    state = json.loads(Path("out/trainer_state.json").read_text())
    assert (state["best_global_step"], state["best_metric"]) == (first, losses[first])
    assert state["best_model_checkpoint"].endswith(f"out/checkpoint-{first}")


def test_results_and_card_tell_the_evaluation_of_the_weights_that_are_the_result(workplace: Path) -> None:
    start(f"{GROWS_WORSE} --num_iterations 8 --load_best_model_at_end")

    losses = {step: loss for step, loss, _ in evaluations_of(Path("out"))}
    first, last = min(losses.values()), losses[8]
    assert first < last
    assert json.loads(Path("out/eval_results.json").read_text())["eval_loss"] == first
    assert json.loads(Path("out/all_results.json").read_text())["eval_loss"] == first
    card = Path("out/README.md").read_text()
    assert f"| eval_loss | {first:.4f} |" in card
    table = card.partition("| evaluation after step |")[2].splitlines()[2 : 2 + len(losses)]
    assert [row.split(" | ")[:2] for row in table] == [[f"| {step}", f"{loss:.4f}"] for step, loss in losses.items()]
    assert "](training_loss.png)" in card


def test_losses_on_other_data_are_not_compared_with_the_best_one(
    workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = Path("data.jsonl").read_text().splitlines(keepends=True)
    Path("first.jsonl").write_text("".join(lines[:4]))
    Path("other.jsonl").write_text(json.dumps({"prompt": "?", "completion": "zebra quilt oxygen"}) + "\n")
    start(f"{GROWS_WORSE.replace('--val_size 4', '--eval_dataset first.jsonl')} --num_iterations 2")
    best = json.loads(Path("out/trainer_state.json").read_text())["best_metric"]
    caplog.set_level(logging.INFO, logger="mobius")
    told = "the checkpoint's best evaluation does not count: it used other data or another metric than this run"

    for data, is_other in (("first.jsonl", False), ("other.jsonl", True)):
        again = f"--eval_dataset {data} --num_iterations 4 --resume_changes num_iterations --overwrite_output_dir"
        go_on(data[:5], f"--resume_from_checkpoint out/checkpoint-2 {again}")
        assert (told in caplog.messages) == is_other

    (_, loss, _) = evaluations_of(Path("other"))[-1]
    state = json.loads(Path("other/trainer_state.json").read_text())
    assert loss > best
    assert (state["best_global_step"], state["best_metric"]) == (4, loss)


def test_the_model_is_saved_before_trackers_are_waited_for(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs may cost time, and must not cost the model."""
    was_saved, close = list[bool](), Trackers.close

    def note(self: Trackers, **more: Any) -> None:
        was_saved.append(Path("out/config.json").is_file())
        close(self, **more)

    monkeypatch.setattr(Trackers, "close", note)
    start(f"{SMALL} {OPTIONS} --num_iterations 1")

    assert was_saved == [True]


def test_answers_and_scores_of_the_model_before_do_not_stay_beside_the_new_one(
    workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(f"{SMALL} {OPTIONS} --num_iterations 4")
    of_answers = [Path("out", name) for name in ("generated_predictions.jsonl", "predict_results.json")]
    for path in (*of_answers, Path("out/eval_results.json")):
        path.write_text("{}")
    caplog.set_level(logging.INFO, logger="mobius")

    go_on("out", "--num_iterations 5 --resume_changes num_iterations")

    assert not [path for path in (*of_answers, Path("out/eval_results.json")) if path.exists()]
    told = ", ".join(str(path.resolve()) for path in of_answers)
    assert f"predictions of the older model are removed: {told}" in caplog.messages


def test_the_best_of_the_checkpoints_is_the_result_though_a_better_evaluation_came_between(workplace: Path) -> None:
    each = f"{GROWS_WORSE} --eval_steps 1 --save_steps 3 --save_total_limit 0 --num_iterations 6"
    start(f"{each} --load_best_model_at_end")
    losses = {step: loss for step, loss, _ in evaluations_of(Path("out"))}
    assert min(losses, key=lambda step: losses[step]) == 4
    assert losses[3] < losses[6]

    # A run that goes on in another folder finds it in the old one.
    go_on("other", "--resume_from_checkpoint out/checkpoint-3")

    best = tensors_of(Path("out/checkpoint-3"))
    for folder in ("out", "other"):
        assert all(torch.equal(best[name], value) for name, value in tensors_of(Path(folder)).items())


def test_last_weights_that_are_the_best_ones_are_the_result_though_no_checkpoint_has_them(workplace: Path) -> None:
    start(f"{GROWS_WORSE} --learning_rate 1e-3 --save_steps 4 --num_iterations 6 --load_best_model_at_end")

    assert json.loads(Path("out/trainer_state.json").read_text())["best_global_step"] == 6
    saved, result = tensors_of(Path("out/checkpoint-4")), tensors_of(Path("out"))
    assert not any(torch.equal(saved[name], value) for name, value in result.items())


def test_patience_is_counted_across_a_resume(workplace: Path) -> None:
    start(f"{GROWS_WORSE} --early_stopping_patience 2 --save_dir whole --save_results whole.txt")
    whole = evaluations_of(Path("whole"))
    start(f"{GROWS_WORSE} --early_stopping_patience 2 --num_iterations {whole[-2][0]}")
    for path in [*Path("out").glob("model*"), Path("out/config.json")]:
        path.unlink()

    go_on("out", "--num_iterations 12 --resume_changes num_iterations")

    assert evaluations_of(Path("out")) == whole
    assert_equal_tensors(Path("whole"), Path("out"))


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ("--no_offload --recompute none", "--recompute full"),
        pytest.param("--no_offload --recompute full", "--use_offload", marks=pytest.mark.extended),
        pytest.param("--resident_stages 1 --recompute full", "--resident_stages 0", marks=pytest.mark.extended),
        pytest.param("--resident_stages 0 --recompute full", "--num_rounds 2", marks=pytest.mark.extended),
        ("--resident_stages 0 --recompute full --num_rounds 2", "--num_chunks 4"),
        pytest.param(
            "--resident_stages 0 --recompute full --num_chunks 4 --num_rounds 4",
            "--num_stages 3",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            "--resident_stages 0 --recompute full --num_chunks 4",
            "--activation_offloading on",
            marks=pytest.mark.extended,
        ),
        (
            "--resident_stages 0 --recompute full --num_chunks 4 --num_rounds 4 --num_stages 4 "
            "--activation_offloading on",
            "a lower --seq_length",
        ),
    ],
)
def test_a_gpu_without_memory_in_a_step_tells_plan_change_and_checkpoint(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, options: str, change: str
) -> None:
    stepped, calls = Executor.run, list[int]()

    def step(self: Executor, *arguments: Any, **more: Any) -> Any:
        calls.append(0)
        if len(calls) == 10:  # the save of step 8 has waited for that of step 4
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")
        return stepped(self, *arguments, **more)

    monkeypatch.setattr(Executor, "run", step)
    with pytest.raises(GpuMemoryError) as raised:
        start(f"{SMALL} {OPTIONS} {options}")

    first, second = str(raised.value).splitlines()
    assert first == "rank 0 ran out of GPU memory: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert second.startswith("The plan was: ")
    assert "stages on 1 rank(s)" in second
    assert f"The smallest change: {change}" in second
    (note,) = raised.value.__notes__
    newest = re.match(r"The newest checkpoint is (.*/out/checkpoint-[48]); ", note)
    assert newest, note
    assert (Path(newest[1]) / "checkpoint.json").stat().st_size
