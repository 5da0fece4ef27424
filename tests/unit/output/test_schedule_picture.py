"""The picture of a schedule names every action, and the same schedule gives the same bytes."""

from pathlib import Path

import pytest

from mobius.errors import ConfigError
from mobius.output.schedule_picture import draw_schedule
from mobius.schedule import build_schedule


def test_the_svg_names_every_action(tmp_path: Path) -> None:
    schedule = build_schedule(2, 3, 2, 2)
    draw_schedule(schedule, tmp_path / "schedule.svg")
    svg = (tmp_path / "schedule.svg").read_text()
    for actions in schedule.actions:
        for action in actions[1:]:
            assert f">{action}<" in svg
    assert "GPU 1" in svg


def test_the_same_schedule_gives_the_same_svg(tmp_path: Path) -> None:
    draw_schedule(build_schedule(2, 2, 2, 2), tmp_path / "one.svg")
    draw_schedule(build_schedule(2, 2, 2, 2), tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_the_png_is_a_png(tmp_path: Path) -> None:
    draw_schedule(build_schedule(1, 1, 1, None), tmp_path / "schedule.PNG")
    assert (tmp_path / "schedule.PNG").read_bytes().startswith(b"\x89PNG")


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in \.png or \.svg"):
        draw_schedule(build_schedule(2, 2, 2, 2), tmp_path / "schedule.jpg")
