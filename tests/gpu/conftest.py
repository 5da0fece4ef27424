"""Kernels that give the same bits every time, for tests that compare runs exactly."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from harness.small_run import run, saved_inputs, workplace  # noqa: F401

from mobius.process.ranks import set_cuda_max_connections

set_cuda_max_connections()  # as a run does, before CUDA starts
# cuBLAS reads it when it starts; without it deterministic algorithms are refused.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _deterministic_kernels() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
