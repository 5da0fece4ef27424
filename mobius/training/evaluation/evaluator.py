"""Evaluation of the model on held-out data, forward only, through the pipeline that trains.

    samples of each dataset -> batches of the run's shape -> passes -> sums of each microbatch -> loss, accuracy

A pass is a forward schedule for several batches, so that weights are loaded once for all of these batches. No rank
waits between passes. A pass fits into the memory of a step: it uses the same slots, and its messages need no more than
a step's saved activations. A pass changes no training state, and waits for pending updates as a step does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from mobius.data.batches import Batch, EvaluationBatches
from mobius.data.token_store import TokenizedDataset
from mobius.engine.executor import Executor
from mobius.engine.waits import Observers, WaitClock
from mobius.errors import DataError
from mobius.hardware.devices import MemoryMeter
from mobius.limits import max_sends_in_flight
from mobius.objectives.objective import KL, Objective, StepScale
from mobius.schedule.build import build_schedule
from mobius.schedule.plan import Plan
from mobius.schedule.schedule import Schedule
from mobius.training.divergence import Divergence
from mobius.training.memory_check import warmup_transport
from mobius.training.session import Session
from mobius.training.step_batches import concatenate_batches, target_rows, warmup_fields

MAX_BATCHES_PER_PASS = 8
"""Maximum number of batches of a pass. More batches would not hide loads better: a load takes as long as the forward of
a few thousand tokens."""

NamedSamples = tuple[str, TokenizedDataset, npt.NDArray[np.int64] | None]
"""Name of a dataset, its samples, and the indices of the samples to evaluate on; None: all samples."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Metrics of an evaluation, equal on all ranks."""

    metrics: Mapping[str, float]
    """Metrics by their names in logs, trackers and `BestMetric`; "loss" is one of them."""
    num_targets: int
    num_tokens: int
    """Number of tokens without padding."""
    num_samples: int

    @property
    def loss(self) -> float:
        """Loss of the objective; for supervised fine-tuning the mean cross entropy over the targets, in nats."""
        return self.metrics["loss"]

    @property
    def numbers(self) -> dict[str, float]:
        """Metrics by their names in logs and trackers."""
        return dict(self.metrics)


@dataclass(frozen=True, kw_only=True)
class EvaluationResult(Scores):
    """Metrics of all datasets together, and of each dataset if there are several."""

    seconds: float
    tokens_per_second: float
    """Tokens without padding per second, as in training."""
    by_dataset: Mapping[str, Scores] = field(default_factory=dict)
    """Metrics of each dataset by its name; empty for a single dataset."""

    @property
    def numbers(self) -> dict[str, float]:
        """Metrics by their names in logs and trackers."""
        speeds = {
            "runtime": self.seconds,
            "samples_per_second": self.num_samples / self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }
        parts = ((f"{name}_{key}", each) for name, own in self.by_dataset.items() for key, each in own.numbers.items())
        return {**super().numbers, **speeds, **dict(parts)}


@dataclass
class _Counts:
    """Counts of one dataset during an evaluation."""

    sums: list[Sequence[float]] = field(default_factory=list)
    """Sums of each microbatch (`Objective.evaluate`); filled on the rank of the last stage only."""
    num_targets: int = 0
    num_tokens: int = 0
    num_samples: int = 0
    counts: dict[str, float] = field(default_factory=dict)
    """Divisors of the objective."""

    def add(self, other: Batch | _Counts, counts: Mapping[str, float]) -> None:
        """Add the counts of a batch or of another dataset."""
        self.num_targets += other.num_targets
        self.num_tokens += other.num_tokens
        self.num_samples += other.num_samples
        for name, number in counts.items():
            self.counts[name] = self.counts.get(name, 0) + number
        if isinstance(other, _Counts):
            self.sums += other.sums

    def scores(self, objective: Objective, sums: Sequence[float]) -> Scores:
        """Return the metrics; `sums` are over all ranks."""
        scale = StepScale(self.num_targets, counts=self.counts)
        return Scores(
            metrics=objective.scores(dict(zip(objective.evaluation_names, sums, strict=True)), scale),
            num_targets=self.num_targets,
            num_tokens=self.num_tokens,
            num_samples=self.num_samples,
        )


class Evaluator:
    """Runs passes over the evaluation data, with the weights, slots and connections of the session."""

    def __init__(self, session: Session, samples: Iterable[NamedSamples], *, pad_token_id: int) -> None:
        """Arrange `samples` in rows like the run's; called by all ranks between steps. Raises DataError if none."""
        self._session, self._run_setup = session, session.run_setup
        self._objective = session.stages.objective
        ranks, request = self._run_setup.ranks, self._run_setup.result.request
        self._ranks, self._is_first = ranks, True
        self._batch_size = request.rows // self._run_setup.plan.num_rounds
        """Rows of a batch: the rows of one round, because the rows of a whole step may not fit."""
        self.samples = tuple(_distinctly_named(samples))
        """Datasets with unique names, and the indices of their samples."""
        self.complete: Mapping[str, Callable[[Batch], Batch]] = {}
        """Function that gives the batches of a dataset the reference scores, or a teacher's numbers."""
        self.divergences: Mapping[str, Divergence] = {}
        """Estimates KL on each dataset, for an objective that needs it."""
        self._kl: Mapping[str, float] = {}
        self.datasets = {
            name: EvaluationBatches(
                tokenized,
                indices,
                batch_size=self._batch_size,
                seq_length=self._run_setup.config.data.seq_length,
                pad_token_id=pad_token_id,
                max_documents=None if request.packed is None else request.packed.max_documents,
                has_sequences=self._run_setup.config.evaluation.save_scores or self._objective.teacher is not None,
            )
            for name, tokenized, indices in self.samples
        }
        if not self.datasets:
            raise DataError("there is nothing to evaluate on: give --eval_dataset, or --val_size with a number above 0")
        device = self._run_setup.rank_context.device
        self._observers, self._meter = Observers(WaitClock(device), activity=session.activity), MemoryMeter(device)
        self._num_batches = sum(map(len, self.datasets.values()))
        self._batches_per_pass = min(batches_per_pass(self._run_setup.plan), self._num_batches)
        self._executors: dict[int, Executor] = {}
        """Executor of a pass, by the pass's number of batches; only the last pass may have fewer batches."""
        if device.type == "cuda" and ranks.num_pipeline_ranks > 1:
            self._warm_up()

    def evaluate(self, *, show_progress: bool = False) -> EvaluationResult:
        """Evaluate the current weights on all data; collective, between steps. The first call may compile.

        `show_progress` shows a bar on a terminal. Raises the errors of a step.
        """
        with self._session.activity.warming_up() if self._is_first else nullcontext():
            result = self._evaluate(show_progress)
        self._is_first = False
        return result

    def _evaluate(self, show_progress: bool) -> EvaluationResult:
        activity, transport = self._session.activity, self._session.transport
        num_microbatches = self._run_setup.plan.microbatches_per_round
        activity.start_action("the start of the evaluation")
        transport.all_ranks.barrier()
        start = time.perf_counter()
        self._kl = {name: each.estimate(self.datasets[name].indices) for name, each in self.divergences.items()}
        transport.limit_pending_sends(max_sends_in_flight(num_microbatches * self._batches_per_pass))
        if self._num_batches < self._ranks.num_replicas:
            for memory in self._session.memory.values():  # without a pass, no load gathers weights
                memory.weights.gather_updated()
        counts, made = {name: _Counts() for name in self.datasets}, list[tuple[list[str], dict[int, Tensor]]]()
        with tqdm(
            total=self._num_batches,
            desc="evaluating",
            unit="batch",
            leave=False,
            disable=None if show_progress else True,
        ) as progress:
            for names, batches in self._passes():
                activity.start_action("the batches of the evaluation")
                for name, batch in zip(names, batches, strict=True):
                    counts[name].add(batch, self._objective.counts(target_rows(batch)))
                mine = slice(self._ranks.replica, None, self._ranks.num_replicas)
                if own_batches := batches[mine]:  # the last pass may have fewer batches than there are replicas
                    made.append((names[mine], self._run_pass(self._executor(len(own_batches)), own_batches)))
                progress.update(len(batches))
        transport.limit_pending_sends(self._run_setup.plan.max_sends_in_flight)
        activity.start_action("the end of the evaluation")
        with activity.waiting("the device"):
            self._add(made, counts)
        self._observers.clock.collect()
        return self._agree(counts, start)

    def _warm_up(self) -> None:
        """Run a pass of this rank alone on synthetic data, so that kernels and memory are ready for the first pass.

        Otherwise compiling and allocating would wait for receives that occupy the GPU (distributed/transport.py).
        """
        number, seq_length = self._batches_per_pass, self._run_setup.config.data.seq_length
        num_microbatches = self._run_setup.plan.microbatches_per_round * number
        transport = warmup_transport(self._run_setup, max_sends_in_flight(num_microbatches))
        tokens = np.zeros((self._batch_size, seq_length), dtype=np.int64)
        rows = ((seq_length,),) * self._batch_size
        fields = warmup_fields(self._run_setup, rows)
        packed = rows if self._run_setup.result.request.packed else None
        batch = Batch(tokens, tokens, tokens.size, tokens.size, self._batch_size, 0.0, packed, **fields)
        self._run_pass(self._session.stages.executor(self._schedule(number), transport), [batch] * number)
        self._meter.synchronize()

    def _passes(self) -> Iterator[tuple[list[str], list[Batch]]]:
        """Yield each pass: the batches of all replicas, which take turns, and the dataset name of each batch."""
        every = ((name, self._scored(name, batch)) for name, batches in self.datasets.items() for batch in batches)
        while named := list(islice(every, self._batches_per_pass * self._ranks.num_replicas)):
            yield [name for name, _ in named], [batch for _, batch in named]

    def _scored(self, name: str, batch: Batch) -> Batch:
        batch = self.complete[name](batch) if self.complete else batch
        if name not in self._kl or batch.sequence_numbers is None:
            return batch
        values = (batch.sequence_numbers >= 0) * np.float32(self._kl[name])
        return replace(batch, sequence_values={**batch.sequence_values, KL: values})

    def _run_pass(self, executor: Executor, batches: Sequence[Batch]) -> dict[int, Tensor]:
        plan = self._run_setup.plan
        groups = plan.microbatches_per_round // plan.num_slices
        return executor.evaluate(concatenate_batches(batches, self._run_setup, groups))

    def _executor(self, num_batches: int) -> Executor:
        if num_batches not in self._executors:
            self._executors[num_batches] = self._session.stages.executor(
                self._schedule(num_batches), self._session.transport, self._observers
            )
        return self._executors[num_batches]

    def _schedule(self, num_batches: int) -> Schedule:
        plan = self._run_setup.plan
        return build_schedule(plan.evaluation(plan.microbatches_per_round * num_batches))

    def _add(self, made: Sequence[tuple[list[str], dict[int, Tensor]]], counts: Mapping[str, _Counts]) -> None:
        """Copy the sums to the host and add each to the counts of its dataset."""
        self._meter.synchronize()  # sync: once per evaluation
        num_microbatches = self._run_setup.plan.microbatches_per_round
        for names, sums in made:
            if sums:  # on the rank of the last stage
                rows = torch.stack([sums[microbatch] for microbatch in sorted(sums)]).tolist()
                for place, name in enumerate(names):
                    counts[name].sums += rows[place * num_microbatches : (place + 1) * num_microbatches]

    def _agree(self, counts: Mapping[str, _Counts], start: float) -> EvaluationResult:
        """Return the result of all ranks; only the ranks with the last stage add sums to it."""
        total, objective = _Counts(), self._objective
        for each in counts.values():
            total.add(each, each.counts)
        every = [*counts.values(), total]
        # fsum rounds once, at the end, so the result does not depend on the order.
        nothing = [0.0] * len(objective.evaluation_names)
        own = [[math.fsum(column) for column in zip(*(each.sums or [nothing]), strict=True)] for each in every]
        sums = self._session.all_ranks.sum_over_ranks(torch.tensor(own, dtype=torch.float64)).tolist()
        *scores, overall = (each.scores(objective, row) for each, row in zip(every, sums, strict=True))
        seconds = time.perf_counter() - start
        return EvaluationResult(
            **vars(overall),
            seconds=seconds,
            tokens_per_second=total.num_tokens / seconds,
            by_dataset=dict(zip(counts, scores, strict=True)) if len(counts) > 1 else {},
        )


def batches_per_pass(plan: Plan) -> int:
    """Return the largest number of batches in a pass with which a rank needs no more memory than in a round of a step.

    While the microbatches of a pass go through one stage, their messages to the next stage wait in memory. A round of
    a step holds such messages for one batch, and also the inputs of all layers in stages that wait for backward.
    """
    waiting = [
        [stage for stage in plan.local_stages(rank) if not plan.cuts[stage].is_last] for rank in range(plan.num_ranks)
    ]
    num_layers = [sum(len(plan.cuts[stage].layers) for stage in own) for own in waiting if own]
    most = MAX_BATCHES_PER_PASS * plan.num_rounds
    return min(most, 1 + min(num_layers, default=most))


def _distinctly_named(samples: Iterable[NamedSamples]) -> Iterator[NamedSamples]:
    """Yield the datasets that have samples, with unique names."""
    taken = set[str]()
    for given, tokenized, indices in samples:
        if len(tokenized if indices is None else indices):
            numbered = (f"{given} ({number})" for number in count(2))
            name = next(name for name in chain([given], numbered) if name not in taken)
            taken.add(name)
            yield name, tokenized, indices
