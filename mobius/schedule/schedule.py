"""Owns the type of a finished schedule: one tuple of actions per rank, and which rank runs which stage.

Does not own how the actions are made (build.py) or what makes them valid (check.py).
"""

from dataclasses import dataclass

from mobius.schedule.action import Action


@dataclass(frozen=True)
class Schedule:
    """One step of all ranks: `actions[rank]` is what that rank does, in order.

    The stages in `resident` keep their weights on the GPU and have no load or offload; the others are streamed through
    `slots[rank]` GPU slots, 0 where a rank has no others. `build_schedule` returns only schedules that passed `check`.
    """

    num_ranks: int
    num_stages: int
    num_microbatches: int
    slots: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    resident: frozenset[int] = frozenset()

    @property
    def num_slots(self) -> int | None:
        """The most slots of a rank; None where nothing is streamed."""
        return max(self.slots) or None

    def rank_of(self, stage: int) -> int:
        """The rank that runs `stage`."""
        return stage % self.num_ranks

    def local_stages(self, rank: int) -> range:
        """The stages of `rank`, ascending: rank, rank + num_ranks, ..."""
        return range(rank, self.num_stages, self.num_ranks)

    def streamed_stages(self, rank: int) -> list[int]:
        """The stages of `rank` whose weights come and go, ascending."""
        return [stage for stage in self.local_stages(rank) if stage not in self.resident]
