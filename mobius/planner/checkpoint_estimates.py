"""Estimates of checkpoints: bytes on the disk, copies in host memory, and seconds of a save."""

from __future__ import annotations

from dataclasses import dataclass

from mobius.limits import largest_shard
from mobius.planner.request import PlanRequest
from mobius.schedule.plan import Plan
from mobius.units import format_bytes

SPARED_SHARE = 0.2
"""Share of the free host memory that copies leave to the page cache and to other programs."""
USUAL_DISK_RATE = 1e9
"""Bytes per second of a disk that was not measured."""


@dataclass(frozen=True)
class CheckpointEstimate:
    """Bytes of a checkpoint, and of its copies on each rank, which are written during the next steps."""

    disk_bytes: int
    rank_bytes: tuple[int, ...]
    """Copies of all stages of each rank."""
    largest_stage: tuple[int, ...]
    """The copy of each rank's largest stage."""
    least: tuple[int, ...]
    """Minimum of each rank: a stage on a GPU is written from a copy, and then every stage of the rank is."""
    gathered: tuple[int, ...]
    """Further bytes: a whole stage, which each rank of the first replica gathers from all replicas."""

    def staging_bytes(self, rank: int, free_bytes: float) -> int:
        """Return the bytes that `rank` may use for copies if the machine has `free_bytes` of host memory left."""
        share = self.rank_bytes[rank] / max(1, sum(self.rank_bytes))
        return int(max(0.0, (1 - SPARED_SHARE) * free_bytes - sum(self.gathered)) * share)

    def host_bytes(self, free_bytes: float) -> int:
        """Return the host memory of all ranks' copies and gathered stages."""
        taken = sum(self.gathered)
        for rank, (own, largest) in enumerate(zip(self.rank_bytes, self.largest_stage, strict=True)):
            staging_bytes = self.staging_bytes(rank, free_bytes)
            taken += own if own <= staging_bytes else max(self.least[rank], staging_bytes // largest * largest)
        return taken

    def has_room(self, free_bytes: float) -> bool:
        """Whether all stages can be copied at once, so that no step waits for the disk."""
        return all(own <= self.staging_bytes(rank, free_bytes) for rank, own in enumerate(self.rank_bytes))

    def describe(self, free_bytes: float | None, disk_rate: float | None) -> str:
        """Return a line with bytes, seconds, copies, and whether steps wait.

        None: the free memory is not known, or the disk was not measured and counts as `USUAL_DISK_RATE`.
        """
        seconds = self.disk_bytes / (disk_rate or USUAL_DISK_RATE)
        text = f"checkpoints: {format_bytes(self.disk_bytes)} each; a save takes "
        if disk_rate is None:
            text += f"{seconds:.0f} s on a disk of {USUAL_DISK_RATE / 1e9:g} GB/s"
        else:
            text += f"about {seconds:.0f} s on this disk ({format_bytes(int(disk_rate))}/s)"
        every = format_bytes(sum(self.rank_bytes))
        if free_bytes is None:
            return f"{text}; written during training if host memory has room for copies of all stages, {every}"
        taken = format_bytes(self.host_bytes(free_bytes))
        if self.has_room(free_bytes):
            return f"{text}; written during training ({taken} of host memory for copies)"
        return (
            f"{text}; steps wait for the disk meanwhile: copies of all stages need {every} of host memory, {taken} are "
            "taken"
        )


def estimate_checkpoint(request: PlanRequest, plan: Plan, *, has_optimizer: bool) -> CheckpointEstimate:
    """Estimate the checkpoints of `plan` without small files.

    Each replica copies its shard of trained parameters. The estimate is for the first replica, which writes.
    """
    sizes, num_replicas = request.sizes, request.machine.num_replicas
    shape, per_trained = request.shape, sizes.per_optimizer if has_optimizer else 0
    on_gpu = frozenset(range(plan.num_stages)) if shape.keeps_trained_on_gpu else plan.resident
    on_gpu = frozenset() if request.machine.on_cpu else on_gpu

    def bytes_of(rank: int, num_owners: int) -> dict[int, int]:
        """Bytes of a rank by stage if `num_owners` share trained parameters."""
        stage_bytes = {}
        for cut in (plan.cuts[stage] for stage in plan.local_stages(rank)):
            trained = cut.num_trained(shape)
            frozen = 0 if shape.keeps_trained_on_gpu else cut.num_parameters(shape) - trained
            own = largest_shard(trained, num_owners) * (sizes.weight + per_trained)
            stage_bytes[cut.stage] = frozen * sizes.weight + own
        return stage_bytes

    copies = [bytes_of(rank, num_replicas) for rank in range(plan.num_ranks)]
    saved_parameters = shape.num_trained if shape.keeps_trained_on_gpu else shape.num_parameters
    return CheckpointEstimate(
        disk_bytes=saved_parameters * sizes.weight + shape.num_trained * per_trained,
        rank_bytes=tuple(sum(own.values()) for own in copies),
        largest_stage=tuple(max(1, *own.values()) for own in copies),
        least=tuple(max(own.values()) if own.keys() & on_gpu else 0 for own in copies),
        gathered=tuple(max(bytes_of(rank, 1).values()) if num_replicas > 1 else 0 for rank in range(plan.num_ranks)),
    )
