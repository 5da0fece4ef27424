"""Owns how pictures of a step look, the predicted one and the measured one: colours, sizes in words, files.

Does not own what is drawn where (render.py, and the measured timeline above).
"""

from pathlib import Path
from typing import TYPE_CHECKING

from mobius.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Colour = tuple[float, float, float]

PICTURE_SUFFIXES = (".png", ".svg")
LOAD_COLOUR, OFFLOAD_COLOUR, IDLE_COLOUR = (0.95, 0.65, 0.22), (0.54, 0.37, 0.75), (0.95, 0.95, 0.95)

# Of matplotlib's colour maps the part in which black or white text is readable.
_SHADES = (0.35, 0.75)
_BLACK, _WHITE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


def stage_colour(stage: int, *, num_ranks: int, num_stages: int, is_backward: bool) -> Colour:
    """A shade per stage of a rank: blue forward, green backward, darker for later stages."""
    from matplotlib import colormaps

    share = (stage // num_ranks) / max(1, num_stages // num_ranks - 1)
    lightest, darkest = _SHADES
    shade = colormaps["Greens" if is_backward else "Blues"](lightest + share * (darkest - lightest))
    return shade[0], shade[1], shade[2]


def text_colour(background: Colour) -> Colour:
    """Black or white, whichever is readable on `background`."""
    luminance = 0.3 * background[0] + 0.59 * background[1] + 0.11 * background[2]
    return _BLACK if luminance > 0.55 else _WHITE


def font_size_for(num_letters: int, points: float, largest: float) -> float:
    """The size in points at which that many letters take 85 % of `points`, at most `largest`."""
    return min(largest, 0.85 * points / (0.6 * num_letters))


def describe_sizes(
    *, num_ranks: int, num_stages: int, num_microbatches: int, num_slots: int | None, num_resident: int = 0
) -> str:
    """The shape of a step in words, as in the titles of pictures; `num_resident` stages of all ranks stay on a GPU."""
    slots = "all weights on the GPU" if num_slots is None else f"{_count(num_slots, 'weight slot')} per GPU"
    parts = (
        f"{_count(num_stages, 'stage')} on {_count(num_ranks, 'GPU')}",
        _count(num_microbatches, "microbatch", "microbatches"),
        slots,
        *([f"{num_resident} of the stages resident"] if num_slots is not None and num_resident else []),
    )
    return ", ".join(parts)


def check_picture_name(path: Path) -> None:
    """Raise ConfigError if pictures are not drawn in the format that the suffix of `path` asks for."""
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise ConfigError(f"cannot draw {str(path)!r}: the name of a picture ends in {' or '.join(PICTURE_SUFFIXES)}")


def save_picture(figure: "Figure", path: Path) -> None:
    """Write `figure` as PNG or SVG; neither has a date or random ids, so the same figure gives the same bytes."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "mobius", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
