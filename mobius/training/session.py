"""One rank's run from its plan to its trainer, opened alike by training, benchmarks and tests.

draw_blueprint -> open_session: bind, connect, settle the plan, take and fill the stages, rehearse -> trainer
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from mobius.activity import Activity
from mobius.config.config import Dtype, ReduceDtype
from mobius.data.batches import Batch
from mobius.limits import max_sends_under_way
from mobius.machine.devices import MemoryMeter, optimizer_threads, set_host_threads, use_device
from mobius.machine.peer_check import PeerCheck
from mobius.memory.spans import NO_SPANS, Spans
from mobius.memory.update_queue import UpdateQueue
from mobius.messages.distributed import DistributedTransport
from mobius.messages.mailboxes import Mailboxes
from mobius.messages.replicas import meet_replicas
from mobius.messages.transport import Assembly, SingleRankTransport, Transport
from mobius.messages.world import World
from mobius.models.adapters.files import AdapterFolder, AdapterValues
from mobius.models.adapters.lora import FreshAdapters
from mobius.models.weights import CheckpointWeights, InitialWeights, WeightSource, folder_has_weights
from mobius.optim.adamw import AdamWSettings, FlatAdamW
from mobius.optim.fused_update import FusedUpdate
from mobius.optim.grad_scaler import LossScale
from mobius.optim.kernel import load_kernel
from mobius.optim.stepper import StepCounts, Stepper
from mobius.optim.tied import TiedPair
from mobius.output.recordings import Recordings
from mobius.output.trace import TraceFacts
from mobius.planning.alike import check_same_residents
from mobius.planning.blueprint import Blueprint
from mobius.planning.measured_plan import plan_by_measurement
from mobius.ranks import cache_folder
from mobius.runtime.waits import WaitClock
from mobius.training.rehearsing import take_stages
from mobius.training.stages import RankStages
from mobius.training.step_batches import step_batches
from mobius.training.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Session:
    """Parts of a run on one rank, ready to train."""

    blueprint: Blueprint
    """With the plan that all ranks agreed on."""
    transport: Transport
    stages: RankStages
    recordings: Recordings | None
    activity: Activity = field(default_factory=Activity)
    """Told by every part what this rank does."""
    source: WeightSource | None = None
    """Source of the weights that the run begins with; None where a checkpoint's state is restored."""

    @property
    def everyone(self) -> Assembly:
        """All processes of the run: the ranks of this pipeline and those of its replicas."""
        return self.transport.everyone

    @property
    def spans(self) -> Spans:
        return NO_SPANS if self.recordings is None else self.recordings.spans

    def trainer(
        self,
        batches: Iterable[Batch],
        *,
        has_kernel: bool = True,
        steps_done: int = 0,
        counts: StepCounts | None = None,
        before_update: Callable[[int], None] | None = None,
    ) -> Trainer:
        """Trainer on `batches`; without the C kernel, torch updates what is in host memory.

        `steps_done` and `counts` are a checkpoint's; `before_update` as in the Stepper.
        """
        blueprint, device = self.blueprint, self.blueprint.place.device
        optim, plan, names = blueprint.config.optim, blueprint.plan, blueprint.parts.trained_tied_names
        clock = WaitClock(device)
        tied = TiedPair(*names, 0, plan.num_stages - 1, plan.num_ranks, blueprint.gradient_dtype) if names else None
        kernel = None
        if has_kernel and (self.stages.arena is not None or device.type == "cpu"):
            kernel = load_kernel(cache_folder(), num_threads=optimizer_threads(blueprint.place.ranks.num_local))
        settings = AdamWSettings(optim.adam_beta1, optim.adam_beta2, optim.adam_epsilon, optim.weight_decay)
        adamw = FlatAdamW(settings, kernel, FusedUpdate())
        adamw.warm_up(memory.state for memory in self.stages.memory.values())
        stepper = Stepper(
            adamw,
            memory=self.stages.memory,
            transport=self.transport,
            clock=clock,
            loss_scale=LossScale(is_dynamic=blueprint.config.model.dtype is Dtype.FP16),
            num_stages=plan.num_stages,
            max_grad_norm=optim.max_grad_norm,
            tied=tied,
            before_update=before_update,
            activity=self.activity,
        )
        if counts is not None:
            stepper.restore(counts)
        return Trainer(
            optim,
            executor=self.stages.executor(
                blueprint.schedule,
                self.transport,
                clock,
                unsealed_names=tied.names if tied else frozenset(),
                spans=self.spans,
                activity=self.activity,
            ),
            stepper=stepper,
            batches=step_batches(batches, blueprint),
            transport=self.transport,
            clock=clock,
            meter=MemoryMeter(device),
            watches=() if self.recordings is None else self.recordings.watches,
            steps_done=steps_done,
            activity=self.activity,
        )

    def write_recordings(self) -> None:
        """Leave what was recorded, if anything was to be; collective, after the last step."""
        if self.recordings is not None:
            plan = self.blueprint.plan
            device = MemoryMeter(self.blueprint.place.device).device_name
            facts = TraceFacts(plan.num_ranks, plan.num_stages, plan.num_microbatches, plan.num_slots, device)
            self.recordings.write(facts, self.transport)

    def close(self) -> None:
        """End the connections and give page-locked memory back; nothing may be copying any more."""
        self.stages.close()
        self.transport.close()


def open_session(
    blueprint: Blueprint,
    model_folder: Path,
    *,
    source: WeightSource | None = None,
    recordings: Recordings | None = None,
    transport: Transport | None = None,
    settled: Callable[[Blueprint], None] | None = None,
    passed: Callable[[str], None] | None = None,
    restore: Callable[[RankStages], None] | None = None,
    activity: Activity | None = None,
) -> Session:
    """Bring a drawn run to where it can train; collective.

    `source` gives the weights instead of `model_folder` (a benchmark's are random), `transport` is one that has met the
    other ranks already. `settled` is called with the plan that all ranks agree on, before it takes memory; `passed`
    with each part's name as it ends: connect, weights, rehearsal. `restore` fills the stages in the place of weights.
    `activity` is told of each part, of the weights tensor by tensor.

    Raises PlanError if the ranks disagree, and what planning, memory and weights raise.
    """
    activity = activity or Activity()
    place, done = blueprint.place, passed or (lambda part: None)
    set_host_threads(place.ranks, place.device, place.device_order)
    spans = NO_SPANS if recordings is None else recordings.spans
    activity.begins("the meeting of all ranks")
    with activity.warming_up():
        transport = transport or _connect(blueprint, spans)
        blueprint = plan_by_measurement(blueprint, transport)
        check_same_residents(blueprint.plan, transport)
    done("connect")
    if place.ranks.is_first and place.ranks.num_replicas == 1 and _reduce_dtype(blueprint) != torch.float32:
        logger.info("--reduce_dtype bf16 has no effect: there is one pipeline, and no replica to send gradients to")
    activity.begins("the memory of the stages and the rehearsal of a step")
    updates = _update_queue(blueprint, activity)
    with activity.warming_up():
        take = partial(_take_stages, updates=updates, transport=transport, spans=spans)
        blueprint, stages = take_stages(blueprint, transport, take)
    done("rehearsal")
    transport.bound_sends(max_sends_under_way(blueprint.plan.round_size))  # another plan may have other rounds
    if settled is not None:
        settled(blueprint)
    activity.begins("the weights")
    if restore is not None:
        restore(stages)
    else:
        source = source or _first_weights(blueprint, model_folder)
        stages.fill(source, show_progress=place.ranks.is_first, progress=activity.progress)
    done("weights")
    activity.begins("the wait for all ranks' weights")
    transport.everyone.barrier()
    return Session(
        blueprint=blueprint,
        transport=transport,
        stages=stages,
        recordings=recordings,
        activity=activity,
        source=source,
    )


def _take_stages(
    blueprint: Blueprint, *, updates: UpdateQueue | None, transport: Transport, spans: Spans
) -> RankStages:
    """Zeroed memory of the stages of this rank's plan."""
    request = blueprint.answer.request
    return RankStages.take(
        blueprint.parts,
        blueprint.plan,
        blueprint.place.ranks.place,
        device=blueprint.place.device,
        dtype=blueprint.dtype,
        gradient_dtype=blueprint.gradient_dtype,
        loss_chunk_tokens=blueprint.config.pipeline.loss_chunk_tokens,
        waiting=request.waiting,
        message_shape=blueprint.message_shape,
        product_bytes=request.product_bytes,
        tile_tokens=blueprint.tile_tokens,
        updates=updates,
        replicas=transport.replicas,
        spans=spans,
    )


def _update_queue(blueprint: Blueprint, activity: Activity) -> UpdateQueue | None:
    if not blueprint.config.pipeline.overlap_optimizer:
        return None
    # Loads and gathers that follow an update are enqueued by its thread.
    return UpdateQueue(activity, prepare=partial(use_device, blueprint.place.device))


def _connect(blueprint: Blueprint, spans: Spans) -> Transport:
    """Meet the other ranks; collective."""
    place, device, ranks = blueprint.place, blueprint.place.device, blueprint.place.ranks
    if place.node is not None:
        PeerCheck(place.node, device).send_by_host_if_broken(place.device_order)
    if ranks.num_places == 1:
        if ranks.num_replicas == 1:
            return SingleRankTransport()
        world = World(rank=ranks.rank, num_ranks=ranks.num_ranks, device=device)
        replicas = meet_replicas(
            world,
            index=ranks.replica,
            num_replicas=ranks.num_replicas,
            device=device,
            reduce_dtype=_reduce_dtype(blueprint),
        )
        return SingleRankTransport(world, replicas)
    mailboxes = None
    if place.meeting is not None and blueprint.config.pipeline.copy_messages:
        message_bytes = math.prod(blueprint.sent_shape) * blueprint.dtype.itemsize
        mailboxes = Mailboxes(place.meeting, device, message_bytes=message_bytes)
    return DistributedTransport(
        rank=ranks.place,
        num_ranks=ranks.num_places,
        device=device,
        shape=blueprint.sent_shape,
        dtype=blueprint.dtype,
        spans=spans,
        mailboxes=mailboxes,
        # On a CPU the host does the work and is never ahead of it.
        max_sends=max_sends_under_way(blueprint.plan.round_size) if device.type == "cuda" else None,
        replica=ranks.replica,
        num_replicas=ranks.num_replicas,
        reduce_dtype=_reduce_dtype(blueprint),
    )


def _reduce_dtype(blueprint: Blueprint) -> torch.dtype:
    return torch.bfloat16 if blueprint.config.pipeline.reduce_dtype is ReduceDtype.BF16 else torch.float32


def base_weights(blueprint: Blueprint, folder: Path) -> WeightSource:
    """Source of the model's own weights: those in `folder`, or fresh ones."""
    parts = blueprint.parts
    if folder_has_weights(folder):
        return CheckpointWeights(folder, parts.stored_names, parts.pieces, dtype=blueprint.dtype)
    return InitialWeights(parts, seed=blueprint.config.optim.seed)


def _first_weights(blueprint: Blueprint, folder: Path) -> WeightSource:
    """Source of the weights that the run begins with: the model's, and adapters where there are any."""
    parts, base = blueprint.parts, base_weights(blueprint, folder)
    if not parts.adapters.is_lora:
        return base
    if parts.adapters.adapter_path is not None:
        adapter = AdapterFolder(Path(parts.adapters.adapter_path).expanduser())
        return AdapterValues(base, adapter, dtype=blueprint.dtype)
    return FreshAdapters(base, seed=blueprint.config.optim.seed)
