"""Bytes and seconds of checkpoints in a plan."""

import pytest
from harness.plan_requests import find_published_shape, request_of

from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.request import Machine
from mobius.schedule.checkpoint_estimates import CheckpointEstimate, estimate_checkpoint

NEED = CheckpointEstimate(disk_bytes=1000, rank_bytes=(600, 400), gathered=(0, 0))


@pytest.mark.parametrize(
    ("free", "has_room", "taken"), [(1250, True, [600, 400]), (1000, False, [480, 320]), (-50, False, [0, 0])]
)
def test_copies_leave_a_fifth_of_what_is_free_alone(free: float, has_room: bool, taken: list[int]) -> None:
    assert NEED.has_room(free) is has_room
    assert [NEED.staging_bytes(rank, free) for rank in range(2)] == taken
    assert ("steps wait for the disk" in NEED.describe(free, None)) is not has_room
    assert "1000 bytes of host memory" in NEED.describe(free, None)


def test_replicas_copy_their_parts_and_the_first_one_puts_a_stage_together() -> None:
    shape = find_published_shape("7b")
    request = request_of(shape, Machine(4, GPU_SPECS["RTX4090"], num_replicas=2, num_nodes=2), num_stages=8)
    need = estimate_checkpoint(request.plan, shape, request.memory_rules, has_optimizer=True)
    sizes = [12 * cut.num_parameters(shape) for cut in request.plan.cuts]
    assert need.disk_bytes == 12 * shape.num_parameters
    assert need.rank_bytes == tuple((sizes[rank] + sizes[rank + 4]) // 2 for rank in range(4))
    assert need.gathered == tuple(max(sizes[rank], sizes[rank + 4]) for rank in range(4))
    most = sum(need.rank_bytes) + sum(need.gathered)
    assert need.has_room(2 * most)
    assert not need.has_room(1.25 * sum(need.rank_bytes))  # what is gathered comes on top
