"""Bytes and seconds of checkpoints in a plan."""

from dataclasses import replace

import pytest
from harness.plan_requests import find_published_shape, request_of

from mobius.planner.checkpoint_estimates import CheckpointEstimate, estimate_checkpoint
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.request import Machine

NEED = CheckpointEstimate(
    disk_bytes=1000, rank_bytes=(600, 400), largest_stage=(300, 100), least=(0, 100), gathered=(0, 0)
)


@pytest.mark.parametrize(
    ("free", "has_room", "taken"),
    [
        (1250, True, 1000),  # a fifth is left alone
        (1249, False, 300 + 300),
        (700, False, 300 + 200),
        (300, False, 0 + 100),  # the second rank has a stage on a GPU, which is written from a copy
        (-50, False, 0 + 100),
    ],
)
def test_copies_take_what_is_free_in_whole_stages(free: float, has_room: bool, taken: int) -> None:
    assert NEED.has_room(free) is has_room
    assert NEED.host_bytes(free) == taken


def test_a_rank_with_a_stage_on_a_gpu_takes_a_buffer_that_any_of_its_stages_fits_in() -> None:
    """All of its stages go through it; the head's is the largest one of the last rank, and is streamed."""
    request = request_of(find_published_shape("7b"), num_stages=8)
    plan = replace(request.plan, resident=frozenset([3]))
    sizes = [12 * cut.num_parameters(request.shape) for cut in plan.cuts]
    need = estimate_checkpoint(request, plan, has_optimizer=True)
    assert sizes[3] < sizes[7]
    assert need.least == (0, 0, 0, sizes[7])
    assert need.host_bytes(0) == sizes[7]


def test_replicas_copy_their_parts_and_the_first_one_puts_a_stage_together() -> None:
    shape = find_published_shape("7b")
    request = request_of(shape, Machine(4, GPU_SPECS["RTX4090"], num_replicas=2, num_nodes=2), num_stages=8)
    need = estimate_checkpoint(request, request.plan, has_optimizer=True)
    sizes = [12 * cut.num_parameters(shape) for cut in request.plan.cuts]
    assert need.disk_bytes == 12 * shape.num_parameters
    assert need.rank_bytes == tuple((sizes[rank] + sizes[rank + 4]) // 2 for rank in range(4))
    assert need.gathered == tuple(max(sizes[rank], sizes[rank + 4]) for rank in range(4))
    most = sum(need.rank_bytes) + sum(need.gathered)
    assert need.host_bytes(2 * most) == most
    assert not need.has_room(1.25 * sum(need.rank_bytes))  # what is gathered comes on top
