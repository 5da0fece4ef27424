"""Facts about packed rows that planner, engine and measurements use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PackedRows:
    """Facts about a run's packed rows; the padding after the last document counts as a document."""

    attention_length: float
    """Mean document length, weighted by tokens: sum of squared document lengths / sum of document lengths."""
    max_documents: int
    """Maximum number of documents of a row."""

    def __post_init__(self) -> None:
        assert self.attention_length > 0, self
        assert self.max_documents > 0, self

    def typical_row(self, seq_length: int) -> tuple[int, ...]:
        """Document lengths that fill a row, for measurements: all equal, and about the run's mean length."""
        number = min(max(1, round(seq_length / self.attention_length)), self.max_documents, seq_length)
        length, longer = divmod(seq_length, number)
        return (length + 1,) * longer + (length,) * (number - longer)

    def fullest_row(self, seq_length: int) -> tuple[int, ...]:
        """Document lengths of a row with the maximum number of documents; the last document is the longest."""
        number = min(self.max_documents, seq_length)
        return (seq_length // number,) * (number - 1) + (seq_length - seq_length // number * (number - 1),)
