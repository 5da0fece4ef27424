"""Cuts the power of a small training at random moments; its steps are durable, and it ends as one that was left alone.

PYTHONPATH=.:tests:scripts:benchmarks python tests/harness/power_cut_runs.py CUTS SEED FOLDER

The last line says what was taken back.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import kill_and_resume
from harness.forked import leave_pictures_empty
from harness.power_cuts import Journals
from harness.runs import with_kernel
from kill_and_resume import DURABLE, HANG_SECONDS, OPTIONS, Damage, Trial, TrialError, compare, phase_of
from started_ranks import (
    StartedRun,
    end_descendants,
    import_everything,
    inherit_orphans,
    take_own_shared_memory,
    wait_until,
)

SHARE_AT_A_WRITE = 0.75
NUM_STEPS = 6
"""Half of what runs that are killed take."""


class PowerCuts(Trial):
    """Kills all ranks of a run at once, and takes back what was not synced."""

    journals: Journals
    was_cut = False

    def _make_inputs(self) -> None:
        """Half of the layers, and as many samples as the steps take: what is written is cut, nothing that is read."""
        super()._make_inputs()
        config, data = self._folder / "model" / "config.json", self._folder / "data.jsonl"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 4}))
        data.write_text("".join(data.read_text().splitlines(keepends=True)[:200]))

    def _new_life(self, name: str) -> Path:
        """With the compiled kernel, which no power cut is about."""
        with_kernel((life := super()._new_life(name)) / "cache")
        return life

    def _kill_at_random(self, started: StartedRun, out: Path) -> bool:
        """At a random moment, three times of four, and until a write was taken back, while something is written."""
        end = time.monotonic() + self._draw.uniform(0, self._seconds[False])
        wait_until(lambda: started.is_over() or time.monotonic() > end, HANG_SECONDS)
        if self._draw.random() < SHARE_AT_A_WRITE or not self._counts["writes"]:
            wait_until(lambda: started.is_over() or self.journals.are_dirty(), HANG_SECONDS, pause=0.001)
        self.was_cut = not started.is_over()
        if self.was_cut:
            self._kills[phase_of(out, started), "rank 0"] += 1
        for process in started.processes.values() if self.was_cut else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return self.was_cut

    def _see_the_end(self, started: StartedRun) -> None:
        super()._see_the_end(started)
        if self.was_cut:
            self._counts.update(self.journals.cut(self._draw))
        self.journals.forget()

    def _check_checkpoints(self, out: Path) -> None:
        """Compare the newest one: older links may have come back."""
        from mobius.checkpoint.folders import find_checkpoints

        for path, _ in find_checkpoints(out).valid[:1]:
            compare(str(path), self._checkpoints[path.name], self._state_of(path))
            self._counts["checkpoints compared"] += 1


def main(words: list[str]) -> int:
    """Cut the power as asked; returns 1 if anything differs."""
    cuts, seed, folder = int(words[0]), int(words[1]), Path(words[2])
    inherit_orphans()
    take_own_shared_memory()
    import_everything()
    leave_pictures_empty()
    journals = Journals(folder / "journals", re.compile(r"/disk-\d/|/out/checkpoint-\d+(\.link)?$").search)
    journals.install()
    in_fp32 = DURABLE.replace("--bf16", "--fp32").replace("--optimizer_states compact", "")  # CPUs compute it faster
    options = f"--device cpu {OPTIONS} {in_fp32} --save_steps 100 --num_iterations {NUM_STEPS}".split()
    kill_and_resume.STEPS = NUM_STEPS
    draw = random.Random(seed)
    trial = PowerCuts(folder, options, draw, 0.0, Damage(draw, 0), is_durable=True)
    trial.journals = journals
    try:
        trial.run(cuts)
    except TrialError as failure:
        print(failure)
        return 1
    finally:
        end_descendants()
        print(trial.table())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
