"""Stored pieces of parameters: all experts are one tensor in memory, but many tensors on disk.

    model.layers.3.mlp.experts.gate_up_proj [E, 2 I, H]      in memory
    model.layers.3.mlp.experts.0.gate_proj.weight [I, H]     on disk: rows 0 to I of expert 0
    model.layers.3.mlp.experts.0.up_proj.weight [I, H]       rows I to 2 I

The mapping is part of transformers, as in `save_pretrained`. It runs once on meta tensors. Offset and strides of each
stored tensor then show which elements of a parameter it holds.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from mobius.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ParameterPiece:
    """A stored tensor as a view of a contiguous parameter; strides and offset are in elements."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements of the piece are consecutive in the parameter."""
        return self.strides == torch.empty(self.shape, device="meta").stride()

    def of(self, parameter: Tensor) -> Tensor:
        """Return the piece as a view of the contiguous `parameter`."""
        assert parameter.is_contiguous(), self.name
        return parameter.as_strided(self.shape, self.strides, parameter.storage_offset() + self.offset)


def find_parameter_pieces(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[ParameterPiece, ...]]:
    """Pieces of each parameter in `shapes`, except parameters stored with the same name and shape as in memory.

    Raises CheckpointError for a family whose stored tensors are not pieces of single parameters.
    """
    # A loaded model remembers a mapping. The copy must not have it: the stored form depends only on the family.
    own = copy.copy(model)
    vars(own).pop("_weight_conversions", None)
    tensors = {name: _Traced.of(shape) for name, shape in shapes.items()}
    stored = revert_weight_conversion(own, dict(tensors))
    found: dict[str, list[ParameterPiece]] = {}
    owners = {_storage(tensor): name for name, tensor in tensors.items()}
    for stored_name, tensor in stored.items():
        name = owners.get(_storage(tensor))
        if name is None:
            raise CheckpointError(
                f"the family {model.config.model_type!r} stores {stored_name!r}, which is not a piece of one "
                "parameter. Such a tensor cannot be read or written here."
            )
        piece = ParameterPiece(stored_name, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        found.setdefault(name, []).append(piece)
    if lost := sorted(shapes.keys() - found.keys()):
        raise CheckpointError(
            f"{lost[0]!r} is missing among the tensors that the family {model.config.model_type!r} stores."
        )
    whole = {name: (ParameterPiece(name, tuple(each.shape), each.stride(), 0),) for name, each in tensors.items()}
    return {name: tuple(pieces) for name, pieces in found.items() if tuple(pieces) != whole[name]}


def stored_views(views: Mapping[str, Tensor], pieces: Mapping[str, tuple[ParameterPiece, ...]]) -> dict[str, Tensor]:
    """Stored name -> tensor to store, a view of a parameter in `views`."""
    found: dict[str, Tensor] = {}
    for name, parameter in views.items():
        found |= {each.name: each.of(parameter) for each in pieces[name]} if name in pieces else {name: parameter}
    return found


def stored_shapes(
    name: str, shape: tuple[int, ...], pieces: Mapping[str, tuple[ParameterPiece, ...]]
) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that store parameter `name`."""
    return [(piece.name, piece.shape) for piece in pieces[name]] if name in pieces else [(name, shape)]


class _Traced(Tensor):
    """A meta tensor whose views can be traced. `contiguous` returns it unchanged: a copy would end the trace."""

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, device="meta").as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.contiguous:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _storage(tensor: Tensor) -> int:
    """Identity of a tensor's storage, valid while the storage lives."""
    return int(tensor.as_subclass(Tensor).untyped_storage()._cdata)
