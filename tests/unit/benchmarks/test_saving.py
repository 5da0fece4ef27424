"""The benchmark of saves runs a small model on a CPU, and tells what its numbers say."""

from pathlib import Path
from typing import Any

import pytest
import saving
from checkpointing import FailedSaveError, ResumePoint, TimedSaves
from harness.forked import HANG_SECONDS
from harness.runs import make_checkpoint
from harness.sessions import in_sessions, random_samples
from saving import DiskRates

from mobius.data.batches import TrainingBatches
from mobius.errors import CheckpointError
from mobius.training.session import Session

RATES = DiskRates(write=1e9, read=2e9)


def steps(*seconds: float, host: float = 1.0) -> list[dict[str, float]]:
    return [{"step_seconds": each, "num_tokens": 100, "peak_host_memory_gib": host} for each in seconds]


def saved_run(*beside: float) -> dict[str, Any]:
    save = {"step": 4, "num_bytes": 4_000_000_000, "seconds": 8.0, "waited_seconds": 0.25}
    told = {"saves": [save], "describes": "checkpoints", "stage_gib": 0.5, "newest": "checkpoint-4"}
    return {"steps": [*steps(9, 9, 2, 2), *steps(*beside, host=1.75)], "saved": told}


def test_saves_are_as_close_as_the_disk_allows_and_no_closer() -> None:
    assert saving.save_interval(90e9, 1e9, 2.0, 240.0, 3) == (50, 1)
    assert saving.save_interval(90e9, 1e9, 2.0, 310.0, 3) == (50, 2)
    assert saving.save_interval(90e9, 1e9, 2.0, 9999.0, 3) == (50, 3)
    assert saving.save_interval(1.0, 1e9, 2.0, 1.0, 3) == (saving.LEAST_STEPS, 1)


def test_what_the_disk_or_the_time_does_not_allow_is_told_before_it_is_tried() -> None:
    assert saving.saves_that_fit(3, 40e9, 81e9) == 3
    assert saving.saves_that_fit(3, 40e9, 80e9) == 1, "the second one is written beside the first"
    with pytest.raises(SystemExit, match=r"a checkpoint takes 40.4 GB and 40.0 GB are free: use fewer --num_layers"):
        saving.saves_that_fit(3, 40e9, 40e9)
    saving.check_time(400, 400)
    with pytest.raises(SystemExit, match="takes 401 s, and --run_seconds is 400: raise it"):
        saving.check_time(401, 400)


def test_a_standstill_is_the_time_above_the_median_of_each_save() -> None:
    assert saving.standstills([2, 5, 1, 2, 2.5, 2], 2.0, 3) == [3.0, 0.5]


def test_with_room_tokens_and_standstill_are_judged(capsys: pytest.CaptureFixture[str]) -> None:
    saving.tell_saves({"steps": steps(9, 9, 2, 2)}, saved_run(2, 2.5, 2, 2), RATES, 4, has_room=True)
    told = capsys.readouterr().out
    assert "| from the first save on | 4 | 2.0000 | 47 | 5.9% | 1.75 |" in told
    assert "4.00 GB in 8.00 s, 0.50 GB/s, 0.50 of the disk's; updates waited 0.250 s" in told
    assert "standstill per save, s: [0.5]; 0.000 in as many steps before the first" in told
    assert "tokens/s lost beside saves: 5.9%, MORE THAN 3.0%" in told
    assert "standstill of the worst save, s: 0.500, at most 0.500" in told


@pytest.mark.parametrize(("standstill", "word"), [(4.6, "1.15, at most"), (4.7, "1.18, MORE THAN")])
def test_without_room_the_disk_is_what_a_standstill_is_compared_with(
    capsys: pytest.CaptureFixture[str], standstill: float, word: str
) -> None:
    saving.tell_saves({"steps": steps(9, 9, 2, 2)}, saved_run(2, 2 + standstill, 2, 2), RATES, 4, has_room=False)
    told = capsys.readouterr().out
    assert f"standstill of the worst save over bytes / disk rate: {word} 1.15" in told
    assert "host memory beyond a run without saves, GiB: 0.75, MORE THAN 0.50" in told


@pytest.mark.parametrize(("seconds", "word"), [(11.2, "at most"), (11.3, "MORE THAN")])
def test_a_resumed_start_is_compared_with_a_fresh_one_and_the_disk(
    capsys: pytest.CaptureFixture[str], seconds: float, word: str
) -> None:
    fresh = {"load_seconds": 12.0, "start": {"imports": 4.0}, "steps": steps(2.0)}
    resumed = {"load_seconds": seconds + 5 - 2, "start": {"imports": 5.0}, "steps": steps(2.0)}
    saving.tell_starts(fresh, resumed, 2e9, 2e9)
    assert f"first resumed step ends after, s: {seconds:.2f}, {word} 11.20" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["--steps 3", "--saves 0", "--folder nowhere"])
def test_mistyped_values_are_refused_with_what_is_allowed(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        saving.parse(["tiny", *words.split()])
    assert words.split()[1] in capsys.readouterr().err


def test_measuring_the_disk_leaves_nothing(tmp_path: Path) -> None:
    rates = saving.measure_disk(tmp_path, num_bytes=1_000_001, num_files=3)
    assert 0 < rates.write < 1e13
    assert 0 < rates.read < 1e13
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_only_got_no_name_is_told_as_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object, **__: object) -> Path:
        raise CheckpointError("cannot rename it")

    def train(session: Session, batches: TrainingBatches) -> None:
        saves = TimedSaves(session, tmp_path / "model")
        saves.train(ResumePoint(None).trainer(session, batches, saves, has_kernel=False))
        saves.results()

    make_checkpoint(tmp_path / "model")
    monkeypatch.setattr("mobius.checkpoint.saver.commit_checkpoint", cannot)
    options = f"--num_stages 2 --batch_size 2 --num_chunks 1 --seq_length 8 --fp32 --save_dir {tmp_path / 'out'}"
    with pytest.raises(FailedSaveError, match="1 of 1 checkpoints are not saved"):
        in_sessions(1, tmp_path / "model", f"{options} --num_iterations 2 --save_steps 1", random_samples(8, 8), train)


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.parametrize("kind", ["--no_room --resume", ""])
@pytest.mark.extended  # a quarter of a minute each
def test_a_small_model_saves_beside_its_steps_in_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    small = "--num_layers 2 --gpus 2 --batch_size 4 --seq_length 16 --steps 4 --seconds 0.1"
    words = ["tiny", *small.split(), "--folder", str(tmp_path), "--run_seconds", str(HANG_SECONDS), *kind.split()]
    options = "--device cpu --compile off --num_stages 2 --num_chunks 2"
    saving.main([*words, "--", *options.split()])
    told = capsys.readouterr().out
    parameters = 2 * (4 * 64**2 + 3 * 64 * 128 + 2 * 64) + 2 * 32000 * 64 + 64
    assert f"a checkpoint has {12 * parameters / 1e9:.2f} GB; 1 saves, one every" in told
    assert f": {12 * parameters / 1e9:.2f} GB in " in told
    assert ("standstill of the worst save over bytes / disk rate" in told) == bool(kind)
    assert ("first resumed step ends after" in told) == bool(kind)
    assert not list(tmp_path.iterdir())
