"""Numbers from which the schedule of a step is built; a plan is one with the model's layers in it (plan.py)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Self

from mobius.errors import ScheduleError

MAX_COPY_LOOKAHEAD = 8
"""Maximum compute actions that a copy may span; the inputs of this many microbatches stay on the GPU meanwhile."""


class ComputeOrder(StrEnum):
    """Orders of a rank's forwards and backwards; `build.COMPUTE_ORDERS` has the function of each."""

    LOOPED = "looped"
    EVALUATION = "evaluation"
    """No backward: stages only run forward, the last one with its loss."""


@dataclass(frozen=True)
class ScheduleSpec:
    """Ranks, stages and microbatches of a step, and what streams: everything that decides its actions.

    A new number of the schedule is a field here, and is used where actions are built (build.py) and checked (check.py).
    """

    num_ranks: int
    num_stages: int
    """Stages of the model; stage s is on rank s % num_ranks."""
    num_microbatches: int
    slots: tuple[int, ...]
    """GPU slots of each rank for the weights of its streamed stages; 0 if it streams none."""
    resident: frozenset[int] = frozenset()
    """Stages whose full state stays on their GPU, without loads and offloads. All other stages are streamed."""
    accumulation_rounds: int = 1
    """Equal parts of the microbatches that run forward and backward one after the other (gradient accumulation)."""
    num_slices: int = 1
    """Slices per sequence; a microbatch is a slice of some sequences, and `num_microbatches` counts all slices."""
    offloaded_activation_stages: frozenset[int] = frozenset()
    """Stages whose layers' inputs are on the host between forward and backward."""
    num_offloaded_microbatches: int = 0
    """Microbatches per round whose matrix products are offloaded too, and so not recomputed."""
    order: ComputeOrder = ComputeOrder.LOOPED

    @property
    def is_evaluation(self) -> bool:
        return self.order is ComputeOrder.EVALUATION

    @property
    def stages_per_rank(self) -> int:
        return self.num_stages // self.num_ranks

    @property
    def microbatches_per_round(self) -> int:
        """Microbatches of a round: the maximum between forward and backward at a time."""
        return self.num_microbatches // self.accumulation_rounds

    @property
    def num_chunks(self) -> int:
        """Number of groups of complete sequences: the microbatches, unless these are slices."""
        return self.num_microbatches // self.num_slices

    @property
    def last_backward(self) -> int:
        """Microbatch whose backward is last in every stage: the first slice of the last sequences."""
        return self.num_microbatches - self.num_slices

    @property
    def num_slots(self) -> int | None:
        """Maximum number of slots of a rank; None if nothing is streamed."""
        return max(self.slots) or None

    @property
    def copy_lookahead(self) -> int:
        """Number of compute actions that an activation copy may span: the distance of microbatches that offload.

        Copies run one after the other, so a copy may have to wait for an earlier long one.
        """
        number = self.num_offloaded_microbatches
        return min(MAX_COPY_LOOKAHEAD, -(-self.microbatches_per_round // number)) if number else 1

    def offloads_all(self, stage: int, microbatch: int | None) -> bool:
        """Whether a microbatch's products are offloaded, and not only the inputs of the stage's layers."""
        return (
            stage in self.offloaded_activation_stages and microbatch is not None and self.offloads_products(microbatch)
        )

    def offloads_products(self, microbatch: int) -> bool:
        """Whether this is one of the `num_offloaded_microbatches` of its round, which lie evenly in it."""
        size, number = self.microbatches_per_round, self.num_offloaded_microbatches
        place = microbatch % size
        return (place + 1) * number // size > place * number // size

    def rank_of(self, stage: int) -> int:
        """Return the rank that runs `stage`."""
        return stage % self.num_ranks

    def local_stages(self, rank: int) -> range:
        """Return the stages of `rank`, ascending: rank, rank + num_ranks, ..."""
        return range(rank, self.num_stages, self.num_ranks)

    def streamed_stages(self, rank: int) -> list[int]:
        """Return the streamed stages of `rank`, ascending."""
        return [stage for stage in self.local_stages(rank) if stage not in self.resident]

    def offloads_gradient_sums(self, rank: int) -> bool:
        """Whether the rank offloads gradient sums between rounds: not if it has a single streamed stage."""
        return self.accumulation_rounds > 1 and len(self.streamed_stages(rank)) > 1

    def with_rounds(self, rounds: int) -> Self:
        """Spec of a step of `rounds` rounds, each like one of this."""
        return replace(self, accumulation_rounds=rounds, num_microbatches=rounds * self.microbatches_per_round)

    def evaluation(self, num_microbatches: int) -> ScheduleSpec:
        """Spec of an evaluation pass: the same stages, and `num_microbatches` that only run forward."""
        return ScheduleSpec(
            self.num_ranks,
            self.num_stages,
            num_microbatches,
            self.slots,
            self.resident,
            num_slices=self.num_slices,
            order=ComputeOrder.EVALUATION,
        )

    def of_rank(self, rank: int) -> ScheduleSpec:
        """Spec without what concerns only other ranks: the actions of `rank` follow from it."""
        own = {*self.local_stages(rank)}
        values = {field.name: getattr(self, field.name) for field in fields(ScheduleSpec)}
        return ScheduleSpec(
            **values
            | {
                "slots": tuple(number if each == rank else 0 for each, number in enumerate(self.slots)),
                "resident": self.resident & own,
                "offloaded_activation_stages": self.offloaded_activation_stages & own,
            }
        )

    def check_numbers(self) -> None:
        """Raise ScheduleError if a number is below 1, or one does not divide what it must."""
        needed = [slots for rank, slots in enumerate(self.slots) if self.streamed_stages(rank)]
        numbers = {
            "ranks": self.num_ranks,
            "stages per rank (--num_stages / ranks)": self.num_stages // self.num_ranks if self.num_ranks > 0 else 1,
            "microbatches (--num_chunks)": self.num_microbatches,
            "GPU slots": min(needed, default=1),
            "rounds (--num_rounds)": self.accumulation_rounds,
            "slices (--num_slices)": self.num_slices,
        }
        wrong = [f"{number} {what}" for what, number in numbers.items() if number < 1]
        if wrong:
            raise ScheduleError(f"a schedule needs at least 1 of each, it was given {', '.join(wrong)}")
        for whole, what, part, parts in (
            (self.num_stages, "stages", self.num_ranks, "ranks"),
            (self.num_microbatches, "microbatches", self.accumulation_rounds, "rounds"),
            (self.microbatches_per_round, "microbatches of a round", self.num_slices, "slices"),
        ):
            if whole % part:
                raise ScheduleError(f"{whole} {what} are no multiple of {part} {parts}")
        most = self.microbatches_per_round if self.num_slices == 1 else 0
        if not 0 <= self.num_offloaded_microbatches <= most:
            raise ScheduleError(
                f"{self.num_offloaded_microbatches} microbatches of a round offload their products; "
                f"a round has {self.microbatches_per_round}, and slices cannot"
            )
