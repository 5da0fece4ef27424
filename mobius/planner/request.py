"""The question that the planner answers: one pure value of a configuration, a model's sizes and a machine's facts.

A run, a dry run, `auto` and the benchmarks all ask by it, so that none can leave an option out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mobius.config.config import (
    Compile,
    Config,
    Dtype,
    DurableSteps,
    OptimizerStates,
    Order,
    Recompute,
    ReduceDtype,
)
from mobius.limits import NUM_INCOMING_EDGES, NUM_MAILBOXES, NUM_STATE_BUFFERS
from mobius.planner.gpu_specs import GpuSpec, Host
from mobius.planner.peak_memory import estimate_layer
from mobius.planner.profile import DiskRates
from mobius.planner.stage_costs import StepRules
from mobius.schedule.memory_layout import SUM_BYTES, DiskRules, MemoryRules
from mobius.schedule.packed_rows import PackedRows
from mobius.schedule.partition import ModelShape, StageCut
from mobius.schedule.plan import Plan, make_plan
from mobius.schedule.spec import ComputeOrder
from mobius.units import GIB

BESIDE_PRODUCTS = 1 / 64
"""Bytes saved with the products, as a share of theirs: attention's log-sum-exps, a norm's numbers. An estimate."""
NODE_LINK = 12.5
"""GB/s of a node's link to the others, in each direction, where nobody has said or measured it: 100 Gbit/s."""
MOST_NODES = 64
"""Maximum number of nodes that a refusal suggests."""
REDUCED_PARTS = {OptimizerStates.BF16: (2, 2, 2), OptimizerStates.COMPACT: (1, 1, 1, 1 / 32, 1 / 32)}
"""Bytes per parameter of each part of the layers' optimizer states (engine/reduced_states.py)."""
OUTSIDE_BYTES = GIB
"""Memory of a card that the driver and communicators take. A guess, where what is free is not known."""


@dataclass(frozen=True)
class Machine:
    """Facts of the machine that a run is planned for; all ranks have the same GPU."""

    num_ranks: int
    """Ranks of one pipeline."""
    gpu_spec: GpuSpec | None = None
    """Data sheet of the GPU; None where there is none: for a CPU, and for a GPU that is not known."""
    total_bytes: int | None = None
    """Memory of a GPU as the driver reports it; None: the data sheet's counts."""
    free_bytes: int | None = None
    """Memory of this rank's GPU that is free, or as much of it as the run may use; None where it was not asked."""
    host_bytes: int | None = None
    """Memory of the host that all ranks together may count on; None where it is not known."""
    agreed_host_bytes: int | None = None
    """The least of that on any node of a run, its own option counted; None where ranks have not met."""
    has_peer_copies: bool = True
    """Whether GPUs may write into each other's memory, if the card can."""
    product_share: float = 1.0
    """Measured rate of large products over the card's usual one, where it is much lower: of a limited or shared GPU."""
    host: Host = field(default_factory=Host)
    num_replicas: int = 1
    """Pipelines that share each step's batch and the optimizer's state; all others of these facts are of one."""
    num_nodes: int = 1
    """Machines, each of which has equally many of the replicas."""
    disks: DiskRates | None = None
    """Rates that runs have measured of a node's disks with optimizer states; None where none has."""
    disk_shares: tuple[float, ...] = ()
    """Part of the bytes on disks that each folder gets, by the rates measured of them; empty: equal ones."""
    may_keep_steps: bool = True
    """Whether disks have room for durable steps, as far as that is known."""
    node_link: float = NODE_LINK
    """GB/s of a machine's link to the others, in each direction."""

    @property
    def gpu_bytes(self) -> int | None:
        """All memory of a GPU; None on CPUs."""
        if self.total_bytes is None and self.gpu_spec is not None:
            return int(self.gpu_spec.memory_gb * GIB)
        return self.total_bytes

    @property
    def on_cpu(self) -> bool:
        return self.gpu_bytes is None

    @property
    def replicas_per_node(self) -> int:
        """Pipelines that share a machine's host memory and its link to other machines."""
        return self.num_replicas // self.num_nodes

    @property
    def replica_bytes_per_link(self) -> float:
        """Bytes that a rank gives its counterparts per byte that leaves its node meanwhile, all ranks at once.

        With K of R replicas on a node K (R - K) / R of a stage's bytes leave it, and each rank gives (R - 1) / R.
        """
        own = self.replicas_per_node
        return (self.num_replicas - 1) / (own * (self.num_replicas - own))


def compiles(config: Config, machine: Machine) -> bool:
    """Whether layers and loss run as compiled graphs."""
    wanted = config.pipeline.compile
    return wanted is Compile.ON or (wanted is Compile.AUTO and not machine.on_cpu)


@dataclass(frozen=True)
class Candidate:
    """One way to run a step: the numbers that a plan is made of before memory is shared out.

    None is auto, which is not chosen yet. A number that shall be searched for is a field here and in `ScheduleSpec`.
    """

    num_stages: int | None
    num_chunks: int | None
    num_rounds: int | None = None
    """None is planned as one round."""
    num_slices: int | None = None
    """None is planned as whole sequences."""
    order: ComputeOrder | None = None
    """None is planned as breadth-first."""
    num_saving_attention: int | None = None
    """Stages of each rank that keep attention's results; None is planned as what `--recompute` says, or none."""
    num_offloaded_microbatches: int = 0
    """Microbatches per round whose products are offloaded by stages that offload activations."""

    @property
    def has_partial_sums(self) -> bool:
        """As `ScheduleSpec.has_partial_sums`."""
        return (self.num_rounds or 1) > 1 or self.order is ComputeOrder.DEPTH_FIRST

    @property
    def is_known(self) -> bool:
        """Whether stages and microbatches are chosen, without which there is no plan."""
        return self.num_stages is not None and self.num_chunks is not None

    @property
    def is_complete(self) -> bool:
        """Whether every number is chosen that ranks must agree on."""
        return self.is_known and None not in (self.num_rounds, self.num_slices, self.order)


@dataclass(frozen=True)
class PlanRequest:
    """A run to be planned: its options, model and machine, and the candidate that is planned."""

    config: Config = field(hash=False)
    """As the user asked."""
    shape: ModelShape = field(hash=False)
    machine: Machine = field(hash=False)
    candidate: Candidate
    packed: PackedRows | None = None
    """None: every row is one document of `seq_length` tokens, as in a dry run, which does not read the data."""
    measured_products: int | None = None
    """Bytes of a layer's products and a microbatch where they were measured."""
    num_state_buffers: int = NUM_STATE_BUFFERS
    """Stages of a rank whose states on disks may be in host memory at once."""
    reserve_bytes: int = 0
    """GPU memory to leave free: what a rehearsal took beyond the prediction, on the rank where that was most."""

    @classmethod
    def of(cls, config: Config, shape: ModelShape, machine: Machine, packed: PackedRows | None = None) -> PlanRequest:
        """The question of a run, before anything is chosen."""
        asked = config.pipeline
        order = ComputeOrder(asked.compute_order.value) if asked.compute_order is not Order.AUTO else None
        if asked.spread_head:
            order = ComputeOrder.DEPTH_FIRST
        numbers = Candidate(asked.num_stages, asked.num_chunks, asked.num_rounds, asked.num_slices, order)
        return cls(config, shape, machine, numbers, packed)

    def trying(self, **numbers: Any) -> PlanRequest:
        """The question with other numbers of the candidate."""
        return replace(self, candidate=replace(self.candidate, **numbers))

    def with_options(self, section: str, **options: Any) -> PlanRequest:
        """The question with other values of options, by the section of the configuration that has them."""
        changed = replace(getattr(self.config, section), **options)
        return replace(self, config=replace(self.config, **{section: changed}))

    def with_pipeline(self, **options: Any) -> PlanRequest:
        """The question with other values of options that concern pipeline and memory."""
        return self.with_options("pipeline", **options)

    @property
    def on_empty_gpu(self) -> PlanRequest:
        """The question for a GPU whose free memory is not known, which is the same on all ranks."""
        return replace(self, machine=replace(self.machine, free_bytes=None))

    def with_more_nodes(self) -> Iterator[tuple[str, PlanRequest]]:
        """Questions with more nodes that share the step, and the option for each; none with a single pipeline."""
        machine, chunks = self.machine, self.candidate.num_chunks or 1
        for nodes in range(machine.num_nodes + 1, MOST_NODES + 1) if machine.num_replicas > 1 else ():
            replicas = nodes * machine.replicas_per_node
            if self.config.pipeline.batch_size % (replicas * chunks) == 0:
                more = replace(machine, num_nodes=nodes, num_replicas=replicas)
                yield f"--nnodes {nodes}", replace(self, machine=more)

    @property
    def resolved_config(self) -> Config:
        """The configuration with numbers in the place of auto."""
        chosen = self.candidate
        pipeline = replace(
            self.config.pipeline,
            num_stages=chosen.num_stages,
            num_chunks=chosen.num_chunks,
            num_rounds=chosen.num_rounds,
            num_slices=chosen.num_slices,
            compute_order=Order.AUTO if chosen.order is None else Order(chosen.order.value),
        )
        return replace(self.config, pipeline=pipeline)

    @cached_property
    def plan(self) -> Plan:
        """The plan before memory is looked at: the model cut by work, all streamed or, if asked for, all resident.

        Raises PlanError if there are more stages than can be.
        """
        chosen, pipeline, slices = self.candidate, self.config.pipeline, self.num_slices
        assert chosen.num_stages is not None
        saving_attention = chosen.num_saving_attention
        if saving_attention is None and self.recompute is Recompute.LINEAR:
            saving_attention = chosen.num_stages // self.machine.num_ranks
        return make_plan(
            self.shape,
            num_ranks=self.machine.num_ranks,
            num_stages=chosen.num_stages,
            num_microbatches=self.num_chunks * slices,
            num_slots=pipeline.num_slots if pipeline.use_offload else None,
            num_rounds=chosen.num_rounds or 1,
            num_slices=slices,
            order=chosen.order or ComputeOrder.BREADTH_FIRST,
            num_saving_attention=0 if slices == 1 else saving_attention or 0,
            attention_length=self.attention_length,
            num_offloaded_microbatches=chosen.num_offloaded_microbatches,
            spreads_head=pipeline.spread_head,
        )

    @cached_property
    def first_alike(self) -> tuple[int, ...]:
        """For every rank the first one whose stages are as large, so that both have the same choices of memory."""
        shape, plan, first = self.shape, self.plan, dict[object, int]()

        def sizes(cut: StageCut) -> tuple[int, ...]:
            layers = (len(cut.layers), len(cut.backward_layers(shape.first_backward)))
            parameters = (cut.num_parameters(shape), cut.num_trained(shape), cut.num_streamed_parameters(shape))
            return (cut.is_first, cut.is_last, *layers, *parameters)

        of_ranks = [tuple(map(sizes, plan.cuts[rank :: plan.num_ranks])) for rank in range(plan.num_ranks)]
        return tuple(first.setdefault(own, rank) for rank, own in enumerate(of_ranks))

    @property
    def num_chunks(self) -> int:
        """Microbatches of a step, of whole sequences; they must be chosen."""
        assert self.candidate.num_chunks is not None
        return self.candidate.num_chunks

    @property
    def num_slices(self) -> int:
        return self.candidate.num_slices or 1

    @property
    def recompute(self) -> Recompute:
        return self.config.pipeline.recompute

    @property
    def num_resident(self) -> int | None:
        """Resident stages of each rank that are asked for; None leaves it to the memory."""
        pipeline = self.config.pipeline
        everything = not pipeline.use_offload or pipeline.resident_stages == "all"
        return self.plan.stages_per_rank if everything else pipeline.num_resident_stages

    @property
    def gpu_spec(self) -> GpuSpec | None:
        """The card whose rates are an estimate for this run: of formats of two bytes, which data sheets tell of."""
        return None if self.config.model.dtype is Dtype.FP32 else self.machine.gpu_spec

    @property
    def gpu_bytes(self) -> int | None:
        """GPU memory that a rank's plan may fill; None on CPUs."""
        total, free = self.machine.gpu_bytes, self.machine.free_bytes
        if total is None:
            return None
        limit = self.config.pipeline.gpu_memory_limit
        usable = total - OUTSIDE_BYTES if free is None else free
        return (usable if limit is None else min(usable, int(limit * GIB))) - self.reserve_bytes

    @property
    def host_bytes(self) -> int | None:
        """Host memory that a pipeline may be planned into; None where it is not known."""
        if self.machine.agreed_host_bytes is not None:
            return self.machine.agreed_host_bytes
        limit = self.config.pipeline.host_memory_limit
        return self.machine.host_bytes if limit is None else int(limit * GIB) // self.machine.replicas_per_node

    @property
    def compiles(self) -> bool:
        """As `compiles` says.

        Layers of packed rows in FlexAttention run eagerly: estimates of their seconds (not measurements) are too low by
        what `gpu_specs.EAGER_FORWARD` and `EAGER_BACKWARD` say, and such a run warns at its start.
        """
        return compiles(self.config, self.machine)

    @cached_property
    def memory_rules(self) -> MemoryRules:
        """Formats and options that decide the memory layout of every rank."""
        pipeline, dtype, disks = self.config.pipeline, self.config.model.dtype, None
        if pipeline.offload_states_to is not None:
            disks = DiskRules(
                has_gradients=pipeline.gradients_on_disks and self._clips,
                has_weights=pipeline.weights_on_disks,
                num_buffers=self.num_state_buffers,
                keeps_steps=self.keeps_steps,
            )
        weight = 4 if dtype is Dtype.FP32 else 2
        trained = self.shape.trained
        return MemoryRules(
            weight=weight,
            gradient=4 if pipeline.fp32_gradients or self.shape.keeps_trained_on_gpu else weight,
            remainder={Dtype.BF16: 2, Dtype.FP16: 4, Dtype.FP32: 0}[dtype],
            reduced_parts=REDUCED_PARTS.get(self.config.optim.optimizer_states, ()),
            waits_for_norm=self._clips,
            is_tied=self.shape.is_tied and (trained is None or trained.embedding > 0),
            keeps_trained_on_gpu=self.shape.keeps_trained_on_gpu,
            overlaps_optimizer=pipeline.overlap_optimizer,
            num_replicas=self.machine.num_replicas,
            sent=2 if pipeline.reduce_dtype is ReduceDtype.BF16 else SUM_BYTES,
            disks=disks,
        )

    @property
    def keeps_steps(self) -> bool:
        """Whether each step is made durable on the disks that have the optimizer states."""
        pipeline = self.config.pipeline
        if pipeline.durable_steps is DurableSteps.AUTO:
            may = self.machine.may_keep_steps and self.machine.num_replicas == 1
            return may and pipeline.offload_states_to is not None
        return pipeline.durable_steps is DurableSteps.ON

    @property
    def reduced_format(self) -> str:
        """Format of the layers' optimizer states, if it is not the usual one; else empty."""
        states = self.config.optim.optimizer_states
        return "" if states is OptimizerStates.FP32 else states.value

    @property
    def rows(self) -> int:
        """Sequences of a step that one pipeline plays: its share of the batch."""
        return self.config.pipeline.batch_size // self.machine.num_replicas

    @property
    def step_tokens(self) -> int:
        """Tokens of all microbatches of a pipeline's step, padding counted."""
        return self.rows * self.config.data.seq_length

    @property
    def all_tokens(self) -> int:
        """Tokens of a step of all replicas, as `step_tokens`."""
        return self.step_tokens * self.machine.num_replicas

    @property
    def microbatch_rows(self) -> int:
        """Sequences of a microbatch, whole or a slice of each."""
        return self.rows // self.num_chunks

    @cached_property
    def microbatch_tokens(self) -> int:
        return self.microbatch_rows * self.slice_length

    @property
    def slice_length(self) -> int:
        """Tokens of a sequence in a microbatch."""
        return self.config.data.seq_length // self.num_slices

    @property
    def kv_cache_bytes(self) -> int:
        """GPU bytes of a layer's keys and values where they stay from slice to slice, with their gradients in fp32."""
        if self.num_slices == 1:
            return 0
        tokens = self.microbatch_tokens * self.num_slices
        return 2 * self.shape.key_width * tokens * (self.memory_rules.weight + 4)

    @property
    def attention_length(self) -> float:
        """Mean length of a token's own document: `seq_length` where a row is one."""
        length = self.config.data.seq_length
        return length if self.packed is None else min(self.packed.attention_length, length)

    @property
    def microbatch_documents(self) -> int:
        """Fixed bound of the documents of a microbatch for variable-length attention; 0 without it."""
        # CPUs and fp32 have no such attention.
        if self.packed is None or self.machine.on_cpu or self.config.model.dtype is Dtype.FP32:
            return 0
        return self.microbatch_rows * self.packed.max_documents

    @property
    def position_bytes(self) -> int:
        """GPU bytes of a step's positions and bounds of documents, int32, which every rank has; 0 if not packed."""
        if self.packed is None:
            return 0
        return 4 * (self.step_tokens + self.rows * self.packed.max_documents)

    @property
    def message_bytes(self) -> int:
        """Bytes of an activation [B, L, H] of one microbatch."""
        return self.microbatch_tokens * self.shape.hidden_size * self.memory_rules.weight

    @property
    def attention_bytes(self) -> int:
        """Bytes of attention's result and log-sum-exp of a layer and microbatch."""
        each = self.shape.attention_width * self.memory_rules.weight + 4 * (self.shape.num_heads or 0)
        return self.microbatch_tokens * each

    @cached_property
    def product_bytes(self) -> int:
        """Host bytes of a layer's offloaded products for one microbatch, including the layer's input."""
        sizes, found = (self.memory_rules.weight, self.shape, self.microbatch_tokens), self.measured_products
        if found is None:
            found = estimate_layer(*sizes, compiled=self.compiles).saved_products
        return int((1 + BESIDE_PRODUCTS) * (found or 0))

    @property
    def mailbox_bytes(self) -> int:
        """GPU memory outside of torch's for the messages that arrive at a rank."""
        edges = NUM_INCOMING_EDGES
        if self.config.pipeline.spread_head:  # of the head's owner, which the others send to
            edges += self.machine.num_ranks - 1
        return edges * NUM_MAILBOXES * self.message_bytes

    @property
    def sends_over_host(self) -> bool:
        """Whether a GPU cannot write to another's memory, so that messages go through host memory."""
        card = self.machine.gpu_spec
        return not (self.machine.has_peer_copies and (card is None or card.has_peer_copies))

    @property
    def _clips(self) -> bool:
        """Whether updates wait for the norm over all ranks."""
        return self.config.optim.max_grad_norm > 0 or self.config.model.dtype is Dtype.FP16

    @cached_property
    def rules(self) -> StepRules:
        """How the runtime goes about a step."""
        shape, memory = self.shape, self.memory_rules
        return StepRules(
            memory,
            message_bytes=self.message_bytes,
            attention_bytes=self.attention_bytes,
            product_bytes=self.product_bytes,
            head_weight_bytes=shape.head_parameters * memory.weight,
            head_sum_bytes=shape.num_trained_in_head * SUM_BYTES,
        )

    @property
    def measures_layers(self) -> bool:
        """Whether a run on GPUs measures layers at its start: for auto, where that has a choice to make."""
        return self.config.pipeline.num_stages is None

    @property
    def measures_host(self) -> bool:
        """Whether a run on GPUs measures the host at its start: if it streams, and its plan is not a given one."""
        return self.config.pipeline.use_offload and self.config.planning.plan is None
