"""Evaluation of the model on held-out data, forward only, through the same pipeline.

    samples of each dataset -> batches of the run's shape -> passes -> sums of each microbatch -> loss, accuracy

A pass is a forward schedule over some batches, so that weights are loaded once for all of them. No rank waits between
passes. A pass fits the memory of a step: it uses the same slots, and its messages replace the saved
activations. It changes no training state, and waits for pending updates as a step does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain, count, islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from mobius.activity import Activity
from mobius.data.batches import Batch, EvaluationBatches, balance_microbatches
from mobius.data.token_store import TokenizedDataset
from mobius.distributed.transport import Transport, WarmupTransport
from mobius.engine.documents import position_ids_and_cu_seqlens
from mobius.engine.executor import Executor, StepBatch
from mobius.engine.step_sums import EvaluationSums
from mobius.engine.waits import WaitClock
from mobius.errors import DataError
from mobius.hardware.devices import MemoryMeter
from mobius.limits import max_sends_in_flight
from mobius.planner.run_setup import RunSetup
from mobius.schedule.build import build_schedule
from mobius.schedule.plan import Plan
from mobius.schedule.schedule import Schedule
from mobius.training.data import RunData
from mobius.training.session import Session
from mobius.training.stages import RankStages

MAX_BATCHES_PER_PASS = 8
"""More would not hide loads better: a load takes as long as the forward of some thousand tokens."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSamples:
    """Samples of a dataset to evaluate on."""

    name: str
    tokenized: TokenizedDataset
    indices: npt.NDArray[np.int64] | None = None
    """None: all samples."""

    def __len__(self) -> int:
        return len(self.tokenized) if self.indices is None else len(self.indices)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Numbers of an evaluation, equal on all ranks."""

    loss: float
    """Mean cross entropy over the targets, in nats."""
    perplexity: float
    """exp(loss); infinite if that is too large for a float."""
    token_accuracy: float
    """Share of the targets that have the largest logit, given all tokens before them."""
    num_targets: int
    num_tokens: int
    """Tokens without padding."""
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class EvaluationResult(Scores):
    """Numbers of all datasets together, and of each if there are several."""

    seconds: float
    tokens_per_second: float
    """Without padding, as in training."""
    by_dataset: Mapping[str, Scores] = field(default_factory=dict)
    """Numbers of each by name; empty for a single dataset."""


@dataclass
class _Counts:
    """Counts of one dataset during an evaluation."""

    losses: list[float] = field(default_factory=list)
    """Sum of each microbatch, on the rank of the last stage."""
    num_correct: int = 0
    num_targets: int = 0
    num_tokens: int = 0
    num_samples: int = 0

    def scores(self, loss_sum: float, num_correct: int) -> Scores:
        """Return the means from sums over all ranks."""
        loss = loss_sum / self.num_targets
        return Scores(
            loss=loss,
            perplexity=perplexity_of(loss),
            token_accuracy=num_correct / self.num_targets,
            num_targets=self.num_targets,
            num_tokens=self.num_tokens,
            num_samples=self.num_samples,
        )


class Evaluator:
    """Runs passes over the evaluation data, with the weights, slots and connections of the session."""

    def __init__(
        self,
        datasets: Mapping[str, EvaluationBatches],
        *,
        run_setup: RunSetup,
        stages: RankStages,
        transport: Transport,
        activity: Activity | None = None,
    ) -> None:
        """`datasets` by name, in batches of `run_setup`'s shape; at least one.

        `activity` gets the name of each pass; the first evaluation may compile.
        """
        assert datasets, "without data there is no evaluator"
        self._datasets, self._run_setup = datasets, run_setup
        self._stages, self._transport = stages, transport
        replicas = transport.replicas
        self._replica, self._num_replicas = (0, 1) if replicas is None else (replicas.index, replicas.num_replicas)
        self._activity, self._is_first = activity or Activity(), True
        self._clock = WaitClock(run_setup.rank_context.device)
        self._meter = MemoryMeter(run_setup.rank_context.device)
        self._batches_per_pass = min(batches_per_pass(run_setup.plan), sum(map(len, datasets.values())))
        self._executors: dict[int, Executor] = {}
        """Executor of a pass by its number of batches; only the last pass may have fewer."""

    def evaluate(self, *, show_progress: bool = False) -> EvaluationResult:
        """Evaluate the current weights on all data; collective, outside of steps.

        Shows a bar on a terminal. Raises the errors of a step.
        """
        with self._activity.warming_up() if self._is_first else nullcontext():
            result = self._evaluate(show_progress)
        self._is_first = False
        return result

    def _evaluate(self, show_progress: bool) -> EvaluationResult:
        num_microbatches = self._run_setup.plan.microbatches_per_round
        self._activity.start_action("the start of the evaluation")
        self._transport.all_ranks.barrier()
        start = time.perf_counter()
        self._transport.limit_pending_sends(max_sends_in_flight(num_microbatches * self._batches_per_pass))
        if sum(map(len, self._datasets.values())) < self._num_replicas:
            for memory in self._stages.memory.values():  # a replica without a pass loads no weights
                memory.weights.gather_updated()
        counts, made = {name: _Counts() for name in self._datasets}, list[tuple[list[str], EvaluationSums]]()
        with tqdm(
            total=sum(map(len, self._datasets.values())),
            desc="evaluating",
            unit="batch",
            leave=False,
            disable=None if show_progress else True,
        ) as progress:
            for names, batches in self._passes():
                self._activity.start_action("the batches of the evaluation")
                for name, batch in zip(names, batches, strict=True):
                    own = counts[name]
                    own.num_targets += batch.num_targets
                    own.num_tokens += batch.num_tokens
                    own.num_samples += batch.num_samples
                mine = slice(self._replica, None, self._num_replicas)
                if own_batches := batches[mine]:  # a last pass may have fewer than there are replicas
                    executor = self._executor(len(own_batches))
                    made.append((names[mine], executor.evaluate(concatenate_batches(own_batches, self._run_setup))))
                progress.update(len(batches))
        self._transport.limit_pending_sends(max_sends_in_flight(num_microbatches))
        self._activity.start_action("the end of the evaluation")
        with self._activity.waiting("the device"):
            self._add(made, counts)
        self._clock.collect()
        return self._agree(counts, start)

    def warm_up(self) -> None:
        """Run a pass of this rank alone on synthetic data, so that kernels and memory are ready for the first pass.

        Compiling and allocating would otherwise wait for receives that occupy the GPU (distributed/transport.py).
        """
        run_setup, number = self._run_setup, self._batches_per_pass
        num_microbatches = run_setup.plan.microbatches_per_round * number
        transport = WarmupTransport(
            rank=self._transport.rank,
            device=run_setup.rank_context.device,
            shape=run_setup.sent_shape,
            dtype=run_setup.dtype,
            max_pending_sends=max_sends_in_flight(num_microbatches),
        )
        shape = _batch_size(run_setup), run_setup.config.data.seq_length
        tokens = np.zeros(shape, dtype=np.int64)
        rows = ((shape[1],),) * shape[0] if run_setup.result.request.packed else None
        batch = Batch(tokens, tokens, tokens.size, tokens.size, shape[0], 0.0, rows)
        executor = self._stages.executor(self._schedule(number), transport)
        executor.evaluate(concatenate_batches([batch] * number, run_setup))
        self._meter.synchronize()

    def _passes(self) -> Iterator[tuple[list[str], list[Batch]]]:
        """Yield the batches of each pass of all replicas, which alternate, with the dataset of each batch."""
        every = ((name, batch) for name, batches in self._datasets.items() for batch in batches)
        while named := list(islice(every, self._batches_per_pass * self._num_replicas)):
            yield [name for name, _ in named], [batch for _, batch in named]

    def _executor(self, num_batches: int) -> Executor:
        if num_batches not in self._executors:
            schedule = self._schedule(num_batches)
            self._executors[num_batches] = self._stages.executor(
                schedule, self._transport, self._clock, activity=self._activity
            )
        return self._executors[num_batches]

    def _schedule(self, num_batches: int) -> Schedule:
        plan = self._run_setup.plan
        return build_schedule(plan.evaluation(plan.microbatches_per_round * num_batches))

    def _add(self, made: Sequence[tuple[list[str], EvaluationSums]], counts: Mapping[str, _Counts]) -> None:
        """Copy the sums to the host and add them to their datasets' counts."""
        self._meter.synchronize()  # sync: once per evaluation
        num_microbatches = self._run_setup.plan.microbatches_per_round
        for names, sums in made:
            losses = sums.losses.cpu().view(-1, num_microbatches).tolist()
            num_correct = sums.num_correct.cpu().view(-1, num_microbatches).sum(1).tolist()
            for name, own_losses, own_correct in zip(names, losses, num_correct, strict=True):
                counts[name].losses += own_losses
                counts[name].num_correct += own_correct

    def _agree(self, counts: Mapping[str, _Counts], start: float) -> EvaluationResult:
        """Return the result of all ranks, from the sums of the ranks with the last stage."""
        # fsum rounds once, at the end, so the result does not depend on the order.
        own = [[math.fsum(each.losses), each.num_correct] for each in counts.values()]
        own.append([math.fsum(loss for each in counts.values() for loss in each.losses), 0])
        sums = self._transport.all_ranks.sum_over_ranks(torch.tensor(own, dtype=torch.float64))
        *summed, (loss_sum, _) = sums.tolist()
        total = _Counts(
            num_targets=sum(each.num_targets for each in counts.values()),
            num_tokens=sum(each.num_tokens for each in counts.values()),
            num_samples=sum(each.num_samples for each in counts.values()),
        )
        scores = total.scores(loss_sum, sum(int(correct) for _, correct in summed))
        each = {
            name: own.scores(loss, int(correct))
            for (name, own), (loss, correct) in zip(counts.items(), summed, strict=True)
        }
        seconds = time.perf_counter() - start
        return EvaluationResult(
            **vars(scores),
            seconds=seconds,
            tokens_per_second=total.num_tokens / seconds,
            by_dataset=each if len(each) > 1 else {},
        )


def make_evaluator(session: Session, samples: Sequence[EvaluationSamples], *, pad_token_id: int) -> Evaluator:
    """Make the evaluator of a run on `samples`, in rows like the run's; on all ranks, between two steps.

    Raises DataError if there are none.
    """
    if not any(map(len, samples)):
        raise DataError("there is nothing to evaluate on: give --eval_dataset, or --val_size with a number above 0")
    run_setup = session.run_setup
    packed = run_setup.result.request.packed
    datasets = {
        name: EvaluationBatches(
            each.tokenized,
            each.indices,
            batch_size=_batch_size(run_setup),
            seq_length=run_setup.config.data.seq_length,
            pad_token_id=pad_token_id,
            max_documents=None if packed is None else packed.max_documents,
        )
        for name, each in _named(samples)
    }
    evaluator = Evaluator(
        datasets,
        run_setup=run_setup,
        stages=session.stages,
        transport=session.transport,
        activity=session.activity,
    )
    if run_setup.rank_context.device.type == "cuda" and run_setup.rank_context.ranks.num_pipeline_ranks > 1:
        evaluator.warm_up()
    return evaluator


def evaluation_samples(data: RunData) -> list[EvaluationSamples]:
    """Return the samples of `--eval_dataset`, and those that `--val_size` holds out of each training dataset."""
    prepared = data.prepared
    given = [EvaluationSamples(name=each.entry.name, tokenized=each.tokenized) for each in prepared.evaluation]
    held_out = [
        EvaluationSamples(name=each.entry.name, tokenized=each.tokenized, indices=indices)
        for each, indices in zip(prepared.training, data.validation_indices, strict=True)
    ]
    return [*given, *(each for each in held_out if len(each))]


def _batch_size(run_setup: RunSetup) -> int:
    """Return the rows of an evaluation batch: those of one round, since a whole step may not fit."""
    return run_setup.result.request.rows // run_setup.plan.accumulation_rounds


def batches_per_pass(plan: Plan) -> int:
    """Return the number of batches in a pass, such that no rank holds more memory than in a round of a step.

    While the microbatches of a pass go through one stage, their messages to the next stage wait. A round holds these
    messages for one batch, and the inputs of all layers of the stages that wait for their backward.
    """
    waiting = [
        [stage for stage in plan.local_stages(rank) if not plan.cuts[stage].is_last] for rank in range(plan.num_ranks)
    ]
    num_layers = [sum(len(plan.cuts[stage].layers) for stage in own) for own in waiting if own]
    most = MAX_BATCHES_PER_PASS * plan.accumulation_rounds
    return min(most, 1 + min(num_layers, default=most))


def concatenate_batches(batches: Sequence[Batch], run_setup: RunSetup) -> StepBatch:
    """Concatenate the batches of a pass, each in the order of its microbatches; page-locked for a GPU."""
    plan, packed = run_setup.plan, run_setup.result.request.packed
    groups = plan.microbatches_per_round // plan.num_slices
    arranged = [balance_microbatches(batch, groups) for batch in batches]

    def tensor(array: npt.NDArray[np.integer]) -> Tensor:
        made = torch.from_numpy(array)
        return made.pin_memory() if run_setup.rank_context.device.type == "cuda" else made

    documents = None
    if packed is not None:
        position_ids, cu_seqlens = position_ids_and_cu_seqlens(
            [row for batch in arranged for row in batch.document_lengths or ()],
            seq_length=run_setup.config.data.seq_length,
            num_microbatches=groups * len(batches),
            max_documents=packed.max_documents,
        )
        documents = tensor(position_ids), tensor(cu_seqlens)
    return StepBatch(
        tensor(np.concatenate([batch.input_ids for batch in arranged])),
        tensor(np.concatenate([batch.labels for batch in arranged])),
        sum(batch.num_targets for batch in arranged),
        sum(batch.num_tokens for batch in arranged),
        sum(batch.num_samples for batch in arranged),
        documents=documents,
    )


def perplexity_of(loss: float) -> float:
    """Return exp(loss), infinite if a float cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _named(samples: Sequence[EvaluationSamples]) -> Iterator[tuple[str, EvaluationSamples]]:
    """Yield the datasets that have samples, with unique names."""
    taken = set[str]()
    for each in samples:
        if len(each):
            numbered = (f"{each.name} ({number})" for number in count(2))
            name = next(name for name in chain([each.name], numbered) if name not in taken)
            taken.add(name)
            yield name, each
