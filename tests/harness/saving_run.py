"""A run without a model, which can save: steps that take no work, a slow save, and what the real one does at signals.

python tests/harness/saving_run.py FOLDER SAVE_SECONDS      alone or under a launcher; it ends by signals only

The first rank prints `ready` at each start once all ranks are in their first step. Ranks agree by files in FOLDER.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from mobius.process.ranks import Ranks, is_restart
from mobius.process.signal_handling import RunStatus, SavedAndStopped, SignalHandler, die_with_launcher

STEP_SECONDS = 0.05
EVERY = 20


class Agreement:
    """What each rank says at each point of a start, and the wait for the other ones'."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._folder, self._ranks, self._start, self._count = folder, ranks, start, 0

    def gather(self, word: str) -> list[str]:
        self._count += 1
        names = [self._folder / f"said-{self._start}-{self._count}-{rank}" for rank in range(self._ranks.num_ranks)]
        own = names[self._ranks.rank]
        own.with_suffix(".new").write_text(word)
        own.with_suffix(".new").rename(own)
        while not all(name.exists() for name in names):
            time.sleep(0.01)
        return [name.read_text() for name in names]


def newest(folder: Path) -> int:
    """Step of the newest checkpoint; 0 if there is none."""
    return max((int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*")), default=0)


def run(folder: Path, save_seconds: float, ranks: Ranks, run_status: RunStatus) -> None:
    agreement = Agreement(folder, ranks)
    saved = step = newest(folder) if is_restart() else 0
    (folder / f"process-{ranks.rank}").write_text(str(os.getpid()))

    def begins(step: int) -> None:
        run_status.set_status(f"after step {step - 1}: steps {saved + 1} to {step - 1} are lost")
        run_status.save_on_signal(f"steps {saved + 1} to {step} would be lost", seconds=save_seconds)

    begins(step + 1)  # before it says so: a signal may be there at once
    agreement.gather("")
    if ranks.is_first:
        print("ready, goes on from step", step, flush=True)
    while True:
        step += 1
        begins(step)
        time.sleep(STEP_SECONDS)
        stop = "".join(agreement.gather(run_status.stop_signal or "-")).replace("-", "")
        if stop:
            run_status.request_stop("SIGINT" if "SIGINT" in stop else "SIGTERM")
        if stop or step % EVERY == 0:
            time.sleep(save_seconds if stop else 0)
            if (folder / "full-disk").exists():
                sys.exit(1)
            if ranks.is_first:
                (folder / f"checkpoint-{step}").touch()
            agreement.gather("saved")
            saved = step
        if stop:
            raise SavedAndStopped(f"after step {step}: saved to checkpoint-{step}")


def main() -> None:
    ranks, run_status = Ranks.from_environment(), RunStatus()
    signal_handler = SignalHandler(run_status)
    die_with_launcher()
    signal_handler.watch(is_first=ranks.is_first)
    try:
        run(Path(sys.argv[1]), float(sys.argv[2]), ranks, run_status)
    except SavedAndStopped as stopped:
        signal_handler.exit_after_save(str(stopped))


if __name__ == "__main__":
    main()
