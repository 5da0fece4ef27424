"""Models in parts, shared by the runs of this process: to take one apart takes as long as a step or two.

Processes that are forked or started make their own, as a user's run does.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers import PretrainedConfig

from mobius.config.config import Config
from mobius.models.blocks import ModelParts

MOST = 64
rank = threading.local()
"""Its `number` is that of a rank-thread, whose parts no other one may use."""
_MADE: dict[tuple[object, ...], ModelParts] = {}


class SharedParts:
    """In the place of `ModelParts` where a run is drawn."""

    @staticmethod
    def of(config: Config, model: PretrainedConfig, device: torch.device, **more: Any) -> ModelParts:
        """The same as `ModelParts.of`, made once for equal arguments and rank."""
        asked = config.adapters, config.model.matmul_dtype, config.evaluation.do_train
        key = getattr(rank, "number", 0), type(model), str(vars(model)), str(device), *asked, *sorted(more.items())
        if key not in _MADE:
            if len(_MADE) >= MOST:
                _MADE.clear()
            _MADE[key] = ModelParts.of(config, model, device, **more)
        return _MADE[key]
