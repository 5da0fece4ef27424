"""Families compared with transformers, with the results; `scripts/check_families` writes the file.

A family is supported if loss and every gradient of its tiny model, split into stages, are bit-equal to transformers'.
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
    """Version of transformers in the comparison."""
    supported: Mapping[str, Mapping[str, str]]
    """Family -> check -> "yes", or why it fails."""
    refused: Mapping[str, str]
    """Family -> reason, which follows "the family"."""

    def unsupported_reason(self, family: str) -> str | None:
        """Reason (a clause) why `family` cannot be trained, or None if it can."""
        if family in self.supported:
            return None
        if family in self.refused:
            return f"it {self.refused[family]}"
        return f"it was not compared with transformers {self.transformers}, by which supported families are found"

    def untileable_reason(self, family: str) -> str | None:
        """Reason why layers of a supported family cannot run in tiles, or None if they can."""
        found = self.supported.get(family, {}).get("tiles", "yes")
        return None if found == "yes" else found

    @property
    def names(self) -> str:
        """The supported families as a list in words."""
        return ", ".join(self.supported)


@functools.cache
def checked_families() -> CheckedFamilies:
    """Read the file."""
    fields = json.loads(PATH.read_text(encoding="utf-8"))
    return CheckedFamilies(fields["transformers"], fields["supported"], fields["refused"])
