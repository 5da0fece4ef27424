"""Session of one rank, from the plan to the trainer, for training, benchmarks and tests.

run setup -> open_session: bind to CPUs, connect, measure and plan, allocate stages, rehearse, load weights -> trainer
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from mobius.checkpoint.reader import CheckpointReader
from mobius.checkpoint.restore import restore
from mobius.config.config import Dtype, ReduceDtype
from mobius.data.batches import Batch
from mobius.distributed.mailboxes import Mailboxes
from mobius.distributed.node_checks import check_same_residents
from mobius.distributed.peer_check import PeerCheck
from mobius.distributed.process_groups import DistributedTransport
from mobius.distributed.replicas import ReplicaGroup
from mobius.distributed.transport import RankGroup, SingleRankTransport, Transport
from mobius.distributed.world import World
from mobius.engine.adamw import AdamWSettings, FlatAdamW
from mobius.engine.adamw_cpu import load_adamw_cpu
from mobius.engine.adamw_gpu import GPUAdamW
from mobius.engine.optimizer_stepper import GradientScaler, OptimizerStepper, StepCounts
from mobius.engine.slot_files import DiskFolders, SlotPlace
from mobius.engine.stage import num_trained_tensors
from mobius.engine.stage_memory import StageMemory
from mobius.engine.tied_weights import TiedWeights
from mobius.engine.update_queue import UpdateQueue
from mobius.engine.waits import Observers, WaitClock
from mobius.hardware.devices import MemoryMeter, set_host_threads, use_device
from mobius.hardware.spans import NO_SPANS, Spans
from mobius.models.adapter_kinds import KINDS, open_adapter
from mobius.models.peft_folder import AdapterWeights
from mobius.models.weights import (
    CheckpointWeights,
    InitialWeights,
    WeightSource,
    folder_has_weights,
)
from mobius.planner.measured_plan import plan_by_measurement
from mobius.process.activity import Activity
from mobius.process.ranks import cache_folder
from mobius.reporting.recordings import Recordings
from mobius.reporting.trace import TraceFacts
from mobius.schedule.build import build_schedule
from mobius.training.memory_check import allocate_stages_that_fit, check_mapped_bytes
from mobius.training.run_setup import RunSetup
from mobius.training.stages import OffloadedActivations, RankStages, StageOptions
from mobius.training.step_batches import step_batches
from mobius.training.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Session:
    """Parts of a run on one rank, ready to train."""

    run_setup: RunSetup
    """Setup with the final plan, on which all ranks agree."""
    transport: Transport
    stages: RankStages
    recordings: Recordings | None
    activity: Activity = field(default_factory=Activity)
    """Current action of this rank; every part reports its actions here."""
    source: WeightSource | None = None
    """Source of the initial weights; None if a checkpoint is restored."""

    @property
    def memory(self) -> Mapping[int, StageMemory]:
        """Memory of this rank's stages, by stage."""
        return self.stages.memory

    @property
    def all_ranks(self) -> RankGroup:
        """All processes of the run: the ranks of all data-parallel replicas."""
        return self.transport.all_ranks

    @property
    def is_first(self) -> bool:
        """Whether this is the first of all ranks, which writes the files that exist once per run."""
        return self.all_ranks.rank == 0

    @property
    def spans(self) -> Spans:
        return NO_SPANS if self.recordings is None else self.recordings.spans

    def trainer(
        self,
        batches: Iterable[Batch],
        *,
        has_kernel: bool = True,
        num_steps_done: int = 0,
        counts: StepCounts | None = None,
        before_update: Callable[[int], None] | None = None,
    ) -> Trainer:
        """Return a trainer on `batches`; unless `has_kernel`, torch instead of the C kernel updates stages on the host.

        `num_steps_done` and `counts` come from a checkpoint; `before_update` as in `OptimizerStepper`.
        """
        run_setup, device = self.run_setup, self.run_setup.device
        optim, plan, names = run_setup.config.optim, run_setup.plan, run_setup.parts.trained_tied_names
        observers = Observers(WaitClock(device), self.spans, self.activity)
        tied = TiedWeights(*names, 0, plan.num_stages - 1, plan.num_ranks, run_setup.gradient_dtype) if names else None
        kernel = None
        if has_kernel and (self.stages.arena is not None or device.type == "cpu"):
            kernel = load_adamw_cpu(cache_folder(), num_threads=run_setup.optimizer_threads)
        settings = AdamWSettings(optim.adam_beta1, optim.adam_beta2, optim.adam_epsilon, optim.weight_decay, optim.seed)
        adamw = FlatAdamW(settings, kernel, GPUAdamW())
        adamw.warm_up(memory.state for memory in self.stages.memory.values())
        stepper = OptimizerStepper(
            adamw,
            memory=self.stages.memory,
            transport=self.transport,
            observers=observers,
            scaler=GradientScaler(
                is_dynamic=run_setup.config.model.dtype is Dtype.FP16, max_grad_norm=optim.max_grad_norm
            ),
            waits_for_norm=run_setup.memory_rules.waits_for_norm,
            num_tensors=[num_trained_tensors(run_setup.parts, cut) for cut in plan.cuts],
            tied=tied,
            before_update=before_update,
        )
        if counts is not None:
            stepper.restore(counts)
        return Trainer(
            optim,
            executor=self.stages.executor(build_schedule(plan), self.transport, observers),
            stepper=stepper,
            batches=step_batches(batches, run_setup, self.stages.objective, num_steps_done=num_steps_done),
            transport=self.transport,
            observers=observers,
            meter=MemoryMeter(device),
            step_hooks=() if self.recordings is None else self.recordings.step_hooks,
            num_steps_done=num_steps_done,
        )

    def write_recordings(self) -> None:
        """Write the recordings, if any, after the last step; collective."""
        if self.recordings is not None:
            plan = self.run_setup.plan
            device = MemoryMeter(self.run_setup.device).device_name
            facts = TraceFacts(plan.num_ranks, plan.num_stages, plan.num_microbatches, plan.num_slots, device)
            self.recordings.write(facts, self.transport)

    def close(self) -> None:
        """Close connections and release page-locked memory; no copies may be in flight."""
        self.stages.close()
        self.transport.close()


def open_session(
    run_setup: RunSetup,
    model_folder: Path,
    *,
    source: WeightSource | None = None,
    recordings: Recordings | None = None,
    transport: Transport | None = None,
    on_part_done: Callable[[str, RunSetup], None] | None = None,
    checkpoint: CheckpointReader | None = None,
    activity: Activity | None = None,
    slots: SlotPlace | None = None,
) -> Session:
    """Connect the ranks, resolve the plan, allocate the stages and load their weights; collective.

    `source` replaces the weights of `model_folder`, for instance by random weights in a benchmark. `transport`: used
    instead of connecting. `on_part_done` is called after each part (connections, measuring, rehearsal, weights) with
    the part's name and the current setup; from the rehearsal on, all ranks agree on the plan. The state of `checkpoint`
    replaces the weights, except for the base weights of an adapter, which are in no checkpoint. `slots`: place on disks
    for the states of each step. Each part reports its actions to `activity`; loading reports every tensor.

    Raises PlanError if the ranks disagree, and the errors of planning, memory and weights.
    """
    activity = activity or Activity()
    rank_context, done = run_setup.rank_context, on_part_done or (lambda *_: None)
    set_host_threads(rank_context.ranks, rank_context.device, rank_context.device_order)
    spans = NO_SPANS if recordings is None else recordings.spans
    activity.start_action("the rendezvous of all ranks")
    with activity.warming_up():
        transport = transport or _connect(run_setup, spans)
        done("connections", run_setup)
        result = plan_by_measurement(run_setup.result, run_setup.parts, rank_context, transport)
        run_setup = replace(run_setup, result=result)
        check_same_residents(run_setup.plan, transport)
    done("measuring", run_setup)
    if (
        rank_context.ranks.is_first
        and rank_context.ranks.num_replicas == 1
        and run_setup.config.pipeline.reduce_dtype is ReduceDtype.BF16
    ):
        logger.info(
            "--reduce_dtype bf16 has no effect: there is one pipeline, so no gradients are reduced between replicas"
        )
    activity.start_action("the memory of the stages and the rehearsal of a step")
    updates = _update_queue(run_setup, activity)
    with activity.warming_up():
        allocate = partial(_allocate_stages, updates=updates, slots=slots, transport=transport, spans=spans)
        run_setup, stages = allocate_stages_that_fit(run_setup, transport, allocate)
        check_mapped_bytes(run_setup, stages, transport)
    done("rehearsal", run_setup)
    transport.limit_pending_sends(run_setup.plan.max_sends_in_flight)  # a new plan may have other rounds
    activity.start_action("the weights")
    if checkpoint is None:
        source = source or _first_weights(run_setup, model_folder)
        stages.load_weights(source, show_progress=rank_context.ranks.is_first, progress=activity.progress)
    else:
        if run_setup.parts.adapters.has_frozen_base:
            base = _base_weights(run_setup, model_folder)
            stages.load_weights(base, only_frozen=True, progress=activity.progress)
        restore(stages, run_setup.parts, checkpoint, progress=activity.progress)
    done("weights", run_setup)
    activity.start_action("the wait for all ranks' weights")
    transport.all_ranks.barrier()
    return Session(
        run_setup=run_setup,
        transport=transport,
        stages=stages,
        recordings=recordings,
        activity=activity,
        source=source,
    )


def _allocate_stages(
    run_setup: RunSetup, *, updates: UpdateQueue | None, slots: SlotPlace | None, transport: Transport, spans: Spans
) -> RankStages:
    """Allocate zeroed memory for the stages of this rank's plan."""
    request = run_setup.result.request
    return RankStages.allocate(
        run_setup.parts,
        run_setup.plan,
        run_setup.ranks.pipeline_rank,
        StageOptions(
            dtype=run_setup.dtype,
            rules=run_setup.memory_rules,
            loss_chunk_tokens=run_setup.config.pipeline.loss_chunk_tokens,
            offloaded=OffloadedActivations(run_setup.message_shape, request.product_bytes),
            tile_tokens=run_setup.tile_tokens,
            reduced_format=run_setup.reduced_format,
            objective=run_setup.objective,
        ),
        device=run_setup.device,
        updates=updates,
        disks=DiskFolders(run_setup.config.pipeline.state_folders, run_setup.disk_shares, slots),
        replicas=transport.replicas,
        spans=spans,
    )


def _update_queue(run_setup: RunSetup, activity: Activity) -> UpdateQueue:
    # The queue's thread enqueues the loads and all-gathers that follow an update, so it must use this rank's device.
    prepare = partial(use_device, run_setup.device)
    return UpdateQueue(activity, prepare=prepare, has_thread=run_setup.config.pipeline.overlap_optimizer)


def _connect(run_setup: RunSetup, spans: Spans) -> Transport:
    """Connect to the other ranks; collective."""
    rank_context, device, ranks = run_setup.rank_context, run_setup.device, run_setup.ranks
    if rank_context.node_rendezvous is not None:
        PeerCheck(rank_context.node_rendezvous, device).disable_peer_copies_if_broken(rank_context.device_order)
    if ranks.num_ranks == 1:
        return SingleRankTransport()
    world, replicas = World(ranks, device), None
    if ranks.num_replicas > 1:
        is_bf16 = run_setup.config.pipeline.reduce_dtype is ReduceDtype.BF16
        replicas = ReplicaGroup(ranks, device, reduce_dtype=torch.bfloat16 if is_bf16 else torch.float32)
    if ranks.num_pipeline_ranks == 1:
        return SingleRankTransport(world, replicas)
    mailboxes, spreads_head = None, run_setup.config.pipeline.spread_head
    if rank_context.pipeline_rendezvous is not None and run_setup.config.pipeline.copy_messages:
        message_bytes = run_setup.message_format.num_bytes
        mailboxes = Mailboxes(
            rank_context.pipeline_rendezvous, device, message_bytes=message_bytes, spreads_head=spreads_head
        )
    return DistributedTransport(
        world,
        ranks,
        device=device,
        message_format=run_setup.message_format,
        spans=spans,
        mailboxes=mailboxes,
        # No limit on a CPU: the host itself computes there, so it never runs ahead of the device.
        max_pending_sends=run_setup.plan.max_sends_in_flight if device.type == "cuda" else None,
        spreads_head=spreads_head,
        replicas=replicas,
    )


def _base_weights(run_setup: RunSetup, folder: Path) -> WeightSource:
    """Return the source of the weights without adapters: `folder`, or random initial weights if it has none."""
    parts = run_setup.parts
    initial = InitialWeights(parts, seed=run_setup.config.optim.seed)
    if folder_has_weights(folder):
        return CheckpointWeights(
            *(folder, parts.stored_names, parts.parameter_pieces),
            dtype=run_setup.dtype,
            initial=initial,
            decodes_in_fp32=bool(parts.codecs),
        )
    return initial


def _first_weights(run_setup: RunSetup, folder: Path) -> WeightSource:
    """Return the source of the initial weights of the model and its adapters, if any."""
    parts, base = run_setup.parts, _base_weights(run_setup, folder)
    if not parts.adapters.has_frozen_base:
        return base
    if parts.adapters.adapter_path is not None:
        adapter = open_adapter(Path(parts.adapters.adapter_path).expanduser(), parts.adapters)
        return AdapterWeights(base, adapter.values(parts), dtype=run_setup.dtype)
    kind, seed = KINDS[parts.adapters.finetuning_type], run_setup.config.optim.seed
    return kind.initial(base, parts, folder, seed=seed, dtype=run_setup.dtype)
