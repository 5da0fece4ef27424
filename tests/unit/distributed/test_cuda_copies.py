"""Arguments reach the driver as its C prototypes say, and what it refuses is told in its own words."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from mobius.distributed.cuda_copies import CudaDriver, CudaQueue, DriverError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

# The prototypes as the driver's documentation gives them; `last` keeps what a call was given.
SOURCE = """
#include <stddef.h>
#include <string.h>
typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef struct stream *CUstream;
typedef struct { char reserved[64]; } CUipcMemHandle;

struct { unsigned long long stream, address, other, size; unsigned value, flags; char handle[64]; } last;
int refuses;

CUresult cuGetErrorString(CUresult error, const char **text) {
    if (error != 1) return 1;
    *text = "invalid argument";
    return 0;
}
CUresult cuStreamWaitValue32_v2(CUstream s, CUdeviceptr a, unsigned int v, unsigned int f) {
    last.stream = (unsigned long long)s; last.address = a; last.value = v; last.flags = f; return refuses;
}
CUresult cuStreamWriteValue32_v2(CUstream s, CUdeviceptr a, unsigned int v, unsigned int f) {
    last.stream = (unsigned long long)s; last.address = a; last.value = v; last.flags = f; return refuses;
}
CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream s) {
    last.address = target; last.other = source; last.size = size; last.stream = (unsigned long long)s; return refuses;
}
CUresult cuMemAlloc_v2(CUdeviceptr *a, size_t size) { last.size = size; *a = 0x7f0000000000ull; return refuses; }
CUresult cuMemFree_v2(CUdeviceptr a) { last.address = a; return refuses; }
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr a) {
    last.address = a;
    for (int i = 0; i < 64; i++) handle->reserved[i] = (char)(i % 3 ? i : 0);
    return refuses;
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *a, CUipcMemHandle handle, unsigned int f) {
    memcpy(last.handle, handle.reserved, 64); last.flags = f; *a = 0x7e0000000000ull; return refuses;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr a) { last.address = a; return refuses; }
CUresult cuMemHostRegister_v2(void *p, size_t size, unsigned int f) {
    last.address = (unsigned long long)p; last.size = size; last.flags = f; return refuses;
}
CUresult cuMemHostUnregister(void *p) { last.other = (unsigned long long)p; return refuses; }
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *a, void *p, unsigned int f) {
    *a = (unsigned long long)p + 1; return refuses ? refuses : f;
}
"""


class Last(ctypes.Structure):
    """What the last call was given."""

    _fields_ = (
        ("stream", ctypes.c_ulonglong),
        ("address", ctypes.c_ulonglong),
        ("other", ctypes.c_ulonglong),
        ("size", ctypes.c_ulonglong),
        ("value", ctypes.c_uint),
        ("flags", ctypes.c_uint),
        ("handle", ctypes.c_char * 64),
    )


class Compiled:
    """A driver that only remembers."""

    def __init__(self, folder: Path, source: str) -> None:
        (folder / "driver.c").write_text(source)
        self.path = str(folder / "libdriver.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", self.path, str(folder / "driver.c")], check=True)
        library = ctypes.CDLL(self.path)
        self.last = Last.in_dll(library, "last")
        self._refuses = ctypes.c_int.in_dll(library, "refuses")

    def refuse(self, error: int) -> None:
        self._refuses.value = error


@pytest.fixture
def compiled(tmp_path: Path) -> Compiled:
    return Compiled(tmp_path, SOURCE)


HIGH = 2**47 + 4096
"""An address that does not fit into 32 bits, nor into 47."""


def queue_of(stream: int, compiled: Compiled) -> CudaQueue:
    return CudaQueue(cast(torch.cuda.Stream, SimpleNamespace(cuda_stream=stream)), CudaDriver(compiled.path))


def test_waits_and_writes_carry_whole_addresses_and_values(compiled: Compiled) -> None:
    last = compiled.last

    queue_of(HIGH, compiled).wait_value(HIGH + 8, 2**32 - 1)
    assert (last.stream, last.address, last.value, last.flags) == (HIGH, HIGH + 8, 2**32 - 1, 0)
    queue_of(HIGH + 1, compiled).write_value(HIGH + 16, 2**31)
    assert (last.stream, last.address, last.value, last.flags) == (HIGH + 1, HIGH + 16, 2**31, 0)


def test_a_copy_names_target_source_and_more_bytes_than_32_bits_hold(compiled: Compiled) -> None:
    queue_of(5, compiled).copy(HIGH, HIGH + 64, 2**33)

    last = compiled.last
    assert (last.stream, last.address, last.other, last.size) == (5, HIGH, HIGH + 64, 2**33)


def test_device_memory_is_made_exported_opened_and_given_back(compiled: Compiled) -> None:
    driver, last = CudaDriver(compiled.path), compiled.last

    assert driver.allocate(2**33) == 0x7F0000000000
    assert last.size == 2**33
    handle = driver.export(HIGH)
    assert handle == bytes(i if i % 3 else 0 for i in range(64))  # zeros in it do not end it
    assert driver.open_exported(handle) == 0x7E0000000000
    assert bytes(memoryview(last).cast("B"))[40:104] == handle
    assert last.flags == 1
    driver.close_exported(HIGH + 1)
    assert last.address == HIGH + 1
    driver.free(HIGH + 2)
    assert last.address == HIGH + 2


def test_host_memory_is_registered_for_all_devices(compiled: Compiled) -> None:
    driver, last = CudaDriver(compiled.path), compiled.last

    assert driver.register(HIGH, 2**33) == HIGH + 1
    assert (last.address, last.size, last.flags) == (HIGH, 2**33, 3)
    driver.unregister(HIGH)
    assert last.other == HIGH


@pytest.mark.parametrize(("error", "told"), [(1, r"invalid argument \(1\)"), (719, r"unknown error \(719\)")])
def test_a_refusal_is_told_in_the_drivers_words(compiled: Compiled, error: int, told: str) -> None:
    driver = CudaDriver(compiled.path)
    compiled.refuse(error)

    with pytest.raises(DriverError, match=f"cuMemcpyAsync: {told}"):
        queue_of(0, compiled).copy(1, 2, 3)
    with pytest.raises(DriverError, match=f"cuMemHostRegister_v2: {told}"):
        driver.register(HIGH, 4096)
