"""Owns the picture of a training: loss, gradient norm, learning rate and speed over the steps."""

from __future__ import annotations

import math
import warnings
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_PANELS: Final = (
    ("loss", "loss"),
    ("grad_norm", "gradient norm"),
    ("learning_rate", "learning rate"),
    ("tokens_per_second", "tokens/s, without padding"),
)
"""Key in the history of a run, and what it is called."""
_SMOOTHED: Final = 20
"""The smoothed curve averages about this fraction of the steps, one in so many."""


def draw_training(history: Iterable[Mapping[str, object]], path: Path, *, title: str) -> None:
    """Write the picture of `log_history` (trainer_state.json) to `path`, a PNG; entries of any kind may be left out.

    The loss is drawn raw and smoothed, with that of evaluations where there are any.
    """
    # Imported here: matplotlib takes half a second and training does not need it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 6.0), facecolor="white")
    # Fixed margins: matplotlib takes as long to find them as to draw.
    figure.subplots_adjust(0.08, 0.08, 0.98, 0.89, wspace=0.2, hspace=0.35)
    figure.suptitle(title, fontsize=10, parse_math=False)
    curves = _curves(history, [key for key, _ in _PANELS] + ["eval_loss"])
    for axes, (key, label) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        _draw(axes, *curves[key], is_noisy=key == "loss")
        if key == "loss" and curves["eval_loss"][0]:
            axes.plot(*curves["eval_loss"], "o-", color="tab:red", markersize=3, linewidth=1, label="evaluation")
        axes.set_title(label, fontsize=9, loc="left")
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["right", "top"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a letter that its font has not is drawn as a box
        figure.savefig(path, dpi=120, format="png")


def smoothed(values: Sequence[float]) -> list[float]:
    """Averages in which older values count exponentially less; the first ones are not drawn towards zero."""
    keep = 1 - 1 / max(1.0, len(values) / _SMOOTHED)
    total = weight = 0.0
    means = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        means.append(total / weight)
    return means


def _draw(axes: Any, steps: Sequence[int], values: Sequence[float], *, is_noisy: bool) -> None:
    marker = "." if len(steps) < 3 else None  # a line of one point is not seen
    if not is_noisy:
        axes.plot(steps, values, marker=marker, color="tab:blue", linewidth=1)
        return
    axes.plot(steps, values, marker=marker, color="tab:blue", alpha=0.35, linewidth=1, label="step")
    axes.plot(steps, smoothed(values), marker=marker, color="tab:blue", linewidth=1.5, label="smoothed")


def _curves(
    history: Iterable[Mapping[str, object]], keys: Sequence[str]
) -> dict[str, tuple[Sequence[int], Sequence[float]]]:
    """Steps and finite values of each key; `history` is gone through once, for it may be long."""
    found = {key: (array("q"), array("d")) for key in keys}
    for entry in history:
        for key in keys:
            value = entry.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                steps, values = found[key]
                steps.append(int(str(entry["step"])))
                values.append(value)
    return dict(found)
