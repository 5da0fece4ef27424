"""Fields of the configuration: a default with the bounds, other names and modes of its option.

A section of `config.py` reads `seq_length: int = option(512, Bounds(minimum=2), aliases=("cutoff_len",))`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Bounds:
    """Numbers that an option allows; `minimum` is allowed, `above` and `below` are not."""

    minimum: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    allows_auto: bool = False
    """Whether the word auto may stand for a number that is chosen later; the config then has None."""
    share_of: str | None = None
    """Unit of a whole number, such as steps; a number below 1 is a share of all of them."""
    ceiling: float = 2.0**31
    """`below` where that is not given: more than any machine holds; only a message about such a number names it."""

    def allow(self, value: float) -> bool:
        """Whether `value` is finite and inside; whole numbers may have any number of digits."""
        is_inside = value >= self.minimum and value > self.above and -math.inf < value < self._limit
        return is_inside and (self.share_of is None or value <= 1 or value == int(value))

    def demand(self, value: float) -> str:
        """Words for what a `value` that is not allowed must be, as they read in a message."""
        if replace(self, share_of=None).allow(value):
            return f"a whole number of {self.share_of}, or a number below 1 for a share"
        return str(self if value < self._limit else replace(self, below=self._limit))

    @property
    def _limit(self) -> float:
        return self.below if math.isfinite(self.below) else self.ceiling

    def __str__(self) -> str:
        limits = (("at least", self.minimum), ("above", self.above), ("below", self.below))
        return " and ".join(f"{word} {limit:.15g}" for word, limit in limits if math.isfinite(limit))


COUNT: Final = Bounds(minimum=1)
POSITIVE: Final = Bounds(above=0)
NON_NEGATIVE: Final = Bounds(minimum=0)
DECAY_RATE: Final = Bounds(minimum=0, below=1)
# A plan and a schedule hold every layer, stage, rank and microbatch, and are gone through many times.
RANKS: Final = Bounds(minimum=1, ceiling=257)
LAYERS: Final = Bounds(minimum=1, ceiling=1025)
STAGES: Final = Bounds(minimum=1, ceiling=1025, allows_auto=True)
PARTS: Final = Bounds(minimum=1, ceiling=10_000, allows_auto=True)


@dataclass(frozen=True)
class Need:
    """Mode without which an option has no effect."""

    decided_by: str
    """Names of the options that make the mode, with spaces."""
    is_met: Callable[[Any], bool]
    """Whether the run has the mode, by an object with the values of all options as attributes (`validation.py`)."""
    otherwise: str
    """Text that completes "`--x` has no effect ..."."""
    instead: str = ""
    """Change that gives the option its effect, unless `otherwise` says it."""
    is_strict: bool = False
    """Whether the option in a file is an error, too, where a typed option ends the mode."""


@dataclass(frozen=True)
class FieldRules:
    """Everything about an option that its name, type, default and text do not say."""

    bounds: Bounds | None = None
    aliases: tuple[str, ...] = ()
    """Other names that take the same values."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Flags that stand for the option with a value."""
    needs: tuple[Need, ...] = ()
    bare: str | None = None
    """Text that is meant where the option is typed without one; None where it needs one."""
    form: tuple[Callable[[str], object], str] | None = None
    """Test of a text, and words for what it must be."""
    is_text: bool = False
    """Whether the value is any text, and not what may be the name of a file."""
    pair: tuple[str, str] = ("", "")
    """Form of a pair, and an example, for an option of pairs."""


def option(default: Any, bounds: Bounds | None = None, **rules: Any) -> Any:
    """A dataclass field with `default` and its `FieldRules`."""
    return field(default=default, metadata={"rules": FieldRules(bounds, **rules)})


def rules_of(known: "dataclasses.Field[Any]") -> FieldRules:
    """Rules of a field; those of a field without `option` are the usual ones."""
    rules: FieldRules = known.metadata.get("rules", FieldRules())
    return rules
