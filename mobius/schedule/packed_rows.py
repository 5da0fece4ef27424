"""Facts about packed rows that planner, engine and measurements share."""

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
        """Lengths of equal documents that fill a row and have about the run's mean length, for measurements."""
        number = min(max(1, round(seq_length / self.attention_length)), self.max_documents, seq_length)
        length, longer = divmod(seq_length, number)
        return (length + 1,) * longer + (length,) * (number - longer)

    def fullest_row(self, seq_length: int) -> tuple[int, ...]:
        """Token counts of a row with as many documents as a row may hold; the last one is the longest."""
        number = min(self.max_documents, seq_length)
        return (seq_length // number,) * (number - 1) + (seq_length - seq_length // number * (number - 1),)
