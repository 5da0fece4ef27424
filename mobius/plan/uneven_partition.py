"""Cuts layers into stages of unequal size where that makes a step shorter, by a mixed-integer program.

It proposes cuts; which one is fastest is for the simulation to say (choice.py).

Stages run in rounds: round j are the stages j x N .. j x N + N - 1, one per rank. With few microbatches a round takes
as long as its slowest stage, with many each rank only its own work. With t(s) the seconds of stage s per microbatch,
forward and backward, the program minimizes

    pace x sum over rounds of (largest t in the round)  +  (1 - pace) x largest sum of t on a rank

under a cap of parameters per stage and of layers per rank. Only the outer two stages may be without layers: they have
the embedding and the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mobius.plan.partition import StageSpan, balanced_partition, partition_of

TIME_LIMIT = 5.0
"""Seconds that a solver may take."""


@dataclass(frozen=True)
class PartitionTask:
    """What is to be cut, for how many stages and ranks, and what limits a cut."""

    layer_seconds: tuple[float, ...]
    """Forward and backward of each layer on one microbatch."""
    first_seconds: float
    """The embedding's, added to the first stage."""
    last_seconds: float
    """Norm, head and loss, added to the last stage."""
    layer_parameters: tuple[int, ...]
    first_parameters: int
    last_parameters: int
    num_ranks: int
    num_stages: int
    max_parameters: int | None = None
    """Of one stage, by the memory of a slot."""
    max_layers_of_rank: int | None = None
    """By the memory of the layers' stashed inputs."""

    def stage_seconds(self, sizes: Sequence[int]) -> list[float]:
        """Forward and backward of each stage on one microbatch."""
        return self._per_stage(sizes, self.layer_seconds, self.first_seconds, self.last_seconds)

    def allows(self, sizes: Sequence[int]) -> bool:
        """Whether `sizes` are a cut of all layers within the caps."""
        if len(sizes) != self.num_stages or sum(sizes) != len(self.layer_seconds):
            return False
        if any(size < self.fewest(stage) for stage, size in enumerate(sizes)):
            return False
        parameters = self._per_stage(sizes, self.layer_parameters, self.first_parameters, self.last_parameters)
        ranks = [sum(sizes[rank :: self.num_ranks]) for rank in range(self.num_ranks)]
        return (self.max_parameters is None or max(parameters) <= self.max_parameters) and (
            self.max_layers_of_rank is None or max(ranks) <= self.max_layers_of_rank
        )

    def fewest(self, stage: int) -> int:
        """The fewest layers that a stage may have."""
        is_outer = stage in (0, self.num_stages - 1)
        return 0 if is_outer and self.num_stages > 1 else 1

    def score(self, sizes: Sequence[int], pace: float) -> float:
        """What the program minimizes, in seconds per microbatch."""
        seconds, num_ranks = self.stage_seconds(sizes), self.num_ranks
        rounds = sum(max(seconds[first : first + num_ranks]) for first in range(0, self.num_stages, num_ranks))
        return pace * rounds + (1 - pace) * max(sum(seconds[rank::num_ranks]) for rank in range(num_ranks))

    def _per_stage(self, sizes: Sequence[int], layers: Sequence[float], first: float, last: float) -> list[Any]:
        sums = [sum(layers[span.first_layer : span.end_layer]) for span in partition_of(sizes)]
        sums[0] += first
        sums[-1] += last
        return sums


@dataclass(frozen=True)
class Cut:
    """The layers of each stage, and a line for the log if the solver was not what decided."""

    spans: tuple[StageSpan, ...]
    notice: str | None = None


def uneven_partition(task: PartitionTask, *, pace: float, time_limit: float = TIME_LIMIT) -> Cut:
    """The best cut that a solver finds in `time_limit` seconds; without one, the balanced cut and why.

    Raises PlanError if there are more stages than layers and two.
    """
    try:
        sizes, is_proved = solve(task, pace=pace, time_limit=time_limit)
    except ImportError:
        sizes, reason = None, "scipy is not installed"
    else:
        reason = f"the solver found no cut in {time_limit:g} s, or none fits"
        if sizes is not None:
            late = None if is_proved else f"the solver was stopped after {time_limit:g} s; its best cut so far is used"
            return Cut(partition_of(sizes), late)
    balanced = balanced_partition(len(task.layer_seconds), task.num_stages)
    return Cut(balanced, f"layers are cut evenly: {reason}")


def solve(task: PartitionTask, *, pace: float, time_limit: float) -> tuple[tuple[int, ...] | None, bool]:
    """The sizes that minimize `task.score`, None if there are none, and whether they are proved to be the best.

    Layers that are all alike are counted per stage; others are assigned one by one, in order.
    """
    import numpy as np
    from scipy.optimize import Bounds, milp

    program = _Program(task)
    program.cut_layers()
    program.bound_scores()
    result = milp(
        program.objective(pace),
        constraints=program.constraints(),
        bounds=Bounds(*program.bounds()),
        integrality=np.array(program.is_integer, dtype=int),
        options={"time_limit": time_limit, "mip_rel_gap": 1e-6},
    )
    if result.x is None:
        return None, result.status != 1
    sizes = tuple(round(sum(result.x[column] for column in columns)) for columns in program.size_columns)
    return sizes, result.status == 0


class _Program:
    """Columns and rows of the program; the first columns cut the layers, the last ones are rounds and the fullest rank.

    alike:       n[s]      layers of stage s
    different:   y[l, s]   1 where layer l is in stage s
    """

    def __init__(self, task: PartitionTask) -> None:
        self.task = task
        self.num_rounds = task.num_stages // task.num_ranks
        layers = list(zip(task.layer_seconds, task.layer_parameters, strict=True))
        self.are_alike = len(set(layers)) == 1
        self.num_cutting = task.num_stages * (1 if self.are_alike else len(layers))
        self.num_columns = self.num_cutting + self.num_rounds + 1
        self.is_integer = [True] * self.num_cutting + [False] * (self.num_rounds + 1)
        self.size_columns = [
            [stage] if self.are_alike else [layer * task.num_stages + stage for layer in range(len(layers))]
            for stage in range(task.num_stages)
        ]
        self._rows: list[dict[int, float]] = []
        self._lower: list[float] = []
        self._upper: list[float] = []

    def cut_layers(self) -> None:
        """Every layer is in one stage, in order, within the caps."""
        task, inf = self.task, float("inf")
        num_layers, num_stages = len(task.layer_seconds), task.num_stages
        if self.are_alike:
            self._add(dict.fromkeys(range(num_stages), 1.0), num_layers, num_layers)
        else:
            for layer in range(num_layers):
                own = range(layer * num_stages, (layer + 1) * num_stages)
                self._add(dict.fromkeys(own, 1.0), 1, 1)
                if layer + 1 < num_layers:  # the next layer's stage is the same or a later one
                    step = {column: -float(stage) for stage, column in enumerate(own)}
                    step |= {column + num_stages: float(stage) for stage, column in enumerate(own)}
                    self._add(step, 0, inf)
        for stage in range(num_stages):
            self._add(dict.fromkeys(self.size_columns[stage], 1.0), task.fewest(stage), inf)
            if task.max_parameters is not None:
                fixed = self._fixed(stage, task.first_parameters, task.last_parameters)
                self._add(self._sum_of(stage, task.layer_parameters), -inf, task.max_parameters - fixed)
        if task.max_layers_of_rank is not None:
            for rank in range(task.num_ranks):
                columns = [c for stage in range(rank, num_stages, task.num_ranks) for c in self.size_columns[stage]]
                self._add(dict.fromkeys(columns, 1.0), -inf, task.max_layers_of_rank)

    def bound_scores(self) -> None:
        """The columns of rounds and of the fullest rank are at least what they are the largest of."""
        task, inf = self.task, float("inf")
        sums = [self._sum_of(stage, task.layer_seconds) for stage in range(task.num_stages)]
        fixed = [self._fixed(stage, task.first_seconds, task.last_seconds) for stage in range(task.num_stages)]
        for stage, row in enumerate(sums):
            round_column = self.num_cutting + stage // task.num_ranks
            self._add({round_column: 1.0} | {column: -value for column, value in row.items()}, fixed[stage], inf)
        for rank in range(task.num_ranks):
            own = range(rank, task.num_stages, task.num_ranks)
            row = {self.num_columns - 1: 1.0}
            for stage in own:
                row |= {column: -value for column, value in sums[stage].items()}
            self._add(row, sum(fixed[stage] for stage in own), inf)

    def objective(self, pace: float) -> list[float]:
        """The coefficients of what is minimized."""
        return [0.0] * self.num_cutting + [pace] * self.num_rounds + [1 - pace]

    def bounds(self) -> tuple[list[float], list[float]]:
        """Least and largest value of every column."""
        most = float(len(self.task.layer_seconds)) if self.are_alike else 1.0
        free = self.num_columns - self.num_cutting
        return [0.0] * self.num_columns, [most] * self.num_cutting + [float("inf")] * free

    def constraints(self) -> Any:
        """The rows as scipy takes them."""
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_matrix

        entries = [(value, index, column) for index, row in enumerate(self._rows) for column, value in row.items()]
        values, rows, columns = zip(*entries, strict=True)
        matrix = csr_matrix((values, (rows, columns)), shape=(len(self._rows), self.num_columns))
        return LinearConstraint(matrix, self._lower, self._upper)

    def _sum_of(self, stage: int, values: Sequence[float]) -> dict[int, float]:
        columns = self.size_columns[stage]
        return {columns[0]: values[0]} if self.are_alike else dict(zip(columns, values, strict=True))

    def _fixed(self, stage: int, first: float, last: float) -> float:
        return (first if stage == 0 else 0.0) + (last if stage == self.task.num_stages - 1 else 0.0)

    def _add(self, row: dict[int, float], lower: float, upper: float) -> None:
        self._rows.append(row)
        self._lower.append(lower)
        self._upper.append(upper)
