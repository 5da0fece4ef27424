"""Answers what a run would do on a machine one does not have: an estimated profile, what fits, a predicted step.

Nothing is measured here, so every number is an estimate. Several nodes exist on paper only: one ring of ranks goes
through all of them, all messages are as slow as those between nodes, and the hosts' memory counts as one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, partial

from mobius.config.config import Dtype, Recompute
from mobius.errors import PlanError
from mobius.limits import INCOMING_EDGES, NUM_MAILBOXES
from mobius.plan.budget import (
    ByteSizes,
    StepTokens,
    fullest,
    gpu_need,
    gpu_process_bytes,
    waiting_stages,
)
from mobius.plan.cards import GIGA, LATENCY, TERA, Card, Host, estimate_profile
from mobius.plan.choice import (
    Candidate,
    Choice,
    Fitting,
    Job,
    choose_stages_and_chunks,
    predict,
)
from mobius.plan.fit import memory_uses
from mobius.plan.fit_request import FitRequest
from mobius.plan.memory_use import StepModel, by_simulation, chosen_stages, score_by_profile
from mobius.plan.partition import StageSpan, balanced_partition
from mobius.plan.plan import Plan, make_plan
from mobius.plan.profile import MessageRates, Profile
from mobius.plan.sensitivity import Resource, limiting_resource
from mobius.plan.shape import ModelShape
from mobius.plan.simulation import simulated_seconds, without_collector
from mobius.plan.stage_costs import StepRules, stage_costs
from mobius.plan.working_set import estimate_layer
from mobius.units import GIB

OUTSIDE_BYTES = GIB
"""Of a card's memory, what the driver and communicators take. A guess."""


@dataclass(frozen=True)
class Machine:
    """GPUs and what is around them; `num_gpus` are those of one node."""

    card: Card
    num_gpus: int
    host: Host
    pcie: int | None = None
    """None: the card's own generation."""
    num_nodes: int = 1
    node_link: float = 25.0
    """GB/s between neighbouring nodes, in one direction; 25 is 200 Gbit/s."""

    @property
    def num_ranks(self) -> int:
        return self.num_gpus * self.num_nodes


@dataclass(frozen=True)
class Run:
    """What is to be trained, and how."""

    shape: ModelShape
    batch_size: int
    seq_length: int
    num_stages: int | None
    """None: chosen, as is the number of chunks."""
    num_chunks: int | None
    gpu_memory_limit: float | None = None
    """GiB; None: the card's memory."""
    use_offload: bool = True
    num_resident: int | None = None
    """Stages of each rank, the first ones, that stay on the GPU while the others are streamed; None: what pays."""
    recompute: Recompute = Recompute.AUTO
    clips: bool = True
    overlaps_optimizer: bool = True
    use_prefetch: bool = True
    loss_chunk_tokens: int = 2048
    dtype: Dtype = Dtype.BF16
    """A format of two bytes; the cards' rates are for those."""
    has_fp32_gradients: bool = False
    """On their way to the host."""

    @property
    def sizes(self) -> ByteSizes:
        return ByteSizes.of(self.dtype, has_fp32_gradients=self.has_fp32_gradients)

    @property
    def step_tokens(self) -> int:
        return self.batch_size * self.seq_length

    def rules(self, num_chunks: int) -> StepRules:
        """How a step of that many microbatches goes."""
        sizes = self.sizes
        return StepRules(
            clips=self.clips,
            message_bytes=self.step_tokens // num_chunks * self.shape.hidden_size * sizes.weight,
            overlaps_optimizer=self.overlaps_optimizer,
            weight_bytes=sizes.weight,
            gradient_bytes=sizes.gradient,
            is_tied=self.shape.is_tied,
        )


@dataclass(frozen=True)
class Answer:
    """A predicted run, with what it takes and what holds it up."""

    machine: Machine
    run: Run
    choice: Choice
    gpu_bytes: int
    """What torch takes on the fullest rank (`budget.gpu_need`)."""
    host_bytes: int
    """Of all ranks of a node."""
    limit: Resource
    gain: float
    """The share of a step that `limit` would save if it were 1.1 times as fast."""

    @property
    def candidate(self) -> Candidate:
        return self.choice.best

    @property
    def tokens_per_second(self) -> float:
        return self.run.step_tokens / self.candidate.prediction.step_seconds

    @property
    def mfu(self) -> float:
        """Operations of the model without recompute, over what the cards' data sheets give in a step.

        Six for each parameter but the embedding's and per token, and those of causal attention.
        """
        shape = self.run.shape
        parameters = sum(shape.layer_parameters) + shape.head_parameters
        attention = shape.num_layers * shape.hidden_size * self.run.seq_length
        operations = 6 * (parameters + attention) * self.tokens_per_second
        return operations / (self.machine.card.tera_flops * TERA * self.machine.num_ranks)


@without_collector()
def answer(machine: Machine, run: Run, *, measured: Profile | None = None) -> Answer:
    """Predict `run` on `machine`, by a profile that was measured there if there is one.

    Raises GpuMemoryError or PlanError, each with what to change.
    """
    _check(machine, run)
    job = make_job(machine, run, measured=measured)
    if run.num_stages is not None and run.num_chunks is not None:
        choice = _as_given(job, run.num_stages, run.num_chunks)
    else:
        choice = choose_stages_and_chunks(job, num_stages=run.num_stages, num_chunks=run.num_chunks)
    best = choice.best

    def seconds(profile: Profile) -> float:
        costs = stage_costs(
            best.spans, job.shape, profile, resident=best.fitting.resident, graph_stages=best.fitting.graph_stages
        )
        return simulated_seconds(best.schedule, costs, profile, job.rules(best.num_chunks))

    limit, gain = limiting_resource(best.profile, seconds)
    memory = _gpu_bytes(machine, run, best.spans, best.num_chunks, best.fitting)
    return Answer(machine, run, choice, memory, _host_bytes(machine, run, best), limit, gain)


def make_job(machine: Machine, run: Run, *, measured: Profile | None = None) -> Job:
    """The choice's view of `run` on `machine`."""

    @cache
    def profile_of(tokens: int) -> Profile:
        if measured is not None:
            _check_measured(measured, run.shape, num_ranks=machine.num_ranks, tokens=tokens)
            return measured
        return machine_profile(machine, run.shape, microbatch_tokens=tokens, seq_length=run.seq_length)

    def fit_cut(spans: tuple[StageSpan, ...], num_chunks: int, *, is_quick: bool) -> Fitting:
        model = StepModel(profile_of(run.step_tokens // num_chunks), run.rules(num_chunks))
        return fit(machine, run, spans, num_chunks, model, is_quick=is_quick)

    return Job(
        shape=run.shape,
        num_ranks=machine.num_ranks,
        batch_size=run.batch_size,
        seq_length=run.seq_length,
        rules=run.rules,
        profile_of=profile_of,
        fit=partial(fit_cut, is_quick=True),
        fit_well=partial(fit_cut, is_quick=False),
    )


def machine_profile(machine: Machine, shape: ModelShape, *, microbatch_tokens: int, seq_length: int) -> Profile:
    """The estimate of all nodes together."""
    nodes = machine.num_nodes
    profile = estimate_profile(
        machine.card,
        shape,
        microbatch_tokens=microbatch_tokens,
        seq_length=seq_length,
        num_ranks=machine.num_ranks,
        pcie=machine.pcie,
        host=replace(machine.host, bandwidth=machine.host.bandwidth * nodes),
    )
    if nodes == 1:
        return profile
    between = min(machine.node_link * GIGA, profile.messages.bandwidth)
    messages = MessageRates(between, LATENCY, profile.messages.is_through_host)
    return replace(profile, messages=messages, basis=f"{nodes} nodes on paper, together {profile.basis}")


def fit(
    machine: Machine,
    run: Run,
    spans: tuple[StageSpan, ...],
    num_chunks: int,
    model: StepModel,
    *,
    is_quick: bool = False,
) -> Fitting:
    """What stays on the GPUs, by simulation or quickly. Raises GpuMemoryError if the cut does not fit."""
    request = _request(machine, run, spans, num_chunks)
    graph_bytes = _graph_bytes(run, num_chunks)
    if is_quick:
        chosen = memory_uses(request, graph_bytes=graph_bytes, score=score_by_profile(request, model))
    else:
        chosen = memory_uses(request, graph_bytes=graph_bytes, choose=by_simulation(model))
    resident, graphs = chosen_stages(machine.num_ranks, len(spans), chosen)
    return Fitting(tuple(each.num_slots for each in chosen), resident, graphs)


def _request(machine: Machine, run: Run, spans: tuple[StageSpan, ...], num_chunks: int) -> FitRequest:
    slots = None if not run.use_offload else min(2 if run.use_prefetch else 1, len(spans) // machine.num_ranks)
    plan = make_plan(
        run.shape,
        num_ranks=machine.num_ranks,
        num_stages=len(spans),
        num_microbatches=num_chunks,
        num_slots=slots,
        spans=spans,
    )
    tokens = _tokens(run, num_chunks)
    message = tokens.microbatch * run.shape.hidden_size * run.sizes.weight
    return FitRequest(
        plan,
        run.shape,
        run.sizes,
        tokens,
        gpu_bytes=_usable_bytes(machine, run),
        recompute=run.recompute,
        num_resident=plan.stages_per_rank if slots is None else run.num_resident,
        waiting=waiting_of(run, len(spans)),
        reserved_bytes=INCOMING_EDGES * NUM_MAILBOXES * message,
    )


def waiting_of(run: Run, num_stages: int) -> frozenset[int]:
    """Stages that keep their gradients (`budget.waiting_stages`)."""
    return waiting_stages(num_stages, clips=run.clips, scales_loss=False, is_tied=run.shape.is_tied)


def _as_given(job: Job, num_stages: int, num_chunks: int) -> Choice:
    candidate = predict(job, balanced_partition(job.shape.num_layers, num_stages, num_ranks=job.num_ranks), num_chunks)
    return Choice(candidate, (candidate,), ())


def _check(machine: Machine, run: Run) -> None:
    if run.num_stages is not None and run.num_stages % machine.num_ranks:
        raise PlanError(f"--num_stages {run.num_stages} is not a multiple of the {machine.num_ranks} GPUs.")
    if run.num_chunks is not None and run.batch_size % run.num_chunks:
        raise PlanError(f"--batch_size {run.batch_size} cannot be cut into --num_chunks {run.num_chunks} equal parts.")
    if run.num_resident and not run.use_offload:
        raise PlanError("--resident_stages has no meaning with --no_offload, where all stages are resident.")


def _check_measured(measured: Profile, shape: ModelShape, *, num_ranks: int, tokens: int) -> None:
    given = (measured.num_ranks, measured.microbatch_tokens, len(measured.kind_of_layer))
    wanted = (num_ranks, tokens, shape.num_layers)
    if given != wanted:
        parts = "ranks, tokens of a microbatch and layers"
        raise PlanError(f"the profile is of another run: its {parts} are {given}, {wanted} are asked for.")


def _tokens(run: Run, num_chunks: int) -> StepTokens:
    return StepTokens(run.step_tokens, run.step_tokens // num_chunks, run.loss_chunk_tokens, run.batch_size)


def _graph_bytes(run: Run, num_chunks: int) -> int:
    tokens = run.step_tokens // num_chunks
    return estimate_layer(run.sizes.weight, run.shape, tokens, compiled=True).graph


def _usable_bytes(machine: Machine, run: Run) -> int:
    card = int(machine.card.memory_gb * GIB) - OUTSIDE_BYTES
    return card if run.gpu_memory_limit is None else min(card, int(run.gpu_memory_limit * GIB))


def _gpu_bytes(machine: Machine, run: Run, spans: tuple[StageSpan, ...], num_chunks: int, fitting: Fitting) -> int:
    """By the arithmetic of plan/budget.py, with what is kept and what is resident."""
    plan = Plan(machine.num_ranks, num_chunks, fitting.slots, spans, fitting.resident)
    return fullest(
        gpu_need(
            plan,
            run.shape,
            run.sizes,
            _tokens(run, num_chunks),
            rank=rank,
            waiting=waiting_of(run, len(spans)),
            graph_stages=fitting.graph_stages,
        )
        for rank in range(machine.num_ranks)
    ).total


def _host_bytes(machine: Machine, run: Run, candidate: Candidate) -> int:
    streamed = [span for span in candidate.spans if span.stage not in candidate.fitting.resident]
    parameters = sum(span.num_parameters(run.shape) for span in streamed)
    per_node = math.ceil(parameters * run.sizes.host / machine.num_nodes)
    process_bytes = gpu_process_bytes(streams=parameters > 0, measures=run.use_offload)
    return per_node + machine.num_gpus * process_bytes
