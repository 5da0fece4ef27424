"""Copies, counters and shareable memory of one GPU, for mailboxes: torch's streams and CUDA driver calls."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

import torch

from mobius.hardware.streams import CudaEvent, Event
from mobius.process.ranks import allows_peer_copies

_EXPORT_GRANULE = 2 * 2**20
"""Allocations are multiples of this size. Smaller allocations may share a block, and an export exports the block."""

_WAIT_UNTIL_NOT_BEFORE = 0x0  # CU_STREAM_WAIT_VALUE_GEQ: cyclic, (int32)(*address - value) >= 0
_WRITE_BEHIND_A_FENCE = 0x0  # CU_STREAM_WRITE_VALUE_DEFAULT: earlier work of the stream is visible to all
_REGISTER_FOR_DEVICES = 0x1 | 0x2  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
_ENABLE_PEER_ACCESS = 0x1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuStreamWaitValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuStreamWriteValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuIpcGetMemHandle": (POINTER(_Handle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _Handle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (POINTER(c_uint64), c_void_p, c_uint),
}


class DriverError(RuntimeError):
    """A failed call of the CUDA driver, or a driver that lacks the called function."""


class CudaDriver:
    """CUDA driver calls that torch lacks. A failed call raises DriverError with the driver's message.

    Addresses and streams are plain integers. Every call uses the calling thread's context, which torch sets.
    """

    def __init__(self, library: str = "libcuda.so.1") -> None:
        """Open the driver's library; raises DriverError if the library or one of its functions is missing."""
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise DriverError(f"the CUDA driver cannot be opened: {error}") from error
        for name, arguments in _PROTOTYPES.items():
            if not hasattr(self._library, name):
                raise DriverError(f"the CUDA driver is too old: it has no {name}")
            getattr(self._library, name).argtypes = arguments

    def allocate(self, num_bytes: int) -> int:
        """Allocate exportable device memory; return its address."""
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), -(-num_bytes // _EXPORT_GRANULE) * _EXPORT_GRANULE)
        return address.value

    def free(self, address: int) -> None:
        """Free memory from `allocate`; no other rank may have it open."""
        self.call("cuMemFree_v2", address)

    def export(self, address: int) -> bytes:
        """Return the handle with which another rank opens memory from `allocate`."""
        handle = _Handle()
        self.call("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle)

    def open_exported(self, handle: bytes) -> int:
        """Map another device's memory; return its address in this process."""
        address = c_uint64()
        if len(handle) != ctypes.sizeof(_Handle):
            raise DriverError(f"a memory handle cannot have {len(handle)} bytes")
        self.call("cuIpcOpenMemHandle_v2", byref(address), _Handle.from_buffer_copy(handle), _ENABLE_PEER_ACCESS)
        return address.value

    def close_exported(self, address: int) -> None:
        """Undo `open_exported`."""
        self.call("cuIpcCloseMemHandle", address)

    def register(self, address: int, num_bytes: int) -> int:
        """Page-lock host memory; return its device address."""
        self.call("cuMemHostRegister_v2", address, num_bytes, _REGISTER_FOR_DEVICES)
        device_address = c_uint64()
        try:
            self.call("cuMemHostGetDevicePointer_v2", byref(device_address), address, 0)
        except DriverError:
            self.unregister(address)
            raise
        return device_address.value

    def unregister(self, address: int) -> None:
        """Undo `register`, by the host address."""
        self.call("cuMemHostUnregister", address)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the table above; raises DriverError if it fails."""
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            text = c_char_p()
            message = self._library.cuGetErrorString(result, byref(text)) == 0 and text.value
            raise DriverError(f"{name}: {message.decode() if message else 'unknown error'} ({result})")


class CudaCopyEngine(CudaDriver):
    """Copies of one GPU and their memory; only one thread uses it. The caller frees all allocated memory."""

    def __init__(self, device: torch.device) -> None:
        """Create the context of `device`. Raises DriverError if the driver lacks a function."""
        assert device.index is not None
        self.device_index, self._device = device.index, device
        super().__init__()
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # creates the context; sync: once, before training

    def can_access_peer(self, device_index: int) -> bool:
        """Whether this device can write to the memory of device `device_index`."""
        return (
            allows_peer_copies()
            and device_index != self.device_index
            and device_index < torch.cuda.device_count()
            and torch.cuda.can_device_access_peer(self._device, device_index)
        )

    def new_queue(self) -> CudaQueue:
        """Return a new queue with a new stream."""
        # High-priority streams come from a separate pool, so they share no hardware queue with compute and copies.
        return CudaQueue(torch.cuda.Stream(self._device, priority=-1), self)


class CudaQueue:
    """An ordered queue of copies, waits and counter writes; never blocks the host."""

    def __init__(self, stream: torch.cuda.Stream, driver: CudaDriver) -> None:
        self._stream, self._driver, self._handle = stream, driver, int(stream.cuda_stream)

    def follow_compute(self) -> None:
        """Make later work wait for the compute that is enqueued so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device.index))

    def wait_value(self, address: int, value: int) -> None:
        """Make later work wait until the uint32 at `address` is at least `value`, compared cyclically."""
        self._driver.call("cuStreamWaitValue32_v2", self._handle, address, value, _WAIT_UNTIL_NOT_BEFORE)

    def write_value(self, address: int, value: int) -> None:
        """Write a uint32 once all earlier work is done and visible to all devices and the host."""
        self._driver.call("cuStreamWriteValue32_v2", self._handle, address, value, _WRITE_BEHIND_A_FENCE)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy between two addresses of device memory or page-locked host memory."""
        self._driver.call("cuMemcpyAsync", target, source, num_bytes, self._handle)

    def record(self) -> Event:
        """Return the event after all work in the queue so far."""
        return CudaEvent(self._stream)
