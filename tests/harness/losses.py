"""Losses of a run beside those of transformers alone, to be compared and shown."""

from __future__ import annotations

from typing import NamedTuple


class Losses(NamedTuple):
    """Loss of each step; both lists are equally long."""

    run: list[float]
    plain: list[float]

    @property
    def apart(self) -> list[float]:
        """Difference of each step, as a share of the plain loss."""
        return [abs(own / plain - 1) for own, plain in zip(self.run, self.plain, strict=True)]

    @property
    def furthest(self) -> float:
        """Largest difference of a step, as a share of the plain loss."""
        return max(self.apart)

    def __str__(self) -> str:
        """The largest difference, then a line for each step: a test that fails says both, wherever its log is cut."""
        lines = [f"at most {self.furthest:.2e} apart, in step {self.apart.index(self.furthest) + 1}"]
        each = enumerate(zip(self.run, self.plain, self.apart, strict=True), 1)
        lines += [f"  step {step:2}: {own:.5f} beside {plain:.5f}, {apart:.1e}" for step, (own, plain, apart) in each]
        return "\n".join(lines)
