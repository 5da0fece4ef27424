"""The planner's input: one immutable value with a configuration, a model's sizes and facts about a machine.

A run, a dry run, `auto` and the benchmarks all use this value, so that none of them can forget an option.
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
"""Estimated bytes saved in addition to products (attention's log-sum-exps, norms' numbers) / bytes of products."""
NODE_LINK = 12.5
"""GB/s of a node's link to other nodes, in each direction, if it is neither given nor measured: 100 Gbit/s."""
MOST_NODES = 64
"""Maximum number of nodes that a refusal suggests."""
REDUCED_PARTS = {OptimizerStates.BF16: (2, 2, 2), OptimizerStates.COMPACT: (1, 1, 1, 1 / 32, 1 / 32)}
"""Bytes per parameter of each part of the layers' optimizer states (engine/reduced_states.py)."""
OUTSIDE_BYTES = GIB
"""GPU memory that the driver and communicators take: a guess, used if the free memory is not known."""


@dataclass(frozen=True)
class Machine:
    """Facts about the machine for which a run is planned; all ranks have the same GPU."""

    num_ranks: int
    """Number of ranks of one pipeline."""
    gpu_spec: GpuSpec | None = None
    """Data sheet of the GPU; None for a CPU, and for an unknown GPU."""
    total_bytes: int | None = None
    """Memory of a GPU as the driver reports it; None: the data sheet's value is used."""
    free_bytes: int | None = None
    """Free memory of this rank's GPU, or the part of it that the run may use; None if it was not read."""
    host_bytes: int | None = None
    """Host memory that a pipeline's ranks together may use; None if unknown."""
    agreed_host_bytes: int | None = None
    """Smallest memory that a pipeline may use on any node, by each node's options; None if ranks have not met."""
    has_peer_copies: bool = True
    """Whether GPUs may write into each other's memory, if the card supports it."""
    product_share: float = 1.0
    """Measured / usual rate of the card's large products, if much below 1, as for a limited or shared GPU; else 1."""
    host: Host = field(default_factory=Host)
    num_replicas: int = 1
    """Number of pipelines that share each step's batch and the optimizer's state."""
    num_nodes: int = 1
    """Number of machines; each has equally many replicas."""
    disks: DiskRates | None = None
    """Measured rates of a node's disks for optimizer states; None if they were never measured."""
    disk_shares: tuple[float, ...] = ()
    """Share of the disk bytes that each folder gets, by its measured rates; empty: equal shares."""
    may_keep_steps: bool = True
    """Whether disks have room for durable steps; True if unknown."""
    node_link: float = NODE_LINK
    """GB/s of a machine's link to other machines, in each direction."""

    @property
    def gpu_bytes(self) -> int | None:
        """Total memory of a GPU; None on CPUs."""
        if self.total_bytes is None and self.gpu_spec is not None:
            return int(self.gpu_spec.memory_gb * GIB)
        return self.total_bytes

    @property
    def on_cpu(self) -> bool:
        return self.gpu_bytes is None

    @property
    def replicas_per_node(self) -> int:
        """Number of pipelines that share a machine's host memory and its link to other machines."""
        return self.num_replicas // self.num_nodes

    @property
    def replica_bytes_per_link(self) -> float:
        """Bytes that a rank sends to its counterparts / bytes that leave the node, while all ranks send at once.

        With K of R replicas on a node, K (R - K) / R of a stage's bytes leave the node; each rank sends (R - 1) / R.
        """
        own = self.replicas_per_node
        return (self.num_replicas - 1) / (own * (self.num_replicas - own))


def compiles(config: Config, machine: Machine) -> bool:
    """Whether layers and loss run as compiled graphs."""
    wanted = config.pipeline.compile
    return wanted is Compile.ON or (wanted is Compile.AUTO and not machine.on_cpu)


@dataclass(frozen=True)
class Candidate:
    """Numbers of a step that the planner tries, before it decides the use of memory.

    None means auto: the number is not chosen yet. Each number that the planner searches is a field here and in
    `ScheduleSpec`.
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
    """Number of each rank's stages that save attention's results; None is planned as `--recompute` says, or as 0."""
    num_offloaded_microbatches: int = 0
    """Number of microbatches per round whose products are offloaded, in stages that offload activations."""

    @property
    def has_partial_sums(self) -> bool:
        """Whether several stages of a rank have unfinished gradient sums at a time (`ScheduleSpec`)."""
        return (self.num_rounds or 1) > 1 or self.order is ComputeOrder.DEPTH_FIRST

    @property
    def is_known(self) -> bool:
        """Whether the numbers of stages and microbatches are chosen; without them there is no plan."""
        return self.num_stages is not None and self.num_chunks is not None

    @property
    def is_complete(self) -> bool:
        """Whether all numbers on which ranks must agree are chosen."""
        return self.is_known and None not in (self.num_rounds, self.num_slices, self.order)


@dataclass(frozen=True)
class PlanRequest:
    """A run to be planned: its options, model, machine and candidate."""

    config: Config = field(hash=False)
    """Options as the user gave them."""
    shape: ModelShape = field(hash=False)
    machine: Machine = field(hash=False)
    candidate: Candidate
    packed: PackedRows | None = None
    """None if every row is one document of `seq_length` tokens, and in a dry run, which does not read the data."""
    measured_products: int | None = None
    """Measured bytes of a layer's products for a microbatch; None if they were not measured."""
    num_state_buffers: int = NUM_STATE_BUFFERS
    """Number of a rank's stages whose states, stored on disks, may be in host memory at the same time."""
    reserve_bytes: int = 0
    """GPU memory to leave free: the most bytes by which a rehearsal on any rank exceeded the prediction."""

    @classmethod
    def of(cls, config: Config, shape: ModelShape, machine: Machine, packed: PackedRows | None = None) -> PlanRequest:
        """Request of a run, before anything is chosen."""
        asked = config.pipeline
        order = ComputeOrder(asked.compute_order.value) if asked.compute_order is not Order.AUTO else None
        if asked.spread_head:
            order = ComputeOrder.DEPTH_FIRST
        numbers = Candidate(asked.num_stages, asked.num_chunks, asked.num_rounds, asked.num_slices, order)
        return cls(config, shape, machine, numbers, packed)

    def trying(self, **numbers: Any) -> PlanRequest:
        """Request with other numbers of the candidate."""
        return replace(self, candidate=replace(self.candidate, **numbers))

    def with_options(self, section: str, **options: Any) -> PlanRequest:
        """Request with other values of options in one section of the configuration."""
        changed = replace(getattr(self.config, section), **options)
        return replace(self, config=replace(self.config, **{section: changed}))

    def with_pipeline(self, **options: Any) -> PlanRequest:
        """Request with other values of options for pipeline and memory."""
        return self.with_options("pipeline", **options)

    @property
    def on_empty_gpu(self) -> PlanRequest:
        """The request without the GPU's free memory, so that it is equal on all ranks."""
        return replace(self, machine=replace(self.machine, free_bytes=None))

    def with_more_nodes(self) -> Iterator[tuple[str, PlanRequest]]:
        """Options and requests for more nodes that share a step; none for a single pipeline."""
        machine, chunks = self.machine, self.candidate.num_chunks or 1
        for nodes in range(machine.num_nodes + 1, MOST_NODES + 1) if machine.num_replicas > 1 else ():
            replicas = nodes * machine.replicas_per_node
            if self.config.pipeline.batch_size % (replicas * chunks) == 0:
                more = replace(machine, num_nodes=nodes, num_replicas=replicas)
                yield f"--nnodes {nodes}", replace(self, machine=more)

    @property
    def resolved_config(self) -> Config:
        """The configuration with numbers in place of auto."""
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
        """The plan before the use of memory is decided: the model is cut by work, and all stages are streamed.

        Without `--use_offload` all stages are resident. Raises PlanError if the model cannot have so many stages.
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
        """First rank with equal stage sizes, for every rank; such ranks have the same choices of memory."""
        shape, plan, first = self.shape, self.plan, dict[object, int]()

        def sizes(cut: StageCut) -> tuple[int, ...]:
            layers = (len(cut.layers), len(cut.backward_layers(shape.first_backward)))
            parameters = (cut.num_parameters(shape), cut.num_trained(shape), cut.num_streamed_parameters(shape))
            return (cut.is_first, cut.is_last, *layers, *parameters)

        of_ranks = [tuple(map(sizes, plan.cuts[rank :: plan.num_ranks])) for rank in range(plan.num_ranks)]
        return tuple(first.setdefault(own, rank) for rank, own in enumerate(of_ranks))

    @property
    def num_chunks(self) -> int:
        """Number of microbatches of a step, counted in whole sequences; it must be chosen."""
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
        """Number of resident stages of each rank that options ask for; None: as many as memory allows."""
        pipeline = self.config.pipeline
        everything = not pipeline.use_offload or pipeline.resident_stages == "all"
        return self.plan.stages_per_rank if everything else pipeline.num_resident_stages

    @property
    def gpu_spec(self) -> GpuSpec | None:
        """The card whose data sheet gives this run's rates; None for fp32: data sheets have two-byte formats only."""
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
        """Host memory that a pipeline's plan may use; None if unknown."""
        if self.machine.agreed_host_bytes is not None:
            return self.machine.agreed_host_bytes
        limit = self.config.pipeline.host_memory_limit
        return self.machine.host_bytes if limit is None else int(limit * GIB) // self.machine.replicas_per_node

    @property
    def compiles(self) -> bool:
        """Whether layers and loss run as compiled graphs (`compiles`).

        Layers of packed rows in FlexAttention run eagerly. Estimates of their seconds (not measurements) are too low by
        the factors `gpu_specs.EAGER_FORWARD` and `EAGER_BACKWARD`, and such a run warns at its start.
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
        return MemoryRules(
            weight=weight,
            gradient=4 if pipeline.fp32_gradients or self.shape.keeps_trained_on_gpu else weight,
            remainder={Dtype.BF16: 2, Dtype.FP16: 4, Dtype.FP32: 0}[dtype],
            reduced_parts=REDUCED_PARTS.get(self.config.optim.optimizer_states, ()),
            waits_for_norm=self._clips,
            is_tied=self.shape.trains_tied,
            keeps_trained_on_gpu=self.shape.keeps_trained_on_gpu,
            overlaps_optimizer=pipeline.overlap_optimizer,
            num_replicas=self.machine.num_replicas,
            sent=2 if pipeline.reduce_dtype is ReduceDtype.BF16 else SUM_BYTES,
            disks=disks,
        )

    @property
    def keeps_steps(self) -> bool:
        """Whether each step is made durable on the disks that hold the optimizer states."""
        pipeline = self.config.pipeline
        if pipeline.durable_steps is DurableSteps.AUTO:
            may = self.machine.may_keep_steps and self.machine.num_replicas == 1
            return may and pipeline.offload_states_to is not None
        return pipeline.durable_steps is DurableSteps.ON

    @property
    def reduced_format(self) -> str:
        """Format of the layers' optimizer states; empty if it is the usual format."""
        states = self.config.optim.optimizer_states
        return "" if states is OptimizerStates.FP32 else states.value

    @property
    def rows(self) -> int:
        """Number of sequences of a step in one pipeline: its share of the batch."""
        return self.config.pipeline.batch_size // self.machine.num_replicas

    @property
    def step_tokens(self) -> int:
        """Number of tokens of a pipeline's step, in all microbatches and with padding."""
        return self.rows * self.config.data.seq_length

    @property
    def all_tokens(self) -> int:
        """Number of tokens of a step in all replicas together, with padding."""
        return self.step_tokens * self.machine.num_replicas

    @property
    def microbatch_rows(self) -> int:
        """Number of sequences in a microbatch, which holds whole sequences or one slice of each sequence."""
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
        """GPU bytes of a layer's keys and values from all slices, and of their fp32 gradients; 0 without slices."""
        if self.num_slices == 1:
            return 0
        tokens = self.microbatch_tokens * self.num_slices
        return 2 * self.shape.key_width * tokens * (self.memory_rules.weight + 4)

    @property
    def attention_length(self) -> float:
        """Mean length, over tokens, of a token's document; `seq_length` if a row is one document."""
        length = self.config.data.seq_length
        return length if self.packed is None else min(self.packed.attention_length, length)

    @property
    def microbatch_documents(self) -> int:
        """Maximum number of documents of a microbatch for variable-length attention; 0 without this attention."""
        # CPUs and fp32 have no variable-length attention.
        if self.packed is None or self.machine.on_cpu or self.config.model.dtype is Dtype.FP32:
            return 0
        return self.microbatch_rows * self.packed.max_documents

    @property
    def position_bytes(self) -> int:
        """GPU bytes of a step's positions and document bounds (int32), which every rank has; 0 if not packed."""
        if self.packed is None:
            return 0
        return 4 * (self.step_tokens + self.rows * self.packed.max_documents)

    @property
    def message_bytes(self) -> int:
        """Bytes of an activation [B, L, H] of one microbatch."""
        return self.microbatch_tokens * self.shape.hidden_size * self.memory_rules.weight

    @property
    def attention_bytes(self) -> int:
        """Bytes of attention's result and log-sum-exp for a layer and microbatch."""
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
        """GPU memory outside of torch's allocator for messages that arrive at a rank."""
        edges = NUM_INCOMING_EDGES
        if self.config.pipeline.spread_head:  # the head's owner receives from all other ranks
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
        """Rules of the runtime that decide a step's work, for the cost model."""
        shape, memory = self.shape, self.memory_rules
        return StepRules(
            memory,
            message_bytes=self.message_bytes,
            attention_bytes=self.attention_bytes,
            product_bytes=self.product_bytes,
            head_weight_bytes=shape.head_parameters * memory.weight,
            head_sum_bytes=shape.num_trained_in_head * SUM_BYTES,
            begins_with_pass=self.config.objective.needs_divergence,
        )

    @property
    def measures_layers(self) -> bool:
        """Whether a run on GPUs measures layers at its start: if auto chooses the stages."""
        return self.config.pipeline.num_stages is None

    @property
    def measures_host(self) -> bool:
        """Whether a run on GPUs measures the host at its start: if it streams and its plan is not given."""
        return self.config.pipeline.use_offload and self.config.planning.plan is None
