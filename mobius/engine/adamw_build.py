"""Compiles adamw.c for this machine's CPU, or, for a wheel, to one library for all instruction sets of a machine type.

This module needs only the standard library, because setup.py imports it without torch and numpy.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final, NamedTuple

SOURCE: Final = Path(__file__).with_name("adamw.c")
PACKAGED: Final = Path(__file__).with_name("libadamw.so")
"""Library of an installed wheel; a source checkout has none. The name `adamw.so` would hide adamw.py in imports."""

OPTIONS: Final = (
    *("-O3", "-fopenmp", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math"),  # let the compiler vectorize sqrt; no value changes
    "-ffp-contract=off",  # for equal bits on CPUs with and without fused multiply-add
)
WIDE_VECTORS: Final = "-mprefer-vector-width=512"
"""Option for CPUs with AVX-512: otherwise compilers use only half of the vector width."""


class InstructionSet(NamedTuple):
    """Instruction set for which one copy of the kernels in a wheel's library is compiled."""

    name: str
    """Last word in the names of this copy's functions."""
    cpu_flags: frozenset[str]
    """Flags of /proc/cpuinfo that a CPU must have to run the copy."""
    options: tuple[str, ...]
    """Options of the compiler."""


def _x86(name: str, *flags: str, more: tuple[str, ...] = ()) -> InstructionSet:
    return InstructionSet(name, frozenset(flags), (*("-m" + flag.replace("_", ".") for flag in flags), *more))


INSTRUCTION_SETS: Final[Mapping[str, tuple[InstructionSet, ...]]] = {
    "x86_64": (
        _x86("avx512", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "bmi2", more=(WIDE_VECTORS,)),
        _x86("avx2", "avx2", "bmi2"),
        _x86("sse4", "sse4_1"),
    ),
    "aarch64": (InstructionSet("neon", frozenset({"asimd"}), ()),),
}
"""Machine type -> instruction sets for which a wheel has kernels, the fastest first."""


def best_instruction_set(machine: str, cpu_flags: Collection[str]) -> str | None:
    """Return the fastest instruction set in a wheel's library that a CPU with `cpu_flags` can run, if any."""
    return next((each.name for each in INSTRUCTION_SETS.get(machine, ()) if each.cpu_flags <= set(cpu_flags)), None)


def native_options(cpu_flags: Collection[str]) -> list[str]:
    """Return the compiler options for the CPU of this machine."""
    return [*OPTIONS, "-march=native", "-shared", *([WIDE_VECTORS] if "avx512f" in cpu_flags else [])]


def build_native(compiler: str, library: Path, *, source: Path, cpu_flags: Collection[str]) -> None:
    """Compile for the CPU of this machine. Raises OSError and subprocess.CalledProcessError."""
    _run(compiler, *native_options(cpu_flags), str(source), "-lm", "-o", str(library))


def build_for_all(compiler: str, library: Path, *, machine: str) -> None:
    """Compile for every instruction set of `machine`, a key of INSTRUCTION_SETS. Raises as `build_native`.

    The library is not linked to an OpenMP library. It uses torch's OpenMP library, which is loaded before, because a
    machine without a compiler may have no other.
    """
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for name, _, options in INSTRUCTION_SETS[machine]:
            objects.append(f"{folder}/{name}.o")
            named = f"-DINSTRUCTION_SET=_{name}"
            _run(compiler, *OPTIONS, *options, named, "-c", str(SOURCE), "-o", objects[-1])
        _run(compiler, "-shared", "-s", *objects, "-lm", "-o", str(library))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
