"""The picture of a training shows four curves, whatever the numbers are."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib.image
import pytest

from mobius.output.curves_picture import draw_training, smoothed


def entry(step: int, loss: object) -> dict[str, object]:
    return {"step": step, "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-5, "tokens_per_second": 100.0}


def dark_pixels(path: Path) -> int:
    return int((matplotlib.image.imread(path)[:, :, :3].min(axis=2) < 0.75).sum())


@pytest.mark.parametrize(
    "history",
    [
        [entry(step, 3 / step) for step in range(1, 50)],
        [entry(1, 2.0)],
        [entry(1, 2.0), entry(2, "nan"), entry(3, math.inf)],
        [entry(1, 2.0), {"step": 1, "eval_loss": 1.5}, {"step": 2, "train_runtime": 3.0}],
    ],
    ids=["many", "one", "not finite", "evaluated"],
)
def test_every_history_is_drawn(tmp_path: Path, history: Sequence[dict[str, object]]) -> None:
    draw_training([], tmp_path / "empty.png", title="a $ b")
    draw_training(history, tmp_path / "loss.png", title="a $ b")

    assert dark_pixels(tmp_path / "loss.png") > dark_pixels(tmp_path / "empty.png")


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
