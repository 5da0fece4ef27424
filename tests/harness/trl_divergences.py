"""Divergences of TRL's DistillationTrainer on drawn hidden states, with gradients: `record` (`bash scripts/parity`).

python -m harness.trl_divergences RESULTS
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from harness.trl_parity import Floats, record_of

BETAS = {"forward": 0.0, "js": 0.5, "reverse": 1.0}
"""Divergence of Mobius -> `beta` of TRL."""
TEMPERATURES = (1.0, 2.0)
SHAPE, VOCAB, STUDENT, TEACHER = (2, 6), 24, 8, 12
"""Rows and positions, tokens, and widths of both models."""


def drawn() -> dict[str, Floats]:
    """Return hidden states [rows, positions, width] and heads [tokens, width] of student and teacher, and a mask."""
    generator = np.random.default_rng(5)
    shapes = {
        "student": (*SHAPE, STUDENT),
        "teacher": (*SHAPE, TEACHER),
        "student_head": (VOCAB, STUDENT),
        "teacher_head": (VOCAB, TEACHER),
    }
    arrays = {name: generator.normal(0, 0.7, shape).astype(np.float32) for name, shape in shapes.items()}
    return {**arrays, "mask": (np.arange(12).reshape(SHAPE) % 5 > 0).astype(np.float32)}


def record(results: Path) -> None:
    """Write each divergence at each temperature, with its gradients by the student's hidden states and head."""
    import torch
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    recorded: dict[str, Any] = {name: importlib.metadata.version(name) for name in ("trl", "torch")}
    for kind, beta in BETAS.items():
        for temperature in TEMPERATURES:
            given = {name: torch.from_numpy(array) for name, array in drawn().items()}
            hidden, head = (given[name].requires_grad_() for name in ("student", "student_head"))
            loss, *_ = _chunked_divergence_loss(
                hidden, given["teacher"], head, given["teacher_head"], given["mask"], beta, temperature=temperature
            )
            loss.backward()
            gradients = {"student": hidden.grad.numpy(), "student_head": head.grad.numpy()}
            recorded[f"{kind} {temperature:g}"] = {"loss": float(loss.detach()), **record_of(gradients)}
    results.write_text(f"{json.dumps(recorded, indent=1)}\n", encoding="utf-8")


if __name__ == "__main__":
    record(Path(sys.argv[1]).resolve())
