"""Persistent buffers: constants that a family stores among its weights, loaded and saved again unchanged.

They become frozen parameters, so the rest of the program moves them with their layer.
"""

from __future__ import annotations

import re

from torch import nn
from transformers import PreTrainedModel


def freeze_persistent_buffers(model: PreTrainedModel) -> None:
    """Turn the persistent buffers of `model` into frozen parameters, on whatever device they are.

    Exceptions: integer buffers, and those that the family keeps in fp32 for any weight dtype.
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
