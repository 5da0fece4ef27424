"""Pictures name every action, show every curve, and the same input gives the same bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib.image
import pytest
from harness.schedules import spec_of

from mobius.errors import ConfigError
from mobius.reporting.pictures import draw_schedule, draw_timeline, draw_training, smoothed
from mobius.reporting.trace import Trace, TraceFacts
from mobius.schedule.build import build_schedule
from mobius.schedule.lanes import Lane, LaneSpan
from mobius.schedule.render import place_actions
from mobius.schedule.schedule import Schedule


def measured(schedule: Schedule, device: str = "NVIDIA H200") -> Trace:
    """A step that went as predicted, a slot being 10 ms, and then the updates."""
    ranks = []
    for rank, spans in enumerate(place_actions(schedule)):
        end = max(span.end for span in spans)
        own = [LaneSpan(Lane.STEP, "step 4", 4, 0, (end + 10) / 100)]
        own += [LaneSpan(s.lane, str(s.action), 4, s.start / 100, s.end / 100) for s in spans]
        own += [
            LaneSpan(Lane.OPTIMIZER, f"U{stage}", 4, (end + index) / 100, (end + index + 1) / 100)
            for index, stage in enumerate(schedule.spec.local_stages(rank))
        ]
        ranks.append(tuple(own))
    facts = TraceFacts(
        schedule.spec.num_ranks,
        schedule.spec.num_stages,
        schedule.spec.num_microbatches,
        schedule.spec.num_slots,
        device,
    )
    return Trace(facts, tuple(ranks))


def drawn(trace: Trace, folder: Path) -> str:
    draw_timeline(trace, folder / "timeline.svg")
    return (folder / "timeline.svg").read_text()


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> tuple[Schedule, str, str]:
    """A schedule, its predicted picture and that of a step that went as predicted."""
    schedule, folder = build_schedule(spec_of(2, 3, 2, 2)), tmp_path_factory.mktemp("step")
    draw_schedule(schedule, folder / "predicted.svg")
    return schedule, (folder / "predicted.svg").read_text(), drawn(measured(schedule), folder)


def test_every_action_and_every_update_is_named(step: tuple[Schedule, str, str]) -> None:
    schedule, predicted, svg = step
    for actions in schedule.actions:
        assert all(f">{action}<" in predicted for action in actions[1:])
        for action in actions:
            if action.kind.is_forward_or_backward or action.kind == "load":
                assert f">{action}<" in svg
    for stage in range(6):
        assert f">U{stage}<" in svg
        # Sending gradients home takes time; giving up a slot does not, and is not drawn.
        assert f">O{stage}<" in svg
    assert "GPU 1" in svg
    assert "GPU 1" in predicted
    assert "2 weight slots per GPU" in svg


def test_where_bars_are_too_narrow_their_stage_is_named_once(tmp_path: Path) -> None:
    svg = drawn(measured(build_schedule(spec_of(1, 16, 16, 2))), tmp_path)
    assert ">F6.3<" not in svg
    assert svg.count(">F6<") == 1
    assert svg.count(">B6<") == 1


def test_it_has_the_colours_of_the_predicted_picture(step: tuple[Schedule, str, str]) -> None:
    predicted, own = (set(re.findall(r"fill: (#[0-9a-f]{6})", svg)) for svg in step[1:])
    assert predicted <= own
    assert len(own - predicted) == 1, "that of the updates"


def test_only_what_was_recorded_has_a_lane_and_a_place_in_the_legend(tmp_path: Path) -> None:
    svg = drawn(measured(build_schedule(spec_of(1, 2, 2, None))), tmp_path)
    assert "load weights" not in svg
    assert "waits for" not in svg
    assert "all weights on the GPU" in svg


def test_waits_are_told_by_their_cause(tmp_path: Path) -> None:
    trace = measured(build_schedule(spec_of(1, 2, 2, 1)))
    wait = LaneSpan(Lane.WAIT, "weights", 4, 0.0, 0.02)
    svg = drawn(Trace(trace.facts, ((*trace.spans[0], wait),)), tmp_path)
    assert "waits for weights" in svg
    assert "waits for neighbours" not in svg


def test_the_share_of_time_that_a_rank_computed_stands_beside_it(tmp_path: Path) -> None:
    spans = (
        LaneSpan(Lane.STEP, "step 1", 1, 0.0, 0.100),
        LaneSpan(Lane.COMPUTE, "F0.0", 1, 0.010, 0.035),
        LaneSpan(Lane.COMPUTE, "B0.0", 1, 0.050, 0.100),
    )
    svg = drawn(Trace(TraceFacts(1, 1, 1, None, "cpu"), (spans,)), tmp_path)
    assert "busy 75 %" in svg
    assert "rank 0" in svg
    assert "GPU" not in svg


def test_pngs_are_pngs_and_the_same_input_gives_the_same_svg(tmp_path: Path) -> None:
    schedule = build_schedule(spec_of(1, 2, 1, 1))
    draw_timeline(measured(schedule), tmp_path / "timeline.png", step=4)
    for name in ("schedule.PNG", "one.svg", "two.svg"):
        draw_schedule(schedule, tmp_path / name)
    for name in ("timeline.png", "schedule.PNG"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert drawn(measured(schedule), tmp_path) == drawn(measured(schedule), tmp_path)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_a_step_in_which_nothing_computed_is_drawn_empty(tmp_path: Path) -> None:
    spans = (LaneSpan(Lane.STEP, "step 1", 1, 0.0, 0.1),)
    assert "busy 0 %" in drawn(Trace(TraceFacts(1, 1, 1, None, "cpu"), (spans,)), tmp_path)


def test_another_suffix_and_another_step_are_refused(tmp_path: Path) -> None:
    schedule = build_schedule(spec_of(1, 1, 1, None))
    with pytest.raises(ConfigError, match=r"ends in \.png or \.svg"):
        draw_timeline(measured(schedule), tmp_path / "timeline.pdf")
    with pytest.raises(ConfigError, match="not step 5"):
        draw_timeline(measured(schedule), tmp_path / "timeline.png", step=5)
    with pytest.raises(ConfigError, match=r"ends in \.png or \.svg"):
        draw_schedule(schedule, tmp_path / "schedule.jpg")


def entry(step: int, loss: object) -> dict[str, object]:
    return {"step": step, "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-5, "tokens_per_second": 100.0}


def dark_pixels(path: Path) -> int:
    return int((matplotlib.image.imread(path)[:, :, :3].min(axis=2) < 0.75).sum())


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Dark pixels of a picture without a curve."""
    path = tmp_path_factory.mktemp("empty") / "empty.png"
    draw_training([], path, title="a $ b")
    return dark_pixels(path)


@pytest.mark.parametrize(
    "history",
    [
        [entry(step, 3 / step) for step in range(1, 50)],
        [entry(1, 2.0)],
        [entry(1, 2.0), entry(2, "nan"), entry(3, math.inf), {"step": 2, "train_runtime": 3.0}],
    ],
    ids=["many", "one", "not finite"],
)
def test_every_history_is_drawn(tmp_path: Path, history: Sequence[dict[str, object]], empty: int) -> None:
    draw_training(history, tmp_path / "loss.png", title="a $ b")

    assert dark_pixels(tmp_path / "loss.png") > empty


def test_an_evaluation_is_a_curve_of_its_own(tmp_path: Path) -> None:
    history = [entry(step, 3.0) for step in range(1, 9)]
    draw_training(history, tmp_path / "without.png", title="")
    draw_training(
        [*history, {"step": 4, "eval_loss": 2.0}, {"step": 8, "eval_loss": 1.0}], tmp_path / "w.png", title=""
    )

    def red(path: Path) -> int:
        image = matplotlib.image.imread(path)
        return int(((image[:, :, 0] > 0.7) & (image[:, :, 1] < 0.4)).sum())

    assert red(tmp_path / "without.png") == 0
    assert red(tmp_path / "w.png") > 50


def test_smoothing_is_a_mean_that_weighs_older_values_less() -> None:
    assert smoothed([5.0] * 60) == pytest.approx([5.0] * 60)
    assert smoothed([1.0, 9.0]) == [1.0, 9.0], "so few are not smoothed"
    steps = smoothed([0.0] * 40 + [1.0] * 40)  # keeps 3/4 of the older sum, from 4 = 80 / 20
    assert steps[40] == pytest.approx(0.25, abs=1e-3)
    assert steps[41] == pytest.approx(1 - 0.75**2, abs=1e-3)


def test_a_loss_that_is_no_number_does_not_end_the_smoothed_curve(tmp_path: Path) -> None:
    history = [entry(step, "nan" if step == 3 else 60.0 - step) for step in range(1, 61)]
    draw_training(history, tmp_path / "loss.png", title="")

    image = matplotlib.image.imread(tmp_path / "loss.png")
    height, width = image.shape[:2]
    late_losses = image[: height // 2, width * 3 // 10 : width // 2, :3]
    is_full_blue = abs(late_losses - [31 / 255, 119 / 255, 180 / 255]).max(axis=2) < 0.02  # raw losses are pale
    assert int(is_full_blue.sum()) > 50
