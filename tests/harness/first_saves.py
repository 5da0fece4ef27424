"""The first files that a process saves, by two threads, while an import of numpy takes long before it is seen."""

from __future__ import annotations

import importlib._bootstrap as bootstrap  # type: ignore[import-not-found]
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mobius.checkpoint.tensor_files import StageParameter, plan_files, write_stage

SECONDS = 0.3


def save_in_two_threads(folder: str) -> None:
    """Write two stages into `folder`, the second one while the first one's thread imports what it needs."""
    load = bootstrap._load_unlocked

    def load_slowly(spec: Any) -> ModuleType:
        module: ModuleType = load(spec)
        if spec.name == "numpy.ctypeslib":
            time.sleep(SECONDS)  # it is loaded, and not yet an attribute of numpy
        return module

    bootstrap._load_unlocked = load_slowly
    parameters = [StageParameter(f"matrix {stage}", (3, 2), stage) for stage in range(2)]
    files = plan_files(parameters, dtype=torch.float32, has_optimizer=False)

    def write(stage: int) -> None:
        time.sleep(stage * SECONDS / 2)
        write_stage(Path(folder), files[stage], lambda _: torch.ones(3, 2))

    threads = [threading.Thread(target=write, args=(stage,)) for stage in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
