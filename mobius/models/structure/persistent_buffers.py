"""Constants that a family stores among its weights: they are read, kept as they are, and saved again with them.

To the rest of the program they are parameters that are not trained, so they move with their layer.
"""

from __future__ import annotations

import re

from torch import nn
from transformers import PreTrainedModel


def freeze_persistent_buffers(model: PreTrainedModel) -> None:
    """Make parameters without gradients of the buffers that `model` stores, whatever device they are on.

    Left as they are: whole numbers, and what the family keeps in fp32 whatever format its weights have.
    """
    stored = model.state_dict().keys()
    in_fp32 = [
        *(getattr(model, "_keep_in_fp32_modules", None) or ()),
        *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()),
    ]
    wide = re.compile("|".join(rf"(^|\.){re.escape(name)}($|\.)" for name in in_fp32) or "(?!)")
    for path, module in model.named_modules():
        for local, buffer in list(module.named_buffers(recurse=False)):
            name = f"{path}.{local}" if path else local
            if name in stored and buffer.is_floating_point() and not wide.search(name):
                del module._buffers[local]
                module.register_parameter(local, nn.Parameter(buffer.detach(), requires_grad=False))
