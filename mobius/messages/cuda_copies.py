"""Copy queues and shareable memory of one GPU, for mailboxes: torch's streams and events, the driver's operations.

Owns streams; memory is given back by whoever asked for it.
"""

from __future__ import annotations

import torch

from mobius.memory.streams import CudaEvent, Event
from mobius.messages.cuda_driver import CudaDriver
from mobius.messages.mailboxes import CopyQueue

_EXPORT_GRANULE = 2 * 2**20
"""A smaller piece of device memory may share its block with others, which would be exported along with it."""
_HIGH_PRIORITY = -1
"""Such streams come from a pool of their own, so that they share no hardware queue with compute and other copies."""


class CudaCopyEngine:
    """One GPU's copy engines; one thread uses it."""

    def __init__(self, device: torch.device, *, allows_peers: bool) -> None:
        """Raises DriverError if the driver lacks what it takes. `allows_peers`: whether GPUs may reach each other."""
        self._device, self._allows_peers = device, allows_peers
        self._driver = CudaDriver()
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # the context exists from here on; sync: once, before training

    @property
    def device_index(self) -> int:
        """By which all ranks know the GPU."""
        assert self._device.index is not None
        return self._device.index

    def reaches(self, device_index: int) -> bool:
        """Whether this GPU can write into that one's memory."""
        return (
            self._allows_peers
            and device_index != self.device_index
            and device_index < torch.cuda.device_count()
            and torch.cuda.can_device_access_peer(self._device, device_index)
        )

    def new_queue(self) -> CopyQueue:
        """A stream of its own."""
        return _CudaQueue(self._device, self._driver)

    def allocate(self, num_bytes: int) -> int:
        """Device memory that `export` can share, beside torch's."""
        return self._driver.allocate(-(-num_bytes // _EXPORT_GRANULE) * _EXPORT_GRANULE)

    def free(self, address: int) -> None:
        """Give `allocate`d memory back."""
        self._driver.free(address)

    def export(self, address: int) -> bytes:
        """What another rank needs to open `allocate`d memory."""
        return self._driver.export(address)

    def open_exported(self, handle: bytes) -> int:
        """Map another GPU's memory; its address for this GPU."""
        return self._driver.open_exported(handle)

    def close_exported(self, address: int) -> None:
        """Undo `open_exported`."""
        self._driver.close_exported(address)

    def register(self, address: int, num_bytes: int) -> int:
        """Page-lock host memory; its address for this GPU."""
        return self._driver.register(address, num_bytes)

    def unregister(self, address: int) -> None:
        """Undo `register`, by the host's address."""
        self._driver.unregister(address)


class _CudaQueue:
    def __init__(self, device: torch.device, driver: CudaDriver) -> None:
        self._device, self._driver = device, driver
        self._stream = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)
        self._handle = int(self._stream.cuda_stream)

    def follow_compute(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device.index))

    def wait_value(self, address: int, value: int) -> None:
        self._driver.wait_value(self._handle, address, value)

    def write_value(self, address: int, value: int) -> None:
        self._driver.write_value(self._handle, address, value)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._driver.copy(self._handle, target, source, num_bytes)

    def record(self) -> Event:
        return CudaEvent(self._stream)
