"""Bytes and seconds of checkpoints in a plan."""

import pytest

from mobius.plan.checkpoint_need import CheckpointNeed

NEED = CheckpointNeed(disk_bytes=1000, rank_bytes=(600, 400), largest_stage=(300, 100), least=(0, 100))


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


def test_ranks_share_by_what_they_have() -> None:
    assert [NEED.room(rank, 1000) for rank in (0, 1)] == [480, 320]


def test_seconds_are_those_of_the_measured_disk_or_told_as_a_usual_ones() -> None:
    assert NEED.seconds(50) == 20
    assert "a save takes about 20 s on this disk" in NEED.describe(2000, 50)
    assert "on a disk of 1 GB/s; beside training where" in NEED.describe(None, None)
    assert "written beside training" in NEED.describe(2000, None)
    assert "steps wait for the disk" in NEED.describe(500, None)
