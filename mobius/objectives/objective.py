"""Interface of all objectives: the only connection between rows, loss and numbers.

    rows of a microbatch, head -> loss and numbers -> sums over microbatches and ranks -> numbers by name

A new objective is a class in this package and a line in `registry.py`; the rest of a step does not know which it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from torch import Tensor

from mobius.data.token_store import Values
from mobius.models.loss import LossHead, TargetRows

Evaluation = Callable[[LossHead, TargetRows], Tensor]
"""Function that the last stage runs in an evaluation; its result has one shape for all microbatches."""


REFERENCE: Final = "reference"
"""Log-probability before step 1: of each token, or summed of each sequence."""
KL: Final = "kl"
"""Mean log-ratio of the step's mismatched answers, by the weights before the step: of each sequence."""


@dataclass(frozen=True)
class TeacherTokens:
    """A teacher's most likely tokens of each target."""

    number: int
    temperature: float
    """Divisor of the teacher's logits."""


@dataclass(frozen=True)
class StepScale:
    """Divisors and the factor of a step, equal in all microbatches and on all ranks."""

    num_targets: int
    """Number of targets of the step."""
    loss_scale: float = 1.0
    """Factor on the gradients only (fp16 scaling)."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Further divisors by name, from `Objective.counts`."""


class Objective(ABC):
    """Objective of a run: loss, gradient and numbers of its rows."""

    rows_kind: ClassVar[str] = "samples"
    """Kind of rows in the data."""
    number_names: ClassVar[Sequence[str]] = ()
    """Numbers that `loss` sums in addition to the loss."""
    evaluation_names: ClassVar[Sequence[str]]
    """Numbers that `evaluate` sums."""
    sequence_values: ClassVar[Sequence[str]] = ()
    """Values that every sequence of the rows must have."""
    optional_values: ClassVar[Sequence[str]] = ()
    """Values that sequences of the rows may have."""
    token_values: ClassVar[Sequence[str]] = ()
    """Values of the tokens of the rows. `REFERENCE` is missing in a run of one step: it would equal that step's own."""

    teacher: TeacherTokens | None = None
    """Tokens that the rows need of a teacher; None without one."""

    @property
    def needs_reference(self) -> bool:
        """Whether the rows need the log-probabilities of their sequences or tokens before step 1."""
        return REFERENCE in (*self.sequence_values, *self.token_values)

    def derive(self, values: Values) -> Values:
        """Return the values of a dataset's sequences that rows carry, from those that its files have."""
        return values

    @property
    def needs_divergence(self) -> bool:
        """Whether the rows of each step need the KL of mismatched answers."""
        return KL in self.sequence_values

    def counts(self, rows: TargetRows) -> Mapping[str, float]:
        """Return divisors of a step or evaluation, from all of its rows on the host; targets are not shifted."""
        return {}

    @abstractmethod
    def loss(self, head: LossHead, rows: TargetRows, scale: StepScale) -> tuple[Tensor, Tensor]:
        """Return loss and further sums of a microbatch, fp32 [1 + numbers], and the gradient of hidden states.

        The numbers of a step are sums over its microbatches, so each is divided by counts of the whole step here.
        """

    def numbers(self, sums: Sequence[float]) -> dict[str, float]:
        """Return a step's numbers by their names in logs, from the `sums` of all microbatches and ranks."""
        return dict(zip(self.number_names, sums, strict=True))

    @abstractmethod
    def evaluate(self, head: LossHead, rows: TargetRows) -> Tensor:
        """Return sums of a microbatch, fp64 [evaluation names], not divided; without gradients."""

    @abstractmethod
    def scores(self, sums: Mapping[str, float], scale: StepScale) -> dict[str, float]:
        """Return an evaluation's numbers by their names in logs, "loss" among them, from sums over all of its rows."""
