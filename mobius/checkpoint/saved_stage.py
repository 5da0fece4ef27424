"""Parameters that a run saves, and the tensors of a stage in a checkpoint with their names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mobius.activity import Activity
from mobius.checkpoint.tensor_files import StageParameter
from mobius.distributed.replicas import ReplicaGroup
from mobius.distributed.transport import RankGroup, Transport
from mobius.engine.stage_memory import StageMemory
from mobius.models.blocks import ModelParts
from mobius.models.parameter_pieces import ParameterPiece, stored_views
from mobius.planner.run_setup import RunSetup

WEIGHTS = "weights"
_FROZEN = "weights, frozen"


class HasMemory(Protocol):
    """Owner of the memory of a rank's stages."""

    @property
    def memory(self) -> Mapping[int, StageMemory]:
        """Memory by stage."""


class OpenRun(HasMemory, Protocol):
    """Parts of a run on one rank that are read to save it."""

    @property
    def run_setup(self) -> RunSetup:
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
    """One stage, and its parameters that are saved: a tied head is saved as the embedding."""

    memory: StageMemory
    names: Collection[str]
    has_frozen: bool = True
    """Whether frozen weights are saved too."""
    replicas: ReplicaGroup | None = None
    """Replicas that share the stage: the first one gathers and writes it."""
    pieces: Mapping[str, tuple[ParameterPiece, ...]] = field(default_factory=dict)
    """Parameter -> tensors that its weights are stored as, if not one of its name."""

    def flat_tensors(self, *, has_optimizer: bool) -> dict[str, Tensor]:
        """Return the flat tensors of the state by what they hold: weights, and parts of the optimizer state.

        If replicas share the stage, they cover this replica's shard only, since other shards of the weights may not
        have arrived yet.
        """
        state = self.memory.state
        is_first = self.replicas is None or self.replicas.index == 0
        whole = state.weights if self.has_frozen else state.weights[: state.layout.num_trained]
        weights = {WEIGHTS: whole} if is_first else {}
        if self.replicas is not None and state.shards is not None:
            frozen = {_FROZEN: whole[state.layout.num_trained :]} if is_first else {}
            weights = frozen | {_own_weights(number): whole[part] for number, part in enumerate(state.shards.own)}
        return {**weights, **(state.parts if has_optimizer else {})}

    def gather_from_replicas(self, flat: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors of all replicas' parts on the first replica, nothing on the other ones. Call it in one thread."""
        shards = self.memory.state.shards
        if self.replicas is None or shards is None:
            return flat
        own = [flat[_own_weights(number)] for number in range(len(shards.own))]
        optimizer = flat.keys() - {_FROZEN, *map(_own_weights, range(len(own)))}
        nothing = self.memory.state.weights[:0]
        parts = {WEIGHTS: torch.cat(own or [nothing]), **{kind: flat[kind] for kind in sorted(optimizer)}}
        found = {kind: self.replicas.gather_to_first(part, shards) for kind, part in parts.items()}
        whole = {kind: tensor for kind, tensor in found.items() if tensor is not None}
        return whole | ({WEIGHTS: torch.cat([whole[WEIGHTS], flat[_FROZEN]])} if whole else {})

    def named_tensors(self, flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Views of flat tensors like those of `flat_tensors` in the parameters' shapes, as they are named in files."""
        layout = self.memory.state.layout
        found: dict[str, Tensor] = {}
        for kind, tensor in flat.items():
            views = layout.views(tensor) if kind == WEIGHTS and self.has_frozen else layout.trained_views(tensor)
            own = {name: view for name, view in views.items() if name in self.names}
            if kind == WEIGHTS:
                found |= stored_views(own, self.pieces)
            else:
                found |= {f"{name}.{kind}": view for name, view in own.items()}
        return found


def _own_weights(number: int) -> str:
    """Name of one of a replica's separate parts of the weights."""
    return f"weights, part {number}"


def saved_parameters(run_setup: RunSetup) -> list[StageParameter]:
    """Parameters that are saved in forward order with their stage: all of the model's, or the trained ones of adapters.

    A tied head is saved once.
    """
    parts, plan = run_setup.parts, run_setup.plan
    blocks = [(parts.embedding, 0)]
    blocks += [(parts.layers[layer], cut.stage) for cut in plan.cuts for layer in cut.layers]
    blocks += [(parts.norm, plan.num_stages - 1)]
    blocks += [] if parts.is_tied else [(parts.head, plan.num_stages - 1)]
    frozen = frozenset[str]().union(*(block.frozen_names() for block, _ in blocks))
    return [
        StageParameter(name, shape, stage, name not in frozen, _piece_names(parts, name))
        for block, stage in blocks
        for name, shape in block.parameter_shapes().items()
        if name not in frozen or not parts.adapters.is_lora
    ]


def _piece_names(parts: ModelParts, name: str) -> tuple[str, ...] | None:
    return None if name not in parts.parameter_pieces else tuple(piece.name for piece in parts.parameter_pieces[name])


def export_bytes(run_setup: RunSetup) -> int:
    """Bytes of the exported weights, in the folder or in the single file."""
    return sum(parameter.num_elements for parameter in saved_parameters(run_setup)) * run_setup.dtype.itemsize
