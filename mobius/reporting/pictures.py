"""Pictures of a run: its steps (planned, predicted or measured) and the curves of its training.

In a step's picture, each rank is a band with its lanes below each other, and each span is a bar. Only functions that
draw import matplotlib, because the import takes half a second.
"""

from __future__ import annotations

import math
import warnings
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from mobius.errors import ConfigError
from mobius.reporting.trace import Trace, TraceFacts, parse_action_name
from mobius.schedule.lanes import Lane, LaneSpan, WaitCause
from mobius.schedule.render import place_actions
from mobius.schedule.schedule import Schedule
from mobius.schedule.spec import ScheduleSpec

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

Colour = tuple[float, float, float]

LANE_STYLES: dict[Lane, tuple[Colour, str]] = {
    Lane.LOAD: ((0.95, 0.65, 0.22), "L s  load weights"),
    Lane.OFFLOAD: ((0.54, 0.37, 0.75), "O s  offload: gradients to the host"),
    Lane.REDUCE: ((0.35, 0.62, 0.80), "R s  reduction: gradients are summed over the replicas"),
    Lane.GATHER: ((0.80, 0.75, 0.40), "G s  gather: weights come from the replicas that updated them"),
    Lane.OPTIMIZER: ((0.76, 0.30, 0.30), "U s  update of stage s"),
    Lane.OFFLOAD_ACTIVATIONS: ((0.36, 0.62, 0.55), "S s  activations are offloaded to the host"),
    Lane.PREFETCH_ACTIVATIONS: ((0.60, 0.75, 0.45), "T s  activations are prefetched from the host"),
    Lane.SEND: ((0.45, 0.45, 0.45), "message in flight"),
}
"""Colour and legend of every lane below the computation."""
WAIT_COLOURS: dict[str, Colour] = {
    WaitCause.WEIGHTS: (0.99, 0.88, 0.70),
    WaitCause.NEIGHBOURS: (0.85, 0.85, 0.85),
    WaitCause.OPTIMIZER: (0.95, 0.80, 0.80),
    WaitCause.ACTIVATIONS: (0.80, 0.90, 0.86),
}

_IDLE_COLOUR = (0.95, 0.95, 0.95)
_FURTHER_STYLES: Mapping[str, tuple[Colour, str]] = {
    "K": ((0.86, 0.78, 0.92), "K s.m  keys and values of a slice"),
    "H": ((0.98, 0.84, 0.62), "H s.m  head and loss, after s stages"),
}
"""Colour and legend of computations other than forward and backward, by their letter."""
_PICTURE_SUFFIXES = (".png", ".svg")
_LIGHTEST, _DARKEST = 0.35, 0.75
"""Range of matplotlib's colour maps in which black or white text is readable."""
_COMPUTE_HEIGHT, _LANE_HEIGHT, _SEND_HEIGHT, _GAP, _BAND_GAP = 0.50, 0.17, 0.07, 0.04, 0.16
_INCHES_PER_UNIT = 0.85
_FILLED_SHARE = 0.85
_VISIBLE_SHARE = 0.003
"""Share of a step; the legend leaves out causes of waits that take less."""
_PANELS: Final = (
    ("loss", "loss"),
    ("grad_norm", "gradient norm"),
    ("learning_rate", "learning rate"),
    ("tokens_per_second", "tokens/s, without padding"),
)
"""Key in the history of a run, and the title of its panel."""
_SMOOTHED: Final = 20
"""Number of all steps / number of steps that the smoothed curve averages."""


@dataclass(frozen=True)
class Bar:
    """A rectangle in the picture's unit of time, with its text; a bar without length is drawn as a mark."""

    start: float
    length: float
    text: str
    colour: Colour


@dataclass(frozen=True, kw_only=True)
class StepPicture:
    """Picture of one step: bars and labels."""

    step: ScheduleSpec | TraceFacts
    bands: Sequence[dict[Lane, list[Bar]]]
    """The bars of each rank, as `lane_bars` returns them."""
    duration: float
    width: float
    """Width of the picture in inches."""
    labels: Sequence[str]
    """Label of each band."""
    title: str
    time_label: str
    more_legend: Sequence[Artist]
    longest_text: int = 1
    """Number of letters from which font sizes are computed, so that texts of different lengths have one size."""
    smallest_font: float = 5.5
    """Font size in points; smaller texts are left out."""

    def save(self, path: Path) -> None:
        """Draw the picture as PNG or SVG; equal pictures give equal bytes."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator

        lanes = [lane for lane in LANE_STYLES if any(lane in band for band in self.bands)]
        places, pitch = _lane_positions([Lane.COMPUTE, *lanes])
        height = 1.4 + _INCHES_PER_UNIT * pitch * len(self.bands)
        figure = Figure(figsize=(self.width, height), facecolor="white")
        axes = figure.add_axes((1.0 / self.width, 0.90 / height, 1 - 1.2 / self.width, 1 - 1.35 / height))
        for rank, band in enumerate(self.bands):
            top, thickness = places[Lane.COMPUTE]
            axes.barh(rank * pitch + top, self.duration, thickness, align="edge", color=_IDLE_COLOUR)
            for lane in (Lane.WAIT, Lane.COMPUTE, *lanes):
                top, thickness = places[lane]
                self._draw_lane(axes, band.get(lane, []), rank * pitch + top, thickness, lane)
        axes.set_xlim(0, self.duration)
        axes.set_ylim(pitch * len(self.bands) - _BAND_GAP, 0)
        axes.set_yticks([rank * pitch + _GAP + _COMPUTE_HEIGHT / 2 for rank in range(len(self.bands))], self.labels)
        axes.tick_params(axis="y", length=0, labelsize=9)
        axes.tick_params(axis="x", labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
        axes.set_xlabel(self.time_label, fontsize=9)
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.set_title(self.title, fontsize=11, loc="left")
        handles: list[Artist] = [
            Patch(
                color=_stage_colour(self.step, 0, is_backward=False), label="F s.m  forward of stage s, microbatch m"
            ),
            Patch(color=_stage_colour(self.step, 0, is_backward=True), label="B s.m  backward"),
            *(Patch(color=colour, label=label) for colour, label in _FURTHER_STYLES.values() if self._has(colour)),
            *(Patch(color=LANE_STYLES[lane][0], label=LANE_STYLES[lane][1]) for lane in lanes),
            *self.more_legend,
        ]
        columns = len(handles) if len(handles) <= 5 else -(-len(handles) // 2)
        figure.legend(handles=handles, loc="lower center", ncols=columns, frameon=False, fontsize=8, handlelength=1.2)
        # Without a date and random ids the same run always gives the same bytes.
        with rc_context({"svg.hashsalt": "mobius", "svg.fonttype": "none"}):
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)

    def _has(self, colour: Colour) -> bool:
        return any(bar.colour == colour for band in self.bands for bar in band.get(Lane.COMPUTE, []))

    def _draw_lane(self, axes: Axes, bars: list[Bar], top: float, thickness: float, lane: Lane) -> None:
        middle = top + thickness / 2
        for bar in bars:
            if bar.length == 0:
                axes.plot([bar.start], [middle], marker="d", markersize=4.5, color=bar.colour, linestyle="")
                continue
            # Bars have white edges, which must not cover thin bars.
            edge = 0.0 if lane is Lane.WAIT else min(0.6, 0.1 * bar.length * self._points_per_unit)
            axes.barh(
                top, bar.length, thickness, bar.start, align="edge", color=bar.colour, edgecolor="white", linewidth=edge
            )
        for bar in self._labelled(bars):
            size = min(8.5 if lane is Lane.COMPUTE else 7.0, self._font_size(bar))
            if bar.text and size >= self.smallest_font:
                align, colour = ("center", _text_colour(bar.colour)) if bar.length else ("left", bar.colour)
                start = bar.start + (bar.length / 2 if bar.length else 0.2)
                axes.text(start, middle, bar.text, ha=align, va="center_baseline", fontsize=size, color=colour)

    @property
    def _points_per_unit(self) -> float:
        return 72 * (self.width - 1.2) / self.duration

    def _font_size(self, bar: Bar) -> float:
        """Font size in points at which the text takes 85 % of the bar, or of a unit of time next to a mark."""
        return 0.85 * (bar.length or 1) * self._points_per_unit / (0.6 * max(self.longest_text, len(bar.text)))

    def _labelled(self, bars: list[Bar]) -> list[Bar]:
        """Return the bars; a single bar replaces the bars of a stage if most of them are too narrow for their text."""
        labelled = []
        for text, group in groupby(bars, key=lambda bar: bar.text.partition(".")[0]):
            members = list(group)
            if 2 * sum(self._font_size(bar) < self.smallest_font for bar in members) > len(members):
                start, end = members[0].start, members[-1].start + members[-1].length
                row = Bar(start, end - start, text, members[0].colour)
                # If the gaps between the bars are large, a text over them would seem to name their contents.
                members = [row] if sum(bar.length for bar in members) > _FILLED_SHARE * row.length else members
            labelled += members
        return labelled


def lane_bars(
    spans: Iterable[LaneSpan], step: ScheduleSpec | TraceFacts, *, origin: float = 0, scale: float = 1
) -> dict[Lane, list[Bar]]:
    """Bars of one rank's lanes; a span of length 1 is `scale` long. Steps, batches and receives get no bar."""
    bars: dict[Lane, list[Bar]] = {}
    for span in spans:
        action, lane = parse_action_name(span.name), span.lane
        colour = WAIT_COLOURS.get(span.name) if lane is Lane.WAIT else LANE_STYLES.get(lane, (None, ""))[0]
        if lane is Lane.COMPUTE and action and action.letter in "FB":
            colour = _stage_colour(step, action.stage, is_backward=action.letter == "B")
        elif lane is Lane.COMPUTE and action and action.letter in _FURTHER_STYLES:
            colour = _FURTHER_STYLES[action.letter][0]
        if colour is not None:
            start, length = scale * (span.start - origin), scale * (span.end - span.start)
            bars.setdefault(lane, []).append(Bar(start, length, span.name if action else "", colour))
    return bars


def describe_sizes(step: ScheduleSpec | TraceFacts, num_resident: int = 0) -> str:
    """Describe the sizes of a step, for titles; `num_resident` counts the resident stages of all ranks."""
    parts = [
        f"{_count(step.num_stages, 'stage')} on {_count(step.num_ranks, 'GPU')}",
        _count(step.num_microbatches, "microbatch", "microbatches"),
        "all weights on the GPU" if step.num_slots is None else f"{_count(step.num_slots, 'weight slot')} per GPU",
    ]
    if step.num_slots is not None and num_resident:
        parts.append(f"{num_resident} of the stages resident")
    return ", ".join(parts)


def check_picture_name(path: Path) -> None:
    """Raise ConfigError if the suffix of `path` is no format in which pictures can be drawn."""
    if path.suffix.lower() not in _PICTURE_SUFFIXES:
        raise ConfigError(f"cannot draw {str(path)!r}: the name of a picture ends in {' or '.join(_PICTURE_SUFFIXES)}")


def _stage_colour(step: ScheduleSpec | TraceFacts, stage: int, *, is_backward: bool) -> Colour:
    """Shade of a stage: blue for forward, green for backward, darker for a rank's later stages."""
    from matplotlib import colormaps

    share = (stage // step.num_ranks) / max(1, step.num_stages // step.num_ranks - 1)
    shade = colormaps["Greens" if is_backward else "Blues"](_LIGHTEST + share * (_DARKEST - _LIGHTEST))
    return shade[0], shade[1], shade[2]


def _text_colour(background: Colour) -> Colour:
    luminance = 0.3 * background[0] + 0.59 * background[1] + 0.11 * background[2]
    return (0.0, 0.0, 0.0) if luminance > 0.55 else (1.0, 1.0, 1.0)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _lane_positions(lanes: Sequence[Lane]) -> tuple[dict[Lane, tuple[float, float]], float]:
    """Return top and height of each lane in a rank's band, and the height of a band."""
    places, top = {}, _GAP
    for lane in lanes:
        thickness = {Lane.COMPUTE: _COMPUTE_HEIGHT, Lane.SEND: _SEND_HEIGHT}.get(lane, _LANE_HEIGHT)
        places[lane] = (top, thickness)
        top += thickness + _GAP
    places[Lane.WAIT] = places[Lane.COMPUTE]
    return places, top + _BAND_GAP


def draw_schedule(schedule: Schedule, path: Path) -> None:
    """Write the picture of a schedule, PNG or SVG by the suffix of `path`; raises ConfigError for another suffix."""
    check_picture_name(path)
    from matplotlib.lines import Line2D

    timeline = [
        [LaneSpan(span.lane, str(span.action), 1, span.start, span.end) for span in spans]
        for spans in place_actions(schedule)
    ]
    every = [span for spans in timeline for span in spans]
    duration = max(max(span.end, span.start + 1) for span in every)
    drops = []
    if any(span.lane is Lane.OFFLOAD and span.start == span.end for span in every):
        text, colour = "O s  weights dropped, nothing to copy", LANE_STYLES[Lane.OFFLOAD][0]
        drops.append(Line2D([], [], marker="d", color=colour, linestyle="", label=text))
    StepPicture(
        step=schedule.spec,
        bands=[lane_bars(spans, schedule.spec) for spans in timeline],
        duration=duration,
        width=min(max(1.8 + 0.40 * duration, 8.0), 40.0),
        labels=[f"GPU {rank}" for rank in range(schedule.spec.num_ranks)],
        title=f"One step: {describe_sizes(schedule.spec, len(schedule.spec.resident))}",
        time_label="time (1 = forward of one microbatch)",
        more_legend=drops,
        longest_text=max(len(span.name) for span in every),
        smallest_font=3.5,
    ).save(path)


def draw_timeline(trace: Trace, path: Path, *, step: int | None = None) -> None:
    """Write the picture of `step` (default: a typical one), PNG or SVG by the suffix of `path`.

    Spans that cross the step's borders are cut there. Raises ConfigError for another suffix, or a step that was not
    recorded.
    """
    check_picture_name(path)
    step, facts = trace.choose_step(step), trace.facts
    from matplotlib.patches import Patch

    start, end = trace.window(step)
    bands = [lane_bars(trace.within(rank, step), facts, origin=start, scale=1000) for rank in range(facts.num_ranks)]
    duration = 1000 * (end - start)
    computed = [[bar.length for bar in band.get(Lane.COMPUTE, [])] for band in bands]
    lengths = [length for own in computed for length in own]
    # This width makes half of the compute bars wide enough for their text.
    width = 1.2 + 0.34 * duration / median(lengths) if lengths else 0.0
    waits = [bar for band in bands for bar in band.get(Lane.WAIT, [])]
    name, sizes = "GPU", describe_sizes(facts)
    if facts.device == "cpu":
        name, sizes = "rank", sizes.replace("GPUs", "CPU processes").replace("GPU", "CPU process")
    how = "as predicted" if facts.is_predicted else "as measured"
    StepPicture(
        step=facts,
        bands=bands,
        duration=duration,
        width=min(max(width, 12.0), 24.0),
        labels=[f"{name} {rank}\nbusy {100 * sum(own) / duration:.0f} %" for rank, own in enumerate(computed)],
        title=f"Step {step} {how} ({facts.device}), {duration:,.0f} ms: {sizes}",
        time_label="time in ms",
        more_legend=[
            Patch(color=colour, label=f"waits for {cause}")
            for cause, colour in WAIT_COLOURS.items()
            if sum(bar.length for bar in waits if bar.colour == colour) > _VISIBLE_SHARE * duration
        ],
    ).save(path)


def draw_training(history: Iterable[Mapping[str, object]], path: Path, *, title: str) -> None:
    """Write the picture of `log_history` (trainer_state.json) to `path` as PNG; entries of any kind may be missing.

    The loss is drawn raw and smoothed, together with the loss of evaluations, if there are any.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 6.0), facecolor="white")
    # Fixed margins, because computing margins would take matplotlib as long as drawing.
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
        warnings.simplefilter("ignore", UserWarning)  # about letters that are not in the font; boxes replace them
        figure.savefig(path, dpi=120, format="png")


def smoothed(values: Sequence[float]) -> list[float]:
    """Return averages in which older values count exponentially less; the first means are not biased to zero."""
    keep = 1 - 1 / max(1.0, len(values) / _SMOOTHED)
    total = weight = 0.0
    means = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        means.append(total / weight)
    return means


def _draw(axes: Any, steps: Sequence[int], values: Sequence[float], *, is_noisy: bool) -> None:
    marker = "." if len(steps) < 3 else None  # a line of one point is invisible
    if not is_noisy:
        axes.plot(steps, values, marker=marker, color="tab:blue", linewidth=1)
        return
    axes.plot(steps, values, marker=marker, color="tab:blue", alpha=0.35, linewidth=1, label="step")
    axes.plot(steps, smoothed(values), marker=marker, color="tab:blue", linewidth=1.5, label="smoothed")


def _curves(
    history: Iterable[Mapping[str, object]], keys: Sequence[str]
) -> dict[str, tuple[Sequence[int], Sequence[float]]]:
    """Return steps and finite values of each key; `history` is read only once, because it may be long."""
    found = {key: (array("q"), array("d")) for key in keys}
    for entry in history:
        for key in keys:
            value = entry.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                steps, values = found[key]
                steps.append(int(str(entry["step"])))
                values.append(value)
    return dict(found)
