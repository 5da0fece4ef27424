"""Builds and loads the C kernel of AdamW (adamw.c); without a C compiler there is none, and torch's update is used.

Built once with `cc` into a cache that is keyed by the source, the options and the CPU, and loaded through ctypes, which
lets go of Python's lock while the kernel runs.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from mobius.memory.stage_state import StageState

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("adamw.c")
OPTIONS = (
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math"),  # let sqrt be vectorized; they change no value
    "-ffp-contract=off",  # the same bits on CPUs with and without fused multiply-add
)


class _Constants(ctypes.Structure):
    """The struct of adamw.c."""

    _fields_ = tuple(
        (name, ctypes.c_float)
        for name in (
            *("gradient_factor", "decay", "beta1", "beta2", "one_minus_beta1", "one_minus_beta2"),
            *("step_size", "root_correction", "epsilon"),
        )
    )


class AdamWKernel:
    """The loaded kernel: one pass over CPU tensors, shared by `num_threads` OpenMP threads."""

    def __init__(self, library: Path, *, num_threads: int) -> None:
        """Load `library`. Raises OSError if it cannot be loaded."""
        self._library = ctypes.CDLL(str(library))
        self._num_threads = num_threads

    def supports(self, state: StageState) -> bool:
        """Whether there is a variant for such a state: on the host, gradients and working copy both fp32 or bf16."""
        dtype = state.weights.dtype
        is_uniform = state.gradients.dtype == dtype and dtype in (torch.float32, torch.bfloat16)
        return is_uniform and state.master.device.type == "cpu"

    def update(
        self,
        *,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        gradient: Tensor,
        weight: Tensor,
        gradient_factor: float,
        step: int,
        learning_rate: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
    ) -> None:
        """Update `master` (fp32) and the moments in place and round `weight` from it; blocks until it is done.

        All are contiguous CPU tensors of one length; `gradient` and `weight` have one dtype. In fp32 `weight` is
        `master`. `step` counts from 1.
        """
        constants = _Constants(
            gradient_factor=gradient_factor,
            decay=1.0 - learning_rate * weight_decay,
            beta1=beta1,
            beta2=beta2,
            one_minus_beta1=1.0 - beta1,
            one_minus_beta2=1.0 - beta2,
            step_size=learning_rate / (1.0 - beta1**step),
            root_correction=(1.0 - beta2**step) ** 0.5,
            epsilon=epsilon,
        )
        is_fp32 = gradient.dtype == torch.float32
        arrays = [master, exp_avg, exp_avg_sq, gradient, *([] if is_fp32 else [weight])]
        assert all(array.is_contiguous() and array.numel() == master.numel() for array in arrays)
        function = self._library.mobius_adamw_fp32 if is_fp32 else self._library.mobius_adamw_bf16
        function(
            ctypes.c_int64(master.numel()),
            *(ctypes.c_void_p(array.data_ptr()) for array in arrays),
            ctypes.byref(constants),
            ctypes.c_int(self._num_threads),
        )


def load_kernel(cache: Path, *, num_threads: int) -> AdamWKernel | None:
    """Build the kernel into `cache`, unless it is there, and load it; None, with a line that tells why, if it fails."""
    compiler = shutil.which("cc")
    if compiler is None:
        logger.info("CPU AdamW: torch's, which is slower: there is no C compiler (`cc`) to build the fused kernel with")
        return None
    library = cache / f"adamw-{_key()}.so"
    try:
        if not library.is_file():
            _build(compiler, library)
        return AdamWKernel(library, num_threads=num_threads)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr.strip().splitlines()[-1:] if isinstance(error, subprocess.CalledProcessError) else [error]
        logger.info("CPU AdamW: torch's, which is slower: the fused kernel could not be built (%s)", *reason)
        return None


def _build(compiler: str, library: Path) -> None:
    """Compile to a name of its own and rename: another rank may be building the same."""
    library.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=library.parent, suffix=".so")
    os.close(descriptor)
    try:
        command = [compiler, *OPTIONS, str(SOURCE), "-lm", "-o", temporary]
        subprocess.run(command, check=True, capture_output=True, text=True)
        Path(temporary).replace(library)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _key() -> str:
    """What the binary depends on: `-march=native` makes it this CPU's own."""
    flags = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))]
    facts = [SOURCE.read_text(), *OPTIONS, platform.machine(), *flags[:1]]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]
