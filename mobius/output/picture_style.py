"""Owns what the predicted and the measured picture of a step have in common: colours, frame, legend, file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mobius.errors import ConfigError
from mobius.schedule.lanes import Lane
from mobius.schedule.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mobius.output.trace import TraceFacts

Colour = tuple[float, float, float]

IDLE_COLOUR = (0.95, 0.95, 0.95)
LANES: Mapping[Lane, tuple[Colour, str]] = {
    Lane.LOAD: ((0.95, 0.65, 0.22), "L s  load weights"),
    Lane.OFFLOAD: ((0.54, 0.37, 0.75), "O s  offload: gradients go home"),
    Lane.OPTIMIZER: ((0.76, 0.30, 0.30), "U s  update of stage s"),
    Lane.SEND: ((0.45, 0.45, 0.45), "message on its way"),
}
"""Colour and words of every lane beneath the computation."""

_PICTURE_SUFFIXES = (".png", ".svg")
_LIGHTEST, _DARKEST = 0.35, 0.75
"""The part of matplotlib's colour maps in which black or white text is readable."""


def stage_colour(step: Schedule | TraceFacts, stage: int, *, is_backward: bool) -> Colour:
    """A shade for each stage of a rank: blue forward, green backward, darker for later stages."""
    from matplotlib import colormaps

    share = (stage // step.num_ranks) / max(1, step.num_stages // step.num_ranks - 1)
    shade = colormaps["Greens" if is_backward else "Blues"](_LIGHTEST + share * (_DARKEST - _LIGHTEST))
    return shade[0], shade[1], shade[2]


def text_colour(background: Colour) -> Colour:
    """Black or white, whichever is readable on `background`."""
    luminance = 0.3 * background[0] + 0.59 * background[1] + 0.11 * background[2]
    return (0.0, 0.0, 0.0) if luminance > 0.55 else (1.0, 1.0, 1.0)


def font_size_for(num_letters: int, points: float, largest: float) -> float:
    """The size in points at which that many letters take 85 % of `points`, at most `largest`."""
    return min(largest, 0.85 * points / (0.6 * num_letters))


def describe_sizes(step: Schedule | TraceFacts, num_resident: int = 0) -> str:
    """The shape of a step in words, for titles; `num_resident` stages of all ranks stay on a GPU."""
    parts = [
        f"{_count(step.num_stages, 'stage')} on {_count(step.num_ranks, 'GPU')}",
        _count(step.num_microbatches, "microbatch", "microbatches"),
        "all weights on the GPU" if step.num_slots is None else f"{_count(step.num_slots, 'weight slot')} per GPU",
    ]
    if step.num_slots is not None and num_resident:
        parts.append(f"{num_resident} of the stages resident")
    return ", ".join(parts)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def check_picture_name(path: Path) -> None:
    """Raise ConfigError if pictures are not drawn in the format that the suffix of `path` asks for."""
    if path.suffix.lower() not in _PICTURE_SUFFIXES:
        raise ConfigError(f"cannot draw {str(path)!r}: the name of a picture ends in {' or '.join(_PICTURE_SUFFIXES)}")


def draw_frame(
    axes: Axes, duration: float, height: float, ranks: Mapping[float, str], *, title: str, x_label: str, size: float
) -> None:
    """Set borders, title and labels; `ranks` has the label of each rank, of font size `size`, by its height."""
    axes.set_xlim(0, duration)
    axes.set_ylim(height, 0)
    axes.set_yticks(list(ranks), list(ranks.values()))
    axes.tick_params(axis="y", length=0, labelsize=size)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(x_label, fontsize=9)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.set_title(title, fontsize=11, loc="left")


def draw_legend(
    figure: Figure, step: Schedule | TraceFacts, lanes: Iterable[Lane], more: Sequence[Artist], *, num_rows: int
) -> None:
    """Explain forward and backward, the `lanes` that are shown, and then `more`, below the picture."""
    from matplotlib.patches import Patch

    handles: list[Artist] = [
        Patch(color=stage_colour(step, 0, is_backward=False), label="F s.m  forward of stage s, microbatch m"),
        Patch(color=stage_colour(step, 0, is_backward=True), label="B s.m  backward"),
        *(Patch(color=LANES[lane][0], label=LANES[lane][1]) for lane in lanes),
        *more,
    ]
    num_columns = -(-len(handles) // num_rows)
    figure.legend(handles=handles, loc="lower center", ncols=num_columns, frameon=False, fontsize=8, handlelength=1.2)


def save_picture(figure: Figure, path: Path) -> None:
    """Write `figure` as PNG or SVG; neither has a date or random ids, so the same figure gives the same bytes."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "mobius", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
