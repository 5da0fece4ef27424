"""Host memory that two processes of one user share, without a file system: neither name nor size limit of /dev/shm.

Owns the mapping; page-locking it is the business of whoever copies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass

_WORD = ctypes.c_uint32


@dataclass(frozen=True, slots=True)
class SharedName:
    """By which another process finds the memory, while its creator keeps it open."""

    process: int
    descriptor: int
    num_bytes: int


class SharedMemory:
    """One mapping of shared memory in this process; `close` ends it."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Map the memory behind `descriptor`, which is owned from now on."""
        self._descriptor, self.num_bytes = descriptor, num_bytes
        try:
            self._mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED)
        except BaseException:
            os.close(descriptor)
            raise
        # Only to learn the address: an export that is still held would keep the mapping from being closed.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """New zeroed memory; a page takes memory, near who touches or page-locks it first, from then on."""
        descriptor = os.memfd_create("mobius", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, num_bytes)

    @classmethod
    def open(cls, name: SharedName) -> SharedMemory:
        """The memory that another process has created; raises OSError where it may not be reached."""
        path = f"/proc/{name.process}/fd/{name.descriptor}"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(descriptor).st_size != name.num_bytes:  # beyond its end nothing may be touched
            os.close(descriptor)
            raise OSError(f"{path} is no shared memory of {name.num_bytes} bytes")
        return cls(descriptor, name.num_bytes)

    @property
    def name(self) -> SharedName:
        return SharedName(os.getpid(), self._descriptor, self.num_bytes)

    def write_word(self, offset: int, value: int) -> None:
        """Let the host write a uint32."""
        _WORD.from_address(self.address + offset).value = value

    def close(self) -> None:
        """Unmap; nobody may use the address any more."""
        self._mapping.close()
        os.close(self._descriptor)
