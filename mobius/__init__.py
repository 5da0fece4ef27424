"""Mobius fine-tunes all parameters of a large language model on one node with a few memory-limited GPUs.

Importing this package imports none of its modules: `finetune`, `plan` and their result types load at first use
(`__init__.pyi` has their types).
"""

import importlib
from typing import Any

__version__ = "0.2.0"
__all__ = ["Forecast", "Result", "__version__", "finetune", "plan"]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "mobius.planner.forecast" if name == "Forecast" else "mobius.api"
    return getattr(importlib.import_module(module), name)
