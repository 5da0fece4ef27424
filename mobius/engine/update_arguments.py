"""Arguments of one AdamW update, shared by the kernels and torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UpdateArguments:
    """Arguments of one update of parameters that share one weight decay."""

    step: int
    """Number of this update, from 1."""
    learning_rate: float
    gradient_factor: float
    """Factor that multiplies gradients before use."""
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float

    def constants(self) -> dict[str, float]:
        """Return the constants that the kernels (adamw.c, triton_adamw.py) take, by name."""
        constants = {
            "gradient_factor": self.gradient_factor,
            "decay": 1.0 - self.learning_rate * self.weight_decay,
            "beta2": self.beta2,
            "one_minus_beta1": 1.0 - self.beta1,
            "one_minus_beta2": 1.0 - self.beta2,
            "step_size": self.learning_rate / (1.0 - self.beta1**self.step),
            "root_correction": (1.0 - self.beta2**self.step) ** 0.5,
            "epsilon": self.epsilon,
        }
        return {name: float(value) for name, value in constants.items()}  # Triton would compile another kernel for int
