"""Knows which tensors of a stage a checkpoint has, and by what names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from mobius.memory.shares import Replicas
from mobius.memory.stage_memory import StageMemory
from mobius.memory.stage_state import Remainder, StageState
from mobius.models.stored.pieces import Piece, stored_views

WEIGHTS = "weights"


@dataclass(frozen=True)
class SavedStage:
    """One stage, and which of its parameters it saves: a tied head is saved as the embedding."""

    memory: StageMemory
    names: Collection[str]
    has_frozen: bool = True
    """Whether frozen weights are saved, too."""
    replicas: Replicas | None = None
    """Counterparts that share the stage: the first one writes it, and has all of its weights."""
    pieces: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)
    """Tensors that weights are stored as, where that is not one by the parameter's name."""

    def flat_tensors(self, *, has_optimizer: bool) -> dict[str, Tensor]:
        """Flat tensors that make up the state, by what they hold: weights, and `optimizer_keys` of the format.

        Of a stage that is shared it is what this replica adds to the state.
        """
        state = self.memory.state
        weights = state.weights if self.has_frozen else state.weights[: state.layout.num_trained]
        own_weights = {WEIGHTS: weights} if self.replicas is None or self.replicas.index == 0 else {}
        return own_weights | (optimizer_tensors(state) if has_optimizer else {})

    def gathered(self, flat: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors of all replicas' parts on the first one, nothing on the others; one thread calls it."""
        shares = self.memory.state.shares
        if self.replicas is None or shares is None:
            return flat
        found = {kind: flat[kind] for kind in flat if kind == WEIGHTS}
        for kind in sorted(flat.keys() - found.keys()):
            if (whole := self.replicas.collect(flat[kind], shares)) is not None:
                found[kind] = whole
        return found

    def named(self, flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
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


def optimizer_tensors(state: StageState) -> dict[str, Tensor]:
    """Flat tensors of a stage beside its weights, by the ending of their names in a checkpoint."""
    master = state.master
    own: dict[str, Tensor] = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
    if isinstance(master, Remainder):
        own["master_low"] = master.bits
    elif master is not state.weights:
        own["master"] = master
    return own
