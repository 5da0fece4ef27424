"""The grid shows every action, and where a run failed."""

import re

import pytest
from harness.schedules import spec_of

from mobius.schedule.build import build_schedule
from mobius.schedule.render import render_text
from mobius.schedule.schedule import Schedule


def test_the_grid_is_the_one_drawn_by_hand() -> None:
    assert render_text(build_schedule(spec_of(2, 1, 2, 1))).splitlines() == [
        "time       0    1    2    3    4    5    6    7    8    9",
        "rank 0     F0.0 F0.1 .    .    B0.0----- .    B0.1----- .",
        "  load     L0",
        "  offload                                               O0",
        "rank 1     .    F1.0 B1.0----- F1.1 B1.1----- .    .    .",
        "  load     L1",
        "  offload                                     O1",
    ]


def test_every_action_is_in_the_grid_of_its_rank(all_schedules: list[Schedule]) -> None:
    for schedule in all_schedules:
        if schedule.spec.num_microbatches != 5 or schedule.spec.num_ranks == 8:
            continue
        shown: dict[int, str] = dict.fromkeys(range(schedule.spec.num_ranks), "")
        rank = 0
        for line in render_text(schedule, line_width=120).splitlines():
            assert len(line) <= 120
            if match := re.match(r"rank (\d+)", line):
                rank = int(match.group(1))
            if not line.startswith("time"):
                shown[rank] += line[11:] + " "
        for rank, actions in enumerate(schedule.actions):
            names = sorted(str(action) for action in actions if action.kind != "generate_data")
            assert sorted(re.findall(r"[FBLO][\d.]*\d", shown[rank])) == names


def test_the_failed_action_is_marked_in_its_row_and_named_below(small: Schedule) -> None:
    index = [str(action) for action in small.actions[1]].index("B3.1")
    lines = render_text(small, (1, index), line_width=500).splitlines()
    marked = [line for line in lines if line.endswith("<-- ERROR HERE")]
    assert len(marked) == 2
    assert marked[0].startswith("rank 1")
    assert ">B3.1<" in marked[0]
    assert marked[1] == f"rank 1, action {index}: backward_last -1 3 2 1 <-- ERROR HERE"


@pytest.mark.parametrize("name", ["D0", "L2", "O2"])
def test_a_failed_action_that_is_no_compute_is_marked_too(small: Schedule, name: str) -> None:
    index = [str(action) for action in small.actions[0]].index(name)
    text = render_text(small, (0, index))
    assert f">{name}<" in text
    assert text.count("<-- ERROR HERE") == 2


def test_a_failed_batch_is_not_hidden_by_the_first_forward() -> None:
    assert ">D0<" in render_text(build_schedule(spec_of(1, 1, 1, None)), (0, 0))
