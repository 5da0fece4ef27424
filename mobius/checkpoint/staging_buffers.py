"""Host memory in which the state of stages lies while it is written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from mobius.memory.host_arena import lock_pages, map_zeros, unlock_pages


class StagingBuffers:
    """Host memory for copies: one buffer for each stage or, if `num_bytes` are not enough for that, some to share."""

    def __init__(self, stage_bytes: Mapping[int, int], num_bytes: int, *, pinned: Collection[int]) -> None:
        """Take the memory; `stage_bytes` is what each stage's copy takes, `pinned` the stages that a GPU copies.

        It is taken here and not beside training: while CUDA page-locks memory nothing else can be enqueued, and two
        GPUs that wait for each other's messages would wait for good. Where `num_bytes` are too few for the largest
        stage there is a single buffer without memory: a turn to write a stage from where it is. Raises HostMemoryError.
        """
        self._has_buffer_per_stage = sum(stage_bytes.values()) <= num_bytes
        largest = max(stage_bytes.values())
        self.has_memory = largest <= num_bytes
        sizes, locked = dict(stage_bytes), set(pinned)
        if not self._has_buffer_per_stage:
            sizes = dict.fromkeys(range(num_bytes // largest), largest) if self.has_memory else {0: 0}
            locked = set(sizes) if pinned else set()
        self.num_bytes = sum(sizes.values())
        self._free = threading.Condition()
        self._buffers: dict[int, Tensor] = {}
        self._locked: list[Tensor] = []
        self._taken: set[int] = set()
        for number, size in sizes.items():
            self._buffers[number] = buffer = map_zeros(size, torch.uint8)
            if number in locked and size:
                lock_pages(buffer)
                self._locked.append(buffer)

    @property
    def num_buffers(self) -> int:
        """Copies that can be there at once."""
        return len(self._buffers)

    @property
    def has_buffer_per_stage(self) -> bool:
        """Whether every stage has a buffer of its own."""
        return self._has_buffer_per_stage

    def acquire(self, stages: Collection[int], *, is_cancelled: Callable[[], bool]) -> int | None:
        """Number of a free buffer that takes one of `stages`; waits for it. None once `is_cancelled` says yes."""
        with self._free:
            while not is_cancelled():
                ready = self._buffers.keys() - self._taken
                if usable := (ready & set(stages) if self._has_buffer_per_stage else ready):
                    number = next((stage for stage in stages if stage in usable), min(usable))
                    self._taken.add(number)
                    return number
                self._free.wait(0.1)
        return None

    def buffer(self, number: int) -> Tensor:
        """uint8, as long as the stage's copy or longer."""
        return self._buffers[number]

    def release(self, number: int) -> None:
        """Let another copy use the buffer."""
        with self._free:
            self._taken.discard(number)
            self._free.notify_all()

    def release_all(self) -> None:
        """Let all buffers be used; nobody may be copying or writing any more."""
        with self._free:
            self._taken.clear()

    def close(self) -> None:
        """Give page-locked memory back; nothing may be copying any more."""
        while self._locked:
            unlock_pages(self._locked.pop())
        self._buffers = {}


def split_buffer(buffer: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the formats and lengths of `like`, one behind the other in `buffer`; the widest formats first."""
    found, start = {}, 0
    for kind, tensor in sorted(like.items(), key=lambda pair: -pair[1].element_size()):
        found[kind] = buffer[start : start + tensor.nbytes].view(tensor.dtype)
        start += tensor.nbytes
    return found
