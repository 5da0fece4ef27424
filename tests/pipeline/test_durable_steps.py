"""A run whose steps are durable ends in the middle of one, and goes on from the last whole one to the bit."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from harness.durable_runs import DISKS, SIX, damage, fail_after_step_5, leave_alone
from harness.grids import named
from harness.runs import assert_equal_tensors, assert_goes_on_exactly, make_checkpoint, steps_of
from harness.sessions import resume
from harness.small_run import Run

from mobius.process.signal_handling import SavedAndStopped
from mobius.reporting.events import StepMetrics
from mobius.training.loop import StopReason, TrainingLoop

VARIANTS = {
    "clipped": DISKS,
    "compact, updates in the middle of backward": f"{DISKS} --optimizer_states compact --max_grad_norm 0",
    "a resident stage": f"{DISKS} --resident_stages 1 --max_grad_norm 0",
    "gradients on the disks": f"{DISKS} --gradients_on_disks --num_stages 4",
    "weights on the disks": f"{DISKS} --weights_on_disks --max_grad_norm 0",
    "all on the disks, frozen stages": f"{DISKS} --weights_on_disks --num_stages 4 --freeze embedding,layers.0-1",
    "no overlap": f"{DISKS} --no_overlap_optimizer",
    "tied": f"{DISKS} --model_path tied --num_stages 4 --max_grad_norm 0",
    "fp16, whose first steps are skipped": "--dtype fp16 --offload_states_to disk",
    "frozen stages": f"{DISKS} --num_stages 4 --freeze embedding,layers.0-1",
    "evaluated": f"{DISKS} --val_size 4 --eval_strategy steps --eval_steps 2",
}
ON_DEMAND = ["clipped", "weights on the disks", "no overlap", "evaluated", "frozen stages"]
ON_DEMAND += ["a resident stage", "fp16, whose first steps are skipped"]


def is_empty(*folders: str) -> bool:
    return not any(path for folder in folders for path in Path(folder).iterdir())


@pytest.mark.parametrize("options", named(VARIANTS, on_demand=ON_DEMAND))
def test_it_goes_on_from_the_last_step_to_the_bit(run: Run, workplace: Path, options: str) -> None:
    make_checkpoint(workplace / "tied", is_tied=True)
    leave_alone(run, options)
    fail_after_step_5(run, options)
    assert not is_empty("disk")
    assert Path("cut/checkpoint-5").is_symlink()

    resume("true", "--save_dir", "cut")

    assert_goes_on_exactly(Path("whole"), Path("cut"), step=5)
    assert is_empty("disk", *(["other/disk"] if "other" in options else []))
    assert not Path("cut/checkpoint-5").exists()


@pytest.mark.parametrize("steps", named({"durable": "on", "not durable": "off"}, on_demand=["durable"]))
def test_what_is_saved_and_evaluated_of_weights_on_disks_is_that_of_weights_in_memory(
    run: Run, workplace: Path, steps: str
) -> None:
    """The checkpoint that is resumed, the best one that is taken at the end, and the model."""
    words = f"{SIX} {DISKS} --resident_stages 1 --num_stages 4 --val_size 4 --eval_strategy steps --eval_steps 2"
    words += f" --load_best_model_at_end --durable_steps {steps} --learning_rate 0.5"
    for folder, more in (
        ("memory", ""),
        ("disks", "--weights_on_disks"),
        ("later", "--weights_on_disks --resume_from_checkpoint disks/checkpoint-4"),
    ):
        run(*words.split(), *more.split(), "--save_dir", folder, "--save_results", f"{folder}.txt")
        assert_equal_tensors(Path("memory"), Path(folder))
    assert steps_of(Path("disks")) == steps_of(Path("memory"))


OTHERS = {
    "more stages": "--num_stages 4",
    "states in memory": "--offload_states_to None",
    "resident": "--resident_stages 1",
    "one folder": "--offload_states_to third",
}


@pytest.mark.parametrize("others", named(OTHERS, on_demand=["resident", "more stages"]))
def test_it_may_go_on_with_another_plan_and_on_other_disks(run: Run, workplace: Path, others: str) -> None:
    leave_alone(run, DISKS)
    fail_after_step_5(run, DISKS)

    resume("cut/checkpoint-5", "--save_dir", "cut", *others.split())

    assert steps_of(Path("cut")) == steps_of(Path("whole"))
    assert_equal_tensors(Path("whole"), Path("cut"))
    assert is_empty("disk", "other/disk"), "what it went on from is left behind"
    assert not Path("cut/checkpoint-5").is_symlink()


def test_a_step_with_a_damaged_byte_is_passed_over(run: Run, workplace: Path, caplog: pytest.LogCaptureFixture) -> None:
    leave_alone(run, DISKS)
    fail_after_step_5(run, DISKS)
    damage(Path("cut/checkpoint-5"))
    caplog.set_level(logging.INFO, logger="mobius")

    resume("true", "--save_dir", "cut")

    passed_over = next(message for message in caplog.messages if "is skipped" in message)
    assert "checkpoint-5" in passed_over
    assert "the checksum of its bytes from" in passed_over
    assert_goes_on_exactly(Path("whole"), Path("cut"), step=4)


def test_a_run_that_is_asked_to_stop_saves_no_other_checkpoint(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step is durable already; --save_strategy no has no say in that."""
    leave_alone(run, DISKS)
    after_step = TrainingLoop._after_step

    def stopping(self: TrainingLoop, metrics: StepMetrics) -> StopReason | None:
        self.requested_stop = StopReason.SIGNAL if metrics.step == 3 else None
        return after_step(self, metrics)

    words = f"{SIX} {DISKS} --save_strategy no --save_dir cut".replace("--save_steps 2 --save_total_limit 0", "")
    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_after_step", stopping)
        with pytest.raises(SavedAndStopped, match=r"the state is saved in .*cut/checkpoint-3\. To go on: .*"):
            run(*words.split())
    found = sorted(Path("cut").glob("checkpoint-*"))
    assert [path.name for path in found] == ["checkpoint-2", "checkpoint-3"]
    assert all(path.is_symlink() for path in found), "the two durable steps"

    resume("true", "--save_dir", "cut")

    assert steps_of(Path("cut")) == steps_of(Path("whole"))
    assert_equal_tensors(Path("whole"), Path("cut"))
