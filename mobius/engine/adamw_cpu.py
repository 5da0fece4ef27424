"""Loads the C kernel of AdamW (adamw.c). Without a wheel's library and without a C compiler, torch updates instead.

A wheel has the kernel for all instruction sets (adamw_build.py). Without a wheel, `cc` builds the kernel once into a
cache keyed by source, options and CPU. ctypes loads the library, and releases the GIL while a kernel runs.
"""

from __future__ import annotations

import copy
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

from mobius.engine.adamw_build import PACKAGED, SOURCE, best_instruction_set, build_native, native_options
from mobius.engine.reduced_states import Bf16States, CompactStates, NoisePlace
from mobius.engine.stage_state import StageState
from mobius.engine.state_codec import GROUP, SplitMaster, StateCodec
from mobius.files.atomic_files import atomic_write
from mobius.hardware.cpu_dtype import cpu_flags

logger = logging.getLogger(__name__)


class _Constants(ctypes.Structure):
    """Mirrors the struct `Constants` of adamw.c."""

    _fields_ = tuple(
        (name, ctypes.c_float)
        for name in (
            *("gradient_factor", "decay", "beta2", "one_minus_beta1", "one_minus_beta2"),
            *("step_size", "root_correction", "epsilon"),
        )
    )


class CPUAdamW:
    """The loaded kernel: makes one pass over CPU tensors with `num_threads` OpenMP threads."""

    def __init__(self, library: Path, *, num_threads: int, instruction_set: str | None = None) -> None:
        """Load `library`; use a wheel's functions for `instruction_set`. Raises OSError if loading fails."""
        self._library = ctypes.CDLL(str(library))
        self.num_threads = num_threads
        self._suffix = "" if instruction_set is None else f"_{instruction_set}"

    def with_threads(self, num_threads: int) -> CPUAdamW:
        """Return the same kernel with another number of threads."""
        other = copy.copy(self)
        other.num_threads = num_threads
        return other

    def supports(self, state: StageState) -> bool:
        """Whether the kernel supports the state: it must be on the host, all in fp32 or with a split master."""
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
        the host) is not 0. `noise` is for states in a reduced format; `part` then consists of whole groups.
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
        self._library[name + self._suffix](
            ctypes.c_int64(count),
            *(ctypes.c_void_p(array.data_ptr()) for array in arrays),
            ctypes.byref(_Constants(**constants)),
            ctypes.c_int(self.num_threads),
            *(ctypes.c_uint32(number) for number in noise or ()),
        )


_FUNCTIONS = {SplitMaster: "split", Bf16States: "bf16_states", CompactStates: "compact"}


def _function_name(state: StageState) -> str | None:
    """Return the name of adamw.c's function for the format of `state` and the dtype of its gradients, if any."""
    kind = type(state.codec)  # not isinstance: a subclass stores different data
    gradient = "fp32" if state.gradients.dtype == torch.float32 else "bf16"
    if kind is StateCodec:
        return "mobius_adamw_fp32" if gradient == "fp32" else None  # fp32 weights of a 16-bit run are few
    return f"mobius_adamw_{_FUNCTIONS[kind]}_{gradient}" if kind in _FUNCTIONS else None


def load_adamw_cpu(cache: Path, *, num_threads: int, packaged: Path = PACKAGED) -> CPUAdamW | None:
    """Load the kernel of the installed wheel; without a wheel, load it from `cache`, after building it if missing.

    On failure, logs the reason and returns None.
    """
    instruction_set = best_instruction_set(platform.machine(), cpu_flags())
    if packaged.is_file() and instruction_set is not None:
        try:
            kernel = CPUAdamW(packaged, num_threads=num_threads, instruction_set=instruction_set)
        except OSError as error:
            logger.info("CPU AdamW: the installed kernel cannot be loaded (%s)", error)
        else:
            logger.info("CPU AdamW uses the installed kernel for %s", instruction_set)
            return kernel
    return _load_built(cache, num_threads)


def _load_built(cache: Path, num_threads: int) -> CPUAdamW | None:
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
        reason = output[-1] if output else error  # the compiler prints nothing if a signal kills it
        logger.info("CPU AdamW uses torch, which is slower: the fused kernel could not be built (%s)", reason)
        return None


def _build(compiler: str, library: Path) -> None:
    """Compile to a temporary file, then rename it: another rank may be building the same library."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(library, has_many_writers=True) as temporary:
        build_native(compiler, temporary, source=SOURCE, cpu_flags=cpu_flags())


def _key() -> str:
    """Return a hash of everything on which the library depends; because of `-march=native`, this includes the CPU."""
    flags = cpu_flags()
    facts = [SOURCE.read_text(), *native_options(flags), platform.machine(), *sorted(flags)]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]
