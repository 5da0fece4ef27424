"""What a plan is fitted to: the memory, and what was asked for. Knows no arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from mobius.config.config import Recompute
from mobius.plan.budget import ByteSizes, StepTokens
from mobius.plan.plan import Plan
from mobius.plan.shape import ModelShape


@dataclass(frozen=True)
class FitRequest:
    """What a plan is fitted to."""

    plan: Plan
    """All streamed, or with `num_slots` None all resident."""
    shape: ModelShape
    sizes: ByteSizes
    tokens: StepTokens
    gpu_bytes: int | None
    """What a rank may use; None where that is unknown, on a CPU."""
    recompute: Recompute
    num_resident: int | None = None
    """Resident stages of each rank; None leaves it to the memory."""
    waiting: frozenset[int] = frozenset()
    """Stages that keep their gradients (`budget.waiting_stages`)."""
    reserved_bytes: int = 0
    """Left for what is not in the plan."""
    compiled: bool = True
    """Whether layers and loss run as compiled graphs."""
