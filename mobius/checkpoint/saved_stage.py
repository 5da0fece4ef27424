"""Parameters that a run saves, and the named tensors of a stage in a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mobius.checkpoint.tensor_files import StageParameter, weight_bytes
from mobius.config.config import Config
from mobius.distributed.replicas import ReplicaGroup
from mobius.distributed.transport import RankGroup, Transport
from mobius.engine.stage import reduced_names
from mobius.engine.stage_memory import StageMemory
from mobius.engine.stage_state import StageState, StateBlock
from mobius.engine.state_codec import GROUP
from mobius.models.blocks import ModelParts
from mobius.models.layout import StageLayout
from mobius.models.parameter_pieces import ParameterPiece, stored_views
from mobius.planner.plan_file import SavedPlan
from mobius.process.activity import Activity
from mobius.process.ranks import Ranks
from mobius.schedule.memory_layout import MemoryRules
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import Plan

WEIGHTS = "weights"
_FROZEN = "weights, frozen"


class HasMemory(Protocol):
    """Owner of the memory of a rank's stages."""

    @property
    def memory(self) -> Mapping[int, StageMemory]:
        """Memory of the stages, by stage."""


class PlannedRun(Protocol):
    """Properties of a planned run that are read to save it."""

    @property
    def config(self) -> Config:
        """The configuration with numbers in place of auto."""

    @property
    def requested_config(self) -> Config:
        """The configuration as the user requested it."""

    @property
    def ranks(self) -> Ranks:
        """This rank and the number of all ranks."""

    @property
    def device(self) -> torch.device:
        """Device that this rank computes on."""

    @property
    def parts(self) -> ModelParts:
        """The model."""

    @property
    def plan(self) -> Plan:
        """Stages, and the places of their memory."""

    @property
    def saved_plan(self) -> SavedPlan:
        """The plan in the form of a plan file."""

    @property
    def memory_rules(self) -> MemoryRules:
        """Rules of the memory of stages."""

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""

    @property
    def dtype(self) -> torch.dtype:
        """Format of the weights."""

    @property
    def reduced_format(self) -> str:
        """Format of the layers' optimizer states; empty if it is the usual format."""

    @property
    def optimizer_threads(self) -> int:
        """Number of threads of each rank that copy states."""

    @property
    def disk_shares(self) -> tuple[float, ...]:
        """Share of the disk bytes that each folder gets; empty: equal shares."""

    @property
    def host_bytes(self) -> int:
        """Host memory of a pipeline's ranks, as planned."""

    @property
    def pipelines_per_host(self) -> int:
        """Number of pipelines that share a machine's host memory."""


class OpenRun(HasMemory, Protocol):
    """Parts of a run on one rank that are read to save it."""

    @property
    def run_setup(self) -> PlannedRun:
        """Plan and configuration."""

    @property
    def transport(self) -> Transport:
        """Connections to other ranks, with the replicas."""

    @property
    def all_ranks(self) -> RankGroup:
        """All processes of the run."""

    @property
    def activity(self) -> Activity:
        """Record of what this rank does."""


@dataclass(frozen=True)
class SavedStage:
    """One stage, and its parameters that are saved; a tied head is saved as the embedding."""

    memory: StageMemory
    names: Collection[str]
    has_frozen: bool = True
    """Whether frozen weights are also saved."""
    replicas: ReplicaGroup | None = None
    """Replicas that share the stage; the first replica gathers and writes it."""
    pieces: Mapping[str, tuple[ParameterPiece, ...]] = field(default_factory=dict)
    """Parameter -> stored tensors of its weights; other parameters are stored as one tensor of their name."""

    def flat_tensors(self, *, has_optimizer: bool) -> dict[str, Tensor]:
        """Return the flat tensors of the state by their contents: weights, and parts of the optimizer state.

        Tensors on disks have no values (`StageMemory.parts`). If replicas share the stage, the tensors cover only this
        replica's shard, because other shards of the weights may not have arrived yet.
        """
        state = self.memory.state
        is_first = self.replicas is None or self.replicas.index == 0
        end = state.layout.num_trained_units
        whole = state.weights if self.has_frozen else state.weights[:end]
        weights = {WEIGHTS: whole} if is_first else {}
        if self.replicas is not None and state.shards is not None:
            frozen = {_FROZEN: whole[end:]} if is_first else {}
            own = state.shards.of_weights(state.layout).own
            weights = frozen | {_own_weights(number): whole[part] for number, part in enumerate(own)}
        if not has_optimizer:
            return weights
        return {**weights, **{key: part.values for key, part in _state_parts(state).items()}}

    def gather_from_replicas(self, flat: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gather the tensors of all replicas on the first replica; no tensors on others. Call it in one thread."""
        shards = self.memory.state.shards
        if self.replicas is None or shards is None:
            return flat
        flat = {kind: self.memory.in_memory(tensor) for kind, tensor in flat.items()}
        own = [flat[_own_weights(number)] for number in range(len(shards.own))]
        states = {kind: part for kind, part in _state_parts(self.memory.state).items() if kind in flat}
        nothing, of_weights = self.memory.state.weights[:0], shards.of_weights(self.memory.state.layout)
        found = {WEIGHTS: self.replicas.gather_to_first(torch.cat(own or [nothing]), of_weights)}
        for kind, part in states.items():
            owners = shards.part(part.trained.start, part.trained.stop, part.group)
            found[kind] = self.replicas.gather_to_first(flat[kind], owners)
        whole = {kind: tensor for kind, tensor in found.items() if tensor is not None}
        return whole | ({WEIGHTS: torch.cat([whole[WEIGHTS], flat[_FROZEN]])} if whole else {})

    def named_tensors(self, flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return views of flat tensors (as of `flat_tensors`) in the parameters' shapes, by their names in files."""
        layout, states = self.memory.state.layout, _state_parts(self.memory.state)
        found: dict[str, Tensor] = {}
        for kind, tensor in flat.items():
            if kind == WEIGHTS:
                views = layout.views(tensor, only_trained=not self.has_frozen)
                found |= stored_views({name: view for name, view in views.items() if name in self.names}, self.pieces)
                continue
            part = states[kind]
            for name in layout.trained_names:
                if name in self.names and layout.slice_of(name).start in range(part.trained.start, part.trained.stop):
                    found[f"{name}.{part.name}"] = part.view(tensor, layout, name)
        return found


@dataclass(frozen=True)
class _StatePart:
    """Part of a stage's optimizer states, for all its elements in one format."""

    name: str
    values: Tensor
    """Values that this replica owns."""
    trained: slice
    """Elements in this format, of all replicas, as a range of the stage's trained elements."""
    group: int
    """Number of elements that share a value."""

    def view(self, values: Tensor, layout: StageLayout, name: str) -> Tensor:
        """Return a parameter's part of all replicas' `values`; in its shape if each element has a value."""
        place, shape = layout.slice_of(name), layout.offsets[name][1]
        start, stop = place.start - self.trained.start, place.stop - self.trained.start
        own = values[start // self.group : -(-stop // self.group)]
        return own.view(shape) if self.group == 1 else own


def _state_parts(state: StageState) -> dict[str, _StatePart]:
    """Return the parts of a stage's optimizer states, by keys that are unique over all formats."""
    return {
        f"{name}, block {number}": _StatePart(name, values, block.trained, _group_of(block, name))
        for number, block in enumerate(state.blocks)
        for name, values in block.parts.items()
    }


def _group_of(block: StateBlock, name: str) -> int:
    return GROUP if name in block.codec.per_group else 1


def _own_weights(number: int) -> str:
    """Key of one of the separate parts of the weights that a replica owns."""
    return f"weights, part {number}"


def saved_parameters(run_setup: PlannedRun) -> list[StageParameter]:
    """Saved parameters with their stages, in forward order: all parameters, or with adapters the trained parameters.

    A tied head is saved once.
    """
    parts, plan = run_setup.parts, run_setup.plan
    blocks = [(parts.embedding, 0)]
    blocks += [(parts.layers[layer], cut.stage) for cut in plan.cuts for layer in cut.layers]
    blocks += [(parts.norm, plan.num_stages - 1)]
    blocks += [] if parts.is_tied else [(parts.head, plan.num_stages - 1)]
    frozen = frozenset[str]().union(*(block.frozen_names() for block, _ in blocks))
    reduced = reduced_names(parts.layers) - parts.names_in_fp32(run_setup.dtype)
    return [
        StageParameter(
            name,
            shape,
            stage,
            name not in frozen,
            run_setup.reduced_format if name in reduced else "",
            _piece_names(parts, name),
            parts.weight_dtype(name, run_setup.dtype),
        )
        for block, stage in blocks
        for name, shape in block.parameter_shapes().items()
        if name not in frozen or not parts.adapters.has_frozen_base
    ]


def _piece_names(parts: ModelParts, name: str) -> tuple[str, ...] | None:
    return None if name not in parts.parameter_pieces else tuple(piece.name for piece in parts.parameter_pieces[name])


def export_bytes(run_setup: PlannedRun) -> int:
    """Bytes of the exported weights, in the folder or in the single file."""
    return weight_bytes(saved_parameters(run_setup), run_setup.dtype)
