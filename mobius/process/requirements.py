"""Message about packages that are not installed; this module imports none of them."""

from __future__ import annotations

import sys
from importlib.util import find_spec

_BY_THEIR_NAMES = ("torch", "transformers", "safetensors", "datasets", "numpy", "tqdm", "matplotlib", "sacrebleu")
PACKAGES = {
    **{name: name for name in _BY_THEIR_NAMES},
    "PIL": "pillow",
    "torchmetrics": "torchmetrics",
    "yaml": "pyyaml",
}
"""Names of modules that a run needs -> names of their packages."""


def missing_packages(error: ModuleNotFoundError) -> str | None:
    """Message about all packages that are not installed; None if the error has another cause."""
    name = (error.name or "").partition(".")[0]
    if name not in PACKAGES:
        return None
    missing = [package for module, package in PACKAGES.items() if module == name or find_spec(module) is None]
    return (
        f"{sys.executable} lacks the packages {', '.join(missing)}. Start with `bash train.sh`, which makes an "
        "environment with all of them in .venv, and `source .venv/bin/activate` before other commands; or install "
        f"them: {sys.executable} -m pip install -r requirements.txt"
    )
