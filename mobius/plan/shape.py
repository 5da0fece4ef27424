"""The sizes of a model that the planner calculates with; it knows no tensors and no model family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Parameter counts and dimensions of one causal language model."""

    embedding_parameters: int
    """Parameters of the token embedding."""
    layer_parameters: tuple[int, ...]
    """Parameters of every decoder layer, in order."""
    head_parameters: int
    """Parameters of the final norm and of the head, the head counted also where it is tied to the embedding."""
    hidden_size: int
    intermediate_size: int
    """Width of the widest feed-forward activation, in elements per token."""
    vocab_size: int
    is_tied: bool
    """Whether the head and the embedding share one matrix (then it is counted twice above)."""

    @property
    def num_layers(self) -> int:
        return len(self.layer_parameters)

    @property
    def tied_parameters(self) -> int:
        """Parameters that the embedding and the head share."""
        return self.vocab_size * self.hidden_size if self.is_tied else 0

    @property
    def num_parameters(self) -> int:
        """Trainable parameters, shared ones counted once."""
        return self.embedding_parameters + sum(self.layer_parameters) + self.head_parameters - self.tied_parameters
