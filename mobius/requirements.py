"""Message about packages that are not installed; it imports none, and old Pythons can read it."""

from __future__ import annotations

import sys
from importlib.util import find_spec

PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "datasets": "datasets",
    "numpy": "numpy",
    "yaml": "pyyaml",
    "tqdm": "tqdm",
    "matplotlib": "matplotlib",
    "sacrebleu": "sacrebleu",
    "torchmetrics": "torchmetrics",
}
"""Packages that a run needs, by the names of their modules."""


def missing_packages(error: ModuleNotFoundError) -> str | None:
    """Message about all packages that are not installed; None where the error is about something else."""
    name = (error.name or "").partition(".")[0]
    if name not in PACKAGES:
        return None
    missing = [package for module, package in PACKAGES.items() if module == name or find_spec(module) is None]
    return (
        "{} lacks the packages {}. Start with `bash train.sh`, which makes an environment with all of them in .venv, "
        "and `source .venv/bin/activate` before other commands; or install them: {} -m pip install -r requirements.txt"
    ).format(sys.executable, ", ".join(missing), sys.executable)


def old_python(oldest: tuple[int, int]) -> str:
    """Message about an interpreter that is too old."""
    return (
        "error: Mobius needs Python {}.{} or later, and {} is {}.{}; name another one, or use `bash train.sh`".format(
            *oldest, sys.executable, *sys.version_info[:2]
        )
    )
