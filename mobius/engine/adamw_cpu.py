"""Builds and loads the C kernel of AdamW (adamw.c); without a C compiler, torch's update is used.

`cc` builds it once into a cache keyed by source, options and CPU. ctypes loads it and releases the GIL while it runs.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mobius.atomic_files import atomic_write
from mobius.engine.reduced_states import Bf16States, CompactStates, NoisePlace
from mobius.engine.stage_state import StageState
from mobius.engine.state_codec import GROUP, SplitMaster, StateCodec

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("adamw.c")
OPTIONS = (
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math"),  # lets sqrt be vectorized; changes no value
    "-ffp-contract=off",  # same bits on CPUs with and without fused multiply-add
)
WIDE_VECTORS = "-mprefer-vector-width=512"
"""Option where the CPU has AVX-512: compilers take half of its width by themselves."""


class _Constants(ctypes.Structure):
    """The `Constants` struct of adamw.c."""

    _fields_ = tuple(
        (name, ctypes.c_float)
        for name in (
            *("gradient_factor", "decay", "beta2", "one_minus_beta1", "one_minus_beta2"),
            *("step_size", "root_correction", "epsilon"),
        )
    )


class CPUAdamW:
    """The loaded kernel: one pass over CPU tensors, shared by `num_threads` OpenMP threads."""

    def __init__(self, library: Path, *, num_threads: int) -> None:
        """Load `library`. Raises OSError if it cannot be loaded."""
        self._library = ctypes.CDLL(str(library))
        self._num_threads = num_threads

    def supports(self, state: StageState) -> bool:
        """Whether a variant fits the state: on the host, all in fp32 or with a split master."""
        return state.weights.device.type == "cpu" and _function_name(state) is not None

    def update(
        self,
        state: StageState,
        part: slice,
        constants: Mapping[str, float],
        *,
        found_inf: Tensor | None = None,
        noise: NoisePlace | None = None,
    ) -> None:
        """Update master, working copy and moments of the elements in `part` in place; blocks until done.

        Requires `supports(state)`, and constants of `UpdateArguments`; changes nothing if `found_inf` (fp32 scalar on
        the host) is not 0. `noise` rounds states in a reduced format, of which `part` has whole groups.
        """
        if found_inf is not None and bool(found_inf):
            return
        name = _function_name(state)
        assert name is not None
        parts, count = state.codec.part_of(state.parts, part), part.stop - part.start
        rest = [parts[each] for each in sorted(parts, key=lambda each: not each.startswith("master"))]
        arrays = [state.weights[part], *rest, state.gradients[part]]
        assert all(array.is_contiguous() for array in arrays)
        assert count % GROUP == 0 or not state.codec.per_group, "groups are whole"
        self._library[name](
            ctypes.c_int64(count),
            *(ctypes.c_void_p(array.data_ptr()) for array in arrays),
            ctypes.byref(_Constants(**constants)),
            ctypes.c_int(self._num_threads),
            *(ctypes.c_uint32(number) for number in noise or ()),
        )


_FUNCTIONS = {SplitMaster: "split", Bf16States: "bf16_states", CompactStates: "compact"}


def _function_name(state: StageState) -> str | None:
    """Return the function of adamw.c for the format of `state` and the dtype of its gradients, if there is one."""
    kind = type(state.codec)  # not isinstance: a subclass stores something else
    if kind is StateCodec:
        return "mobius_adamw_fp32"
    gradient = "fp32" if state.gradients.dtype == torch.float32 else "bf16"
    return f"mobius_adamw_{_FUNCTIONS[kind]}_{gradient}" if kind in _FUNCTIONS else None


def load_adamw_cpu(cache: Path, *, num_threads: int) -> CPUAdamW | None:
    """Build the kernel into `cache`, if missing, and load it; on failure log the reason and return None."""
    compiler = shutil.which("cc")
    if compiler is None:
        logger.info("CPU AdamW uses torch, which is slower: there is no C compiler (`cc`) to build the fused kernel")
        return None
    library = cache / f"adamw-{_key()}.so"
    try:
        if not library.is_file():
            _build(compiler, library)
        return CPUAdamW(library, num_threads=num_threads)
    except (OSError, subprocess.CalledProcessError) as error:
        output = error.stderr.strip().splitlines() if isinstance(error, subprocess.CalledProcessError) else []
        reason = output[-1] if output else error  # a compiler killed by a signal printed nothing
        logger.info("CPU AdamW uses torch, which is slower: the fused kernel could not be built (%s)", reason)
        return None


def _build(compiler: str, library: Path) -> None:
    """Compile to a temporary name and rename: another rank may be building the same file."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(library, has_many_writers=True) as temporary:
        command = [compiler, *_options(), str(SOURCE), "-lm", "-o", str(temporary)]
        subprocess.run(command, check=True, capture_output=True, text=True)


def _cpu_flags() -> str:
    """Return what the CPU can do, in words of /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _options() -> list[str]:
    return [*OPTIONS, *([WIDE_VECTORS] if "avx512f" in _cpu_flags().split() else [])]


def _key() -> str:
    """Hash of everything the binary depends on; `-march=native` ties it to this CPU."""
    facts = [SOURCE.read_text(), *_options(), platform.machine(), _cpu_flags()]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]
