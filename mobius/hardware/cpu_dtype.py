"""Chooses the number format of a run on CPUs: fp32 if the CPU has no instructions for the default.

A CPU without such instructions emulates bf16 or fp16; a step of a small model took thirty times as long. The choice
depends only on the CPU's flags, so all ranks and runs on a machine choose the same format.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from mobius.config.config import Config, Dtype, MatmulDtype, OptimizerStates
from mobius.hardware.devices import has_gpus
from mobius.process.ranks import Ranks, set_cuda_max_connections

logger = logging.getLogger(__name__)

DTYPE_CPU_FLAGS = {
    Dtype.BF16: frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    Dtype.FP16: frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}
"""Flags of x86 and Arm in /proc/cpuinfo; a CPU with one flag of a format has instructions for it."""


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Instruction flags that all CPUs of this machine have, from /proc/cpuinfo; empty if the file lists no flags.

    `root` is for tests.
    """
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    fields = (line.partition(":") for line in lines)
    found = [frozenset(value.split()) for name, _, value in fields if name.strip() in ("flags", "Features")]
    return frozenset.intersection(*found) if found else frozenset()


def resolve_dtype(config: Config, ranks: Ranks, *, given: Collection[str] | None) -> Config:
    """Return the config with the number format in which the run computes; it is unchanged on GPUs.

    Call it before anything else reads the format. `given` are the options that the user set; None means all options.
    Raises GpuMemoryError like `has_gpus`.
    """
    if config.model.dtype is Dtype.FP32:
        return config
    if config.pipeline.copy_messages:
        set_cuda_max_connections()  # before the query of CUDA devices, which may initialize CUDA
    if has_gpus(config.pipeline.device, ranks):
        return config
    return resolve_cpu_dtype(config, given=given, is_first=ranks.is_first)


def resolve_cpu_dtype(config: Config, *, given: Collection[str] | None, is_first: bool = True) -> Config:
    """Return the config with the number format of a run on CPUs.

    fp32 replaces the default if the CPU has no instructions for it. A format is kept, with a warning, if the user set
    it or if `--optimizer_states` or `--matmul_dtype` needs it. `is_first` is set on the rank that logs for all.
    """
    dtype = config.model.dtype
    if dtype is Dtype.FP32 or DTYPE_CPU_FLAGS[dtype] & cpu_flags():
        return config
    is_open = given is not None and "dtype" not in given
    needs_bf16 = (
        config.optim.optimizer_states is not OptimizerStates.FP32 or config.model.matmul_dtype is not MatmulDtype.BF16
    )
    if is_open and not needs_bf16:
        if is_first:
            logger.info("computing in fp32: this CPU has no instructions for %s (--dtype %s forces it)", dtype, dtype)
        return replace(config, model=replace(config.model, dtype=Dtype.FP32))
    if is_first:
        logger.warning(
            "--dtype %s: this CPU has no instructions for it, and computes some ten times slower than in fp32. "
            "--dtype fp32 is faster here.",
            dtype,
        )
    return config
