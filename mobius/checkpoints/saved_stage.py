"""Knows which tensors of a stage a checkpoint has, and by what names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mobius.memory.shards import ReplicaGroup
from mobius.memory.stage_memory import StageMemory
from mobius.memory.stage_state import MasterRemainder, StageState
from mobius.models.weight_conversion.parameter_pieces import ParameterPiece, stored_views

WEIGHTS = "weights"
_FROZEN = "weights, frozen"


@dataclass(frozen=True)
class SavedStage:
    """One stage, and which of its parameters it saves: a tied head is saved as the embedding."""

    memory: StageMemory
    names: Collection[str]
    has_frozen: bool = True
    """Whether frozen weights are saved, too."""
    replicas: ReplicaGroup | None = None
    """Counterparts that share the stage: the first one writes it, and gathers it for that."""
    pieces: Mapping[str, tuple[ParameterPiece, ...]] = field(default_factory=dict)
    """Tensors that weights are stored as, where that is not one by the parameter's name."""

    def flat_tensors(self, *, has_optimizer: bool) -> dict[str, Tensor]:
        """Flat tensors that make up the state, by what they hold: weights, and `optimizer_keys` of the format.

        Of a stage that is shared it is what this replica adds to the state: its part of the weights too, because the
        others' may not have come yet.
        """
        state = self.memory.state
        is_first = self.replicas is None or self.replicas.index == 0
        whole = state.weights if self.has_frozen else state.weights[: state.layout.num_trained]
        weights = {WEIGHTS: whole} if is_first else {}
        if self.replicas is not None and state.shards is not None:
            frozen = {_FROZEN: whole[state.layout.num_trained :]} if is_first else {}
            weights = frozen | {_own_weights(number): whole[part] for number, part in enumerate(state.shards.own)}
        return weights | (optimizer_tensors(state) if has_optimizer else {})

    def gather_from_replicas(self, flat: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors of all replicas' parts on the first one, nothing on the others; one thread calls it."""
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
    """Name of a replica's part of the weights, one of those that lie apart."""
    return f"weights, part {number}"


def optimizer_tensors(state: StageState) -> dict[str, Tensor]:
    """Flat tensors of a stage beside its weights, by the ending of their names in a checkpoint."""
    master = state.master
    own: dict[str, Tensor] = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
    if isinstance(master, MasterRemainder):
        own["master_low"] = master.bits
    elif master is not state.weights:
        own["master"] = master
    return own
