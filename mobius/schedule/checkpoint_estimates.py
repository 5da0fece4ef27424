"""Estimates of checkpoints: bytes on the disk, copies in host memory, and seconds of a save."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mobius.limits import largest_shard
from mobius.schedule.memory_layout import MemoryRules
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import Plan
from mobius.units import format_bytes

SPARED_SHARE = 0.2
"""Share of the free host memory that checkpoint copies leave to the page cache and to other programs."""
USUAL_DISK_RATE = 1e9
"""Assumed rate of a disk that was not measured, in bytes per second."""


@dataclass(frozen=True)
class CheckpointEstimate:
    """Bytes of a checkpoint on disk, and of the copies in host memory that are written during the next steps."""

    disk_bytes: int
    rank_bytes: tuple[int, ...]
    """Bytes of the copies of all stages, for each rank."""
    gathered: tuple[int, ...]
    """Additional bytes for each rank of the first replica: the rank's largest stage, gathered from all replicas."""

    def staging_bytes(self, rank: int, free_bytes: float) -> int:
        """Return the bytes that `rank` may use for copies if the machine has `free_bytes` of host memory left."""
        share = self.rank_bytes[rank] / max(1, sum(self.rank_bytes))
        return int(max(0.0, (1 - SPARED_SHARE) * free_bytes - sum(self.gathered)) * share)

    def has_room(self, free_bytes: float) -> bool:
        """Whether all stages can be copied at once, so that no step waits for the disk."""
        return all(own <= self.staging_bytes(rank, free_bytes) for rank, own in enumerate(self.rank_bytes))

    def describe(self, free_bytes: float | None, disk_rate: float | None) -> str:
        """Return a line with bytes, seconds, copies, and whether steps wait.

        `free_bytes` is None if the free memory is not known. `disk_rate` is None if the disk was not measured; then
        `USUAL_DISK_RATE` is assumed.
        """
        seconds = self.disk_bytes / (disk_rate or USUAL_DISK_RATE)
        disk = f"a disk of {USUAL_DISK_RATE / 1e9:g} GB/s"
        if disk_rate is not None:
            disk = f"this disk ({format_bytes(disk_rate)}/s)"
        copies = format_bytes(sum(self.rank_bytes) + sum(self.gathered))
        if free_bytes is None:
            waits = f"written during training if host memory has room for copies of all stages, {copies}"
        elif self.has_room(free_bytes):
            waits = f"written during training ({copies} of host memory for copies)"
        else:
            waits = f"steps wait for the disk meanwhile: copies of all stages need {copies} of host memory"
        return f"checkpoints: {format_bytes(self.disk_bytes)} each; a save takes {seconds:.0f} s on {disk}; {waits}"


def estimate_checkpoint(
    plan: Plan, shape: ModelShape, rules: MemoryRules, *, has_optimizer: bool
) -> CheckpointEstimate:
    """Estimate the checkpoints of `plan`, without small files.

    Each replica copies its shard of trained parameters. The estimate is for the first replica, which writes the files.
    """
    num_replicas = rules.num_replicas

    def state_bytes(trained: int, layers: int, num_owners: int) -> int:
        owners = replace(rules, num_replicas=num_owners)
        own = owners.sizes_of(trained, trained, layers)
        return owners.state_bytes(own.owned, own.reduced) if has_optimizer else 0

    def bytes_of(rank: int, num_owners: int) -> list[int]:
        """Bytes of each of a rank's stages if `num_owners` replicas share the trained parameters."""
        stage_bytes = []
        for cut in (plan.cuts[stage] for stage in plan.local_stages(rank)):
            trained = cut.num_trained(shape)
            frozen = 0 if shape.keeps_trained_on_gpu else cut.num_parameters(shape) - trained
            own = largest_shard(trained, num_owners) * rules.weight
            own += state_bytes(trained, cut.num_trained_in_layers(shape), num_owners)
            stage_bytes.append(frozen * rules.weight + own)
        return stage_bytes

    saved_parameters = shape.num_trained if shape.keeps_trained_on_gpu else shape.num_parameters
    in_layers, ranks = sum(cut.num_trained_in_layers(shape) for cut in plan.cuts), range(plan.num_ranks)
    return CheckpointEstimate(
        disk_bytes=saved_parameters * rules.weight + state_bytes(shape.num_trained, in_layers, 1),
        rank_bytes=tuple(sum(bytes_of(rank, num_replicas)) for rank in ranks),
        gathered=tuple(max(bytes_of(rank, 1)) if num_replicas > 1 else 0 for rank in ranks),
    )
