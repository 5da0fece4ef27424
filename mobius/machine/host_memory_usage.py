"""Owns what the start of a run took of host memory, by owner: measured on this rank, summed over all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from mobius.machine.host_memory import mapped_file_bytes, private_host_bytes
from mobius.units import GIB

OWNERS: Final = ("Python and its libraries", "data and tokenizer", "connections", "stages")
"""Parts of a start in their order; stages are weights, gradients and optimizer state, and on GPUs the kernels of the
step that is rehearsed with them."""


class HostMemoryUsage:
    """Growth of this process's memory from one mark to the next."""

    def __init__(self, read: Callable[[], int] = private_host_bytes) -> None:
        """Count all that there is now for the first owner."""
        self._read, self._last = read, read()
        self.num_bytes = dict.fromkeys(OWNERS, 0)
        self.num_bytes[OWNERS[0]] = self._last

    def mark(self, owner: str) -> None:
        """Count for `owner` what has come since the last mark; memory that was given back counts as nothing."""
        now = self._read()
        self.num_bytes[owner] += max(0, now - self._last)
        self._last = now

    def describe(self, sum_over_ranks: Callable[[Tensor], Tensor], *, planned: int | None) -> str:
        """Text of all ranks' bytes by owner; collective. `planned` are those that the plan counts, of all ranks."""
        own = [*self.num_bytes.values(), mapped_file_bytes(), 1]
        *sums, files, num_ranks = sum_over_ranks(torch.tensor(own, dtype=torch.float64)).tolist()
        files /= num_ranks  # most are libraries, which processes share
        parts = ", ".join(
            f"{name} {_gib(num_bytes)}"
            for name, num_bytes in zip(OWNERS, sums, strict=True)
            if num_bytes >= _SHOWN_BYTES
        )
        text = (
            f"{_gib(sum(sums) + files)} GiB in {num_ranks:.0f} process(es): {parts}, files shared by them {_gib(files)}"
        )
        return text if planned is None else f"{text}; planned {_gib(planned)}, to which a step adds its buffers"


_SHOWN_BYTES: Final = GIB // 200
"""Smaller parts read as 0.00."""


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"
