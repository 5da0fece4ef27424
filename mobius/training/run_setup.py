"""Setup of a run before it allocates much memory: this rank's context, the model's parts and the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from mobius.config.config import Config
from mobius.distributed.rank_context import RankContext, join_ranks
from mobius.distributed.rendezvous import Rendezvous
from mobius.distributed.transport import MessageFormat
from mobius.engine.pipelined_router_loss import router_messages
from mobius.hardware.devices import TORCH_DTYPES, check_dtype, num_optimizer_threads
from mobius.models.blocks import ModelParts
from mobius.models.quantization import check_products
from mobius.objectives.objective import Objective
from mobius.objectives.registry import make_objective
from mobius.planner.memory_estimates import tile_tokens
from mobius.planner.plan_file import SavedPlan
from mobius.planner.planning import draft_plan, parts_for_rows, plan_rows
from mobius.planner.request import compiles
from mobius.planner.solver import PlanResult
from mobius.planner.this_machine import find_machine
from mobius.process.ranks import Ranks
from mobius.schedule.memory_layout import MemoryRules
from mobius.schedule.packed_rows import PackedRows
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import Plan

if TYPE_CHECKING:
    from mobius.training.images import RunImages


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """Setup of a run before it allocates much memory.

    Two things differ between ranks: `rank_context`, and the values that depend on the free memory of the rank's GPU
    (resident stages, saved activations, slots, and the predictions that follow from them). A rank's compute and
    messages do not depend on these values of other ranks.
    """

    rank_context: RankContext
    parts: ModelParts
    result: PlanResult
    """The plan, its bytes and its predicted step time, and the request that led to the plan."""
    images: RunImages | None = None
    """Images of the run's rows; None without."""

    @property
    def ranks(self) -> Ranks:
        return self.rank_context.ranks

    @property
    def device(self) -> torch.device:
        return self.rank_context.device

    @property
    def requested_config(self) -> Config:
        """The configuration as the user requested it."""
        return self.result.request.config

    @property
    def config(self) -> Config:
        """The configuration with numbers in place of auto."""
        return self.result.config

    @property
    def plan(self) -> Plan:
        return self.result.plan

    @property
    def saved_plan(self) -> SavedPlan:
        """The plan as it is written to a plan file."""
        return SavedPlan.of(self.result.request, self.plan)

    @property
    def memory_rules(self) -> MemoryRules:
        return self.result.request.memory_rules

    @property
    def disk_shares(self) -> tuple[float, ...]:
        """Each folder's share of the bytes on disks; empty: equal shares."""
        return self.result.request.machine.disk_shares

    @property
    def host_bytes(self) -> int:
        """Planned host memory of all ranks of a pipeline."""
        return self.result.host_estimate.total

    @property
    def pipelines_per_host(self) -> int:
        """Number of pipelines that share a machine's host memory."""
        return self.result.request.machine.replicas_per_node

    @property
    def shape(self) -> ModelShape:
        return self.result.request.shape

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.requested_config.model.dtype]

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Format in which the optimizer gets summed gradients."""
        return torch.float32 if self.requested_config.pipeline.fp32_gradients else self.dtype

    @property
    def optimizer_threads(self) -> int:
        """Each rank's threads for the CPU optimizer and checkpoint copies: measured, or derived from the CPU count."""
        profile = self.result.profile
        measured = 0 if profile is None else profile.optimizer_threads
        return measured or num_optimizer_threads(self.ranks.num_local)

    @property
    def reduced_format(self) -> str:
        """Format of the layers' optimizer states; empty for the usual format."""
        return self.result.request.reduced_format

    @cached_property
    def objective(self) -> Objective:
        """The objective that the options name."""
        return make_objective(self.requested_config.objective)

    @property
    def tile_tokens(self) -> int | None:
        """Number of tokens of a tile in recomputed layers; None if layers are not tiled."""
        return tile_tokens(self.result.request)

    @property
    def message_shape(self) -> tuple[int, int, int]:
        """Shape [B, L, H] of every activation and activation gradient between stages."""
        request = self.result.request
        return request.microbatch_rows, request.slice_length, request.shape.hidden_size

    @property
    def message_format(self) -> MessageFormat:
        """Format of messages: activations, followed by router sums if there is a router loss."""
        routers = router_messages(self.parts.router_loss)
        return MessageFormat(routers.sent_shape(self.message_shape, self.dtype), self.dtype)


def draft_run(
    config: Config,
    ranks: Ranks,
    model_config: PretrainedConfig,
    *,
    saved: SavedPlan | None = None,
    packed: PackedRows | None = None,
    replica_rendezvous: Rendezvous | None = None,
) -> RunSetup:
    """Connect to the other ranks, examine the machine, and check that the run can fit, before data are read.

    Collective if ranks have GPUs or there are replicas. Arguments and errors as in `join_ranks` and `draft_plan`.
    """
    context = join_ranks(config, ranks, replica_rendezvous=replica_rendezvous)
    check_dtype(config.model.dtype, context.device)
    check_products(config.model.matmul_dtype, context.device)
    machine = find_machine(config, context)
    parts = ModelParts.of(config, model_config, context.device, compiled=compiles(config, machine))
    result = draft_plan(config, parts, machine, context, saved=saved, packed=packed)
    return RunSetup(rank_context=context, parts=parts, result=result)


def complete_run(draft: RunSetup, config: Config, *, packed: PackedRows | None = None) -> RunSetup:
    """Plan a drafted run when its data are known; arguments and errors as in `plan_rows`."""
    parts = parts_for_rows(draft.result, config, draft.parts, draft.device, packed=packed is not None)
    result = plan_rows(draft.result, config, parts, draft.device, packed=packed)
    return replace(draft, parts=parts, result=result)
