"""Loss scale of fp16 training: halved after an overflow, doubled after a long run without one."""

from __future__ import annotations


class LossScaler:
    """Factor on the loss that keeps small gradients representable in fp16; 1 and fixed unless `is_dynamic`.

    Powers of two only, so scaling and unscaling are exact. Constants as in torch.amp.GradScaler, except for a smaller
    start: ten non-finite steps in a row stop a run.
    """

    def __init__(self, *, is_dynamic: bool, initial: float = 2.0**14, growth_interval: int = 2000) -> None:
        self.is_dynamic = is_dynamic
        self._growth_interval = growth_interval
        self._good_steps = 0
        self.value = initial if is_dynamic else 1.0

    @property
    def steps_since_change(self) -> int:
        """Finite steps since the value changed."""
        return self._good_steps

    def restore(self, value: float, steps_since_change: int) -> None:
        """Restore a dynamic scale from a checkpoint; a fixed scale stays as it is."""
        if self.is_dynamic:
            self.value, self._good_steps = value, steps_since_change

    def update(self, *, is_finite: bool) -> None:
        """Adjust the scale to the outcome of a step."""
        if not self.is_dynamic:
            return
        if not is_finite:
            self.value, self._good_steps = max(1.0, self.value / 2), 0
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            self.value, self._good_steps = self.value * 2, 0
