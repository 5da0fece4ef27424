"""Numbers from which the schedule of a step is built. A plan (plan.py) adds the model's layers to them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Self

from mobius.errors import ScheduleError
from mobius.limits import MIN_GRADIENT_SUMS, max_sends_in_flight
from mobius.schedule.action import Action, Direction, source_stage, target_stage
from mobius.schedule.memory_layout import RankUse

MAX_COPY_LOOKAHEAD = 8
"""Maximum number of compute actions during a copy; inputs of as many microbatches stay on the GPU meanwhile."""


class ComputeOrder(StrEnum):
    """Orders of a rank's forwards and backwards; `build.COMPUTE_ORDERS` has the function of each."""

    BREADTH_FIRST = "breadth_first"
    """All microbatches of a round in a stage, then the rank's next stage; a round ends before the next one begins."""
    DEPTH_FIRST = "depth_first"
    """Interleaved 1F1B: each microbatch goes backward as soon as it can, and rounds overlap."""
    EVALUATION = "evaluation"
    """Forward only; the last stage also computes the loss."""


@dataclass(frozen=True)
class ScheduleSpec:
    """Numbers of ranks, stages, microbatches and copies in a step: everything that determines the step's actions.

    A new number of the schedule becomes a field here; build.py and check.py use it.
    """

    num_ranks: int
    num_stages: int
    """Stages of the model; stage s is on rank s % num_ranks."""
    num_microbatches: int
    slots: tuple[int, ...]
    """GPU slots of each rank for the weights of streamed stages; 0 for a rank without streamed stages.

    If each streamed stage has a slot, weights are loaded once per step.
    """
    resident: frozenset[int] = frozenset()
    """Stages whose training state stays on their GPU, without loads and offloads. All other stages are streamed."""
    num_rounds: int = 1
    """Number of equal groups of microbatches; groups run forward and backward in turn (gradient accumulation)."""
    num_slices: int = 1
    """Slices per sequence; a microbatch is a slice of some sequences, and `num_microbatches` counts all slices."""
    offloaded_activation_stages: frozenset[int] = frozenset()
    """Stages that offload the inputs of their layers to the host between forward and backward."""
    num_offloaded_microbatches: int = 0
    """Microbatches per round whose matrix products are also offloaded, so that they are not recomputed."""
    order: ComputeOrder = ComputeOrder.BREADTH_FIRST
    sum_buffers: tuple[int, ...] = ()
    """Number of each rank's GPU buffers for gradient sums of streamed stages; empty or 0: the minimum.

    If each streamed stage has a buffer, unfinished sums stay on the GPU.
    """
    spreads_head: bool = False
    """Whether all ranks share norm, head and loss: rank m % num_ranks computes them for microbatch m.

    Norm, head and loss then count as an additional stage with the number `num_stages`.
    """

    @property
    def chain_length(self) -> int:
        """Number of stages through which a microbatch goes; a head that ranks share counts as a stage."""
        return self.num_stages + self.spreads_head

    @property
    def is_evaluation(self) -> bool:
        return self.order is ComputeOrder.EVALUATION

    @property
    def is_depth_first(self) -> bool:
        return self.order is ComputeOrder.DEPTH_FIRST

    @property
    def stages_per_rank(self) -> int:
        return self.num_stages // self.num_ranks

    @property
    def microbatches_per_round(self) -> int:
        """Microbatches per round; in breadth-first order, also the maximum in a stage between forward and backward."""
        return self.num_microbatches // self.num_rounds

    @property
    def max_sends_in_flight(self) -> int:
        """Maximum number of sent messages that a rank retains (`limits.max_sends_in_flight`)."""
        per_turn = 2 if self.is_depth_first else 1
        return max_sends_in_flight(per_turn * self.microbatches_per_round)

    @property
    def num_chunks(self) -> int:
        """Number of groups of complete sequences; without slices, the number of microbatches."""
        return self.num_microbatches // self.num_slices

    @property
    def last_backward(self) -> int:
        """Microbatch whose backward is last in every stage: the first slice of the last sequences."""
        return self.num_microbatches - self.num_slices

    @property
    def num_slots(self) -> int | None:
        """Maximum number of slots of a rank; None if no stage is streamed."""
        return max(self.slots) or None

    @property
    def has_partial_sums(self) -> bool:
        """Whether several stages of a rank have unfinished gradient sums at the same time."""
        return self.num_rounds > 1 or self.is_depth_first

    def num_sum_buffers(self, rank: int) -> int:
        """Number of GPU buffers for the unfinished gradient sums of a rank's streamed stages."""
        if not self.has_partial_sums:
            return 1
        given = self.sum_buffers[rank] if self.sum_buffers else 0
        return min(max(given, MIN_GRADIENT_SUMS), len(self.streamed_stages(rank)))

    def rank_use(self, rank: int) -> RankUse:
        """Return how the stages of `rank` use its memory."""
        return RankUse(self.resident, self.slots[rank], self.num_sum_buffers(rank), self.has_partial_sums)

    @property
    def copy_lookahead(self) -> int:
        """Maximum number of compute actions during a copy of activations.

        It is the distance between two microbatches that offload products: copies run one after the other, so a copy may
        have to wait for an earlier, long copy. In depth-first order, every second action has the other direction.
        """
        number, turn = self.num_offloaded_microbatches, 2 if self.is_depth_first else 1
        return min(MAX_COPY_LOOKAHEAD, turn * -(-self.microbatches_per_round // number)) if number else turn

    def offloads_all(self, stage: int, microbatch: int | None) -> bool:
        """Whether a microbatch's products are offloaded in `stage`, in addition to the inputs of its layers."""
        return (
            stage in self.offloaded_activation_stages and microbatch is not None and self.offloads_products(microbatch)
        )

    def offloads_products(self, microbatch: int) -> bool:
        """Whether `microbatch` is one of the `num_offloaded_microbatches`, which are spread evenly over its round."""
        size, number = self.microbatches_per_round, self.num_offloaded_microbatches
        place = microbatch % size
        return (place + 1) * number // size > place * number // size

    def rank_of(self, stage: int, microbatch: int | None = None) -> int:
        """Return the rank that runs `stage`; for a shared head, the rank that computes the head for `microbatch`."""
        return (microbatch or 0) % self.num_ranks if stage == self.num_stages else stage % self.num_ranks

    def head_microbatches(self, rank: int) -> range:
        """Return the microbatches whose norm, head and loss `rank` computes; empty if the head is not shared."""
        return range(rank, self.num_microbatches, self.num_ranks) if self.spreads_head else range(0)

    def source_of(self, action: Action) -> tuple[int, int, Direction] | None:
        """Return stage and rank that send the message of `action`, and the message's queue; None without a message.

        The last stage and the head exchange no message if both are on one rank.
        """
        return self._end_of(action, source_stage(action, self.chain_length))

    def target_of(self, action: Action) -> tuple[int, int, Direction] | None:
        """Return stage and rank that receive the result of `action`, and the queue; None as in `source_of`."""
        return self._end_of(action, target_stage(action, self.chain_length))

    def _end_of(self, action: Action, stage: int | None) -> tuple[int, int, Direction] | None:
        if stage is None:
            return None
        rank = self.rank_of(stage, action.microbatch)
        if max(stage, action.stage) < self.num_stages:
            return stage, rank, action.kind.direction
        return None if rank == self.rank_of(action.stage, action.microbatch) else (stage, rank, Direction.HEAD)

    def local_stages(self, rank: int) -> range:
        """Return the stages of `rank`, ascending: rank, rank + num_ranks, ..."""
        return range(rank, self.num_stages, self.num_ranks)

    def streamed_stages(self, rank: int) -> list[int]:
        """Return the streamed stages of `rank`, ascending."""
        return [stage for stage in self.local_stages(rank) if stage not in self.resident]

    def offloads_gradient_sums(self, rank: int) -> bool:
        """Whether the rank offloads unfinished gradient sums, because it has fewer buffers than streamed stages."""
        return self.rank_use(rank).offloads_sums(len(self.streamed_stages(rank)))

    def with_rounds(self, rounds: int) -> Self:
        """Return the spec of a step with `rounds` rounds, each like a round of this spec."""
        return replace(self, num_rounds=rounds, num_microbatches=rounds * self.microbatches_per_round)

    def evaluation(self, num_microbatches: int) -> ScheduleSpec:
        """Return the spec of an evaluation pass: the same stages, and `num_microbatches` that only run forward.

        Nothing is offloaded, but each microbatch of a round is computed as in a step (`StageModule.run`).
        """
        offloaded = self.num_offloaded_microbatches * num_microbatches // self.microbatches_per_round
        return ScheduleSpec(
            self.num_ranks,
            self.num_stages,
            num_microbatches,
            self.slots,
            self.resident,
            num_slices=self.num_slices,
            offloaded_activation_stages=self.offloaded_activation_stages,
            num_offloaded_microbatches=offloaded,
            order=ComputeOrder.EVALUATION,
        )

    def of_rank(self, rank: int) -> ScheduleSpec:
        """Return a spec with only the numbers that determine the actions of `rank`, for use as a key of a cache."""
        own = {*self.local_stages(rank)}
        ranks = range(self.num_ranks)
        values = {field.name: getattr(self, field.name) for field in fields(ScheduleSpec)}
        return ScheduleSpec(
            **values
            | {
                "slots": tuple(number if each == rank else 0 for each, number in enumerate(self.slots)),
                "sum_buffers": tuple(self.num_sum_buffers(rank) if each == rank else 0 for each in ranks),
                "resident": self.resident & own,
                "offloaded_activation_stages": self.offloaded_activation_stages & own,
            }
        )

    def check_numbers(self) -> None:
        """Raise ScheduleError if a number is below 1, or if ranks, rounds or slices do not divide evenly."""
        needed = [slots for rank, slots in enumerate(self.slots) if self.streamed_stages(rank)]
        numbers = {
            "ranks": self.num_ranks,
            "stages per rank (--num_stages / ranks)": self.num_stages // self.num_ranks if self.num_ranks > 0 else 1,
            "microbatches (--num_chunks)": self.num_microbatches,
            "GPU slots": min(needed, default=1),
            "rounds (--num_rounds)": self.num_rounds,
            "slices (--num_slices)": self.num_slices,
        }
        wrong = [f"{number} {what}" for what, number in numbers.items() if number < 1]
        if wrong:
            raise ScheduleError(f"a schedule needs at least 1 of each, but it has {', '.join(wrong)}")
        for whole, what, part, parts in (
            (self.num_stages, "stages", self.num_ranks, "ranks"),
            (self.num_microbatches, "microbatches", self.num_rounds, "rounds"),
            (self.microbatches_per_round, "microbatches of a round", self.num_slices, "slices"),
        ):
            if whole % part:
                raise ScheduleError(f"{whole} {what} are not a multiple of {part} {parts}")
        self._check_depth_first()
        if self.spreads_head and not (self.is_depth_first and 1 < self.num_ranks <= self.num_microbatches):
            raise ScheduleError(
                f"{self.num_ranks} ranks share the head (--spread_head) of {self.num_microbatches} microbatches in "
                f"{self.order.value} order: use several ranks, a depth-first order, and at least one microbatch for "
                "each rank (--num_chunks)"
            )
        most = self.microbatches_per_round if self.num_slices == 1 else 0
        if not 0 <= self.num_offloaded_microbatches <= most:
            raise ScheduleError(
                f"{self.num_offloaded_microbatches} microbatches of a round offload their products, but "
                f"a round has {self.microbatches_per_round}, and slices cannot offload products"
            )

    def _check_depth_first(self) -> None:
        """Raise ScheduleError for numbers that are impossible in interleaved 1F1B, where a rank's stages take turns."""
        if not self.is_depth_first:
            return
        if self.num_slices > 1:
            raise ScheduleError("a depth-first order has no slices: use breadth-first")
        if self.stages_per_rank > 1 and self.microbatches_per_round < self.num_ranks:
            raise ScheduleError(
                f"a round has {self.microbatches_per_round} microbatches, but depth-first stages need one for each of "
                f"{self.num_ranks} ranks: use fewer rounds or more microbatches"
            )
        for rank, slots in enumerate(self.slots):
            if slots != len(self.streamed_stages(rank)):
                raise ScheduleError(
                    f"rank {rank} has {slots} GPU slots for {len(self.streamed_stages(rank))} streamed stages; in a "
                    "depth-first order each of these stages needs a slot"
                )
