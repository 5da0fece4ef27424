"""Owns the picture of one measured or predicted step of a trace."""

from pathlib import Path
from statistics import median

from mobius.output.step_picture import WAIT_COLOURS, StepPicture, check_picture_name, describe_sizes, lane_bars
from mobius.output.trace import Trace
from mobius.schedule.lanes import Lane

_VISIBLE_SHARE = 0.003


def draw_timeline(trace: Trace, path: Path, *, step: int | None = None) -> None:
    """Write the picture of `step` (default: a typical one), PNG or SVG by the suffix of `path`.

    What was under way at the step's borders is cut there. Raises ConfigError for another suffix or a step that was
    not recorded.
    """
    check_picture_name(path)
    step, facts = trace.choose_step(step), trace.facts
    from matplotlib.patches import Patch

    start, end = trace.window(step)
    bands = [lane_bars(trace.within(rank, step), facts, origin=start, scale=1000) for rank in range(facts.num_ranks)]
    duration = 1000 * (end - start)
    computed = [[bar.length for bar in band.get(Lane.COMPUTE, [])] for band in bands]
    lengths = [length for own in computed for length in own]
    # Half of the compute bars are wide enough for their text.
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
