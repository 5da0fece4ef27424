"""Host memory that two processes of one user share, without a file system: neither name nor size limit of /dev/shm."""

from __future__ import annotations

import ctypes
import mmap
import os


class SharedMemory:
    """One mapping of shared memory in this process; `close` ends it."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Map the memory behind `descriptor`, which is owned from now on."""
        self.descriptor, self.num_bytes = descriptor, num_bytes
        try:
            self._mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED)
        except BaseException:
            os.close(descriptor)
            raise
        # Only to learn the address: an export that is still held would keep the mapping from being closed.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """Make zeroed memory. A page takes memory from its first use on, near who touches or page-locks it first."""
        descriptor = os.memfd_create("mobius", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, num_bytes)

    @classmethod
    def open(cls, process: int, descriptor: int, num_bytes: int) -> SharedMemory:
        """Map memory that another process has created and still holds open under `descriptor`.

        Raises OSError where it cannot be reached, or has another size.
        """
        path = f"/proc/{process}/fd/{descriptor}"
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(opened).st_size != num_bytes:  # beyond its end nothing may be touched
            os.close(opened)
            raise OSError(f"{path} is no shared memory of {num_bytes} bytes")
        return cls(opened, num_bytes)

    def write_word(self, offset: int, value: int) -> None:
        """Let the host write a uint32."""
        ctypes.c_uint32.from_address(self.address + offset).value = value

    def close(self) -> None:
        """Unmap; nobody may use the address any more."""
        self._mapping.close()
        os.close(self.descriptor)
