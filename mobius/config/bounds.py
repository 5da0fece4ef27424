"""Owns the numbers that options allow, and the names of the usual kinds."""

import math
from dataclasses import dataclass, replace
from typing import Annotated


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers an option allows; `minimum` is allowed, `above` and `below` are not."""

    minimum: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    allows_auto: bool = False
    """Whether the word auto may stand for a number that is chosen later; it is kept as None."""
    ceiling: float = 2.0**31
    """`below` where that is not given: what no machine holds and no run takes, told only to a user who comes so far."""

    def allow(self, value: float) -> bool:
        """Whether `value` is finite and inside; whole numbers may have any number of digits."""
        return value >= self.minimum and value > self.above and -math.inf < value < self._limit

    def demand(self, value: float) -> str:
        """Words for what a `value` that is not allowed must be, as they read in a message."""
        return str(self if value < self._limit else replace(self, below=self._limit))

    @property
    def _limit(self) -> float:
        return self.below if math.isfinite(self.below) else self.ceiling

    def __str__(self) -> str:
        limits = (("at least", self.minimum), ("above", self.above), ("below", self.below))
        return " and ".join(f"{word} {limit:.15g}" for word, limit in limits if math.isfinite(limit))


Count = Annotated[int, Bounds(minimum=1)]
# A plan and a schedule hold every layer, stage, rank and microbatch, and are gone through many times.
LayerCount = Annotated[int, Bounds(minimum=1, ceiling=1025)]
StageCount = Annotated[int, Bounds(minimum=1, ceiling=1025, allows_auto=True)]
ChunkCount = Annotated[int, Bounds(minimum=1, ceiling=10_000, allows_auto=True)]
RoundCount = Annotated[int, Bounds(minimum=1, ceiling=10_000, allows_auto=True)]
SliceCount = Annotated[int, Bounds(minimum=1, ceiling=10_000, allows_auto=True)]
RankCount = Annotated[int, Bounds(minimum=1, ceiling=257)]
Port = Annotated[int, Bounds(minimum=1, below=65_536)]
Seed = Annotated[int, Bounds(minimum=0, below=2**32)]
Positive = Annotated[float, Bounds(above=0)]
NonNegative = Annotated[float, Bounds(minimum=0)]
DecayRate = Annotated[float, Bounds(minimum=0, below=1)]
