"""Compiles a function once for all that share it; what cannot be compiled runs eagerly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch
from torch._dynamo.exc import TorchDynamoException

from mobius.errors import first_line

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class CompiledFunction(Generic[Arguments, Result]):
    """A function under torch.compile: one graph per shape and per grad mode, whatever tensors are passed in.

    The first call of each kind compiles, which takes seconds to a minute.
    """

    def __init__(self, function: Callable[Arguments, Result], *, name: str) -> None:
        """`name` is what a message calls it, in the plural."""
        self._function, self._name = function, name
        self._compiled = torch.compile(function, dynamic=False)
        self._is_broken = False

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Run the function; after a failure to compile, eagerly from then on."""
        if not self._is_broken:
            try:
                return self._compiled(*args, **kwargs)
            except TorchDynamoException as error:
                self._is_broken = True
                logger.warning(
                    "%s run without compilation, which is slower: torch.compile failed: %s",
                    self._name,
                    first_line(error),
                )
        return self._function(*args, **kwargs)
