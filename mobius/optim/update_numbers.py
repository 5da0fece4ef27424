"""The numbers of one AdamW update, which the kernels and torch take alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UpdateNumbers:
    """Numbers of one update of parameters that share one weight decay."""

    step: int
    """Count of this update, from 1."""
    learning_rate: float
    gradient_factor: float
    """Gradients are multiplied by it before use."""
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float

    @property
    def decay(self) -> float:
        """Factor on the master."""
        return 1.0 - self.learning_rate * self.weight_decay

    @property
    def step_size(self) -> float:
        """Learning rate with the bias correction of the first moment."""
        return self.learning_rate / (1.0 - self.beta1**self.step)

    @property
    def root_correction(self) -> float:
        """Divisor of the root of the second moment: its bias correction."""
        return float((1.0 - self.beta2**self.step) ** 0.5)
