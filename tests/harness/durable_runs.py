"""Runs of one process whose steps are durable, and one that ends behind its fifth step as if the power had failed."""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path

import pytest
from harness.small_run import Run

from mobius.reporting.events import StepMetrics
from mobius.training.loop import StopReason, TrainingLoop

SIX = "--num_iterations 6 --learning_rate 1e-3 --warmup_steps 1 --save_params none --save_steps 2 --save_total_limit 0"
DISKS = "--dtype bf16 --offload_states_to disk,other/disk"


class PowerFailure(BaseException):
    """The end of a process, of which nothing in it knows."""


def fail_after_step_5(run: Run, options: str) -> None:
    """Train five steps, the last of which is durable, in the folder `cut`."""
    after_step = TrainingLoop._after_step

    def failing(self: TrainingLoop, metrics: StepMetrics) -> StopReason | None:
        ending = after_step(self, metrics)
        if metrics.step == 5:
            assert self.durable is not None
            assert self.saver is not None
            self.durable.finish()
            # Threads, locked memory and the folder's lock end with a process.
            self.saver.finish()
            self.saver.close()
            self.durable.close()
            self.session.close()
            self.output.close()
            raise PowerFailure
        return ending

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "_after_step", failing)
        with pytest.raises(PowerFailure):
            run(*SIX.split(), *options.split(), "--save_dir", "cut")


def slots_in(*folders: str) -> list[Path]:
    """Files of durable steps in folders of states."""
    return sorted(path for folder in folders for path in Path(folder).rglob("*.raw"))


def damage(checkpoint: Path) -> None:
    """Change one bit in the middle of the largest file of a durable step."""
    file = max(checkpoint.resolve().glob("*.raw"), key=lambda path: path.stat().st_size)
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 1]))


def leave_alone(run: Run, options: str) -> None:
    """Train six steps in the folder `whole`, with the checkpoints of `options`; once for all tests that ask for it."""
    base_of_all_tests = Path.cwd().parents[1]
    trained = base_of_all_tests / f"left alone, {zlib.crc32(options.encode())}"
    if not trained.exists():
        words = "--durable_steps off --save_dir whole --save_results whole.txt"
        run(*SIX.split(), *options.split(), *words.split())
        shutil.copytree("whole", trained)
    else:
        shutil.copytree(trained, "whole")
