"""Compiles a layer template once for all layers that share it; what cannot be compiled runs eagerly."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.func import functional_call

logger = logging.getLogger(__name__)


class CompiledLayer:
    """A layer's code under torch.compile: one graph per shape and per grad mode, whatever weights are passed in.

    The first call of each kind compiles, which takes seconds to a minute.
    """

    def __init__(self, module: nn.Module) -> None:
        """`module` is on the meta device: only its code is used."""
        self._module = module
        self._compiled = torch.compile(self._run, dynamic=False)
        self._is_broken = False

    def __call__(self, weights: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Run the layer; after a failure to compile, eagerly from then on."""
        if not self._is_broken:
            try:
                return self._compiled(dict(weights), args, kwargs)
            except TorchDynamoException as error:
                self._is_broken = True
                reason = str(error).strip().splitlines()[0]
                logger.warning("layers run without compilation, which is slower: torch.compile failed: %s", reason)
        return self._run(dict(weights), args, kwargs)

    def _run(self, weights: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return cast(Tensor, functional_call(self._module, weights, args, kwargs))
