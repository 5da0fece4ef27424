"""Activations that a stage keeps between the forward and the backward of a microbatch."""

from __future__ import annotations

from mobius.runtime.stage import Kept


class Stash:
    """Layer inputs or graphs keyed (stage, microbatch); an entry is taken exactly once."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], list[Kept]] = {}

    def put(self, stage: int, microbatch: int, tensors: list[Kept]) -> None:
        """Keep `tensors` until `take`; the stash owns the list from now on."""
        assert (stage, microbatch) not in self._entries, f"stage {stage}, microbatch {microbatch} is stashed already"
        self._entries[stage, microbatch] = tensors

    def take(self, stage: int, microbatch: int) -> list[Kept]:
        """Hand the entry over; the caller now owns it."""
        return self._entries.pop((stage, microbatch))

    def clear(self) -> None:
        """Drop everything, after an error."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
