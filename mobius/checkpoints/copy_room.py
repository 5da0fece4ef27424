"""Host memory in which the state of stages lies while it is written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from mobius.memory.host_arena import lock_pages, map_zeros, unlock_pages


class CopyRoom:
    """Host memory for copies: one buffer for each stage or, if `num_bytes` are not enough for that, some to share."""

    def __init__(self, stage_bytes: Mapping[int, int], num_bytes: int, *, pins: bool) -> None:
        """`stage_bytes` is what each stage's copy takes. `pins`: page-locked, for copies from a GPU.

        Buffers are made by a thread. Where `num_bytes` are too few for the largest stage there is a single one without
        memory: a turn to write a stage from where it is.
        """
        self._has_all = sum(stage_bytes.values()) <= num_bytes
        largest = max(stage_bytes.values())
        self.has_memory = largest <= num_bytes
        sizes = dict(stage_bytes)
        if not self._has_all:
            sizes = dict.fromkeys(range(num_bytes // largest), largest) if self.has_memory else {0: 0}
        self.num_bytes = sum(sizes.values())
        self._pins, self._free = pins, threading.Condition()
        self._buffers: dict[int, Tensor] = {}
        self._taken: set[int] = set()
        self._error: BaseException | None = None
        self._maker = threading.Thread(target=self._make, args=(sizes,), name="copy room", daemon=True)
        self._maker.start()

    @property
    def has_all(self) -> bool:
        """Whether every stage has a buffer of its own."""
        return self._has_all

    def take(self, stages: Collection[int], *, gives_up: Callable[[], bool]) -> int | None:
        """Number of a free buffer that takes one of `stages`; waits for it. None once `gives_up` says yes."""
        with self._free:
            while not gives_up():
                if self._error is not None:
                    raise self._error
                ready = self._buffers.keys() - self._taken
                if usable := (ready & set(stages) if self._has_all else ready):
                    number = next((stage for stage in stages if stage in usable), min(usable))
                    self._taken.add(number)
                    return number
                self._free.wait(0.1)
        return None

    def buffer(self, number: int) -> Tensor:
        """uint8, as long as the stage's copy or longer."""
        return self._buffers[number]

    def give_back(self, number: int) -> None:
        """Let another copy use the buffer."""
        with self._free:
            self._taken.discard(number)
            self._free.notify_all()

    def give_all_back(self) -> None:
        """Let all buffers be used; nobody may be copying or writing any more."""
        with self._free:
            self._taken.clear()

    def close(self) -> None:
        """Give page-locked memory back; nothing may be copying any more."""
        self._maker.join()
        if self._pins:
            for buffer in filter(Tensor.numel, self._buffers.values()):
                unlock_pages(buffer)
        self._buffers = {}

    def _make(self, sizes: Mapping[int, int]) -> None:
        try:
            for number, num_bytes in sizes.items():
                buffer = map_zeros(num_bytes, torch.uint8)
                if self._pins and num_bytes:
                    lock_pages(buffer)
                with self._free:
                    self._buffers[number] = buffer
                    self._free.notify_all()
        except BaseException as error:
            with self._free:
                self._error = error
                self._free.notify_all()


def divided(buffer: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the formats and lengths of `like`, one behind the other in `buffer`; the widest formats first."""
    found, start = {}, 0
    for kind, tensor in sorted(like.items(), key=lambda pair: -pair[1].element_size()):
        found[kind] = buffer[start : start + tensor.nbytes].view(tensor.dtype)
        start += tensor.nbytes
    return found
