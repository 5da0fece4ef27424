"""Families that were compared with transformers, each with what was found; `scripts/check_families` writes the file.

A family is supported if loss and every gradient of its tiny model, cut into stages, are bit-equal to transformers' own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).with_name("families.json")


@dataclass(frozen=True)
class CheckedFamilies:
    """Contents of the file."""

    transformers: str
    """Version that was compared with."""
    supported: Mapping[str, Mapping[str, str]]
    """Family -> what was tried -> "yes", or why it does not work."""
    refused: Mapping[str, str]
    """Family -> the reason, to be read after "the family"."""

    def unsupported_reason(self, family: str) -> str | None:
        """A clause that says why `family` cannot be trained, or None if it can."""
        if family in self.supported:
            return None
        if family in self.refused:
            return f"it {self.refused[family]}"
        return f"it was not compared with transformers {self.transformers}, by which supported families are found"

    def untileable_reason(self, family: str) -> str | None:
        """Words for why layers of a supported family do not run in tiles, or None if they do."""
        found = self.supported.get(family, {}).get("tiles", "yes")
        return None if found == "yes" else found

    @property
    def names(self) -> str:
        """The supported families, for a message."""
        return ", ".join(self.supported)


@functools.cache
def checked_families() -> CheckedFamilies:
    """Read the file."""
    fields = json.loads(PATH.read_text(encoding="utf-8"))
    return CheckedFamilies(fields["transformers"], fields["supported"], fields["refused"])
